"""Command line and environment of one inference server of a run (``afterplay engine FILE``)."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from actors.servers.lock import DIGESTS, MIDDLEWARE, locked_environment
from actors.servers.progress import limits_environment
from actors.servers.vllm import SERVED_NAME, vllm_available, vllm_command
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.runtime.children import module_command
from pipeline.runtime.rundir import AWAIT_MODEL, PREPARE_SECONDS_MAX, RunDirectory

EMBEDDED_BLOCK_SIZE = 16


def main(config: RunConfig, index: int, *, await_model: bool = False) -> int:
    """Replace this process by engine ``index``. Returns 2 on an error, after one line on stderr with the remedy."""
    try:
        argv, environment = command(config, index, await_model=await_model)
    except AfterplayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if engine_kind(config)[0] == "vllm":
        argv = in_process_group(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    if await_model:
        environment = {**environment, AWAIT_MODEL: str(PREPARE_SECONDS_MAX)}
    os.execve(argv[0], argv, environment)


def command(config: RunConfig, index: int, *, await_model: bool = False) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of engine ``index``, for a process that the caller starts and watches.

    ``await_model``: the model folder may still be missing; the engine imports its libraries and then waits for it.

    Raises :class:`ConfigurationError`: no such replica, engine is external, port in use, model not prepared, no keys
    for an address beyond loopback, a combination that the engine cannot do.
    """
    engine = config.engine
    if engine.kind == "external":
        raise ConfigurationError("engine.kind is external: the engines at engine.urls are started outside this run")
    if not 0 <= index < engine.replicas:
        raise ConfigurationError(
            f"expected an engine index of 0 to {engine.replicas - 1} (engine.replicas), got {index}"
        )
    host, port = address(config, index)
    model = RunDirectory(config.run.path).model.absolute()
    if not await_model and not (model / "config.json").exists():
        raise ConfigurationError(
            f"no model in {model}: 'afterplay run FILE' prepares it, or 'python -m learner.models.prepare FILE' "
            "alone does"
        )
    require_free(host, port)
    kind, reason = engine_kind(config)
    if kind == "vllm":
        arguments, environment = vllm_command(config, model, host, port)
        environment = locked_environment(engine, environment)
        return [*arguments, *(["--middleware", MIDDLEWARE] if DIGESTS in environment else [])], environment
    if engine.kind == "vllm":
        print(f"note: {reason}; the embedded engine serves instead (the same routes, slower)", file=sys.stderr)
    environment = {**os.environ, **_embedded_environment(config), **engine.env}
    return _embedded_command(config, model, host, port), locked_environment(engine, environment)


def in_process_group(argv: list[str]) -> list[str]:
    """The same command under :mod:`actors.servers.process_group`, which leaves no process behind."""
    return module_command("actors.servers.process_group", *argv)


def engine_kind(config: RunConfig) -> tuple[str, str]:
    """``vllm`` or ``embedded``, and the reason: where vLLM cannot run, a CPU run uses the embedded engine.

    Raises :class:`ConfigurationError` where the run needs vLLM (GPU, GPU weight transfer).
    """
    engine = config.engine
    if engine.kind == "embedded":
        return "embedded", "engine.kind is embedded"
    usable, reason = vllm_available(engine.device)
    if usable:
        return "vllm", reason
    if engine.device == "cuda" or engine.gpu_transfer:
        raise ConfigurationError(f"engine.kind is vllm on a GPU, but {reason}")
    return "embedded", f"vLLM cannot be used: {reason}"


def address(config: RunConfig, index: int) -> tuple[str, int]:
    """Host and port of engine ``index``. Raises :class:`ConfigurationError` for port 0 outside ``afterplay run``."""
    engine = config.engine
    port = engine.port + index if engine.port else 0
    if engine.urls and not port and index < len(engine.urls):
        port = urlsplit(engine.urls[index]).port or 0
    if not port:
        raise ConfigurationError(
            "engine.port is 0, which only 'afterplay run' can fill in: give --set engine.port=8100"
        )
    return engine.host, port


def require_free(host: str, port: int) -> None:
    """Raise :class:`ConfigurationError` when ``host:port`` cannot be bound."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use: stop what listens there, or choose another with --set engine.port=N "
                "(0 under 'afterplay run' takes free ports)"
            ) from error
        raise ConfigurationError(f"engine.host {host!r}, port {port}: cannot listen there: {error}") from error


def _embedded_command(config: RunConfig, model: Path, host: str, port: int) -> list[str]:
    engine, sampling = config.engine, config.sampling
    if engine.gpu_transfer:
        raise ConfigurationError(
            "the embedded engine takes weights as files: set engine.weight_transfer: files or delta"
        )
    if sampling.stop:
        raise ConfigurationError(
            "sampling.stop: the embedded engine does not support stop strings; the end-of-turn token ends a reply"
        )
    flags = {
        "model": model,
        "host": host,
        "port": port,
        "served-name": SERVED_NAME,
        "dtype": engine.dtype,
        "device": engine.device,
        "threads": engine.threads or 0,
        "max-length": config.model.max_length,
        "max-sequences": engine.max_sequences,
        "kv-cache-gib": engine.kv_cache_gib,
        "block-size": engine.block_size or EMBEDDED_BLOCK_SIZE,
        "top-p": sampling.top_p,
        "top-k": sampling.top_k,
    }
    options = [f"--{name}={value}" for name, value in flags.items()]
    return module_command("actors.embedded.server", *options, *engine.args)


def _embedded_environment(config: RunConfig) -> dict[str, str]:
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= limits_environment(config.supervisor)
    if config.engine.threads:
        environment["OMP_NUM_THREADS"] = str(config.engine.threads)
    return environment
