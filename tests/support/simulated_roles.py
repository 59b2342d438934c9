"""Simulated actors and learner for :mod:`tests.support.simulation`, with the faults of their connections.

An actor runs orders for a random time, keeps what is not acknowledged and forgets everything in a crash. A learner
trains, publishes and checkpoints; a crash takes it back to its last checkpoint.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from pipeline.schema.orders import GroupPlan, decode_request
from pipeline.schema.record_file import Frames
from pipeline.transport.messages import Kind, WireMessage
from pipeline.transport.outbox import ControlLog

if TYPE_CHECKING:
    from tests.support.simulation import Simulation


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
    damage: float = 0.0
    """Per crash of the learner: its newest checkpoint is damaged."""

    @classmethod
    def drawn(cls, rng: random.Random, until: float) -> Faults:
        """A random mixture."""

        def some(most: float) -> float:
            return rng.choice((0.0, rng.uniform(0, most)))

        drawn = (
            some(0.2), some(0.2), some(0.05), some(0.05), some(0.1), some(0.2),
            some(0.2), some(0.1), some(0.2), some(0.2), until,
        )  # fmt: skip
        return cls(*drawn, damage=random.Random(repr(drawn)).choice((0.0, 0.5)))


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
    """Base of actor and learner: a connection that breaks and comes back with HELLO."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim, self.name = sim, name
        self.connection: Connection | None = None
        self.welcome = False
        self.refused: list[str] = []

    @abstractmethod
    def hello(self) -> dict[str, Any]:
        """Fields of HELLO beside name and schema version."""

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


class SimulatedActor(Peer):
    """Runs orders for a random time; keeps what is not acknowledged."""

    def __init__(self, sim: Simulation, name: str, slots: int) -> None:
        super().__init__(sim, name)
        self.slots = slots
        self.running: dict[str, Order] = {}
        self.outbox: dict[str, Frames] = {}
        self.life = 0

    def hello(self) -> dict[str, Any]:
        return {"role": "actor", "slots": self.slots, "holding": [*self.running, *self.outbox]}

    def connected(self, header: dict[str, Any]) -> None:
        for trajectory_id, frames in self.outbox.items():
            self.send(Kind.TRAJECTORY, {"trajectory_id": trajectory_id}, frames)

    def crash(self) -> None:
        self.life += 1
        self.running, self.outbox = {}, {}
        self.disconnect()

    def handle(self, message: WireMessage) -> None:
        header = message.header
        match message.kind:
            case Kind.ORDER:
                order = decode_request(Order, header)
                assert order.order_id not in self.running and order.order_id not in self.outbox
                self.running[order.order_id] = order
                assert len(self.running) + len(self.outbox) <= self.slots * 4
                self._play(order)
            case Kind.CANCEL:
                for order_id in header["order_ids"]:
                    self.running.pop(order_id, None)
                    self.outbox.pop(order_id, None)
            case Kind.ACK:
                for order_id in header["trajectory_ids"]:
                    self.outbox.pop(order_id, None)
                    self.sim.acknowledged.add(order_id)
                for order_id in header["refused"]:
                    self.outbox.pop(order_id, None)
            case Kind.WATCH | Kind.ENGINES:
                pass  # it plays without engines
            case _:
                raise AssertionError(message)

    def _play(self, order: Order) -> None:
        faults, rng, life = self.sim.faults_now, self.sim.rng, self.life
        if rng.random() < faults.hang:
            return
        self.sim.after(self.seconds_of(order), lambda: self._finish(order, life))

    def seconds_of(self, order: Order) -> float:
        """Duration of a rollout."""
        rng = self.sim.rng
        return rng.choice((rng.uniform(0.05, 1), rng.uniform(0.05, 1), rng.uniform(0.5, 20)))

    def _finish(self, order: Order, life: int) -> None:
        if life != self.life or self.running.pop(order.order_id, None) is None:
            return
        faults, rng = self.sim.faults_now, self.sim.rng
        status = TrajectoryStatus.COMPLETE
        if rng.random() < faults.error:
            status = TrajectoryStatus.ERROR
        elif rng.random() < faults.abort:
            status = TrajectoryStatus.ABORTED
        seed, version = order.task.seed, max(order.policy_version, self.sim.engine_version)
        # of five tasks one always fails, one always succeeds
        reward = float(rng.random() < (0.0, 0.2, 0.4, 0.6, 1.0)[seed % 5])
        frames = encode_trajectory(rollout(order, version, status=status, reward=reward, turns=1 + seed % 3))
        if rng.random() < faults.corrupt:
            frames = (frames[0], bytes(frames[1])[:-4], *frames[2:])
        self.outbox[order.order_id] = frames
        for _ in range(2 if rng.random() < faults.duplicate else 1):
            self.send(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames)


@dataclass
class Weights:
    """Contents of a checkpoint: the groups and trajectories in these weights, by update."""

    updates: int = 0
    history: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)


class SimulatedLearner(Peer):
    """Trains update ``u`` when all its groups are there; publishes; checkpoints; forgets everything else in a crash."""

    def __init__(self, sim: Simulation, checkpoint_every: int, credit: int) -> None:
        super().__init__(sim, "learner")
        self.checkpoint_every, self.credit = checkpoint_every, credit
        self.durable = self.older = Weights()
        """The newest checkpoint, and the one before."""
        self.damaged = 0
        self.evaluation: Mapping[str, Any] = {}
        self.life = 0
        self._start()

    def _start(self) -> None:
        self.session = f"s{self.life}"
        self.weights = Weights(self.durable.updates, list(self.durable.history))
        self.policy_version = -1
        self.live = -1
        """Newest version that was announced."""
        self.waiting: dict[int, int] = {}
        """Updates of the versions that are live out of turn."""
        self.plans: dict[str, tuple[int, Any]] = {}
        self.deliveries: dict[str, dict[int, str]] = {}
        self.log = ControlLog()
        self.told = {"updates": self.weights.updates, "durable_updates": self.durable.updates, "announced": None}
        """State told by the acknowledged part of the log."""
        self.busy = False

    def hello(self) -> dict[str, Any]:
        trained = [g for m in self.log.messages if m.kind is Kind.CONSUMED for g in m.header["group_ids"]]
        return {
            "role": "learner",
            "session": self.session,
            "number": self.log.acknowledged,
            **self.told,
            "credit_groups": self.credit,
            "holding": [*(g for g in self.plans if self._complete(g)), *trained],
        }

    def crash(self) -> None:
        self.life += 1
        if (damage := self.sim.faults_now.damage) and self.durable is not self.older and self.sim.rng.random() < damage:
            self.durable = self.older
            self.damaged += 1
        self._start()
        self.disconnect()

    def connected(self, header: dict[str, Any]) -> None:
        for group in [g for g in self.plans if g not in header["holding"]]:
            del self.plans[group], self.deliveries[group]
        self._applied(header["number"])
        self.log.repeat()
        if self.policy_version < 0:
            self.policy_version = header["policy_version"] + 1
            self._publish(self.policy_version, self.weights.updates, self.life)
        self._flush()

    def tell(self, kind: Kind, header: Mapping[str, Any]) -> None:
        """A control message, repeated until it is acknowledged."""
        self.log.append(kind, header)
        self._flush()

    def _flush(self) -> None:
        if self.welcome:
            while (taken := self.log.take()) is not None:
                self.send(taken[1].kind, dict(taken[1].header))

    def _applied(self, number: int) -> None:
        for message in self.log.acknowledge_through(number):
            header = message.header
            match message.kind:
                case Kind.CONSUMED:
                    self.told["updates"] = header["update"] + 1
                case Kind.VERSION:
                    self.told["announced"] = (header["policy_version"], header["updates"])
                case Kind.CHECKPOINTED:
                    self.told["durable_updates"] = header["updates"]

    def handle(self, message: WireMessage) -> None:
        header = message.header
        match message.kind:
            case Kind.PLAN:
                plan = decode_request(GroupPlan, header)
                self.plans[plan.group_id] = (header["update"], plan)
                self.deliveries[plan.group_id] = {}
                assert header["update"] >= self.weights.updates
                assert header["update"] <= plan.admitted_update + self.sim.config.staleness.max, "staleness bound"
                assert len(self.plans) <= max(self.credit, self.sim.config.groups.groups_per_step)
                self._train()
            case Kind.DELIVERY:
                trajectory = decode_trajectory(message.frames)
                assert trajectory.trajectory_id == header["trajectory_id"]
                assert header["reward"] == trajectory.rewards["environment"]
                self._check_replay(header, trajectory)
                self.deliveries[header["group_id"]][header["index"]] = trajectory.trajectory_id
                self._train()
            case Kind.CANCEL:
                for group in header["group_ids"]:
                    self.plans.pop(group, None)
                    self.deliveries.pop(group, None)
            case Kind.EVALUATION:
                self.evaluation = header
            case Kind.ACK:
                assert "missing" not in header, "nothing is lost within a connection"
                self._applied(header["number"])
            case _:
                raise AssertionError(message)

    def _complete(self, group: str) -> bool:
        return bool(len(self.deliveries[group]) == self.plans[group][1].delivered)

    def _check_replay(self, header: Mapping[str, Any], trajectory: Trajectory) -> None:
        plan, replay = self.plans[header["group_id"]][1], header.get("replay")
        assert (replay is not None) == (header["index"] >= plan.n_fresh)
        assert trajectory.task.task_id == plan.task.task_id
        if replay is None:
            return
        config = self.sim.config.replay
        assert config.enabled and (header["reward"] >= config.success_threshold or not plan.n_fresh)
        assert plan.candidates[header["index"] - plan.n_fresh] == trajectory.trajectory_id
        assert replay["weight"] >= 0
        if config.max_age is not None and self.life == 0:
            assert replay["age"] <= config.max_age

    def _report(self, members: list[str]) -> tuple[dict[str, list[str]], dict[str, Any]]:
        """Trajectories of each group that are trained, and the report of them."""
        rng = self.sim.rng
        trained, replayed = {}, {}
        for group in members:
            plan = self.plans[group][1]
            ids = [t for _, t in sorted(self.deliveries[group].items())]
            k = 0 if plan.left_out else plan.n_rollout - plan.n_fresh
            chosen = rng.sample(ids[plan.n_fresh :], k)
            trained[group] = ids[: plan.n_fresh]
            if chosen:
                replayed[group] = chosen
        every = [t for ids in (*trained.values(), *replayed.values()) for t in ids]
        ess = {"all": rng.random(), "fresh": rng.random(), "replay": rng.choice((None, rng.random()))}
        report = {"ess": ess, "entropy": {t: rng.random() for t in every if rng.random() < 0.9}, "choice_failed": 0}
        report["policy_version"] = self.policy_version
        return trained, {"replayed": replayed, **report}

    def _train(self) -> None:
        update, life = self.weights.updates, self.life
        members = [g for g, (u, _) in self.plans.items() if u == update and self._complete(g)]
        if self.busy or len(members) < self.sim.config.groups.groups_per_step:
            return
        assert len(members) == self.sim.config.groups.groups_per_step
        self.busy = True
        self.sim.after(self.update_seconds(), lambda: self._trained(update, members, life))

    def update_seconds(self) -> float:
        return self.sim.rng.uniform(0.1, 2)

    def publish_seconds(self) -> float:
        return self.sim.rng.uniform(0.05, 1)

    def _trained(self, update: int, members: list[str], life: int) -> None:
        if life != self.life:
            return
        trained, report = self._report(members)
        ids = tuple(t for g in members for t in trained[g])
        self.sim.replayed_total += sum(map(len, report["replayed"].values()))
        self.weights.history.append((tuple(members), ids))
        self.weights.updates = update + 1
        for group in members:
            del self.plans[group], self.deliveries[group]
        self.busy = False
        self.tell(Kind.CONSUMED, {"update": update, "group_ids": members, **report})
        self.policy_version += 1
        version, updates = self.policy_version, self.weights.updates
        self.sim.after(self.publish_seconds(), lambda: self._publish(version, updates, life))
        if self.weights.updates % self.checkpoint_every == 0:
            saved = Weights(self.weights.updates, list(self.weights.history))
            self.sim.after(self.sim.rng.uniform(0.01, 1), lambda: self._saved(saved, life))
        self._train()

    def _publish(self, version: int, updates: int, life: int) -> None:
        if life != self.life:
            return
        self.waiting[version] = updates
        # delays are drawn for each publication; a real one waits for the one before
        while (version := self.live + 1) in self.waiting or self.live < 0:
            version = min(self.waiting) if self.live < 0 else version
            self.live = version
            self.sim.engine_version = max(self.sim.engine_version, version)
            self.tell(Kind.VERSION, {"policy_version": version, "updates": self.waiting.pop(version)})

    def _saved(self, saved: Weights, life: int) -> None:
        if life == self.life and saved.updates > self.durable.updates:
            self.older, self.durable = self.durable, saved
            self.tell(Kind.CHECKPOINTED, {"updates": saved.updates})
