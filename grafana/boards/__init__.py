"""What each dashboard shows: one module a dashboard or a group of rows."""

from grafana.boards.actors import ACTORS
from grafana.boards.experience import EXPERIENCE
from grafana.boards.learner import LEARNER
from grafana.boards.overview import OVERVIEW
from grafana.boards.replay_stage import REPLAY_STAGE

BOARDS = (OVERVIEW, ACTORS, REPLAY_STAGE, LEARNER, EXPERIENCE)

__all__ = ["BOARDS"]
