"""One actor process that plays for several replay stages.

Each stage has its own link, desk and outbox (:class:`Actor`); engines, renderer and environments are shared, and so is
the process: ``actor.concurrency`` and ``actor.outbox_bytes_max`` are divided among the stages. A stage that is away
keeps its places idle, the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from actors.actor import Actor
from actors.loop import Services
from pipeline.transport.base import Limits, Link


class ShardedActor:
    """The interface of :class:`Actor` over ``links``, one to each stage by index.

    ``index`` of this actor among the actors: which stages get the places that are left over, so that all actors
    together treat the stages alike.
    """

    def __init__(
        self,
        services: Services,
        links: Sequence[Link],
        *,
        places: int,
        outbox_bytes_max: int,
        limits: Limits,
        index: int = 0,
    ) -> None:
        self._metrics = services.metrics
        self._actors = [
            Actor(
                services,
                link,
                places=share,
                outbox_bytes_max=max(1, outbox_bytes_max // len(links)),
                limits=limits,
                on_change=self._gauge,
            )
            for link, share in zip(links, shares(places, len(links), index), strict=True)
        ]

    @property
    def playing(self) -> int:
        """Episodes in progress."""
        return sum(actor.playing for actor in self._actors)

    @property
    def unacknowledged(self) -> int:
        """Finished trajectories that are not known to be durable."""
        return sum(actor.unacknowledged for actor in self._actors)

    def waiting_for(self) -> str:
        """What keeps this actor from working for every stage, in words; empty when it works for all."""
        words = [actor.waiting_for() for actor in self._actors]
        if len(set(words)) == 1:
            return words[0]
        if self.playing:
            # a stage without orders is no trouble while another gives some
            words = ["" if word == "orders" else word for word in words]
        return "; ".join(f"stage {index}: {word}" for index, word in enumerate(words) if word)

    async def run(self) -> None:
        """Serve until cancelled. Raises :class:`TransportClosed` when a stage refuses this actor for good."""
        async with anyio.create_task_group() as group:
            for actor in self._actors:
                group.start_soon(actor.run)

    async def drain(self, seconds_max: float, flush_seconds_max: float = 1.5) -> bool:
        """:meth:`Actor.drain` of all at once; whether every trajectory was acknowledged."""
        async with anyio.create_task_group() as group:
            for actor in self._actors:
                group.start_soon(actor.drain, seconds_max, flush_seconds_max)
        return self.unacknowledged == 0

    def _gauge(self) -> None:
        self._metrics.inflight_episodes.set(self.playing)
        self._metrics.send_queue_trajectories.set(self.unacknowledged)


def shares(places: int, n: int, index: int = 0) -> list[int]:
    """``places`` divided among ``n`` stages: they differ by one at most, and the larger ones go round with ``index``.

    >>> shares(5, 2), shares(5, 2, index=1)
    ([3, 2], [2, 3])
    """
    return [places // n + ((stage - index) % n < places % n) for stage in range(n)]
