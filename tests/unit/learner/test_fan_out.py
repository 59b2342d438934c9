"""One pass over the weights for many engines: who shares a group, who may hold up others, and who is lost with whom."""

import random
import threading
import weakref

import anyio
import pytest

from learner.weights import fan_out, weight_pass
from learner.weights.fan_out import GROUPS_MAX, divide
from learner.weights.weight_pass import AHEAD, WeightPass, patience
from pipeline.errors import EngineUnavailable
from tests.unit.learner.test_device_transfer import (  # noqa: F401
    CPU,
    _impatient,
    impatient,
    passing,
    same,
    until,
    working,
    world,
)

SIX = pytest.mark.parametrize("world", [(6, 60.0)], indirect=True, ids=["6"])
SIX_IMPATIENT = pytest.mark.parametrize("world", [(6, 15.0)], indirect=True, ids=["6"])


@pytest.mark.parametrize("seed", range(50))
def test_groups_are_a_partition_of_bounded_size_in_which_whole_groups_stay(seed):
    rng = random.Random(seed)
    everyone = [f"e{i}" for i in range(rng.randrange(1, 70))]
    groups: list[frozenset[str]] = []
    for _ in range(6):
        engines = rng.sample(everyone, rng.randrange(1, len(everyone) + 1))
        alone = rng.sample(engines, rng.randrange(len(engines)) // 8)
        parts = divide(engines, groups, alone)
        assert sorted(engine for part in parts for engine in part) == sorted(engines)
        assert all(frozenset([engine]) in parts for engine in alone)
        assert len(parts) <= GROUPS_MAX + len(alone)
        whole = {group for group in groups if group <= set(engines) - set(alone)}
        assert whole <= set(parts) or len(parts) == min(GROUPS_MAX, len(engines) - len(alone)) + len(alone)
        share = -(-(len(engines) - len(alone)) // GROUPS_MAX)
        assert max(map(len, parts)) <= max(1, 2 * share)
        groups = parts


@pytest.mark.parametrize(("n", "sizes"), [(1, [1]), (4, [1] * 4), (6, [1, 1, 2, 2]), (48, [12] * 4), (64, [16] * 4)])
def test_groups_are_of_equal_size(n, sizes):
    assert sorted(map(len, divide(map(str, range(n))))) == sizes


def test_an_engine_lengthens_a_pass_by_no_more_than_the_pass_and_the_time_it_may_hold():
    rng = random.Random(0)
    for _ in range(100):
        elapsed = held = 0.0
        for _ in range(100):
            left = patience(5.0, elapsed, held)
            free, wait = rng.expovariate(1.0), min(rng.expovariate(0.5), max(left, 0.0))
            elapsed, held = elapsed + free + wait, held + wait
            assert held <= (elapsed - held) + 5.0 + 1e-9
    assert patience(5.0, 10.0, 0.0) == 15.0 and patience(5.0, 25.0, 15.0) == 0.0


def test_weights_are_made_once_for_all_and_three_exist_at_most(kit):
    policy, made, most = kit.tiny_policy(), [], []
    alive: weakref.WeakSet = weakref.WeakSet()

    def read():
        for name, tensor in policy.weights("bfloat16"):
            made.append(name)
            alive.add(tensor)
            most.append(len(alive))
            yield name, tensor
            del tensor

    got: list[dict] = [{} for _ in range(16)]

    def take(send, into):
        for name, tensor in send.pairs(CPU):
            into[name] = tensor.clone()
            del tensor

    with passing(policy, read, len(got)) as sends:
        threads = [threading.Thread(target=take, args=pair) for pair in zip(sends, got, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert made == [name for name, *_ in policy.description("bfloat16")]
    assert max(most) <= AHEAD + 1
    assert all(same(weights, policy.snapshot("bfloat16")) for weights in got)


def test_a_send_that_stops_is_given_up_and_the_others_get_all(kit):
    policy = kit.tiny_policy()
    weights = WeightPass(policy.description("bfloat16"), lambda: policy.weights("bfloat16"), 3, 0.2)
    hung, *others = weights.sends
    thread = threading.Thread(target=weights.run, args=(CPU,), daemon=True)
    thread.start()
    stuck = hung.pairs(CPU)
    next(stuck)
    got: list[list] = [[], []]
    takers = [
        threading.Thread(target=lambda s=s, g=g: g.extend(name for name, _ in s.pairs(CPU)))
        for s, g in zip(others, got, strict=True)
    ]
    for taker in takers:
        taker.start()
    for taker in (*takers, thread):
        taker.join(60)
        assert not taker.is_alive()
    assert got[0] == got[1] == [name for name, *_ in policy.description("bfloat16")]
    with pytest.raises(EngineUnavailable, match="held up others"):
        list(stuck)


def test_one_that_hangs_alone_does_not_keep_others_from_the_next_pass(kit, monkeypatch):
    monkeypatch.setattr(weight_pass, "STALL_SECONDS", 1000)
    policy = kit.tiny_policy()
    weights = WeightPass(policy.description("bfloat16"), lambda: policy.weights("bfloat16"), 1, 0.05)
    thread = threading.Thread(target=weights.run, args=(CPU,), daemon=True)
    thread.start()
    stuck = weights.sends[0].pairs(CPU)
    next(stuck)
    weights.hurry()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(EngineUnavailable, match="taken no weight"):
        list(stuck)


def test_a_rank_that_is_lost_ends_the_pass_for_every_engine(kit):
    """Its collective fails; else all engines would wait for the next weight."""
    policy = kit.tiny_policy()

    def read():
        yield next(policy.weights("bfloat16"))
        raise RuntimeError("connection closed by peer")

    with passing(policy, read, 2) as sends:
        pass
    for send in sends:
        with pytest.raises(RuntimeError, match="closed by peer"):
            list(send.pairs(CPU))


@pytest.fixture
def passes(monkeypatch):
    """Passes over the weights so far, each by its number of groups."""
    run, found = WeightPass.run, []

    def counted(self, device):
        found.append(len(self.sends))
        run(self, device)

    monkeypatch.setattr(WeightPass, "run", counted)
    return found


@pytest.fixture
def two_groups(monkeypatch):
    monkeypatch.setattr(fan_out, "GROUPS_MAX", 2)


@SIX
async def test_six_engines_in_two_groups_take_each_version_from_one_pass(world, passes, two_groups):  # noqa: F811
    async with working(world):
        for version in (1, 2, 3):
            weights = world.weights()
            assert len((await world.publisher.publish(version, weights)).live) == 6
            assert all(same(peer.received[-1], world.policy.snapshot("bfloat16")) for peer in world.peers.values())
            await weights.retire()
            world.update()
    assert passes == [2, 2, 2]
    places = sorted(place for peer in world.peers.values() for place in peer.places)
    assert places == sorted([(1, 7), (3, 7), (5, 7)] * 2), "each joined once, in a place of its own"


@SIX
@pytest.mark.parametrize("fault", ["refuses", "start", "dies", "hangs", "update", "finish"])
async def test_the_others_of_a_group_get_the_version_in_the_same_publication(two_groups, impatient, world, fault):  # noqa: F811
    bad, *others = world.engines
    world.peer(0).fault = fault
    async with working(world):
        done = await world.publisher.publish(1, world.weights())
        assert {engine.url for engine in others} <= set(done.live)
        assert not any(world.keeper(i).state.failures for i in range(1, 6)), "nobody else is blamed"
        snapshot = world.policy.snapshot("bfloat16")
        assert all(same(world.peer(i).received[-1], snapshot) for i in range(1, 6))
        assert (bad.url in done.live) is (fault == "refuses"), "one that cannot join has a folder"
        world.peer(0).fault = ""
        await world.keeper(0).until_served(1)
        weights = world.weights()
        assert len((await world.publisher.publish(2, weights)).live) == 6
    assert all(not engine.broken and not engine.paused for engine in world.engines)


@SIX
async def test_an_engine_that_started_again_joins_anew_before_the_next_pass(world, passes, two_groups):  # noqa: F811
    """Else its old group would fail, and with it two engines."""
    again = world.engines[0]
    async with working(world):
        weights = world.weights()
        await world.publisher.publish(1, weights)
        await weights.retire()
        again.version, again.paused = "default", False
        await until(lambda: "next version" in world.keeper(0).state.reason)
        await world.publisher.publish(2, world.weights())
        await world.keeper(0).until_served(2)
        await world.publisher.publish(3, world.weights())
    assert [len(peer.received) for peer in world.peers.values()] == [3] * 6 and passes == [2, 2, 2]
    assert all(not keeper.state.failures for url, keeper in world.publisher.keepers.items() if url != again.url)


@SIX_IMPATIENT
async def test_an_engine_that_does_not_join_holds_up_nobody(two_groups, impatient, world, passes):  # noqa: F811
    world.peer(0).fault = "joins"
    world.peer(0).goes_on.clear()
    async with working(world):
        done = await world.publisher.publish(1, world.weights())
        alone = {engine.url for engine in world.engines[1:]} & set(done.live)
        assert len(alone) >= 3, "those of the other group"
        world.peer(0).goes_on.set()
        with anyio.fail_after(30):
            for keeper in world.publisher.keepers.values():
                await keeper.until_served(1)
    snapshot = world.policy.snapshot("bfloat16")
    assert all(same(peer.received[-1], snapshot) for peer in world.peers.values())
