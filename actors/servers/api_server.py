"""Starts vLLM's OpenAI server: ``python -m actors.servers.api_server ARGUMENTS OF VLLM``.

Everything is imported first, while the model folder may still be in preparation.

On a CPU vLLM would start three processes, one after the other: server, engine core and worker. Each imports PyTorch
and vLLM, about 10 s of CPU every time. Here the worker is part of the engine core (``--distributed-executor-backend
uni``), and the engine core is a fork of the server, as it is on GPUs. So everything is imported once.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import await_model

SERVER = "vllm.entrypoints.launchers.api_server.entry"
WORKERS = "vllm.entrypoints.cli.serve"
"""In place of the server on a node other than the first of an engine."""
ENGINE = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
)
"""Modules that vLLM imports late and in each process."""


def main(arguments: Sequence[str]) -> None:
    """Serve until a signal. ``arguments`` are those of ``vllm serve``, with ``--model FOLDER``."""
    folder = Path(arguments[arguments.index("--model") + 1])
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for name in ENGINE:
            importlib.import_module(name)
        fork_engine_core()
    headless = "--headless" in arguments
    server = importlib.import_module(WORKERS if headless else SERVER)
    await_model(folder)
    if current_platform.is_cpu():
        register_model_classes(folder)
    if headless:
        run_workers(server, arguments)
    else:
        server.main()


def run_workers(serve: Any, arguments: Sequence[str]) -> None:
    """Run the workers of an engine on this node until one ends. ``serve``: the module of ``vllm serve``."""
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    serve.ServeSubcommand.cmd(serve.make_arg_parser(serve.FlexibleArgumentParser()).parse_args(arguments))


def register_model_classes(folder: Path) -> None:
    """Import the model's class here. vLLM would ask another process about it, which imports everything again, and
    remember the answer in the user's cache."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in json.loads((folder / "config.json").read_text()).get("architectures") or ():
        lazy: Any = ModelRegistry.models.get(name)
        if lazy is None:
            continue
        try:
            model_class = lazy.load_model_cls()
        except Exception:  # vLLM tries again and reports it with what it knows
            continue
        del ModelRegistry.models[name]
        ModelRegistry.register_model(name, model_class)


def fork_engine_core() -> None:
    """Make the engine core a fork of this process. On CPUs vLLM spawns it, to bind OpenMP's threads to cores; here they
    are not bound, and this process starts none of them before the fork."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    # A signal of the child would otherwise be written to the event loop of this process.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigurationError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
