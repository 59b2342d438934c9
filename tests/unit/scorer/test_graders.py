"""Right is 1, wrong is 0, and a payload that cannot be graded with is neither."""

from __future__ import annotations

import importlib.util
import threading
import time
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.rewards import ScorerConfig
from pipeline.errors import ConfigurationError, SchemaError
from pipeline.scorer.conversation import resolve
from pipeline.scorer.graders import BUILT_IN, chosen_letter, last_boxed, last_number
from pipeline.scorer.scorer import Scorer
from tests.unit.scorer.conftest import said

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify: pip install 'afterplay[graders]'"
)
needs_jsonschema = pytest.mark.skipif(
    importlib.util.find_spec("jsonschema") is None, reason="needs jsonschema: pip install 'afterplay[graders]'"
)


def grade(name: str, reply: str, options: dict[str, Any] | None = None, **payload: Any) -> float:
    return resolve(BUILT_IN[name].path)(said(reply, **payload), **(options or {}))


@pytest.mark.parametrize(
    ("reply", "answer", "options", "score"),
    [
        ("  Paris. ", "paris", {}, 1), ("In Paris", "Paris", {}, 0), ("paris", "Paris", {"case": True}, 0),
        ("Paris.", "Paris", {"punctuation": True}, 0), ("Lyon", ["Paris", "Lyon"], {}, 1), ("", "x", {}, 0),
        ("<think>Lyon?</think>Paris", "Paris", {"after": "</think>"}, 1), ("Paris", "Paris", {"after": "</think>"}, 0),
        ("so <a>Lyon</a> no <a>Paris</a>!", "Paris", {"between": ["<a>", "</a>"]}, 1),
        ("Paris", "Paris", {"between": ["<a>", "</a>"]}, 0), ("-3", "3", {}, 0), ("7", 7, {}, 1),
        ("ﬁne", "fine", {}, 1),
    ],
)  # fmt: skip
def test_exact_compares_the_whole_reply(reply: str, answer: Any, options: dict[str, Any], score: float) -> None:
    assert grade("exact", reply, options, answer=answer) == score


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("It is 1,234.50 km.", "1234.5", 1), ("#### 72", "… so #### 72", 1), ("3 then 4", 3, 0), ("five", 5, 0),
        ("-2", -2, 1), ("5-3", -3, 0), ("5-3", 3, 1), ("1e3", 1000, 1), ("$18.00", 18, 1), ("12,34", 34, 1),
        ("9" * 50, 9, 0), ("1000000", 1000000.5, 1), ("x−4", 4, 1), ("= −4", -4, 1), ("50%", 50, 1), ("", 1, 0),
    ],
)  # fmt: skip
def test_number_compares_the_last_number(reply: str, answer: Any, score: float) -> None:
    assert grade("number", reply, answer=answer) == score


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(C)", "C"), ("The answer is B.", "B"), ("Answer: (D)", "D"), ("**A**", "A"),
        ("A. because\nB. no", "B"), ("A) first\nThe correct answer is **C** as B is wrong", "C"), ("A dog barks", None),
        ("I think so", None), ("", None), ("Not A, but D", "D"), ("answer Because", None), ("E", None),
    ],
)  # fmt: skip
def test_choice_finds_the_letter(reply: str, letter: str | None) -> None:
    assert chosen_letter(reply, "ABCD") == letter


def test_choice_takes_letters_and_positions() -> None:
    assert grade("choice", "The answer is C", answer=2) == 1
    assert grade("choice", "The answer is C", answer="b") == 0


def test_contains_takes_one_or_every_answer() -> None:
    assert grade("contains", "Red and blue.", answer=["blue", "green"]) == 1
    assert grade("contains", "Red and blue.", {"every": True}, answer=["blue", "green"]) == 0


def test_regex_searches_or_matches_the_whole() -> None:
    assert grade("regex", "see 42!", pattern=r"\d+") == 1
    assert grade("regex", "see 42!", {"whole": True, "pattern": r"\d+"}) == 0


@needs_jsonschema
@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"a": 1}', 1), ('{"a": "x"}', 0), ("no JSON", 0), ('Here:\n```json\n{"a": 2}\n```\nDone', 1), ("{}", 0),
        ('```\n{"a": 3}\n```', 1),
    ],
)  # fmt: skip
def test_json_schema_checks_the_reply(reply: str, score: float) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert grade("json_schema", reply, {"schema": schema}) == score
    assert grade("json_schema", reply, schema=schema) == score


@needs_jsonschema
def test_a_schema_elsewhere_is_never_fetched() -> None:
    with pytest.raises(Exception, match="Unresolvable"):
        grade("json_schema", "{}", {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}})


MATHEMATICS = [
    (r"So it is $\boxed{\frac{1}{2}}$.", "0.5", 1), (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
    ("The answer is 42", "42", 1),
    (r"$x = 3$ and so $\boxed{4}$", "3", 0), ("I do not know", "7", 0), (r"$\sqrt{8}$", r"2\sqrt{2}", 1),
    (r"\boxed{3}. No, \boxed{4}.", "4", 1), (r"\boxed{3}. No, \boxed{4}.", "3", 0), (r"\boxed{4}, so 4/2 = 2", "4", 1),
    (r"$\boxed{3}$ and $\boxed{-2}$", r"\{3,-2\}", 1), (r"\boxed{3}, \boxed{-2}", "-2, 3", 1), (r"\boxed{3", "3", 0),
    # an answer with a comma or a bracket is all of it, not its last number
    (r"\boxed{3,-2}", "-2,3", 1), (r"\boxed{-2}", "3,-2", 0), (r"\boxed{(\frac12,3)}", "(1/2,3)", 1),
    (r"\boxed{3}", "(1/2,3)", 0), (r"\boxed{[0,\infty)}", r"[0,\infty)", 1), (r"\boxed{(1,2]}", "(1,2)", 0),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{(-\infty,1)\cup(2,3]}", r"(-\infty,1)\cup(2,3]", 1), (r"\boxed{x=3 \text{ or } x=-2}", r"\{3,-2\}", 1),
    (r"\boxed{50\%}", "0.5", 1), (r"\boxed{5\,\mathrm{cm}^2}", "5", 1), (r"\boxed{5 \text{ km}}", "5 km", 1),
    ("It costs 1,234.50 dollars", "1234.5", 1), (r"\boxed{1\,000}", "1000", 1), (r"\boxed{-5}", "- 5", 1),
    ("42", "42.0", 1),
    (r"\boxed{90^\circ}", "90", 1), (r"\boxed{\text{Monday}}", "Monday", 1), (r"\boxed{0.333}", r"\frac13", 0),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1),
    (r"$(x+1)^2$", "x^2+2x+1", 1), (r"\boxed{\{1,2\}}", r"\{2,1\}", 1), ("", "1", 0),
]  # fmt: skip


@needs_math
@pytest.mark.parametrize(("reply", "answer", "score"), MATHEMATICS)
def test_math_compares_as_mathematics(reply: str, answer: str, score: float) -> None:
    assert grade("math", reply, answer=answer) == score


def test_the_last_box_counts_and_what_is_joined_to_it_quickly() -> None:
    assert last_boxed("no box") == "no box" and last_boxed(r"\boxed{1} \boxed{2") == r"\boxed{2"
    assert last_boxed(r"\boxed{9}: \boxed{1}, \boxed{\frac{1}{2}} and \boxed{3}") == r"\boxed{1, \frac{1}{2}, 3}"
    started = time.perf_counter()
    for hostile in (r"\boxed{" * 100_000, r"\boxed{1}" + " " * 500_000 + r"\boxed{2}", r"\boxed{1} " * 50_000):
        last_boxed(hostile)
    assert time.perf_counter() - started < 5


@needs_math
def test_math_raises_no_alarm_in_a_thread() -> None:
    scores: list[Any] = []

    def work() -> None:
        try:
            scores.append(grade("math", r"\boxed{7}", answer="7"))
        except Exception as error:
            scores.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert scores == [1.0]


@pytest.mark.slow
@needs_math
async def test_math_runs_in_the_process_pool_of_the_scorer() -> None:
    scorer = Scorer(
        ScorerConfig.model_validate(
            {"environment_weight": 0, "functions": [{"path": "math", "timeout_seconds": 120}], "workers": 2}
        )
    )
    verdicts: dict[int, Any] = {}

    async def one(number: int, reply: str, answer: str) -> None:
        verdicts[number] = await scorer.score(said(reply, number, answer=answer))

    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            for number, (reply, answer, _) in enumerate(MATHEMATICS):
                group.start_soon(one, number, reply, answer)
    assert [verdicts[n].reward for n in range(len(MATHEMATICS))] == [score for _, _, score in MATHEMATICS]


@pytest.mark.slow
async def test_a_pattern_that_takes_for_ever_is_stopped_and_the_stage_goes_on() -> None:
    functions = [{"path": "regex", "options": {"pattern": "(a+)+$"}, "timeout_seconds": 2.0}]
    scorer = Scorer(ScorerConfig.model_validate({"environment_weight": 0, "functions": functions}))
    with anyio.fail_after(400):
        await scorer.score(said("b"))
        verdict = await scorer.score(said("a" * 60 + "b"))
        assert verdict.reward is None and verdict.failures[0].reason == "timeout"
        assert (await scorer.score(said("aaa"))).reward == 1.0


@pytest.mark.parametrize(
    ("name", "payload", "says"),
    [
        ("exact", {}, "map a column to it in tasks_from.columns"),
        ("exact", {"answer": []}, "expected 'answer' as text"),
        ("number", {"answer": "many"}, "expected a number as 'answer'"),
        ("choice", {"answer": "maybe"}, "as one of ABCD"),
        pytest.param("math", {"answer": ""}, "that math-verify understands", marks=needs_math),
    ],
)
def test_a_payload_that_cannot_be_graded_with_raises(name: str, payload: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        grade(name, "1", **payload)


async def test_a_payload_that_cannot_be_graded_with_is_no_reward() -> None:
    verdict = await Scorer(ScorerConfig.model_validate({"functions": [{"path": "exact"}]})).score(said("x"))
    assert verdict.reward is None and verdict.rewards["exact"] is None
    assert verdict.failures[0].reason == "raised" and "tasks_from.columns" in verdict.failures[0].details


@pytest.mark.parametrize("name", ["exact", "contains", "number", "choice"])
@given(reply=st.text(max_size=80), answer=st.integers(0, 9), options=st.sampled_from([{}, {"after": ">"}]))
def test_no_reply_makes_a_quick_grader_raise(name: str, reply: str, answer: int, options: dict[str, Any]) -> None:
    assert grade(name, reply, options, answer=answer) in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "is {}.", "({})", "x = {} km"]))
def test_a_number_is_read_as_it_was_written(value: int, form: str) -> None:
    assert last_number(form.format(value)) == value


@pytest.mark.slow
def test_long_replies_are_graded_in_time() -> None:
    n = 200_000
    for text in ("1," * n, "A " * n, "(" * n, "answer " * n, "9" * n, "\n" * n, "answer" + " " * n, "A" + "\n" * n):
        last_number(text)
        chosen_letter(text, "ABCD")


def test_an_option_that_a_grader_does_not_take_is_an_error_at_start() -> None:
    with pytest.raises(ConfigurationError, match=r"tolerance.*its options are answer, after, between, case"):
        Scorer(ScorerConfig.model_validate({"functions": [{"path": "exact", "options": {"tolerance": 1}}]}))


def test_a_grader_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"math-verify.*pip install 'afterplay\[graders\]'"):
        Scorer(ScorerConfig.model_validate({"functions": [{"path": "math"}]}))
