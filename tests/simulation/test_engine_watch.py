"""Actors, the real engine pools and the real stage in virtual time: one actor probes the engines for all, and nothing
depends on it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from actors.engine.base import EngineReport
from actors.engine.pool import LOOK_AGAIN_SECONDS, OWN_SECONDS, PROBE_SECONDS, TOLD_SECONDS, EnginePool
from actors.metrics import ActorMetrics
from pipeline.errors import EngineGone, WireError
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.progress import ANSWER_SECONDS, SILENCE_SECONDS, TICK_SECONDS
from pipeline.schema.record_file import json_object
from pipeline.stage.engine_watch import RELAY_SECONDS, SILENT_SECONDS
from pipeline.transport.messages import Kind, WireMessage
from tests.support.hostile_traffic import as_json, mutated, values
from tests.support.stub_engine import StubEngine
from tests.support.virtual_time import run_virtually
from tests.unit.stage.test_replay_core import Stage

ENGINES = 4
WAY_SECONDS = 0.02
"""From an actor to the stage, or back."""
ANSWERS_SECONDS = 0.01


class Server:
    """An engine that all actors see. ``asked`` counts what actors ask, by name of the actor and kind."""

    def __init__(self) -> None:
        self.version, self.hangs, self.dead = 0, False, False
        self.cut_off: set[str] = set()
        """Actors that it does not hear."""
        self.asked: Counter[tuple[str, str]] = Counter()


class Seen(StubEngine):
    """An engine as one actor sees it."""

    def __init__(self, number: int, server: Server, actor: str) -> None:
        super().__init__(f"stub://{number}")
        self.server, self.actor = server, actor

    async def _ask(self, kind: str) -> None:
        self.server.asked[self.actor, kind] += 1
        await anyio.sleep(ANSWERS_SECONDS)
        while self.server.hangs or self.actor in self.server.cut_off:
            await anyio.sleep(1.0)
        if self.server.dead:
            raise EngineGone("takes no connection: refused")

    async def health(self) -> None:
        await self._ask("health")

    async def weight_version(self) -> int | None:
        return self.server.version

    async def report(self) -> EngineReport | None:
        await self._ask("report")
        return EngineReport(running=5.0)


class Cluster:
    """Actors with their pools, connected to one stage."""

    def __init__(self, actors: int) -> None:
        self.servers = [Server() for _ in range(ENGINES)]
        self.stage = Stage()
        self.stalled: set[str] = set()
        """Actors that neither send nor receive."""
        self.pools: dict[str, EnginePool] = {}
        for number in range(actors):
            name = f"actor-{number}"
            engines = [Seen(at, server, name) for at, server in enumerate(self.servers)]
            metrics = ActorMetrics(CollectorRegistry(), (), [engine.name for engine in engines])
            draw = random.Random(number)
            self.pools[name] = EnginePool(engines, wait_seconds_max=60.0, metrics=metrics, jitter=draw, told=True)

    def play(self, during: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                self.tasks = tasks
                tasks.start_soon(self._rounds)
                for name in self.pools:
                    self.start(name)
                self.stage.learner()
                await self.until(lambda: all(self.fit(name) == ENGINES for name in self.pools))
                await during()
                tasks.cancel_scope.cancel()

        run_virtually(main)

    def start(self, name: str) -> None:
        self.pools[name].connected()
        self.stage.actor(name)
        self.tasks.start_soon(self.pools[name].watch)
        self.tasks.start_soon(self.pools[name].tell, lambda engines: self._send(name, engines))

    async def _send(self, name: str, engines: dict[str, Any]) -> None:
        await anyio.sleep(WAY_SECONDS)
        if name not in self.stalled:
            self.stage.core.message(name, WireMessage(Kind.ENGINES, {"engines": engines}))

    async def _rounds(self) -> None:
        posted = 0
        while True:
            self.stage.round(anyio.current_time() - self.stage.now)
            sent, posted = self.stage.sent[posted:], len(self.stage.sent)
            await anyio.sleep(WAY_SECONDS)
            for effect in sent:
                if effect.peer in self.pools and effect.peer not in self.stalled:
                    if effect.kind is Kind.WATCH:
                        self.pools[effect.peer].chosen()
                    elif effect.kind is Kind.ENGINES:
                        self.pools[effect.peer].told(effect.header["engines"])

    def fit(self, name: str, version: int = 0) -> int:
        """Engines that are fit for a request of the actor."""
        return sum(state.fit(version, anyio.current_time()) for state in self.pools[name].router.members)

    @property
    def watcher(self) -> str:
        (name,) = [name for name, pool in self.pools.items() if pool.watches and name not in self.stalled]
        return name

    async def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        with anyio.fail_after(seconds):
            while not condition():
                await anyio.sleep(0.01)

    async def asked(self, seconds: float) -> Counter[tuple[str, str]]:
        """Requests that one engine gets in so many seconds."""
        before = self.servers[0].asked.copy()
        await anyio.sleep(seconds)
        return self.servers[0].asked - before


def _of(asked: Counter[tuple[str, str]]) -> int:
    return sum(asked.values())


def test_what_an_engine_is_asked_for_its_state_does_not_depend_on_the_number_of_actors() -> None:
    found = {}
    for actors in (1, 3, 30):
        cluster = Cluster(actors)

        async def during(cluster: Cluster = cluster, actors: int = actors) -> None:
            assert _of(cluster.servers[0].asked) <= 6, "also while they connect"
            asked = await cluster.asked(60.0)
            assert {actor for actor, _ in asked} == {cluster.watcher}
            found[actors] = _of(asked)

        cluster.play(during)
    assert max(found.values()) - min(found.values()) <= 2 and found[30] <= 2.0 * 60, found


def test_loads_and_new_weights_reach_every_actor_at_once() -> None:
    cluster = Cluster(10)

    async def during() -> None:
        await anyio.sleep(3.0)
        for pool in cluster.pools.values():
            assert [report.running for report in pool.reports()] == [5.0] * ENGINES
        for server in cluster.servers:
            server.version = 1
        cluster.stage.tell(Kind.VERSION, policy_version=1, updates=0)
        seconds = 6 * WAY_SECONDS + RELAY_SECONDS + LOOK_AGAIN_SECONDS + 2 * ANSWERS_SECONDS
        await cluster.until(lambda: all(cluster.fit(name, 1) == ENGINES for name in cluster.pools), seconds)

    cluster.play(during)


@pytest.mark.parametrize("fault", ["killed", "stalled"])
def test_another_actor_watches_when_the_watcher_is_killed_or_stalls_and_no_engine_is_lost_meanwhile(fault: str) -> None:
    cluster = Cluster(10)

    async def during() -> None:
        gone = cluster.watcher
        cluster.stalled.add(gone)
        if fault == "killed":
            cluster.stage.core.peer_down(gone, left=False)
        asked = await cluster.asked(SILENT_SECONDS + 4 * WAY_SECONDS + PROBE_SECONDS)
        assert cluster.watcher != gone
        assert {actor for actor, _ in asked} == {gone, cluster.watcher}, "no other had to probe"
        for _ in range(100):
            assert all(cluster.fit(name) == ENGINES for name in cluster.pools)
            await anyio.sleep(0.1)
        cluster.stalled.clear()
        cluster.stage.actor(gone) if fault == "killed" else None
        await anyio.sleep(2.0)
        assert cluster.watcher != gone, "one that comes back follows the other"

    cluster.play(during)


def test_actors_that_are_told_nothing_probe_by_themselves_and_see_new_weights() -> None:
    cluster = Cluster(5)

    async def during() -> None:
        cluster.stalled = set(cluster.pools)
        for server in cluster.servers:
            server.version = 1
        for _ in range(200):
            assert all(cluster.fit(name) == ENGINES for name in cluster.pools)
            await anyio.sleep(0.1)
        assert all(cluster.fit(name, 1) == ENGINES for name in cluster.pools)
        assert len({actor for actor, _ in await cluster.asked(2.0)}) == 5
        cluster.stalled.clear()
        await anyio.sleep(3.0)
        assert len({actor for actor, _ in await cluster.asked(5.0)}) == 1

    cluster.play(during)


@pytest.mark.parametrize("fault", ["hangs", "dead"])
def test_an_engine_that_hangs_or_dies_is_down_for_every_actor_and_comes_back_for_all(fault: str) -> None:
    cluster = Cluster(10)

    async def during() -> None:
        await anyio.sleep(5.0)
        setattr(cluster.servers[0], fault, True)
        seconds = SILENCE_SECONDS + ANSWER_SECONDS + 2 * PROBE_SECONDS + 3 * TICK_SECONDS
        await cluster.until(lambda: all(cluster.fit(name) == ENGINES - 1 for name in cluster.pools), seconds)
        await anyio.sleep(30.0)
        asked = await cluster.asked(10.0)
        assert {actor for actor, _ in asked} == {cluster.watcher}, "all agree that it is down"
        setattr(cluster.servers[0], fault, False)
        await cluster.until(lambda: all(cluster.fit(name) == ENGINES for name in cluster.pools), 15.0)

    cluster.play(during)


def test_an_engine_that_only_the_watcher_cannot_reach_stays_in_use() -> None:
    cluster = Cluster(5)

    async def during() -> None:
        await anyio.sleep(5.0)
        lost = cluster.watcher
        cluster.servers[0].cut_off.add(lost)
        for _ in range(300):
            assert all(cluster.fit(name) >= ENGINES - (name == lost) for name in cluster.pools)
            await anyio.sleep(0.1)
        assert cluster.fit(lost) == ENGINES - 1

    cluster.play(during)


def test_an_actor_that_alone_cannot_reach_an_engine_gives_its_requests_up() -> None:
    cluster = Cluster(5)

    async def during() -> None:
        lost = next(name for name in cluster.pools if name != cluster.watcher)
        pool, ended = cluster.pools[lost], anyio.Event()

        async def request() -> None:
            with pytest.raises(EngineGone):
                async with pool.lease("session", 0) as engine:
                    cluster.servers[int(engine.name[-1])].cut_off.add(lost)
                    await anyio.sleep_forever()
            ended.set()

        cluster.tasks.start_soon(request)
        with anyio.fail_after(OWN_SECONDS + SILENCE_SECONDS + 3 * TICK_SECONDS + PROBE_SECONDS):
            await ended.wait()
        for _ in range(200):
            assert cluster.fit(lost) == ENGINES - 1, "the watcher's word does not count where this actor fails"
            assert all(cluster.fit(name) == ENGINES for name in cluster.pools if name != lost)
            await anyio.sleep(0.1)

    cluster.play(during)


def test_an_engine_that_the_watcher_does_not_know_is_probed_by_whoever_knows_it() -> None:
    cluster = Cluster(3)

    async def during() -> None:
        other = next(name for name in cluster.pools if name != cluster.watcher)
        pool, server = cluster.pools[other], Server()
        pool._connect = lambda url: Seen(int(url[-1]), server, other)
        pool.set_engines([f"stub://{number}" for number in range(ENGINES + 1)])
        await cluster.until(lambda: cluster.fit(other) == ENGINES + 1, TOLD_SECONDS + 2 * PROBE_SECONDS)

    cluster.play(during)


@pytest.mark.parametrize("seed", range(20))
def test_states_that_no_actor_would_send_are_refused_and_end_nothing(seed: int) -> None:
    rng, refused = random.Random(seed), list[WireError]()

    async def main() -> None:
        pool = Cluster(1).pools["actor-0"]
        state = {"alive": True, "version": 0, "asleep": False, "problem": "", "silent": 0.0, "answered_after": 0.1}
        seen = {f"stub://{number}": {**state, "report": [0.1, *[1.0] * 8]} for number in range(ENGINES)}
        for _ in range(50):
            try:
                pool.told(json_object(as_json(mutated(rng, seen, values(rng))), "engines"))
            except WireError as error:
                refused.append(error)

    run_virtually(main)
    assert refused
