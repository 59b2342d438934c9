"""The actor process: builds its parts from the run file, serves until told to stop, then drains."""

from __future__ import annotations

import json
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread

from actors.actor import Actor
from actors.collecting import collecting_rarely
from actors.engine.client import EngineClient
from actors.engine.patience import Patience
from actors.engine.pool import EnginePool
from actors.environments.host import EnvironmentHost
from actors.lessons.reme import ReMe
from actors.loop import Services
from actors.rendering import Renderer, load_tokenizer
from pipeline.blocked import interrupting_blocks
from pipeline.config import RunConfig
from pipeline.metrics.actor import ActorMetrics
from pipeline.role import RoleContext
from pipeline.transport.open import limits_of, open_link

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
FLUSH_SECONDS_MAX = 1.5
"""After the drain: for the acknowledgements of what was finished last."""


async def main(ctx: RoleContext) -> None:
    """Play orders until ``ctx.stopping``. Raises :class:`ConfigurationError` for what the person who started us can
    mend."""
    config = ctx.config
    metrics = ActorMetrics(ctx.registry, environments=tuple(config.environments))
    ctx.report("starting", "the tokenizer")
    environments = {
        name: EnvironmentHost(name, section, threads_max=config.actor.concurrency)
        for name, section in config.environments.items()
    }
    renderer = await anyio.to_thread.run_sync(_renderer, config, ctx.directory.model)
    vocabulary = _vocabulary(ctx.directory.model / "config.json")
    patience = Patience() if config.engine.colocate == "sleep" else None
    pool = EnginePool(
        [
            EngineClient(
                url,
                request_seconds_max=config.engine.request_seconds_max,
                vocabulary=vocabulary,
                model=config.publish.adapter_name if config.publish.lora == "adapter" else None,
                patience=patience,
            )
            for url in config.engine.addresses()
        ],
        sessions_max=config.actor.sessions_max,
        wait_seconds_max=config.actor.engine_wait_seconds_max,
        metrics=metrics,
        patience=patience,
    )
    reme = ReMe(config.lessons) if config.lessons.enabled and config.lessons.source == "reme" else None
    services = Services.of(config, ctx.name, renderer, pool, environments, metrics, reme)
    try:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(open_link(config, ctx.name))
            actor = Actor(
                services,
                link,
                places=config.actor.concurrency,
                outbox_bytes_max=config.actor.outbox_bytes_max,
                limits=limits_of(config),
            )
            stack.enter_context(interrupting_blocks())
            stack.enter_context(collecting_rarely())
            async with anyio.create_task_group() as group:
                group.start_soon(pool.watch)
                group.start_soon(services.serve)
                group.start_soon(actor.run)
                group.start_soon(_report, ctx, actor)
                await ctx.stopping.wait()
                if not await actor.drain(config.actor.drain_seconds_max, FLUSH_SECONDS_MAX):
                    logger.warning("stopped with %d trajectories unacknowledged", actor.unacknowledged)
                group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await pool.close()
            await services.close()
            if reme is not None:
                await reme.close()


async def _report(ctx: RoleContext, actor: Actor) -> None:
    """Heartbeat and status, also while nothing happens."""
    while True:
        ctx.beat()
        ctx.report(
            f"playing {actor.playing} episodes" if not ctx.stopping.is_set() else f"draining {actor.playing} episodes",
            actor.waiting_for(),
            playing=actor.playing,
            unacknowledged=actor.unacknowledged,
        )
        await anyio.sleep(REPORT_SECONDS)


def _renderer(config: RunConfig, folder: Path) -> Renderer:
    tokenizer, ends = load_tokenizer(folder, config.model.chat_template, config.model.trust_remote_code)
    return Renderer(tokenizer, ends)


def _vocabulary(path: Path) -> int | None:
    """The model's vocabulary size, or None where its configuration does not say."""
    try:
        value = json.loads(path.read_text())
        size = value.get("vocab_size") or value.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None
