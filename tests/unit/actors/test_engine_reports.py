"""Reports of one engine, as they reach an actor: its own readings and those of the watcher, in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from actors.engine.base import EngineReport
from actors.engine.engine_state import EngineLoad
from actors.engine.pool import EnginePool
from actors.metrics import ActorMetrics


def test_a_report_behind_a_newer_one_is_no_restart_of_the_engine() -> None:
    pool: Any = object.__new__(EnginePool)
    pool._metrics = ActorMetrics(registry := CollectorRegistry())
    state: Any = SimpleNamespace(name="http://a:1", load=EngineLoad())

    def missed() -> float | None:
        return registry.get_sample_value("afterplay_actor_prefix_tokens_total", {"result": "miss"})

    pool._loaded(state, EngineReport(prefix_queries=1000), 0, 10.0)
    before = missed()
    for at, queries in ((9.2, 990), (11.0, 1010)):
        pool._loaded(state, EngineReport(prefix_queries=queries), 0, at)
    after = missed()
    assert before is not None and after is not None and after - before == 10
    assert state.load.at == 11.0
