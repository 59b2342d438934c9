"""The tokenizer of a model folder, and the Rust tokenizer inside of it, which is used wherever it does the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigurationError

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that add nothing to ``tokenizer.json``."""


def load_tokenizer(
    folder: Path, chat_template: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, tuple[int, ...]]:
    """The tokenizer of a prepared model folder and the end-of-turn ids of its ``generation_config.json``.

    Raises :class:`ConfigurationError` when the folder or the template file cannot be read.
    """
    try:
        tokenizer = _load(folder, trust_remote_code)
    except Exception as error:
        raise ConfigurationError(
            f"no tokenizer can be loaded from {folder}: {error}; prepare the model first (afterplay prepare FILE)"
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"model.chat_template: {chat_template} cannot be read: {error}") from error
    ends = json_of(folder / "generation_config.json").get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return tokenizer, tuple(end for end in ends if isinstance(end, int) and not isinstance(end, bool))


def _load(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' tokenizer. ``AutoTokenizer`` imports torch (4 s of CPU, 340 MB an actor), so a folder whose
    tokenizer is wholly its ``tokenizer.json`` is loaded without it."""
    kind = json_of(folder / "tokenizer_config.json").get("tokenizer_class")
    if kind in PLAIN and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)


def json_of(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def plain_backend(tokenizer: Any) -> Any | None:
    """The Rust tokenizer itself, where there is one: the same ids at a quarter of the cost, and no thread pool per
    call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "split_special_tokens", False):
        return None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


def plain_decoder(tokenizer: Any, backend: Any | None) -> Any | None:
    """The Rust tokenizer where the tokenizer decodes as transformers' own class does: the same text without a look at
    the type of every id, which is 0.22 instead of 0.88 ms for 1,000 tokens."""
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerFast as Plain

    kind = type(tokenizer)
    if not isinstance(tokenizer, Plain) or kind.decode is not Plain.decode or kind._decode is not Plain._decode:
        return None
    return backend
