"""A simulated learner: trains, publishes and checkpoints; a crash takes it back to its last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.codec import decode_plan, decode_trajectory
from pipeline.replay.simulated_peers import Peer
from pipeline.schema import Trajectory
from pipeline.transport.base import Kind
from pipeline.transport.base import Message as WireMessage

if TYPE_CHECKING:
    from pipeline.replay.simulation import Simulation


@dataclass
class Weights:
    """What a checkpoint holds: the groups and trajectories in these weights, by update."""

    updates: int = 0
    history: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)


class SimulatedLearner(Peer):
    """Trains update ``u`` when all its groups are there; publishes; checkpoints; forgets everything else in a crash."""

    def __init__(self, sim: Simulation, checkpoint_every: int, credit: int) -> None:
        super().__init__(sim, "learner")
        self.checkpoint_every, self.credit = checkpoint_every, credit
        self.durable = Weights()
        self.evaluation: Mapping[str, Any] = {}
        self.life = 0
        self._start()

    def _start(self) -> None:
        self.session = f"s{self.life}"
        self.weights = Weights(self.durable.updates, list(self.durable.history))
        self.policy_version = -1
        self.plans: dict[str, tuple[int, Any]] = {}
        self.deliveries: dict[str, dict[int, str]] = {}
        self.unacknowledged: dict[int, list[str]] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self.busy = False

    def hello(self) -> dict[str, Any]:
        return {
            "role": "learner",
            "session": self.session,
            "updates": self.weights.updates,
            "policy_version": self.policy_version,
            "durable_updates": self.durable.updates,
            "credit_groups": self.credit,
            "holding": [g for g in self.plans if self._complete(g)],
            "consumed": [[u, ids] for u, ids in self.unacknowledged.items()],
            "trained": [[u, self.reports[u]] for u in self.unacknowledged if self.sim.rng.random() < 0.8],
        }

    def crash(self) -> None:
        self.life += 1
        self._start()
        self.disconnect()

    def connected(self, header: dict[str, Any]) -> None:
        for group in [g for g in self.plans if not self._complete(g)]:
            del self.plans[group], self.deliveries[group]
        if self.policy_version < 0:
            self.policy_version = header["policy_version"] + 1
            self._publish(self.policy_version, self.weights.updates)
        else:
            self._say_version()
            if self.durable.updates:
                self.send(Kind.CHECKPOINTED, {"updates": self.durable.updates})

    def handle(self, message: WireMessage) -> None:
        header = message.header
        match message.kind:
            case Kind.PLAN:
                plan = decode_plan(header)
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
                self.unacknowledged.pop(header["update"], None)
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
        assert config.enabled and header["reward"] >= config.success_threshold
        assert plan.candidates[header["index"] - plan.n_fresh] == trajectory.trajectory_id
        assert replay["weight"] > 0 and (replay["turn"] is None) == (config.unit == "trajectory")
        assert replay["turn"] is None or 0 <= replay["turn"] < len(trajectory.turns)
        if config.max_age is not None and self.life == 0:
            assert replay["age"] <= config.max_age

    def _report(self, members: list[str]) -> tuple[dict[str, list[str]], dict[str, Any]]:
        """Which trajectories of each group are trained, and what is said of it."""
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
        self.sim.after(self.sim.rng.uniform(0.1, 2), lambda: self._trained(update, members, life))

    def _trained(self, update: int, members: list[str], life: int) -> None:
        if life != self.life:
            return
        trained, report = self._report(members)
        ids = tuple(t for g in members for t in trained[g])
        self.sim.replayed_total += sum(map(len, report["replayed"].values()))
        self.reports[update] = report
        self.weights.history.append((tuple(members), ids))
        self.weights.updates = update + 1
        self.sim.trained_total += 1
        for group in members:
            del self.plans[group], self.deliveries[group]
        self.unacknowledged[update] = members
        self.busy = False
        self.send(Kind.CONSUMED, {"update": update, "group_ids": members, **report})
        self.policy_version += 1
        version, updates = self.policy_version, self.weights.updates
        self.sim.after(self.sim.rng.uniform(0.05, 1), lambda: self._publish(version, updates, life))
        if self.weights.updates % self.checkpoint_every == 0:
            saved = Weights(self.weights.updates, list(self.weights.history))
            self.sim.after(self.sim.rng.uniform(0.01, 1), lambda: self._saved(saved, life))
        self._train()

    def _publish(self, version: int, updates: int, life: int | None = None) -> None:
        if life is None or life == self.life:
            self.sim.engine_version = max(self.sim.engine_version, version)
            # delays are drawn for each publication; a real one waits for the one before
            self.live = max(getattr(self, "live", (-1, 0)), (version, updates))
            self._say_version()

    def _say_version(self) -> None:
        version, updates = getattr(self, "live", (-1, 0))
        if version >= 0:
            self.send(Kind.VERSION, {"policy_version": version, "updates": updates})

    def _saved(self, saved: Weights, life: int) -> None:
        if life == self.life and saved.updates > self.durable.updates:
            self.durable = saved
            self.send(Kind.CHECKPOINTED, {"updates": saved.updates})
