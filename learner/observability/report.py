"""Report of one update, the stopwatch of its stages, and the steps that it skipped."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from learner.data.packing import Form
from learner.data.rows import Row, TokenScores
from learner.observability.statistics import BatchStatistics

Stage = Literal["prepare", "choose", "forward", "backward", "optimize"]
NonFinite = Literal["loss", "gradient", "ratio", "value"]


class Stopwatch:
    """Seconds by stage, each second in one: a stage inside another interrupts it. On a GPU each stage ends with a
    synchronisation, so that its seconds are its own. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {
            "prepare": 0.0,
            "choose": 0.0,
            "forward": 0.0,
            "backward": 0.0,
            "optimize": 0.0,
        }
        self.operations = 0.0
        """Operations of all passes of all ranks."""
        self._cuda = device.type == "cuda"
        self._open: list[Stage] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Give the time since the last change to the innermost open stage."""
        if self._open and self._cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def utilisation(watch: Stopwatch, ranks: int, peak_flops: float | None) -> float | None:
    """See :attr:`StepReport.mfu`; ``peak_flops``: of one chip."""
    seconds = sum(watch.seconds[stage] for stage in ("forward", "backward", "optimize"))
    return None if peak_flops is None or seconds <= 0 else watch.operations / (seconds * ranks * peak_flops)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory of this process since its start: allocated on the GPU, or resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class CriticReport:
    """One optimizer step of the critic; of the last one where an update has several."""

    loss: float
    clip_ratio: float
    """Share of tokens whose value left the clip range."""
    grad_norm: float
    """Norm before clipping; not finite where the step was skipped."""
    explained_variance: float | None
    """``1 - Var(R - V) / Var(R)`` with the values before the update; None where all returns are equal."""
    skipped: bool = False
    """Loss or gradient was not finite."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """An optimizer step that was not taken."""

    where: NonFinite
    """The value that was not finite; ``value``: the critic's step, loss or gradient."""
    rows: tuple[int, ...]
    """Their numbers in the update."""


@dataclass(frozen=True, slots=True)
class SkippedBatch:
    """An update with skipped steps: the arguments of ``Trainer.step``, for inspection and repetition."""

    update: int
    policy_version: int
    kl_coefficient: float
    steps: tuple[SkippedStep, ...]
    rows: tuple[Row, ...]
    token_scores: TokenScores


@dataclass(frozen=True, slots=True)
class StepReport:
    """One update. Times are Unix seconds, durations seconds, log-probs nats."""

    update: int
    policy_version: int
    """The learner's version before the step: what staleness is counted from."""
    statistics: BatchStatistics
    loss: float
    """Policy loss (and entropy bonus) over the batch, before the optimizer step; of the last optimizer step where
    there are several."""
    policy_loss: float
    entropy_loss: float
    grad_norm: float
    """Global norm before clipping, of the last optimizer step; 0 where no token had an advantage."""
    learning_rate: float
    """Learning rate of the last optimizer step, including the guard's factor."""
    optimizer_steps: int
    """Steps really applied: fewer than epochs × minibatches where one was skipped."""
    nonfinite: dict[NonFinite, int]
    """Skipped optimizer steps by what was not finite."""
    n_rows: int
    n_microbatches: int
    tokens_trained: int
    """Sampled tokens in the loss."""
    tokens_masked: int
    """Tokens seen by the forward pass that are not in the loss."""
    tokens_padding: int
    tokens_without_signal: int
    """Sampled tokens whose advantage is exactly 0: scored for the statistics, without a backward pass."""
    tokens_shared: int = 0
    """Tokens of rows that another row of the same forward pass computed: beginnings in common."""
    kl_loss: float = 0.0
    """The KL term of the loss, as ``entropy_loss``; 0 where the KL is not in the loss."""
    supervised_loss: float = 0.0
    """Mean cross-entropy over supervised tokens before the step, nats, without its weight; 0 without any."""
    supervised_tokens: int = 0
    """Supervised tokens of the last optimizer step."""
    tokens_by_trajectory: Sequence[int] = ()
    """Sampled tokens that passed through the loss in the first epoch, by ``Row.trajectory_index``; none behind the last
    trajectory that has some."""
    overlong: int = 0
    """Trajectories whose reward lost the overlong penalty."""
    kl_coefficient: float = 0.0
    """Coefficient that the update was made with; an adaptive controller may have changed it since."""
    guard_lr_factor: float = 1.0
    """Factor of the ESS guard on the learning rate: mean over optimizer steps; 1 where it is off."""
    critic: CriticReport | None = None
    """None: there is none."""
    skipped: SkippedBatch | None = None
    """None: no step was."""
    mfu: float | None = None
    """Model FLOP utilisation: operations of the update's passes over what the chips of all ranks could have done in its
    forward, backward and optimize stages. Padding is no operation. None where the chip's peak is unknown."""
    peak_memory_bytes: int = 0
    """Largest since the start, of the rank with most: of the device, on CPUs resident."""
    form: Form = field(default_factory=Form)
    """Form of the rows in the policy's passes."""
    seconds: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the rows (context and shared beginnings included, padding not) over the time of the step."""
        return (self.tokens_trained + self.tokens_masked) / max(1e-9, self.finished_at - self.started_at)
