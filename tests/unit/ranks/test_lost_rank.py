"""A lost rank is named by its end, also when its connection closes before it is known to have ended."""

import logging
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import anyio
import pytest

from learner.distributed.collectives import ProcessRank
from learner.process.rank_processes import RankZero
from pipeline.errors import TrainingError
from pipeline.runtime.children import ChildGroup

NAMED = "the learner has lost a rank: rank 1 ended (killed by SIGKILL)"


class DyingGroup:
    """The other rank dies during the first collective: rank 0 sees its connection close, then its end."""

    def __init__(self):
        self.end_of_child = Future()

    def end(self):
        self.end_of_child.set_result(-signal.SIGKILL)
        raise RuntimeError("Connection closed by peer")

    heartbeat = end


@pytest.fixture
def rank_zero(kit, monkeypatch):
    group = DyingGroup()
    monkeypatch.setattr("learner.process.rank_processes.join", lambda *_: None)
    monkeypatch.setattr("learner.process.rank_processes.RankGroup", lambda *_: group)
    monkeypatch.setattr("learner.process.rank_processes.HEARTBEAT_SECONDS", 0.0)
    rank_zero = RankZero(kit.run_config(), ProcessRank(0, 2))
    rank_zero._children[1] = SimpleNamespace(end=group.end_of_child)
    yield rank_zero
    rank_zero._close(wait_seconds=0)


def test_ranks_that_were_started_end_when_another_cannot_be(kit, monkeypatch):
    started = []

    class Child(ChildGroup):
        def __init__(self, *args, **kwargs):
            if started:
                raise OSError("no process is left")
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr("learner.process.rank_processes.ChildGroup", Child)
    monkeypatch.setattr("learner.process.rank_processes.module_command", lambda *_: ["sleep", "600"])
    with pytest.raises(OSError, match="no process is left"):
        RankZero(kit.run_config({"ranks": 3}), ProcessRank())
    assert started[0].end.result(timeout=60) == -signal.SIGKILL


async def test_a_rank_lost_while_the_others_wait_is_named(rank_zero):
    with pytest.raises(TrainingError) as caught, anyio.fail_after(30):
        await rank_zero.watch()
    assert str(caught.value).startswith(NAMED)


def test_a_rank_lost_when_the_ranks_are_ended_is_named(rank_zero, caplog):
    with caplog.at_level(logging.ERROR):
        rank_zero.end()
    assert [record.getMessage().startswith(NAMED) for record in caplog.records] == [True]
