"""``afterplay env eval``: tasks times samples of an environment against a chat endpoint, with the agent loops of a run.

The folder holds ``settings.json``, ``rollouts.jsonl`` (a line for each rollout, written when it ends),
``summary.json`` and ``rollouts.html``. The same command continues: a rollout that is in the folder is not repeated,
except where the endpoint failed it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import anyio
import orjson

from actors.engine.base import Sampling
from actors.engine.chat_endpoint import ChatEndpoint
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.env_commands.chat_dialogue import ChatRenderer, ChatServices
from actors.env_commands.describe import end_environment
from actors.env_commands.eval_summary import EvalSummary, Outcome, sentences, summarise, wanted
from actors.env_commands.play import Subject
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.rollout import Rollout
from actors.rollout.services import build_loop
from pipeline.config.rewards import ScorerConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError, leaves
from pipeline.runtime.engine_keys import key_at
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.plugin_limits import interrupting_blocks
from pipeline.runtime.run_directory import FileLock, read_json, write_bytes_atomically
from pipeline.schema import Order, Task, Trajectory
from pipeline.scorer.scorer import Scorer
from pipeline.scorer.verdict import ScoreFailure
from pipeline.store.queries import Listed
from pipeline.views.page import page_of_rows
from pipeline.views.reader import Found, Transcript
from pipeline.views.transcript import dumps, found_json
from pipeline.views.vocabulary import Vocabulary

ROWS, SUMMARY, SETTINGS, PAGE = "rollouts.jsonl", "summary.json", "settings.json", "rollouts.html"
ENDPOINT = "engine"
"""Boundary of the failures of the endpoint."""
TURN_TOKENS = 2048
EPISODE_TOKENS = 2**30
EPISODE_SECONDS = 3600.0
ORDER_SECONDS = 1e9
"""Limits without a run file."""
Row = dict[str, Any]
Progress = Callable[[int, int, int], None]
"""Called with the rollouts that ended, those that are wanted, and those that failed."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """One evaluation, as it is asked for. None: as the run file says, or the default without one."""

    name: str
    url: str
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    run_file: Path | None = None
    key: str | None = None
    """``env:NAME`` or ``file:PATH``."""
    out: Path | None = None
    tasks: int = 32
    samples: int = 8
    first: int = 0
    """Place of the first task in the split."""
    split: str = TRAIN
    temperature: float | None = None
    turn_tokens: int | None = None
    turns: int | None = None
    concurrency: int = 16
    threshold: float | None = None
    pass_at: tuple[int, ...] = ()
    """Empty: 1, the powers of 2, and the number of samples."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of each request."""
    tools_as_text: bool = False
    retries: int = 6
    request_seconds_max: float = 600.0


@dataclass(frozen=True, slots=True)
class EvalResult:
    """An evaluation, complete or as far as it came."""

    folder: Path
    model: str
    summary: EvalSummary
    examples: Mapping[str, str]
    """One message for each reason of a failure."""
    words: Sequence[str]
    notes: Sequence[str]
    stopped: str | None
    """Reason why it ended early."""


def evaluate(request: EvalRequest, progress: Progress) -> EvalResult:
    """Run what is missing and write the results. Raises :class:`ConfigurationError`."""
    more: dict[str, Any] = {} if request.turns is None else {"max_turns": request.turns}
    if request.run_file is None:
        more |= {"max_tokens": EPISODE_TOKENS, "max_seconds": EPISODE_SECONDS}
    subject = Subject.of(request.name, request.options, request.run_file, **more)
    loop = subject.config.loop
    own = {name: value for name, value in loop.options.items() if name != "parser"}  # calls come in one form
    loop = loop.model_copy(update={"options": own})
    subject = replace(subject, config=subject.config.model_copy(update={"loop": loop}))
    key = None if request.key is None else key_at(request.key, "--key")
    host = EnvironmentHost(subject.section, subject.config)
    try:
        tasks = list(tasks_of(subject, host, request.split, request.first, request.tasks))
        return _Evaluation(request, subject, host, tasks, key).run(progress)
    finally:
        end_environment(host)


def tasks_of(subject: Subject, host: EnvironmentHost, split: str, first: int, count: int) -> Iterator[tuple[int, Task]]:
    """(place in the split, task) of the first tasks from ``first`` on. Raises :class:`ConfigurationError`."""
    section, config = subject.section, subject.config
    with ExitStack() as stack:
        if config.tasks_from is not None:
            known: Mapping[str, Any] = stack.enter_context(closing(subject.source())).splits
        else:
            host.splits()  # checks them
            known = getattr(host.environment, "splits", None) or {}
            if not known:
                seeds = range(config.seed, config.seed + (config.tasks or 2**40))
                known = {TRAIN: seeds} | {name: range(2**40, 2**40 + n) for name, n in config.held_out.items()}
        if split not in known:
            raise ConfigurationError(f"--split: expected one of {', '.join(known)}, got {split!r}")
        if first >= len(known[split]):
            raise ConfigurationError(f"--first: the split {split} has {len(known[split])} tasks, got {first}")
        for place in range(first, min(first + count, len(known[split]))):
            found = known[split][place]
            yield place, found if isinstance(found, Task) else Task(f"{section}/{int(found)}", section, int(found))


class _Evaluation:
    """One evaluation in one folder."""

    def __init__(
        self,
        request: EvalRequest,
        subject: Subject,
        host: EnvironmentHost,
        tasks: Sequence[tuple[int, Task]],
        key: str | None,
    ) -> None:
        run = subject.run
        self._request, self._subject, self._host, self._tasks = request, subject, host, tasks
        self._sampling = Sampling(
            max_tokens=request.turn_tokens or (run.sampling.max_tokens if run else TURN_TOKENS),
            temperature=_first_of(request.temperature, run.sampling.temperature if run else 1.0),
            stop=run.sampling.stop if run else (),
        )
        self._threshold = _first_of(request.threshold, run.replay.success_threshold if run else 1.0)
        self._endpoint = ChatEndpoint(
            request.url,
            request.model or "",
            key,
            retries=request.retries,
            request_seconds_max=request.request_seconds_max,
        )
        self._replies = ChatRenderer()
        self._more: dict[str, Any] = {"temperature": self._sampling.temperature}
        self._more |= request.more
        self._scorer = Scorer(run.scorer if run else ScorerConfig())
        self._rows: dict[str, Row] = {}
        self._failed_in_a_row = 0
        self._stopped: str | None = None
        self._lock: FileLock | None = None

    def run(self, progress: Progress) -> EvalResult:
        try:
            try:
                anyio.run(self._prepared, progress)
            except KeyboardInterrupt:
                if self._lock is None:
                    raise
                self._stopped = "interrupted"
            return self._finished()
        except BaseExceptionGroup as group:
            raise next(leaves(group)) from None
        finally:
            if self._lock is not None:
                self._lock.release()

    async def _prepared(self, progress: Progress) -> None:
        async with self._scorer, self._endpoint as endpoint:
            listed = await endpoint.models()
            if not endpoint.model:
                if len(listed) != 1:
                    raise ConfigurationError(f"--model: expected one of {', '.join(listed) or 'its models'}")
                endpoint.model = listed[0]
            self._open()
            with (self._folder / ROWS).open("ab", buffering=0) as file:
                await self._all(file, progress)

    def _open(self) -> None:
        """Take the folder and read what is in it. Raises :class:`ConfigurationError` for another evaluation's."""
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / ".lock", f"another afterplay env eval writes to {folder}: wait, or give --out")
        file, settings = folder / SETTINGS, orjson.loads(dumps(self._stated()))
        if file.exists():
            if (before := read_json(file)) is None:
                raise ConfigurationError(f"{file} holds no settings of an evaluation: give another --out, or remove it")
            if other := [name for name in settings if before.get(name) != settings[name]]:
                raise ConfigurationError(
                    f"{folder} holds an evaluation with another {', '.join(other)}: give the same options, or another "
                    "--out"
                )
        write_bytes_atomically(file, orjson.dumps(settings, option=orjson.OPT_INDENT_2))
        self._rows = {row["trajectory_id"]: without_transcript(row) for row in read_rows(folder / ROWS)}
        end_line(folder / ROWS)

    async def _all(self, file: Any, progress: Progress) -> None:
        ids = [task.task_id for _, task in self._tasks]
        rows = self._rows.values()
        done = {(row["task_id"], row["sample"]) for row in rows if (row["failure"] or {}).get("boundary") != ENDPOINT}
        left = list(wanted(ids, self._request.samples, done))
        total = len(ids) * self._request.samples
        ended, failed = total - len(left), sum(row["reward"] is None for row in rows)
        places = iter(left)
        metrics = ActorMetrics(CollectorRegistry())
        services = self._services(metrics)

        async def work() -> None:
            nonlocal ended, failed
            for index, sample in places:
                if self._stopped is not None:
                    return
                row = await self._one(services, index, sample)
                file.write(dumps(row).encode() + b"\n")
                ended += 1
                failed += (row["reward"] is None) - (row["trajectory_id"] in self._rows)  # one that is tried again
                self._rows[row["trajectory_id"]] = without_transcript(row)
                progress(ended, total, failed)
                if self._must_stop(row):
                    group.cancel_scope.cancel()

        with interrupting_blocks():
            async with anyio.create_task_group() as serving:
                serving.start_soon(services.serve)
                async with anyio.create_task_group() as group:
                    for _ in range(min(self._request.concurrency, len(left))):
                        group.start_soon(work)
                serving.cancel_scope.cancel()
            await services.close()
            await services.pool.close()

    def _must_stop(self, row: Row) -> bool:
        """True where the rest would fail like this one."""
        if self._stopped is not None:
            return True
        failure = row["failure"] or {}
        self._failed_in_a_row = self._failed_in_a_row + 1 if failure.get("boundary") == ENDPOINT else 0
        if self._endpoint.closed is not None:
            self._stopped = self._endpoint.closed
        elif self._failed_in_a_row >= max(4, self._request.concurrency):
            self._stopped = f"the last {self._failed_in_a_row} rollouts failed at the endpoint: {failure['message']}"
        return self._stopped is not None

    async def _one(self, services: ChatServices, index: int, sample: int) -> Row:
        place, task = self._tasks[index]
        number = f"{self._request.split}.{place}.{sample}"
        order = Order(number, f"{self._request.split}.{place}", task, sample, 0, 0, ORDER_SECONDS, evaluation=True)
        trajectory = replace(await Rollout(order, services).run(), recorded=False)
        if trajectory.failure is not None:
            return self._row(trajectory, sample)
        verdict = await self._scorer.score(trajectory)
        row = self._row(replace(trajectory, reward=verdict.reward, rewards=verdict.rewards), sample)
        if verdict.reward is None:
            failed = next(iter(verdict.failures), ScoreFailure("the environment", "missing", "no reward"))
            row |= {"state": "failed", "failure": _failure(f"scorer {failed.name}", failed.reason, failed.details)}
        return row

    def _row(self, trajectory: Trajectory, sample: int) -> Row:
        """The rollout as ``afterplay show`` writes it, with the endpoint's own counts of tokens."""
        answers = [self._replies.answers.pop(int(turn.completion.token_ids[0])) for turn in trajectory.turns]
        prompt, sampled = sum(a.prompt_tokens for a in answers), sum(a.sampled_tokens for a in answers)
        longest = max((a.prompt_tokens + a.sampled_tokens for a in answers), default=0)
        listed = _listed(trajectory, longest, sampled)
        row = found_json(Found(listed, Transcript(trajectory)), Vocabulary({}))
        for turn, answer in zip(row["transcript"]["turns"], answers, strict=True):
            texts = [message["content"] for message in turn["messages"]]
            tools = [""] * (len(turn["context"]["ids"]) - len(texts))
            turn["context"]["texts"], turn["completion"]["texts"] = [*tools, *texts], [turn["message"]["content"]]
            turn["tokens"] = answer.sampled_tokens
            turn["completion"]["versions"] = []
            if answer.reasoning:
                turn["message"]["extra"] = {"reasoning": answer.reasoning}
        return {**row, "sample": sample, "prompt_tokens": prompt}

    def _services(self, metrics: ActorMetrics) -> ChatServices:
        renderer = cast(Renderer, self._replies)
        name, host = self._subject.section, self._host
        return ChatServices(
            actor_id="eval",
            backend="endpoint",
            model=self._endpoint.model,
            model_length_max=EPISODE_TOKENS,
            sampling=self._sampling,
            retries=0,
            renderer=renderer,
            pool=EnginePool(connect=EngineClient, wait_seconds_max=1.0, metrics=metrics),
            environments={name: host},
            metrics=metrics,
            loops={name: build_loop(host, renderer, metrics)},
            endpoint=self._endpoint,
            replies=self._replies,
            more=self._more,
            tools_as_text=self._request.tools_as_text,
        )

    def _stated(self) -> Row:
        """Settings that every rollout of a folder shares."""
        run = self._subject.run
        return {
            "environment": self._subject.section,
            "model": self._endpoint.model,
            "split": self._request.split,
            "turn_tokens": self._sampling.max_tokens,
            "stop": list(self._sampling.stop),
            "request": self._more,
            "tools_as_text": self._request.tools_as_text,
            "scorer": None if run is None else run.scorer.model_dump(mode="json"),
            **self._subject.config.model_dump(mode="json", include=_SHARED),
        }

    @property
    def _folder(self) -> Path:
        if self._request.out is not None:
            return self._request.out
        words = f"{self._subject.section}-{self._endpoint.model}"
        return Path("evaluations") / re.sub(r"[^A-Za-z0-9._-]+", "-", words).strip("-.")

    def _finished(self) -> EvalResult:
        request, folder = self._request, self._folder
        ids = {task.task_id: place for place, task in self._tasks}
        rows = [r for r in self._rows.values() if r["task_id"] in ids and r["sample"] < request.samples]
        rows.sort(key=lambda row: (ids[row["task_id"]], row["sample"]))
        pass_at = request.pass_at or default_ks(request.samples)
        outcomes = [
            Outcome(
                row["task_id"], row["sample"], row["reward"], row["n_turns"], row["n_sampled"],
                row["status"] == "truncated", _reason(row) if row["failure"] else None,
            )
            for row in rows
        ]  # fmt: skip
        summary = summarise(outcomes, len(ids), request.samples, pass_at, self._threshold)
        examples = {_reason(row): row["failure"]["message"] for row in rows if row["failure"]}
        words = sentences(summary)
        notes = []
        if self._scorer.needs_group(self._subject.section):
            notes.append("the reward does not include the score functions that compare a whole group (per: group)")
        if len(ids) < request.tasks:
            notes.append(f"the split {request.split} has {len(ids)} tasks from {request.first} on")
        folder.mkdir(parents=True, exist_ok=True)
        stated = {"settings": self._stated(), "url": self._endpoint.url, **summary.as_json(), "examples": examples}
        stated |= {"words": words, "notes": notes, "stopped": self._stopped}
        write_bytes_atomically(folder / SUMMARY, orjson.dumps(stated, option=orjson.OPT_INDENT_2))
        about = {"run": folder.resolve().name, "count": len(rows), "notes": [*words, *notes], "messages": True}
        latest = {(row["trajectory_id"], row["received_at"]) for row in rows}
        shown = (r for r in read_rows(folder / ROWS) if (r["trajectory_id"], r["received_at"]) in latest)
        _, html = page_of_rows(shown, {**about, "traces_trained": 0, "tokenizer": True})
        write_bytes_atomically(folder / PAGE, html.encode("utf-8", "replace"))
        return EvalResult(folder, self._endpoint.model, summary, examples, words, notes, self._stopped)


_SHARED = {"name", "options", "loop", "max_turns", "max_tokens", "max_seconds", "tasks_from"}


def default_ks(samples: int) -> tuple[int, ...]:
    """
    >>> default_ks(1), default_ks(12)
    ((1,), (1, 2, 4, 8, 12))
    """
    return tuple(sorted({*(2**i for i in range(samples.bit_length())), samples}))


def read_rows(path: Path) -> Iterator[Row]:
    """Every whole line; the last of a trajectory stands. None where there is no file."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with suppress(orjson.JSONDecodeError):
                yield orjson.loads(line)


def without_transcript(row: Row) -> Row:
    """The facts of a row, which are small."""
    return {name: value for name, value in row.items() if name != "transcript"}


def end_line(path: Path) -> None:
    """End a line that a kill cut off, so that the next one begins a line."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _reason(row: Row) -> str:
    return f"{row['failure']['boundary']}: {row['failure']['kind']}"


def _failure(boundary: str, kind: str, message: str, details: str = "") -> dict[str, str]:
    return {"boundary": boundary, "kind": kind, "message": message, "details": details}


def _listed(t: Trajectory, n_tokens: int, n_sampled: int) -> Listed:
    f = t.failure
    return Listed(
        row_id=0,
        trajectory_id=t.trajectory_id,
        group_number=0,
        state="failed" if f else "evaluated",
        reason="",
        status=t.status.value,
        reward=t.reward,
        rewards=t.rewards,
        n_turns=len(t.turns),
        n_tokens=n_tokens,
        n_sampled=n_sampled,
        version_min=-1,
        version_max=-1,
        duration_seconds=t.timings.duration_seconds,
        actor=t.actor_id,
        received_at=t.timings.finished_at,
        failure=None if f is None else _failure(f.boundary, f.kind, f.message, f.details),
        entropy=None,
        age=0,
        n_bytes=0,
        task_id=t.task.task_id,
        environment=t.task.environment,
        step=None,
    )


def _first_of(asked: float | None, otherwise: float) -> float:
    return otherwise if asked is None else asked
