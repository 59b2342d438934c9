#!/usr/bin/env python3
"""Writes the tables of docs/MODELS.md and docs/TEMPLATES.md from what models and chat templates do.

.venv/bin/python scripts/models_page.py

``tests/unit/models_trained/test_families.py`` and ``tests/unit/actors/test_said_in_prompt.py`` compare the pages.
"""

import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import transformers  # noqa: E402

from actors.rendering.renderer import Renderer  # noqa: E402
from actors.tools.parsing.registry import format_of_template  # noqa: E402
from pipeline.errors import ConfigurationError, PlugInError  # noqa: E402
from pipeline.schema import Message  # noqa: E402
from scripts.tables import update_tables  # noqa: E402
from tests.support.chat_templates import ends_of, published, tokenizer_of  # noqa: E402
from tests.support.families import (  # noqa: E402
    FAMILIES,
    check_adapters,
    check_engine,
    check_learning,
    check_publication,
    check_saving,
    write_family,
)

DOCS = ROOT / "docs"
FILLER = "</s>"
"""End token of the tokenizer that carries the templates; only some of them have it, too."""
WEATHER = {"name": "weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "000010000", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def parser_of_template(source: str, tokenizer: Any) -> str:
    """Name of the parser that ``auto`` takes, or that it takes none."""
    try:
        return f"`{format_of_template(source, tokenizer)}`"
    except ConfigurationError:
        return "refused"


def appended(renderer: Renderer) -> str:
    """The end tokens behind which a user's and a tool's answer can be appended."""
    tools = [{"type": "function", "function": WEATHER}]
    answers = [
        (Message("user", "Alpha"), None),
        (Message("tool", "Alpha", {"name": "weather", "tool_call_id": CALL["id"]}), CALL),
    ]
    try:
        first = renderer.start([Message("user", "Question")], tools)
        for end in renderer.end_ids:
            for new, call in answers:
                reply = Message("assistant", "", {"tool_calls": [call]}) if call else None
                ids = (*renderer.encode_text("Reply."), end)
                renderer.extend(first, ids, renderer.completed(ids), [new], parsed_reply=reply, append=True)
    except PlugInError as error:
        return str(error)
    ends = [renderer.decode_ids([end]) for end in renderer.end_ids]
    return ", ".join(f"`{end}`" for end in ends if end != FILLER or len(ends) == 1)


def row(name: str, source: str) -> list[str]:
    """Cells of a template's row."""
    tokenizer = tokenizer_of(name)
    try:
        renderer = Renderer(tokenizer, ends_of(name), name)
    except ConfigurationError:
        return [f"`{name}`", "refused: it leaves out the user's messages", *["-"] * 6]
    schemas, calls, answers = renderer.forms()
    return [
        f"`{name}`",
        "parts" if calls.parts else "text",
        "role" if calls.system else "user",
        "template" if schemas else "text",
        {"stated": "template", "apart": "apart", "text": "text"}[calls.calls],
        " / ".join("tool" if form.answers else "user" for form in (calls, answers)),
        parser_of_template(source, tokenizer),
        appended(renderer),
    ]


def outcomes(name: str, scratch: Path) -> Iterator[str]:
    """Cells of a family: whether the learner computes it, the form of its rows, and what else is done with it."""
    folder = write_family(name, scratch / "model")
    try:
        form = check_learning(folder)
    except Exception as error:
        yield from (f"fails: {type(error).__name__}", *["-"] * 5)
        return
    yield from ("yes", "packed" if form.packed else "padded")
    for number, check in enumerate((check_saving, check_publication, check_engine, check_adapters)):
        try:
            check(folder, scratch / str(number))
            yield "yes"
        except ConfigurationError as error:
            yield "no: " + re.sub(r"engine.kind: .*, which (.*): set .*|(learner.lora.targets).*", _reason, str(error))


def _reason(found: re.Match[str]) -> str:
    return found[1] or f"peft refuses a layer, name others in `{found[2]}`"


def architecture_of(model: Path) -> str:
    (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
    return str(architecture)


def registered() -> str:
    """Source of vLLM's registry of models; vLLM itself takes long to import."""
    (package,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr,misc]
    return (Path(package) / "model_executor" / "models" / "registry.py").read_text()


def families() -> Iterator[str]:
    columns = ("computes", "rows", "checkpoint", "published", "embedded engine", "adapters", "tool calls")
    yield f"| family | class in transformers | {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    registry, templates = registered(), published()
    for name, family in FAMILIES.items():
        with TemporaryDirectory() as scratch:
            cells = list(outcomes(name, Path(scratch)))
            architecture = architecture_of(Path(scratch) / "model")
        assert f'"{architecture}"' in registry, f"the page says that vLLM has every class, but not {architecture}"
        parser = "-" if family.template is None else row(family.template, templates[family.template])[-2]
        yield f"| {name} | `{architecture}` | {' | '.join(cells)} | {parser} |"


def templates() -> Iterator[str]:
    yield f"From trl {version('trl')} and mistral-common {version('mistral-common')}:"
    yield ""
    yield "| template | contents | system | tools | calls | answers | parser | `append` |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, source in sorted(published().items()):
        if not name.endswith("_training"):
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row(name, source)) + " |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    update_tables(DOCS / "MODELS.md", {"families": families()}, check=False)
    update_tables(DOCS / "TEMPLATES.md", {"templates": templates()}, check=False)
