"""A simulated actor: plays orders for a random time, keeps what is not acknowledged, forgets everything in a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.codec import decode_order, encode_trajectory
from pipeline.replay.simulated_peers import Peer, rollout
from pipeline.schema import Order, TrajectoryStatus
from pipeline.transport.base import Frames, Kind
from pipeline.transport.base import Message as WireMessage

if TYPE_CHECKING:
    from pipeline.replay.simulation import Simulation


class SimulatedActor(Peer):
    """Plays orders for a random time; keeps what is not acknowledged."""

    def __init__(self, sim: Simulation, name: str, slots: int) -> None:
        super().__init__(sim, name)
        self.slots = slots
        self.playing: dict[str, Order] = {}
        self.outbox: dict[str, Frames] = {}
        self.life = 0

    def hello(self) -> dict[str, Any]:
        return {"role": "actor", "slots": self.slots, "holding": [*self.playing, *self.outbox]}

    def connected(self, header: dict[str, Any]) -> None:
        for trajectory_id, frames in self.outbox.items():
            self.send(Kind.TRAJECTORY, {"trajectory_id": trajectory_id}, frames)

    def crash(self) -> None:
        self.life += 1
        self.playing, self.outbox = {}, {}
        self.disconnect()

    def handle(self, message: WireMessage) -> None:
        header = message.header
        match message.kind:
            case Kind.ORDER:
                order = decode_order(header)
                assert order.order_id not in self.playing and order.order_id not in self.outbox
                self.playing[order.order_id] = order
                assert len(self.playing) + len(self.outbox) <= self.slots * 4
                self._play(order)
            case Kind.CANCEL:
                for order_id in header["order_ids"]:
                    self.playing.pop(order_id, None)
                    self.outbox.pop(order_id, None)
            case Kind.ACK:
                for order_id in header["trajectory_ids"]:
                    self.outbox.pop(order_id, None)
                    self.sim.acknowledged.add(order_id)
                for order_id in header["refused"]:
                    self.outbox.pop(order_id, None)
            case _:
                raise AssertionError(message)

    def _play(self, order: Order) -> None:
        faults, rng, life = self.sim.faults_now, self.sim.rng, self.life
        if rng.random() < faults.hang:
            return
        seconds = rng.choice((rng.uniform(0.05, 1), rng.uniform(0.05, 1), rng.uniform(0.5, 20)))
        self.sim.after(seconds, lambda: self._finish(order, life))

    def _finish(self, order: Order, life: int) -> None:
        if life != self.life or self.playing.pop(order.order_id, None) is None:
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
