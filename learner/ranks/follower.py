"""A process that is a rank other than 0. It serves no metrics and speaks with nobody but the other ranks.

Started by rank 0 (``python -m learner.ranks.follower RANK SIZE PORT`` with the run file as one line of JSON on stdin),
or by torchrun through ``afterplay learner FILE``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from datetime import timedelta
from types import FrameType

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from learner.ranks.group import RankGroup
from learner.ranks.joining import Place, join
from learner.ranks.orders import Saver, follow
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.role import ExitCode, configure_logging
from pipeline.rundir import RunDirectory

log = logging.getLogger(__name__)


def run(config: RunConfig, place: Place, store: Store | None = None) -> int:
    """Follow until rank 0 ends the work; the exit code. The work is done in a thread, so that signals are heard: the
    first one interrupts the update, on all ranks; a process that is still there after
    ``supervisor.drain_seconds_max`` ends by force."""
    configure_logging(f"learner-{place.rank}")
    interrupt, codes = threading.Event(), [int(ExitCode.FAILED)]
    _obey_signals(interrupt, config.supervisor.drain_seconds_max)

    def work() -> None:
        try:
            _follow(config, place, store, interrupt)
            codes[0] = ExitCode.FINISHED
        except ConfigurationError as error:
            log.error("%s", error)
            codes[0] = ExitCode.CONFIGURATION
        except AfterplayError as error:
            log.error("%s", error)
        except BaseException:
            log.exception("rank %d ended by an error", place.rank)

    thread = threading.Thread(target=work, name="follower")
    thread.start()
    thread.join()
    return codes[0]


def _follow(config: RunConfig, place: Place, store: Store | None, interrupt: threading.Event) -> None:
    from learner.role import load_trainer

    device = join(place, config.learner, store)
    group = RankGroup(device, interrupt, config.learner.ranks_timeout_seconds)
    trainer, _ = load_trainer(config, RunDirectory(config.run.path), group)
    log.info("rank %d of %d on %s follows", place.rank, place.size, device)
    with Saver(trainer) as saver:
        follow(trainer, group, saver.image)


def _obey_signals(interrupt: threading.Event, seconds_max: float) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        if not interrupt.is_set():
            interrupt.set()
            timer = threading.Timer(seconds_max, os._exit, (int(ExitCode.FORCED),))
            timer.daemon = True
            timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _end_with_parent() -> None:
    """Rank 0 holds the other end of stdin: it closes when rank 0 ends, by whatever way."""
    sys.stdin.buffer.read()
    os._exit(ExitCode.FAILED)


def main() -> None:
    rank, size, port = (int(word) for word in sys.argv[1:4])
    config = RunConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    timeout = timedelta(seconds=config.learner.ranks_timeout_seconds)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    code = run(config, Place(rank, size, rank), store)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
