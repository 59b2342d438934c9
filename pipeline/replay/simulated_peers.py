"""What simulated actors and learner have in common: connections and their faults, the other side of ``simulation``."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.schema import (
    SCHEMA_VERSION,
    Failure,
    FinishReason,
    Message,
    Order,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
)
from pipeline.transport.base import Frames, Kind
from pipeline.transport.base import Message as WireMessage

if TYPE_CHECKING:
    from pipeline.replay.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of what goes wrong: per rollout, or per virtual second."""

    error: float = 0.0
    abort: float = 0.0
    hang: float = 0.0
    corrupt: float = 0.0
    unscored: float = 0.0
    duplicate: float = 0.0
    actor_crash: float = 0.0
    learner_crash: float = 0.0
    stage_crash: float = 0.0
    disconnect: float = 0.0
    until: float = 1e9
    """Virtual time after which nothing goes wrong any more."""

    @classmethod
    def drawn(cls, rng: random.Random, until: float) -> Faults:
        """A random mixture."""

        def some(most: float) -> float:
            return rng.choice((0.0, rng.uniform(0, most)))

        return cls(
            some(0.2), some(0.2), some(0.05), some(0.05), some(0.1), some(0.2),
            some(0.2), some(0.1), some(0.2), some(0.2), until,
        )  # fmt: skip


def rollout(
    order: Order,
    version: int,
    *,
    status: TrajectoryStatus = TrajectoryStatus.COMPLETE,
    reward: float | None = None,
    turns: int = 1,
) -> Trajectory:
    """A tiny trajectory that answers ``order``; odd slots succeed unless ``reward`` says otherwise."""
    failed = status in (TrajectoryStatus.ERROR, TrajectoryStatus.ABORTED)
    completion = TokenSpan.sampled([3, 4], [-0.5, -0.25], (VersionSpan(0, 2, version),))
    turn = Turn(TokenSpan.context([1, 2]), completion, (), Message("assistant", "x"), FinishReason.STOP, 1.0)
    reward = float(order.slot % 2) if reward is None else reward
    return Trajectory(
        order.order_id,
        order.group_id,
        order.task,
        (turn,) * turns,
        status,
        failure=Failure("simulation", "injected", "as asked") if failed else None,
        rewards={} if failed else {"environment": reward},
    )


class Connection:
    """Messages of one connection arrive in order after a delay, or not at all once it is broken."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.alive = True
        self._last = {"up": 0.0, "down": 0.0}

    def post(self, way: str, deliver: Callable[[], None]) -> None:
        at = max(self._last[way], self._sim.now + self._sim.rng.uniform(0.001, 0.05))
        self._last[way] = at
        self._sim.at(at, lambda: deliver() if self.alive else None)


class Peer(ABC):
    """What actor and learner have in common: a connection that breaks and comes back with HELLO."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim, self.name = sim, name
        self.connection: Connection | None = None
        self.welcome = False
        self.refused: list[str] = []

    @abstractmethod
    def hello(self) -> dict[str, Any]:
        """What HELLO says beside name and schema version."""

    @abstractmethod
    def connected(self, header: dict[str, Any]) -> None:
        """WELCOME came."""

    @abstractmethod
    def handle(self, message: WireMessage) -> None:
        """Any other message came."""

    def connect(self) -> None:
        if self.connection is not None and self.connection.alive:
            return
        if self.sim.core is None:
            self.sim.after(0.3, self.connect)
            return
        self.connection, self.welcome = Connection(self.sim), False
        header = {"schema_version": SCHEMA_VERSION, "name": self.name, **self.hello()}
        self.connection.post("up", lambda: self.sim.stage_event(("up", self, header)))

    def disconnect(self, *, silent: bool = True) -> None:
        if self.connection is None or not self.connection.alive:
            return
        self.connection.alive, self.welcome = False, False
        if silent and self.sim.rng.random() < 0.5:
            self.sim.after(self.sim.rng.uniform(0, 5), lambda: self._noticed())
        self.sim.after(self.sim.rng.uniform(0.1, 8), self.connect)

    def _noticed(self) -> None:
        if self.connection is None or not self.connection.alive:
            self.sim.stage_event(("down", self, None))

    def send(self, kind: Kind, header: dict[str, Any], frames: Frames = ()) -> None:
        if self.connection is not None and self.connection.alive and self.welcome:
            message = WireMessage(kind, header, frames)
            self.connection.post("up", lambda: self.sim.stage_event(("message", self, message)))

    def receive(self, message: WireMessage) -> None:
        if message.kind is Kind.WELCOME:
            self.welcome = True
            self.connected(dict(message.header))
        elif message.kind is Kind.REFUSED:
            self.refused.append(message.header["reason"])
        else:
            self.handle(message)
