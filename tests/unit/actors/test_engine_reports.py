"""Reports of engines, as they reach an actor: its own readings and those of the watcher, in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
from prometheus_client import CollectorRegistry

from actors.engine.base import EngineReport
from actors.engine.engine_state import EngineLoad
from actors.engine.pool import EnginePool
from actors.metrics import ActorMetrics
from tests.support.stub_engine import StubEngine


def test_only_what_an_engine_has_served_since_its_first_report_is_counted() -> None:
    """Neither what it served before, nor all of it again where a report comes behind a newer one."""
    pool: Any = object.__new__(EnginePool)
    pool._metrics = ActorMetrics(registry := CollectorRegistry())
    state: Any = SimpleNamespace(name="http://a:1", load=EngineLoad())

    def missed() -> float | None:
        return registry.get_sample_value("afterplay_actor_prefix_tokens_total", {"result": "miss"})

    pool._loaded(state, EngineReport(prefix_queries=1000), 0, 10.0)
    assert missed() == 0
    for at, queries in ((9.2, 990), (11.0, 1010)):
        pool._loaded(state, EngineReport(prefix_queries=queries), 0, at)
    assert missed() == 10
    assert state.load.at == 11.0
    pool._loaded(state, EngineReport(prefix_queries=7), 0, 12.0)  # it has restarted
    assert missed() == 17


async def test_load_of_an_engine_is_exported_only_while_it_is_up_and_in_the_run(metrics: ActorMetrics) -> None:
    engine = StubEngine("stub://a")
    engine.reported = EngineReport(running=4, kv_used=0.5)
    pool = EnginePool(
        connect=lambda url: engine, wait_seconds_max=5, metrics=metrics, probe_seconds=0.01, report_seconds=0.01
    )

    async def exported(*values: float) -> None:
        gauges = (metrics.engine_requests, metrics.engine_kv_used_ratio)
        while [s.value for gauge in gauges for family in gauge.collect() for s in family.samples] != [*values]:
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        pool.set_engines([engine.name])
        with anyio.fail_after(60):
            await exported(4, 0, 0.5)
            engine.alive = False
            await exported()
            engine.alive = True
            await exported(4, 0, 0.5)
            async with pool.lease("s", 0):
                pool.set_engines([])
                await exported()
        group.cancel_scope.cancel()


def test_sessions_count_from_their_first_request_on(metrics: ActorMetrics) -> None:
    pool = EnginePool([StubEngine("stub://a")], wait_seconds_max=5, metrics=metrics)
    pool.router.probed("stub://a", 0.0, healthy=True, version=0)
    pool.router.acquire("s", 0, 0.0)
    [family] = metrics.sticky_sessions.collect()
    assert [sample.value for sample in family.samples] == [1]
