"""Section ``stage``: the process between actors and learner."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.config.base import Section

CACHE_BYTES = 64 * 1024 * 1024
"""Memory of the stage for the newest payloads."""


class StageConfig(Section):
    """The replay stage: its address, its store, and the limits of the messages that actors and the learner exchange
    with it. A message above a limit is refused with an error that names the limit."""

    address: str = "ipc://"
    """Address that the stage binds. ``ipc://``: a unix socket in a new folder that only this user may enter, found
    through the run directory. ``ipc:///path``: that socket; its folder must be closed to others. ``tcp://host:port``:
    for several machines; requires ``stage.curve``, on loopback too (``afterplay run`` makes keys). Port 0: a free port,
    which ``afterplay run`` passes to the other processes."""
    curve: Path | None = None
    """Folder with CURVE keys, made by ``afterplay keys``: the stage's own, and one for each learner and actor. Required
    for ``stage.address: tcp://…``; ``afterplay run`` makes them in the run directory if it is None."""
    store: Path | None = None
    """Path of the SQLite file, of this run alone. None: ``replay.sqlite`` in the run directory."""
    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """SQLite durability. ``FULL`` survives a power loss, ``NORMAL`` a killed process."""
    message_bytes_max: int = Field(256 * 1024 * 1024, ge=1024)
    """Largest message, in bytes, without its header."""
    tokens_max: int = Field(1_048_576, ge=1)
    """Most tokens in one trajectory."""
    silence_seconds_max: float = Field(10.0, ge=2.0)
    """Seconds of silence after which a peer counts as lost. Its orders are then issued again. On an idle connection
    both ends are heard once a second."""


class GroupsConfig(Section):
    """Groups of an update: ``groups_per_step`` groups of exactly ``n_rollout`` trajectories each."""

    n_rollout: int = Field(8, ge=1, le=4096)
    """Rollouts of the same task in one group. Estimators such as GRPO compare them."""
    groups_per_step: int = Field(8, ge=1, le=65_536)
    """Groups in one update."""
    attempts_max: int = Field(3, ge=1)
    """Attempts at one rollout of a group. If all fail, the group is cancelled."""
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    """Treatment of a group whose rewards are all equal. Estimators that compare a group give it advantage 0. ``keep``:
    it is trained. ``drop``: the update is made from the other groups; an update without any group is counted and
    changes no weights. ``refill``: a newly admitted group replaces it (dynamic sampling of DAPO, arXiv:2503.14476).
    Rewards are those of the scorer, before ``advantage.shaping`` and the overlong penalty; stored trajectories of the
    group and the greedy rollout of remax are included. Groups that are left out still count for difficulty, retirement
    and the pool; no lessons are written from them."""
    refill_max: float = Field(2.0, ge=0)
    """Largest number of groups that ``refill`` replaces in one update, as a multiple of ``groups_per_step``. After
    that, groups with equal rewards are trained. 2 means that an update costs at most three times its groups."""

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories of one update: ``n_rollout * groups_per_step``."""
        return self.n_rollout * self.groups_per_step


class StalenessConfig(Section):
    """Bound on off-policyness."""

    max: int = Field(1, ge=0, le=1024)
    """η: how many updates behind the policy a trajectory may be when it is trained. 0 is strictly on-policy: rollouts
    and training alternate. 1 lets them overlap, which is usually enough to keep both busy."""
    late: Literal["train", "drop"] = "train"
    """Treatment of a group beyond the bound, which only a learner restart can cause. ``train``: it is trained with its
    importance weight. ``drop``: it is not trained. Both are counted."""
