"""Supervisor: carries out what :class:`Machine` decides, with real processes, clocks and signals."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from pipeline.runtime.children import OrphanReaper, describe_exit
from pipeline.runtime.disk import left_out
from pipeline.runtime.process import SAME_SIGNAL_SECONDS, ExitCode, drain_signals
from pipeline.runtime.run_directory import PathWatch, RunDirectory, write_json_atomically
from pipeline.supervisor.display import Display
from pipeline.supervisor.processes import Child, HealthAnswer, LocalHost, ProcessHost, ProcessLost, ProcessSpec
from pipeline.supervisor.restarts import Action, Machine, Phase, Process, RestartLimits, Start
from pipeline.views.step_lines import MetricsTail, describe_evaluation

PROBE_EVERY_SECONDS = 1.0
LOG_BYTES_MAX = 64 * 1024 * 1024
"""Size at which a process's log is copied to ``NAME.log.1``, in place of the older one, and emptied."""
LOG_TAIL_LINES = 15
MESSAGE_CHARACTERS_MAX = 500
"""Part of the message of a process that failed, on the console."""


class Supervisor:
    """Runs the processes of ``specs`` until the run ends.

    ``work_done`` is true when an exit 0 of the learner is the end of the run.
    """

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        limits: RestartLimits,
        directory: RunDirectory,
        reaper: OrphanReaper,
        work_done: Callable[[], bool] = lambda: True,
        host: ProcessHost | None = None,
    ) -> None:
        """``host``: where the processes live; None: on this machine."""
        self._specs = {spec.name: spec for spec in specs}
        self.machine = Machine([spec.rule for spec in self._specs.values()], limits)
        self.answers: dict[str, HealthAnswer] = {}
        self._directory = directory
        self._reaper = reaper
        self._work_done = work_done
        self._host = host or LocalHost(directory, reaper)
        self._children: dict[str, Child] = {}
        self._starts: dict[str, anyio.CancelScope] = {}
        """Processes that are being started."""
        self._probing: set[str] = set()
        """Processes whose health is being checked."""
        self._changed = anyio.Event()
        self._group: anyio.abc.TaskGroup | None = None
        self._say: Callable[[str], None] = lambda text: None
        self._unwritten = ""
        """The reason why ``processes.json`` could not be written the last time; empty: it was."""
        self._watched: PathWatch | None = None

    async def run(self, display: Display, tail: MetricsTail) -> ExitCode:
        """Start, watch and drain. Returns when no process is left; when cancelled, all are killed."""
        self._say = display.say
        self._watched = PathWatch(self._directory.path)
        self._reaper.on_restart = lambda code: display.say(
            f"the process that ends what a killed supervisor leaves behind had ended ({describe_exit(code)}); "
            "it runs again"
        )
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                group.start_soon(self._handle_signals)
                group.start_soon(self._watch)
                group.start_soon(self._follow, tail, display)
                self._perform(self.machine.begin(time.monotonic()))
                while not self.machine.over:
                    changed, wait = self._changed, self.machine.next_wake() - time.monotonic()
                    if wait > 0:
                        with anyio.move_on_after(None if math.isinf(wait) else wait):
                            await changed.wait()
                    self._perform(self.machine.tick(time.monotonic()))
                group.cancel_scope.cancel()
        finally:
            for child in self._children.values():
                child.kill()
            self._watched.close()
        for line in tail.read():
            display.progress(line)
        self._write_states()
        return self.machine.code

    def log_tail(self) -> str:
        """The last lines of the log of the process that ended the run by failing; of one that refused the run file the
        message alone."""
        name = self.machine.culprit
        if name is None:
            return ""
        path = self._directory.log_file(name)
        if self.machine.code is ExitCode.CONFIGURATION and (message := last_message(path, name)):
            return message
        count = 1 if self.machine.code is ExitCode.ENVIRONMENT else LOG_TAIL_LINES
        return f"last lines of {path}:\n" + "\n".join(f"  | {line}" for line in last_lines(path, count))

    def _perform(self, actions: list[Action]) -> None:
        assert self._group is not None
        for action in actions:
            if isinstance(action, Start):
                self._starts[action.name] = anyio.CancelScope()
                self._group.start_soon(self._run_process, self._specs[action.name])
            elif action.name in self._starts:
                self._starts[action.name].cancel()
            elif action.name in self._children:
                child = self._children[action.name]
                if action.kill:
                    child.kill()
                else:
                    child.terminate()
        self._changed.set()
        self._changed = anyio.Event()

    async def _run_process(self, spec: ProcessSpec) -> None:
        """Start one process and wait for its end."""
        try:
            code, reason = await self._live(spec), ""
        except ProcessLost as error:
            code, reason = -signal.SIGKILL, str(error)
        except OSError as error:  # no process is free at the moment
            code, reason = ExitCode.FAILED, f"it cannot be started: {error}"
        self._children.pop(spec.name, None)
        self.answers.pop(spec.name, None)
        with suppress(OSError):
            self._directory.process_file(spec.name).unlink()
        await self._end_without_directory(looks=1 if code == ExitCode.CONFIGURATION else 2)
        self._perform(self.machine.exited(spec.name, code, time.monotonic(), finished=code == 0 and self._work_done()))
        self._report_exit(spec.name, code, reason)

    async def _live(self, spec: ProcessSpec) -> int:
        """From the start of a process to its exit code; minus SIGTERM if the run ended before it had a place."""
        state = self.machine.processes[spec.name]
        child = None
        try:
            with self._starts[spec.name]:
                child = await self._host.start(spec, partial(self._wait_for_place, spec.name))
        finally:
            del self._starts[spec.name]
        if child is None:
            return -signal.SIGTERM
        self._children[spec.name] = child
        if spec.here and not (log := self._directory.log_file(spec.name)).is_file():
            self._say(f"what {spec.name} says is lost: {log} cannot be written")
        if state.killed:
            child.kill()
        elif state.phase is Phase.STOPPING:
            child.terminate()
        elif not spec.probed and not spec.rule.once:
            self._perform(self.machine.healthy(spec.name, time.monotonic()))
        self._write_states()
        return await child.wait()

    def _wait_for_place(self, name: str, reason: str) -> None:
        """``name`` waits for a node; without a ``reason`` it has one."""
        before = self.answers.get(name)
        if reason and (before is None or before.reason != reason):
            self._say(f"{name} waits for {reason}")
        self.answers[name] = HealthAnswer(False, "waiting for a node" if reason else "", reason)
        self.machine.placed(name, math.inf if reason else time.monotonic())

    def _report_exit(self, name: str, code: int, reason: str) -> None:
        process, log = self.machine.processes[name], self._directory.log_file(name)
        if process.phase is Phase.BACKOFF:
            wait = max(0.0, process.wake_at - time.monotonic())
            if not reason:
                said = last_message(log, name) if code == ExitCode.FAILED else ""
                reason = _why_ended(process, code)
                reason += f": {' '.join(said.split())[:MESSAGE_CHARACTERS_MAX]}" if said else ""
            self._say(f"{name} ended ({reason}); restart {process.restarts} in {wait:.1f} s")
        elif process.rule.optional and self.machine.draining_since is None:
            reason = reason or " ".join(last_lines(log, 1)) or describe_exit(code)
            self._say(f"the run continues without {name}: {reason}")
        self._write_states()

    async def _watch(self) -> None:
        """Check the health of all processes, concurrently; one that hangs delays no other."""
        async with anyio.create_task_group() as group:
            while True:
                for name, process in list(self._children.items()):
                    stopping = self.machine.processes[name].phase is Phase.STOPPING
                    if self._specs[name].probed and not stopping and name not in self._probing:
                        group.start_soon(self._probe, name, process)
                await self._end_without_directory()
                self._write_states()
                for log in map(self._directory.log_file, self._specs):
                    await anyio.to_thread.run_sync(bound_log, log, LOG_BYTES_MAX)
                await anyio.sleep(PROBE_EVERY_SECONDS)

    async def _end_without_directory(self, looks: int = 2) -> None:
        """End the run where its directory is gone: nothing that it does is kept."""
        if self._watched is not None and (reason := await anyio.to_thread.run_sync(self._watched.gone, looks)):
            self._perform(self.machine.force(time.monotonic(), reason, ExitCode.CONFIGURATION))

    async def _probe(self, name: str, child: Child) -> None:
        self._probing.add(name)
        asked_at = time.monotonic()
        try:
            answer = await self._host.check(self._specs[name], child)
        finally:
            self._probing.remove(name)
        if self._children.get(name) is not child:
            return
        now = time.monotonic()
        self.answers[name] = answer
        if answer.healthy:
            self._perform(self.machine.healthy(name, now, answer.worked))
        else:
            self._perform(self.machine.unhealthy(name, now, silent_since=None if answer.answered else asked_at))

    async def _follow(self, tail: MetricsTail, display: Display) -> None:
        evaluations = MetricsTail(self._directory.evaluations_file)
        evaluations.read()  # those of earlier starts
        while True:
            for line in tail.read():
                display.progress(line)
            for line in evaluations.read():
                display.say(describe_evaluation(line))
            display.refresh()
            await anyio.sleep(0.5)

    async def _handle_signals(self) -> None:
        with anyio.open_signal_receiver(*drain_signals()) as signals:
            stopped_at = -math.inf
            async for number in signals:
                now, name = time.monotonic(), signal.Signals(number).name
                if number != signal.SIGINT and now - stopped_at < SAME_SIGNAL_SECONDS:
                    continue  # timeout(1) tells its command, and then its whole group; so does a terminal that closes
                if stopped_at > -math.inf:
                    self._say("second signal: killing all processes")
                    self._perform(self.machine.force(now, f"{name} twice"))
                else:
                    self._say("stopping (signal again to stop at once)")
                    self._perform(self.machine.stop(now, f"stopped by {name}"))
                    stopped_at = now

    def _write_states(self) -> None:
        """``processes.json``, for ``afterplay status``."""
        states = {}
        for name, process in self.machine.processes.items():
            running, answer = self._children.get(name), self.answers.get(name) or HealthAnswer(False)
            states[name] = {
                "phase": process.phase.value,
                "pid": running.pid if running else None,
                "restarts": process.restarts,
                "exit_code": process.exit_code,
                "state": answer.state,
                "reason": answer.reason,
                "progress_age_seconds": answer.progress_age_seconds,
                "failed": answer.details.get("failed"),
            }
        path = self._directory.processes_file
        reason = left_out(partial(write_json_atomically, path, states, make_folder=False), path)
        if reason and not self._unwritten:
            self._say(f"waiting for disk: {reason}")
        self._unwritten = reason


def bound_log(path: Path, bytes_max: int) -> None:
    """Copy a log that is larger to ``PATH.1`` and empty it. Its process keeps the file open for appending, so it cannot
    be renamed; lines that are written between the two steps are lost."""
    try:
        if path.stat().st_size <= bytes_max:
            return
        older = path.with_name(path.name + ".1")
        if left_out(partial(shutil.copyfile, path, older), path):
            older.unlink(missing_ok=True)
        os.truncate(path, 0)
    except OSError:  # it is not there, or cannot be looked at now
        return


def _why_ended(process: Process, code: int) -> str:
    """The exit in words, and why the supervisor killed the process if it did."""
    if code == ExitCode.STUCK:
        return f"it made no progress; the stacks of its threads are in logs/{process.rule.name}.log"
    if code == ExitCode.CALLS_HANG:
        return f"too many calls of its environments hang in threads; logs/{process.rule.name}.log names them"
    if process.killed_with:
        return f"{describe_exit(code)}, for it cannot continue without {process.killed_with}"
    return describe_exit(code) + (", for it gave no healthy answer" if process.killed else "")


def last_message(path: Path, name: str) -> str:
    """The message with which a process refused the run file, which ends its log; empty if there is none."""
    lines = last_lines(path, LOG_TAIL_LINES)
    begins = [i for i, line in enumerate(lines) if line.startswith((f"{name}: ", "afterplay: "))]
    return "\n".join(lines[begins[-1] :]).partition(": ")[2] if begins else ""


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file, of at most 64 KiB; none when it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
