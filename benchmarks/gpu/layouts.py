"""Padded, packed and shared rows in bfloat16 against padded rows in float32: log-probabilities and gradients.

Distances: of gradients the norm of the difference over the norm, of log-probabilities the mean in nats. Tolerance: rows
that are padded in bfloat16 are as far from float32 as rounding makes them, with a gradient within ``GRADIENT_MAX``;
every other form may be ``TIMES_MAX`` times as far. A control in which rows see each other must lie outside, or the
comparison could not fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.gpu.case import Facts, Machine, attempt
from benchmarks.learner_step.case import Case, make_rows
from benchmarks.learner_step.model import make_model
from benchmarks.learner_step.sides import make_trainer
from learner.data.microbatch import Form
from learner.data.rows import Batch, Row
from learner.policy.attention import NAME, packed_attention
from learner.training.trainer import Trainer

GRADIENT_MAX = 0.1
TIMES_MAX = 1.5
FORMS: dict[str, dict[str, Any]] = {
    "packed": {"packing": "packed", "shared": False},
    "shared": {"packing": "packed"},
    "shared, checkpointed": {"packing": "packed", "gradient_checkpointing": True},
}


def small_case(machine: Machine) -> Case:
    shape = "tiny" if machine.small else "0.5b"
    return Case(model=shape, groups=3, rollouts=4, prompt=60, response=80, longest=512, steps=1,
                tokens_per_microbatch=4096, compute_dtype="bfloat16", device=machine.device, threads=0,
                checkpointing=False)  # fmt: skip


def small_model(machine: Machine) -> Any:
    layers = {} if machine.small else {"num_hidden_layers": 4}
    return make_model(small_case(machine).model, machine.device, **layers)


def equality(machine: Machine) -> Iterator[tuple[str, Facts]]:
    case, model = small_case(machine), small_model(machine)
    rows = make_rows(case, model.config.vocab_size)

    def scored(shared: bool = True, **options: Any) -> Scored:
        trainer = make_trainer(case, copy.deepcopy(model), **{"grad_clip": 1e9, **options})
        if not shared:
            trainer.policy.form = Form(packed=True)
        return Scored.of(trainer, rows)

    exact = scored(compute_dtype="float32", packing="padded")
    rounded = scored(packing="padded")
    yield "padded", rounded.facts(exact, exact) | {"repeatable": rounded.same(scored(packing="padded"))}
    for name, options in FORMS.items():
        yield attempt(name, partial(form_facts, scored, options, exact, rounded))
    AttentionInterface.register(NAME, lambda *a, runs=None, **k: packed_attention(*a, **k))
    try:
        trainer = make_trainer(case, copy.deepcopy(model), packing="padded", grad_clip=1e9)
        trainer.policy.form = Form(packed=True)
        trainer.policy.model.set_attn_implementation(NAME)
        yield "control: rows see each other", Scored.of(trainer, rows).facts(exact, rounded) | {"expected": "outside"}
    finally:
        AttentionInterface.register(NAME, packed_attention)


def form_facts(scored: Callable[..., Scored], options: dict[str, Any], exact: Scored, rounded: Scored) -> Facts:
    first = scored(**options)
    return first.facts(exact, rounded) | {"repeatable": first.same(scored(**options))}


class Scored:
    """Log-probabilities of all tokens, and the gradient of one step."""

    def __init__(self, form: str, logprobs: np.ndarray, gradients: dict[str, Tensor]) -> None:
        self._form = form
        self._logprobs = logprobs
        self._gradients = gradients

    @classmethod
    def of(cls, trainer: Trainer, rows: tuple[Row, ...]) -> Scored:
        return cls(form_of(trainer), trainer.score(rows), gradients_of(trainer, rows))

    def distances(self, exact: Scored) -> tuple[float, float]:
        """Of gradients and log-probabilities."""
        return distance(self._gradients, exact._gradients), float(np.abs(self._logprobs - exact._logprobs).mean())

    def facts(self, exact: Scored, rounded: Scored) -> Facts:
        """``rounded``: padded rows in bfloat16; where it is ``exact``, these are they."""
        gradient, logprob = self.distances(exact)
        within = gradient <= GRADIENT_MAX
        if rounded is not exact:
            limits = rounded.distances(exact)
            within = all(d <= TIMES_MAX * limit for d, limit in zip((gradient, logprob), limits, strict=True))
        return {
            "laid": self._form,
            "gradient_distance": gradient,
            "logprob_distance_nats": logprob,
            "tolerance": "within" if within else "outside",
        }

    def same(self, other: Scored) -> bool:
        """True where two runs of one form agree in every bit."""
        return all(torch.equal(g, other._gradients[name]) for name, g in self._gradients.items())


def form_of(trainer: Trainer) -> str:
    form = trainer.policy.form
    if not form.packed:
        return "padded"
    call = "one call" if trainer.policy._varlen else "a call a row"
    return f"{'packed' if form.shared_min is None else 'shared'}, {call}"


def gradients_of(trainer: Trainer, rows: tuple[Row, ...]) -> dict[str, Tensor]:
    """Gradients of one step by the name of the parameter, float32 on the CPU. The step is made."""
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in trainer.policy.named_parameters:
            gradient: Any = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name] = whole.detach().float().cpu().clone()

    hook = trainer.optimizer.register_step_pre_hook(keep)
    trainer.step(Batch(trainer.updates, (), rows), policy_version=0)
    hook.remove()
    return found


def distance(came: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of ``expected``."""
    difference = sum(float((came[name].double() - g.double()).square().sum()) for name, g in expected.items())
    return float((difference / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5)
