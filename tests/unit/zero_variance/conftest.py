"""A replay stage over a store whose groups get the rewards that a test says; a learner that can go back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline.schema import GroupPlan, Order
from pipeline.schema.orders import decode_request
from pipeline.store.effects import Send
from pipeline.store.ledger import Ledger, read_ledger
from pipeline.transport.messages import Kind
from tests.support.stored_stage import StoredStage


class Stage(StoredStage):
    """A learner takes what is sent to it; an actor holds its orders."""

    def __init__(self, path: Path, *, credit: int = 64, **sections: Any) -> None:
        self.credit = credit
        defaults: dict[str, Any] = {
            "run": {"total_steps": 1000},
            "environments": {"a": {"max_seconds": 10}},
            "groups": {"n_rollout": 2, "groups_per_step": 2, "zero_variance": "drop"},
            "staleness": {"max": 0},
        }
        sections["replay"] = {"keep_trained": 0, **sections.get("replay", {})}
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
        super().__init__(path, **defaults | sections)

    def start(self) -> None:
        super().start()
        self.up("actor-0", slots=100, holding=list(self.holding))
        self.greet()

    def greet(self) -> None:
        whole = [g for g, (_, plan) in self.plans.items() if self.delivered[g] == plan.delivered]
        self.plans = {g: self.plans[g] for g in whole}
        hello = {"session": f"s{self.life}", "updates": self.updates, "policy_version": self.version,
                 "durable_updates": 0, "credit_groups": self.credit, "holding": whole}  # fmt: skip
        self.up("learner", **hello)
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

    def round(self) -> list[Send]:
        new = super().round()
        for sent in new:
            self._receive(sent)
        return new

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

    def take(self, order_id: str, reward: float) -> None:
        order = self.holding.pop(order_id)
        self.answer(order, max(0, order.policy_version), reward=reward)

    def play(self, *rewards: float) -> str:
        """Answer all orders of the oldest group that has all its orders out; its id."""
        group = min(order.group_id for order in self.holding.values())
        orders = sorted(o.order_id for o in self.holding.values() if o.group_id == group)
        assert len(orders) == len(rewards), (orders, rewards)
        for order_id, reward in zip(orders, rewards, strict=True):
            self.take(order_id, reward)
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
        one.store.close()


@pytest.fixture
def stage_class() -> type[Stage]:
    return Stage
