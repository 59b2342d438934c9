"""Manifest of a prepared model folder, and the check that a folder can be used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import read_json

MANIFEST = "afterplay_model.json"
"""Written last into a prepared folder: what it was made from. Its presence means that the folder is complete."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A prepared model folder."""

    path: Path
    source: str
    """``model.source`` of the run file."""
    request: dict[str, Any]
    """Everything of the run file that decides what the folder holds."""
    architecture: str
    """Class name in transformers, for example ``LlamaForCausalLM``."""
    parameters: int
    """Stored numbers; tied embeddings count once."""
    vocabulary_size: int
    """Token ids that the model accepts: 0 to vocabulary_size - 1."""
    max_position: int
    """Longest sequence that the architecture supports, tokens."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion."""

    def save(self) -> None:
        """Write the manifest into the folder."""
        fields = asdict(self)
        del fields["path"]
        (self.path / MANIFEST).write_text(json.dumps(fields, indent=1, sort_keys=True))

    @classmethod
    def load(cls, path: Path) -> ModelInfo:
        """Read a prepared folder. Raises :class:`ConfigurationError` when ``path`` is none."""
        manifest = path / MANIFEST
        try:
            fields = json.loads(manifest.read_text())
            fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
            return cls(path=path, **fields)
        except FileNotFoundError:
            raise ConfigurationError(
                f"expected a prepared model in {path} (with {MANIFEST}), found none: "
                "run 'python -m learner.models.prepare FILE' "
                "with the run file, or 'afterplay run FILE', which does it first"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{manifest} is not a model manifest ({error}): delete {path} to prepare it again"
            ) from error


def request_of(config: RunConfig) -> dict[str, Any]:
    """Options of the run file that decide the folder's content, as JSON."""
    model = config.model
    template = None
    if model.chat_template is not None:
        try:
            template = Path(model.chat_template).expanduser().read_text()
        except OSError as error:
            raise ConfigurationError(
                f"model.chat_template: cannot read {model.chat_template}: {error.strerror}"
            ) from error
    tiny: dict[str, Any] = json.loads(json.dumps(model.tiny)) if model.source == "tiny" else {}
    return {"source": model.source, "tiny": tiny, "chat_template": template}


def max_position(facts: Mapping[str, Any]) -> int | None:
    """Longest sequence of a model with this ``config.json``, tokens; None where it sets no bound.

    With LongRoPE the length before it was extended: beyond it transformers scales all rows of a pass by the longest
    one, and vLLM every row, so that learner and engine would disagree about short ones.
    """
    facts = facts.get("text_config") or facts
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    most = facts.get("max_position_embeddings") or facts.get("n_positions")  # the latter: GPT-2 and its like
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        most = rope.get("original_max_position_embeddings") or facts.get("original_max_position_embeddings") or most
    return most if isinstance(most, int) and most > 0 else None


def require_plain_weights(folder: Path, key: str) -> None:
    """Raise :class:`ConfigurationError`, which names the ``key`` of the run file, for a model of quantised weights:
    what is trained would be their codes, without the scales beside them."""
    facts = read_json(folder / "config.json") or {}
    found = facts.get("quantization_config") or (facts.get("text_config") or {}).get("quantization_config")
    if found:
        raise ConfigurationError(
            f"{key}: expected weights of 16 or 32 bits in {folder}, got quantised ones "
            f"({dict(found).get('quant_method', 'unknown method')}), which cannot be trained: take the model as it was "
            "before, or load it once with dequantize=True in its quantization_config and save that"
        )


def inspect_folder(path: Path, source: str, request: dict[str, Any], trust_remote_code: bool) -> ModelInfo:
    """Load configuration and tokenizer as the engines will and count the weights.

    Raises :class:`ConfigurationError` naming the missing or unusable part.
    """
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ConfigurationError(f"model.source {source!r}: expected *.safetensors files, found none in what it names")
    require_plain_weights(path, f"model.source {source!r}")
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ConfigurationError(f"model.source {source!r}: transformers cannot load it: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"model.source {source!r}: its tokenizer has no chat template; name a Jinja file with model.chat_template"
        )
    parameters = 0
    try:
        for file in weights:
            with safe_open(file, framework="np") as tensors:
                parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except Exception as error:
        raise ConfigurationError(
            f"model.source {source!r}: {file.name} is not a readable safetensors file: {error}"
        ) from error
    eos = tokenizer.eos_token_id
    if (path / "generation_config.json").exists():
        configured = GenerationConfig.from_pretrained(path).eos_token_id
        eos = configured if configured is not None else eos
    eos_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),))
    if not eos_ids:
        raise ConfigurationError(
            f"model.source {source!r}: neither generation_config.json nor the tokenizer names an end token"
        )
    return ModelInfo(
        path=path,
        source=source,
        request=request,
        architecture=(model_config.architectures or ["?"])[0],
        parameters=parameters,
        vocabulary_size=int(model_config.vocab_size),
        max_position=max_position(model_config.to_dict()) or 1_048_576,
        eos_token_ids=eos_ids,
    )


def require_same_tokenizer(reference: Path, policy: Path, *, trust_remote_code: bool) -> None:
    """Raise :class:`ConfigurationError` unless every token of the tokenizer in the folder ``policy`` has the same id in
    that of ``reference``. Blocks while both are read."""
    from transformers import AutoTokenizer

    if not (reference / "config.json").is_file():
        raise ConfigurationError(f"learner.reference.folder: expected a model folder with config.json, got {reference}")
    require_plain_weights(reference, "learner.reference.folder")
    try:
        theirs, own = (
            AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code).get_vocab()
            for folder in (reference, policy)
        )
    except Exception as error:
        raise ConfigurationError(
            f"learner.reference.folder: transformers cannot load the tokenizer in {reference}: {error}"
        ) from error
    other = [token for token, number in own.items() if theirs.get(token) != number]
    if other:
        raise ConfigurationError(
            f"learner.reference.folder: expected a model with the policy's tokenizer, but {len(other)} tokens of the "
            f"policy, {other[0]!r} among them, have another id or none in {reference}: name a model of the same family"
        )
