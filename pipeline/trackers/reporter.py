"""The reporter: follows a run directory and sends what appears there to one tracker.

``afterplay run`` starts one process for each tracker of ``report_to``; ``afterplay report`` is the same for any run.
Training never waits for it. It may be killed at any point and loses and doubles nothing: see
:mod:`pipeline.trackers.delivery`.
"""

from __future__ import annotations

import logging
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError, TrackerError
from pipeline.runtime.run_directory import FileLock, RunDirectory
from pipeline.trackers.delivery import Delivery, DeliveryFile, TrackerRecord
from pipeline.trackers.records import RunRecords
from pipeline.trackers.tracker import ADAPTERS, TrackedRun, Tracker, open_tracker
from pipeline.views.step_lines import MetricsTail, last_step

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""Between two looks at the run directory."""

Open = Callable[[str, TrackedRun], Tracker]


class Reporter:
    """Sends one run to one tracker. Close it, or use it as a context manager.

    Raises :class:`ConfigurationError` for an unknown tracker or a missing package, and
    :class:`pipeline.errors.StoreError` if another process reports this run to it.
    """

    def __init__(self, name: str, config: RunConfig, directory: RunDirectory, open_: Open = open_tracker) -> None:
        if name not in ADAPTERS:
            raise ConfigurationError(f"--to: expected one of {', '.join(ADAPTERS)}, got {name!r}")
        self._name = name
        path = delivery_path(directory, name)
        path.parent.mkdir(exist_ok=True)
        self._lock = FileLock(path.with_suffix(".lock"), f"another process reports {directory.path} to {name}")
        self._file = DeliveryFile(path)
        self._delivery = self._file.delivery
        if self._delivery.run is None:
            self._file.write({"run": uuid.uuid4().hex})
        title, project = config.trackers.name or config.run.name, config.trackers.project
        run = TrackedRun(str(self._delivery.run), title, project, directory.path.absolute(), config)
        self._tracker = open_(name, run)
        self._records = RunRecords(config, directory, self._tracker.reads_store)
        before, place, rewinds = self._delivery.place, self._tracker.place, self._tracker.rewinds
        asks = before is not None and (before != place or (rewinds and self._delivery.last_step > 0))
        empty = asks and self._tracker.is_empty()
        if rewinds and (before is None or empty):
            self._tracker.rewind(0)  # it may have what a journal that is gone had sent
        if empty:
            log.info("%s has nothing of this run, which was sent to %s: all is sent", place, before)
            self._file.write({"rewind": 0})
        if before != place:
            self._file.write({"place": place})
        if doubtful := self._delivery.doubtful:  # of a reporter that was killed
            held = self._tracker.held(doubtful)
            self._file.write({"held": sorted(held)})
            log.info("%d of the last %d records had arrived at %s", len(held), len(doubtful), name)
        log.info("reporting %s to %s", directory.path, self._tracker.place)

    def advance(self) -> int:
        """Send what is new; returns how many records."""
        sent = 0
        for records in self._records.new(self._delivery.knows):
            if (step := self._first_made_again(records)) is not None:
                # The tracker first: whoever is killed between the two finds the same reason for it again.
                self._tracker.rewind(step)
                self._file.write({"rewind": step})
                self._records.restart()
                return sent + self.advance()
            sent += self._send([r for r in records if not self._delivery.knows(r)])
        return sent

    def close(self, complete: bool = True, goes_on: bool = False) -> None:
        """``complete``: also send what is still new, and the curves. ``goes_on``: the run is alive."""
        if complete:
            self.advance()
            self.advance()  # tables of rollouts come a call after their steps
            curves = self._records.curves()
            if curves is not None and not self._delivery.knows(curves):
                self._send([curves])
        self._tracker.close(goes_on or self._records.finished)
        if self._delivery.doubtful:
            self._file.write({"sent": True})
        self._file.close()
        self._lock.release()

    def _first_made_again(self, records: list[TrackerRecord]) -> int | None:
        """The first step that the tracker can and must drop, because its numbers are others now."""
        steps = [r.step for r in records if r.name == "step" and self._delivery.has_other(r)]
        if not steps:
            return None
        if self._tracker.rewinds:
            return min(steps)
        log.warning(
            "steps %d to %d were made again, by a learner that resumed from an older checkpoint: %s keeps the numbers "
            "of the first time", min(steps), max(steps), self._name,
        )  # fmt: skip
        return None

    def _send(self, records: list[TrackerRecord]) -> int:
        if not records:
            return 0
        position = self._delivery.next_position
        self._file.write({"send": [[r.key, r.step, r.fingerprint] for r in records]})
        full = [(record, position + i) for i, record in enumerate(records) if not record.is_empty]
        self._tracker.send(full)
        if self._tracker.flush():
            self._file.write({"sent": True})
        return len(full)


def report(
    name: str, config: RunConfig, directory: RunDirectory, alive: Callable[[], bool] | None = None, follow: bool = True
) -> None:
    """Send everything that the run directory has, and with ``follow`` what is added while the run is ``alive``, until
    SIGTERM or SIGINT. With None this process is a part of the run, which ends with it.

    Raises :class:`ConfigurationError`, :class:`pipeline.errors.StoreError` and :class:`TrackerError`.
    """
    ended = threading.Event()

    def end(number: int, _: object) -> None:
        ended.set()
        signal.signal(number, signal.default_int_handler)  # a second one does not wait for the tracker

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        reporter = Reporter(name, config, directory)
        while follow and (alive is None or alive()) and not ended.is_set():
            reporter.advance()
            ended.wait(INTERVAL_SECONDS)
        reporter.close(goes_on=alive is not None and alive())
    except AfterplayError:
        raise
    except Exception as error:
        log.info("%s failed", name, exc_info=error)
        raise TrackerError(
            f"{name} failed: {type(error).__name__}: {error}. Nothing is lost: afterplay report {directory.path} --to "
            f"{name} sends the rest"
        ) from error


def describe_delivery(directory: RunDirectory, name: str) -> str:
    """A sentence about what was sent to a tracker, and how to send the rest."""
    found, last = delivery_of(directory, name), last_step(directory.metrics_file)
    if found.last_step < last:
        step = found.last_step
        return f"{name} has {step} of {last} steps: afterplay report {directory.path} --to {name} sends the rest"
    return f"{name} has all {last} steps: {found.place}"


def delivery_of(directory: RunDirectory, name: str) -> Delivery:
    """State of the delivery to a tracker; without a run if nothing was sent."""
    return Delivery(MetricsTail(delivery_path(directory, name)).read())


def delivery_path(directory: RunDirectory, name: str) -> Path:
    """Journal of what was sent to a tracker."""
    return directory.path / "trackers" / f"{name}.jsonl"
