"""A score is a number or it is None with a reason; user code cannot stop the scorer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config.rewards import ScorerConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime import plugin_limits
from pipeline.runtime.plugin_limits import interrupting_blocks
from pipeline.runtime.plugins import resolve
from pipeline.schema import Order, Task, Trajectory
from pipeline.scorer.functions import HUNG_MAX
from pipeline.scorer.scorer import Scorer
from pipeline.scorer.verdict import Verdict
from tests.support.simulated_roles import rollout

PLUGINS = Path(__file__).with_name("plugins_for_scorer.py")


def trajectory() -> Trajectory:
    return rollout(Order("g000000.1.0", "g000000", Task("a/0", "a", 0), 1, 0, 0, 10.0), 0)


def scorer(*functions: dict[str, Any], seen: list[Any] | None = None, **options: Any) -> Scorer:
    sections = [{**f, "path": f"{PLUGINS}:{f['path']}", "name": f["path"]} for f in functions]
    config = ScorerConfig.model_validate({"functions": sections, **options})
    return Scorer(config, (lambda *a: seen.append(a)) if seen is not None else None)


async def test_reward_is_the_weighted_sum_of_all_parts() -> None:
    verdict = await scorer({"path": "length", "weight": 0.25}, {"path": "slowly", "weight": 2.0}).score(trajectory())
    assert verdict.reward == 1.0 + 0.25 * 2 + 2.0 * 0.5
    assert dict(verdict.rewards) == {"environment": 1.0, "length": 2.0, "slowly": 0.5}


async def test_the_start_of_a_worker_process_is_not_bounded_by_the_limit_of_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    async def run_sync(function: Any, *args: Any, **options: Any) -> float:
        limits.append((function.__name__, anyio.current_effective_deadline() - anyio.current_time() > 60))
        return 1.0

    monkeypatch.setattr("anyio.to_process.run_sync", run_sync)
    stage = scorer({"path": "length", "worker": True, "timeout_seconds": 60})
    for _ in range(2):
        assert (await stage.score(trajectory())).rewards["length"] == 1.0
    assert limits == [("warm_up", True), ("call_in_worker", False), ("call_in_worker", False)]


@pytest.mark.parametrize(
    ("name", "reason", "worker"),
    [
        ("raises", "raised", False), ("gives_up_waiting", "raised", False), ("text", "type", False),
        ("nan", "nonfinite", False), ("nothing", "missing", False), ("hangs", "timeout", False),
        ("blocks", "timeout", False),
        ("spins", "timeout", True), ("dies", "crashed", True),
    ],
)  # fmt: skip
async def test_a_score_that_fails_is_none_and_counted(name: str, reason: str, worker: bool) -> None:
    seen: list[Any] = []
    # a worker process takes a while to start where the machine is busy, and only what hangs has to be waited for
    timeout = 0.2 if reason == "timeout" else 30.0
    verdict = await scorer({"path": name, "worker": worker, "timeout_seconds": timeout}, seen=seen).score(trajectory())
    assert verdict.reward is None
    assert verdict.rewards[name] is None and verdict.rewards["environment"] == 1.0
    assert [(f.name, f.reason) for f in verdict.failures] == [(name, reason)]
    assert [(n, r) for n, _, r in seen] == [(name, reason)]
    if name == "raises":
        assert "KeyError" in verdict.failures[0].details and PLUGINS.name in verdict.failures[0].details


@pytest.mark.parametrize(
    ("name", "reason", "worker"),
    [
        ("raises_cancelled", "raised", False), ("leaves", "raised", False), ("leaves_in_a_thread", "raised", False),
        ("unprintable", "raised", False), ("shouts", "raised", False), ("odd", "type", False),
    ],
)  # fmt: skip
async def test_no_function_ends_the_stage_or_another_trajectory(name: str, reason: str, worker: bool) -> None:
    """Neither by leaving nor by cancelling; what is kept of its words is bounded."""
    stage = scorer({"path": name, "worker": worker}, {"path": "length"})
    verdict = await stage.score(trajectory())
    assert verdict.reward is None and verdict.rewards["length"] == 2.0
    assert [(f.name, f.reason) for f in verdict.failures] == [(name, reason)]
    assert 0 < len(verdict.failures[0].details) < 10_000


async def test_functions_that_fail_in_one_worker_are_counted_and_the_next_is_called() -> None:
    failing = {"raises": "raised", "text": "type", "leaves_in_a_thread": "raised", "shouts": "raised"}
    stage = scorer(*({"path": name, "worker": True} for name in [*failing, "length"]), workers=1)
    verdict = await stage.score(trajectory())
    assert verdict.reward is None and verdict.rewards["length"] == 2.0
    assert {failure.name: failure.reason for failure in verdict.failures} == failing
    assert all(0 < len(failure.details) < 10_000 for failure in verdict.failures)
    details = next(failure.details for failure in verdict.failures if failure.name == "raises")
    assert "KeyError" in details and PLUGINS.name in details


@pytest.mark.parametrize("name", ["by_index", "different", "one_by_one", "packed"])
async def test_a_value_that_is_no_list_is_a_failure_in_a_worker_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a mapping, and elements of a set in their order, would be taken for rewards."""

    async def run_sync(function: Any, *args: Any, **options: Any) -> Any:
        return function(*args)

    monkeypatch.setattr("anyio.to_process.run_sync", run_sync)
    stage = scorer({"path": name, "per": "group", "worker": True})
    members = [trajectory(), trajectory()]
    verdicts = await stage.score_group(members, [await stage.score(member) for member in members])
    assert [verdict.reward for verdict in verdicts] == [None, None]
    assert {f.reason for verdict in verdicts for f in verdict.failures} == {"type"}


async def test_tasks_that_a_function_left_running_are_ended() -> None:
    verdict = await scorer({"path": "leaves_tasks"}).score(trajectory())
    (left,) = resolve(f"{PLUGINS}:leaves_tasks").__globals__["LEFT"]
    with anyio.fail_after(60):
        await asyncio.wait([left])
    assert verdict.reward == 2.0 and left.cancelled()


async def test_a_function_whose_calls_never_return_runs_in_a_worker_after_some_and_leaves_no_more_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin_limits, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.config.rewards.CONCURRENCY", 2)
    name, before, verdicts = "never_returns_for_odd_seeds", threading.enumerate(), dict[int, Verdict]()
    stage = scorer({"path": name, "timeout_seconds": 0.3})

    async def score(seed: int) -> None:
        order = Order(f"g{seed}.0.0", f"g{seed}", Task(f"a/{seed}", "a", seed), 1, 0, 0, 10.0)
        verdicts[seed] = await stage.score(rollout(order, 0))

    def hanging() -> int:
        return sum(thread.name == "plug-in" and thread not in before for thread in threading.enumerate())

    async with anyio.create_task_group() as group:
        for seed in range(2 * HUNG_MAX + 6):
            group.start_soon(score, seed)
    assert hanging() <= HUNG_MAX + 2
    assert [verdicts[seed].failures[0].reason for seed in range(1, len(verdicts), 2)] == ["timeout"] * (HUNG_MAX + 3)
    assert "plugins_for_scorer.py, line" in caplog.text and "From now on it runs in a worker process" in caplog.text
    threads = hanging()
    for seed in (20, 21):
        await score(seed)
    assert hanging() == threads, "a call that hangs in a process is ended with it"
    stage = scorer({"path": name, "worker": True})
    await score(24)
    assert verdicts[24].rewards[name] == 1.0


async def test_a_function_that_holds_the_event_loop_is_interrupted() -> None:
    with interrupting_blocks(1.0):
        verdict = await scorer({"path": "blocks_the_loop"}, {"path": "length"}).score(trajectory())
    assert verdict.reward is None and verdict.rewards["length"] == 2.0
    (failure,) = verdict.failures
    assert (failure.name, failure.reason) == ("blocks_the_loop", "raised")
    assert "in blocks_the_loop)" in failure.details and "time.sleep(60)" in failure.traceback


async def test_a_function_cannot_change_what_is_stored() -> None:
    given = trajectory()
    given = replace(given, task=replace(given.task, payload={"rows": [1, 2]}))
    verdict = await scorer({"path": "meddles"}).score(given)
    assert verdict.reward == 2.0 and given.rewards == {"environment": 1.0}
    assert given.task.payload == {"rows": [1, 2]} and "found" not in given.turns[0].signals


async def test_an_async_function_that_holds_the_loop_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    stage = scorer({"path": "holds_the_loop"}, {"path": "slowly"})
    for _ in range(2):
        assert (await stage.score(trajectory())).reward == 2.5
    told = [record.message for record in caplog.records if "blocked the event loop" in record.message]
    assert len(told) == 1 and told[0].startswith("holds_the_loop") and "worker: true" in told[0]


async def test_async_functions_run_together_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.config.rewards.CONCURRENCY", 20)
    stage = scorer({"path": "in_twenties"})
    together: list[float | None] = []

    async def score() -> None:
        together.append((await stage.score(trajectory())).rewards["in_twenties"])

    async with anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(score)
    assert len(together) == 40 and all(n is not None and n <= 20 for n in together)


async def test_a_missing_environment_score_is_not_zero() -> None:
    unscored = trajectory().scored(None, {"environment": None})
    assert scorer().score_now(unscored).reward is None
    assert scorer(environment_weight=0.0).score_now(unscored).reward == 0.0


def test_a_function_without_weight_does_not_decide() -> None:
    async def check() -> None:
        verdict = await scorer({"path": "raises", "weight": 0.0}).score(trajectory())
        assert verdict.reward == 1.0 and verdict.failures

    anyio.run(check)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nocolon", "module:function"),
        ("no.such.module:f", "No module"),
        ("nowhere.py:f", "there is no file"),
        (f"{PLUGINS}:missing", "has no 'missing'; it has"),
        (f"{PLUGINS}:NOT_A_FUNCTION", "a int"),
    ],
)
def test_a_bad_path_is_an_error_at_start(path: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Scorer(ScorerConfig.model_validate({"functions": [{"path": path}]}))
