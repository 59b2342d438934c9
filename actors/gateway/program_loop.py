"""``program``: an agent program runs the episode; its calls to the gateway become the trajectory.

For each order the actor opens a session and starts the program (``command``), calls an async function (``function``),
or offers the session to programs that run elsewhere (``external``). The program ends the episode by ending, or by
reporting its result (``POST /sessions/ID/finish``, the last line of its output, or what the function returns). A
command runs in a sandbox.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import anyio
from anyio.abc import TaskGroup
from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from actors.engine.base import PausableTimeout
from actors.environments.base import STRICT_OPTIONS, Reply
from actors.environments.host import EnvironmentHost
from actors.gateway.chat_recorder import ChatRecorder
from actors.gateway.program_command import ProgramCommand, hung, unproxied
from actors.gateway.requests import PROGRAM, ParameterRules, Report, read_report
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Budget, Dialogue, Game
from actors.rollout.recorder import Recorder
from actors.sandboxes.base import SANDBOX, SandboxOptions
from actors.sandboxes.registry import given_as_word
from actors.servers.refusal import Refusal
from actors.tools.parsing.registry import parser_of
from pipeline.errors import (
    AfterplayError,
    ConfigurationError,
    EpisodeLimit,
    PlugInError,
    PlugInTimeout,
    boundary,
)
from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.engine_keys import is_loopback
from pipeline.runtime.plugins import attribute
from pipeline.schema import TrajectoryStatus

log = logging.getLogger(__name__)

LISTEN_SECONDS_MAX = 30.0
SHOWN_CHARACTERS_MAX = 100
"""Part of a program's last line in the message that it is no report."""
GRACE_SHARE = 0.1
"""Largest share of the episode's time for a program to end after its calls are refused."""


class ProgramEpisode(AgentEpisode):
    """One rollout by a program, from its start to its reward."""

    def __init__(self, loop: ProgramLoop, game: Game) -> None:
        super().__init__(game)
        self._loop = loop

    async def run(self, dialogue: Dialogue) -> TrajectoryStatus:
        loop = self._loop
        with anyio.fail_after(LISTEN_SECONDS_MAX):
            await loop.gateway.listening.wait()
        session = loop.session(self.game, dialogue)
        loop.gateway.add(session)
        try:
            report, failure = await _program_result(loop, self.game, session)
        finally:
            loop.gateway.remove(session)
        return await self._judged(session, dialogue.recorder, report or session.report, failure)

    async def _judged(
        self, session: Session, recorder: Recorder, report: Report | None, failure: AfterplayError | None
    ) -> TrajectoryStatus:
        """Status of the ended episode. Raises where there is nothing to score."""
        if failure is not None and session.report is not None:
            log.info("the program of %s failed after its report, which is kept: %s", self.game.key, failure)
            failure = None
        if report is not None and report.error is not None:
            failure = PlugInError(PROGRAM, "Told", report.error, session.output)
            report = None
        if session.engine_error is not None:
            raise session.engine_error
        of_sandbox = isinstance(failure, PlugInError) and failure.boundary == SANDBOX
        if failure is not None and (session.limit is None or of_sandbox or isinstance(failure, PlugInTimeout)):
            raise failure
        if session.refusal is not None and session.limit is None:
            raise PlugInError(
                PROGRAM,
                "Refused",
                f"the last call of the program was refused, so its result is not the policy's ({session.refused_calls} "
                f"refused in all): {session.refusal.message}",
                session.output,
            )
        if not recorder.n_turns:
            if session.limit is not None:
                raise EpisodeLimit(session.limit)
            raise PlugInError(PROGRAM, "NoCalls", "the program ended without a call of the policy", session.output)
        score, signals = await self._reward(session, recorder.graded_reply, report)
        signals |= report.signals if report is not None else {}
        if session.refused_calls:
            signals["refused_calls"] = float(session.refused_calls)
        recorder.judge_rollout(score, signals)
        truncated = session.limit is not None or (report is not None and not report.done)
        return TrajectoryStatus.TRUNCATED if truncated else TrajectoryStatus.COMPLETE

    async def _reward(
        self, session: Session, graded_reply: str, report: Report | None
    ) -> tuple[float | None, dict[str, float]]:
        """The score, and the environment's signals where it judges."""
        source = self._loop.reward
        reported = report is not None and (source != "program" or report.reward is not None)
        if session.limit is not None and not reported and (session.files is None or source != "environment"):
            return self._loop.reward_at_limit, {}
        if source == "scorer":
            return 0.0, {}
        if source == "environment":
            answer = report.answer if report is not None else None
            step = await self.game.step(Reply(graded_reply if answer is None else answer, files=session.files))
            return step.reward, dict(step.signals)
        if report is None or report.reward is None:
            got, remedy = "", 'return {"reward": 1.0}, ' if self._loop.function is not None else ""
            if session.last_line is not None:
                got = f", and its last line is {session.last_line[:SHOWN_CHARACTERS_MAX]!r}"
                bytes_max = self._loop.output_bytes_max
                remedy = f'print {{"reward": 1.0}} as its last line, of at most output_bytes_max ({bytes_max}) bytes, '
            raise PlugInError(
                PROGRAM,
                "NoReward",
                f"the program reported no reward{got}: {remedy}POST it to AFTERPLAY_SESSION_URL/finish, or set "
                "loop.options.reward to environment or scorer",
                session.output,
            )
        return report.reward, {}


async def _program_result(
    loop: ProgramLoop, game: Game, session: Session
) -> tuple[Report | None, AfterplayError | None]:
    """Report of the program, or its failure. Its calls are refused near the end of the rollout's time, so that it can
    end by itself; one that has reported may take a grace more. No time passes while the engines sleep."""
    report: Report | None = None
    failure: AfterplayError | None = None
    timeout, left = PausableTimeout.around()
    grace = min(loop.grace_seconds, GRACE_SHARE * left)

    async def refuse_calls() -> None:
        with timeout.limit(left - 2 * grace):
            await anyio.sleep_forever()
        session.expire()

    async def lose_patience(group: TaskGroup) -> None:
        await session.reported.wait()
        await anyio.sleep(grace)
        group.cancel_scope.cancel()

    with timeout.limit(left - grace / 2) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(refuse_calls)
            group.start_soon(lose_patience, group)
            try:
                # a command is ended before, and its output read; a sandbox knows nothing of engines that sleep
                seconds_max = math.inf if timeout.pauses else left - grace
                report = await loop.run_program(session, game.episode.files, seconds_max)
            except AfterplayError as error:
                failure = error
            group.cancel_scope.cancel()
    if scope.cancelled_caught and session.report is None:
        failure = _hung(loop, session)
    return report, failure


def _hung(loop: ProgramLoop, session: Session) -> PlugInTimeout:
    if loop.external and not session.leased.is_set():
        return PlugInTimeout(PROGRAM, "NotTaken", "no external program asked for the task (POST /sessions)")
    return hung(session)


@dataclass(config=STRICT_OPTIONS)
class ProgramLoop(AgentLoop):
    """Options of ``environments.<name>.loop.options`` for ``program``."""

    command: tuple[str, ...] | None = None
    """The program and its arguments, started once an episode; no shell reads them. ``python`` as the first word is the
    Python that runs Afterplay, also where its environment is not activated; ``python3`` is that of the ``PATH``."""
    function: str | None = None
    """``module:name`` or ``path/file.py:name``: ``async def play(task, base_url, api_key)`` in the actor's process,
    which returns a reward or ``{"reward": ..., ...}``. A plain ``def`` runs in a thread."""
    external: bool = False
    """Programs run elsewhere and ask ``POST /sessions`` for tasks."""
    sandbox: Annotated[SandboxOptions, BeforeValidator(given_as_word)] = Field(default_factory=SandboxOptions)
    """Place of the command, and what it may use there (:class:`SandboxOptions`), or the ``kind`` alone. A command
    reaches nothing but its session."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of the command. Without a sandbox it has the actor's own too."""
    folder: str | None = None
    """Working directory of the command, which it may read. None: the actor's, of which it may read only the folders of
    the files that ``command`` names."""
    reward: Literal["program", "environment", "scorer"] = "program"
    """Judge of the episode: the program (its report), the environment (its ``step`` is given the program's ``answer``,
    else the last reply, and the episode's files as the program left them), or the functions of the scorer alone (the
    environment's score is then 0)."""
    reward_at_limit: float | None = 0.0
    """Score of an episode that a limit ended before its program reported a result. 0: as an environment that has given
    nothing so far. None: no score, so that it is not trained."""
    sampling_parameters: Literal["ignore", "refuse"] = "ignore"
    """Calls with another temperature, top_p, top_k, seed or penalty than the run's: ``ignore`` and list them in the
    header X-Afterplay-Ignored (most programs set a temperature), or ``refuse`` the call."""
    unsupported: Literal["ignore", "refuse"] = "refuse"
    """Calls with response_format, logit_bias, a forced tool_choice and the like: a program that relies on these would
    go wrong later and elsewhere, so they are refused."""
    parser: str = "auto"
    """Form of tool calls, as for ``tool_agent``."""
    max_concurrent_calls: int = Field(default=16, ge=1, le=1024)
    """Calls of one session at the same time; more are answered 429."""
    host: str = "127.0.0.1"
    """Address the gateway listens on. Other than loopback only with a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free one. A fixed one is for ``external`` with one actor process on the machine."""
    token_env: str | None = None
    """Environment variable with the token that ``POST /sessions`` wants as ``Authorization: Bearer``. None: none."""
    lease_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds of silence after which an external program has failed."""
    grace_seconds: float = Field(default=10.0, gt=0, le=600)
    """Time for a program to end once the time of its episode is over and its calls are refused; at most a tenth of
    it."""
    output_bytes_max: int = Field(default=65_536, ge=1024, le=16 * 2**20)
    """Bytes at the end of the command's output that are stored; a report is looked for in its last line."""
    body_bytes_max: int = Field(default=16 * 2**20, ge=1024, le=256 * 2**20)
    """Largest body of one call."""

    @model_validator(mode="after")
    def _one_way_to_run(self) -> ProgramLoop:
        given = [name for name in ("command", "function", "external") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of command, function and external, got {given or 'none'}")
        if not is_loopback(self.host) and self.token_env is None:
            raise ValueError(f"host {self.host} is not loopback: name the variable of a token in token_env")
        if self.command is not None and self.command[:1] == ("python",):
            self.command = (sys.executable, *self.command[1:])
        return self

    def bind(self, host: EnvironmentHost, renderer: Renderer, metrics: ActorMetrics) -> None:
        """Take the address. Raises :class:`ConfigurationError`."""
        where = f"environments.{host.section}.loop"
        self._config = host.config
        self._renderer = renderer
        self._threads = host.threads
        self._reaper = OrphanReaper(grace_seconds=0)
        parser, refused = f"{where}.options.parser", ""
        try:
            self._parse = parser_of(self.parser, renderer.template, renderer.tokenizer, parser, renderer.name)
        except ConfigurationError as error:
            if self.parser != "auto":
                raise
            # Only a program that states tools needs a parser.
            self._parse = parser_of("hermes", renderer.template, renderer.tokenizer, parser)
            refused = str(error)
        self._rules = ParameterRules(self.sampling_parameters, self.unsupported, refused)
        self._program: ProgramCommand | None = None
        self._function = None if self.function is None else attribute(self.function, f"{where}.options.function")
        if self.function is not None and not callable(self._function):
            raise ConfigurationError(f"{where}.options.function: expected a function, got {self._function!r:.200}")
        if self.function is not None:
            os.environ.update(unproxied())  # its clients read them here
        token = None
        if self.token_env is not None:
            token = os.environ.get(self.token_env)
            if not token:
                raise ConfigurationError(f"{where}.options.token_env: the variable {self.token_env} is not set")
        calls, section = metrics.door_calls_total, host.section
        self.gateway = Gateway(
            self.host,
            self.port,
            token,
            self.body_bytes_max,
            f"{where}.options",
            lambda route, outcome: calls.labels(env=section, route=route, outcome=outcome).inc(),
        )
        if self.command is not None:
            try:
                self._program = ProgramCommand(
                    self.command,
                    self.sandbox,
                    where=f"{where}.options",
                    environment=self.environment,
                    folder=self.folder,
                    output_bytes_max=self.output_bytes_max,
                    hidden=host.hidden,
                    gateway=self.gateway.url,
                    reaper=self._reaper,
                    count=lambda outcome: metrics.sandboxes_total.labels(env=section, outcome=outcome).inc(),
                )
            except ConfigurationError:
                self.gateway.close()
                raise

    def begin(self, game: Game) -> AgentEpisode:
        return ProgramEpisode(self, game)

    async def serve(self) -> None:
        async with self.gateway.serving():
            log.info("gateway listening on %s", self.gateway.url)
            await anyio.sleep_forever()

    async def close(self) -> None:
        self.gateway.close()
        self._reaper.close()

    def session(self, game: Game, dialogue: Dialogue) -> Session:
        """A new one, whose calls are not taken yet."""
        policy = dialogue.policy
        budget = Budget(self._config.max_turns, self._config.max_tokens, policy.context_max, policy.sampling.max_tokens)
        return Session(
            task_for_program(game),
            policy,
            budget,
            ChatRecorder(dialogue.recorder, self._parse),
            self._renderer,
            rules=replace(self._rules, sampling="ignore") if policy.differs else self._rules,
            calls_max=self.max_concurrent_calls,
        )

    async def run_program(self, session: Session, files: Mapping[str, str] | None, seconds_max: float) -> Report | None:
        """Run the program to its end, a command with ``files`` for at most ``seconds_max``. None: it reported nothing.
        Raises :class:`PlugInError` where it failed."""
        if self._program is not None:
            return await self._program.run(session, files, seconds_max)
        if self._function is not None:
            return await self._call_function(session)
        return await self._wait_for_external(session)

    async def _call_function(self, session: Session) -> Report | None:
        function, url = self._function, f"{self.gateway.url_of(session)}/v1"
        with boundary(PROGRAM):
            if inspect.iscoroutinefunction(function):
                result = await function(dict(session.task), url, session.id)
            else:
                assert function is not None
                result = await self._threads.run(function, dict(session.task), url, session.id)
                result = await result if inspect.isawaitable(result) else result
        if result is None:
            return session.report
        try:
            return read_report(result if isinstance(result, Mapping) else {"reward": result})
        except Refusal as refusal:
            raise PlugInError(PROGRAM, "WrongValue", f"what {self.function} returned: {refusal.message}") from None

    async def _wait_for_external(self, session: Session) -> Report | None:
        self.gateway.offer(session)
        await session.leased.wait()
        session.heard_at = anyio.current_time()
        while session.report is None:
            now = anyio.current_time()
            left = (now if session.busy else session.heard_at) + self.lease_seconds - now
            if left <= 0:
                raise PlugInTimeout(
                    PROGRAM,
                    "LeaseExpired",
                    f"the program that took the task has been silent for {self.lease_seconds:g} s (lease_seconds)",
                )
            with anyio.move_on_after(left):
                await session.reported.wait()
        return session.report


def task_for_program(game: Game) -> dict[str, Any]:
    """The task as the program gets it, without the hint."""
    task = game.task
    return {
        "task_id": task.task_id,
        "environment": task.environment,
        "seed": task.seed,
        "payload": dict(task.payload),
        "messages": [message.as_template_input() for message in game.episode.messages],
    }
