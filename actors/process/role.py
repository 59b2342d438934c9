"""The actor process: builds its parts from the run file, serves until stopped, then drains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import anyio
import anyio.to_thread

from actors.engine.base import PausableTimeout
from actors.engine.client import EngineClient
from actors.engine.pool import LOAD_SECONDS, EnginePool
from actors.environments.host import EnvironmentHost
from actors.environments.plugins import make_source
from actors.metrics import ActorMetrics
from actors.process.actor import Actor
from actors.rendering.renderer import renderer_of
from actors.rollout.services import Services
from pipeline.config import RunConfig
from pipeline.config.rollouts import ANSWERS_BYTES_MAX, OUTBOX_BYTES_MAX
from pipeline.errors import CallsHang
from pipeline.lessons.store import close_source
from pipeline.runtime.engine_addresses import engine_addresses
from pipeline.runtime.engine_keys import find_key
from pipeline.runtime.garbage_collection import gc_policy
from pipeline.runtime.http import AnswerMemory
from pipeline.runtime.plugin_limits import interrupting_blocks
from pipeline.runtime.process import RoleContext
from pipeline.runtime.progress import RoleState
from pipeline.runtime.run_directory import vocabulary_size
from pipeline.runtime.witness import open_witness
from pipeline.schema.codec import Limits
from pipeline.transport.zeromq import open_link

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
READINGS_MAX = 4
"""Readings of one engine's load in a second, by all actors together: it writes some 0.2 MB for each."""
ENGINE_WAIT_SECONDS_MAX = 300.0
"""An episode fails when no healthy engine has taken its request for so long."""
DRAIN_SECONDS_MAX = 5.0
"""For running episodes to finish after SIGTERM. The others are aborted, and their orders are issued again."""
FLUSH_SECONDS_MAX = 1.5
"""After the drain: for the acknowledgements of what was finished last."""


async def main(ctx: RoleContext) -> None:
    """Serve orders until ``ctx.stopping``. Raises :class:`ConfigurationError` for errors that the user can
    fix."""
    config = ctx.config
    addresses = engine_addresses(config.engine, ctx.directory, find_key(config.engine, "actor_key"))
    metrics = ActorMetrics(ctx.registry, tuple(config.environments), addresses.fixed)
    ctx.report(RoleState.LOADING, "the tokenizer")
    environments = {
        name: EnvironmentHost(
            name, section, threads_max=config.actor.concurrency, hidden=(ctx.directory.path, config.run.directory)
        )
        for name, section in config.environments.items()
    }
    renderer = await anyio.to_thread.run_sync(renderer_of, config.model, ctx.directory.model)
    patience = PausableTimeout(pauses=True) if config.engine.colocate == "sleep" else None
    connect = connector(config, vocabulary_size(ctx.directory.model), patience)
    pool = EnginePool(
        [connect(url) for url in addresses.fixed],
        connect=connect,
        wait_seconds_max=ENGINE_WAIT_SECONDS_MAX,
        metrics=metrics,
        report_seconds=max(LOAD_SECONDS, config.actor.replicas / READINGS_MAX),
        patience=patience,
        told=True,
    )
    own_lessons = config.lessons.enabled and config.lessons.source != "stage"
    lessons = make_source(config.lessons) if own_lessons else None
    services = Services.of(config, ctx.name, renderer, pool, environments, metrics, lessons)
    try:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(open_link(config, ctx.name))
            actor = Actor(
                services,
                link,
                slots=config.actor.concurrency,
                slots_min=config.actor.concurrency_min,
                outbox_bytes_max=OUTBOX_BYTES_MAX,
                limits=Limits.of(config),
                witness=open_witness(ctx.name),
            )
            stack.enter_context(interrupting_blocks())
            stack.enter_context(gc_policy())
            async with anyio.create_task_group() as group:
                group.start_soon(pool.watch)
                group.start_soon(addresses.follow, pool.set_engines)
                group.start_soon(services.serve)
                group.start_soon(actor.run)
                ending = anyio.Event()
                group.start_soon(_keep_reporting, ctx, actor, ending)
                await ending.wait()
                if not await actor.drain(DRAIN_SECONDS_MAX, FLUSH_SECONDS_MAX):
                    log.warning("stopped with %d trajectories unacknowledged", actor.unacknowledged)
                _report(ctx, actor)
                group.cancel_scope.cancel()
            if not ctx.stopping.is_set():
                raise CallsHang(_hung(environments))
    finally:
        with anyio.CancelScope(shield=True):
            await pool.close()
            await services.close()
            if lessons is not None:
                await close_source(lessons)


def connector(
    config: RunConfig, vocabulary: int | None, patience: PausableTimeout | None = None
) -> Callable[[str], EngineClient]:
    """Makes the client of the engine at a URL. They show the actors' key and share the memory for answers."""
    return partial(
        EngineClient,
        request_seconds_max=config.engine.request_seconds_max,
        vocabulary=vocabulary,
        model=config.publish.served_name,
        patience=patience,
        memory=AnswerMemory(ANSWERS_BYTES_MAX),
        key=find_key(config.engine, "actor_key"),
        run=config.run.id,
    )


async def _keep_reporting(ctx: RoleContext, actor: Actor, ending: anyio.Event) -> None:
    """Status, and progress as long as rollouts keep their time limits: an actor that plays or waits is well. Where
    engines sleep while the learner has the device, the limits stop meanwhile, and are not looked at.

    Sets ``ending`` when the actor shall drain: it is stopped, or too many calls of its environments hang."""
    limited = ctx.config.engine.colocate != "sleep"
    hosts, told = actor.environments, set[str]()
    while True:
        if not (limited and actor.overdue(time.monotonic())):
            ctx.beat()
        for name, host in hosts.items():
            actor.metrics.hung_calls.labels(env=name).set(host.threads.hung)
            if host.threads.hung and name not in told:
                told.add(name)
                ctx.notices.append(_hung({name: host}))
                log.warning("%s", ctx.notices[-1])
        if ctx.stopping.is_set() or any(host.threads.exhausted for host in hosts.values()):
            ending.set()
        _report(ctx, actor)
        with anyio.move_on_after(REPORT_SECONDS):
            await (anyio.sleep_forever if ending.is_set() else ctx.stopping.wait)()


def _hung(environments: Mapping[str, EnvironmentHost]) -> str:
    """``environments.web: 3 calls hang (in recv, /a/web.py:12) …``"""
    worst = max(environments, key=lambda name: environments[name].threads.hung)
    threads = environments[worst].threads
    return (
        f"environments.{worst}: {threads.hung} blocking call{'s hang' if threads.hung > 1 else ' hangs'} in a thread, "
        f"which cannot be ended{f' ({line})' if (line := threads.hung_at()) else ''}; other rollouts go on. Give what "
        f"blocks there a time limit of its own: when {threads.hung_max} hang, the actor starts again"
    )


def _report(ctx: RoleContext, actor: Actor) -> None:
    actor.count_blocked()
    state, reason = actor.doing()
    ctx.report(
        RoleState.STOPPING if ctx.stopping.is_set() else state,
        reason,
        playing=actor.in_flight,
        unacknowledged=actor.unacknowledged,
        **({"hung": hung} if (hung := sum(host.threads.hung for host in actor.environments.values())) else {}),
    )
