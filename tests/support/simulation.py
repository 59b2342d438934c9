"""The stage against simulated actors and a learner in virtual time, with faults: seeded, no sockets, no waiting.

The core and the store are the real ones; the network, the clock and the peers are not. Used by tests and benchmarks.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.schema import Trajectory
from pipeline.schema.codec import decode_trajectory
from pipeline.scorer.verdict import Verdict, combine
from pipeline.stage.core import StageCore
from pipeline.store.effects import Score, Send
from pipeline.store.records import GroupState
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import WireMessage
from tests.support.simulated_roles import Faults, Peer, SimulatedActor, SimulatedLearner


class Simulation:
    """Owns the clock. :meth:`run` ends when all updates are made, or after ``seconds_max`` of virtual time."""

    actor_kind: type[SimulatedActor] = SimulatedActor
    learner_kind: type[SimulatedLearner] = SimulatedLearner

    def __init__(
        self, config: RunConfig, path: Path, seed: int, faults: Faults, actors: int = 2, slots: int = 4
    ) -> None:
        self.config, self.path, self.faults = config, path, faults
        self.rng = random.Random(seed)
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.engine_version = -1
        self.acknowledged: set[str] = set()
        self.slow_scores = self.rng.random() < 0.5
        """Scores come later, as those of user functions do."""
        self.replayed_total = 0
        """Replays that the learner trained, repeats after its crashes counted."""
        self.restarts = 0
        self.core: StageCore | None = None
        self.store: ReplayStore | None = None
        self._inbox: list[tuple[str, Any, Any]] = []
        self._round = False
        self.actors = [self.actor_kind(self, f"actor-{i}", slots) for i in range(actors)]
        self.learner = self.learner_kind(
            self, config.checkpoint.every, self.rng.choice((1, 2, 3)) * config.groups.groups_per_step
        )
        self._start_stage()
        for peer in self.peers:
            self.after(self.rng.uniform(0, 1), peer.connect)
        self.after(1.0, self._mischief)

    @property
    def peers(self) -> list[Peer]:
        return [*self.actors, self.learner]

    @property
    def faults_now(self) -> Faults:
        return self.faults if self.now < self.faults.until else Faults()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._serial), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, seconds_max: float = 3000.0) -> None:
        def step_until(done: Callable[[], bool]) -> None:
            while not done() and self._heap and self.now < seconds_max:
                self.now, _, action = heapq.heappop(self._heap)
                action()

        step_until(lambda: self.learner.weights.updates >= self.config.run.total_steps)
        self.faults = Faults()
        settled = self.now + 20
        step_until(lambda: self.now >= settled)
        self._do_round()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def stage_event(self, event: tuple[str, Any, Any]) -> None:
        if self.core is not None:
            self._inbox.append(event)
            if not self._round:
                self._round = True
                self.after(self.rng.uniform(0, 0.02), self._do_round)

    def restart_stage(self) -> None:
        """kill -9 and start again."""
        self.restarts += 1
        assert self.store is not None
        self.store.close()
        self.core, self.store, self._inbox, self._round = None, None, [], False
        for peer in self.peers:
            peer.disconnect(silent=False)
        self.after(self.rng.uniform(0.1, 3), self._start_stage)

    def _start_stage(self) -> None:
        self.store = ReplayStore(self.path, "NORMAL")
        snapshot = self.store.load()
        score_now = None if self.slow_scores else self._score_now
        self.core = StageCore(self.config, snapshot, now=self.now, wall=self.now, score_now=score_now)
        self._do_round()

    def _score_now(self, trajectory: Trajectory) -> Verdict:
        if self.rng.random() < self.faults_now.unscored:
            return combine({"environment": None}, {"environment": 1.0})
        return combine(trajectory.rewards, {"environment": 1.0})

    def _score(self, store: ReplayStore, effect: Score) -> None:
        frames = store.payloads([effect.record.row_id])
        if effect.record.row_id not in frames:
            return
        trajectory = decode_trajectory(frames[effect.record.row_id])
        assert effect.trajectory is None or effect.trajectory.trajectory_id == trajectory.trajectory_id
        body = (effect.record, self._score_now(trajectory))
        core = self.core

        def deliver() -> None:
            if self.core is core:
                self.stage_event(("scored", None, body))

        self.after(self.rng.choice((0.01, self.rng.uniform(0, 3))), deliver)

    def _do_round(self) -> None:
        self._round = False
        core, store = self.core, self.store
        if core is None or store is None:
            return
        inbox, self._inbox = self._inbox, []
        core.set_time(self.now, self.now)
        for kind, peer, body in inbox:
            match kind:
                case "up":
                    core.peer_up(peer.name, body)
                case "down":
                    core.peer_down(peer.name, left=False)
                case "scored":
                    core.ingest.scored(*body)
                case _:
                    core.message(peer.name, body)
        core.plan()
        changes, effects = core.collect()
        crash = self.rng.random() < self.faults_now.stage_crash * 0.05
        if crash and self.rng.random() < 0.5:
            self.restart_stage()
            return
        store.commit(changes)
        self._check(core)
        if crash:
            effects = effects[: self.rng.randrange(len(effects) + 1)]
        for effect in effects:
            if isinstance(effect, Score):
                self._score(store, effect)
            elif isinstance(effect, Send):
                self._send(store, effect)
        if crash:
            self.restart_stage()
        else:
            self._wake()

    def _check(self, core: StageCore) -> None:
        """Check the invariants of a round."""
        config, replay, payloads = self.config.replay, core.replay, core.payloads.holders
        for group in core.records.values():
            ended = group.state is GroupState.CANCELLED
            if group.evaluation:
                waiting = [t for slot in group.slots if (t := slot.trajectory) is not None and t.reward is None]
                assert all(record.row_id in payloads for record in waiting), f"{group.group_id} cannot be scored"
                continue
            assert ended or group.n_rollout == self.config.groups.n_rollout, group
            assert len(group.replays) >= group.k, group
            needed = [slot.trajectory.row_id for slot in group.slots if slot.trajectory is not None]
            needed += [] if ended or group.dropped else [replay.entry.row_id for replay in group.replays]
            assert all(row_id in payloads for row_id in needed), f"{group.group_id} needs a payload that was freed"
            assert len({*needed}) == len(needed), f"{group.group_id} has a trajectory twice"
        stored: dict[str, int] = {}
        for entry in replay.pool:
            assert entry.row_id in payloads, f"the pool holds {entry.trajectory_id}, its payload was freed"
            stored[entry.task.task_id] = stored.get(entry.task.task_id, 0) + 1
        assert len(replay.pool) <= config.capacity
        assert all(n <= config.max_trajectories_per_task for n in stored.values())
        retired = {task_id for task_id, record in replay.difficulty.records.items() if record.retired}
        assert not retired & stored.keys(), "a retired task has stored trajectories"
        assert len(replay.groups) <= config.groups.capacity
        assert replay.bytes <= config.capacity_bytes
        for group in replay.groups:
            assert len(group.members) == self.config.groups.n_rollout and group.uses < config.groups.uses_max
            assert all(entry.row_id in payloads for entry in group.members), f"a payload of {group} was freed"
            assert group.task.task_id not in retired, "a retired task has a stored group"
        held = core.journal.counters["pool.saved"] + core.journal.counters["pool.imported"]
        evicted = sum(n for name, n in core.journal.counters.items() if name.startswith("pool.evicted."))
        assert held == evicted + len(replay.pool)
        evicted = sum(n for name, n in core.journal.counters.items() if name.startswith("stored_groups.evicted."))
        assert core.journal.counters["stored_groups.saved"] == evicted + len(replay.groups)

    def _send(self, store: ReplayStore, effect: Send) -> None:
        peer = next(p for p in self.peers if p.name == effect.peer)
        frames = store.payloads([effect.payload])[effect.payload] if effect.payload is not None else ()
        if peer.connection is not None and peer.connection.alive:
            peer.connection.post("down", lambda: peer.receive(WireMessage(effect.kind, effect.header, frames)))

    def _wake(self) -> None:
        core = self.core
        assert core is not None
        deadline = core.next_deadline()
        if deadline is not None:

            def tick() -> None:
                if self.core is core and core.next_deadline() is not None and core.next_deadline() <= self.now:  # type: ignore[operator]
                    self._do_round()

            self.at(max(self.now, deadline) + 1e-6, tick)

    def _mischief(self) -> None:
        faults, rng = self.faults_now, self.rng
        self.after(1.0, self._mischief)
        for actor in self.actors:
            if rng.random() < faults.actor_crash * 0.2:
                actor.crash()
            elif rng.random() < faults.disconnect * 0.2:
                actor.disconnect()
        if rng.random() < faults.learner_crash * 0.2:
            self.learner.crash()
        elif rng.random() < faults.disconnect * 0.2:
            self.learner.disconnect()
