"""Scoring passes over an update's rows before its first optimizer step: those that estimator and loss need.

Dimensions: S sampled tokens of the update, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from learner.advantages.registry import needed_scores as needed_by_estimator
from learner.data.microbatch import MicroBatch
from learner.data.rows import Row, TokenArray, TokenScores
from learner.losses.kl import kl_penalty
from learner.losses.registry import needed_scores as needed_by_loss
from learner.observability.report import Stopwatch
from learner.policy.passes import token_pass
from learner.policy.policy import Policy
from learner.policy.reference import Reference
from learner.training.critic import Critic
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError


def needed_scores(config: RunConfig) -> frozenset[str]:
    """Scores that estimator and loss read: names of fields of :class:`TokenScores`."""
    return needed_by_estimator(config.advantage) | needed_by_loss(config.loss, config.importance)


class ScoringPasses:
    """Scores rows with policy, reference policy and critic; changes none of them."""

    def __init__(self, policy: Policy, config: RunConfig, reference: Reference | None, critic: Critic | None) -> None:
        self._policy = policy
        self._config = config
        self._reference = reference
        self._critic = critic

    def token_scores(self, rows: Sequence[Row], watch: Stopwatch) -> TokenScores:
        """Scores that the configured estimator and loss need. log π and entropy come from the same pass, values too
        where the critic reads the policy's hidden states.

        Raises :class:`ConfigurationError` where a reference policy or a critic is asked for and there is none.
        """
        with self._policy.ranks.together("gather", rows):
            return self._token_scores(rows, watch)

    def logprobs_and_entropies(self, rows: Sequence[Row], watch: Stopwatch) -> tuple[TokenArray, TokenArray]:
        """log π and entropy of all sampled tokens of ``rows`` with the current weights, float32 ``[S]`` each."""
        policy, budget = self._policy, self._config.learner.tokens_per_microbatch
        with policy.ranks.together("score", rows):
            logprobs, entropies = token_pass(rows, policy.score, 2, budget, watch, policy.form, policy.ranks)
        return logprobs, entropies

    def mean_entropies(self, rows: Sequence[Row], watch: Stopwatch) -> dict[int, float]:
        """Exact entropy with the current weights, nats, mean over the sampled tokens of each ``Row.trajectory_index``;
        not finite where a token's is not."""
        entropies = self.logprobs_and_entropies(rows, watch)[1].astype(np.float64)
        indices = np.repeat([row.trajectory_index for row in rows], [row.n_sampled for row in rows])
        return {int(i): float(entropies[indices == i].mean()) for i in np.unique(indices)}

    def kl_penalties(self, scores: TokenScores, coefficient: float) -> TokenArray | None:
        """Penalties that ``loss.kl: reward`` takes off the rewards, float32 ``[S]``; None without."""
        loss = self._config.loss
        if loss.kl != "reward" or scores.logprobs is None or scores.reference is None:
            return None
        maximum, estimator = self._config.importance.log_ratio_max, loss.kl_estimator or "k1"
        penalties = kl_penalty(scores.logprobs, scores.reference, coefficient, estimator, maximum)
        return penalties.astype(np.float32)

    def _token_scores(self, rows: Sequence[Row], watch: Stopwatch) -> TokenScores:
        needed = needed_scores(self._config)
        logprobs = entropies = reference = values = None
        if "values" in needed and self._critic is None:
            raise ConfigurationError("the estimator needs values, and the trainer was given no critic")
        if needed & {"logprobs", "entropies"}:
            if self._critic is not None and not self._critic.owns and "values" in needed:
                logprobs, entropies, values = self._scores_and_values(rows, self._critic, watch)
            else:
                logprobs, entropies = self.logprobs_and_entropies(rows, watch)
        if "reference" in needed:
            if self._reference is None:
                raise ConfigurationError("estimator or loss need a reference policy, and the trainer was given none")
            reference = self._reference.logprobs(rows, watch)
        if "values" in needed and values is None and self._critic is not None:
            values = self._critic.values(rows, watch)
        return TokenScores(logprobs, entropies, reference, values)

    def _scores_and_values(
        self, rows: Sequence[Row], critic: Critic, watch: Stopwatch
    ) -> tuple[TokenArray, TokenArray, TokenArray]:
        """log π, entropy and value of all sampled tokens from one pass of the policy, float32 ``[S]`` each."""
        policy, budget = self._policy, self._config.learner.tokens_per_microbatch

        def score(part: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
            hidden_SH = policy.hidden(part)
            return *policy.score(part, hidden_SH), critic.of_hidden(hidden_SH)

        logprobs, entropies, values = token_pass(rows, score, 3, budget, watch, policy.form, policy.ranks)
        return logprobs, entropies, values
