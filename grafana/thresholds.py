"""The one place where "too high" is a number: stat panels are coloured by it and alert rules fire on it.

They are starting points (see ``docs/RUNBOOK.md``); the staleness ones follow ``staleness.max`` of the run file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Limit:
    """Where a value turns orange (``warning``) and red (``critical``); ``bad`` says on which side."""

    bad: Literal["above", "below"]
    warning: float | None = None
    critical: float | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """A value that should stay within ``center ± tolerance``."""

    center: float
    tolerance: float


WINDOW = "5m"
"""Window of everything that advances once per learner step."""

ESS = Limit("below", warning=0.3, critical=0.1)
"""(Σw)²/(N·Σw²) over the window, 0 to 1."""

RATIO_MEAN = Band(center=1.0, tolerance=0.1)
"""E_μ[π/μ] is 1 for any two policies of equal support: a distance from 1 is bias, not drift."""

RATIO_TAIL = Limit("above", warning=0.05)
"""Share of tokens whose π/μ is outside (0.5, 2]."""

ENGINE_MISMATCH_P99_NATS = Limit("above", warning=0.5)
"""Absolute log-probability difference of learner and engine at version lag 0. A bf16 engine measures 0.05 on average,
0.3 to 0.5 at most; a float32 engine below 1e-4."""

STALENESS_P95_VERSIONS = Limit("above", warning=8)

POLICY_LAG_VERSIONS = Limit("above", warning=16)
"""Learner's published version minus the slowest actor's."""

LEARNER_IDLE_SHARE = Limit("above", warning=0.5)

ACTOR_ERROR_SHARE = Limit("above", warning=0.05)

ACTOR_BLOCKED_SHARE = Limit("above", warning=0.3)

REPLAY_FILL = Limit("above", warning=0.95)

STALE_DROP_SHARE = Limit("above", warning=0.2)

GROUPS_WINDOW = "15m"
"""Window of what is counted once a group."""

EQUAL_GROUPS = Limit("above", warning=0.8)
"""Groups with equal rewards, which teach nothing, among those that finished."""

HEARTBEAT_AGE_SECONDS = Limit("above", critical=60)

TARGETS_DOWN = Limit("above", critical=0)

NONFINITE_STEPS = Limit("above", critical=0)

CORRUPT_DROPS = Limit("above", critical=0)

WEIGHT_UPDATE_FAILURES = Limit("above", warning=3)
"""Within ten minutes."""

CHECKPOINT_AGE_SECONDS = Limit("above", warning=1800)

AUDIT_WINDOW = "30m"
"""Window of the selection-bias audit: what was sampled is trained some minutes later."""

REPLAY_ESS = Limit("below", warning=0.3)
"""ESS of the replayed tokens alone: ``replay.ess_guard.floor`` as it is by default, below which the guard shrinks the
share."""

REPLAY_SHARE_KEPT = Limit("below", warning=0.25)
"""The guard's factor: two halvings that were not made up for."""

CHOICE_FAILURES = Limit("above", warning=0.05)
"""Groups whose replays were not chosen with today's policy, to one replayed trajectory."""

POOL_ENTRIES = Limit("below", warning=1)
"""Where replay is on."""

REPLAYED_TOKENS = Limit("above", warning=0.5)
"""Replayed tokens among the trained ones."""

SELECTION_BIAS = Band(center=1.0, tolerance=0.25)
"""Mean length of trained trajectories over that of all that were sampled."""

LESSON_SEARCH_FAILURES = Limit("above", warning=0.05)

LESSON_GROUP_FAILURES = Limit("above", warning=0.2)
"""Finished groups that should have given lessons and whose writer failed, took too long or had no room."""
