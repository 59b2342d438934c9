"""Shared rules of all tests: number of examples, limits of time, budgets of CPU time."""

import functools
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing
from hypothesis import is_hypothesis_test, settings

from tests.support.smollm2 import tokenizer_folder

# A loaded machine with two cores is no reason for a property to fail.
settings.register_profile("full", deadline=None)
settings.register_profile("quick", deadline=None)
settings.load_profile("full")
# Typer makes the commands from their annotations at each call, which takes longer than most of them.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)

QUICK_SHARE = 4
"""With ``--hypothesis-profile=quick`` a property is tried with one in so many of its examples."""

VERIFIERS = Path(sys.prefix) / "verifiers" / "bin" / "python"
"""A Python with verifiers, which cannot be installed beside Afterplay; scripts/setup.py --dev makes it."""
if VERIFIERS.exists():
    os.environ.setdefault("AFTERPLAY_VERIFIERS_PYTHON", str(VERIFIERS))

FAST_SECONDS_MAX = 300
"""For a unit or simulation test that sets no timeout: one that hangs soon ends with a traceback."""

CPU_SECONDS_MAX = 2.0
"""Budget of a unit or simulation test that is not marked ``slow``: CPU time of its call and of the processes that it
waited for, without fixtures and without what this process imports for the first time. It applies where
AFTERPLAY_TEST_BUDGET is set, as scripts/check.py does."""
CPU_NOISE = 8.0
"""Multiple of its budget at which a test fails: the same work took four times the CPU time on a slow machine whose
cores and caches were shared with others. One above its budget is only marked in the list of the costliest tests."""
YARDSTICK_SECONDS = 0.08
"""CPU time of :func:`slowness`'s loop on the machine that the budget is meant for."""
imports = {"seconds": 0.0}
"""CPU time of the imports of this process."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_fast(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FAST_SECONDS_MAX))
    if config.getoption("--hypothesis-profile") == "quick":
        take_fewer_examples(items)


def has_budget(item: pytest.Item) -> bool:
    """True for a test that is held to its budget. A property with all of its examples is not."""
    if item.get_closest_marker("hypothesis") and item.config.getoption("--hypothesis-profile") != "quick":
        return False
    return "AFTERPLAY_TEST_BUDGET" in os.environ and is_fast(item) and item.get_closest_marker("slow") is None


def is_fast(item: pytest.Item) -> bool:
    return bool({"unit", "simulation"} & set(item.nodeid.partition("::")[0].split("/")))


def take_fewer_examples(items: list[pytest.Item]) -> None:
    """Hypothesis keeps the settings of a property at its function, those of a state machine at its class."""
    owners: dict[int, tuple[Any, str]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            function = getattr(item.obj, "__func__", item.obj)
            machine = hasattr(function, "_hypothesis_state_machine_class")
            owner = (item.cls, "settings") if machine else (function, "_hypothesis_internal_use_settings")
            owners[id(owner[0])] = owner
    for owner, name in owners.values():
        own = getattr(owner, name)
        setattr(owner, name, settings(own, max_examples=max(1, own.max_examples // QUICK_SHARE)))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Files of SmolLM2's tokenizer."""
    folder = tokenizer_folder()
    if folder is None:
        pytest.skip("NO SmolLM2 HERE: run 'make setup-dev'")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The garbage collector would look through all that is imported again and again, a quarter of the time of the
    imports; what they leave is there until the end, and no later collection looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Libraries in C++ print what is left of them at the end."""
    gc.unfreeze()


def pytest_configure() -> None:
    if "AFTERPLAY_TEST_BUDGET" in os.environ:
        count_imports()


def count_imports() -> None:
    """Python loads a module that it does not have yet by this function, nested for what the module imports."""
    load, thread = importlib._bootstrap._find_and_load, threading.local()

    def counted(*arguments: Any) -> Any:
        if getattr(thread, "inside", False):
            return load(*arguments)
        thread.inside, begun = True, sum(os.times()[:4])
        try:
            return load(*arguments)
        finally:
            thread.inside = False
            imports["seconds"] += sum(os.times()[:4]) - begun

    # a frame of the interpreter's own, as the function in its place is one
    counted.__code__ = counted.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    importlib._bootstrap._find_and_load = counted


def cpu_seconds() -> float:
    return sum(os.times()[:4]) - imports["seconds"]


def slowness() -> float:
    """How much more CPU time a loop takes now than on the machine of the budget; at least 1."""
    begun, total = time.process_time(), 0
    for i in range(1_000_000):
        total += i
    return max(1.0, (time.process_time() - begun) / YARDSTICK_SECONDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    begun = cpu_seconds()
    yield
    item.user_properties.append(("setup_cpu_seconds", cpu_seconds() - begun))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    begun = cpu_seconds()
    try:
        yield
    finally:
        spent = cpu_seconds() - begun
        item.user_properties.append(("cpu_seconds", spent))
    counted = has_budget(item)
    item.user_properties.append(("over_budget", float(counted and spent > CPU_SECONDS_MAX)))
    if counted and spent > CPU_SECONDS_MAX * CPU_NOISE and spent > CPU_SECONDS_MAX * CPU_NOISE * slowness():
        pytest.fail(
            f"expected at most {CPU_SECONDS_MAX} s of CPU time, it took {spent:.1f} s: make it cheaper, or mark "
            "it slow (then only make test-all runs it)",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The twenty tests with the most CPU time."""
    if "AFTERPLAY_TEST_BUDGET" not in os.environ:
        return
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())]
    spent = [(dict(r.user_properties), r.nodeid) for r in reports if r.when == "call"]
    spent.sort(key=lambda one: -one[0].get("cpu_seconds", 0.0))
    terminalreporter.section("most CPU time: call, setup")
    for properties, nodeid in spent[:20]:
        call, setup = (properties.get(name, 0.0) for name in ("cpu_seconds", "setup_cpu_seconds"))
        mark = "  OVER ITS BUDGET" if properties.get("over_budget") else ""
        terminalreporter.write_line(f"{call:6.2f} s {setup:6.2f} s  {nodeid}{mark}")
