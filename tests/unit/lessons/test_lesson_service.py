"""The stage's part: it answers, it writes, and nothing that it is given makes it wait or fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from pipeline.config.lessons import LessonsConfig
from pipeline.errors import TransportError
from pipeline.lessons.service import GROUPS_MAX, QUERIES_MAX, LessonService
from pipeline.lessons.store import LessonStore
from pipeline.lessons.writer import LessonWriter
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import Trajectory
from pipeline.schema.codec import Limits, encode_trajectory
from pipeline.schema.record_file import Frames
from pipeline.stage.metrics import ReplayMetrics
from pipeline.store.effects import Finished, Send
from pipeline.transport.messages import Kind

MakePlayed = Callable[..., Trajectory]
PLUGINS = str(Path(__file__).parent / "plugins_for_lessons.py")


class Told:
    """A counter that tells of every increment."""

    def __init__(self, counter: Any, tell: Callable[[], None]) -> None:
        self._counter, self._tell = counter, tell

    def labels(self, **labels: str) -> Told:
        return Told(self._counter.labels(**labels), self._tell)

    def inc(self, amount: float = 1) -> None:
        self._counter.inc(amount)
        self._tell()


class Stage:
    """Payloads in, messages out."""

    def __init__(self, directory: Path, source: Any = None, **section: Any) -> None:
        config = LessonsConfig(enabled=True, **section)
        self.registry = CollectorRegistry()
        self.stored: dict[int, Frames] = {}
        self.sent: list[Send] = []
        self._changed = anyio.Event()
        metrics = ReplayMetrics(self.registry)
        for name in ("lesson_groups_total", "lesson_searches_total"):
            setattr(metrics, name, Told(getattr(metrics, name), self._tell))
        self.memory = LessonStore(directory / "lessons.sqlite", capacity=100, characters_max=200)
        self.lessons = LessonService(
            config,
            memory=None if source else self.memory,
            source=source,
            writer=LessonWriter(config, 1.0),
            payloads=self.payloads,
            post=self.post,
            limits=Limits(),
            metrics=metrics,
        )

    async def payloads(self, row_ids: Sequence[int]) -> Mapping[int, Frames]:
        return {row_id: self.stored[row_id] for row_id in row_ids if row_id in self.stored}

    def group(self, *trajectories: Trajectory) -> Finished:
        start = len(self.stored)
        members = []
        for row_id, trajectory in enumerate(trajectories, start):
            self.stored[row_id] = encode_trajectory(trajectory)
            members.append(
                SimpleNamespace(row_id=row_id, reward=trajectory.reward, rewards={"score": trajectory.reward})
            )
        return Finished("g000001", tuple(members))  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"afterplay_replay_{name}", labels) or 0.0

    def post(self, message: Send) -> None:
        self.sent.append(message)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looks after every message and every count."""
        with anyio.fail_after(60):
            while not condition():
                self._changed = anyio.Event()
                await self._changed.wait()


@asynccontextmanager
async def serving(directory: Path, source: Any = None, **section: Any) -> AsyncIterator[Stage]:
    stage = Stage(directory, source, **section)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.lessons.run)
        yield stage
        tasks.cancel_scope.cancel()
    stage.memory.close()


def question(n: int, query: str = "guess") -> dict[str, Any]:
    return {"order_id": f"g000001.{n}.0", "query": query, "top_k": 2}


async def test_a_finished_group_becomes_a_lesson_that_the_next_question_gets(
    tmp_path: Path, make_played: MakePlayed
) -> None:
    async with serving(tmp_path) as stage:
        stage.lessons.query("actor-0", question(0))
        await stage.until(lambda: len(stage.sent) == 1)
        stage.lessons.finished(
            stage.group(make_played(["4", "3"], ["lower"], 1.0), make_played(["7"], [], 0.0, slot=1))
        )
        await stage.until(lambda: stage.value("lesson_groups_total", outcome="written") == 1)
        for n in range(8):
            stage.lessons.query("actor-1", question(n))
        await stage.until(lambda: len(stage.sent) == 9)
    assert stage.sent[0] == Send("actor-0", Kind.LESSONS, {"order_id": "g000001.0.0", "lessons": []})
    assert {m.header["order_id"] for m in stage.sent[1:]} == {f"g000001.{n}.0" for n in range(8)}
    for message in stage.sent[1:]:
        assert message.peer == "actor-1" and message.payload is None
        assert message.header["lessons"] == [{"id": "1", "text": "Worked: 4 (lower), 3. Failed: 7."}]
    assert stage.value("lessons") == stage.value("lessons_written_total") == 1
    assert stage.value("lesson_searches_total", outcome="none") == 1
    assert stage.value("lesson_searches_total", outcome="found") == 8


async def test_groups_without_both_kinds_cost_nothing_and_forgotten_payloads_are_no_error(
    tmp_path: Path, make_played: MakePlayed
) -> None:
    async with serving(tmp_path) as stage:
        stage.lessons.finished(stage.group(make_played(["4"], [], 1.0), make_played(["4"], [], 1.0, slot=1)))
        gone = stage.group(make_played(["4"], [], 1.0), make_played(["5"], [], 0.0, slot=1))
        stage.stored.clear()
        stage.lessons.finished(gone)
        await stage.until(lambda: stage.value("lesson_groups_total", outcome="dropped") == 1)
    assert sum(stage.value("lesson_groups_total", outcome=o) for o in ("written", "nothing", "error")) == 0


async def test_a_group_of_the_last_rounds_of_a_stage_that_stops_is_dropped(
    tmp_path: Path, make_played: MakePlayed
) -> None:
    async with serving(tmp_path) as stage:
        stage.lessons.query("actor-0", question(0))
        await stage.until(lambda: len(stage.sent) == 1)
    stage.lessons.finished(stage.group(make_played(["3"], [], 1.0), make_played(["7"], [], 0.0, slot=1)))
    assert stage.value("lesson_groups_total", outcome="dropped") == 1


@pytest.mark.parametrize(("name", "outcome"), [("fails", "error"), ("wrong", "error"), ("nothing", "nothing")])
async def test_a_bad_writer_is_counted_and_the_next_group_is_served(
    tmp_path: Path, make_played: MakePlayed, name: str, outcome: str
) -> None:
    async with serving(tmp_path, writer=f"{PLUGINS}:{name}") as stage:
        for _ in range(9):
            stage.lessons.finished(stage.group(make_played(["4"], [], 1.0)))
        await stage.until(lambda: stage.value("lesson_groups_total", outcome=outcome) == 9)
        stage.lessons.query("actor-0", question(0))
        await stage.until(lambda: len(stage.sent) == 1)


async def test_a_writer_that_never_ends_stops_neither_searches_nor_ingest(
    tmp_path: Path, make_played: MakePlayed
) -> None:
    async with serving(tmp_path, writer=f"{PLUGINS}:never", writer_seconds_max=0.05) as stage:
        group = stage.group(make_played(["4"], [], 1.0))
        for _ in range(2 * GROUPS_MAX):
            stage.lessons.finished(group)
        assert stage.value("lesson_groups_total", outcome="dropped") >= GROUPS_MAX
        stage.lessons.query("actor-0", question(0))
        await stage.until(lambda: len(stage.sent) == 1)
        await stage.until(lambda: stage.value("lesson_groups_total", outcome="timeout") >= 4)


async def test_questions_over_the_bound_are_dropped_and_nonsense_is_counted(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        for n in range(QUERIES_MAX + 3):
            stage.lessons.query("actor-0", question(n))
        assert stage.value("lesson_searches_total", outcome="dropped") == 3
        stage.lessons.query("actor-0", {"query": "x"})
        for top_k in ("many", 1e300, 2**62, 2**64 - 1, -1, None, []):
            stage.lessons.query("actor-0", {"order_id": "a", "query": "x", "top_k": top_k})
        for order_id in (None, "x" * 10**6, ["g000001.0.0"], {}):
            stage.lessons.query("actor-0", {"order_id": order_id, "query": "x", "top_k": 2})
        assert stage.value("lesson_searches_total", outcome="error") == 12
        await stage.until(lambda: len(stage.sent) == QUERIES_MAX)


class Source:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.got: list[Sequence[Trajectory]] = []
        self.closed = False

    async def summarise(self, trajectories: Sequence[Trajectory]) -> int:
        self.got.append(trajectories)
        if self.error is not None:
            raise self.error
        return 2

    async def close(self) -> None:
        self.closed = True


async def test_a_source_gets_every_scored_group_with_its_rewards(tmp_path: Path, make_played: MakePlayed) -> None:
    source = Source()
    async with serving(tmp_path, source) as stage:
        stage.lessons.finished(stage.group(make_played(["4"], [], 1.0), make_played(["5"], [], 1.0, slot=1)))
        await stage.until(lambda: stage.value("lesson_groups_total", outcome="written") == 1)
        stage.lessons.query("actor-0", question(0))
    assert [t.reward for t in source.got[0]] == [1.0, 1.0] and source.got[0][0].rewards["score"] == 1.0
    assert stage.value("lessons_written_total") == 2 and source.closed
    assert stage.sent[0].header["lessons"] == []


@pytest.mark.parametrize("error", [TransportError("down"), KeyError("lost"), SystemExit(3)])
async def test_a_source_that_fails_is_counted(tmp_path: Path, make_played: MakePlayed, error: BaseException) -> None:
    async with serving(tmp_path, Source(error)) as stage:
        stage.lessons.finished(stage.group(make_played(["4"], [], 1.0)))
        await stage.until(lambda: stage.value("lesson_groups_total", outcome="error") == 1)
