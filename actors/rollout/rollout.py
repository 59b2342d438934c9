"""The agent loop: one order becomes one trajectory.

*Consumes* an :class:`Order`; *produces* exactly one :class:`Trajectory`, unless it is cancelled: then the caller may
ask for the trajectory as far as it got (:meth:`Rollout.aborted`). *Waits* for engines and for the environment, both
under a timeout.

How it ends:

=============  ================================================================================================
COMPLETE       the environment (or the agent loop) said done
TRUNCATED      a limit on turns, tokens, context or time, after at least one turn that was answered
ERROR          anything failed, or a limit came before the first answered turn: there is nothing to score
ABORTED        the caller ended it
=============  ================================================================================================

What is said between completions is the agent loop's matter (:mod:`actors.rollout.agent_loop`): the environment's
answer, the answers of tools, or both. Every turn of a COMPLETE or TRUNCATED trajectory was answered: a completion
that a time limit cut off from its answer is dropped and its tokens are counted as discarded.
``rewards["environment"]`` is the undiscounted sum of the rewards of all turns; ``reward`` stays None until the scorer
has spoken, and an ERROR has neither.

What is kept of an error that ended a play. Pure.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import anyio

from actors.engine.base import Completion
from actors.environments.base import Episode, Reply
from actors.environments.host import EnvironmentHost
from actors.rendering.renderer import Completed, Conversation
from actors.rollout.agent_loop import (
    AGENT_LOOP,
    AgentEpisode,
    Answer,
    Budget,
    DrivenEpisode,
    Limit,
    Opening,
    checked_answer,
    checked_history,
    checked_opening,
    wrong,
)
from actors.rollout.counterfactual import CounterfactualPrompt, counterfactual_of
from actors.rollout.generate import complete, greedily
from actors.rollout.memory_prompt import MemoryPrompt, MemorySource
from actors.rollout.multi_turn import HostedGame, MultiTurn
from actors.rollout.services import Services
from pipeline.errors import (
    AfterplayError,
    ConfigurationError,
    EngineError,
    EngineUnavailable,
    EpisodeLimit,
    PlugInError,
    boundary,
)
from pipeline.runtime.plugin_guard import TaskOwner
from pipeline.schema import (
    EngineRecord,
    Failure,
    Message,
    Order,
    Timings,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
    Turn,
)

MESSAGE_MAX = 4_000
DETAILS_MAX = 20_000
"""Characters of what a plug-in raised, and of its traceback, that a trajectory keeps."""


def classified(error: Exception) -> Failure:
    """Which boundary an error belongs to, with a bounded message and traceback."""
    if isinstance(error, PlugInError):
        return Failure(error.boundary, error.kind, _bounded(error.message, MESSAGE_MAX), _bounded(error.details))
    kind, message = type(error).__name__, _bounded(str(error), MESSAGE_MAX)
    if isinstance(error, EngineError):
        return Failure("engine", kind, message)
    if isinstance(error, ConfigurationError):
        return Failure("actor", kind, message)
    details = "" if isinstance(error, EpisodeLimit) else "".join(traceback.format_exception(error))
    return Failure(AGENT_LOOP, kind, message, _bounded(details))


def _bounded(text: str, characters_max: int = DETAILS_MAX) -> str:
    """Its beginning and its end, where it is longer."""
    if len(text) <= characters_max:
        return text
    half = characters_max // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


logger = logging.getLogger(__name__)

CLOSE_SECONDS_MAX = 6.0


class Rollout:
    """One play of one order. ``await play()`` once. ``stage`` finds lessons at the replay stage that ordered it."""

    def __init__(self, order: Order, services: Services, stage: MemorySource | None = None) -> None:
        self.order = order
        self._services = services
        self._stage = stage
        self._guided: MemoryPrompt | None = None
        self._hinted: CounterfactualPrompt | None = None
        self._turns: list[Turn] = []
        self._judged = 0
        self._score: float | None = 0.0
        self._engines: list[str] = []
        self._version = order.policy_version
        self._started_at = services.now()
        self._generate_seconds = 0.0
        self._environment_seconds = 0.0
        self._asking_engine = False
        self._started = TaskOwner()

    async def play(self) -> Trajectory:
        """The trajectory, whatever happens but cancellation."""
        try:
            return await self._limited_by_time()
        except Exception as error:
            if not isinstance(error, AfterplayError):
                logger.exception("order %s failed in the agent loop", self.order.order_id)
            return self._finished(TrajectoryStatus.ERROR, classified(error))
        finally:
            self._services.pool.finish(self.order.order_id)

    def aborted(self, reason: str) -> Trajectory:
        """What was played until the caller cancelled :meth:`play`."""
        return self._finished(TrajectoryStatus.ABORTED, Failure("actor", "Aborted", reason))

    async def _limited_by_time(self) -> Trajectory:
        host = self._services.environments.get(self.order.task.environment)
        if host is None:
            raise ConfigurationError(
                f"expected a task of one of the environments {sorted(self._services.environments)}, got one of "
                f"{self.order.task.environment!r}: every role must read the same run file"
            )
        seconds_max = min(host.config.max_seconds, self.order.seconds_max)
        with self._services.pool.patience.limit(seconds_max):
            return await self._with_episode(host)
        trouble = self._services.pool.trouble(self._version) if self._asking_engine else ""
        if trouble:
            raise EngineUnavailable(f"the episode's {seconds_max:g} s ended while it waited for {trouble}")
        return self._limited(Limit.SECONDS)

    async def _with_episode(self, host: EnvironmentHost) -> Trajectory:
        try:
            started = time.perf_counter()
            with self._started.owning():
                episode = await host.start(self.order.task)
            self._environment_seconds += time.perf_counter() - started
            return await self._with_agent(host, episode)
        finally:
            self._end_tasks(host.section)

    def _end_tasks(self, section: str) -> None:
        """What the plug-ins of this episode left running."""
        leaked = self._started.cancel()
        if leaked:
            self._services.metrics.leaked_tasks_total.labels(env=section).inc(leaked)
            logger.warning("environment %s: an episode left %d tasks running; they were cancelled", section, leaked)

    async def _with_agent(self, host: EnvironmentHost, episode: Episode) -> Trajectory:
        loop = self._services.loops.get(host.section) or MultiTurn()
        game = HostedGame(self.order.order_id, self.order.task, host, episode, self._services.metrics, self._started)
        agent: AgentEpisode | DrivenEpisode | None = None
        try:
            with self._agent_loop():
                agent = loop.begin(game)
            if isinstance(agent, DrivenEpisode):
                return await self._driven(agent)
            if not isinstance(agent, AgentEpisode):
                raise wrong("begin() to return an AgentEpisode", agent)
            with self._agent_loop():
                opening = checked_opening(await agent.start())
            return await self._turn_by_turn(host, agent, opening)
        finally:
            if agent is not None:
                await self._close_agent(agent)
            with anyio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                await game.close()

    @contextmanager
    def _agent_loop(self) -> Iterator[None]:
        """Around every call of the agent loop."""
        with self._started.owning(), boundary(AGENT_LOOP):
            yield

    async def _driven(self, agent: DrivenEpisode) -> Trajectory:
        """The episode asks for its completions itself, and says how it ended."""
        try:
            with self._agent_loop():
                outcome = await agent.drive(_Policy(self))
        finally:
            self._turns = list(agent.turns())
        if not self._turns:
            raise EpisodeLimit("the episode ended before a first turn")
        self._score = outcome.score
        return self._finished(outcome.status)

    async def _close_agent(self, agent: AgentEpisode | DrivenEpisode) -> None:
        """A failure here is logged: the play is over, and its result stands."""
        with anyio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
            try:
                with self._agent_loop():
                    await agent.close()
            except Exception:
                logger.exception("order %s: the agent loop failed to close", self.order.order_id)

    async def _turn_by_turn(self, host: EnvironmentHost, agent: AgentEpisode, opening: Opening) -> Trajectory:
        services, renderer = self._services, self._services.renderer
        budget = Budget(
            host.config.max_turns, host.config.max_tokens, services.model_length_max, services.sampling.max_tokens
        )
        conversation = await self._start(host, agent, opening)
        added = conversation.messages
        while True:
            room = budget.room(len(conversation.prompt_ids), len(conversation.added_ids))
            if isinstance(room, Limit):
                return self._limited(room)
            completion = await self._complete(conversation.prompt_ids, room)
            budget.spend(len(conversation.added_ids), len(completion.generation.token_ids))
            ids = completion.generation.token_ids.tolist()
            said = renderer.completed(ids)
            self._turns.append(self._turn(conversation, added, completion, said))
            for shadow in self._shadows:
                shadow.sampled(len(ids))
            answer = await self._answer(agent, Reply(said.text, completion.generation.finish_reason))
            if answer.done:
                return self._finished(TrajectoryStatus.COMPLETE)
            if answer.limit is not None or budget.turns >= budget.turns_max:
                return self._limited(answer.limit or Limit.TURNS)
            added = tuple(answer.messages)
            forked_from = conversation.branch
            conversation = self._go_on(host, agent, conversation, ids, said, answer)
            if conversation.branch != forked_from:
                added = conversation.messages

    async def _answer(self, agent: AgentEpisode, reply: Reply) -> Answer:
        started = time.perf_counter()
        with self._agent_loop():
            answer = checked_answer(await agent.answer(reply))
        self._environment_seconds += time.perf_counter() - started
        self._turns[-1] = replace(self._turns[-1], signals=answer.signals, reward=answer.reward)
        self._judged = len(self._turns)
        self._score = (self._score or 0.0) + answer.reward
        return answer

    def _go_on(
        self,
        host: EnvironmentHost,
        agent: AgentEpisode,
        conversation: Conversation,
        ids: list[int],
        said: Completed,
        answer: Answer,
    ) -> Conversation:
        """The next prompt, in a new branch where the template or the loop changed what came before."""
        renderer, new = self._services.renderer, tuple(answer.messages)
        append = host.config.loop.history == "append"

        def extend(before: Conversation) -> Conversation:
            return renderer.extend(before, ids, said, new, said=answer.said, append=append)

        def rewritten(before: Conversation) -> Conversation:
            with self._agent_loop():
                history = checked_history(agent.rewrite(extend(before).messages, n_tokens))
            return renderer.restart(before, history)

        advance = extend
        played = extend(conversation)
        n_tokens = len(played.prompt_ids)
        with self._agent_loop():
            if checked_history(agent.rewrite(played.messages, n_tokens)) != played.messages:
                advance = rewritten
        if advance is rewritten:
            played = rewritten(conversation)
        forked = played.branch != conversation.branch
        for shadow in self._shadows:
            shadow.follow(advance, played, len(self._turns), ids, forked)
        return played

    @property
    def _shadows(self) -> list[CounterfactualPrompt]:
        """The conversations that are followed beside the one that is played."""
        plain = self._guided.plain if self._guided is not None and not self._guided.keep else None
        return [shadow for shadow in (plain, self._hinted) if shadow is not None]

    async def _start(self, host: EnvironmentHost, agent: AgentEpisode, opening: Opening) -> Conversation:
        """The first prompt, with lessons where there are any for this rollout."""
        services = self._services
        if services.guide is not None and not self.order.evaluation:
            context_max = min(services.model_length_max, host.config.max_tokens)
            self._guided = await services.guide.guide(
                self.order, opening.messages, context_max, self._stage, opening.tools
            )
        if self._guided is not None:
            return self._guided.conversation
        hint = getattr(agent.game.episode, "hint", None)
        plain = self.order.greedy or self.order.evaluation
        if services.hint_template is not None and hint is not None and not plain:
            self._hinted = counterfactual_of(
                services.renderer, opening.messages, hint, services.hint_template, opening.tools
            )
        return services.renderer.start(opening.messages, opening.tools)

    async def _complete(self, prompt_ids: Sequence[int], tokens_max: int, stop: Sequence[str] = ()) -> Completion:
        self._asking_engine = True
        completion = await complete(
            self._services,
            self.order.order_id,
            prompt_ids,
            tokens_max,
            self._version,
            greedy=self.order.greedy,
            temperature=self.order.temperature,
            stop=stop,
        )
        self._asking_engine = False
        self._version = max(self._version, completion.generation.version_spans[-1].policy_version)
        self._generate_seconds += completion.seconds
        if completion.engine not in self._engines[-1:]:
            self._engines.append(completion.engine)
        return completion

    def _turn(
        self, conversation: Conversation, added: tuple[Message, ...], completion: Completion, said: Completed
    ) -> Turn:
        generation = completion.generation
        return Turn(
            context=TokenSpan.context(conversation.added_ids),
            completion=generation.as_span(),
            context_messages=added,
            completion_message=Message("assistant", said.text),
            finish_reason=generation.finish_reason,
            temperature=self._temperature,
            branch=conversation.branch,
        )

    @property
    def _temperature(self) -> float:
        if self.order.greedy:
            return 0.0
        own = self.order.temperature
        return self._services.sampling.temperature if own is None else own

    def _limited(self, limit: Limit) -> Trajectory:
        """TRUNCATED after what was judged; without that there is nothing to score."""
        unjudged = self._turns[self._judged :]
        self._services.metrics.tokens_total.labels(kind="discarded").inc(sum(len(t.completion) for t in unjudged))
        if self._judged == 0:
            raise EpisodeLimit(f"the limit {limit.value} was reached before a first turn was answered")
        del self._turns[self._judged :]
        return self._finished(TrajectoryStatus.TRUNCATED)

    def _finished(self, status: TrajectoryStatus, failure: Failure | None = None) -> Trajectory:
        return Trajectory(
            trajectory_id=self.order.order_id,
            group_id=self.order.group_id,
            task=self.order.task,
            turns=tuple(self._turns),
            status=status,
            failure=failure,
            rewards={} if failure is not None else {"environment": self._score},
            actor_id=self._services.actor_id,
            engine=EngineRecord(self._services.backend, self._services.model, tuple(self._engines)),
            timings=Timings(self._started_at, self._services.now(), self._generate_seconds, self._environment_seconds),
            guidance=self._guided.guidance(len(self._turns)) if self._guided is not None else None,
            hinted_contexts=self._hinted_contexts(),
        )

    def _hinted_contexts(self) -> dict[int, tuple[int, ...]]:
        """None of them where the episode with the hint is longer than the model takes."""
        if self._hinted is None or self._hinted.longest > self._services.model_length_max:
            return {}
        return self._hinted.first(len(self._turns))


class _Policy:
    """:class:`actors.rollout.agent_loop.Policy` of one rollout."""

    def __init__(self, rollout: Rollout) -> None:
        services, order = rollout._services, rollout.order
        self._rollout = rollout
        self.sampling = replace(
            greedily(services.sampling) if order.greedy else services.sampling, temperature=rollout._temperature
        )
        self.differs = order.greedy or order.temperature is not None
        self.model = services.model
        self.context_max = services.model_length_max

    def trouble(self) -> str:
        return self._rollout._services.pool.trouble(self._rollout._version)

    async def complete(self, prompt_ids: Sequence[int], tokens_max: int, stop: Sequence[str] = ()) -> Completion:
        return await self._rollout._complete(prompt_ids, tokens_max, stop)
