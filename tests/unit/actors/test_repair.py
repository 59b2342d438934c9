"""Repair tasks: each has one fault that shows, and hidden calls that only a right function passes."""

import ast
import inspect
import json
from copy import deepcopy
from pathlib import Path

import pytest

from actors.adapters import repair_tasks
from actors.adapters.repair import Repair, code_of, right_results, task_text
from actors.adapters.repair_tasks import FUNCTIONS, tasks
from actors.environments.base import Reply
from actors.sandboxes import bubblewrap
from pipeline.schema import Task

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
REFUSAL = bubblewrap.refusal(bubblewrap.find())
needs_bubblewrap = pytest.mark.skipif(REFUSAL is not None, reason=f"no bubblewrap: {REFUSAL}")


def solution(name):
    return ast.unparse(ast.parse(inspect.getsource(getattr(repair_tasks, name))))


@pytest.fixture(scope="module", params=["none", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def environment(request):
    return Repair(sandbox=request.param)


def test_there_are_two_hundred_tasks_and_no_function_is_in_both_splits():
    made = tasks()
    assert len(made["train"]) + len(made["eval"]) == 297, "as docs/GATEWAY.md says"
    assert not {t.name for t in made["train"]} & {t.name for t in made["eval"]}
    assert {t.name for ts in made.values() for t in ts} == {f.__name__ for f in FUNCTIONS}
    assert len({t.broken for ts in made.values() for t in ts}) == sum(map(len, made.values()))


def test_every_fault_shows_in_the_first_example_and_in_a_hidden_call():
    for task in (t for ts in tasks().values() for t in ts):
        space = {}
        exec(task.broken, space)

        def wrong(example, function=space[task.name]):
            return repair_tasks.outcome(function, example.arguments) != example.expected

        assert wrong(task.shown[0]) and any(map(wrong, task.hidden))
        assert not {repr(e.arguments) for e in task.shown} & {repr(e.arguments) for e in task.hidden}
        right = getattr(repair_tasks, task.name)
        assert all(right(*deepcopy(e.arguments)) == e.expected for e in (*task.shown, *task.hidden))
        assert json.loads(json.dumps([e.expected for e in task.hidden])) == [e.expected for e in task.hidden]


async def graded(environment, seed, source, as_file):
    episode = environment.start(Task("t", "repair", seed))
    reply = Reply("", files={"solution.py": source}) if as_file else Reply(f"Here:\n```python\n{source}\n```")
    return await episode.step(reply)


@pytest.mark.parametrize("as_file", [False, True])
async def test_the_right_function_is_paid_and_the_broken_one_is_not(environment, as_file):
    for seed in (0, environment.splits["eval"][0]):
        task = environment._tasks[seed]
        assert (await graded(environment, seed, solution(task.name), as_file)).reward == 1.0
        broken = await graded(environment, seed, task.broken, as_file)
        assert broken.reward == 0.0 and broken.signals["right_calls"] < 1


FORGERIES = {
    "the results written by the solution": """
import json, os
n = len(json.load(open("calls.json"))["arguments"])
json.dump([json.dumps(None)] * n, open("results.json", "w"))
os._exit(0)
""",
    "equal to everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = None
def NAME(*arguments): return Equal()
""",
    "json turned off": """
import json
json.dumps = lambda value, **more: "0"
def NAME(*arguments): return 1
""",
    "results that nobody can read": """
import os
os.close(os.open("results.json", os.O_CREAT, 0))
""",
    "an end without a word": "raise SystemExit(0)",
    "no such function": "x = 1",
    "no Python": "def (",
    "the tests read from memory": """
import gc
def NAME(*arguments):
    return next((o for o in gc.get_objects() if isinstance(o, dict) and "expected" in o), None)
""",
    "a long result": "def NAME(*arguments): return 'x' * 10**7",
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_no_forged_result_is_paid(environment, forgery):
    source = FORGERIES[forgery].replace("NAME", environment._tasks[1].name)
    step = await graded(environment, 1, source, as_file=True)
    assert step.reward == 0.0 and step.done


@needs_bubblewrap
async def test_a_solution_cannot_import_the_right_functions_where_afterplay_is_installed():
    environment = Repair(sandbox={"kind": "bubblewrap", "readable": [str(ROOT)]})
    name = environment._tasks[1].name
    at = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    assert (await graded(environment, 1, f"{at}import actors\n{solution(name)}", as_file=True)).reward == 1.0
    stolen = f"{at}from actors.adapters.repair_tasks import {name}"
    assert (await graded(environment, 1, stolen, as_file=True)).reward == 0.0


async def test_a_program_that_left_no_solution_is_not_paid(environment):
    episode = environment.start(Task("t", "repair", 0))
    assert (await episode.step(Reply("", files={}))).reward == 0.0


def test_the_text_of_a_task_has_its_examples_and_no_hidden_call():
    task = tasks()["train"][0]
    text = task_text(task)
    assert text.count("should give") == len(task.shown)
    assert code_of("a\n```python\nx = 1\n```\nb\n```\ny\n```") == "y\n" and code_of("x") == "x"


@pytest.mark.parametrize("found", [b"", b"{}", b"[1]", b"[" * 10_000, b'["1"]'])
def test_results_of_another_form_are_not_right(found):
    assert right_results(tasks()["train"][0].hidden, found) == 0
