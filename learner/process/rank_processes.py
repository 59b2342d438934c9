"""A learner of several ranks: rank 0 and the processes of the others, which do the same work.

With ``learner.ranks`` the others are child processes of rank 0 on its machine (``python -m
learner.process.rank_processes RANK SIZE PORT``, with the run file as a line of JSON on stdin, which stays open while
rank 0 lives), so that the supervisor watches, stops and restarts one learner process. Under torchrun they already
exist, as ``afterplay learner FILE``. They serve no metrics and are connected to the other ranks only.

Rank 0 *consumes* ends of children and errors of connections; *produces* heartbeats, and :class:`TrainingError` for the
role when a rank is lost. A lost rank ends the learner within ``LOSS_SECONDS``: the supervisor starts it again, and all
ranks resume from the newest checkpoint.

Another rank *consumes* commands of rank 0; *produces* its part of every collective; *waits for* the next command, which
comes at least every ``HEARTBEAT_SECONDS``; *unblocked by* it, by rank 0's end, or by the timeout of the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import FrameType

import anyio
import anyio.to_thread
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from learner.checkpoints.checkpoint import CheckpointState, take_image
from learner.data.rows import Batch
from learner.distributed.collectives import ProcessRank, RankGroup, join, leave, process_rank
from learner.distributed.ranks import HEARTBEAT_SECONDS, Interrupt
from learner.process.build import load_trainer
from learner.process.device_turn import Offload
from learner.training.trainer import Trainer
from learner.weights.vllm_transfer import follow
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError, Interrupted, TrainingError
from pipeline.runtime.children import ChildGroup, OrphanReaper, append_working_folder, describe_exit, module_command
from pipeline.runtime.logs import configure_logging
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory

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
        try:
            if process.world_size == 1:
                process = ProcessRank(0, config.learner.ranks)
                timeout = timedelta(seconds=config.learner.ranks_timeout_seconds)
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
                self._start_children(config, store.port)
            device = join(process, config.learner, store)
            options = config.learner
            self.group = RankGroup(
                device, Interrupt(), options.ranks_timeout_seconds, options.replicas, options.context_ranks
            )
        except BaseException:
            self._close(wait_seconds=0)
            raise
        log.info("rank 0 of %d, of %d replicas, on %s", process.world_size, config.learner.replicas, device)

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
            command = module_command("learner.process.rank_processes", str(rank), str(size), str(port))
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
            child.end.add_done_callback(lambda _: self._note("" if self._ending else self._gone()))

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
        """In any thread; an empty one is none."""
        with self._lock:
            if self._loss or not loss:
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


def execute_commands(trainer: Trainer, group: RankGroup, image: Callable[[int], None]) -> None:
    """Execute the commands of rank 0 until it ends the work. ``image`` takes part in a checkpoint after
    its number of updates.

    Raises :class:`TrainingError` when rank 0 is gone.
    """
    policy, offload = trainer.policy, Offload(trainer)
    while True:
        try:
            facts, rows, scores = group.receive()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise TrainingError(
                f"rank {group.rank} lost rank 0, which ended or was silent for too long ({reason}): all ranks end "
                "together; start the learner again, it resumes from its newest checkpoint"
            ) from error
        try:
            match facts["command"]:
                case "end":
                    return
                case "heartbeat":
                    pass
                case "step":
                    trainer.step(Batch(facts["update"], (), rows), facts["policy_version"], scores)
                case "forget":
                    trainer.forget_moments()
                case "gather":
                    trainer.token_scores(rows)
                case "score":
                    trainer.score(rows)
                case "snapshot":
                    policy.snapshot(facts["dtype"])
                case "adapters":
                    policy.adapter_snapshot(torch.float32)
                case "transfer":
                    follow(group, policy.device, facts["tensors"])
                case "offload":
                    offload.here(to_host=facts["to_host"], moves=facts["moves"])
                case "image":
                    image(int(facts["updates"]))
                case other:
                    raise TrainingError(f"rank {group.rank} got {other!r} from rank 0, which is no command")
        except Interrupted:
            log.info("rank %d cancelled %s: the learner is stopping", group.rank, facts["command"])


@contextlib.contextmanager
def shard_writer(trainer: Trainer) -> Iterator[Callable[[int], None]]:
    """Writes this rank's part of each checkpoint in a thread, so that the next command need not wait: gives the
    function that copies it after a number of updates, and begins to write. The end waits for the last write, and raises
    what went wrong in it."""
    threads, last = ThreadPoolExecutor(1, "checkpoint"), list[futures.Future[None]]()

    def wait() -> None:
        if last:
            last.pop().result()

    def image(updates: int) -> None:
        wait()
        shards = take_image(trainer, CheckpointState(updates, 0, {})).shards
        assert shards is not None, "a learner of one process has no commands"
        last.append(threads.submit(shards.follow))

    try:
        yield image
        wait()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def run(config: RunConfig, process: ProcessRank, store: Store | None = None) -> int:
    """Work until rank 0 ends it; the exit code. The work is done in a thread, so that signals are handled: the first
    one interrupts the update, on all ranks; a process that is still there after
    ``checkpoint.drain_seconds_max`` ends by force."""
    configure_logging(f"learner-{process.rank}", config.run.name)
    interrupt, code = Interrupt(), ExitCode.FAILED

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not interrupt.asked:
            interrupt.set()
            timer = threading.Timer(config.checkpoint.drain_seconds_max, os._exit, (int(ExitCode.FORCED),))
            timer.daemon = True
            timer.start()

    def work() -> None:
        nonlocal code
        try:
            device = join(process, config.learner, store)
            options = config.learner
            group = RankGroup(device, interrupt, options.ranks_timeout_seconds, options.replicas, options.context_ranks)
            trainer, _ = load_trainer(config, RunDirectory(config.run.path), None, group)
            log.info("rank %d of %d on %s", process.rank, process.world_size, device)
            with shard_writer(trainer) as image:
                execute_commands(trainer, group, image)
            code = ExitCode.FINISHED
        except ConfigurationError as error:
            log.error("%s", error)
            code = ExitCode.CONFIGURATION
        except AfterplayError as error:
            log.error("%s", error)
        except BaseException:
            log.exception("rank %d ended by an error", process.rank)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    thread = threading.Thread(target=work, name="commands")
    thread.start()
    thread.join()
    return int(code)


def _end_with_parent() -> None:
    """End this process when stdin closes: rank 0, which holds the other end, is gone."""
    sys.stdin.buffer.read()
    os._exit(ExitCode.FAILED)


def main() -> None:
    rank, size, port = (int(word) for word in sys.argv[1:4])
    append_working_folder()
    config = RunConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    timeout = timedelta(seconds=config.learner.ranks_timeout_seconds)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    code = run(config, ProcessRank(rank, size, rank), store)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
