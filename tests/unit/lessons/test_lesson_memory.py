"""The memory finds what fits, forgets the oldest first, takes any text, and survives being killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import StoreError
from pipeline.lessons.store import LessonStore, tidy

TEXT = st.text(max_size=80)
WORDS = st.lists(
    st.sampled_from(["guess", "higher", "lower", "sum", "of", "seven", "Größe", "日本"]), min_size=1, max_size=25
).map(" ".join)
FIXTURES = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lessons.sqlite"


def memory(path: Path, capacity: int = 100, characters_max: int = 200) -> LessonStore:
    return LessonStore(path, capacity=capacity, characters_max=characters_max)


def texts(found) -> list[str]:
    return [lesson.text for lesson in found]


def test_the_task_that_is_most_alike_comes_first_and_an_unlike_one_not_at_all(path: Path) -> None:
    with memory(path) as m:
        m.add("What is 3 + 4? Reply with only the number.", ["carry nothing"])
        m.add("Find a flight from Bern to Oslo in the calendar", ["look at the calendar first"])
        m.add("Find a train from Bern to Rome in the calendar", ["look at the timetable first"])
        found = texts(m.search("Find a flight from Bern to Paris in the calendar", 5))
        assert found == ["look at the calendar first", "look at the timetable first"]
        assert texts(m.search("Find a flight from Bern to Paris in the calendar", 1)) == found[:1]
        assert m.search("translate this poem, please", 5) == []


def test_equally_good_lessons_come_newest_first_and_the_same_text_once(path: Path) -> None:
    with memory(path) as m:
        assert m.add("guess", ["one", "two"]) == 2
        assert m.add("guess", ["One", " two\n"]) == 0
        assert m.add("guess the number", ["two"]) == 1
        assert m.add("guess", ["three", "", "  \n "]) == 1
        assert texts(m.search("guess", 10))[0] == "three"
        assert sorted(texts(m.search("guess", 10))) == ["one", "three", "two"]
        assert len(m) == 4


@given(query=TEXT, task=TEXT, lesson=TEXT, top_k=st.integers(0, 5))
@FIXTURES
def test_any_text_is_a_query_a_task_and_a_lesson(tmp_path_factory, query, task, lesson, top_k) -> None:
    with memory(tmp_path_factory.mktemp("m") / "lessons.sqlite", characters_max=20) as m:
        assert m.add(task, [lesson]) == bool(tidy(lesson))
        assert len(m.search(query, top_k)) <= top_k
        assert all(len(text) <= 20 and text == tidy(text) for text in texts(m.search(task, top_k)))


@pytest.mark.parametrize(
    "query", ['"', "a OR b", "NEAR(a b)", "task:a*", "-a ^b", "(", "\0", "\ud800", "_", "x" * 99999]
)
def test_operators_of_the_search_language_are_plain_text(path: Path, query: str) -> None:
    with memory(path) as m:
        m.add("a b", ["c"])
        m.search(query, 3)


@given(history=st.lists(st.tuples(WORDS, WORDS), max_size=30), capacity=st.integers(1, 8))
@FIXTURES
def test_only_the_newest_are_held_and_each_of_them_is_found(tmp_path_factory, history, capacity) -> None:
    with memory(tmp_path_factory.mktemp("m") / "lessons.sqlite", capacity) as m:
        held: list[tuple[str, str]] = []
        for task, lesson in history:
            if m.add(task, [lesson]):
                assert (task.casefold(), lesson.casefold()) not in [(t.casefold(), w.casefold()) for t, w in held]
                held = [*held, (task, lesson)][-capacity:]
        assert len(m) == len(held)
        for task, _ in held:
            wanted = {lesson.casefold() for t, lesson in held if t.casefold() == task.casefold()}
            assert wanted <= {text.casefold() for text in texts(m.search(task, 64))}


def test_what_was_added_survives_a_kill_and_two_processes_share_the_file(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pipeline.lessons.store import LessonStore\n"
        "m = LessonStore(Path(sys.argv[1]), capacity=10**6, characters_max=100)\n"
        "for i in range(10**6):\n"
        "    m.add(f'guess {i}', [f'lesson {sys.argv[2]} {i}']); print(i, flush=True)\n"
    )
    root = Path(__file__).parents[3]
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(path), n], cwd=root, stdout=subprocess.PIPE, text=True)
        for n in "ab"
    ]
    said = []
    for process in started:
        assert process.stdout is not None
        for _ in range(30):
            last = process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        last = ([last.strip()] + [line for line in process.stdout.read().split("\n")[:-1] if line])[-1]
        process.communicate()
        said.append(int(last))
    with memory(path, capacity=10**6) as m:
        assert len(m) >= sum(said) + 2
        for name, last in zip("ab", said, strict=True):
            assert f"lesson {name} {last}" in texts(m.search(f"guess {last}", 2))


def test_a_file_of_something_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    text, foreign = tmp_path / "text", tmp_path / "foreign.sqlite"
    text.write_text("hello" * 100)
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE t (a)")
    other.close()
    for file in (text, foreign):
        before = file.read_bytes()
        with pytest.raises(StoreError, match=r"memory of lessons.*Move it away"):
            memory(file)
        assert file.read_bytes() == before


def test_a_damaged_or_newer_file_is_refused(path: Path) -> None:
    with memory(path, capacity=10**4) as m:
        m.add("guess", [f"lesson number {i} " + "x" * 150 for i in range(300)])
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * 8192 + whole[12288:])
    with pytest.raises(StoreError, match="damaged"):
        memory(path)
    path.write_bytes(whole[:60] + b"\0\0\0\x63" + whole[64:])
    with pytest.raises(StoreError, match="memory version 99"):
        memory(path)
    path.write_bytes(whole)
    with memory(path) as m:
        assert m.search("guess", 1)


def test_a_log_without_its_memory_is_not_applied_to_a_new_one(path: Path) -> None:
    path.parent.mkdir()
    Path(f"{path}-wal").write_bytes(b"x" * 100)
    with pytest.raises(StoreError, match="move it back"):
        memory(path)
