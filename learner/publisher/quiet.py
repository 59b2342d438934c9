"""Engines asleep before the learner has a publisher: at its start, on a device that they share."""

from __future__ import annotations

import logging

import aiohttp
import anyio

from learner.publisher.control import EngineControl
from pipeline.errors import EngineError
from pipeline.role import RoleContext

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0


async def quiet_engines(ctx: RoleContext) -> None:
    """Put the engines to sleep before the learner loads its models: vLLM measures the device when it starts, and must
    find it empty. Waits until the engines are up; also takes up what a learner that died has left behind. Returns when
    they sleep or the process is asked to stop."""
    config = ctx.config
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for url in config.engine.addresses():
            control = EngineControl(url, session, config.publish.timeout_seconds)
            while not ctx.stopping.is_set():
                ctx.beat()
                try:
                    await control.sleep(config.engine.sleep_level)
                    log.info("engine %s sleeps while the models are loaded", url)
                    break
                except EngineError as error:
                    ctx.report("waiting", f"the engine to be up and to sleep ({error})")
                with anyio.move_on_after(RETRY_SECONDS):
                    await ctx.stopping.wait()
