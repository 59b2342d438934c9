"""The first dashboard: is the run on track, and how far off-policy is it?"""

from __future__ import annotations

from grafana.boards import stats
from grafana.boards.engine import ENGINE
from grafana.boards.flow import REPLAY, THROUGHPUT
from grafana.boards.learning import EVALUATION, LEARNING, OFF_POLICY, STALENESS
from grafana.specs import BoardSpec, RowSpec

GLANCE = RowSpec(
    "At a glance",
    (
        stats.ESS,
        stats.RATIO_MEAN,
        stats.STALENESS,
        stats.IDLE,
        stats.MISMATCH,
        stats.ACTOR_ERRORS,
        stats.heartbeat(),
        stats.targets_down(),
    ),
)

OVERVIEW = BoardSpec(
    "Afterplay / Overview",
    "afterplay-overview",
    (GLANCE, OFF_POLICY, STALENESS, LEARNING, THROUGHPUT, REPLAY, ENGINE, EVALUATION),
)
