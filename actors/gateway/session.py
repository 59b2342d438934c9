"""One session: the calls of one program, bounded, sampled and recorded.

*Consumes* requests of the gateway; *produces* their answers and the turns of one trajectory. A call *waits* for the
engine and ends when the session does. At a limit a program gets an error that clients do not retry (400, then 404); the
session stays open, because a program may continue with a shorter history.

A call does not end with the connection that asked for it: for :data:`ABANDONED_SECONDS_MAX` a repeat of the request
(:mod:`actors.gateway.repeats`) finds it. Its replies become turns when they are there and a client waits for them. A
call that no client waits for gives its place to calls that need it, and leaves nothing behind.

A client that asks for a stream sees the replies while they are sampled (:mod:`actors.gateway.preview`). A repeat of its
request sees them from the beginning. They become turns in the same way, and only when they are whole.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from actors.engine.base import Completion
from actors.gateway.chat_recorder import ChatRecorder, Prompt
from actors.gateway.conversation import Key, ProgramCall
from actors.gateway.dialect import Past, ProgramAnswer
from actors.gateway.preview import Preview
from actors.gateway.repeats import Delivery, Repeats, Sent
from actors.gateway.reply import Choice
from actors.gateway.requests import ParameterRules, Report
from actors.rendering.offload import rendered
from actors.rendering.renderer import Renderer
from actors.rollout.agent_loop import Budget, Limit
from actors.rollout.recorder import PendingCall
from actors.rollout.sampling import Policy
from actors.servers.refusal import Refusal
from pipeline.errors import EngineError, EngineRefused, EngineUnavailable, EpisodeLimit, PlugInError
from pipeline.schema import Message

ABANDONED_SECONDS_MAX = 30.0
"""Time for which a call is sampled that no client waits for. The clients of OpenAI and Anthropic ask again within 8
seconds."""
Start = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]


@dataclass(slots=True, eq=False)
class _Part:
    """One reply of an exchange."""

    pending: PendingCall
    tokens: int
    """Tokens that it may sample, or has sampled: they are spent from the budget."""
    preview: Preview | None
    """None: the client does not ask for a stream."""
    completion: Completion | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange(Delivery):
    """One request of a program with its answer, however often it is sent."""

    call: ProgramCall
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    """The replies are there, or there will be none."""
    parts: list[_Part] = field(default_factory=list)
    """Replies that are no turns of the trajectory yet."""
    waiting: int = 0
    """Clients that wait for it."""
    news: anyio.Event = field(default_factory=anyio.Event)
    """Set, and replaced, when tokens were sampled; set for good when it is done."""
    begun: ProgramAnswer | None = None
    """The answer, whose replies may be missing yet; None before they are sampled."""
    answer: ProgramAnswer | None = None
    """Set when its replies are turns of the trajectory."""
    error: Exception | None = None

    def heard(self) -> None:
        """More tokens were sampled."""
        self.news.set()
        self.news = anyio.Event()

    def choices(self, apart: bool) -> list[Choice]:
        """The replies so far, as far as no later token changes them (:meth:`Preview.choice`); none when they are whole.
        Raises what the tokenizer raises."""
        return [part.preview.choice(apart) for part in self.parts if part.preview is not None]

    def deliver(self) -> None:
        """The program has the answer. Its messages are not held any longer, unless a later call may refer to them."""
        Delivery.deliver(self)
        if self.answer is not None and not self.call.kept:
            self.answer.call = self.call = replace(self.call, messages=(), keys=(), token_ids=())


class Session:
    """One session (see the module). ``id`` is a secret that authorizes calls."""

    def __init__(
        self,
        task: Mapping[str, Any],
        policy: Policy,
        budget: Budget,
        recording: ChatRecorder,
        renderer: Renderer,
        *,
        rules: ParameterRules,
        calls_max: int,
    ) -> None:
        """``task``: what the program is to do, as JSON. ``calls_max``: calls at the same time."""
        self.id = secrets.token_urlsafe(24)
        self.task = task
        self._recording = recording
        self.report: Report | None = None
        self.limit: Limit | None = None
        """Limit that refused the last call, if one did."""
        self.engine_error: EngineError | None = None
        """Error of the engine in the last call, if there was one."""
        self.refused_calls = 0
        """Calls that were not answered, for whatever reason."""
        self.refusal: Refusal | None = None
        """Refusal of the last call, if it was refused."""
        self.output = ""
        """The end of what the program wrote to stderr, and then to stdout."""
        self.last_line: str | None = None
        """The last line of its stdout; None: it is no command, or has not ended."""
        self.files: Mapping[str, str] | None = None
        """The episode's files as the program left them; None: it has none."""
        self.heard_at = anyio.current_time()
        """Event-loop seconds."""
        self.leased = anyio.Event()
        """An external program has taken it."""
        self.reported = anyio.Event()
        self.policy = policy
        self.rules = rules
        self._budget = budget
        self._renderer = renderer
        self._calls_max = calls_max
        self._repeats: Repeats[Exchange] = Repeats()
        self._running: set[Exchange] = set()
        """Exchanges whose replies are being sampled."""
        self._answers: dict[str, ProgramAnswer] = {}
        """Answers by number."""
        self._known: dict[Key, tuple[Key, Message]] = {}
        """Messages of calls that are kept: the histories of many calls share them."""
        self._rendering = anyio.Lock()
        """Prompts are made one after the other: each may continue what the one before has begun."""
        self._expired = False
        self._ended = False
        self._limit_told = False
        """A limit that no shorter history avoids has refused a call."""

    @property
    def busy(self) -> bool:
        """True while a client waits for a call."""
        return any(exchange.waiting for exchange in self._running)

    @asynccontextmanager
    async def asking(
        self, sent: Sent, read: Callable[[Past], ProgramCall], start: Start
    ) -> AsyncIterator[tuple[Exchange, bool]]:
        """A request, whose answer the caller takes (:meth:`answer`) and delivers inside the block, and whether it came
        before. ``read`` reads a new one; ``start`` runs what samples it beside the caller. Raises
        :class:`Refusal`."""
        self._heard()
        exchange = self._repeats.find(sent)
        repeated = exchange is not None and not exchange.scope.cancel_called
        if exchange is None or not repeated:
            call = self._shared(read(self._answers.get))
            self._repeats.continued(call.whole)
            try:
                self._admit(call.n)
            except Refusal:
                self._repeats.refused(sent)
                raise
            exchange = Exchange(call=call)
            self._repeats.begin(sent, exchange)
            self._running.add(exchange)
            start(partial(self._play, exchange))
        exchange.waiting += 1
        exchange.scope.deadline = float("inf")
        try:
            yield exchange, repeated
        finally:
            exchange.waiting -= 1
            if not exchange.waiting:
                exchange.scope.deadline = anyio.current_time() + ABANDONED_SECONDS_MAX

    async def answer(self, exchange: Exchange) -> ProgramAnswer:
        """The whole answer, waited for. Raises :class:`Refusal`."""
        await exchange.done.wait()
        self.heard_at = anyio.current_time()
        if exchange.answer is None and exchange.error is None:
            self._record(exchange)
        if exchange.error is not None:
            raise exchange.error
        assert exchange.answer is not None
        self.engine_error = self.refusal = None
        return exchange.answer

    async def count(self, read: Callable[[Past], ProgramCall]) -> int:
        """Tokens of the prompt that a call would have. Raises :class:`Refusal`."""
        self._heard()
        call = read(self._answers.get)
        async with self._rendering:
            return len((await self._prompt(call)).token_ids)

    def finish(self, report: Report) -> None:
        """The program says that it is done. Raises :class:`Refusal` the second time."""
        self._heard()
        if self.report is not None:
            raise Refusal(400, "this session was finished before: its first report stands", code="session_finished")
        self.report = report
        self.reported.set()

    def refused(self, refusal: Refusal) -> None:
        """A call of the program was not answered. After the report that tells nothing any more."""
        if self.report is None:
            self.refused_calls += 1
            self.refusal = refusal

    def expire(self) -> None:
        """The time is over: calls are refused, those under way are ended, and a report may still come."""
        self._expired = True
        self.limit = Limit.SECONDS
        reason = self.policy.reason() if self.busy else ""
        if reason:
            self._engine_failed(EngineUnavailable(f"the time of the episode ended while a call waited for {reason}"))
        self._cancel()

    def end(self) -> None:
        """Nothing is taken any more."""
        self._ended = True
        self._cancel()

    def _engine_failed(self, error: EngineError) -> None:
        if self.report is None:
            self.engine_error = error

    def require_open(self) -> None:
        """Raises :class:`Refusal`."""
        if self._ended:
            raise Refusal(404, "this session has ended", code="session_not_found")

    def _heard(self) -> None:
        self.require_open()
        self.heard_at = anyio.current_time()

    def _cancel(self) -> None:
        for exchange in self._running:
            exchange.scope.cancel()

    def _shared(self, call: ProgramCall) -> ProgramCall:
        """The call, whose messages are the same objects as those of earlier calls if it is kept."""
        if not call.kept:
            return call
        stated = zip(call.keys, call.messages, strict=True)
        pairs = [self._known.setdefault(key, (key, message)) for key, message in stated]
        return replace(call, keys=tuple(key for key, _ in pairs), messages=tuple(message for _, message in pairs))

    def _admit(self, n: int) -> None:
        if self._expired:
            raise self._limit_refusal(Limit.SECONDS)
        if self.report is not None:
            raise Refusal(400, "this session was finished: it takes no more calls", code="session_finished")
        if self._n_running() + n > self._calls_max:
            self._end_abandoned()
        if self._n_running() + n > self._calls_max:
            raise Refusal(
                429,
                f"expected at most {self._calls_max} calls of a session at the same time (max_concurrent_calls)",
                code="too_many_calls",
            )

    def _n_running(self) -> int:
        return sum(exchange.call.n for exchange in self._running)

    async def _play(self, exchange: Exchange) -> None:
        """Sample the replies to a call. Raises nothing: the exchange gets the error."""
        try:
            with exchange.scope:
                await self._begin_all(exchange)
                async with anyio.create_task_group() as group:
                    for part in exchange.parts:
                        group.start_soon(self._sample, exchange, part)
        except Exception as error:
            exchange.error = error
        if exchange.scope.cancelled_caught:
            gone = Refusal(404, "this session has ended", code="session_not_found")
            exchange.error = self._limit_refusal(Limit.SECONDS) if self._expired else gone
        if exchange.error is not None:
            self._give_back(exchange)
        elif exchange.waiting:
            self._record(exchange)
        self._running.discard(exchange)
        exchange.done.set()
        exchange.news.set()

    async def _begin_all(self, exchange: Exchange) -> None:
        """Begin a call for each of ``n`` replies. Raises :class:`Refusal`."""
        call = exchange.call
        prompt: Prompt | None = None
        async with self._rendering:
            for _ in range(call.n):
                if prompt is None or prompt.branch is not None:
                    prompt = await self._prompt(call)
                pending = self._recording.begin(prompt)
                try:
                    room = self._room(pending, call.tokens_max)
                except Refusal:
                    self._recording.fail(pending)
                    raise
                preview = self._recording.preview(pending) if call.stream else None
                exchange.parts.append(_Part(pending, room, preview))
        number, created, n_prompt = secrets.token_hex(12), int(time.time()), len(exchange.parts[0].pending.prompt_ids)
        exchange.begun = ProgramAnswer(number, created, self.policy.model, call, (), n_prompt, self._renderer)

    async def _prompt(self, call: ProgramCall) -> Prompt:
        try:
            return await rendered(call.n_characters, partial(self._recording.prompt, call))
        except PlugInError as error:
            raise Refusal(
                400, f"the model's chat template cannot render these messages: {error.message}", code="invalid_messages"
            ) from error

    def _room(self, pending: PendingCall, tokens_max: int | None) -> int:
        """Tokens that the call may sample, spent from the budget. Raises :class:`Refusal`."""
        if self._expired:  # while a thread made the prompt, which cannot be cancelled
            raise self._limit_refusal(Limit.SECONDS)
        sizes = len(pending.prompt_ids), len(pending.added_ids)
        room = self._budget.room(*sizes)
        if isinstance(room, Limit):
            self._end_abandoned()
            room = self._budget.room(*sizes)
        if isinstance(room, Limit):
            self.limit = room
            raise self._limit_refusal(room)
        room = room if tokens_max is None else min(room, tokens_max)
        self._budget.spend(len(pending.added_ids), room)
        self.limit = None
        return room

    def _limit_refusal(self, limit: Limit) -> Refusal:
        """Agents that try again after every error but a few, for minutes, stop at 404: all calls after the first have
        it, unless a shorter history would be answered."""
        message, param = f"the limit {limit.value} of this episode is reached", limit.value
        if limit is Limit.CONTEXT:
            return Refusal(400, message, code="context_length_exceeded", param=param)
        status, self._limit_told = (404 if self._limit_told else 400), True
        return Refusal(status, message, code="episode_limit", param=param)

    def _end_abandoned(self) -> None:
        """End the calls that no client waits for."""
        for exchange in self._repeats.undelivered:
            if not exchange.waiting and exchange.answer is None:
                exchange.scope.cancel()
                self._give_back(exchange)

    def _give_back(self, exchange: Exchange) -> None:
        """The exchange leaves nothing behind. Idempotent."""
        for part in exchange.parts:
            self._recording.fail(part.pending)
            self._budget.give_back(len(part.pending.added_ids) + part.tokens, turn=True)
        exchange.parts = []
        self._running.discard(exchange)
        self._repeats.forget(exchange)

    async def _sample(self, exchange: Exchange, part: _Part) -> None:
        preview = part.preview

        def heard(token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
            assert preview is not None
            preview.add(token_ids, logprobs)
            exchange.heard()

        try:
            part.completion = await self.policy.complete(
                part.pending.prompt_ids,
                part.tokens,
                exchange.call.stop,
                part.pending.conversation,
                len(part.pending.added_ids),
                None if preview is None else heard,
            )
        except EngineError as error:
            if exchange.waiting:
                self._engine_failed(error)
            status, code = (400, "engine_refused") if isinstance(error, EngineRefused) else (503, "engine_unavailable")
            exchange.error = exchange.error or Refusal(status, str(error), code=code)
        except EpisodeLimit as limit:  # of a policy that counts tokens itself
            self.limit = Limit(limit.args[0])
            exchange.error = exchange.error or self._limit_refusal(self.limit)
        if part.completion is not None and part in exchange.parts:
            sampled = len(part.completion.generation.token_ids)
            self._budget.give_back(part.tokens - sampled)
            part.tokens = sampled

    def _record(self, exchange: Exchange) -> None:
        """The replies are turns from here on. One that the tokenizer or the parser cannot take is the exchange's error,
        and none of them is a turn."""
        call, choices, told, sampled = exchange.call, [], [], []
        parts, exchange.parts = exchange.parts, []
        try:
            self.require_open()
            for part in parts:
                assert part.completion is not None
                generation = part.completion.generation
                sampled.append((part.pending, generation, self._recording.read(part.pending, generation, call.stop)))
        except Refusal as refusal:
            exchange.error = refusal
        except Exception as error:
            words = f"the reply cannot be read: {type(error).__name__}: {error}"
            exchange.error = Refusal(500, words, code="unreadable_reply")
            exchange.error.__cause__ = error
        if exchange.error is not None:
            for part in parts:
                self._recording.fail(part.pending)
            self._repeats.forget(exchange)
            return
        for pending, generation, reading in sampled:
            reply = self._recording.finish(pending, generation, self.policy.sampling.temperature, reading)
            choices.append(Choice(reply, generation))
            ids = generation.token_ids.tolist()
            told.append((*call.keys, reply.key) if call.keys else (*call.token_ids, *ids))
        assert exchange.begun is not None
        exchange.told = tuple(told)
        exchange.begun = exchange.answer = replace(exchange.begun, choices=tuple(choices))
        self._answers[exchange.answer.number] = exchange.answer
