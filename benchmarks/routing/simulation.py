"""Engines, actors and rollouts on virtual time, with the real :class:`Router` or a rule to compare it with.

An engine samples one token for each request of its batch in a step, which takes ``first + each * batch`` seconds and
more while a prompt is read. Requests wait when the batch or the KV cache is full; what the KV cache has left keeps the
prefixes of conversations, the least recently used are dropped first. A cache that overflows throws the youngest request
out of the batch. An update of the weights empties the caches.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from actors.engine.base import EngineReport
from actors.engine.concurrency import LOOK_SECONDS, ConcurrencyLimit
from actors.engine.router import Lease, Router

CHUNK = 512
"""Prompt tokens that an engine reads in one step."""
REPORT_SECONDS = 1.0
READ_SECONDS = 0.02
"""Time from the state of an engine to its report at an actor."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one engine, in seconds."""

    first: float
    """Of a step, whatever its batch."""
    each: float
    """Of each request in a step."""
    prompt: float
    """Of a prompt token that is in no cache."""
    batch_max: int
    kv_tokens: int

    def slower(self, factor: float) -> Costs:
        return replace(self, first=factor * self.first, each=factor * self.each, prompt=factor * self.prompt)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation and what follows it."""

    prompt: int
    """New prompt tokens, after what was sampled before."""
    sampled: int
    seconds: float = 0.0
    """Of the environment, after the reply."""


Conversation = Sequence[Turn]


class Clock:
    """The next event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, act))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, act = heapq.heappop(self._events)
            act()


@dataclass(slots=True, eq=False)
class Request:
    session: str
    context: int
    """Tokens of the prompt, and of what was sampled before it was thrown out."""
    left: float
    """Tokens that are still to be sampled."""
    done: Callable[[], None]
    unread: float = 0.0
    """Prompt tokens that are still to be read."""
    begun: float = math.nan
    """Steps of the engine when it began to sample."""


class SimulatedEngine:
    """One server."""

    def __init__(self, name: str, clock: Clock, costs: Costs) -> None:
        self.name, self.costs, self.slow = name, costs, 1.0
        self._clock, self._at, self._steps = clock, 0.0, 0.0
        self._waiting: deque[Request] = deque()
        self._reading: deque[Request] = deque()
        self._sampling: dict[Request, None] = {}
        self._ends: list[tuple[float, int, Request]] = []
        self._number = 0
        self._kv_fixed = 0.0
        """Tokens of the requests in the batch, were none sampled since the steps began."""
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._cached = 0
        self._wake = 0
        self.sampled = 0.0
        self.preemptions = 0
        self.queries = self.hits = 0

    @property
    def batch(self) -> int:
        return len(self._sampling) + len(self._reading)

    @property
    def in_flight(self) -> int:
        return self.batch + len(self._waiting)

    def seconds_of(self, session: str, prompt: int, tokens: int) -> float:
        """Time that a turn would take here, were the batch and what it has to read to stay as they are."""
        self._advance()
        unread = sum(request.unread for request in self._reading) + sum(r.context for r in self._waiting)
        unread += max(0, prompt - self._cache.get(session, 0))
        return self.costs.prompt * unread + tokens * (self.costs.first + self.costs.each * (self.in_flight + 1))

    def submit(self, session: str, prompt: int, tokens: int, done: Callable[[], None]) -> None:
        self._advance()
        self._waiting.append(Request(session, prompt, tokens, done))
        self._schedule()

    def updated(self) -> None:
        """It has new weights: no cached prefix is of use."""
        self._advance()
        self._cache.clear()
        self._cached = 0
        self._schedule()

    def report(self) -> EngineReport:
        self._advance()
        used = self._kv() / self.costs.kv_tokens
        return EngineReport(
            self.batch, len(self._waiting), used, self.preemptions, self.sampled, self.queries, self.hits
        )

    def _kv(self) -> float:
        return self._kv_fixed + len(self._sampling) * self._steps

    def _step_seconds(self) -> float:
        seconds = self.costs.first + self.costs.each * len(self._sampling)
        if self._reading:
            seconds += self.costs.prompt * CHUNK
        return seconds

    def _advance(self) -> None:
        seconds, self._at = self._clock.now - self._at, self._clock.now
        if seconds <= 0 or not self.batch:
            return
        steps = seconds / self._step_seconds()
        self._steps += steps
        self.sampled += steps * len(self._sampling)
        if self._reading:
            self._reading[0].unread -= steps * CHUNK

    def _schedule(self) -> None:
        """Move requests on that are due, and look again when the next is."""
        self._settle()
        self._wake += 1
        if self.batch:
            steps = [math.inf]
            if self._ends:
                steps.append(self._ends[0][0] - self._steps)
            if self._reading:
                steps.append(self._reading[0].unread / CHUNK)
            if len(self._sampling) > 1:
                steps.append((self.costs.kv_tokens - self._kv()) / len(self._sampling))
            wake, wait = self._wake, max(0.0, min(steps)) * self._step_seconds() + 1e-9
            self._clock.at(self._clock.now + wait, lambda: self._woken(wake))

    def _woken(self, wake: int) -> None:
        if wake == self._wake:
            self._advance()
            self._schedule()

    def _settle(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, request = heapq.heappop(self._ends)
            if request in self._sampling and request.begun + request.left <= self._steps + 1e-6:
                self._leave(request)
                self._keep(request.session, int(request.context + request.left))
                self._clock.at(self._clock.now, request.done)
        while self._reading and self._reading[0].unread < 1.0:
            self._sample(self._reading.popleft())
        while self._kv() > self.costs.kv_tokens + 1e-6 and len(self._sampling) > 1:
            self._throw_out(next(reversed(self._sampling)))
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.batch < self.costs.batch_max:
            request = self._waiting[0]
            if self.batch and self._kv() + request.context > 0.99 * self.costs.kv_tokens:
                return
            self._waiting.popleft()
            known = min(self._cache.pop(request.session, 0), request.context)
            self._cached -= known
            self.queries += request.context
            self.hits += known
            request.unread = request.context - known
            self._kv_fixed += request.context
            self._evict()
            if request.unread < 1.0:
                self._sample(request)
            else:
                self._reading.append(request)

    def _sample(self, request: Request) -> None:
        request.begun = self._steps
        self._kv_fixed -= self._steps
        self._sampling[request] = None
        self._number += 1
        heapq.heappush(self._ends, (self._steps + request.left, self._number, request))

    def _leave(self, request: Request) -> None:
        del self._sampling[request]
        self._kv_fixed -= request.context - request.begun

    def _throw_out(self, request: Request) -> None:
        self.preemptions += 1
        self._leave(request)
        sampled = self._steps - request.begun
        request.context, request.left = int(request.context + sampled), request.left - sampled
        self._waiting.appendleft(request)

    def _keep(self, session: str, tokens: int) -> None:
        self._cached += tokens - self._cache.pop(session, 0)
        self._cache[session] = tokens
        self._evict()

    def _evict(self) -> None:
        while self._cache and self._kv() + self._cached > self.costs.kv_tokens:
            self._cached -= self._cache.popitem(last=False)[1]


class Rule(Protocol):
    """Places the requests of one actor."""

    def place(self, session: str, tokens: int, now: float) -> Lease | int: ...
    def ended(self, lease: Lease | int, sampled: int, now: float) -> None: ...
    def finished(self, session: str) -> None: ...
    def asks(self, engine: int) -> int:
        """Own requests at an engine that is asked for a report."""
        ...

    def reported(self, engine: int, report: EngineReport, own: int, asked_at: float) -> None: ...
    def updated(self, now: float) -> None: ...
    def prompts(self) -> tuple[float, float]:
        """Prompt tokens so far, and those of them that an engine was given before."""
        ...


class Fixed:
    """Rules that only count: ``hashing`` draws an engine for a conversation, ``sticky`` gives it the one with the
    fewest conversations, ``least`` gives each turn the one with the fewest requests."""

    def __init__(self, kind: str, engines: int, seed: int) -> None:
        self.kind, self._draw = kind, random.Random(seed)
        self._own: dict[str, int] = {}
        self._sessions, self._requests = [0] * engines, [0] * engines
        self.moves = 0

    def place(self, session: str, tokens: int, now: float) -> int:
        own = self._own.get(session)
        if own is None or self.kind == "least":
            counts = self._requests if self.kind == "least" else self._sessions
            least = [i for i, n in enumerate(counts) if n == min(counts)]
            chosen = self._draw.randrange(len(counts)) if self.kind == "hashing" else self._draw.choice(least)
            self.moves += own is not None and own != chosen
            if own is None:
                self._sessions[chosen] += 1
            own = self._own[session] = chosen
        self._requests[own] += 1
        return own

    def ended(self, lease: Lease | int, sampled: int, now: float) -> None:
        assert isinstance(lease, int)
        self._requests[lease] -= 1

    def finished(self, session: str) -> None:
        self._sessions[self._own.pop(session)] -= 1

    def asks(self, engine: int) -> int:
        return 0

    def reported(self, engine: int, report: EngineReport, own: int, asked_at: float) -> None:
        return

    def updated(self, now: float) -> None:
        return

    def prompts(self) -> tuple[float, float]:
        return 0.0, 0.0


class Informed(Fixed):
    """Sends each turn where it takes the least time, by what no router knows: the costs, caches and requests of the
    engines at this moment, and how much the turn will sample."""

    def __init__(self) -> None:
        super().__init__("informed", 0, 0)
        self.engines: Sequence[SimulatedEngine] = ()
        self.sampled = 0
        """Tokens of the turn that is placed next."""

    def place(self, session: str, tokens: int, now: float) -> int:
        times = [engine.seconds_of(session, tokens, self.sampled) for engine in self.engines]
        chosen = times.index(min(times))
        self.moves += self._own.setdefault(session, chosen) != chosen
        self._own[session] = chosen
        return chosen

    def ended(self, lease: Lease | int, sampled: int, now: float) -> None:
        return

    def finished(self, session: str) -> None:
        del self._own[session]


class Routed:
    """The product's router, with or without reports of the engines."""

    def __init__(self, engines: int, seed: int, *, reports: bool = True, shared: bool = False) -> None:
        names = [str(i) for i in range(engines)]
        self.router = Router(names, 1_000_000, random.Random(seed).random, shared=shared)
        self._reports, self._version = reports, 0
        for name in self.router.engines:
            self.router.probed(name, 0.0, healthy=True, version=0)

    @property
    def moves(self) -> int:
        return sum(self.router.moves.values())

    def place(self, session: str, tokens: int, now: float) -> Lease:
        lease = self.router.acquire(session, self._version, now, tokens=tokens)
        assert lease is not None
        return lease

    def ended(self, lease: Lease | int, sampled: int, now: float) -> None:
        assert isinstance(lease, Lease)
        self.router.answered(lease, now)
        self.router.sampled(sampled)
        self.router.release(lease)

    def finished(self, session: str) -> None:
        self.router.finish(session)

    def asks(self, engine: int) -> int:
        return self.router.engines[str(engine)].in_flight

    def reported(self, engine: int, report: EngineReport, own: int, asked_at: float) -> None:
        if self._reports:
            self.router.engines[str(engine)].load.reported(report, own, asked_at)

    def prompts(self) -> tuple[float, float]:
        return self.router.prompt_tokens, self.router.known_tokens

    def updated(self, now: float) -> None:
        self._version += 1
        for name in self.router.engines:
            self.router.stamped(name, self._version, now)


@dataclass(slots=True)
class Result:
    """Times of groups in seconds, from the first rollout that began to the last that ended."""

    groups: list[float] = field(default_factory=list)
    rollouts: list[float] = field(default_factory=list)
    """Times of single rollouts, in seconds."""
    seconds: float = 0.0
    """Of everything."""
    moves: int = 0
    turns: int = 0
    hits: float = 0.0
    """Share of prompt tokens found in caches."""
    preemptions: int = 0
    concurrency: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.groups) / len(self.groups)

    def quantile(self, share: float) -> float:
        return sorted(self.groups)[min(len(self.groups) - 1, int(share * len(self.groups)))]


class Simulation:
    """Actors play groups of conversations, ``concurrency`` at a time together, in the order of the groups."""

    def __init__(
        self,
        groups: Sequence[Sequence[Conversation]],
        costs: Sequence[Costs],
        rules: Sequence[Rule],
        *,
        concurrency: int,
        concurrency_min: int | None = None,
        update_seconds: float = math.inf,
        seed: int = 0,
    ) -> None:
        self.clock = Clock()
        self.engines = [SimulatedEngine(str(i), self.clock, each) for i, each in enumerate(costs)]
        self.rules = rules
        most = concurrency // len(rules)
        least = most if concurrency_min is None else concurrency_min // len(rules)
        self._limits = [ConcurrencyLimit(least, most) for _ in rules]
        self._playing, self._ended = [0] * len(rules), [0] * len(rules)
        self._queue = deque((g, r) for g, group in enumerate(groups) for r in range(len(group)))
        self._groups = groups
        self._begun: dict[int, float] = {}
        self._open = {g: len(group) for g, group in enumerate(groups)}
        self._update_seconds = update_seconds
        self._draw = random.Random(seed)
        self._reports: list[dict[int, EngineReport]] = [{} for _ in rules]
        self.result = Result()

    def run(self) -> Result:
        for actor in range(len(self.rules)):
            for engine in range(len(self.engines)):
                self.clock.at(self._draw.random() * REPORT_SECONDS, partial(self._ask, actor, engine))
            self.clock.at(LOOK_SECONDS * (1 + self._draw.random()), partial(self._look, actor))
        if self._update_seconds < math.inf:
            self.clock.at(self._update_seconds, self._update)
        self._fill()
        self.clock.run(lambda: not self._open)
        result = self.result
        result.seconds = self.clock.now
        result.moves = sum(rule.moves for rule in self.rules)  # type: ignore[attr-defined]
        result.hits = sum(e.hits for e in self.engines) / max(1, sum(e.queries for e in self.engines))
        result.preemptions = sum(e.preemptions for e in self.engines)
        return result

    def _fill(self) -> None:
        """As the stage does: the actor with the most free slots gets the next rollout."""
        while self._queue:
            free = [limit.value - playing for limit, playing in zip(self._limits, self._playing, strict=True)]
            actor = free.index(max(free))
            if free[actor] <= 0:
                return
            group, rollout = self._queue.popleft()
            self._begun.setdefault(group, self.clock.now)
            self._playing[actor] += 1
            self._turn(actor, group, rollout, 0, 0, self.clock.now)

    def _turn(self, actor: int, group: int, rollout: int, number: int, known: int, begun: float) -> None:
        conversation, session, rule = self._groups[group][rollout], f"{group}.{rollout}", self.rules[actor]
        if number == len(conversation):
            rule.finished(session)
            self._playing[actor] -= 1
            self._ended[actor] += 1
            self._open[group] -= 1
            self.result.rollouts.append(self.clock.now - begun)
            if not self._open[group]:
                del self._open[group]
                self.result.groups.append(self.clock.now - self._begun[group])
            self._fill()
            return
        turn = conversation[number]
        prompt = known + turn.prompt
        if isinstance(rule, Informed):
            rule.engines, rule.sampled = self.engines, turn.sampled
        lease = rule.place(session, prompt, self.clock.now)
        self.result.turns += 1

        def done() -> None:
            rule.ended(lease, turn.sampled, self.clock.now)
            self.clock.at(
                self.clock.now + turn.seconds,
                lambda: self._turn(actor, group, rollout, number + 1, prompt + turn.sampled, begun),
            )

        engine = lease if isinstance(lease, int) else int(lease.engine)
        self.engines[engine].submit(session, prompt, turn.sampled, done)

    def _ask(self, actor: int, engine: int) -> None:
        own, now, report = self.rules[actor].asks(engine), self.clock.now, self.engines[engine].report()
        self.clock.at(now + READ_SECONDS, lambda: self.rules[actor].reported(engine, report, own, now))
        self._reports[actor][engine] = report
        self.clock.at(now + REPORT_SECONDS, lambda: self._ask(actor, engine))

    def _look(self, actor: int) -> None:
        limit = self._limits[actor]
        counts = (self._playing[actor], self._ended[actor], *self.rules[actor].prompts())
        self.result.concurrency.append(limit.observe(list(self._reports[actor].values()), *counts))
        self._fill()
        self.clock.at(self.clock.now + LOOK_SECONDS, lambda: self._look(actor))

    def _update(self) -> None:
        for engine in self.engines:
            engine.updated()
        for rule in self.rules:
            rule.updated(self.clock.now)
        self.clock.at(self.clock.now + self._update_seconds, self._update)
