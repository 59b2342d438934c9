"""States of roles, as health answers and metrics name them."""

from __future__ import annotations

from enum import StrEnum


class RoleState(StrEnum):
    """Activity of a role. The values are shown to people and are label values of a metric."""

    STARTING = "starting"
    LOADING = "loading"
    WAITING_FOR_REPLAY = "waiting for the replay stage"
    WAITING_FOR_ENGINES = "waiting for engines"
    WAITING_FOR_ORDERS = "waiting for orders"
    WAITING_FOR_REQUESTS = "waiting for requests"
    WAITING_FOR_ACTORS = "waiting for actors"
    WAITING_FOR_LEARNER = "waiting for the learner"
    WAITING_FOR_WEIGHTS = "waiting for weights"
    WAITING_FOR_ROLLOUTS = "waiting for rollouts"
    WAITING_FOR_DISK = "waiting for disk"
    FAILING = "failing"
    """The newest rollouts failed."""
    PLAYING = "playing"
    SERVING = "serving"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"
    EVALUATING = "evaluating"
    FINISHING = "finishing"
    STOPPING = "stopping"
    FINISHED = "finished"
