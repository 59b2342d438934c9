"""A batch built ahead is the batch that would be built at its time, or none."""

import anyio
import pytest

from learner.process.batches import Prefetcher, make_batch, needs_scores
from pipeline.config.replay import ReplayConfig

CONFIG = ReplayConfig()


class Session:
    """Gives ``groups`` when ``complete`` is set."""

    def __init__(self, groups, complete=True):
        self.groups, self.complete = groups, anyio.Event()
        if complete:
            self.complete.set()

    async def peek(self, update):
        await self.complete.wait()
        return self.groups


def scores(rows):
    raise AssertionError("nothing asks for entropies here")


def groups_of(kit, seed=0):
    return tuple(kit.make_group(f"g{i}", [1.0, 0.0], seed=seed + i) for i in range(2))


async def test_the_batch_built_ahead_is_the_one_built_at_its_time(kit):
    groups = groups_of(kit)
    prefetcher = Prefetcher(Session(groups), CONFIG)
    await prefetcher.prefetch(3)
    made, expected = prefetcher.take(3, groups), make_batch(3, groups, CONFIG, scores)
    assert made is not None and made.batch.update == 3 and made.batch.groups == expected.batch.groups
    assert [row.trajectory_id for row in made.batch.rows] == [row.trajectory_id for row in expected.batch.rows]
    assert made.build_seconds == 0 and prefetcher.take(3, groups) is None


@pytest.mark.parametrize("change", ["update", "fewer", "another group", "another trajectory"])
async def test_a_batch_of_other_groups_is_not_taken(kit, change):
    groups = groups_of(kit)
    prefetcher = Prefetcher(Session(groups), CONFIG)
    await prefetcher.prefetch(3)
    others = groups_of(kit, seed=50)
    planned = {
        "update": (4, groups),
        "fewer": (3, groups[:1]),
        "another group": (3, (groups[0], others[1])),
        "another trajectory": (3, (groups[0], type(groups[1])(groups[1].plan, others[1].trajectories))),
    }
    assert prefetcher.take(*planned[change]) is None


async def test_nothing_is_kept_of_groups_that_did_not_come_in_time(kit):
    session = Session(groups_of(kit), complete=False)
    prefetcher = Prefetcher(session, CONFIG)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prefetcher.prefetch, 1)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert prefetcher.take(1, session.groups) is None


async def test_a_choice_that_needs_the_weights_waits_for_them(kit):
    whole = kit.make_group("g", [1.0, 0.0, 1.0], replay=[1, 2])
    plan = type(whole.plan)("g", whole.plan.task, 2, 1, ("g.1",), candidates=("g.1", "g.2"))
    groups = (type(whole)(plan, whole.trajectories),)
    config = ReplayConfig(entropy="current", select="argmin")
    assert needs_scores(groups, config) and not needs_scores(groups, ReplayConfig(entropy="stored"))
    prefetcher = Prefetcher(Session(groups), config)
    await prefetcher.prefetch(0)
    assert prefetcher.take(0, groups) is None


async def test_a_batch_that_cannot_be_built_fails_at_its_time_only(kit):
    whole = kit.make_group("g", [1.0, 0.0])
    groups = (type(whole)(whole.plan, whole.trajectories[:1]),)
    prefetcher = Prefetcher(Session(groups), CONFIG)
    await prefetcher.prefetch(0)
    assert prefetcher.take(0, groups) is None
