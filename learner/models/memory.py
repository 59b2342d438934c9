"""Estimate of the GPU memory of learner and engines, from the shape of a dense decoder and the run file.

``afterplay plan`` prints it, and ``scripts/memory_page.py`` makes the table of docs/MEMORY.md with it. It counts
weights, optimizer, activations and logits; what it leaves out (CUDA itself, fragmentation, buffers of collectives) is
``MARGIN`` of a GPU's memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError

GIB = 2**30
MARGIN = 0.1
"""Share of a GPU's memory that an estimate must leave free."""
ENGINE_SHARE = 0.92
"""vLLM's own share of a GPU, where ``engine.gpu_memory_share`` is not set."""
ENGINE_WORK_BYTES = 2 * GIB
"""Activations and CUDA graphs of vLLM: an assumption."""
HUB_SECONDS_MAX = 5.0
TILE = 2**25
"""Logits that exist at once on a GPU: ``learner.policy.logprobs.TILE``."""
MOMENT_BYTES = {("adamw", "float32"): 8, ("adamw", "bfloat16"): 4, ("adamw_8bit", "float32"): 2}
"""Bytes of both moments of a trained weight, by ``learner.optimizer`` and ``optimizer_dtype``."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with full attention and a gated MLP, as Llama, Qwen2 and Qwen3 have it."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding."""

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer; norms and biases are left out."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def outer_parameters(self) -> int:
        """Embedding and output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def layer_token_bytes(self) -> int:
        """Tensors that autograd keeps of one token in one layer: autocast to bfloat16, residual stream in float32."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        return 26 * self.hidden + 8 * self.intermediate + 10 * query + 10 * key

    @property
    def cache_token_bytes(self) -> int:
        """Keys and values of one token in an engine's cache, in 16 bits."""
        return 4 * self.layers * self.kv_heads * self.head_size

    def adapter_parameters(self, rank: int) -> int:
        """Weights of adapters on every linear layer but the output layer."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        sides = 2 * (self.hidden + query) + 2 * (self.hidden + key) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * sides


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on each GPU of the learner at the peak of an update."""

    states: float
    """Weights, gradients and moments."""
    copies: float
    """Weights in the compute type, or gathered from the other ranks."""
    activations: float
    logits: float

    @property
    def parts(self) -> dict[str, float]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """The shape in a ``config.json``; None for one that the estimate does not know, such as experts."""
    config = config.get("text_config") or config
    experts = any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        shape = Shape(
            config["num_hidden_layers"], hidden, config["intermediate_size"], heads,
            config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads,
            config["vocab_size"], bool(config.get("tie_word_embeddings", True)),
        )  # fmt: skip
    except (KeyError, TypeError):
        return None
    return None if experts else shape


def learner_memory(shape: Shape, config: RunConfig, ranks: int | None = None) -> LearnerMemory:
    """Memory of one rank that computes in bfloat16, without critic and reference."""
    learner = config.learner
    ranks = ranks or learner.ranks
    lora = learner.lora.rank
    tokens = max(learner.tokens_per_microbatch, config.model.max_length)
    moments = MOMENT_BYTES[learner.optimizer, learner.optimizer_dtype]
    trained = shape.adapter_parameters(lora) if lora else shape.parameters
    frozen = shape.parameters * (2 if learner.lora.frozen_dtype == "bfloat16" else 4) if lora else 0
    keeps_casts = not lora or (learner.lora.frozen_dtype == "float32" and not learner.gradient_checkpointing)
    if ranks > 1:
        copies = 2 * 2 * shape.layer_parameters + (8 if not lora else 4) * shape.outer_parameters
    else:
        copies = 2 * shape.layers * shape.layer_parameters if keeps_casts else 0
    kept = shape.layers * shape.layer_token_bytes
    if learner.gradient_checkpointing:
        kept = shape.layers * 4 * shape.hidden + shape.layer_token_bytes
    head = (0 if lora else 4 * shape.vocabulary * shape.hidden) + 12 * min(TILE, tokens * shape.vocabulary)
    return LearnerMemory(
        (trained * (8 + moments) + frozen) / ranks, copies, tokens * kept, head + 10 * tokens * shape.hidden
    )


def engine_bytes(shape: Shape, tensor_parallel: int = 1) -> float:
    """Bytes on each GPU of a 16-bit engine before its cache."""
    return 2 * shape.parameters / tensor_parallel + ENGINE_WORK_BYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    sentences: tuple[str, ...]
    problems: tuple[str, ...] = ()
    """Sentences about parts that do not fit, with the changes that help most."""


def estimate(config: RunConfig, gpu_bytes: int | None, *, learner: bool = True, engine: bool = True) -> Estimate:
    """Memory of a run on GPUs of ``gpu_bytes`` (None: unknown), of the roles that are on GPUs there."""
    try:
        shape = shape_of(json.loads(_config_text(config)))
    except (ConfigurationError, OSError, ValueError) as error:
        return Estimate((f"GPU memory is not estimated: {error}",))
    if shape is None:
        return Estimate(("GPU memory is not estimated: the formula knows dense decoders only (docs/MEMORY.md)",))
    rank = learner_memory(shape, config)
    split = ", ".join(f"{name} {value / GIB:.1f}" for name, value in rank.parts.items())
    tensor_parallel = config.placement.tensor_parallel
    weights, cache = engine_bytes(shape, tensor_parallel), shape.cache_token_bytes / tensor_parallel
    sentence = (
        f"estimated GPU memory: learner {rank.total / GIB:.1f} GiB on each of {config.learner.ranks} ({split}); "
        f"engine {weights / GIB:.1f} GiB and {1000 * cache / GIB:.2f} GiB for each 1,000 tokens in its cache"
    )
    if gpu_bytes is None:
        return Estimate((sentence,))
    problems, split_share = [], config.engine.memory_share if config.engine.colocate == "split" else None
    room = gpu_bytes * (1 - MARGIN if split_share is None or not engine else 1 - MARGIN / 2 - split_share)
    if learner and rank.total > room:
        problems.append(_learner_problem(shape, config, rank, room))
    left = gpu_bytes * (config.engine.memory_share or ENGINE_SHARE) - weights
    if engine and config.engine.kind == "vllm":
        rollouts = int(left / cache / config.model.max_length)
        if rollouts < 1:
            problems.append(_engine_problem(shape, config, weights, left + weights))
        else:
            sentence += f", which has room for {rollouts:,} rollouts of {config.model.max_length:,} tokens"
    return Estimate((sentence,), tuple(problems))


def _learner_problem(shape: Shape, config: RunConfig, rank: LearnerMemory, room: float) -> str:
    largest = max(rank.parts, key=rank.parts.__getitem__)
    helpful = sorted(_remedies(shape, config, room), key=lambda change: change[1])[:3]
    words = ", ".join(f"{change} ({total / GIB:.1f} GiB)" for change, total in helpful)
    return (
        f"the learner needs an estimated {rank.total / GIB:.1f} GiB on each of its {config.learner.ranks} GPUs, and "
        f"may use {room / GIB:.1f}; its {largest} need {rank.parts[largest] / GIB:.1f}. The changes that help most, "
        f"each alone: {words}"
    )


def _remedies(shape: Shape, config: RunConfig, room: float) -> Iterator[tuple[str, float]]:
    """Changes of the run file, and the memory of a rank with each of them."""
    learner, lora = config.learner, config.learner.lora
    changes: dict[str, dict[str, Any]] = {
        "learner.gradient_checkpointing: true": {"gradient_checkpointing": True},
        "learner.optimizer_dtype: bfloat16": {"optimizer_dtype": "bfloat16"} if learner.optimizer == "adamw" else {},
        f"learner.tokens_per_microbatch: {config.model.max_length}": {
            "tokens_per_microbatch": min(learner.tokens_per_microbatch, config.model.max_length)
        },
    }
    if lora.rank:
        changes["learner.lora.frozen_dtype: bfloat16"] = {"lora": lora.model_copy(update={"frozen_dtype": "bfloat16"})}
    else:
        adapters = lora.model_copy(update={"rank": 16, "frozen_dtype": "bfloat16"})
        changes["learner.lora: {rank: 16, frozen_dtype: bfloat16}"] = {"lora": adapters}
    before = learner_memory(shape, config).total
    for words, values in changes.items():
        total = learner_memory(shape, config.updated(learner=values)).total
        if total < before:
            yield words, total
    alone = config.engine.colocate != "none" or learner.optimizer == "adamw_8bit"
    counts = [n for n in (2, 4, 8, 16, 32, 64) if n > learner.ranks and not alone]
    totals = {n: learner_memory(shape, config, n).total for n in counts}
    ranks = next((n for n in counts if totals[n] <= room), None)
    if ranks is not None:
        key = "learner.ranks" if config.placement.learner_gpus is None else "placement.learner_gpus"
        yield f"{key}: {ranks}", totals[ranks]


def _engine_problem(shape: Shape, config: RunConfig, weights: float, usable: float) -> str:
    row = shape.cache_token_bytes * config.model.max_length
    sizes = [n for n in (1, 2, 4, 8) if n > config.placement.tensor_parallel and shape.heads % n == 0]
    fitting = [n for n in sizes if engine_bytes(shape, n) + row / n <= usable]
    remedy = f"set placement.tensor_parallel to {fitting[0]}" if fitting else "take a smaller model or larger GPUs"
    if config.engine.memory_share is not None:
        remedy += ", or raise engine.gpu_memory_share"
    return (
        f"an engine needs an estimated {weights / GIB:.1f} GiB on each of its GPUs and "
        f"{row / config.placement.tensor_parallel / GIB:.1f} GiB for a single rollout of model.max_length tokens, and "
        f"vLLM may use {usable / GIB:.1f}: {remedy}, or lower model.max_length"
    )


def _config_text(config: RunConfig) -> str:
    """``config.json`` of the model: of this machine, or else of the hub."""
    from learner.models.prepare import model_folder

    source, folder = config.model.source, model_folder(config)
    if folder is not None:
        return (Path(folder) / "config.json").read_text()
    if source == "tiny" or source.startswith("package:"):
        raise ConfigurationError(f"the model {source} is made when the run starts")
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    try:
        request = Request(hf_hub_url(source, "config.json"), headers=build_hf_headers())
        with urlopen(request, timeout=HUB_SECONDS_MAX) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise ConfigurationError(f"config.json of {source} cannot be read from the hub ({error})") from error
