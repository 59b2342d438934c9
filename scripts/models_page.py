#!/usr/bin/env python3
"""Writes the tables of docs/MODELS.md and docs/TEMPLATES.md from what models and chat templates do.

.venv/bin/python scripts/models_page.py          writes the tables
.venv/bin/python scripts/models_page.py --check  only compares, exit code 1 when the page is not current
"""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from actors.rendering.renderer import Renderer  # noqa: E402
from actors.tools.parsing.registry import format_of_template  # noqa: E402
from learner.policy.policy import Backbone  # noqa: E402
from pipeline.config.learner import LearnerConfig  # noqa: E402
from pipeline.errors import ConfigurationError, PlugInError  # noqa: E402
from pipeline.schema import Message  # noqa: E402
from scripts.tables import update_tables  # noqa: E402
from tests.support.chat_templates import ends_of, published, tokenizer_of  # noqa: E402

DOCS = ROOT / "docs"
SMALL = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
HEADS = {"head_dim": 8}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SmolLM2": ("LlamaConfig", "smollm2", HEADS),
    "Llama 3.1, 3.2": ("LlamaConfig", "llama3_1", HEADS),
    "Qwen2.5": ("Qwen2Config", "qwen2_5", {}),
    "Qwen3": ("Qwen3Config", "qwen3", HEADS),
    "Qwen3 (experts)": ("Qwen3MoeConfig", "qwen3", HEADS | EXPERTS),
    "Qwen3.5": ("Qwen3_5TextConfig", "qwen3_5_think", HEADS),
    "Mistral 7B 0.3": ("MistralConfig", "mistral_v3", HEADS | {"sliding_window": None}),
    "Ministral 3": ("Ministral3Config", "mistral_v13", HEADS),
    "Gemma 2": ("Gemma2Config", "gemma", HEADS),
    "Gemma 3": ("Gemma3TextConfig", "gemma3", HEADS),
    "Gemma 4": ("Gemma4TextConfig", "gemma4", HEADS),
    "Phi-3.5": ("Phi3Config", "phi3_5", {"sliding_window": 128}),
    "Granite 3": ("GraniteConfig", "granite3", {}),
    "GLM-4.5 (experts)": ("Glm4MoeConfig", "glm4moe", HEADS | EXPERTS),
    "gpt-oss (experts)": ("GptOssConfig", "gptoss", HEADS | EXPERTS),
    "DeepSeek V3 (experts)": ("DeepseekV3Config", "deepseekv3", EXPERTS | LATENT),
    "Command R": ("CohereConfig", "cohere", {}),
    "Command R7B": ("Cohere2Config", "cohere2", HEADS),
    "LFM2": ("Lfm2Config", "lfm2_v2", {"layer_types": ["conv", "full_attention"]}),
    "Nemotron 3": ("NemotronHConfig", "nemotron_3_nano", HEADS | EXPERTS),
}
"""Configuration in transformers, template, and options of a small model."""
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


def built(config: str, options: dict[str, Any]) -> tuple[str, str, str]:
    """Class of a small random model; whether the learner computes it forward and backward; the form of its rows."""
    made = getattr(transformers, config)(**SMALL | options)
    model = transformers.AutoModelForCausalLM.from_config(made)
    try:
        learner = LearnerConfig(compute_dtype="float32", device="cpu")
        form = Backbone(model, learner, torch.device("cpu")).form
        model(input_ids=torch.arange(3, 19)[None], use_cache=False).logits.sum().backward()
    except Exception as error:
        return type(model).__name__, f"fails: {type(error).__name__}", "-"
    return type(model).__name__, "yes", "packed" if form.packed else "padded"


def registered() -> str:
    """Source of vLLM's registry of models; vLLM itself takes long to import."""
    (package,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr,misc]
    return (Path(package) / "model_executor" / "models" / "registry.py").read_text()


def families() -> Iterator[str]:
    yield "| family | class in transformers | computes (random weights) | rows | tool calls |"
    yield "|---|---|---|---|---|"
    registry, templates = registered(), published()
    for name, (config, template, options) in FAMILIES.items():
        architecture, learner, rows = built(config, options)
        assert f'"{architecture}"' in registry, f"the page says that vLLM has every class, but not {architecture}"
        parser = row(template, templates[template])[-2]
        yield f"| {name} | `{architecture}` | {learner} | {rows} | {parser} |"


def templates() -> Iterator[str]:
    yield f"From trl {version('trl')} and mistral-common {version('mistral-common')}:"
    yield ""
    yield "| template | contents | system | tools | calls | answers | parser | `append` |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, source in sorted(published().items()):
        if not name.endswith("_training"):
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row(name, source)) + " |"


def main(*arguments: str) -> int:
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    check = "--check" in arguments
    stale = [
        update_tables(DOCS / "MODELS.md", {"families": families()}, check=check),
        update_tables(DOCS / "TEMPLATES.md", {"templates": templates()}, check=check),
    ]
    return max(stale)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
