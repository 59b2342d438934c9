"""Episodes that ask for completions themselves, in any order and several at a time, and are not asked turn by turn.

The rollout still owns engines, retries and the trajectory; the episode owns what is said, its limits and its record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from actors.engine.base import Sampling
from pipeline.schema import TrajectoryStatus, Turn

if TYPE_CHECKING:
    from actors.loop.base import Game
    from actors.loop.generate import Completion


class Policy(Protocol):
    """What completions are asked of, for one episode."""

    @property
    def sampling(self) -> Sampling:
        """How it is sampled; ``temperature`` is 0 for a greedy order."""
        ...

    @property
    def differs(self) -> bool:
        """This order is sampled otherwise than the run file says: greedily, or for an evaluation."""
        ...

    @property
    def model(self) -> str: ...

    @property
    def context_max(self) -> int:
        """Tokens of prompt and completion together."""
        ...

    def trouble(self) -> str:
        """Why no engine can answer; empty when one can."""
        ...

    async def complete(self, prompt_ids: Sequence[int], tokens_max: int, stop: Sequence[str] = ()) -> Completion:
        """Sample one completion. Raises :class:`EngineError` like :func:`actors.loop.generate.complete`."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended that did not fail."""

    status: TrajectoryStatus
    """COMPLETE or TRUNCATED."""
    score: float | None
    """``rewards["environment"]``. None: it has none, and the trajectory is not trained unless that has no weight."""


class DrivenEpisode(ABC):
    """One play."""

    def __init__(self, game: Game) -> None:
        self.game = game

    @abstractmethod
    async def drive(self, policy: Policy) -> Outcome:
        """Play to the end. Raises for a failure. With no turn played the rollout fails."""

    @abstractmethod
    def turns(self) -> tuple[Turn, ...]:
        """As far as it was played, branch by branch."""

    async def close(self) -> None:  # noqa: B027 - optional
        """Called exactly once, however the episode ended, before the environment's episode is closed."""
