"""Preflight of external engines: each of ``engine.urls`` is asked whether it is healthy and what it serves."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import anyio

from actors.engine.base import ServedModel
from actors.engine.client import EngineClient
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, EngineError
from pipeline.runtime.engine_keys import find_key
from pipeline.runtime.findings import Findings
from pipeline.runtime.rundir import RunDirectory

SECONDS_MAX = 3.0
"""For all answers of one engine; all are asked at once."""


def check_engines(config: RunConfig, found: Findings) -> None:
    """Add what is wrong with the engines at ``engine.urls``. Passwords in a URL and keys are never part of it."""
    with found.collecting():
        anyio.run(_ask_all, config, find_key(config.engine, "actor_key"), found)


async def _ask_all(config: RunConfig, key: str | None, found: Findings) -> None:
    async with anyio.create_task_group() as asking:
        for url in config.engine.addresses():
            asking.start_soon(_ask_engine, url, config, key, found)


async def _ask_engine(url: str, config: RunConfig, key: str | None, found: Findings) -> None:
    shown = without_password(url)
    remedy = ": start it and wait until it is healthy, or correct engine.urls"
    async with EngineClient(url, key=key) as client:
        with found.collecting():
            try:
                with anyio.fail_after(SECONDS_MAX):
                    await client.health()
                    remedy = ""
                    served = await client.served()
            except TimeoutError:
                raise ConfigurationError(
                    f"engine.urls: expected an answer from the engine {shown} within {SECONDS_MAX:g} s, got none: it "
                    "is too busy, or hangs, or the address is wrong"
                ) from None
            except (EngineError, ValueError) as error:
                raise ConfigurationError(f"engine.urls: {str(error).replace(url, shown).strip()}{remedy}") from None
            _compare_served(served, shown, config, found)


def _compare_served(served: ServedModel | None, url: str, config: RunConfig, found: Findings) -> None:
    model = config.model
    if served is None:
        found.notes.append(f"engine.urls: {url} does not say which model it serves")
        return
    if served.max_length is not None and served.max_length < model.max_length:
        found.problems.append(
            f"engine.urls: expected an engine for model.max_length ({model.max_length} tokens), got {url} with "
            f"{served.max_length}: start it with --max-model-len {model.max_length}, or set model.max_length: "
            f"{served.max_length}"
        )
    if not _is_of_run(served, config):
        found.notes.append(
            f"engine.urls: {url} serves {served.root}, and model.source is {model.source}: expected the same model"
        )


def _is_of_run(served: ServedModel, config: RunConfig) -> bool:
    """True if the engine was started with ``model.source``, a folder of that name, or the model folder of the run."""
    source, root = config.model.source, Path(served.root)
    return (
        source in (served.name, served.root)
        or root.name == Path(source).name
        or root.resolve() == RunDirectory(config.run.path).model.resolve()
    )


def without_password(url: str) -> str:
    """The URL without user and password.

    >>> without_password("http://me:secret@10.0.0.1:8000/v1")
    'http://10.0.0.1:8000/v1'
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
