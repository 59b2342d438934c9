"""A replay stage over a store whose groups get the rewards that a test says; a learner that can go back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.schema import SCHEMA_VERSION, GroupPlan, Order
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import decode_request
from pipeline.scorer.verdict import combine
from pipeline.stage.core import StageCore
from pipeline.store.effects import Send
from pipeline.store.ledger import Ledger, read_ledger
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Kind, WireMessage
from tests.support.simulated_roles import rollout


class Stage:
    """Messages are kept instead of sent; :meth:`restart` goes on from the store as after a kill."""

    def __init__(self, path: Path, *, credit: int = 64, **sections: Any) -> None:
        self.path, self.credit = path, credit
        self.sections = {
            "run": {"total_steps": 1000},
            "environments": {"a": {"max_seconds": 10}},
            "groups": {"n_rollout": 2, "groups_per_step": 2, "zero_variance": "drop"},
            "staleness": {"max": 0},
            **sections,
        }
        self.sections["replay"] = {"keep_trained": 0, **self.sections.get("replay", {})}
        self.version = -1
        self.updates = 0
        self.updates_live_max = 0
        """The most updates that announced weights ever had."""
        self.life = 0
        self.plans: dict[str, tuple[int, GroupPlan]] = {}
        """Groups that the learner holds."""
        self.delivered: Counter[str] = Counter()
        self.holding: dict[str, Order] = {}
        self.trained: dict[int, list[str]] = {}
        """Groups by update, in the learner's present weights."""
        self.store: ReplayStore | None = None
        self.start()

    def start(self) -> None:
        config = RunConfig.model_validate(self.sections)
        self.store = ReplayStore(self.path, "NORMAL")
        score = lambda t: combine(t.rewards, {"environment": 1.0})  # noqa: E731
        self.core = StageCore(config, self.store.load(), score_now=score)
        self.round()
        actor = {"role": "actor", "schema_version": SCHEMA_VERSION, "slots": 100, "holding": list(self.holding)}
        self.core.peer_up("actor-0", actor)
        self.greet()

    def restart(self, **sections: Any) -> None:
        assert self.store is not None
        self.store.close()
        self.sections |= sections
        self.start()

    def close(self) -> None:
        assert self.store is not None
        self.store.close()

    def greet(self) -> None:
        whole = [g for g, (_, plan) in self.plans.items() if self.delivered[g] == plan.delivered]
        self.plans = {g: self.plans[g] for g in whole}
        hello = {"session": f"s{self.life}", "updates": self.updates, "policy_version": self.version,
                 "durable_updates": 0, "credit_groups": self.credit, "holding": whole}  # fmt: skip
        self.core.peer_up("learner", {"role": "learner", "schema_version": SCHEMA_VERSION, **hello})
        self.round()
        self.publish()

    def publish(self) -> None:
        self.version = max(self.version, self.core.policy_version) + 1
        self.updates_live_max = max(self.updates_live_max, self.updates)
        self.tell(Kind.VERSION, policy_version=self.version, updates=self.updates)

    def go_back(self, updates: int) -> None:
        """The learner is killed and goes on from older weights."""
        self.life += 1
        self.updates = min(updates, self.updates)
        self.plans, self.delivered = {}, Counter()
        self.trained = {u: groups for u, groups in self.trained.items() if u < self.updates}
        self.greet()

    def round(self) -> None:
        assert self.store is not None
        self.core.plan()
        changes, effects = self.core.collect()
        self.store.commit(changes)
        for effect in effects:
            if isinstance(effect, Send):
                self._receive(effect)

    def _receive(self, sent: Send) -> None:
        match sent.kind:
            case Kind.ORDER:
                order = decode_request(Order, sent.header)
                self.holding[order.order_id] = order
            case Kind.CANCEL if sent.peer == "actor-0":
                for order_id in sent.header["order_ids"]:
                    self.holding.pop(order_id, None)
            case Kind.CANCEL:
                for group in sent.header["group_ids"]:
                    self.plans.pop(group, None)
            case Kind.PLAN:
                plan = decode_request(GroupPlan, sent.header)
                self.plans[plan.group_id] = (sent.header["update"], plan)
                self.delivered[plan.group_id] = 0
            case Kind.DELIVERY:
                assert not self.plans[sent.header["group_id"]][1].left_out, "nothing of a left out group is delivered"
                self.delivered[sent.header["group_id"]] += 1
            case Kind.REFUSED:
                raise AssertionError(sent.header)

    def tell(self, kind: Kind, **header: Any) -> None:
        number = self.core.control.applied + 1
        self.core.message("learner", WireMessage(kind, {"number": number, **header}))
        self.round()

    def answer(self, order_id: str, reward: float) -> None:
        order = self.holding.pop(order_id)
        frames = encode_trajectory(rollout(order, max(0, order.policy_version), reward=reward))
        self.core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": order_id}, frames))
        self.round()

    def play(self, *rewards: float) -> str:
        """Answer all orders of the oldest group that has all its orders out; its id."""
        group = min(order.group_id for order in self.holding.values())
        orders = sorted(o.order_id for o in self.holding.values() if o.group_id == group)
        assert len(orders) == len(rewards), (orders, rewards)
        for order_id, reward in zip(orders, rewards, strict=True):
            self.answer(order_id, reward)
        return group

    def members(self) -> list[str]:
        """Groups of the next update that the learner holds whole."""
        return sorted(
            g for g, (u, plan) in self.plans.items() if u == self.updates and self.delivered[g] == plan.delivered
        )

    def train(self, *, publish: bool = True) -> list[str]:
        """Make the next update; its groups."""
        members = self.members()
        assert len(members) == self.core.staleness.rule.groups_per_step, (self.updates, self.plans)
        update = self.updates
        self.updates += 1
        self.trained[update] = members
        for group in members:
            del self.plans[group]
        self.tell(Kind.CONSUMED, update=update, group_ids=members)
        if publish:
            self.publish()
        return members

    def counted(self, *names: str) -> list[int]:
        return [self.core.journal.counters[name] for name in names]

    def ledger(self) -> Ledger:
        ledger = read_ledger(self.path, rows=True)
        assert ledger.audit() == []
        return ledger


@pytest.fixture
def stage(tmp_path: Path) -> Iterable[Any]:
    """Makes stages, closed at the end."""
    made: list[Stage] = []

    def make(**sections: Any) -> Stage:
        made.append(Stage(tmp_path / f"replay-{len(made)}.sqlite", **sections))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def stage_class() -> type[Stage]:
    return Stage
