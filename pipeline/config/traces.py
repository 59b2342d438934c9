"""Section ``traces``: rollouts that are kept for ``afterplay show``."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.base import Section


class TracesConfig(Section):
    """Trained trajectories are freed once a checkpoint covers them, failed and evaluated ones at once. Some of each
    are kept in ``runs/NAME/traces``, so that people can look at them."""

    trained: int = Field(4, ge=0, le=65_536)
    """Trajectories of every update, drawn at random, that are kept with what the learner saw at each token: log-prob,
    entropy, advantage, clipping. A few tell how the policy plays; each costs about 8 bytes a token. 0: none."""
    failed: bool = True
    """Keep failed rollouts with the turns that were played."""
    evaluated: int = Field(16, ge=0, le=65_536)
    """Rollouts of every evaluation that are kept, spread evenly over its tasks: those of the same tasks each time, so
    that one can see how the policy's play of a task changed. 0: none."""
    bytes_max: int = Field(256 * 1024 * 1024, ge=1024 * 1024)
    """Of the traces of one process: the learner for what was trained, each replay stage for what failed, and again for
    evaluations. The oldest eighth goes when there are more."""
