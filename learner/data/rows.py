"""Groups of an update, their training rows, scores by token, and facts of a trained update.

A row is one branch of a trajectory, a token sequence that the engine saw; where a trajectory's retrieved memory is
discarded, the sequence that it would have seen without. Context, and whatever an earlier branch sampled, is not
trained. Dimensions: T tokens of a row, S sampled tokens of all rows of an update, in the order of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import TrainingError
from pipeline.schema import FlatTokens, GroupPlan, TokenSpan, Trajectory
from pipeline.schema.trajectory import ExpertArray

TokenArray = npt.NDArray[np.float32]
"""``[S]``."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """Facts of one trajectory from the replay pool, as DELIVERY has them.

    Raises :class:`TrainingError` for a weight that cannot be.
    """

    weight: float = 1.0
    """Multiplies the loss of its tokens; denominators do not change."""
    entropy: float | None = None
    """Stored entropy, mean over sampled tokens, nats."""
    entropy_age: int | None = None
    """Versions since it was measured, when it was dispatched."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise TrainingError(f"expected a finite weight >= 0 of a replayed trajectory, got {self}")

    @classmethod
    def of(cls, header: Mapping[str, Any] | None) -> StoredRollout:
        """Facts in the ``replay`` part of a DELIVERY header. Raises TypeError or ValueError where it is malformed."""
        if header is None:
            return cls()
        entropy, entropy_age = header.get("entropy"), header.get("entropy_age")
        return cls(
            weight=float(header.get("weight", 1.0)),
            entropy=None if entropy is None else float(entropy),
            entropy_age=None if entropy_age is None else int(entropy_age),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Scored trajectories of one task: the fresh ones of the plan, then replayed ones.

    As delivered it may hold more replayed ones than are trained; ``with_replayed`` takes those that are.
    """

    plan: GroupPlan
    trajectories: tuple[Trajectory, ...]
    stored_rollouts: Mapping[str, StoredRollout] = field(default_factory=dict)
    """Facts of the replayed ones, by trajectory id."""

    @property
    def group_id(self) -> str:
        return self.plan.group_id

    @property
    def n_replayed(self) -> int:
        """Replayed trajectories that are trained."""
        return self.plan.n_rollout - self.plan.n_fresh

    @property
    def settled(self) -> bool:
        """True where it holds exactly the trajectories that are trained."""
        return len(self.trajectories) == self.plan.n_rollout

    @property
    def fresh(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if not self.is_replayed(t))

    @property
    def candidates(self) -> tuple[Trajectory, ...]:
        """Trajectories from the pool, in the order of the plan: best first by stored entropy."""
        return tuple(t for t in self.trajectories if self.is_replayed(t))

    def is_replayed(self, trajectory: Trajectory) -> bool:
        """True where the plan took this trajectory from the pool."""
        name = trajectory.trajectory_id
        return name in self.plan.replay_ids or name in self.plan.candidates

    def stored_rollout(self, trajectory: Trajectory) -> StoredRollout:
        """Facts of a replayed trajectory."""
        return self.stored_rollouts.get(trajectory.trajectory_id) or StoredRollout()

    def with_replayed(self, chosen: Iterable[str]) -> Group:
        """The group with just these of its candidates. Raises :class:`TrainingError` when there are not ``n_replayed``
        of them."""
        ids, n = tuple(chosen), self.n_replayed
        candidates = {t.trajectory_id: t for t in self.candidates}
        if len(set(ids)) != n or not set(ids) <= set(candidates):
            raise TrainingError(f"expected {n} of the candidates {sorted(candidates)} of {self.group_id}, got {ids}")
        return Group(self.plan, (*self.fresh, *(candidates[name] for name in ids)), self.stored_rollouts)

    def with_planned_replays(self) -> Group:
        """The group with the trajectories that the stage chose by stored entropy."""
        return self if self.settled else self.with_replayed(self.plan.replay_ids)


@dataclass(frozen=True, slots=True)
class Trained:
    """Facts of one update, as CONSUMED and a checkpoint have them."""

    ess: Mapping[str, float | None] = field(default_factory=dict)
    """Kish's effective sample size of token ratios over N: ``all``, ``fresh``, ``replay``; and ``carried``, the
    ``Weights.carried_ratio`` of replayed tokens, or of replayed trajectories with ``replay.ess_guard.level:
    sequence``."""
    replayed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ids of the trained stored trajectories, by the group that has some."""
    entropy: Mapping[str, float] = field(default_factory=dict)
    """Exact entropy, nats, mean over sampled tokens, by trajectory id: of what was trained, and of candidates."""
    choice_failed: int = 0
    """Groups whose candidates could not be scored: the stored choice was trained."""
    policy_version: int | None = None
    """Version of the weights that the update was made from."""

    def header(self) -> dict[str, Any]:
        """The part of CONSUMED (docs/PROTOCOL.md), without numbers that are not finite: ``Trained(**header)`` gives the
        same facts."""
        return {
            "replayed": {name: list(ids) for name, ids in self.replayed.items()},
            "ess": {name: value if value is None or math.isfinite(value) else None for name, value in self.ess.items()},
            "entropy": {name: value for name, value in self.entropy.items() if math.isfinite(value)},
            "choice_failed": self.choice_failed,
            **({} if self.policy_version is None else {"policy_version": self.policy_version}),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One branch with at least one sampled token. All arrays have the row's length T.

    Raises :class:`TrainingError` when lengths disagree: they are never padded or cut.
    """

    trajectory_id: str
    trajectory_index: int
    """Index of the trajectory in its batch: branches of one trajectory share it."""
    environment: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    """log μ, nats; meaningless where ``loss_mask`` is False."""
    policy_versions: npt.NDArray[np.int32]
    temperatures: npt.NDArray[np.float32]
    """Temperature that each token's turn was sampled with."""
    turns: npt.NDArray[np.int32]
    """Index of the turn that each token belongs to."""
    advantages: npt.NDArray[np.float32]
    """``[n_sampled]``, of the tokens that are trained, in order; 0 until they are estimated."""
    experts: ExpertArray | None = None
    """``[T, layers, k]``: experts that the engine chose for each token; None: unknown."""
    replayed: bool = False
    """True for a trajectory from the replay pool."""
    with_lessons: bool = False
    """Its prompt held lessons."""
    discarded: bool = False
    """With lessons, and trained on the prompt without them: log μ was recorded under another prompt."""
    recorded: bool = True
    """log μ was recorded. False: a demonstration, whose ``behaviour_logprobs`` are 0 and mean nothing."""
    replay_weight: float = 1.0
    """Multiplies the loss of its tokens; denominators do not change."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("loss_mask", "behaviour_logprobs", "policy_versions", "temperatures", "turns"):
            came = len(getattr(self, name))
            if came != n:
                raise TrainingError(
                    f"expected {name} of {self.trajectory_id} to have {n} entries (one per token), got {came}"
                )
        if self.experts is not None and len(self.experts) != n:
            raise TrainingError(f"expected experts of {self.trajectory_id} for {n} tokens, got {len(self.experts)}")
        if n and self.loss_mask[0]:
            raise TrainingError(f"expected {self.trajectory_id} to start with context, got a sampled first token")
        if not self.loss_mask.any():
            raise TrainingError(f"expected {self.trajectory_id} to have a sampled token in the branch, got none")
        if self.advantages.shape != (self.n_sampled,):
            raise TrainingError(
                f"expected {self.n_sampled} advantages of {self.trajectory_id} (one per trained token), got shape "
                f"{self.advantages.shape}"
            )
        if not (self.temperatures[self.loss_mask] > 0).all():
            raise TrainingError(
                f"expected {self.trajectory_id} to be sampled with a temperature > 0, got greedy tokens"
            )

    @classmethod
    def plain(cls, name: str, token_ids: Sequence[int]) -> Row:
        """A row without log μ or advantages, of which all tokens but the first count as sampled, at temperature 1."""
        n = len(token_ids)
        return cls(
            trajectory_id=name,
            trajectory_index=0,
            environment="",
            token_ids=np.asarray(token_ids, np.int32),
            loss_mask=np.arange(n) > 0,
            behaviour_logprobs=np.zeros(n, np.float32),
            policy_versions=np.zeros(n, np.int32),
            temperatures=np.ones(n, np.float32),
            turns=np.zeros(n, np.int32),
            advantages=np.zeros(n - 1, np.float32),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_sampled(self) -> int:
        """Tokens that are trained."""
        return int(self.loss_mask.sum())

    @property
    def has_signal(self) -> bool:
        """True where a token has an advantage other than 0, and the row a weight."""
        return self.replay_weight != 0 and bool((self.advantages != 0).any())


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups of one update, and their rows."""

    update: int
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All, in the order of ``Row.trajectory_index``."""
        return [t for group in self.groups for t in group.trajectories]

    @property
    def fresh(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.fresh]

    @property
    def replayed(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.candidates]

    @property
    def n_sampled(self) -> int:
        return sum(row.n_sampled for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of an update's tokens before its first optimizer step, float32 ``[S]`` each (``token_offsets``).

    None where neither estimator nor loss needs them: the trainer makes only the passes that are needed.
    """

    logprobs: TokenArray | None = None
    """log π_old: of the weights before the update."""
    entropies: TokenArray | None = None
    """Entropy of those weights, nats."""
    reference: TokenArray | None = None
    """log π of the reference policy."""
    values: TokenArray | None = None
    """The critic's value of the state before each token."""
    returns: TokenArray | None = None
    """The critic's targets, from the estimator."""
    hinted: TokenArray | None = None
    """log π of the weights before the update, with a hint or the solution in the prompt."""


def build_batch(update: int, groups: Sequence[Group]) -> Batch:
    """Rows of the groups, in the order of groups, trajectories and branches, without advantages.

    Raises :class:`TrainingError`, also for a group that holds more candidates than are trained.
    """
    rows: list[Row] = []
    trajectory_index = 0
    for group in groups:
        if not group.settled:
            raise TrainingError(
                f"expected {group.plan.n_rollout} trajectories of {group.group_id}, got {len(group.trajectories)}: "
                "choose its stored rollouts first"
            )
        for trajectory in group.trajectories:
            stored = group.stored_rollout(trajectory) if group.is_replayed(trajectory) else None
            rows += trajectory_rows(trajectory, trajectory_index, stored)
            trajectory_index += 1
    return Batch(update, tuple(groups), tuple(rows))


def trajectory_rows(trajectory: Trajectory, trajectory_index: int, stored: StoredRollout | None = None) -> list[Row]:
    """One row per branch that has sampled tokens, advantages 0.

    ``stored``: facts of a trajectory from the pool. Raises :class:`TrainingError` for a row that cannot be trained.
    """
    lessons = trajectory.lessons
    discarded = lessons is not None and not lessons.keep
    # discarded lessons: on the prompts that the policy would have seen without them
    source = with_contexts(trajectory, lessons.plain_contexts) if lessons is not None and discarded else trajectory
    temperatures = np.asarray([turn.temperature for turn in trajectory.turns], dtype=np.float32)
    return [
        Row(
            trajectory_id=trajectory.trajectory_id,
            trajectory_index=trajectory_index,
            environment=trajectory.task.environment,
            token_ids=tokens.token_ids,
            loss_mask=tokens.loss_mask,
            behaviour_logprobs=(
                tokens.behaviour_logprobs if trajectory.recorded else np.zeros_like(tokens.behaviour_logprobs)
            ),
            policy_versions=tokens.policy_versions,
            temperatures=temperatures[tokens.turn_index],
            turns=tokens.turn_index,
            advantages=np.zeros(int(tokens.loss_mask.sum()), dtype=np.float32),
            experts=tokens.experts,
            replayed=stored is not None,
            with_lessons=lessons is not None,
            discarded=discarded,
            recorded=trajectory.recorded,
            replay_weight=stored.weight if stored is not None else 1.0,
        )
        for branch in source.branches()
        if len(tokens := _trimmed(branch))
    ]


def with_contexts(trajectory: Trajectory, contexts: Mapping[int, tuple[int, ...]]) -> Trajectory:
    """The trajectory with these context ids, by turn, in place of its own; completions stay, the experts of such turns
    are unknown. Raises :class:`TrainingError` for a turn that is not there."""
    missing = [turn for turn in contexts if turn >= len(trajectory.turns)]
    if missing:
        raise TrainingError(
            f"expected contexts of the {len(trajectory.turns)} turns of {trajectory.trajectory_id}, got {missing}"
        )
    turns = [
        replace(turn, context=TokenSpan.context(contexts[i]), experts=None) if i in contexts else turn
        for i, turn in enumerate(trajectory.turns)
    ]
    return replace(trajectory, turns=tuple(turns))


def _trimmed(tokens: FlatTokens) -> FlatTokens:
    """Without the context after the last sampled token: nothing is predicted from it."""
    sampled = np.flatnonzero(tokens.loss_mask)
    stop = int(sampled[-1]) + 1 if len(sampled) else 0
    if stop == len(tokens):
        return tokens
    return FlatTokens(
        tokens.token_ids[:stop],
        tokens.loss_mask[:stop],
        tokens.behaviour_logprobs[:stop],
        tokens.policy_versions[:stop],
        tokens.turn_index[:stop],
        None if tokens.experts is None else tokens.experts[:stop],
    )
