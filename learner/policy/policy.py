"""The model being trained: float32 master weights, autocast forward pass, log-probs of sampled tokens only.

:class:`Backbone` is a transformer on a device, :class:`Policy` one with an output layer and adapters.
Dimensions: B rows, T padded length, S sampled tokens of a micro-batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers.conversion_mapping import get_model_conversion_mapping

from learner.data.microbatch import Form, MicroBatch, PassCost, collate, plan_rows, token_offsets
from learner.data.rows import Row, TokenArray
from learner.distributed.ranks import ALONE, IDLE, Interrupt, Ranks, on_device
from learner.models.model_folder import is_empty
from learner.observability.timing import Stopwatch
from learner.policy.activations import keep_little
from learner.policy.attention import heads_of, packed_inputs, packs_by_varlen, window_of
from learner.policy.experts import use_compute_type
from learner.policy.logprobs import Head, sampled_logprobs
from learner.policy.routers import Routers, found_routers
from learner.policy.row_form import choose_form
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError, Interrupted
from pipeline.runtime.processor import fast_dtype
from pipeline.runtime.stored_names import Group, written_groups

if TYPE_CHECKING:
    from learner.policy.lora import Adapters

log = logging.getLogger(__name__)
DtypeName = Literal["bfloat16", "float32", "float16"]
DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Scorer = Callable[[MicroBatch], tuple[Tensor, ...]]
"""Float ``[S]`` tensors of one micro-batch."""
PEAK_TERAFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
}
"""Data sheets: bfloat16, dense, by the first name here that a device's name contains."""


def pass_cost(model: Any) -> PassCost:
    """Operations of the matrix products, of attention and of recurrent states. Of experts those count that a token is
    sent to."""
    config = model.config.get_text_config()
    output = model.get_output_embeddings()
    modules = list(model.get_decoder().modules())  # no tower of images or sounds, which text does not pass
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    active = float((getattr(config, "num_experts_per_tok", None) or experts) / experts)
    weights = 0.0
    for module in modules:
        if isinstance(module, torch.nn.Embedding) or module is output:
            continue
        for name, p in module.named_parameters(recurse=False):
            if p.ndim > 1:
                is_expert = (p.ndim > 2 and not isinstance(module, torch.nn.Conv1d)) or "expert" in name
                weights += p.numel() * (active if is_expert else 1.0)
    pairs, states = Counter[int | None](), sum(map(_state_operations, modules))
    sizes = heads_of(config)
    for module in modules:
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx"):
            heads, size = sizes[module.layer_idx]
            widths = getattr(module, "qk_head_dim", size) + getattr(module, "v_head_dim", size)
            pairs[window_of(config, module.layer_idx)] += 2 * heads * widths  # a key's score, and its value's share
    if not pairs and not states:  # a model whose attention looks unlike that of others
        pairs[None] = 4 * getattr(config, "num_hidden_layers", 0) * getattr(config, "hidden_size", 0)
    full = pairs.pop(None, 0)
    return PassCost(
        token=max(1, int(2 * weights) + states),
        pair=full,
        windows=tuple((window, count) for window, count in pairs.items() if window is not None),
        sampled=0 if output is None else 2 * output.weight.numel(),
        backward=2 if all(p.requires_grad for p in model.parameters()) else 1,
    )


def _state_operations(layer: Any) -> int:
    """Operations of a recurrent state for a token; 0: the layer has none. A gated delta net (arXiv:2412.06464, equation
    10) reads its state twice and adds to it, Mamba (arXiv:2405.21060, equation 1) once."""
    if (keys := getattr(layer, "head_k_dim", None)) and (values := getattr(layer, "head_v_dim", None)):
        return 6 * int(layer.num_v_heads * keys * values)
    states = int(getattr(layer, "ssm_state_size", None) or 0)
    return 4 * states * int(layer.intermediate_size) if states else 0


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second of a chip's dense matrix products in 16 bits; None for a CPU, for other types, and for a
    chip that is not in the table."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(chip: str) -> float | None:
    """
    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA A100-SXM4-40GB"), peak_of("Tesla K80")
    (989000000000000.0, 312000000000000.0, None)
    """
    return next((1e12 * teraflops for name, teraflops in PEAK_TERAFLOPS.items() if name in chip), None)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The longest list of modules: the decoder layers of every architecture in transformers."""
    return max((list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len, default=[])


class Backbone:
    """``model`` without dropout on ``device``, its weights in ``dtype``, in eval mode (but see :meth:`eval_mode`). An
    empty one (:meth:`learner.models.model_folder.ModelFolder.empty`) is to be divided and then filled.

    ``interrupt`` is looked at before each layer, forward and backward: when set, the pass raises :class:`Interrupted`
    within a layer's time. Several models may share one. Several ranks look at it between micro-batches only, together
    (``Ranks.agree``): one that gives up within a layer would leave the others in their collectives.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        device: torch.device,
        interrupt: Interrupt | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model.to(dtype=dtype) if is_empty(model) else model.to(device=device, dtype=dtype)
        self.root: torch.nn.Module = self.model
        """The model, or the module around it where its weights are divided."""
        _without_dropout(self.model)
        use_compute_type(self.model)
        self.device = device
        self.interrupt = interrupt or Interrupt()
        self.on_layer: Callable[[], None] = lambda: None
        """Called after each layer, forward and backward: a pass makes progress."""
        self.ranks: Ranks = ALONE
        """The ranks that the weights are divided among."""
        self._run: Callable[[Callable[[], Any]], Any] = lambda work: work()
        self._run_head: Callable[[Callable[[Tensor], Any], Tensor], Any] = lambda work, hidden: work(hidden)
        self._config = config
        self.compute_dtype = compute_dtype(config, device)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        keep_little(self.model)
        for layer in self.layers:
            layer.register_forward_hook(self._watch)
        self._varlen = packs_by_varlen(self.model, self.device, self.compute_dtype)
        form = choose_form(self.model, config, self.device, self._autocast(), self.compute_dtype, varlen=self._varlen)
        self.form = replace(form, cost=pass_cost(self.model))
        """Form of the rows that :meth:`hidden` takes."""
        self.peak_flops = peak_flops(device, self.compute_dtype)
        self.routers: Routers | None = None
        """Routers of a policy that is a mixture of experts."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Trained parameters."""
        return [parameter for _, parameter in self.named_parameters]

    @property
    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Last hidden state at each position whose output predicts a sampled token, the one before it, ``[S, H]``, in
        the compute type; of a divided ``batch`` at this rank's positions. With gradient where gradients are enabled."""
        hidden_SH: Tensor = self._run(lambda: self._hidden(batch))
        return hidden_SH

    def token_pass(
        self, rows: Sequence[Row], score: Scorer, n_outputs: int, watch: Stopwatch
    ) -> tuple[TokenArray, ...]:
        """Outputs of ``score`` for all sampled tokens of ``rows``, in order, without gradient, float32 ``[S]`` each.
        Ranks divide the rows; each gets the whole result."""
        parts = self.microbatches(rows, watch)
        outputs = np.zeros((n_outputs, sum(row.n_sampled for row in rows)), dtype=np.float32)
        found, places = [], []
        with torch.no_grad(), watch.phase("forward"):
            for part in parts:
                self.ranks.agree()
                values = score(part or self.idle_part())
                if part is not None and part.counted:
                    found.append(torch.stack([value.float() for value in values]))
                    places.append(part.token_index_S)
            if found:
                outputs[:, np.concatenate(places)] = torch.cat(found, dim=1).cpu().numpy()
        watch.operations += self.ranks.summed([sum(part.operations for part in parts if part is not None)])[0]
        return self.ranks.merged(tuple(outputs))

    def microbatches(
        self,
        rows: Sequence[Row],
        watch: Stopwatch,
        weights: Sequence[float] | None = None,
        offsets: Sequence[int] | None = None,
    ) -> list[MicroBatch | None]:
        """Micro-batches of this rank of at most ``learner.tokens_per_microbatch``; None: one without rows, because
        another rank has more. ``weights`` (else 0) and ``offsets`` (else those in ``rows``) of each row are as
        :func:`learner.data.microbatch.collate` takes them. Several ranks wait for each other in each layer, so they
        compute costly ones first. Collective."""
        with watch.phase("prepare"):
            if weights is None:
                weights = [0.0] * len(rows)
            if offsets is None:
                offsets = token_offsets(rows).tolist()
            tokens_max, context = self._config.tokens_per_microbatch, self.ranks.context
            together, alone = self.ranks.mine(rows, self.form, tokens_max)
            whole = {i: self.ranks.whole_row(rows[i]) for i in (*together, *alone)}

            def planned(mine: list[int], form: Form, tokens_max: int) -> list[MicroBatch]:
                plans = [[mine[i] for i in p] for p in plan_rows([whole[i] for i in mine], tokens_max, form)]
                parts = [
                    collate([whole[i] for i in p], [weights[i] for i in p], [offsets[i] for i in p], form=form)
                    for p in plans
                ]
                if self.ranks.size > 1:
                    parts.sort(key=lambda part: -part.operations)
                return parts

            parts = planned(alone, self.form, tokens_max)
            if context is not None:
                divided = planned(together, self.form.of_context, tokens_max * context.size)
                parts = [part.of_context(context.rank) for part in divided] + parts
            return self.ranks.padded(parts)

    def whole(self, batch: MicroBatch, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Outputs ``[S]`` of all sampled tokens, from those of the tokens that this rank predicts."""
        if not batch.divided:
            return outputs
        own_s = on_device(self._own(batch), self.device)
        assert self.ranks.context is not None
        return self.ranks.context.gathered(outputs, own_s, batch.n_sampled)

    def _own(self, batch: MicroBatch) -> npt.NDArray[np.int64]:
        assert self.ranks.context is not None
        return self.ranks.context.own(batch.predictors_S, batch.n_padded)

    def idle_part(self) -> MicroBatch:
        """See :data:`learner.distributed.ranks.IDLE`."""
        return collate([IDLE], [0.0], [0], form=self.form)

    def eval_mode(self) -> None:
        """Back to eval mode. With gradient checkpointing a pass with gradient leaves the model in train mode: there
        alone transformers makes checkpoints, and the backward pass must find the same mode. Generation in train mode
        would lose its cache and go wrong."""
        self.model.eval()

    def divided(
        self,
        ranks: Ranks,
        root: torch.nn.Module,
        run: Callable[[Callable[[], Any]], Any],
        run_head: Callable[[Callable[[Tensor], Any], Tensor], Any] | None,
    ) -> None:
        """The weights are shards from now on. ``root`` is the module around the model whose ``run`` makes those outside
        of the layers whole while work reads them; ``run_head`` those of the output layer alone, for work on hidden
        states (None: ``run`` makes them whole)."""
        self.ranks, self.root, self._run = ranks, root, run
        if run_head is not None:
            self._run_head = run_head

    @property
    def layers(self) -> list[torch.nn.Module]:
        return layers_of(self.model)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        self.model.train(bool(self._config.gradient_checkpointing) and torch.is_grad_enabled())
        predictors_S, context = batch.predictors_S, self.ranks.context if batch.divided else None
        if context is not None:
            part = context.part(batch.n_padded)
            predictors_S = predictors_S[self._own(batch)] - part.start
            batch = replace(batch, experts_NLK=None if batch.experts_NLK is None else batch.experts_NLK[part])
        if batch.layout is not None:
            inputs = packed_inputs(batch.layout, self.device, varlen=self._varlen, context=context)
        else:
            tokens = on_device(batch.token_ids_BT, self.device)
            inputs = {"input_ids": tokens, "use_cache": False}
        place = partial(on_device, device=self.device)
        routing = nullcontext() if self.routers is None else self.routers.passing(batch, place, context)
        with routing, self._autocast(), self._offloaded():
            hidden_BTH = self.model.base_model(**inputs).last_hidden_state
            predictors = on_device(predictors_S, self.device)
            hidden_SH: Tensor = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).index_select(0, predictors)
        return hidden_SH

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _offloaded(self) -> AbstractContextManager[Any]:
        """Context of a pass whose tensors outside of the layers, and the inputs of the layers, go to host memory."""
        if self._config.gradient_checkpointing != "offload":
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def _watch(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._after_layer()
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._after_layer)  # type: ignore[no-untyped-call]

    def _after_layer(self, gradient: Tensor | None = None) -> None:
        self.on_layer()
        if self.ranks.size == 1 and self.interrupt.is_set():
            raise Interrupted


def compute_dtype(config: LearnerConfig, device: torch.device) -> torch.dtype:
    """Type of the passes on ``device``: ``learner.compute_dtype``."""
    name: Literal["auto"] | DtypeName = config.compute_dtype
    if name == "auto":
        frozen = config.lora.frozen_dtype if config.lora.rank else "float32"
        name = fast_dtype() if device.type == "cpu" and frozen == "float32" else "bfloat16"
        log.info("learner.compute_dtype: auto is %s on this machine", name)
    return DTYPES[name]


def _without_dropout(model: torch.nn.Module) -> None:
    """The engine samples without dropout, so π is defined without it, in train mode too: layers of dropout, and
    probabilities that a module hands to the function."""
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and name.endswith(("dropout", "dropout_prob", "pdrop")):
                setattr(module, name, 0.0)


def _require_plain_head(model: Any) -> None:
    """Raise :class:`ConfigurationError` for weights between the hidden states and the output layer."""
    applied = {id(p) for part in (model.base_model, model.get_output_embeddings()) for p in part.parameters()}
    if others := [name for name, p in model.named_parameters() if id(p) not in applied]:
        raise ConfigurationError(
            f"model.source: expected a model whose logits are those of one output layer, got {type(model).__name__}, "
            f"which has {others[0]} before it: take another model"
        )


class Policy(Backbone):
    """A causal language model that scores sampled tokens.

    With ``config.lora.rank`` only adapters are trained; ``adapter_folder`` holds those to resume from. Raises
    :class:`ConfigurationError` for a model whose output layer is more than one matrix.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        device: torch.device,
        interrupt: Interrupt | None = None,
        dtype: torch.dtype = torch.float32,
        adapter_folder: Path | None = None,
    ) -> None:
        _require_plain_head(model)
        self.adapters: Adapters | None = None
        if config.lora.rank:
            from learner.policy.lora import Adapters  # peft takes seconds to import

            self.adapters = Adapters(model, config.lora, adapter_folder)
        super().__init__(model, config, device, interrupt, dtype)
        if config.lora.rank:
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(DTYPES[config.lora.frozen_dtype])
        self.routers = found_routers(model, config)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The initial weights, while the block runs."""
        if self.adapters is None:
            raise ConfigurationError("expected a policy with adapters (learner.lora.rank), got one without")
        with self.adapters.disabled():
            yield

    def score(self, batch: MicroBatch, hidden_SH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log π of the sampled tokens and the entropy there, nats, float32 ``[S]`` each. ``hidden_SH``: of
        :meth:`hidden`, where it was called before.

        Only positions that predict a sampled token pass the output layer. With gradient where gradients are enabled.
        """
        scores: tuple[Tensor, Tensor] = self._run(lambda: self._score(batch, hidden_SH))
        return scores

    def score_rows(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> tuple[TokenArray, ...]:
        """log π and entropy of all sampled tokens of ``rows`` with the current weights; see :meth:`token_pass`."""
        with self.ranks.together("score", rows):
            return self.token_pass(rows, self.score, 2, watch or Stopwatch(self.device))

    def _score(self, batch: MicroBatch, hidden_SH: Tensor | None) -> tuple[Tensor, Tensor]:
        targets_S, temperatures_S = batch.targets_S, batch.temperatures_S
        if batch.divided:
            own = self._own(batch)
            targets_S, temperatures_S = targets_S[own], temperatures_S[own]

        def work(hidden_SH: Tensor) -> tuple[Tensor, ...]:
            scores = sampled_logprobs(
                hidden_SH,
                self._head(),
                on_device(targets_S, self.device),
                None if bool((temperatures_S == 1).all()) else on_device(temperatures_S, self.device),
                compute_dtype=self.compute_dtype,
            )
            # within the output layer's forward, so that FSDP gathers weights in one order, divided or not
            return self.whole(batch, scores)

        scores: tuple[Tensor, Tensor] = self._run_head(work, self.hidden(batch) if hidden_SH is None else hidden_SH)
        return scores

    def weights(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """All weights in ``dtype``, one after another, on the device, by the names that they have in files; tied
        weights once. Adapters are added to the weights they belong to. The weights of experts are parts of one that the
        model has (:mod:`pipeline.runtime.stored_names`).

        With several ranks one weight at a time is made whole, and only rank 0 gets it. A weight that has the type
        already is the trained one itself. The ranks work together until the iterator has ended or is closed.
        """
        return self._weights(dtype, copies=False)

    def description(self, dtype: DtypeName) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and shape of what :meth:`weights` gives, in its order. Not a collective."""
        entries, found = self._entries(), []
        for group in self._groups(entries):
            kinds = {name: self._kind(name, entries[name], dtype) for name in group.names}
            empty = {name: torch.empty(entries[name].shape, dtype=kind, device="meta") for name, kind in kinds.items()}
            found += [(name, t.dtype, tuple(t.shape)) for name, t in group.converted(empty, self.model).items()]
        return found

    def snapshot(self, dtype: DtypeName) -> dict[str, Tensor]:
        """Copies of all :meth:`weights` on the CPU; with several ranks only rank 0 has them."""
        return {name: tensor.cpu().contiguous() for name, tensor in self._weights(dtype, copies=True)}

    def shards(self, dtype: DtypeName) -> dict[str, Tensor]:
        """Copies on the CPU of this rank's shards of all weights in ``dtype``, and of what is not divided, by the names
        of a model without adapters, tied ones once. Adapters are added. All ranks must call it."""
        parts = {self._public(n): self._part(n, tensor, dtype, copies=True) for n, tensor in self._entries().items()}
        return {
            name: (part.redistribute(placements=[Shard(0)]) if isinstance(part, DTensor) else part).cpu().contiguous()
            for name, part in parts.items()
        }

    def _weights(self, dtype: DtypeName, *, copies: bool) -> Iterator[tuple[str, Tensor]]:
        wanted = self.ranks.rank == 0
        with self.ranks.together("snapshot", facts={"dtype": dtype}):
            entries = self._entries()
            for group in self._groups(entries):
                tensors = {
                    name: self.ranks.whole(self._part(name, entries[name], dtype, copies=copies))
                    for name in group.names
                }
                if wanted:
                    try:
                        yield from group.converted(tensors, self.model).items()
                    except GeneratorExit:
                        if self.ranks.size == 1:
                            raise
                        wanted = False  # the other ranks make every weight whole all the same

    def _kind(self, name: str, tensor: Tensor, dtype: DtypeName) -> torch.dtype:
        """Type of a published weight. What transformers keeps in float32 (the bias that chooses experts) keeps it."""
        kept = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        return DTYPES[dtype] if tensor.is_floating_point() and not any(n in name for n in kept) else tensor.dtype

    def _part(self, name: str, tensor: Tensor, dtype: DtypeName, *, copies: bool) -> Tensor:
        """A published weight, of a divided one this rank's shard, on the device; with ``copies`` not a trained one on
        the CPU itself."""
        kind = self._kind(name, tensor, dtype)
        # cast on the device, and before the gather: a copy that also casts would move the float32 values
        return self._merged(name, tensor).detach().to(kind, copy=copies and tensor.device.type == "cpu")

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self.adapters is None else self.adapters.merged(name, tensor)

    def _public(self, name: str) -> str:
        return name if self.adapters is None else self.adapters.merged_name(name)

    def _groups(self, entries: Mapping[str, Tensor]) -> list[Group]:
        """The weights as they become weights of files."""
        public = {self._public(name): name for name in entries}
        groups = written_groups(self.model, public, get_model_conversion_mapping)
        return [replace(group, names=tuple(public[name] for name in group.names)) for group in groups]

    def _entries(self) -> dict[str, Tensor]:
        """The weights as they are trained, each once."""
        tied = set(
            getattr(self.model, "all_tied_weights_keys", None) or getattr(self.model, "_tied_weights_keys", None) or ()
        )
        seen: set[tuple[int, int]] = set()
        found = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in sorted(self.model.state_dict().items(), key=lambda item: item[0] in tied):
            divided = isinstance(parameters.get(name), DTensor)  # shards have no storage to tell them apart by
            storage = (id(parameters[name]) if divided else tensor.data_ptr(), tensor.numel())
            if tensor.numel() and storage in seen:
                continue
            seen.add(storage)
            if self.adapters is None or not self.adapters.owns(name):
                found[name] = tensor
        return found

    def adapter_snapshot(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """Copies of the adapters alone on the CPU, by the names of peft's files; None without adapters."""
        if self.adapters is None:
            return None
        with self.ranks.together("adapters"):
            return self.adapters.snapshot(dtype, self.ranks)

    def _head(self) -> Head:
        config, layer = self.model.config.get_text_config(), self.model.get_output_embeddings()
        scales = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
        scaling = getattr(config, "logits_scaling", None) or 1.0
        scale = math.prod(scales) * (scaling if config.model_type == "hyperclovax" else 1.0 / scaling)
        scale /= getattr(config, "logits_mup_width_multiplier", None) or 1.0
        names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        cap = next(filter(None, (getattr(config, name, None) for name in names)), None)
        weight, size = layer.weight, getattr(config, "unpadded_vocab_size", None)
        if size is not None and size < len(weight):  # Inkling has no logits of the rows that only fill up its matrix
            weight = weight[:size]
        return Head(weight, getattr(layer, "bias", None), scale, cap)
