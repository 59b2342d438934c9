"""Preflight of what the learner is asked to compute: the options of losses and estimators, and functions of the user's
own.

The user's own loss, estimator and reward shaping are called with a small update, and the loss goes backward too, before
a run needs them for the first time. The update has two groups whose rewards differ. It finds what raises and what gives
another form, not whether the policy learns from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from learner.advantages.base import ScoredTrajectory, shaped
from learner.advantages.distill import Distill
from learner.advantages.estimate import COMPARING, OPTIONS, estimate, needed_scores
from learner.advantages.estimators import PassAtK
from learner.losses.options import CORRECTIONS, OFF_POLICIES, POLICIES
from learner.models.prepare import model_folder
from pipeline.config import RunConfig
from pipeline.config.base import Options
from pipeline.config.load import read_options
from pipeline.errors import ConfigurationError, Findings, TrainingError, boundary
from pipeline.schema import FinishReason, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn

FUNCTIONS: dict[str, Mapping[str, type[Options]]] = {
    "advantage.estimator": OPTIONS,
    "loss.policy": POLICIES,
    "loss.off_policy": OFF_POLICIES,
    "replay.correction": CORRECTIONS,
}
"""Keys of the run file that name a function of the learner, and the classes of its options by name."""
GROUPS, ROLLOUTS_MAX, TOKENS = 2, 4, 3
"""Groups, rollouts of each, and tokens of the first turn of each rollout; the second turn has one more."""


def with_options(config: RunConfig) -> RunConfig:
    """A copy in which each function of the learner has all its options, in their class. Those of a user's own function
    stay as they are; it is not imported.

    Raises :class:`ConfigurationError` for unknown names and options, and for an estimator that does not fit the groups
    of the run.
    """
    problems = []
    for key, kinds in FUNCTIONS.items():
        section, name = key.split(".")
        before = getattr(config, section)
        try:
            options = read_options(getattr(before, name), kinds, key)
        except ConfigurationError as error:
            problems.append(str(error))
        else:
            if type(options) is not kinds.get("own"):
                config = config.model_copy(update={section: before.model_copy(update={name: options})})
    problems = problems or _check_estimator(config)
    if problems:
        raise ConfigurationError("\n".join(problems))
    return config


def _check_estimator(config: RunConfig) -> list[str]:
    """Reasons why the estimator cannot work with the groups, the teacher or the loss of the run."""
    advantage, groups = config.advantage, config.groups
    name, n = advantage.estimator.name, groups.n_rollout
    problems = []
    if isinstance(advantage.estimator, PassAtK) and advantage.estimator.k > n:
        problems.append(
            f"advantage.estimator.k ({advantage.estimator.k}) is more than groups.n_rollout ({n}): the sets of k "
            "rollouts are drawn from a group"
        )
    if isinstance(advantage.estimator, Distill) and not advantage.estimator.reward_weight:
        reference = config.learner.reference
        if name == "distill" and reference.folder is None and reference.url is None:
            problems.append(
                "advantage.estimator distill needs a teacher, but learner.reference has neither folder nor url, so it "
                "is the policy's own initial model: set one, or reward_weight above 0 to also train on rewards"
            )
        if config.loss.kl == "reward":
            problems.append(
                f"loss.kl is reward, but advantage.estimator {name} with reward_weight 0 reads no rewards: set loss.kl "
                "to none or loss, or reward_weight above 0"
            )
    if n == 1 and name in COMPARING and config.trained_environments and not config.loss.supervised.weight:
        problems.append(
            f"advantage.estimator {name} compares the rollouts of a group, but groups.n_rollout is 1, so every "
            "advantage is 0 and nothing is learned: set groups.n_rollout to 2 or more, or an estimator without groups "
            "(reinforce_pp, remax, gae, distill)"
        )
    if groups.zero_variance == "keep":
        return problems
    what, known = f"groups.zero_variance is {groups.zero_variance}", COMPARING | {"remax"}
    if name not in known and ":" not in name:
        problems.append(
            f"{what}, but advantage.estimator {name} also learns from groups with equal rewards: set zero_variance: "
            f"keep, or one of the estimators {', '.join(sorted(known))}"
        )
    elif advantage.rewards != "outcome":
        problems.append(
            f"{what}, but advantage.rewards is {advantage.rewards}: turn rewards may differ when outcomes are equal, "
            "and the replay stage compares only outcomes. Set zero_variance: keep"
        )
    elif n == 1 and not advantage.orders_greedy:
        problems.append(f"{what}, but groups.n_rollout is 1, so the rewards of every group are equal")
    return problems


def check_own_functions(config: RunConfig, tasks: Mapping[str, Sequence[Task]], found: Findings) -> None:
    """Add what is wrong with the functions at ``advantage.shaping``, ``advantage.estimator`` and ``loss.policy``.
    ``tasks``: rows of data by environment, which shaping may read."""
    advantage = config.advantage
    scored, trajectories = _update(config, tasks)
    if advantage.shaping is not None:
        trained = {name: config.environments[name] for name in config.trained_environments}
        unknown = any(section.tasks_from is not None and not tasks.get(name) for name, section in trained.items())
        about = Findings(forgiving=found.forgiving or unknown)
        with about.collecting():
            scored = shaped(scored, trajectories, advantage)
        found.problems += about.problems
        found.notes += about.notes
    if ":" in advantage.estimator.name:
        with found.collecting():
            estimate(scored, advantage)
    if ":" in config.loss.policy.name:
        with found.collecting():
            _learn(config, sum(p.n_tokens for p in scored))


def check_routers(config: RunConfig, found: Findings) -> None:
    """Add what the run file asks of routers that the model does not have, where it is on this machine."""
    folder = model_folder(config) if config.learner.routing_replay or config.loss.load_balancing else None
    if folder is not None:
        from learner.policy import routers

        with found.collecting():
            routers.check_routers(config, folder)


def _update(config: RunConfig, tasks: Mapping[str, Sequence[Task]]) -> tuple[list[ScoredTrajectory], list[Trajectory]]:
    """Trajectories as estimators see them, with the scores that the run's own needs, and as they are stored."""
    advantage, needs = config.advantage, needed_scores(config.advantage)
    names, parts = list(config.trained_environments or config.environments), config.scorer.names
    scored, trajectories = [], []
    random = np.random.default_rng(0)
    for group in range(GROUPS):
        name = names[group % len(names)]
        task = next(iter(tasks.get(name) or ()), Task(f"{name}/0", name, 0))
        rollouts = min(config.groups.n_rollout, ROLLOUTS_MAX)
        for index in range(rollouts):
            reward = (index + 1) / rollouts
            turns = np.repeat([0, 1], [TOKENS, TOKENS + 1]).astype(np.int32)
            logprobs = random.uniform(-2, -0.1, len(turns))
            given: dict[str, Any] = {needed: logprobs + 0.1 for needed in needs}
            scored.append(
                ScoredTrajectory(
                    group, reward, turns, (0.0, reward),
                    baseline=0.5 if advantage.orders_greedy else None, behaviour=logprobs,
                    penalties=np.full(len(turns), 0.01) if config.loss.kl == "reward" else None, **given,
                )
            )  # fmt: skip
            trajectories.append(
                Trajectory(
                    f"preflight.{group}.{index}", f"preflight.{group}", task,
                    tuple(_turn(n, reward if n else 0.0) for n in range(2)), TrajectoryStatus.COMPLETE,
                    rewards=dict.fromkeys(parts, reward), reward=reward,
                )
            )  # fmt: skip
    return scored, trajectories


def _turn(number: int, reward: float) -> Turn:
    n = TOKENS + number
    sampled = TokenSpan.sampled([0] * n, [-1.0] * n, 0)
    asked, said = (Message("user", "1 + 1"),), Message("assistant", "1")
    return Turn(TokenSpan.context([0]), sampled, asked, said, FinishReason.STOP, temperature=1.0, reward=reward)


def _learn(config: RunConfig, n: int) -> None:
    """Forward and backward pass of the policy loss over ``n`` tokens. Raises :class:`TrainingError`,
    :class:`pipeline.errors.PlugInError`."""
    import torch

    from learner.losses.loss import LossTokens, policy_loss
    from learner.losses.policy_losses import loss_rules

    where = f"loss.policy {config.loss.policy.name}"
    rules = replace(loss_rules(config.loss, config.importance, config.replay), entropy_bonus=0.0, kl_in_loss=False)
    at = torch.arange(n)
    logprobs = (-0.5 - 0.1 * (at % 7)).requires_grad_()
    entropy = torch.full((n,), 0.5, requires_grad=True)
    anchor = logprobs.detach() + 0.05 * torch.sin(at.float())
    none, every = torch.zeros(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool)
    replayed = at < n // 4 if config.replay.enabled else none
    terms = policy_loss(
        LossTokens(
            logprobs, entropy, anchor, anchor, torch.where(at % 2 == 0, 1.0, -0.5), torch.full((n,), 1 / n),
            every, replayed, replayed, rows=at // (2 * TOKENS + 1), reference=anchor, recorded=every,
        ),
        rules,
    )  # fmt: skip
    if not terms.loss.requires_grad:
        raise TrainingError(
            f"{where}: expected losses with a gradient, got some without: tokens.logprobs, tokens.log_ratio and "
            "tokens.entropy have one, and their detach() has none"
        )
    with boundary(f"{where}, backward,"):
        terms.loss.backward()  # type: ignore[no-untyped-call]
    gradients = [tensor.grad for tensor in (logprobs, entropy) if tensor.grad is not None]
    if not torch.isfinite(terms.loss) or not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise TrainingError(f"{where}: expected a finite loss and gradient, got {terms.loss} and {gradients}")
    if not any(bool((gradient != 0).any()) for gradient in gradients):
        raise TrainingError(f"{where}: expected a gradient other than 0 for tokens with an advantage, got 0 everywhere")
