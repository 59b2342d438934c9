"""The contract of weight publication, whatever carries the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from learner.publisher.control import EngineControl

UNSTAMPED = "default"
"""What an engine calls the weights it was started with."""


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that every engine should have."""

    version: int
    folder: Path
    """Hugging Face folder with these weights."""
    initial: bool = False
    """They are the weights that the engines were started with: an unstamped engine needs only the stamp."""
    tensors: Mapping[str, Tensor] | None = None
    """The same weights in memory, for loaders that do not read files."""

    @property
    def stamp(self) -> str:
        return str(self.version)


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of one version."""

    version: int
    live: tuple[str, ...]
    """Engines that serve it."""
    lagging: Mapping[str, str] = field(default_factory=dict)
    """Engines that do not yet, and why; they are kept being tried."""
    seconds: float = 0.0
    n_bytes: int = 0


class WeightLoader(Protocol):
    """Puts the weights of a target into one engine that is paused."""

    reads_memory: bool
    """Whether it needs ``Target.tensors``; else they are not kept once they are written."""

    async def load(self, engine: EngineControl, target: Target) -> None:
        """Raises :class:`pipeline.errors.EngineError`. Cancelled when it takes too long."""
        ...


class WeightPublisher(Protocol):
    """Keeps all engines at the newest published version while ``run`` runs."""

    async def run(self) -> None:
        """Watch the engines until cancelled: a restarted or lagging one is brought to the newest version."""
        ...

    async def publish(self, version: int, tensors: Mapping[str, Tensor] | None) -> Publication:
        """Make ``tensors`` the weights of ``version`` in every engine; None: the initial model.

        Returns when each engine has it or has failed once, at most ``publish.timeout_seconds`` after the weights are
        written.
        """
        ...
