"""The kinds of sandboxes that this machine can make. ``AFTERPLAY_TEST_IMAGE`` (``docker:IMAGE`` or ``podman:IMAGE``)
names an image with ``python3`` for those in containers."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.sandboxes import bubblewrap, container
from actors.sandboxes.base import Sandbox, SandboxOptions
from actors.sandboxes.registry import Sandboxes
from pipeline.runtime.children import OrphanReaper

SERVICE = "tests.support.sandbox_service:FolderService"
WALLS = ("bubblewrap", "container")
"""Kinds that guard something."""
KINDS = (*WALLS, SERVICE)


@functools.cache
def options_of(kind: str) -> dict[str, Any]:
    """The options of a kind; skips the test where there can be none."""
    if kind == "bubblewrap" and (refusal := bubblewrap.refusal(bubblewrap.find())):
        pytest.skip(f"bubblewrap: {refusal}")
    if kind == "container":
        engine, _, image = os.environ.get("AFTERPLAY_TEST_IMAGE", "").partition(":")
        if not image:
            pytest.skip("set AFTERPLAY_TEST_IMAGE to docker:IMAGE or podman:IMAGE, an image with python3")
        if refusal := container.refusal(SandboxOptions(kind=engine, image=image)):
            pytest.skip(f"container: {refusal}")
        return {"kind": engine, "image": image}
    return {"kind": kind}


def sandboxes_of(kind: str, count: Callable[[str], None] = lambda outcome: None, **options: Any) -> Sandboxes:
    """Sandboxes of one kind."""
    reaper = OrphanReaper(grace_seconds=0)
    return Sandboxes(SandboxOptions(**{**options_of(kind), **options}), "sandbox", reaper, count)


@asynccontextmanager
async def made(
    kind: str, readable: tuple[Path, ...] = (), hidden: tuple[Path, ...] = (), gateway: Any = None, **options: Any
) -> AsyncIterator[Sandbox]:
    """One of a kind."""
    sandboxes = sandboxes_of(kind, **options)
    async with sandboxes.one(readable, hidden, gateway=gateway) as sandbox:
        yield sandbox
    assert sandboxes.live == 0
    sandboxes._reaper.close()


def said(finished: Any) -> str:
    """The output of a command that must have succeeded."""
    assert finished.code == 0 and finished.limit is None, finished
    return str(finished.stdout.decode())
