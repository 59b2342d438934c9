"""Pure parts: the queue, the budget, and the threads of blocking environments."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.process.actor import OrderQueue
from actors.rollout.agent_loop import Budget, Limit
from pipeline.errors import PlugInError, boundary
from pipeline.runtime import plugin_limits
from pipeline.runtime.plugin_limits import BlockingCalls
from pipeline.schema import Order, Task

SLOTS = 3


class DeskMachine(RuleBasedStateMachine):
    """Every order that was accepted leaves exactly once: finished, withdrawn, or withdrawn with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = OrderQueue(SLOTS)
        self.serial = 0
        self.accepted: list[str] = []
        self.in_flight: list[str] = []
        self.left: list[str] = []

    @rule()
    def accept(self) -> None:
        order = Order(f"o{self.serial}", "g", Task("t", "e", 0), 0, 0, 0, 1.0)
        self.serial += 1
        assert self.queue.accept(order)
        assert not self.queue.accept(order)
        self.accepted.append(order.order_id)

    @rule()
    def begin(self) -> None:
        order = self.queue.begin()
        waiting = [i for i in self.accepted if i not in self.in_flight and i not in self.left]
        assert (order is None) == (not waiting or len(self.in_flight) == SLOTS)
        if order is not None:
            assert order.order_id == waiting[0]
            self.in_flight.append(order.order_id)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        order_id = data.draw(st.sampled_from(self.in_flight))
        self.queue.finish(order_id)
        self.in_flight.remove(order_id)
        self.left.append(order_id)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        order_id = data.draw(st.sampled_from(self.accepted))
        order = self.queue.withdraw(order_id)
        assert (order is None) == (order_id in self.in_flight or order_id in self.left)
        if order is not None:
            self.left.append(order_id)

    @rule()
    def withdraw_all(self) -> None:
        self.left += [order.order_id for order in self.queue.withdraw_all()]

    @invariant()
    def every_order_is_in_one_place(self) -> None:
        assert sorted(self.queue.ids + self.left) == sorted(self.accepted)
        assert self.queue.in_flight == len(self.in_flight) <= SLOTS


TestDeskMachine = DeskMachine.TestCase
TestDeskMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@given(
    limits=st.tuples(st.integers(1, 5), st.integers(1, 60), st.integers(2, 60), st.integers(1, 9)),
    added=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    used=st.lists(st.floats(0, 1), min_size=6, max_size=6),
)
def test_no_limit_is_ever_exceeded(limits: tuple[int, int, int, int], added: list[int], used: list[float]) -> None:
    turns_max, tokens_max, context_max, turn_max = limits
    budget, prompt, turns, stored = Budget(*limits), 0, 0, 0
    for n_added, share in zip(added, used, strict=True):
        prompt += n_added
        room = budget.room(prompt, n_added)
        if isinstance(room, Limit):
            assert turns == turns_max or prompt >= context_max or stored + n_added >= tokens_max
            return
        sampled = max(1, round(room * share))
        assert 1 <= room <= turn_max
        prompt, turns, stored = prompt + sampled, turns + 1, stored + n_added + sampled
        budget.spend(n_added, sampled)
        assert turns <= turns_max and stored <= tokens_max and prompt <= context_max


async def test_a_cancelled_call_keeps_its_place_while_it_may_still_return() -> None:
    calls, release = BlockingCalls(1), threading.Event()
    with anyio.move_on_after(0.02) as first:
        await calls.run(release.wait, 20)
    assert first.cancelled_caught
    with anyio.move_on_after(0.02) as second:
        await calls.run(int, "3")
    assert second.cancelled_caught
    release.set()
    with anyio.fail_after(60):
        assert await calls.run(int, "3") == 3
    assert calls.hung == 0


@pytest.mark.parametrize("seed", range(8))
async def test_hung_calls_leave_all_places_to_others_up_to_a_bound_and_are_counted_while_they_hang(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any sequence of calls that hang, return late or return: either every place can be used, or the process is
    to be started again; threads are bounded."""
    monkeypatch.setattr(plugin_limits, "GRACE_SECONDS", 0.01)
    draw, threads_max = random.Random(seed), random.Random(seed).randint(1, 6)
    calls, hanging = BlockingCalls(threads_max, 0.01), list[threading.Event]()

    async def hang() -> None:
        event = threading.Event()

        def waits() -> None:
            event.wait(60)

        with anyio.move_on_after(0.01):
            await calls.run(waits)
        hanging.append(event)

    async def until(holds: Callable[[], bool]) -> None:
        with anyio.fail_after(60):
            while not holds():
                await anyio.sleep(0.005)

    before = threading.active_count()
    for _ in range(30):
        if draw.random() < 0.6 and not calls.exhausted:
            await hang()
        elif hanging:
            hanging.pop(draw.randrange(len(hanging))).set()
        await until(lambda: calls.hung == len(hanging))
        assert threading.active_count() - before <= threads_max + calls.hung_max
        assert ("in waits" in calls.hung_at()) == bool(hanging)
        together = threading.Barrier(threads_max)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for _ in range(threads_max):
                    group.start_soon(calls.run, together.wait, 60)
    assert calls.exhausted == (len(hanging) >= calls.hung_max)
    for event in hanging:
        event.set()
    await until(lambda: calls.hung == 0)


async def test_what_a_call_returns_after_it_was_given_up_can_be_freed() -> None:
    calls, release, freed = BlockingCalls(1), threading.Event(), threading.Event()

    def begin() -> str:
        release.wait(60)
        return "episode"

    with anyio.move_on_after(0.02):
        await calls.run(begin, late=lambda episode: freed.set() if episode == "episode" else None)
    release.set()
    assert await anyio.to_thread.run_sync(freed.wait, 60)


@pytest.mark.parametrize("settled", [False, True])
async def test_what_a_call_has_returned_is_freed_though_it_is_given_up_before_it_is_taken(settled: bool) -> None:
    """The call ends, and is cancelled before the event loop has looked, or before the waiting task runs again."""
    calls, runs, ends, freed = BlockingCalls(1), threading.Event(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def begin() -> str:
        threads.append(threading.current_thread())
        runs.set()
        assert ends.wait(60)
        return "episode"

    task = asyncio.ensure_future(calls.run(begin, late=lambda episode: freed.set()))
    await anyio.to_thread.run_sync(runs.wait, 60)
    ends.set()
    threads[0].join(60)
    if settled:
        asyncio.get_running_loop().call_soon(task.cancel)
    else:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await anyio.to_thread.run_sync(freed.wait, 5)


async def test_what_a_thread_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        await BlockingCalls(1).run(divmod, 1, 0)


async def test_exit_in_a_thread_does_not_end_the_actor() -> None:
    with pytest.raises(PlugInError, match="step failed with SystemExit"), boundary("step"):
        await BlockingCalls(1).run(exit, 3)
