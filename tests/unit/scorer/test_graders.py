"""Right is 1, wrong is 0, and a payload that cannot be graded with is neither."""

from __future__ import annotations

import importlib.util
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.rewards import ScorerConfig
from pipeline.errors import ConfigurationError, SchemaError
from pipeline.runtime.plugins import resolve
from pipeline.scorer.graders import BUILT_IN, chosen_letter, last_boxed, normal
from pipeline.scorer.numbers import last_number
from pipeline.scorer.scorer import Scorer
from tests.unit.scorer.conftest import said

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify: pip install '.[graders]'"
)
needs_jsonschema = pytest.mark.skipif(
    importlib.util.find_spec("jsonschema") is None, reason="needs jsonschema: pip install '.[graders]'"
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
        ("ﬁne", "fine", {}, 1), ("?", "*", {}, 0), ("*", "*", {}, 1), ("C", "C#", {}, 0), ("C#", "C#", {}, 1),
        ("C++", "C", {}, 0), ("5", ".5", {}, 0), ("1 5", "1.5", {}, 0), ("50", "50%", {}, 0), ("f", "f()", {}, 0),
        ("F", "F#", {}, 0), ("a", "@a", {}, 0), ("10 30", "10:30", {}, 0), ("!", "?", {}, 0), ("x", "x*", {}, 0),
        ("**Paris**", "paris", {}, 1), ('"New York."', "new york", {}, 1), ("(a)", "a", {}, 1), ("Oui !", "oui", {}, 1),
        ("red,blue", "red, blue", {}, 1), ("it’s", "it's", {}, 1), ("北京。", "北京", {}, 1), ("¿Qué?", "qué", {}, 1),
        ("(Paris, France).", "Paris, France", {}, 1), ("`ls`", "ls", {}, 1),
    ],
)  # fmt: skip
def test_exact_compares_the_whole_reply(reply: str, answer: Any, options: dict[str, Any], score: float) -> None:
    assert grade("exact", reply, options, answer=answer) == score


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("It is 1,234.50 km.", "1234.5", 1), ("#### 72", "… so #### 72", 1), ("3 then 4", 3, 0), ("five", 5, 0),
        ("-2", -2, 1), ("5-3", -3, 0), ("5-3", 3, 1), ("1e3", 1000, 1), ("$18.00", 18, 1), ("12,34", "12.34", 1),
        ("9" * 50, 9, 0), ("1000000", 1000000.5, 0), ("x−4", 4, 1), ("= −4", -4, 1), ("50%", 50, 1), ("", 1, 0),
        ("1000001", 1000000, 0), ("12345678901", "12345678902", 0), ("0.3", 0.1 + 0.2, 1), ("1/3", 1 / 3, 1),
        ("0.3000001", 0.3, 0), ("0", 1e-9, 0), ("123456789012345678901", 123456789012345678901, 1),
    ],
)  # fmt: skip
def test_number_compares_the_last_number(reply: str, answer: Any, score: float) -> None:
    assert grade("number", reply, answer=answer) == score


def test_a_tolerance_is_a_share_of_the_answer() -> None:
    assert [grade("number", reply, {"tolerance": 0.01}, answer=200) for reply in ("202", "203")] == [1, 0]
    assert [grade("number", reply, {"tolerance": 0.01}, answer="0.001") for reply in ("0.00101", "0.002")] == [1, 0]
    assert [grade("number", reply, {"tolerance": 0.01}, answer=0) for reply in ("0.0", "0.001")] == [1, 0]


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(C)", "C"), ("The answer is B.", "B"), ("Answer: (D)", "D"), ("**A**", "A"),
        ("A. because\nB. no", "B"), ("A) first\nThe correct answer is **C** as B is wrong", "C"), ("A dog barks", None),
        ("I think so", None), ("", None), ("Not A, but D", "D"), ("answer Because", None), ("E", None),
        ("The answer is C, since option A is false", "C"), ("I choose option C because option A is false", "C"),
        ("Option C, since option A is wrong", "C"), ("option B is correct; option A is incorrect", "B"),
        ("The correct option is C since answer A is false", "C"), ("The answer is C, not option A", "C"),
        ("The answer is A. Wait, the answer is B.", "B"), ("(A) is incorrect. (B)", "B"), ("C, not A", "C"),
        ("Options A and B are wrong, thus the answer is C.", "C"), ("It cannot be A", None), ("It isn't A.", None),
        ("The answer is not A.", None), ("The answer is A or B", None), ("The answer is A, B, or C", None),
        ("Answer: A, B", None), ("The answer is A/B", None), ("The answer is C: A and B fail", "C"),
        (r"The answer is $\boxed{B}$", "B"), ("I rule out A. I go with B.", "B"), ("My answer would be D", "D"),
        (r"Option A gives 3, option B gives 4. The answer is $\boxed{C}$.", "C"), (r"(A) is 3. \boxed{\text{C}}", "C"),
        (r"Option A is too small. \fbox{C) Paris}", "C"), (r"\boxed{A}. Wait, \boxed{\textbf{(B)}}", "B"),
        (r"Option A is small, so the answer is \(C\)", "C"), (r"(A) is 3, so the answer is $\mathrm{C}$.", "C"),
        (r"\boxed{A \text{ or } B}", None), (r"So $\boxed{A, B}$.", None), (r"\boxed{A}, as option B is false", "A"),
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
    assert [grade("contains", text, answer="4") for text in ("It is 4.", "x=4,", "14", "4.5", "2.4", "1,400")] == [
        *(1, 1, 0, 0, 0, 0)
    ]


def test_regex_searches_or_matches_the_whole() -> None:
    assert grade("regex", "see 42!", pattern=r"\d+") == 1
    assert grade("regex", "see 42!", {"whole": True, "pattern": r"\d+"}) == 0


@needs_jsonschema
@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"a": 1}', 1), ('{"a": "x"}', 0), ("no JSON", 0), ('Here:\n```json\n{"a": 2}\n```\nDone', 1), ("{}", 0),
        ('```\n{"a": 3}\n```', 1), ('{"a": 4, "code": "```python\\nprint()\\n```"}', 1), ('{"a": "```1```"}', 0),
        ('```json\n{"a": 5, "code": "use ```x```"}\n```', 1), ('```json\n{"a": "x"}\n```\n```json\n{"a": 6}\n```', 1),
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
    (r"So \fbox{42}, from 7.", "42", 1), (r"\boxed{3}. No, \fbox{4}", "3", 0), (r"\framebox{\frac12}", "0.5", 1),
    (r"\boxed {6}", "6", 1), (r"$(x+1)^2$", "x^2+2x+1", 1), (r"\boxed{\{1,2\}}", r"\{2,1\}", 1), ("", "1", 0),
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
        ("exact", {"answer": []}, "expected 'answer' of task .* as text"),
        ("exact", {"answer": " "}, "expected 'answer' of task .* as text that is not empty, got ' '"),
        ("exact", {"answer": ["Ada", ""]}, "as text that is not empty"),
        ("contains", {"answer": ""}, "as text that is not empty"),
        ("contains", {"answer": ["", "Ada"]}, "as text that is not empty"),
        ("number", {"answer": "many"}, "expected 'answer' of task .* as a number, got 'many'"),
        ("number", {"answer": "1,2,3"}, "as a number"),
        ("number", {"answer": True}, "as a number"),
        ("choice", {"answer": "maybe"}, "as one of ABCD"),
        ("choice", {"answer": ""}, "as one of ABCD"),
        ("regex", {"pattern": ""}, "that is not empty"),
        ("regex", {"pattern": "("}, "as a regular expression"),
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


@given(reply=st.text(max_size=80), answer=st.integers(0, 9), options=st.sampled_from([{}, {"after": ">"}]))
def test_no_reply_makes_a_quick_grader_raise(reply: str, answer: int, options: dict[str, Any]) -> None:
    for name in ("exact", "contains", "number", "choice"):
        assert grade(name, reply, options, answer=answer) in (0.0, 1.0), name


SIGNS = {-1: ["-", "−", "–", "－", "﹣"], 1: ["", "", "", "+"]}
GROUPS = [",", ".", " ", "\u00a0", "\u2009", "\u202f", "'", "’", "{,}", r"\,", r",\!", "_", ""]
BEFORE = ["", "It is ", "x = ", "**", "(", "3 of 7 is ", "Answer:", "是", r"\boxed{", "$", "= $", "In 2024 ", "[", "≈"]
AFTER = [
    *("", ".", ",", ", so", " km", "%", r"\%", "!", ")", "**", "}", "$", " in all.", "\nDone", " m^2", " cm²"),
    *("个", ";", "€", " €"),
]
MONEY = ["", "", "", "$", "€", "£", "US$", r"\$", "₹", "USD ", "R$ "]


def grouped(digits: str, mark: str, indian: bool) -> str:
    size = 2 if indian else 3
    head, last = digits[:-3], digits[-3:]
    parts = [head[max(0, end - size) : end] for end in range(len(head), 0, -size)]
    return mark.join([*reversed(parts), last])


@st.composite
def written_numbers(draw: st.DrawFn) -> tuple[str, str, str, Fraction]:
    """A number as people write it, with what stands before and behind it, and its value."""
    sign = draw(st.sampled_from([-1, 1]))
    whole = draw(st.integers(0, 10 ** draw(st.integers(1, 12))))
    decimals = draw(st.sampled_from(["", "", "5", "05", "25", "500", "1234"]))
    kind = draw(st.sampled_from(["plain", "grouped", "grouped", "fraction", "mixed", "latex", "power", "words"]))
    value = Fraction(whole)
    text = str(whole)
    if kind == "grouped" and whole >= 1000:
        mark = draw(st.sampled_from(GROUPS))
        text = grouped(text, mark, indian=mark == "," and draw(st.booleans()))
        point = "," if mark == "." else draw(st.sampled_from([".", "."] if "," in mark or mark == "" else [".", ","]))
        if mark == "." and whole < 10**6 and not decimals:
            decimals = "5"  # 1.234 alone is a decimal
        text += f"{point}{decimals}" if decimals else ""
        value += Fraction(int(decimals or 0), 10 ** len(decimals))
    elif kind in ("plain", "grouped") and decimals:
        comma = len(decimals) != 3 and draw(st.booleans())
        text = f"{'' if whole == 0 and not comma else whole}{',' if comma else '.'}{decimals}"
        value += Fraction(int(decimals), 10 ** len(decimals))
    elif kind in ("fraction", "mixed", "latex"):
        over, under = draw(st.integers(1, 98)), draw(st.integers(2, 99))
        whole %= 1000
        if kind == "fraction":
            text, value = f"{over}/{under}", Fraction(over, under)
        elif kind == "latex":
            text, value = rf"\{draw(st.sampled_from(['frac', 'dfrac']))}{{{over}}}{{{under}}}", Fraction(over, under)
        else:
            over, under = min(over, under - 1), under
            text, value = f"{whole} {over}/{under}", whole + Fraction(over, under)
    elif kind == "power":
        exponent = draw(st.integers(-12, -1) | st.integers(1, 12))
        form = draw(st.sampled_from(["{}e{}", r"{} \times 10^{{{}}}", "{} × 10^{}", "{}*10^{}"]))
        text, value = form.format(whole, exponent), value * Fraction(10) ** exponent
    elif kind == "words":
        word = draw(st.sampled_from(["thousand", "million", "billion"]))
        text += f" {word}"
        value *= {"thousand": 10**3, "million": 10**6, "billion": 10**9}[word]
    money = draw(st.sampled_from(MONEY)) if kind in ("plain", "grouped", "words") else ""
    mark = draw(st.sampled_from(SIGNS[sign]))
    text = f"{money}{mark}{text}" if money and mark and draw(st.booleans()) else f"{mark}{money}{text}"
    before = draw(st.sampled_from(BEFORE))
    after = draw(st.sampled_from(AFTER))
    if (before.endswith("$") and text.startswith("$")) or (before.endswith("2024 ") and kind in ("fraction", "latex")):
        before = ""
    if kind == "words" and after[:1].isalpha() and after != "个":
        after = ""
    return before, text, after, sign * value


@given(written_numbers())
@settings(max_examples=300)
def test_a_number_is_read_as_people_write_it(case: tuple[str, str, str, Fraction]) -> None:
    *parts, value = case
    assert last_number("".join(parts)) == value, "".join(parts)


@given(written_numbers(), st.integers(0, 40), st.integers(1, 9), st.integers(-3, 3))
@settings(max_examples=300)
def test_another_number_is_never_right(case: tuple[str, str, str, Fraction], place: int, step: int, power: int) -> None:
    before, text, after, value = case
    right = fraction_text(value)
    assert grade("number", before + text + after, answer=right) == 1
    for other in (value + step * Fraction(10) ** power, value * 10, -value):
        assert grade("number", before + text + after, answer=fraction_text(other)) == float(other == value)
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    at = digits[place % len(digits)]
    mutant = text[:at] + str((int(text[at]) + step) % 10) + text[at + 1 :]
    assert value == 0 or grade("number", before + mutant + after, answer=right) == 0, mutant


def fraction_text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234, so", 1234), ("$1,500, in all", 1500), ("-$5", -5), (".5", "1/2"), ("–5", -5), ("－5", -5),
        ("-.5", "-1/2"), ("1{,}234", 1234), ("1.234", "617/500"), ("1,234", 1234), ("0,123", "123/1000"),
        ("1.234.567", 1234567), ("12,34,567", 1234567), ("½", "1/2"), ("1½", "3/2"), ("10⁵", 100000),
        ("1.5×10³", 1500), ("2^10", 1024), ("12 cm^2", 12), ("12 m²", 12), ("60 km/h", 60), ("$5/hour", 5),
        ("１２", 12), ("٣", 3), ("x_1 = 7", 7), ("minus 5", -5), ("negative 5", -5), ("7 minus 5", 5), ("$3-$5", 5),
        ("- 5", 5), ("Answer: - 5", -5), ("x-4", 4), ("1e3.", 1000), ("In 2024 100 people", 100), ("1/2x", "1/2"),
        (r"3\frac{1}{2}", "7/2"), (r"\frac12", "1/2"),
        (r"12\text{ cm}^2", 12), (r"12\,\mathrm{cm}^{3}", 12), (r"9.8 \mathrm{~m}/\mathrm{s}^{2}", "49/5"),
        (r"\frac{1}{2}\text{ m }^2", "1/2"), (r"\mathbf{7}^2", 49), (r"90^\circ", 90), (r"30^{\circ}\text{C}", 30),
        (r"5^{\text{th}}", 5),
        # none that stands alone
        ("1,2,3", None), ("1.2.3", None), ("2024/05/06", None), ("3:2", None), ("2π", None), ("π/4", None),
        ("√5", None), (r"\sqrt{5}", None), (r"2\sqrt{3}", None), (r"\frac{\pi}{4}", None), (r"\frac{x}{2}", None),
        ("±5", None),
        ("2^0.5", None), ("1/0", None), ("x1", None), ("H2O", None), ("5'10", None), ("1,23,4", None),
        ("9" * 300, None),
    ],
)  # fmt: skip
def test_forms_of_numbers(text: str, value: Any) -> None:
    assert last_number(text) == (None if value is None else Fraction(value))


@pytest.mark.slow
def test_long_replies_are_graded_in_time() -> None:
    """A pattern whose time grows with the square of the length takes a minute for one of these."""
    n, seconds_max = 50_000, 3.0
    hostile = ("1 000 " * n, r"\frac" * n, "$" * n, "A, " * n, "A " * n, "(" * n, "answer " * n, "9" * n, "\n" * n)
    hostile += (r"\boxed{" * n, r"\text{A" * n)
    for text in (*hostile, "1," * n, "1 " * n, "1/" * n, "answer" + " " * n, "A" + "\n" * n, "(" * n + "a" + ")" * n):
        begun = time.process_time()
        normal(text, case=False, punctuation=False)
        last_number(text)
        chosen_letter(text, "ABCD")
        assert time.process_time() - begun < seconds_max, text[:20]


def test_an_option_that_a_grader_does_not_take_is_an_error_at_start() -> None:
    with pytest.raises(ConfigurationError, match=r"tolerance.*its options are answer, after, between, case"):
        Scorer(ScorerConfig.model_validate({"functions": [{"path": "exact", "options": {"tolerance": 1}}]}))


@pytest.mark.parametrize(
    "takes", ["prompts, completions, **more", "data_source, solution_str, ground_truth, extra_info=None"]
)
def test_a_function_written_for_another_trainer_is_told_what_it_gets(takes: str, tmp_path: Path) -> None:
    (file := tmp_path / "foreign.py").write_text(f"def score({takes}): return 1.0\n")
    with pytest.raises(ConfigurationError, match=r"it gets a Trajectory.*afterplay\.reply\(trajectory\)"):
        Scorer(ScorerConfig.model_validate({"functions": [{"path": f"{file}:score"}]}))


def test_a_grader_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"math-verify.*pip install '\.\[graders\]'"):
        Scorer(ScorerConfig.model_validate({"functions": [{"path": "math"}]}))
