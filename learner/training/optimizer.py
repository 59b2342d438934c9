"""Optimizers, gradient clipping, and learning-rate schedule.

AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) with moments in float32, bfloat16 or 8 bits; parameters are always
float32. The learning rate is a pure function of the update, so there is no state to save.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.distributed.ranks import ALONE, Ranks, local_part
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError

EIGHT_BIT = ("torchao", "bitsandbytes")
"""Libraries that have an 8-bit AdamW, in the order in which they are looked for."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_DROPPED = 0xFFFF
"""Bits of a float32 that bfloat16 does not have."""


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: LearnerConfig, rate: float
) -> torch.optim.Optimizer:
    """The configured optimizer with learning rate ``rate``.

    Raises :class:`ConfigurationError` when a library is missing.
    """
    parameters = list(parameters)
    options: dict[str, Any] = {"lr": rate, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw_8bit":
        return _eight_bit(parameters, options)
    if config.optimizer_dtype == "bfloat16":
        return BFloat16AdamW(parameters, **options)
    return torch.optim.AdamW(parameters, **options, fused=True)


def load_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Resume from a saved ``state_dict``. Options stay those of ``optimizer``, which are those of the run file; those
    in ``saved`` may be of another one. Raises ValueError or KeyError where ``saved`` is of other parameters."""
    own = optimizer.state_dict()["param_groups"]
    groups = [{**o, "params": s["params"]} for o, s in zip(own, saved["param_groups"], strict=True)]
    optimizer.load_state_dict({**saved, "param_groups": groups})


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step. torchao keeps it in a tensor, which must stay the same one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def gradient_norm(parameters: Iterable[torch.nn.Parameter], ranks: Ranks = ALONE) -> Tensor:
    """Global norm of all gradients, on their device, the same bits on all ranks. Collective."""
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return ranks.of_first_replica(total.full_tensor() if isinstance(total, DTensor) else total)


def bit_sums(tensors: Iterable[Tensor | None]) -> Tensor:
    """int64 ``[N]`` on the device: the sum modulo 2⁶⁴ of the 64-bit words of each tensor (of this rank's shard), which
    no order of addition changes; 0 for None. Equal values have equal sums, a single change another one. Words of 32
    bits would take 25 times as long on a CPU."""
    sums = []
    for tensor in tensors:
        values = None if tensor is None else local_part(tensor.detach()).reshape(-1)
        if values is None or not values.numel():
            sums.append(torch.zeros((), dtype=torch.int64))
            continue
        of_word = 8 // values.element_size()
        if values.storage_offset() % of_word:
            values = values.clone()
        whole = len(values) - len(values) % of_word
        words, rest = values[:whole], values[whole:]
        sums.append(words.view(torch.int64).sum() + rest.view(_BITS[rest.element_size()]).sum(dtype=torch.int64))
    device = next((s.device for s in sums if s.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([s.to(device) for s in sums])


def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: float, limit: float) -> None:
    """Scale all gradients, whose global norm is ``norm``, together to a norm of at most ``limit``."""
    if norm > limit:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], limit / norm)


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    norm: float,
    rate: float,
    limit: float,
    *,
    summed: bool,
) -> Tensor | None:
    """Clip the gradients, of global ``norm``, to ``limit``, and step with learning rate ``rate``. ``summed``: gives
    :func:`bit_sums` of the gradients, and of the parameters after the step, ``[2, N]``; else None."""
    set_rate(optimizer, rate)
    clip_gradients(parameters, norm, limit)
    gradients = bit_sums(p.grad for p in parameters) if summed else None
    optimizer.step()
    return None if gradients is None else torch.stack([gradients, bit_sums(parameters)])


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW with moments stored in bfloat16, and arithmetic in float32.

    bfloat16 has 8 significant bits: with β₂ = 0.999 one step changes the second moment by less than half of its last
    bit, so that rounding to nearest would never change it. Stochastic rounding is right in expectation; it draws from
    torch's global generator, whose state is in the checkpoint. The first moment changes by a tenth, so the nearest
    number does.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter with a gradient. ``closure`` is not supported."""
        if closure is not None:
            raise TypeError("expected no closure, got one: the learner computes gradients before the step")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        moments = [local_part(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        parameter, gradient = local_part(parameter), local_part(gradient)
        first = moments[0].float().lerp_(gradient, 1.0 - beta1)
        second = moments[1].float().mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        scale = math.sqrt(1.0 - beta2 ** state["step"])
        denominator = second.sqrt().div_(scale).add_(group["eps"])
        parameter.addcdiv_(first, denominator, value=-group["lr"] / (1.0 - beta1 ** state["step"]))
        moments[0].copy_(first)
        moments[1].copy_(stochastic_bfloat16(second))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, which casts floating state to the parameter's type: moments go back to bfloat16, exactly."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].to(torch.bfloat16)


def stochastic_bfloat16(values: Tensor) -> Tensor:
    """``values`` (float32, finite) rounded to one of the two nearest bfloat16, so that the expectation is the value."""
    bits = values.contiguous().view(torch.int32)
    n = bits.numel()
    drawn = torch.empty((n + 3) // 4, dtype=torch.int64, device=bits.device).random_(torch.iinfo(torch.int64).min, None)
    noise = drawn.view(torch.int16)[:n].view_as(bits).to(torch.int32).bitwise_and_(_DROPPED)
    return noise.add_(bits).bitwise_and_(~_DROPPED).view(torch.float32).to(torch.bfloat16)


def _eight_bit(parameters: list[torch.nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    for name in EIGHT_BIT:
        if importlib.util.find_spec(name) is not None:
            library = importlib.import_module(f"{name}.optim")
            return cast(torch.optim.Optimizer, library.AdamW8bit(parameters, **options))
    raise ConfigurationError(
        f"learner.optimizer is adamw_8bit, which needs one of {' or '.join(EIGHT_BIT)} in the learner's environment: "
        "pip install torchao, or set learner.optimizer: adamw"
    )


def learning_rate(update: int, config: LearnerConfig, total_steps: int) -> float:
    """Learning rate of update ``update`` (counted from 0).

    Rises linearly over ``warmup_steps`` updates to ``learning_rate``, then stays, or falls to 0 at ``total_steps``.

    >>> config = LearnerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear")
    >>> [learning_rate(u, config, 6) for u in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (update - config.warmup_steps) / span)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - done)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate
