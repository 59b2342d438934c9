"""The conversation of a turn-by-turn rollout: its prompts, limits and counterfactual prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from actors.engine.base import Completion
from actors.environments.base import Reply
from actors.environments.host import EnvironmentHost
from actors.rendering.renderer import Conversation
from actors.rollout.agent_loop import Answer, Budget, Limit, Opening, checked_history
from actors.rollout.counterfactual import CounterfactualPrompt, counterfactual_of
from actors.rollout.memory_prompt import MemoryPrompt, MemorySource
from actors.rollout.policy import Policy
from actors.rollout.recorder import BranchTip, PendingCall, Recorder
from actors.rollout.services import Services
from pipeline.errors import EpisodeLimit
from pipeline.runtime.plugin_guard import kept_running
from pipeline.schema import Guidance, Message, Order


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
        stage: MemorySource | None,
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
        self._memory: MemoryPrompt | None = None
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
        return await self._reply(self._next_call(answer, rewrite))

    def guidance(self) -> Guidance | None:
        """The lessons that were in the prompt; None without any."""
        return None if self._memory is None else self._memory.guidance(self.recorder.n_turns)

    def hinted_contexts(self) -> dict[int, tuple[int, ...]]:
        """None of them where the episode with the hint is longer than the model takes."""
        if self._hinted is None or self._hinted.longest > self.policy.context_max:
            return {}
        return self._hinted.first(self.recorder.n_turns)

    async def _first_prompt(self, opening: Opening) -> Conversation:
        services, order = self._services, self._order
        if services.memory_prompter is not None and not order.evaluation:
            context_max = min(self.policy.context_max, self._budget.tokens_max)
            with kept_running():
                self._memory = await services.memory_prompter.prompt_for(
                    order, opening.messages, context_max, self._stage, opening.tools
                )
        if self._memory is not None:
            return self._memory.conversation
        plain = order.greedy or order.evaluation
        if services.hint_template is not None and self._hint is not None and not plain:
            self._hinted = counterfactual_of(
                services.renderer, opening.messages, self._hint, services.hint_template, opening.tools
            )
        return services.renderer.start(opening.messages, opening.tools)

    async def _reply(self, call: PendingCall) -> Reply:
        room = self._budget.room(len(call.prompt_ids), len(call.added_ids))
        if isinstance(room, Limit):
            raise EpisodeLimit(room)
        completion: Completion = await self.policy.complete(call.prompt_ids, room, (), call.conversation)
        generation = completion.generation
        self._budget.spend(len(call.added_ids), len(generation.token_ids))
        completed = self.recorder.renderer.completed(generation.token_ids.tolist())
        self._tip = self.recorder.finish(call, generation, completed, self.policy.sampling.temperature)
        for prompt in self._counterfactuals:
            prompt.sampled(len(generation.token_ids))
        self._replied_at = time.perf_counter()
        return Reply(completed.text, generation.finish_reason)

    def _next_call(self, answer: Answer, rewrite: Callable[[Sequence[Message], int], Sequence[Message]]) -> PendingCall:
        """Begin the next call, in a new branch where the template or the loop changed what came before."""
        tip, recorder, new = self._tip, self.recorder, tuple(answer.messages)
        assert tip is not None and tip.call.conversation is not None
        before = tip.call.conversation

        def extend(conversation: Conversation) -> Conversation:
            return recorder.next_prompt(conversation, tip, new, answer.parsed_reply)

        def rewritten(conversation: Conversation) -> Conversation:
            history = checked_history(rewrite(extend(conversation).messages, n_tokens))
            return recorder.renderer.restart(conversation, history)

        advance, after = extend, extend(before)
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
