"""The core of a replay stage over its store, for tests that tell it messages one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.schema import SCHEMA_VERSION, Order
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import decode_request
from pipeline.scorer.verdict import combine
from pipeline.stage.core import StageCore
from pipeline.store.effects import Send
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Kind, WireMessage
from tests.support.simulated_roles import rollout


class StoredStage:
    """Messages are kept instead of sent. :meth:`restart` goes on from the store as after a kill."""

    def __init__(self, path: Path, **sections: Any) -> None:
        self.path, self.sections = path, sections
        self.sent: list[Send] = []
        self.effects: list[Any] = []
        """Those of the last round."""
        self.start()

    def start(self) -> None:
        """Open the store; a test says which peers greet it."""
        self.store = ReplayStore(self.path, "NORMAL")
        config = RunConfig.model_validate(self.sections)
        self.core = StageCore(config, self.store.load(), score_now=lambda t: combine(t.rewards, {"environment": 1.0}))
        self.round()

    def restart(self, **sections: Any) -> None:
        self.store.close()
        self.sections |= sections
        self.start()

    def up(self, peer: str, **hello: Any) -> None:
        role = peer.partition("-")[0]
        self.core.peer_up(peer, {"role": role, "schema_version": SCHEMA_VERSION, **hello})

    def round(self) -> list[Send]:
        self.core.plan()
        changes, self.effects = self.core.collect()
        self.store.commit(changes)
        new = [effect for effect in self.effects if isinstance(effect, Send)]
        self.sent += new
        return new

    def tell(self, kind: Kind, **header: Any) -> None:
        """A numbered message of the learner."""
        number = self.core.control.applied + 1
        self.core.message("learner", WireMessage(kind, {"number": number, **header}))
        self.round()

    def answer(self, order: Order, version: int = 0, **more: Any) -> None:
        frames = encode_trajectory(rollout(order, version, **more))
        self.core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames))
        self.round()

    def orders(self) -> list[Order]:
        return [decode_request(Order, s.header) for s in self.sent if s.kind is Kind.ORDER]

    def leased(self) -> list[Order]:
        now = {k.text for g in self.core.records.values() for k, o in g.orders.items() if o.state == "leased"}
        return [order for order in self.orders() if order.order_id in now]
