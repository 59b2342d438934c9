"""Estimate of the GPU memory of learner and engines, from the ``config.json`` of a model and the run file.

:func:`footprint` reads sizes from a forward pass over tensors without memory (``FakeTensorMode`` of PyTorch): which
tensors autograd keeps of a token, and which copies of weights. :func:`learner_memory` adds them up. What they leave out
(CUDA itself, fragmentation) is ``MARGIN`` of a GPU's memory. ``afterplay plan`` prints the estimate, and
``scripts/memory_page.py`` makes the tables of docs/MEMORY.md with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from learner.data.microbatch import lay_out
from learner.policy.activations import keep_little
from learner.policy.attention import NAME, packed_inputs, window_of
from learner.policy.experts import use_compute_type
from learner.policy.logprobs import TILE
from learner.policy.policy import DTYPES, DtypeName, layers_of
from learner.policy.row_form import capped, unsupported
from pipeline.config import RunConfig
from pipeline.config.learner import LoraConfig
from pipeline.errors import ConfigurationError

GIB = 2**30
MARGIN = 0.1
"""Share of a GPU's memory that an estimate must leave free."""
ENGINE_SHARE = 0.92
"""vLLM's own share of a GPU, where ``engine.gpu_memory_share`` is not set."""
ENGINE_WORK_BYTES = 2 * GIB
"""Activations and CUDA graphs of vLLM: an assumption."""
ENGINE_SIZES = (1, 2, 4, 8)
"""GPUs among which an engine divides a copy of the model."""
HUB_SECONDS_MAX = 5.0
WORK_BYTES = 10
"""Bytes of a value of the MLP's product in its backward pass: activation, product, and the gradients of both factors
and of the product."""
MOMENT_BYTES = {("adamw", "float32"): 8, ("adamw", "bfloat16"): 4, ("adamw_8bit", "float32"): 2}
"""Bytes of both moments of a trained weight, by ``learner.optimizer`` and ``optimizer_dtype``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer that computes in bfloat16."""

    weights: int
    trained: int
    """Trained weights: all, or those of adapters."""
    token_bytes: float
    """Tensors that autograd keeps of a token."""
    work_bytes: int
    """Most that the backward pass of the layer holds of a token besides: gradients, and what it computes again."""
    copies: float
    """Bytes of the copies of weights that autograd keeps."""
    cache_bytes: int
    """Keys and values of a token in an engine's cache, in 16 bits."""
    window: int | None
    """Tokens of a sequence that the cache holds at most; None: all."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model, without its vision tower where it has one."""

    layers: tuple[Layer, ...]
    hidden: int
    embedding_weights: int
    head_weights: int
    """Weights of an output layer of its own; 0: it is the embedding."""
    other_weights: int
    """Outside of the layers: norms."""
    heads: int
    """Heads of the queries: an engine divides them evenly among its GPUs."""
    key_heads: int
    """Heads of keys and values, of which each GPU of an engine has whole ones; 1: a latent, which every GPU has."""

    @property
    def outer_weights(self) -> int:
        return self.embedding_weights + self.head_weights + self.other_weights

    @property
    def weights(self) -> int:
        return sum(layer.weights for layer in self.layers) + self.outer_weights

    def cache_bytes(self, tokens: int, tensor_parallel: int = 1) -> float:
        """Cache of one sequence of ``tokens`` on each GPU of an engine."""
        whole = sum(layer.cache_bytes * min(tokens, layer.window or tokens) for layer in self.layers)
        return whole / min(tensor_parallel, self.key_heads)


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on each GPU of the learner at the peak of an update."""

    states: float
    """Weights, gradients and moments."""
    copies: float
    """Weights in the compute type, or gathered from the other ranks, and their gradients before they are reduced."""
    activations: float
    logits: float

    @property
    def parts(self) -> dict[str, float]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def footprint(raw: Mapping[str, Any], row_tokens: int, lora: LoraConfig | None = None) -> Footprint:
    """Sizes of the model with the ``config.json`` ``raw``, which learns from rows of ``row_tokens``; ``lora``: by
    adapters. Takes a second, once. Raises :class:`ConfigurationError` for a model that transformers does not know or
    that cannot be traced."""
    kept = {key: value for key, value in raw.items() if key != "quantization_config"}
    return _footprint_of(json.dumps(kept), row_tokens, lora)


@cache
def _footprint_of(text: str, row_tokens: int, lora: LoraConfig | None) -> Footprint:
    kind = str(json.loads(text).get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ConfigurationError(f"transformers does not know the model_type {kind}")
    try:
        with NamedTemporaryFile("w", suffix=".json") as file:
            file.write(text)
            file.flush()
            config = CONFIG_MAPPING[kind].from_json_file(file.name)
        return _footprint(config.get_text_config(), row_tokens, lora)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"a model of the type {kind} cannot be traced ({reason})") from error


def _footprint(config: Any, row_tokens: int, lora: LoraConfig | None) -> Footprint:
    whole = _without_memory(config)
    layers, types = layers_of(whole), getattr(config, "layer_types", None)
    kinds = [
        (types and types[i], tuple((name, p.shape) for name, p in layer.named_parameters()))
        for i, layer in enumerate(layers)
    ]
    # one layer more, and the last of each kind: the first one also keeps what all layers share
    count = min(len(kinds), 2 + max(kinds.index(kind) for kind in kinds))
    examples = {kind: i for i, kind in enumerate(kinds[:count])}
    traced = _traced(_shortened(config, count), row_tokens, lora)
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings().weight.numel()
    own_head = 0 if head.weight is whole.get_input_embeddings().weight else head.weight.numel()
    inner = sum(p.numel() for layer in layers for p in layer.parameters())
    total = sum(p.numel() for p in whole.parameters())
    each = config.per_layer_config
    heads = math.gcd(*(getattr(one, "num_attention_heads", None) or 0 for one in each)) or ENGINE_SIZES[-1]
    key_heads = min(getattr(one, "num_key_value_heads", None) or heads for one in each)
    return Footprint(
        tuple(traced[examples[kind]] for kind in kinds),
        config.hidden_size,
        embedding,
        own_head,
        total - inner - embedding - own_head,
        heads,
        1 if getattr(config, "kv_lora_rank", None) else key_heads,
    )


def _without_memory(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _shortened(config: Any, count: int) -> Any:
    """``config`` of a model with the first ``count`` layers only."""
    config, before = deepcopy(config), config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    return config


def _traced(config: Any, row_tokens: int, lora: LoraConfig | None) -> list[Layer]:
    """The layers of a model, by two forward passes: of one row, and of two."""
    model = _without_memory(config)
    base = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    if lora is not None:
        from learner.policy.lora import Adapters  # peft takes seconds to import

        Adapters(model, lora)
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(DTYPES[lora.frozen_dtype])
    use_compute_type(model)
    keep_little(model)
    written_out = capped(model) or any(name.endswith("sinks") for name, _ in model.named_parameters())
    packed = unsupported(model) is None and not written_out
    model.set_attn_implementation(NAME if packed else "eager" if written_out else "sdpa")
    layers = layers_of(model)
    trained = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
    with FakeTensorMode(allow_non_fake_inputs=True):
        _on_cpu(model)
        one, two = (_kept(model, rows, row_tokens, packed=packed) for rows in (1, 2))
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(base)
    return [
        Layer(
            base[i],
            trained[i],
            (two[i] - one[i]) / row_tokens,
            WORK_BYTES * max(m.in_features for m in layers[i].modules() if isinstance(m, torch.nn.Linear)),
            max(0, 2 * one[i] - two[i]),
            _cache_bytes(config.per_layer_config[i], types[i]),
            window_of(config, i),
        )
        for i in range(len(base))
    ]


def _on_cpu(model: torch.nn.Module) -> None:
    """Move the weights of ``model`` from the meta device to one that autocast knows; within a ``FakeTensorMode``."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(_moved(weight), weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _moved(buffer)


def _moved(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _cache_bytes(config: Any, kind: str) -> int:
    if not kind.endswith("attention") or kind.startswith("linear"):
        return 0  # a state of constant size
    if latent := getattr(config, "kv_lora_rank", None):
        return int(2 * (latent + config.qk_rope_head_dim))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(4 * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * size)


def _kept(model: Any, rows: int, row_tokens: int, *, packed: bool) -> list[int]:
    """Bytes that autograd keeps of a forward pass, but for weights, by the layer that first keeps them."""
    layers = layers_of(model)
    kept, current = [0] * len(layers), -1
    seen = {p.untyped_storage()._cdata for p in model.parameters()}
    alive = []

    def enter(i: int) -> Any:
        def hook(*_: Any) -> None:
            nonlocal current
            current = i

        return hook

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and current >= 0:
            seen.add(storage._cdata)
            kept[current] += storage.nbytes()
        alive.append(storage)  # an address that is free again would be seen twice
        return tensor

    hooks = [layer.register_forward_pre_hook(enter(i)) for i, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(enter(-1)) for layer in layers]
    if packed:  # as one row: on a GPU one call of attention does all rows
        tokens = rows * row_tokens
        inputs = packed_inputs(lay_out([np.zeros(tokens + 1, np.int32)], tokens), torch.device("cpu"), varlen=False)
    else:
        inputs = {"input_ids": torch.zeros((rows, row_tokens), dtype=torch.long), "use_cache": False}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        model.base_model(**inputs)
    for hook in hooks:
        hook.remove()
    return kept


def learner_memory(
    model: Footprint, config: RunConfig, ranks: int | None = None, tile: int = TILE["cuda"]
) -> LearnerMemory:
    """Memory of one of ``ranks`` (else ``learner.ranks``), without critic and reference, of several micro-batches an
    update."""
    learner = config.learner
    ranks, lora, checkpointing = ranks or learner.ranks, learner.lora.rank, learner.gradient_checkpointing
    shards, context = shards_of(ranks, config), learner.context_ranks
    tokens = max(learner.tokens_per_microbatch, math.ceil(config.model.max_length / context))
    moments = MOMENT_BYTES[learner.optimizer, learner.optimizer_dtype]
    trained = sum(layer.trained for layer in model.layers) + (0 if lora else model.outer_weights)
    frozen = model.weights * (2 if learner.lora.frozen_dtype == "bfloat16" else 4) if lora else 0
    largest = max(layer.weights for layer in model.layers)
    work = max(layer.work_bytes for layer in model.layers)
    repeated = math.lcm(model.key_heads, context) // model.key_heads - 1  # key heads, so that every rank has some
    token_bytes = [layer.token_bytes + repeated * layer.cache_bytes for layer in model.layers]
    deepest = max(kept + layer.work_bytes for kept, layer in zip(token_bytes, model.layers, strict=True))
    kept = sum(token_bytes)
    one_copy = max(layer.copies for layer in model.layers)
    vocabulary = model.embedding_weights // model.hidden
    logits = 10 * min(tile, tokens * vocabulary) + 10 * tokens * model.hidden
    if ranks > 1:
        # gathered in the compute type, one layer ahead; a gradient, and its float32 form for the reduction
        head: float = (4 if lora else 6) * model.head_weights + 2 * largest  # the buffer of the gather lives on
        copies: float = (4 if lora else 10) * largest
        if not model.head_weights:  # the embedding, whole in float32 for the time of a pass
            head += (4 if lora else 8) * model.embedding_weights
            copies += (4 if lora else 8) * model.embedding_weights
    else:
        logits += 0 if lora else 4 * model.embedding_weights
        head = copies = one_copy if lora and checkpointing else sum(layer.copies for layer in model.layers)
    states = (trained * (8 + moments) + frozen) / shards
    inputs = tokens * kept
    if checkpointing:
        inputs = 2 * tokens * model.hidden * (1 if checkpointing == "offload" else len(model.layers))
        peaks = [
            LearnerMemory(states, copies, inputs, 0),  # autocast holds its copies to the end of the forward pass
            LearnerMemory(states, head if ranks > 1 else 0, inputs, logits),
            LearnerMemory(states, copies if ranks > 1 else one_copy, inputs + tokens * deepest, 0),
        ]
    else:
        peaks = [
            LearnerMemory(states, max(head, copies), inputs, logits),
            LearnerMemory(states, copies, inputs + tokens * work, 0),
        ]
    if ranks > 1:  # the embedding as it is gathered, and the gradient of the output layer as it is reduced
        size = 2 if lora and learner.lora.frozen_dtype == "bfloat16" else 4
        reduced = 0 if lora else (8 + 4 / shards) * model.head_weights
        peaks += [
            LearnerMemory(states, 2 * size * model.embedding_weights, 0, 0),
            LearnerMemory(states, reduced, inputs, 10 * tokens * model.hidden),
        ]
    return max(peaks, key=lambda peak: peak.total)


def shards_of(ranks: int, config: RunConfig) -> int:
    """Ranks that divide one copy of the model."""
    return max(1, ranks // config.learner.replicas)


def whole_groups(config: RunConfig) -> int:
    """Every number of ranks is a multiple of this one."""
    return config.learner.replicas * config.learner.context_ranks


def engine_bytes(model: Footprint, tensor_parallel: int = 1) -> float:
    """Bytes on each GPU of a 16-bit engine before its cache."""
    return 2 * model.weights / tensor_parallel + ENGINE_WORK_BYTES


def _engine_room(model: Footprint, config: RunConfig, tensor_parallel: int, gpu_bytes: int) -> float:
    """Rollouts of ``model.max_length`` tokens for which the cache of an engine has room; it needs 1."""
    left = gpu_bytes * (config.engine.memory_share or ENGINE_SHARE) - engine_bytes(model, tensor_parallel)
    return left / max(1, model.cache_bytes(config.model.max_length, tensor_parallel))


def _learner_room(config: RunConfig, gpu_bytes: int, *, engine: bool = True) -> float:
    """Bytes of a GPU that a rank may use; ``engine``: one is on the GPUs."""
    split = config.engine.memory_share if engine and config.engine.colocate == "split" else None
    return gpu_bytes * (1 - MARGIN if split is None else 1 - MARGIN / 2 - split)


def fitting_sizes(config: RunConfig, gpu_bytes: int, ranks_max: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Numbers of ranks, up to ``ranks_max``, and of GPUs of a copy of the model, both ascending, with which learner and
    engine fit GPUs of ``gpu_bytes``. None: the model is unknown."""
    try:
        model = _model(config)
    except (ConfigurationError, OSError, ValueError):
        return None
    room, whole = _learner_room(config, gpu_bytes), whole_groups(config)
    counts = range(whole, ranks_max + 1, whole)
    ranks = tuple(n for n in counts if learner_memory(model, config, n).total <= room)
    sizes = _sizes(model) if config.engine.kind == "vllm" else (1,)
    fitting = (n for n in sizes if config.engine.kind != "vllm" or _engine_room(model, config, n, gpu_bytes) >= 1)
    return ranks, tuple(fitting)


def _sizes(model: Footprint) -> tuple[int, ...]:
    """GPUs among which vLLM can divide a copy of the model."""
    return tuple(n for n in ENGINE_SIZES if model.heads % n == 0)


def _model(config: RunConfig) -> Footprint:
    """The model of a run file. Raises :class:`ConfigurationError`, :class:`OSError` or :class:`ValueError`."""
    lora = config.learner.lora
    return footprint(json.loads(_config_text(config)), config.model.max_length, lora if lora.rank else None)


def host_memory(model: Footprint, config: RunConfig) -> dict[str, float]:
    """Bytes of the learner's host memory by use, each at its largest: of every rank the copy that a checkpoint is
    written from, without critic, and of rank 0 two published versions, the one that engines have and the
    next; with ``learner.offload`` of the one rank what makes room for the engine, and of the engine that sleeps."""
    learner, publish, lora, engine = config.learner, config.publish, config.learner.lora, config.engine
    trained = sum(layer.trained for layer in model.layers) + (0 if lora.rank else model.outer_weights)
    moments = MOMENT_BYTES[learner.optimizer, learner.optimizer_dtype] * trained
    image = (4 * model.weights + (moments if config.checkpoint.optimizer else 0)) / shards_of(learner.ranks, config)
    published = 2 * trained if publish.served_name else model.weights * DTYPES[_published(config)].itemsize
    found = {
        "checkpoint": image + (4 * trained if lora.rank else 0),
        "publication": 0 if engine.weight_transfer == "nccl" and config.checkpoint.at_end else 2 * published,
    }
    if learner.offload:
        found["offload"] = (
            4 * trained + moments + (model.weights * DTYPES[lora.frozen_dtype].itemsize if lora.rank else 0)
        )
    if engine.colocate == "sleep" and engine.sleep_level == 1:
        found["sleeping engine"] = 2 * model.weights
    return found


def _published(config: RunConfig) -> DtypeName:
    """Type of published weights of a learner on a GPU."""
    if config.publish.dtype != "auto":
        return config.publish.dtype
    return "bfloat16" if config.learner.compute_dtype == "auto" else config.learner.compute_dtype


@dataclass(frozen=True, slots=True)
class Estimate:
    sentences: tuple[str, ...]
    problems: tuple[str, ...] = ()
    """Sentences about parts that do not fit, with the changes that help most."""


def estimate(
    config: RunConfig, gpu_bytes: int | None, *, learner: bool = True, engine: bool = True, buffers: int = 0
) -> Estimate:
    """Memory of a run on GPUs of ``gpu_bytes`` (None: unknown), of the roles that are on GPUs there, and of the host,
    where the other processes have ``buffers``."""
    length = config.model.max_length
    try:
        model = _model(config)
    except (ConfigurationError, OSError, ValueError) as error:
        return Estimate((f"GPU memory is not estimated: {error}",))
    rank = learner_memory(model, config)
    split = ", ".join(f"{name} {value / GIB:.1f}" for name, value in rank.parts.items())
    size = config.placement.gpus_per_copy
    weights, rollout = engine_bytes(model, size), model.cache_bytes(length, size)
    ranks, replicas = config.learner.ranks, config.learner.replicas
    mesh = f"{ranks}, {replicas} replicas of {shards_of(ranks, config)} shards" if replicas > 1 else str(ranks)
    sentence = (
        f"estimated GPU memory: learner {rank.total / GIB:.1f} GiB on each of {mesh} ({split}); "
        f"engine {weights / GIB:.1f} GiB and {rollout / GIB:.2f} GiB for each rollout of {length:,} tokens in its cache"
    )
    uses = host_memory(model, config)
    host = (
        f"estimated host memory: learner, rank 0 {sum(uses.values()) / GIB:.1f} GiB "
        f"({', '.join(f'{use} {n / GIB:.1f}' for use, n in uses.items())})"
        + (f", each other rank {uses['checkpoint'] / GIB:.1f}" if config.learner.ranks > 1 else "")
        + f"; buffers of the other processes {buffers / GIB:.1f} GiB; libraries and page cache come on top"
    )
    if gpu_bytes is None:
        return Estimate((sentence, host))
    problems, room = [], _learner_room(config, gpu_bytes, engine=engine)
    if learner and rank.total > room:
        problems.append(_learner_problem(model, config, rank, room))
    if engine and config.engine.kind == "vllm":
        rollouts = _engine_room(model, config, size, gpu_bytes)
        if rollouts < 1:
            problems.append(_engine_problem(model, config, gpu_bytes))
        else:
            sentence += f", which has room for {int(rollouts):,} of them"
    return Estimate((sentence, host), tuple(problems))


def _learner_problem(model: Footprint, config: RunConfig, rank: LearnerMemory, room: float) -> str:
    largest = max(rank.parts, key=rank.parts.__getitem__)
    helpful = sorted(_remedies(model, config, room), key=lambda change: change[1])[:3]
    words = ", ".join(f"{change} ({total / GIB:.1f} GiB)" for change, total in helpful)
    return (
        f"the learner needs an estimated {rank.total / GIB:.1f} GiB on each of its {config.learner.ranks} GPUs, and "
        f"may use {room / GIB:.1f}; its {largest} need {rank.parts[largest] / GIB:.1f}. The changes that help most, "
        f"each alone: {words}"
    )


def _remedies(model: Footprint, config: RunConfig, room: float) -> Iterator[tuple[str, float]]:
    """Changes of the run file, and the memory of a rank with each of them."""
    learner, lora = config.learner, config.learner.lora
    more: bool | str = "offload" if learner.gradient_checkpointing else True
    changes: dict[str, dict[str, Any]] = {
        f"learner.gradient_checkpointing: {more}".lower(): {"gradient_checkpointing": more},
        "learner.optimizer_dtype: bfloat16": {"optimizer_dtype": "bfloat16"} if learner.optimizer == "adamw" else {},
        f"learner.tokens_per_microbatch: {config.model.max_length}": {
            "tokens_per_microbatch": min(learner.tokens_per_microbatch, config.model.max_length)
        },
    }
    parts = [n for n in range(2, learner.ranks + 1) if learner.ranks % n == 0 and model.heads % n == 0]
    if parts and parts[-1] > learner.context_ranks:
        changes[f"learner.context_ranks: {parts[-1]}"] = {"context_ranks": parts[-1]}
    adapters = lora.model_copy(update={"rank": lora.rank or 16, "frozen_dtype": "bfloat16"})
    small = f"learner.lora: {{rank: {adapters.rank}, frozen_dtype: bfloat16}}"
    changes[small] = {"lora": adapters}
    before = learner_memory(model, config).total
    for words, values in changes.items():
        changed = config.updated(learner=values)
        total = learner_memory(_model(changed), changed).total
        if total < before:
            yield words, total
    alone = config.engine.colocate != "none" or learner.optimizer == "adamw_8bit"
    whole = whole_groups(config)
    counts = [n for n in (2, 4, 8, 16, 32, 64) if n > learner.ranks and n % whole == 0 and not alone]
    totals = {n: learner_memory(model, config, n).total for n in counts}
    if learner.replicas > 1:
        fewer = config.updated(learner={"replicas": 1})
        yield "learner.replicas: 1", learner_memory(model, fewer).total
    ranks = next((n for n in counts if totals[n] <= room), None)
    if ranks is not None:
        key = "learner.ranks" if config.placement.learner_gpus is None else "placement.learner_gpus"
        yield f"{key}: {ranks}", totals[ranks]


def _engine_problem(model: Footprint, config: RunConfig, gpu_bytes: int) -> str:
    size, usable = config.placement.gpus_per_copy, gpu_bytes * (config.engine.memory_share or ENGINE_SHARE)
    fitting = [n for n in _sizes(model) if n > size and _engine_room(model, config, n, gpu_bytes) >= 1]
    remedy = f"set placement.tensor_parallel to {fitting[0]}" if fitting else "take a smaller model or larger GPUs"
    if config.engine.memory_share is not None:
        remedy += ", or raise engine.gpu_memory_share"
    return (
        f"an engine needs an estimated {engine_bytes(model, size) / GIB:.1f} GiB on each of its GPUs and "
        f"{model.cache_bytes(config.model.max_length, size) / GIB:.1f} GiB for a single rollout of model.max_length "
        f"tokens, and vLLM may use {usable / GIB:.1f}: {remedy}, or lower model.max_length"
    )


def _config_text(config: RunConfig) -> str:
    """``config.json`` of the model: of this machine, or else of the hub."""
    from learner.models.prepare import model_folder

    source, folder = config.model.source, model_folder(config)
    if folder is not None:
        return (Path(folder) / "config.json").read_text()
    if source == "tiny" or source.startswith("package:"):
        raise ConfigurationError(f"the model {source} is made when the run starts")
    return _hub_text(source)


@cache
def _hub_text(source: str) -> str:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    try:
        request = Request(hf_hub_url(source, "config.json"), headers=build_hf_headers())
        with urlopen(request, timeout=HUB_SECONDS_MAX) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise ConfigurationError(f"config.json of {source} cannot be read from the hub ({error})") from error
