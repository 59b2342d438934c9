"""The server process: load, listen, serve until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from actors.embedded.options import EngineOptions
from pipeline.errors import ConfigurationError
from pipeline.runtime.children import end_with_supervisor
from pipeline.runtime.embedded_models import check_embedded
from pipeline.runtime.logs import configure_logging
from pipeline.runtime.run_directory import await_model

log = logging.getLogger(__name__)
DRAIN_SECONDS = 1.0
"""Time between SIGTERM and closed connections."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine to its end and exit. Exit code 0 after SIGTERM or SIGINT, 1 when sampling died or the address is
    taken, 2 without a model that it can serve."""
    end_with_supervisor()
    options = EngineOptions.parse(sys.argv[1:] if arguments is None else arguments)
    configure_logging("engine")
    _quiet_libraries(options.threads)
    import uvloop

    import actors.embedded.routes  # noqa: F401  (seconds of imports, in which the model may still be prepared)

    try:
        await_model(options.model)
        check_embedded(options.model)
        code = uvloop.run(serve(options))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; taking down the interpreter with torch in it would take another 1.5 s


async def serve(options: EngineOptions) -> int:
    """Serve until a signal, or until the sampling thread dies. Returns the exit code. Raises
    :class:`ConfigurationError`."""
    from aiohttp import web

    from actors.embedded.generator import Generator
    from actors.embedded.routes import application
    from actors.servers.authorization import RouteAuthorization
    from actors.servers.connections import BoundedServer

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def end(reason: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(reason)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, None)
    generator = Generator(options, fatal=end)
    generator.start()
    authorization = RouteAuthorization.of_environment()
    server = BoundedServer(
        application(generator, authorization), keepalive_timeout=3600, shutdown_timeout=DRAIN_SECONDS
    )
    async with server.running() as runner:
        try:
            await generator.try_out()
            await web.TCPSite(runner, options.host, options.port, backlog=4096).start()
            log.info("engine ready on http://%s:%d, pid %d", options.host, options.port, os.getpid())
            with generator.progress.watch():
                reason = await ended
            if reason is not None:
                log.error("sampling failed: %s: %s", type(reason).__name__, reason)
            return 0 if reason is None else 1
        except OSError as error:
            log.error("cannot listen on %s:%d: %s; set engine.port to a free port", options.host, options.port, error)
            return 1
        finally:
            await generator.stop()


def _quiet_libraries(threads: int) -> None:
    """Progress bars off, threads as configured. Spinning worker threads would take the cores from everyone else."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    if threads:
        torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


if __name__ == "__main__":
    sys.exit(main())
