"""A run as an object: its steps, rollouts, curves and policy, while it is alive and afterwards.

A page of rollouts and the curves above it, as notebooks show them.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, fields
from html import escape
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import anyio
from pydantic import TypeAdapter, ValidationError

from pipeline.cli.options import NUMBER_MAX
from pipeline.cli.status import is_alive
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.errors import AfterplayError, ConfigurationError, RunFailed
from pipeline.runtime.children import ChildGroup, OrphanReaper, describe_exit, module_command
from pipeline.runtime.engine_addresses import engine_addresses
from pipeline.runtime.engine_keys import find_key
from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.scorer.conversation import conversation, reply
from pipeline.store.evaluation_results import read_results
from pipeline.store.queries import Filters, Span
from pipeline.store.store import store_path
from pipeline.supervisor.display import FailureNews
from pipeline.supervisor.processes import check_health
from pipeline.views.page import page_of
from pipeline.views.plots import figure, png_of
from pipeline.views.reader import Found, RunReader
from pipeline.views.step_lines import Line, MetricsTail, last_step, read_lines, step_of
from pipeline.views.transcript import listed_json
from pipeline.views.vocabulary import Vocabulary

HEIGHT_PIXELS = 600


@dataclass(frozen=True, slots=True)
class InlinePage:
    """A picture and an HTML page. The page has a frame of its own, in which its scripts reach nothing else."""

    html: str
    """The page of the rollouts; empty before the first."""
    figure: Any = None
    """Figure of matplotlib above it; None before the first step."""

    def save(self, path: str | Path) -> Path:
        """Write the page of the rollouts."""
        Path(path).write_text(self.html, encoding="utf-8", errors="replace")
        return Path(path)

    def _repr_html_(self) -> str:
        parts = []
        if self.figure is not None:
            picture = base64.b64encode(png_of(self.figure)).decode()
            parts.append(f'<img style="width:100%" alt="curves" src="data:image/png;base64,{picture}">')
        if self.html:
            style = f"width:100%;height:{HEIGHT_PIXELS}px;border:1px solid #ccc"
            parts.append(f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.html)}"></iframe>')
        return "\n".join(parts) or "<p>no rollouts yet</p>"


LOOK_SECONDS = 0.2
"""Between two looks at the files of a run: there is no event to wait for across processes."""
STOP_MARGIN_SECONDS = 5.0
"""Beyond the drain's own limit, before the processes of a run that is stopped are killed."""
ROLLOUTS_MAX = OUTPUT_CHARACTERS_MAX = 1000
Steps = int | range | None
"""One step, a range of steps without gaps, or all."""

MODEL = "policy"
"""Name under which engines serve the policy, unless only adapters are published."""


class Run:
    """A run: its steps, rollouts, curves and policy, while it is alive and afterwards.

    ``for step in run`` and ``async for step in run`` give the lines of ``metrics.jsonl`` from the first step on, each
    when it is written, until the run ends. They raise :class:`RunFailed` when it failed. As a context manager it stops
    a run that it has started.
    """

    def __init__(self, directory: RunDirectory, supervised: Supervised | None = None) -> None:
        self._directory = directory
        self._supervised = supervised
        """The processes that we have started; None: others have."""
        self._failures = FailureNews()

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def alive(self) -> bool:
        """True until the last process of the run has ended."""
        if self._supervised is None:
            return is_alive(self._directory)
        return not self._supervised.child.end.done()

    @property
    def config(self) -> RunConfig | None:
        """The configuration with all defaults, ports and paths; None until the run has written it."""
        file = self._directory.config_file
        if not file.exists() or (self._supervised and self._supervised.older == file.stat().st_mtime_ns):
            return None
        return load(file, environment={})

    def __iter__(self) -> Iterator[Line]:
        for lines in self._looks():
            yield from lines
            self._pause()

    async def __aiter__(self) -> AsyncIterator[Line]:
        for lines in self._looks():
            for line in lines:
                yield line
            await anyio.sleep(LOOK_SECONDS)

    def wait(self) -> Self:
        """Block until the run ends. Raises :class:`RunFailed` when it failed."""
        for _ in self._looks():
            self._pause()
        return self

    def stop(self) -> None:
        """Stop the run as Ctrl-C does: its processes finish what they must, and :func:`afterplay.train` resumes it.
        Blocks until they have ended; harmless when they have. Raises :class:`AfterplayError` for a run of another
        machine."""
        if self._supervised is not None:
            self._supervised.stop()
            return
        holder = read_json(self._directory.lock_file) or {}
        pid, machine = holder.get("pid"), holder.get("machine", socket.gethostname())
        if self.alive and isinstance(pid, int):
            if machine != socket.gethostname():
                raise AfterplayError(
                    f"the run in {self.directory} has its supervisor on {machine}, process {pid}: stop it there, and a "
                    "job with scancel"
                )
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            while self.alive:
                self._pause()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._supervised is not None:
            self.stop()

    def steps(self) -> list[Line]:
        """The steps so far, each once, as rows for ``pandas.DataFrame``."""
        return read_lines(self._directory.metrics_file)

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations so far, as in ``evaluations.jsonl``."""
        return read_results(self._directory.evaluations_file)

    def rollouts(self, *, limit: int = ROLLOUTS_MAX, step: Steps = None, **filters: Any) -> list[dict[str, Any]]:
        """The newest rollouts, a row for ``pandas.DataFrame`` each; none before the run has begun to play.

        Parts of the reward are columns ``reward_NAME``. ``messages``, ``reply`` and ``sampled_ids`` (token ids by turn)
        are None where the tokens are not kept (``traces.trained``). ``step`` and the fields of
        :class:`pipeline.store.queries.Filters` choose among them: ``environment``, ``task``, ``reward_min``, …
        ``kept=True`` takes those whose tokens are kept. ``step``, ``version`` and ``evaluation`` are numbers, or ranges
        of numbers. Raises :class:`ConfigurationError`.
        """
        known = [field.name for field in fields(Filters)]
        if unknown := filters.keys() - {*known}:
            raise ConfigurationError(f"rollouts: expected filters among {', '.join(known)}, got {', '.join(unknown)}")
        if (reader := self._reader()) is None:
            return []
        if isinstance(kept := filters.get("kept"), bool):
            filters["kept"] = reader.traced if kept else None
        spans = {name: _span(name, filters.pop(name, None)) for name in ("version", "evaluation")}
        try:
            chosen = TypeAdapter(Filters).validate_python({"step": _span("step", step), **spans, **filters})
        except ValidationError as error:
            first = error.errors()[0]
            expected = first["msg"].removeprefix("Input should be ")
            raise ConfigurationError(f"{first['loc'][0]}: expected {expected}, got {first['input']!r}") from None
        listing = reader.listing(chosen, limit=whole("limit", limit))
        return [_row(found) for found in reader.find(listing.rows, _span("step", step))]

    def curves(self) -> Any:
        """The curves so far, as in ``curves.png``: a figure of matplotlib. Raises :class:`AfterplayError` before the
        first step."""
        if not self.steps():
            raise AfterplayError(f"{self.directory} has no steps yet, so there are no curves")
        return figure(self._directory.metrics_file, self.directory.name)

    def show(self, *, limit: int = 50, step: Steps = None) -> InlinePage:
        """The curves, and the newest rollouts with their tokens: a notebook shows them inline, ``save(FILE)`` writes
        the page of the rollouts."""
        page = ""
        if (reader := self._reader()) is not None:
            listing = reader.listing(Filters(step=_span("step", step), kept=reader.traced), limit=whole("limit", limit))
            _, page = page_of(reader, listing, _span("step", step), Vocabulary.read(reader.model))
        return InlinePage(page, self.curves() if self.steps() else None)

    def policy(self) -> Any:
        """``openai.OpenAI`` client of an engine of the run, which serves the newest weights as the model ``policy``, or
        as ``adapter`` with ``publish.lora: adapter``.

        Needs the package ``openai``; :meth:`endpoint` has what any other client needs."""
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ImportError(
                "run.policy() needs the package openai: pip install openai, or give run.endpoint() to another client"
            ) from error
        found = self.endpoint()
        return OpenAI(base_url=found["base_url"], api_key=found["api_key"])

    def endpoint(self) -> dict[str, str]:
        """``base_url``, ``api_key`` and ``model`` of an engine of the run. Waits until it is ready. Raises
        :class:`AfterplayError` when the run has ended."""
        while self.alive:
            if (config := self.config) is not None:
                key, model = find_key(config.engine, "actor_key"), config.publish.served_name or MODEL
                for url in self._engines(config, key):
                    if check_health(f"{url}/health").healthy:
                        return {"base_url": f"{url}/v1", "api_key": key or "none", "model": model}
            self._pause()
        self._raise_failure()
        raise AfterplayError(
            f"{self.directory} has ended, and its engines with it: its model folders are in "
            f"{self._directory.checkpoints}"
        )

    def _engines(self, config: RunConfig, key: str | None) -> tuple[str, ...]:
        """Base URLs of the engines now, as actors find them; none where they cannot be looked up yet."""
        with suppress(OSError, ConfigurationError):
            return engine_addresses(config.engine, self._directory, key).now()
        return ()

    def __repr__(self) -> str:
        outcome = read_json(self._directory.outcome_file) or {"exit_code": 0}
        state = "alive" if self.alive else "failed" if outcome["exit_code"] else "not running"
        return f"<Run {self.directory}: {state}, {last_step(self._directory.metrics_file)} steps>"

    def _reader(self) -> RunReader | None:
        """Reader of the rollouts; None before there is a store."""
        config = self.config
        if config is None or not store_path(config, self._directory).exists():
            return None
        return RunReader(config, self._directory)

    def _looks(self) -> Iterator[list[Line]]:
        """The new steps at each look, every step once though a learner that resumes repeats some, until the run ends.
        Warns of environments most of whose rollouts fail, as the console does."""
        tail, newest, ended = MetricsTail(self._directory.metrics_file), 0, False
        while not ended:
            ended = not self.alive
            replay = (read_json(self._directory.processes_file) or {}).get("replay") or {}
            for sentence in self._failures.news(replay.get("failed")) if not ended else ():
                warnings.warn(sentence, stacklevel=3)
            new = []
            for line in tail.read():  # after the look, so that nothing is missed that was written before the end
                if step_of(line) > newest:
                    newest = step_of(line)
                    new.append(line)
            yield new
        self._raise_failure()

    def _pause(self) -> None:
        if self._supervised is None:
            time.sleep(LOOK_SECONDS)
        else:
            futures.wait([self._supervised.child.end], LOOK_SECONDS)

    def _raise_failure(self) -> None:
        """Raise :class:`RunFailed` with the supervisor's reason where the run has failed."""
        outcome = read_json(self._directory.outcome_file) or {"exit_code": 0, "reason": ""}
        code = outcome["exit_code"]
        if self._supervised is not None:
            code = self._supervised.child.end.result()
        if code:
            output = self._supervised.output() if self._supervised else ""
            raise RunFailed(f"{self.directory}: {outcome['reason'] or reason_in(output, code)}")


class Supervised:
    """``afterplay run FILE`` as a child process, which ends when this process does. It prints into ``logs/run.log``."""

    def __init__(
        self, directory: RunDirectory, file: Path, drain_seconds_max: float, variables: Mapping[str, str]
    ) -> None:
        self._grace = drain_seconds_max + STOP_MARGIN_SECONDS
        self._log = directory.log_file("run")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        config = directory.config_file
        self.older = config.stat().st_mtime_ns if config.exists() else None
        """Time of a configuration that an earlier start has written."""
        self._reaper = OrphanReaper(self._grace)
        with self._log.open("ab") as output:
            self._begin = output.tell()
            command = module_command("pipeline.cli.app", "run", str(file))
            self.child = ChildGroup(command, self._reaper, environment=variables, output=output)
        self.child.end.add_done_callback(lambda _: self._reaper.close())

    def output(self) -> str:
        """Everything that it has printed."""
        with self._log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode("utf-8", "replace")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that does not end it in time."""
        if not self.child.end.done():
            self.child.stop(self._grace)


def reason_in(output: str, code: int) -> str:
    """The message of a command that has failed, from what it printed; without one, how it ended."""
    _, found, message = output.rpartition("afterplay: ")
    end = output[-OUTPUT_CHARACTERS_MAX:].strip()
    return message.strip() if found else f"it ended ({describe_exit(code)}); its output ends:\n{end}"


def _span(name: str, value: Any) -> Span | None:
    """Raises :class:`ConfigurationError`."""
    if value is None or isinstance(value, Span):
        return value
    is_one = isinstance(value, Integral) and not isinstance(value, bool)
    found = range(int(value), int(value) + 1) if is_one else value
    if isinstance(found, range) and found and found.step == 1 and max(-found[0], found[-1]) <= NUMBER_MAX:
        return Span(found[0], found[-1])
    raise ConfigurationError(f"{name}: expected a number, or a range of numbers such as range(1, 4), got {value!r}")


def whole(name: str, value: Any) -> int:
    """``value`` of the argument ``name``. Raises :class:`ConfigurationError`."""
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 < int(value) <= NUMBER_MAX:
        return int(value)
    raise ConfigurationError(f"{name}: expected a whole number of 1 to {NUMBER_MAX:,}, got {value!r}")


def _row(found: Found) -> dict[str, Any]:
    """The facts of one rollout as a flat row for data frames, and its text and sampled tokens where they are kept."""
    row = listed_json(found.listed)
    row["version_min"], row["version_max"] = row.pop("versions") or (None, None)
    row["failure"] = (row["failure"] or {}).get("message")
    row |= {f"reward_{part}": value for part, value in row.pop("rewards").items()}
    row |= {"messages": None, "reply": None, "sampled_ids": None}
    trajectory = None if found.transcript is None else found.transcript.trajectory
    if trajectory is not None and trajectory.turns:
        row["messages"] = [{"role": m.role, "content": m.content} for m in conversation(trajectory)]
        row["reply"] = reply(trajectory)
        row["sampled_ids"] = [turn.completion.token_ids.tolist() for turn in trajectory.turns]
    return row
