"""Every dataset pays for its own answer, survives any other, and never evaluates what a model said."""

import ast
import inspect
import os
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from actors.adapters.reasoning import ARITHMETIC_ONLY, GLOBAL_RANDOM, READ_AS_LITERAL, answer_of, is_arithmetic
from actors.environments import Reply

SLOW = {"knight_swap", "arc_agi", "rush_hour", "word_ladder", "codeio", "intermediate_integration", "quantum_lock"}
COSTLY = {"group_anagrams", "figlet_font", "zebra_puzzles", "futoshiki", "puzzle24", "simple_integration"}
"""These take as much CPU time as all others together."""
NEEDS_CONFIG = {"composite"}
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
JUNK = [
    "", "junk", "[1,2", "9**9**9**9", "-1e309", "None!", "{}", "[[]]", "\x00", "(" * 300, "1 2 3", "a" * 5000, "nan",
    "1/0", "True and", "1,2,3", "é", "-" * 200,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("costly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_right_answer_pays_and_junk_does_not_raise(kit, tmp_path, costly):
    """Every dataset."""
    kit.build("reasoning_gym")
    import reasoning_gym.factory as factory

    for name in sorted(COSTLY if costly else set(factory.DATASETS) - NEEDS_CONFIG - SLOW - COSTLY):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pays_for_its_own_answer_only(kit, name, mark=tmp_path / "evaluated")
        except Exception as error:
            error.add_note(f"dataset {name}")
            raise


def pays_for_its_own_answer_only(kit, name, mark):
    gym = kit.build("reasoning_gym", dataset=name)
    random.seed(1)
    puzzle = gym.start(kit.task(5))
    random.seed(2)
    assert gym.start(kit.task(5)).messages == puzzle.messages, "the start depends on the global random state"
    answer = puzzle._entry["answer"]
    if name not in WITHOUT_ANSWER:
        right = puzzle.step(Reply(f"Because <answer>no</answer>, <answer>{answer}</answer>"))
        assert (right.reward, right.done) == (1.0, True)
    for junk in [*JUNK, f"__import__('pathlib').Path({str(mark)!r}).touch()", f"[open({str(mark)!r}, 'w')]"]:
        if junk != answer:
            assert puzzle.step(Reply(f"<answer>{junk}</answer>")).reward == 0.0, junk
    assert not mark.exists()


def test_every_scorer_that_evaluates_is_known(kit):
    """A new version of the package that evaluates in more places must be looked at."""
    kit.build("reasoning_gym")
    import reasoning_gym.factory as factory

    calls = re.compile(r"(?<![\w.])eval\(|parse_expr\(|sympify\(|(?<![\w.])exec\(")
    evaluating = {
        name
        for name, (cls, _) in factory.DATASETS.items()
        if calls.search(inspect.getsource(cls.score_answer)) and "evaluate" not in name
    }
    own_answer = {"number_sorting"}  # evaluates what it generated itself
    assert evaluating - READ_AS_LITERAL - ARITHMETIC_ONLY <= own_answer


def test_puzzles_from_the_global_random_state_are_the_tasks_own(kit):
    """Plays of one task are in several processes, whose random states differ."""
    import numpy

    for name in sorted(GLOBAL_RANDOM):
        gym = kit.build("reasoning_gym", dataset=name)
        random.seed(1)
        numpy.random.seed(1)
        before = random.getstate(), numpy.random.get_state()[1].tolist()
        first = [gym.start(kit.task(seed)).messages for seed in range(40)]
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before, name
        random.seed(2)
        assert [gym.start(kit.task(seed)).messages for seed in range(40)] == first, name


@pytest.mark.slow
def test_puzzles_are_the_same_in_every_process(kit):
    """Python hashes texts differently in each process, and with that sets are ordered differently."""
    kit.build("reasoning_gym")
    told = "[gym.start(Task(f'x/{seed}', 'x', seed)).messages[0].content for seed in range(5)]"
    program = (
        "from actors.adapters.reasoning import CHOOSES_FROM_SETS, ReasoningGym\n"
        "from pipeline.schema import Task\n"
        "for gym in (ReasoningGym(dataset=name) for name in sorted(CHOOSES_FROM_SETS)):\n"
        f"    print({told})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", program], env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=300,
        ).stdout
        for seed in ("1", "2")
    )  # fmt: skip
    assert first == second and first.count("\n") == 3


def test_every_module_that_draws_globally_is_known(kit):
    kit.build("reasoning_gym")
    draws = re.compile(r"(?:np|numpy)\.random\.(?!default_rng|Generator)|(?<![\w.])random\.(?!Random)[a-z]+\(")
    files = {n: getattr(m, "__file__", None) for n, m in sys.modules.items() if n.startswith("reasoning_gym.")}
    assert {name for name, file in files.items() if file and draws.search(Path(file).read_text())} <= {
        "reasoning_gym.induction.list_functions.generators", "reasoning_gym.algorithmic.pool_matrix"
    }  # fmt: skip


def test_partial_credit_is_an_option(kit):
    half = "<answer>it is 4 or so, I think</answer>"
    for threshold, low, high in ((0.99, 0.0, 0.0), (0.0, 0.001, 0.9)):
        gym = kit.build("reasoning_gym", dataset="chain_sum", threshold=threshold, config={"min_terms": 2})
        puzzle = gym.start(kit.task(3))
        answer = puzzle._entry["answer"]
        step = puzzle.step(Reply(half.replace("4", answer)))
        assert low <= step.reward <= high
        assert 0 < step.signals["score"] < 0.99


def test_failing_scorer_is_a_failure_and_not_a_zero(kit):
    puzzle = kit.build("reasoning_gym").start(kit.task(1))

    def broken(answer, entry):
        raise RuntimeError("scorer broken")

    puzzle._dataset.score_answer = broken
    with pytest.raises(RuntimeError, match="scorer broken"):
        puzzle.step(Reply("<answer>-99999</answer>"))


def test_answer_is_the_last_between_tags():
    assert answer_of("<answer>1</answer> no <ANSWER> 2\n</ANSWER>", True) == "2"
    assert answer_of("2", True) is None
    assert answer_of(" 2 ", False) == "2"


def test_formulas_pass_and_anything_else_does_not():
    for text in ("1+2*3", "x**2 + 3*x - 1", "-(4 - 2)/3", "sin(x)**2", "exp(2*x)*log(x)", "2**10", "x**99"):
        ast.parse(text, mode="eval")
        assert is_arithmetic(text), text
    for text in (
        "9**9**9", "2**1000", "(2**99)**99", "().__class__", "x.y", "f('a')", "[1]", "lambda: 0", "abc",
        "x if y else z", "open(1)", "1;2", "", "1" * 600, "1 " * 900, "'a'*9", "9" * 400, "2**-1e9", "sin(x, y)",
        "2**(x)",
    ):  # fmt: skip
        assert not is_arithmetic(text), text
