"""Estimate of the GPU memory of learner and engines, from the shape of a dense decoder and the run file.

``afterplay plan`` prints it, and ``scripts/memory_page.py`` makes the table of docs/MEMORY.md with it. It counts
weights, optimizer, activations and logits; what it leaves out (CUDA itself, fragmentation, buffers of collectives) is
``MARGIN`` of a GPU's memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError

GIB = 2**30
MARGIN = 0.1
"""Share of a GPU's memory that an estimate must leave free."""
ENGINE_WORK_BYTES = 2 * GIB
"""Activations and CUDA graphs of vLLM: an assumption."""
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
    def total(self) -> float:
        return self.states + self.copies + self.activations + self.logits


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


def memory_sentences(config: RunConfig) -> list[str]:
    """The estimate for a run on GPUs, where the shape of its model is on this machine; otherwise nothing."""
    from learner.models.prepare import model_folder

    try:
        folder = model_folder(config)
        shape = shape_of(json.loads((Path(folder) / "config.json").read_text())) if folder else None
    except (ConfigurationError, OSError, ValueError):
        return []
    if shape is None:
        return []
    learner = learner_memory(shape, config)
    parts = {"states": learner.states, "copies": learner.copies, "activations": learner.activations}
    split = ", ".join(f"{name} {value / GIB:.1f}" for name, value in (parts | {"logits": learner.logits}).items())
    engine = engine_bytes(shape, config.placement.tensor_parallel) / GIB
    cache = 1000 * shape.cache_token_bytes / config.placement.tensor_parallel / GIB
    return [
        f"estimated GPU memory: learner {learner.total / GIB:.1f} GiB on each of {config.learner.ranks} ({split}); "
        f"engine {engine:.1f} GiB and {cache:.2f} GiB for each 1,000 tokens in its cache"
    ]
