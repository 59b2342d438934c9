"""Rows about the update: ratios, staleness, reward and loss."""

from __future__ import annotations

from grafana import promql as q
from grafana import thresholds as limits
from grafana.promql import metric, rate
from grafana.queries import largest, p50_p95
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import WINDOW

TOKEN = 'level="token"'
ENV = q.ENVIRONMENT
TRAINED = rate("learner_tokens_total", 'kind="trained"', window=WINDOW)


def _batch_ratio(stat: str, reduce: str) -> str:
    selector = metric("learner_batch_importance_ratio", TOKEN, f'stat="{stat}"')
    return f"{reduce}({selector})"


OFF_POLICY = RowSpec(
    "How off-policy",
    (
        PanelSpec(
            "Importance ratio of the last batch",
            "none",
            (
                Query(_batch_ratio("mean", "max"), "mean"),
                Query(_batch_ratio("min", "min"), "min"),
                Query(_batch_ratio("max", "max"), "max"),
            ),
            "the mean stays near 1; min and max are single tokens and may be far out.",
            "a drifting mean is bias (see engine mismatch); a growing max alone is clipped by the loss.",
            log_scale=True,
            runbook="RatioBias",
        ),
        PanelSpec(
            "Importance ratio histogram",
            "none",
            (Query(q.buckets("learner_importance_ratio", TOKEN)),),
            "one bright band around 1.",
            "a band that widens means staleness or a learning rate that is too high; two bands mean mixed sources.",
            "heatmap",
            runbook="RatioHeavyTail",
        ),
        PanelSpec(
            "Effective sample size",
            "percentunit",
            (
                Query(f"max by (level) ({metric('learner_batch_ess_ratio')})", "last batch, {{level}}"),
                Query(q.ess("token"), f"{WINDOW} window, token"),
            ),
            "above 0.5. Sequence level is always lower than token level.",
            "below 0.3 most of the batch no longer teaches anything: lower staleness.max or the learning rate.",
            limit=limits.ESS,
            runbook="LowESS",
        ),
        PanelSpec(
            "Ratios outside (0.5, 2]",
            "percentunit",
            (Query(q.ratio_tail(), "share of tokens"),),
            "below 5 % of tokens.",
            "see ESS; the clip removes the gradient of most of these tokens.",
            limit=limits.RATIO_TAIL,
            runbook="RatioHeavyTail",
        ),
        PanelSpec(
            "Clipped and rejected tokens",
            "percentunit",
            (
                Query(
                    f"sum by (side) ({rate('learner_clipped_tokens_total', window=WINDOW)}) / on () group_left () "
                    f"sum({TRAINED})",
                    "clipped {{side}}",
                ),
                Query(
                    f"sum by (reason) ({rate('learner_rejected_tokens_total', window=WINDOW)}) / on () "
                    f"group_left () sum({TRAINED})",
                    "rejected {{reason}}",
                ),
            ),
            "a few percent clipped, nothing rejected.",
            "much clipping wastes rollouts: fewer minibatches or epochs, a lower learning rate.",
        ),
        PanelSpec(
            "KL(μ‖π) of the last batch",
            "none",
            (largest("estimator", "learner_behaviour_kl_nats"),),
            "below 0.05 nat; k1 may be slightly negative, k3 never is.",
            "a steady climb comes before ESS falls: act on it early.",
        ),
    ),
)

STALENESS = RowSpec(
    "Staleness",
    (
        PanelSpec(
            "Staleness of trained trajectories",
            "none",
            (Query(q.buckets("learner_staleness_versions")),),
            "everything at or below staleness.max versions.",
            "late groups after a restart are trained or dropped by staleness.late; a lasting tail is a bug.",
            "heatmap",
            runbook="StalenessHigh",
        ),
        PanelSpec(
            "Staleness p50 and p95",
            "none",
            p50_p95("learner_staleness_versions", legend=" trained"),
            "p95 at most staleness.max (versions).",
            "actors are behind: look at weight updates and generation latency.",
            limit=limits.STALENESS_P95_VERSIONS,
            runbook="StalenessHigh",
        ),
        PanelSpec(
            "Policy versions",
            "none",
            (
                Query(f"max({metric('learner_policy_version')})", "learner"),
                Query(metric("actor_policy_version"), "actor {{instance}}"),
            ),
            "stairs that rise together; actors follow within a step.",
            "an actor that stays behind plays on an engine that missed an update.",
            runbook="PolicyLagHigh",
        ),
    ),
)

EVALUATION = RowSpec(
    "Evaluation",
    (
        PanelSpec(
            "Score on held-out tasks",
            "none",
            (
                Query(f"max by (env, split) ({metric('replay_evaluation_score', ENV)})", "{{split}}, {{env}}"),
                Query(f"max by (env) ({metric('learner_reward_mean', ENV)})", "trained, {{env}}"),
            ),
            "rises with the trained reward, a little below it (above it where it is greedy); 0 until the first "
            "evaluation, and without evaluation.every.",
            "a score that falls while the reward rises is overfitting: evaluation.keep_best has kept the best weights.",
        ),
        PanelSpec(
            "pass@k on held-out tasks",
            "percentunit",
            (
                Query(
                    f"max by (env, split, k) ({metric('replay_evaluation_pass_ratio', ENV)})",
                    "{{split}}, {{env}}, k = {{k}}",
                ),
            ),
            "rises; pass@1 comes closer to pass@k as the policy grows sure.",
            "pass@k that falls while pass@1 rises is lost variety: see entropy, or raise the temperature of training.",
        ),
        PanelSpec(
            "Rollouts of the last evaluation",
            "none",
            (
                Query(
                    f"sum by (outcome) ({metric('replay_evaluation_rollouts', ENV)})",
                    "{{outcome}}",
                ),
            ),
            "all scored, nothing missing; truncated ones are scored too.",
            "what is missing failed evaluation.attempts_max times, or evaluation.seconds_max was too short: see the "
            "log of the replay stage.",
        ),
        PanelSpec(
            "Evaluations",
            "none",
            (
                Query(f"sum by (outcome) ({metric('replay_evaluations_total')})", "{{outcome}}"),
                Query(f"max({metric('replay_evaluation_updates')})", "updates in the weights evaluated last"),
                Query(f"max({metric('replay_evaluation_policy_version')})", "their policy version"),
            ),
            "complete ones are counted up, the updates rise in steps of evaluation.every.",
            "many skipped: evaluations take longer than their period: fewer tasks, a longer period, or more "
            "evaluation.slots.",
        ),
    ),
)

LEARNING = RowSpec(
    "Learning",
    (
        PanelSpec(
            "Reward",
            "none",
            (
                Query(f"max by (env) ({metric('learner_reward_mean', ENV)})", "trained, {{env}}"),
                Query(
                    f"sum by (env) ({rate('actor_episode_reward_sum', ENV, window=WINDOW)}) / "
                    f"sum by (env) ({rate('actor_episode_reward_count', ENV, window=WINDOW)})",
                    "sampled, {{env}}",
                ),
            ),
            "rises; trained and sampled run together.",
            "a gap between the two is selection bias; a fall after a rise is a policy that collapsed (see entropy).",
        ),
        PanelSpec(
            "Entropy of sampled tokens",
            "none",
            (Query(f"max({metric('learner_entropy_nats')})", "entropy"),),
            "falls slowly from its start (nat per token).",
            "near 0 early on is collapse: lower the learning rate or add loss.entropy_bonus.",
        ),
        PanelSpec(
            "Loss and gradient norm",
            "none",
            (
                Query(f"max by (term) ({metric('learner_loss')})", "loss {{term}}"),
                Query(f"max({metric('learner_grad_norm')})", "gradient norm"),
            ),
            "the policy loss hovers around 0 (it is no measure of progress); the norm is steady.",
            "spikes of the norm: learner.grad_clip limits them; look at rejected tokens and ratios.",
            runbook="NonFinite",
        ),
    ),
)
