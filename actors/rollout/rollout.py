"""One order becomes one trajectory.

*Consumes* an :class:`Order`; *produces* exactly one :class:`Trajectory`, unless it is cancelled: then the caller may
ask for the trajectory as far as it got (:meth:`Rollout.aborted`). *Waits* for engines and for the environment, both
under a timeout.

How it ends:

=============  ================================================================================================
COMPLETE       the environment or the agent loop ended the episode
TRUNCATED      a limit on turns, tokens, context or time, after at least one turn that was answered
ERROR          something failed, or a limit was reached before the first answered turn: nothing can be scored
ABORTED        the caller ended it
=============  ================================================================================================

The agent loop (:mod:`actors.rollout.agent_loop`) decides what happens between completions: the environment answers,
tools do, or an agent program continues. Every turn of a COMPLETE or TRUNCATED trajectory was answered: a completion
that a time limit separated from its answer is dropped and its tokens are counted as discarded.
``rewards["environment"]`` is the undiscounted sum of the rewards of all turns; ``reward`` stays None until the
trajectory is scored, and an ERROR has neither.

:class:`RecordedDialogue` is the conversation of a turn-by-turn rollout: its prompts, limits and counterfactual prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio

from actors.engine.base import Completion
from actors.environments.base import Episode, Reply
from actors.environments.host import EnvironmentHost
from actors.rendering.offload import rendered
from actors.rendering.renderer import Conversation
from actors.rollout.agent_loop import (
    AGENT_LOOP,
    AgentEpisode,
    Answer,
    Budget,
    Game,
    Limit,
    MultiTurn,
    Opening,
    checked_history,
    wrong,
)
from actors.rollout.counterfactual import CounterfactualPrompt, counterfactual_of
from actors.rollout.lessons import LessonClient, LessonPrompt
from actors.rollout.recorder import BranchTip, PendingCall, Recorder
from actors.rollout.sampling import Policy
from actors.rollout.services import Services
from pipeline.config.rollouts import LoopConfig
from pipeline.errors import (
    DETAILS_CHARACTERS_MAX,
    WORDS_CHARACTERS_MAX,
    AfterplayError,
    ConfigurationError,
    EngineError,
    EngineUnavailable,
    EpisodeLimit,
    PlugInError,
    boundary,
    bounded,
    traceback_of,
)
from pipeline.runtime.plugin_limits import TaskOwner, kept_running
from pipeline.schema import EngineRecord, Failure, Message, Order, PromptLessons, Timings, Trajectory, TrajectoryStatus

log = logging.getLogger(__name__)

CLOSE_SECONDS_MAX = 6.0


class RecordedDialogue:
    """:class:`actors.rollout.agent_loop.Dialogue` of one order. ``stage`` finds lessons at the replay stage."""

    def __init__(
        self,
        order: Order,
        services: Services,
        host: EnvironmentHost,
        policy: Policy,
        recorder: Recorder,
        hint: str | None,
        stage: LessonClient | None,
    ) -> None:
        self.policy = policy
        self.recorder = recorder
        self.seconds = 0.0
        """Between a reply and its answer."""
        self._order = order
        self._services = services
        self._hint = hint
        self._stage = stage
        self._budget = Budget(
            host.config.max_turns, host.config.max_tokens, policy.context_max, policy.sampling.max_tokens
        )
        self._memory: LessonPrompt | None = None
        self._hinted: CounterfactualPrompt | None = None
        self._tip: BranchTip | None = None
        self._replied_at = 0.0

    async def begin(self, opening: Opening) -> Reply:
        """The reply to the first prompt, which has lessons in it where there are any for this rollout."""
        return await self._reply(self.recorder.begin(await self._first_prompt(opening)))

    def judge(self, answer: Answer) -> None:
        """Reward the last reply."""
        self.seconds += time.perf_counter() - self._replied_at
        self.recorder.judge(answer.reward, answer.signals)

    async def go_on(self, answer: Answer, rewrite: Callable[[Sequence[Message], int], Sequence[Message]]) -> Reply:
        """The reply to ``answer``. Raises :class:`EpisodeLimit`."""
        if answer.limit is not None or self._budget.turns >= self._budget.turns_max:
            raise EpisodeLimit(answer.limit or Limit.TURNS)
        return await self._reply(await self._next_call(answer, rewrite))

    def prompt_lessons(self) -> PromptLessons | None:
        """The lessons that were in the prompt; None without any."""
        return None if self._memory is None else self._memory.prompt_lessons(self.recorder.n_turns)

    def hinted_contexts(self) -> dict[int, tuple[int, ...]]:
        """None of them where the episode with the hint is longer than the model takes."""
        if self._hinted is None or self._hinted.longest > self.policy.context_max:
            return {}
        return self._hinted.first(self.recorder.n_turns)

    async def _first_prompt(self, opening: Opening) -> Conversation:
        services, order = self._services, self._order
        if services.lesson_prompter is not None and not order.evaluation:
            context_max = min(self.policy.context_max, self._budget.tokens_max)
            with kept_running():
                self._memory = await services.lesson_prompter.prompt_for(
                    order, opening.messages, context_max, self._stage, opening.tools
                )
        if self._memory is not None:
            return self._memory.conversation
        plain = order.greedy or order.evaluation
        if services.hint_template is not None and self._hint is not None and not plain:
            self._hinted = counterfactual_of(
                services.renderer, opening.messages, self._hint, services.hint_template, opening.tools
            )
        return await rendered(
            sum(len(message.content) for message in opening.messages),
            partial(services.renderer.start, opening.messages, opening.tools),
        )

    async def _reply(self, call: PendingCall) -> Reply:
        room = self._budget.room(len(call.prompt_ids), len(call.added_ids))
        if isinstance(room, Limit):
            raise EpisodeLimit(room)
        completion: Completion = await self.policy.complete(
            call.prompt_ids, room, (), call.conversation, len(call.added_ids)
        )
        generation = completion.generation
        self._budget.spend(len(call.added_ids), len(generation.token_ids))
        completed = self.recorder.renderer.completed(generation.token_ids.tolist())
        self._tip = self.recorder.finish(call, generation, completed, self.policy.sampling.temperature)
        for prompt in self._counterfactuals:
            prompt.sampled(len(generation.token_ids))
        self._replied_at = time.perf_counter()
        return Reply(completed.text, generation.finish_reason)

    async def _next_call(
        self, answer: Answer, rewrite: Callable[[Sequence[Message], int], Sequence[Message]]
    ) -> PendingCall:
        """Begin the next call, in a new branch where the template or the loop changed what came before."""
        tip, recorder, new = self._tip, self.recorder, tuple(answer.messages)
        assert tip is not None and tip.call.conversation is not None
        before = tip.call.conversation

        def extend(conversation: Conversation) -> Conversation:
            return recorder.next_prompt(conversation, tip, new, answer.parsed_reply)

        def rewritten(conversation: Conversation) -> Conversation:
            history = checked_history(rewrite(extend(conversation).messages, n_tokens))
            return recorder.renderer.restart(conversation, history)

        n_characters = len(before.text) + sum(len(message.content) for message in new)
        advance, after = extend, await rendered(n_characters, partial(extend, before))
        n_tokens = len(after.prompt_ids)
        if checked_history(rewrite(after.messages, n_tokens)) != after.messages:
            advance, after = rewritten, rewritten(before)
        for prompt in self._counterfactuals:
            prompt.follow(advance, after, recorder.n_turns, tip.completion_ids, after.branch != before.branch)
        return recorder.begin(after, tip, new)

    @property
    def _counterfactuals(self) -> list[CounterfactualPrompt]:
        """The conversations that are followed beside the real one."""
        plain = self._memory.plain if self._memory is not None and not self._memory.keep else None
        return [prompt for prompt in (plain, self._hinted) if prompt is not None]


def classified(error: Exception) -> Failure:
    """The failure of an error: its boundary, a bounded message with the line of the user's code, and traceback."""
    if isinstance(error, PlugInError):
        message = bounded(error.message, WORDS_CHARACTERS_MAX) + (f" ({error.line})" if error.line else "")
        return Failure(error.boundary, error.kind, message, bounded(error.details, DETAILS_CHARACTERS_MAX))
    kind, message = type(error).__name__, bounded(str(error), WORDS_CHARACTERS_MAX)
    if isinstance(error, EngineError):
        return Failure("engine", kind, message)
    if isinstance(error, ConfigurationError):
        return Failure("actor", kind, message)
    return Failure(AGENT_LOOP, kind, message, "" if isinstance(error, EpisodeLimit) else traceback_of(error))


class Rollout:
    """One rollout of one order. ``await run()`` once. ``stage`` finds lessons at the replay stage that ordered it."""

    def __init__(self, order: Order, services: Services, stage: LessonClient | None = None) -> None:
        self.order = order
        self._services = services
        self._stage = stage
        self._host = services.environments.get(order.task.environment)
        loop = LoopConfig() if self._host is None else self._host.config.loop
        self._policy = services.policy(order)
        self._recorder = Recorder(
            services.renderer, append=loop.history == "append", mask_summaries=loop.summaries == "mask"
        )
        self._dialogue: RecordedDialogue | None = None
        self._started_at = services.now()
        self._start_seconds = 0.0
        self._tasks = TaskOwner()

    async def run(self) -> Trajectory:
        """The trajectory, whatever happens but cancellation."""
        try:
            return await self._limited_by_time()
        except Exception as error:
            if not isinstance(error, AfterplayError):
                log.exception("order %s failed in the agent loop", self.order.order_id)
            return self._finished(TrajectoryStatus.ERROR, classified(error))
        finally:
            self._services.pool.finish(self.order.order_id)

    def aborted(self, reason: str) -> Trajectory:
        """The trajectory as far as it came before the caller cancelled :meth:`run`."""
        return self._finished(TrajectoryStatus.ABORTED, Failure("actor", "Aborted", reason))

    async def _limited_by_time(self) -> Trajectory:
        host = self._host
        if host is None:
            raise ConfigurationError(
                f"expected a task of one of the environments {sorted(self._services.environments)}, got one of "
                f"{self.order.task.environment!r}: every role must read the same run file"
            )
        seconds_max = min(host.config.max_seconds, self.order.seconds_max)
        with self._services.pool.patience.limit(seconds_max):
            try:
                started = time.perf_counter()
                with self._tasks.owning():
                    episode = await host.start(self.order.task)
                self._start_seconds = time.perf_counter() - started
                return await self._with_agent(host, episode)
            finally:
                if leaked := self._tasks.cancel():
                    self._services.metrics.leaked_tasks_total.labels(env=host.section).inc(leaked)
                    words = "environment %s: an episode left %d tasks running; they were cancelled"
                    log.warning(words, host.section, leaked)
        reason = self._policy.reason() if self._policy.asking else ""
        if reason:
            raise EngineUnavailable(f"the episode's {seconds_max:g} s ended while it waited for {reason}")
        return self._truncated(Limit.SECONDS)

    async def _with_agent(self, host: EnvironmentHost, episode: Episode) -> Trajectory:
        services, order = self._services, self.order
        game = Game(order.order_id, order.task, host, episode, services.metrics, self._tasks)
        agent: AgentEpisode | None = None
        try:
            with self._agent_loop():
                agent = (services.loops.get(host.section) or MultiTurn()).begin(game)
                if not isinstance(agent, AgentEpisode):
                    raise wrong("begin() to return an AgentEpisode", agent)
                hint = getattr(episode, "hint", None)
                self._dialogue = RecordedDialogue(
                    order, services, host, self._policy, self._recorder, hint, self._stage
                )
                status = await agent.run(self._dialogue)
        except EpisodeLimit as limit:
            return self._truncated(limit)
        finally:
            if isinstance(agent, AgentEpisode):
                with anyio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                    try:
                        with self._agent_loop():
                            await agent.close()
                    except Exception:  # the rollout is over, and its result stands
                        log.exception("order %s: the agent loop failed to close", order.order_id)
            with anyio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                await game.close()
        if not self._recorder.n_turns:
            raise EpisodeLimit("the episode ended before a first turn")
        return self._finished(status)

    @contextmanager
    def _agent_loop(self) -> Iterator[None]:
        """Around every call of the agent loop."""
        with self._tasks.owning(), boundary(AGENT_LOOP):
            yield

    def _truncated(self, limit: object) -> Trajectory:
        """TRUNCATED after what was judged; without that there is nothing to score."""
        left, discarded = self._recorder.drop_unjudged()
        self._services.metrics.tokens_total.labels(kind="discarded").inc(discarded)
        if not left:
            raise EpisodeLimit(f"the limit {limit} was reached before a first turn was answered")
        return self._finished(TrajectoryStatus.TRUNCATED)

    def _finished(self, status: TrajectoryStatus, failure: Failure | None = None) -> Trajectory:
        services, dialogue, policy = self._services, self._dialogue, self._policy
        environment_seconds = self._start_seconds + (dialogue.seconds if dialogue is not None else 0.0)
        return Trajectory(
            trajectory_id=self.order.order_id,
            group_id=self.order.group_id,
            task=self.order.task,
            turns=self._recorder.turns(),
            status=status,
            failure=failure,
            rewards={} if failure is not None else {"environment": self._recorder.score},
            actor_id=services.actor_id,
            engine=EngineRecord(services.backend, services.model, tuple(policy.engines)),
            timings=Timings(
                self._started_at, services.now(), policy.seconds, environment_seconds, tuple(policy.requests)
            ),
            lessons=dialogue.prompt_lessons() if dialogue is not None else None,
            hinted_contexts=dialogue.hinted_contexts() if dialogue is not None else {},
        )
