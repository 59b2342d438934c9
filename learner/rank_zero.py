"""Rank 0 of several: starts the other ranks, sends them heartbeats, notices when one is lost, and ends them.

With ``learner.ranks`` the other ranks are child processes on this machine, so that the supervisor watches, stops and
restarts one learner process. Under torchrun they already exist.

*consumes* ends of children and errors of connections; *produces* heartbeats, and :class:`TrainingError` for the role
when a rank is lost; *waits for* nothing else. A lost rank ends the learner within ``LOSS_SECONDS``: the supervisor
starts it again, and all ranks resume from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from concurrent import futures
from datetime import timedelta

import anyio
import anyio.to_thread
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from learner.distributed.collectives import ProcessRank, RankGroup, join, leave, process_rank
from learner.distributed.ranks import HEARTBEAT_SECONDS, Interrupt
from pipeline.config import RunConfig
from pipeline.errors import TrainingError
from pipeline.runtime.children import ChildGroup, OrphanReaper, describe_exit, module_command
from pipeline.runtime.process import ExitCode

log = logging.getLogger(__name__)
LOSS_SECONDS = 15.0
"""After a loss, before the process is ended by force: training may be stuck in a collective."""
REAP_SECONDS = 1.0
"""Between the end of a child's connections and the end of the child."""
END_SECONDS = 5.0
"""For the children to end after the command to; then they are killed."""


class RankZero:
    """Rank 0 of several. Made by :meth:`begin`; :meth:`end` must be called."""

    def __init__(self, config: RunConfig, process: ProcessRank) -> None:
        self._children: dict[int, ChildGroup] = {}
        self._reaper = OrphanReaper(grace_seconds=0)
        self._pipes = contextlib.ExitStack()
        self._loss = ""
        self._lost = anyio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False
        self._lock = threading.Lock()
        self._force_later: threading.Timer | None = None
        store = None
        if process.world_size == 1:
            process = ProcessRank(0, config.learner.ranks)
            timeout = timedelta(seconds=config.learner.ranks_timeout_seconds)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
            self._start_children(config, store.port)
        try:
            device = join(process, config.learner, store)
            self.group = RankGroup(device, Interrupt(), config.learner.ranks_timeout_seconds)
        except BaseException:
            self._close(wait_seconds=0)
            raise
        log.info("rank 0 of %d on %s", process.world_size, device)

    @classmethod
    def begin(cls, config: RunConfig) -> RankZero | None:
        """None for a learner of one process. Blocks until all ranks are there."""
        process = process_rank(config.learner)
        return cls(config, process) if max(process.world_size, config.learner.ranks) > 1 else None

    async def watch(self) -> None:
        """Send heartbeats until cancelled. Raises :class:`TrainingError` when a rank is lost."""
        self._loop = asyncio.get_running_loop()
        while not self._loss:
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await self._lost.wait()
                break
            try:
                await anyio.to_thread.run_sync(self.group.heartbeat)
            except RuntimeError as error:
                self._note(self._gone(REAP_SECONDS) or f"a rank does not answer: {error}")
        raise TrainingError(_loss_message(self._loss))

    def end(self, *, at_once: bool = False) -> None:
        """End the other ranks, and wait for them a bounded time. ``at_once``: kill them, for there is no time left.
        Blocks."""
        gone = self._gone() or self._loss
        if not gone and not at_once:
            try:
                self.group.end()
            except RuntimeError as error:
                gone = self._gone(REAP_SECONDS) or f"a rank does not answer: {error}"
        if gone:
            log.error("%s", _loss_message(gone))
        self._close(wait_seconds=0 if gone or at_once else END_SECONDS)

    def _start_children(self, config: RunConfig, port: int) -> None:
        """Start the other ranks, which read their run file from stdin and meet rank 0 at ``port``. Stdin closes when
        this process dies, which ends a child also if it was not registered with the reaper yet."""
        run_file, size = config.model_dump_json().encode() + b"\n", config.learner.ranks
        for rank in range(1, size):
            command = module_command("learner.rank_worker", str(rank), str(size), str(port))
            stdin, pipe = os.pipe()
            self._pipes.callback(os.close, pipe)
            try:
                child = self._children[rank] = ChildGroup(command, self._reaper, stdin=stdin)
            finally:
                os.close(stdin)
            unsent = memoryview(run_file)
            with contextlib.suppress(BrokenPipeError):  # it ended already, which is noticed below
                while unsent:
                    unsent = unsent[os.write(pipe, unsent) :]
            child.end.add_done_callback(lambda end, rank=rank: self._child_ended(rank, end))  # type: ignore[misc]

    def _child_ended(self, rank: int, end: futures.Future[int]) -> None:
        if not self._ending:
            self._note(_describe({rank: end}))

    def _gone(self, wait_seconds: float = 0.0) -> str:
        """Description of the children that have ended; waits for the first at most this long. Empty if none has."""
        ends = {rank: child.end for rank, child in self._children.items()}
        futures.wait(ends.values(), wait_seconds, futures.FIRST_COMPLETED)
        return _describe({rank: end for rank, end in ends.items() if end.done()})

    def _close(self, wait_seconds: float) -> None:
        """Wait for the children, then kill them."""
        self._ending = True
        if self._force_later is not None:
            self._force_later.cancel()
        futures.wait([child.end for child in self._children.values()], wait_seconds)
        self._reaper.close()
        self._pipes.close()
        leave()

    def _note(self, loss: str) -> None:
        """In any thread."""
        with self._lock:
            if self._loss:
                return
            self._loss = loss
            self._force_later = threading.Timer(LOSS_SECONDS, self._force)
            self._force_later.daemon = True
            self._force_later.start()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._lost.set)

    def _force(self) -> None:
        os.write(2, f"learner: {_loss_message(self._loss)} (training was stuck for {LOSS_SECONDS:g} s)\n".encode())
        os._exit(ExitCode.FAILED)


def _describe(ended: Mapping[int, futures.Future[int]]) -> str:
    return "; ".join(f"rank {rank} ended ({describe_exit(end.result())})" for rank, end in ended.items())


def _loss_message(loss: str) -> str:
    return (
        f"the learner has lost a rank: {loss}. All ranks end; started again, the learner resumes "
        "from its newest checkpoint"
    )
