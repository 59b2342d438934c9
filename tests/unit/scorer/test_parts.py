"""Functions of a batch and of a group, parts for some environments, and what becomes of a sum when one part fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import RunConfig
from pipeline.config.rewards import ScorerConfig
from pipeline.scorer.functions import Outcome
from pipeline.scorer.scorer import ScoreBatcher, Scorer
from pipeline.scorer.verdict import ScoreFailure, Verdict
from tests.unit.scorer.conftest import said

PLUGINS = Path(__file__).with_name("plugins_for_scorer.py")


def scorer(*functions: dict[str, Any], **options: Any) -> Scorer:
    sections = [{"name": f["path"], **f, "path": f"{PLUGINS}:{f['path']}"} for f in functions]
    return Scorer(ScorerConfig.model_validate({"functions": sections, **options}))


async def score_all(stage: Scorer, n: int, environment: str = "q") -> list[Verdict]:
    verdicts: dict[int, Verdict] = {}

    async def one(number: int) -> None:
        verdicts[number] = await stage.score(said(f"{number}", number, environment))

    with anyio.fail_after(400):
        async with anyio.create_task_group() as group:
            for number in range(n):
                group.start_soon(one, number)
    return [verdicts[number] for number in range(n)]


@pytest.mark.parametrize("path", ["batch_of_numbers", "batch_array"])
@pytest.mark.parametrize("worker", [False, True])
async def test_a_batch_function_scores_each_once(monkeypatch: pytest.MonkeyPatch, worker: bool, path: str) -> None:
    monkeypatch.setattr("pipeline.scorer.scorer.BATCH_MAX", 4)
    batch = {"path": path, "per": "batch", "worker": worker}
    verdicts = await score_all(scorer(batch), 10)
    assert [verdict.reward for verdict in verdicts] == list(range(10))


@pytest.mark.parametrize(
    ("path", "reason", "failed"),
    [
        ("batch_with_holes", "missing", {0, 2, 4}), ("batch_too_short", "type", {0, 1, 2, 3, 4}),
        ("raises", "raised", {0, 1, 2, 3, 4}), ("length_text", "type", {0, 1, 2, 3, 4}),
        ("batch_with_text", "type", {1}), ("batch_mean", "type", {0, 1, 2, 3, 4}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("worker", [False, True])
async def test_a_batch_that_fails_fails_whom_it_concerns(
    monkeypatch: pytest.MonkeyPatch, path: str, reason: str, failed: set[int], worker: bool
) -> None:
    monkeypatch.setattr("pipeline.scorer.scorer.BATCH_MAX", 5)
    verdicts = await score_all(scorer({"path": path, "per": "batch", "worker": worker}), 5)
    assert {n for n, verdict in enumerate(verdicts) if verdict.reward is None} == failed
    assert {verdicts[n].failures[0].reason for n in failed} == {reason}


async def test_a_batch_that_hangs_times_out_and_the_next_one_is_scored() -> None:
    stage = scorer(
        {"path": "hangs", "per": "batch", "timeout_seconds": 0.2}, {"path": "batch_of_numbers", "per": "batch"}
    )
    verdicts = await score_all(stage, 3)
    assert [v.rewards["batch_of_numbers"] for v in verdicts] == [0, 1, 2]
    assert all(v.reward is None and v.failures[0].reason == "timeout" for v in verdicts)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 7))
def test_batches_lose_and_repeat_nobody(pauses: list[int], size_max: int) -> None:
    sizes: list[int] = []

    async def many(trajectories: Any) -> list[Outcome]:
        sizes.append(len(trajectories))
        await anyio.sleep(0)
        return [float(t.task.seed) for t in trajectories]

    async def check() -> None:
        batches, found = ScoreBatcher("b", many, size_max, 0.0), Counter[tuple[int, float]]()

        async def one(number: int, pause: int) -> None:
            for _ in range(pause):
                await anyio.sleep(0)
            outcome = await batches.one(said("", number))
            assert isinstance(outcome, float)
            found[number, outcome] += 1

        async with anyio.create_task_group() as group:
            for number, pause in enumerate(pauses):
                group.start_soon(one, number, pause)
        assert found == Counter((n, float(n)) for n in range(len(pauses)))
        assert sum(sizes) == len(pauses) and max(sizes, default=0) <= size_max

    anyio.run(check)


async def test_members_of_a_batch_whose_call_was_given_up_are_told() -> None:
    started = anyio.Event()

    async def many(trajectories: Any) -> list[Outcome]:
        started.set()
        await anyio.Event().wait()
        raise AssertionError

    batches, outcomes = ScoreBatcher("b", many, 2, 10.0), []

    async def follow() -> None:
        outcomes.append(await batches.one(said("", 1)))

    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def lead() -> None:
            with scope:
                await batches.one(said("", 0))

        group.start_soon(lead)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(follow)
        await started.wait()
        scope.cancel()
    assert [o.reason for o in outcomes if isinstance(o, ScoreFailure)] == ["crashed"]


@pytest.mark.parametrize("worker", [False, True])
async def test_a_group_function_sees_the_whole_group(worker: bool) -> None:
    stage = scorer({"path": "rank_of_number", "per": "group", "weight": 2.0, "worker": worker})
    assert stage.needs_group("q") and not stage.immediate
    trajectories = [said(text, n) for n, text in enumerate(["3", "1", "2"])]
    verdicts = [await stage.score(trajectory) for trajectory in trajectories]
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 0.0]
    complete = await stage.score_group(trajectories, verdicts)
    assert [verdict.reward for verdict in complete] == [4.0, 0.0, 2.0]
    assert dict(complete[0].rewards) == {"environment": 0.0, "rank_of_number": 2.0}


async def test_a_part_for_another_environment_is_no_part_of_the_sum() -> None:
    stage = scorer({"path": "raises", "environments": ["other"]}, {"path": "length"})
    mine = await stage.score(said("x", environment="q"))
    assert mine.reward == 1.0 and set(mine.rewards) == {"environment", "length"}
    assert (await stage.score(said("x", environment="other"))).reward is None


@given(
    st.lists(st.tuples(st.none() | st.floats(-5, 5), st.sampled_from([0.0, 0.5, 1.0, -2.0])), min_size=1, max_size=5)
)
def test_a_sum_with_a_failed_part_is_none_and_never_partial(parts: list[tuple[float | None, float]]) -> None:
    from pipeline.scorer.verdict import combine

    values = {f"p{i}": value for i, (value, _) in enumerate(parts)}
    weights = {f"p{i}": weight for i, (_, weight) in enumerate(parts)}
    reward = combine(values, weights).reward
    if any(value is None and weight for value, weight in parts):
        assert reward is None
    else:
        assert reward == pytest.approx(sum((value or 0.0) * weight for value, weight in parts if value is not None))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"functions": [{"path": "exact"}, {"path": "exact"}]}, "different names"),
        ({"functions": [{"path": "exact", "name": "environment"}]}, "different names other than 'environment'"),
        ({"functions": [{"path": "exact", "environments": ["nowhere"]}]}, "unknown environments: nowhere"),
        ({"judges": [{"name": "j", "url": "ftp://x"}]}, "url"),
        ({"judges": [{"name": "j", "url": "http://x", "score_pattern": "no group"}]}, "needs a group"),
        ({"judges": [{"name": "j", "url": "http://x", "scale": [1, 1]}]}, "lowest score before the highest"),
    ],
)
def test_a_scorer_section_that_makes_no_sense_says_why(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RunConfig.model_validate({"scorer": section})


def test_a_group_function_and_a_greedy_baseline_do_not_go_together() -> None:
    functions = {"functions": [{"path": "a:b", "per": "group"}]}
    with pytest.raises(ValidationError, match="needs the reward of a greedy rollout"):
        RunConfig.model_validate({"scorer": functions, "advantage": {"estimator": "remax"}})


def test_questions_without_a_grader_are_refused() -> None:
    environments = {"q": {"name": "question", "tasks_from": {"kind": "jsonl", "path": "x"}}}
    with pytest.raises(ValidationError, match="add a grader"):
        RunConfig.model_validate({"environments": environments})
    RunConfig.model_validate({"environments": environments, "scorer": {"functions": [{"path": "exact"}]}})
