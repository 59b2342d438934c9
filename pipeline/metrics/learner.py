"""Metrics of the learner. Those of an update are read from its report by ``learner.recorder.NUMBERS``.

Effective sample size over any window and any number of learners::

    rate(importance_ratio_sum)^2 / (rate(importance_ratio_count) * rate(importance_ratio_squared_total))
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.metrics.base import (
    LAG,
    LAT,
    LONG,
    NATS,
    RATIO,
    SOURCES,
    CollectorRegistry,
    MetricSet,
    counter,
    gauge,
    histogram,
)

TOKEN_KINDS = ("trained", "masked", "padding")
STAGES = ("wait", "choose", "prepare", "forward", "backward", "optimize", "publish", "save", "other")
LEVELS = ("token", "sequence")
STATISTICS = ("mean", "min", "max")
SIDES = ("low", "high")
REJECTIONS = (
    "ratio_cap",
    "stale",
    "sequence_mask",
    "geometric_mask",
    "any_token_mask",
    "nonfinite",
    "second_moment",
)
TERMS = ("policy", "kl", "entropy", "value", "supervised")
NONFINITE = ("loss", "gradient", "ratio", "value")


class LearnerMetrics(MetricSet):
    """Steps, off-policy statistics, losses, weights and checkpoints of the learner."""

    prefix = "afterplay_learner_"

    def __init__(self, registry: CollectorRegistry, environments: Sequence[str] = ()) -> None:
        super().__init__(registry, environments=environments)

    policy_version = gauge("Newest published policy version.")
    steps_total = counter("Optimizer steps applied.")
    updates_total = counter("Batches trained (one or more optimizer steps each).")
    tokens_total = counter("Tokens; kind = trained, masked or padding.", kind=TOKEN_KINDS)
    step_duration_seconds = histogram(
        "Time of one update by stage; the sums of all stages are the learner's wall time. publish and save: only "
        "what holds the step up.",
        LAT,
        stage=STAGES,
    )
    wait_seconds_total = counter("Time idle for lack of data.")

    importance_ratio = histogram(
        "pi/mu before clipping; level = token or sequence, source = fresh or replay.",
        RATIO,
        level=LEVELS,
        source=SOURCES,
    )
    importance_ratio_squared_total = counter(
        "Sum of (pi/mu)^2; with importance_ratio_sum and _count it gives ESS over any window and set of learners.",
        level=LEVELS,
        source=SOURCES,
    )
    batch_importance_ratio = gauge("Last batch; stat = mean, min or max.", level=LEVELS, stat=STATISTICS)
    batch_ess_ratio = gauge("Last batch: (sum w)^2 / (N sum w^2), 0 to 1.", level=LEVELS)
    clipped_tokens_total = counter("Tokens whose ratio was clipped; side = low or high.", side=SIDES)
    rejected_tokens_total = counter(
        "Tokens masked out of the loss; reason = ratio_cap, stale, sequence_mask, geometric_mask, any_token_mask, "
        "nonfinite or second_moment.",
        reason=REJECTIONS,
    )
    staleness_versions = histogram("Learner version minus behaviour version of each fresh trajectory.", LAG)
    logprob_diff_nats = histogram(
        "|learner - actor log-probability| per token at version lag 0 (engine mismatch).",
        NATS,
    )
    behaviour_kl_nats = gauge("KL(mu||pi) of the last batch; estimator = k1 or k3.", estimator=("k1", "k3"))
    source_loss = gauge("Policy loss of the last batch; source = fresh or replay.", source=SOURCES)
    clip_ratio = gauge(
        "Clipped tokens among trained tokens of the last batch, 0 to 1; source = fresh or replay.", source=SOURCES
    )

    trained_trajectories_total = counter("Trajectories trained; source = fresh or replay.", source=SOURCES)
    source_importance_ratio = gauge(
        "pi/mu of the last batch's tokens with recorded mu; stat = mean, min or max, source = fresh or replay.",
        source=SOURCES,
        stat=STATISTICS,
    )
    source_ess_ratio = gauge(
        "Last batch by source: token-level (sum w)^2 / (N sum w^2), 0 to 1; 0 without such tokens.", source=SOURCES
    )
    source_kl_nats = gauge(
        "KL(mu||pi) of the last batch by source; estimator = k1 or k3.", source=SOURCES, estimator=("k1", "k3")
    )
    policy_loss = gauge(
        "Policy loss of the last batch; policy = on (fresh clip) or off (off-policy loss).", policy=("on", "off")
    )
    replay_token_ratio = gauge("Replayed tokens among trained tokens of the last batch, 0 to 1.")
    off_policy_token_ratio = gauge("Tokens with the off-policy loss among response tokens of the last batch, 0 to 1.")
    replay_age_versions = histogram("Learner version minus behaviour version of each replayed trajectory.", LAG)
    guard_learning_rate_ratio = gauge("What the ESS guard multiplied the last learning rate with.")
    scored_candidates_total = counter("Stored trajectories scored with the current policy to choose replays.")
    failed_choices_total = counter("Groups trained with the stored choice because scoring failed.")

    entropy_nats = gauge("Mean token entropy of the last batch.")
    loss = gauge("Last batch; term = policy, kl, entropy, value or supervised.", term=TERMS)
    grad_norm = gauge("Global gradient norm before clipping.")
    learning_rate = gauge("Learning rate of the last step.")
    reward_mean = gauge("Mean reward of the last batch's fresh trajectories.", env="environments")
    evaluation_score = gauge("Mean score of the last evaluation.", env="environments")
    nonfinite_steps_total = counter(
        "Steps skipped for a non-finite value; where = loss, gradient, ratio or value (the critic's step).",
        where=NONFINITE,
    )

    reference_kl_nats = gauge("KL(pi||reference) of the last batch, per token; 0 without a reference.")
    kl_coefficient = gauge("What the KL to the reference was weighed with; an adaptive controller moves it.")
    value_explained_variance = gauge(
        "1 - Var(R - V) / Var(R) of the last batch, V before the update: 1 is perfect, 0 as good as a constant.",
    )
    value_clip_ratio = gauge("Tokens of the last batch whose value left the clip range, 0 to 1.")
    value_grad_norm = gauge("Global gradient norm of the critic before clipping.")
    supervised_tokens_total = counter("Tokens of demonstrations trained by cross-entropy beside RL.")
    shared_tokens_total = counter("Tokens not computed, as another row of the same pass begins with them.")
    overlong_trajectories_total = counter("Trained trajectories whose reward lost the overlong penalty.")

    weight_publish_duration_seconds = histogram("Time to publish one policy version.", LONG)
    weight_publish_bytes_total = counter("Weight bytes published.")
    weight_publish_failures_total = counter("Engines that did not take a published version.")
    engine_sleep_seconds_total = counter(
        "Time that engines slept so that the learner had the device, added over engines.",
    )
    device_handovers_total = counter(
        "Times that a shared device changed hands; to = learner or engines.", to=("learner", "engines")
    )
    device_handover_failures_total = counter(
        "Engines that did not fall asleep or wake up on request; operation = sleep or wake.",
        operation=("sleep", "wake"),
    )
    checkpoint_duration_seconds = histogram("Checkpoint write time.", LONG)
    checkpoint_timestamp_seconds = gauge("Unix time of the last durable checkpoint.")
