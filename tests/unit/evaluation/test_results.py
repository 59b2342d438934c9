"""Results of an evaluation: against enumeration, and through a store with restarts."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import RunConfig
from pipeline.config.evaluation import EvaluationConfig
from pipeline.store.evaluation_results import (
    Result,
    TaskResult,
    pass_at_k,
    read_results,
    results_by_updates,
    summarise,
    write_results,
)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_all_sets_of_k_with_a_success(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    sets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in sets) / len(sets))
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))


def test_pass_at_k_does_not_overflow_and_refuses_what_it_cannot_say() -> None:
    assert 0 < pass_at_k(10_000, 3, 50) < 1
    with pytest.raises(ValueError, match="k <= n"):
        pass_at_k(3, 1, 4)


def test_a_failure_is_missing_and_never_a_zero() -> None:
    tasks = [
        TaskResult("a", (1.0, 0.0), tokens=10),
        TaskResult("a", (1.0,), failed=3, missing=1, tokens=5),
        TaskResult("a", (), failed=6, missing=2),
        TaskResult("a", (0.0, 0.5), truncated=1, tokens=3),
    ]
    told = summarise(tasks, (1, 2), threshold=1.0)["a"]
    assert told.score == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert told.se == pytest.approx(statistics.stdev([0.5, 1.0, 0.25]) / math.sqrt(3))
    assert (told.tasks, told.scored_tasks, told.rollouts, told.missing, told.failed, told.truncated) == (
        4,
        3,
        5,
        3,
        9,
        1,
    )
    assert told.pass_at == {1: pytest.approx((0.5 + 1.0 + 0.0) / 3), 2: pytest.approx((1.0 + 0.0) / 2)}
    assert told.pass_at_tasks == {1: 3, 2: 2}
    assert told.tokens_mean == pytest.approx(18 / 5)


def test_without_any_score_there_is_no_number() -> None:
    told = summarise([TaskResult("a", (), missing=1), TaskResult("b", (1.0,))], (1,), 1.0)
    assert told["a"].score is None and told["a"].se is None and told["a"].pass_at == {1: None}
    result = Result(0, 0, 0, "start", "complete", told)
    assert result.score is None and result.value("pass@1") is None
    line = orjson.loads(orjson.dumps(result.as_json()))
    assert line["environments"]["b"]["score"] == 1.0 and line["versions"] is None


def test_environments_count_the_same() -> None:
    told = summarise([TaskResult("a", (1.0,))] * 9 + [TaskResult("b", (0.0,))] * 2, (1,), 1.0)
    assert Result(0, 0, 0, "end", "complete", told).score == pytest.approx(0.5)


def test_of_weights_that_were_made_again_the_newest_result_counts_and_no_abandoned_one(tmp_path: Path) -> None:
    statuses = ((0, "complete"), (4, "complete"), (8, "abandoned"), (4, "timed_out"), (4, "abandoned"))
    lines = [{"evaluation": n, "updates": updates, "status": status} for n, (updates, status) in enumerate(statuses)]
    write_results(tmp_path / "evaluations.jsonl", lines)
    found = results_by_updates(tmp_path / "evaluations.jsonl")
    assert [(updates, result["evaluation"]) for updates, result in found.items()] == [(0, 0), (4, 3)]


def test_a_line_is_written_once_and_after_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    write_results(path, [{"evaluation": 0, "score": 1.0}])
    with path.open("ab") as file:
        file.write(b'{"evaluation": 1, "sco')
    write_results(path, [{"evaluation": 0, "score": 1.0}, {"evaluation": 1, "score": 0.5}])
    write_results(path, [{"evaluation": 1, "score": 0.5}])
    assert [line["evaluation"] for line in read_results(path)] == [0, 1]
    assert path.read_bytes().count(b'"score":0.5') == 1


@given(st.integers(1, 6), st.integers(1, 20), st.booleans(), st.booleans())
def test_what_is_due_next_is_the_first_that_is_due(every: int, total: int, start: bool, end: bool) -> None:
    section = EvaluationConfig(every=every, start=start, end=end)
    due = [u for u in range(total + 1) if (end if u == total else u % every == 0 and (u > 0 or start))]
    assert [u for u in range(total + 1) if section.is_due(u, total)] == due
    assert section.is_due(total + 1, total) is end, "of a run that was made shorter"
    for updates in range(total + 1):
        assert section.next_due(updates, total) == next((u for u in due if u >= updates), None)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"samples": 4}, "all greedy rollouts of a task are the same"),
        ({"temperature": 1, "samples": 2, "pass_at": [1, 4]}, "from 1 to samples"),
        ({"keep_best": "pass@4"}, "score, pass@1"),
        ({"keep_best": "reward"}, "score, pass@1"),
        ({"environments": ["nowhere"]}, "expected some of .*, got nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(section: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RunConfig.model_validate({"evaluation": {"every": 1, **section}})
