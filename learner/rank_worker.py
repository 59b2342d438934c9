"""Process of a rank other than 0: executes the commands of rank 0, doing the same work as rank 0.

Started by rank 0 (``python -m learner.rank_worker RANK SIZE PORT``, with the run file as a line of JSON on stdin, which
stays open while rank 0 lives), or by torchrun through ``afterplay learner FILE``. It serves no metrics and is connected
to the other ranks only.

*consumes* commands of rank 0; *produces* its part of every collective; *waits for* the next command, which comes at
least every ``HEARTBEAT_SECONDS``; *unblocked by* it, by rank 0's end, or by the timeout of the group.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from learner.checkpoints.checkpoint import CheckpointState, take_image
from learner.data.rows import Batch, Row, TokenScores
from learner.distributed.collectives import ProcessRank, RankGroup, join
from learner.distributed.messages import unpack_command
from learner.distributed.ranks import Interrupt
from learner.training.trainer import Trainer
from learner.weights.vllm_transfer import follow
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError, Interrupted, TrainingError
from pipeline.runtime.children import append_working_folder
from pipeline.runtime.process import ExitCode, configure_logging
from pipeline.runtime.rundir import RunDirectory

log = logging.getLogger(__name__)

Handler = Callable[[Trainer, Mapping[str, Any], tuple[Row, ...], TokenScores], Any]


def execute_commands(trainer: Trainer, group: RankGroup, image: Callable[[int], None]) -> None:
    """Execute the commands of rank 0 until it ends the work. ``image`` takes part in a checkpoint after
    its number of updates.

    Raises :class:`TrainingError` when rank 0 is gone.
    """
    while True:
        facts, rows, scores = unpack_command(_next(group))
        command = facts["command"]
        if command == "end":
            return
        try:
            if command == "image":
                image(int(facts["updates"]))
            elif command != "heartbeat":
                _HANDLERS[command](trainer, facts, rows, scores)
        except Interrupted:
            log.info("rank %d cancelled %s: the learner is stopping", group.rank, command)


class ShardWriter:
    """Writes this rank's part of each checkpoint in a thread, so that the next command need not wait. Use as a context
    manager: its end waits for the last write, and raises what went wrong in it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None

    def image(self, updates: int) -> None:
        """Copy, and begin to write."""
        self.wait()
        shards = take_image(self._trainer, CheckpointState(updates, 0, {})).shards
        assert shards is not None, "a learner of one process has no commands"
        self._last = self._threads.submit(shards.follow)

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _next(group: RankGroup) -> Any:
    try:
        return group.receive()
    except RuntimeError as error:
        raise TrainingError(
            f"rank {group.rank} lost rank 0, which ended or was silent for too long ({_first_line(error)}): all ranks "
            "end together; start the learner again, it resumes from its newest checkpoint"
        ) from error


def _step(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], scores: TokenScores) -> None:
    trainer.kl.coefficient = facts["kl"]
    trainer.step(Batch(facts["update"], (), rows), facts["policy_version"], scores)


def _gather(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], scores: TokenScores) -> None:
    trainer.token_scores(rows)


def _score(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], scores: TokenScores) -> None:
    trainer.score(rows)


def _snapshot(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], scores: TokenScores) -> None:
    trainer.policy.snapshot(facts["dtype"])


def _adapters(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], scores: TokenScores) -> None:
    trainer.policy.adapter_snapshot(torch.float32)


def _transfer(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], scores: TokenScores) -> None:
    follow(trainer.policy.ranks, trainer.policy.device, facts["tensors"])


_HANDLERS: dict[str, Handler] = {
    "step": _step,
    "gather": _gather,
    "score": _score,
    "snapshot": _snapshot,
    "adapters": _adapters,
    "transfer": _transfer,
}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def run(config: RunConfig, process: ProcessRank, store: Store | None = None) -> int:
    """Work until rank 0 ends it; the exit code. The work is done in a thread, so that signals are handled: the first
    one interrupts the update, on all ranks; a process that is still there after
    ``checkpoint.drain_seconds_max`` ends by force."""
    configure_logging(f"learner-{process.rank}")
    interrupt, codes = Interrupt(), [int(ExitCode.FAILED)]
    _handle_signals(interrupt, config.checkpoint.drain_seconds_max)

    def work() -> None:
        try:
            _work(config, process, store, interrupt)
            codes[0] = ExitCode.FINISHED
        except ConfigurationError as error:
            log.error("%s", error)
            codes[0] = ExitCode.CONFIGURATION
        except AfterplayError as error:
            log.error("%s", error)
        except BaseException:
            log.exception("rank %d ended by an error", process.rank)

    thread = threading.Thread(target=work, name="commands")
    thread.start()
    thread.join()
    return codes[0]


def _work(config: RunConfig, process: ProcessRank, store: Store | None, interrupt: Interrupt) -> None:
    from learner.build import load_trainer

    device = join(process, config.learner, store)
    group = RankGroup(device, interrupt, config.learner.ranks_timeout_seconds)
    trainer, _ = load_trainer(config, RunDirectory(config.run.path), None, group)
    log.info("rank %d of %d on %s", process.rank, process.world_size, device)
    with ShardWriter(trainer) as writer:
        execute_commands(trainer, group, writer.image)


def _handle_signals(interrupt: Interrupt, seconds_max: float) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        if not interrupt.asked:
            interrupt.set()
            timer = threading.Timer(seconds_max, os._exit, (int(ExitCode.FORCED),))
            timer.daemon = True
            timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


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
