"""Metrics of the learner. ``learner.process.recorder.NUMBERS`` reads those of an update from its report.

Effective sample size over any window and any number of learners::

    rate(importance_ratio_sum)^2 / (rate(importance_ratio_count) * rate(importance_ratio_squared_total))
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.runtime.metrics import (
    LAG,
    LAT,
    LONG,
    NATS,
    PHASES,
    RATIO,
    SOURCES,
    CollectorRegistry,
    MetricSet,
    counter,
    gauge,
    histogram,
    latest,
)

TOKEN_KINDS = ("trained", "masked", "padding")
LEVELS = ("token", "sequence")
STATISTICS = ("mean", "min", "max")
SIDES = ("low", "high")
REJECTIONS = ("ratio_cap", "sequence_mask", "geometric_mask", "any_token_mask", "nonfinite", "second_moment")
TERMS = ("policy", "kl", "entropy", "value", "supervised")
NONFINITE = ("loss", "gradient", "ratio", "value")
PADDED_BECAUSE = ("configured", "device", "model", "trial")


class LearnerMetrics(MetricSet):
    """Steps, off-policy statistics, losses, weights and checkpoints of the learner."""

    prefix = "afterplay_learner_"

    def __init__(self, registry: CollectorRegistry, environments: Sequence[str] = ()) -> None:
        super().__init__(registry, environments=environments)

    policy_version = latest("Newest published policy version.")
    steps_total = counter("Optimizer steps applied.")
    updates_total = counter("Updates: batches trained, each with one or more optimizer steps.")
    tokens_total = counter("Tokens of forward passes; kind = trained, masked or padding.", kind=TOKEN_KINDS)
    step_duration_seconds = histogram(
        "Time of one update by phase; the phases add up to the wall time; phase = wait, choose, prepare, forward, "
        "backward, optimize, publish, save (both: only what delays the step) or other.",
        LAT,
        phase=PHASES,
    )
    wait_seconds_total = counter("Time without data to train.")
    update_seconds = latest("Time of the last update: the sum of its phases.")
    mfu_ratio = latest(
        "Model FLOP utilisation of the last update, 0 to 1: operations without padding over the chips' peak in the "
        "phases forward, backward and optimize; 0 where the peak is unknown."
    )
    peak_memory_bytes = gauge(
        "Largest memory since the start, of the rank with most: allocated on the GPU; resident on CPUs."
    )
    padded_rows = gauge(
        "1 where rows are padded; reason = configured (learner.packing), device (no variable-length attention), "
        "model (its attention cannot be replaced) or trial (values differed).",
        reason=PADDED_BECAUSE,
    )

    importance_ratio = histogram(
        "pi/mu before clipping; level = token or sequence; source = fresh or replay.",
        RATIO,
        level=LEVELS,
        source=SOURCES,
    )
    importance_ratio_squared_total = counter(
        "Sum of (pi/mu)^2, for the ESS over any window; level = token or sequence; source = fresh or replay.",
        level=LEVELS,
        source=SOURCES,
    )
    batch_importance_ratio = latest(
        "pi/mu of the last batch; level = token or sequence; stat = mean, min or max.", level=LEVELS, stat=STATISTICS
    )
    batch_ess_ratio = latest(
        "ESS of the last batch, (sum w)^2 / (N sum w^2), 0 to 1; level = token or sequence.", level=LEVELS
    )
    clipped_tokens_total = counter("Tokens whose ratio was clipped; side = low or high.", side=SIDES)
    rejected_tokens_total = counter(
        "Tokens masked out of the loss; reason = ratio_cap, sequence_mask, geometric_mask, any_token_mask, "
        "nonfinite or second_moment.",
        reason=REJECTIONS,
    )
    staleness_versions = histogram("Learner version minus behaviour version of each fresh trajectory.", LAG)
    staleness_max_versions = latest("Largest staleness of the fresh trajectories of the last batch that had any.")
    logprob_diff_nats = histogram(
        "Engine mismatch: |learner - engine log-probability| of a token at version lag 0.",
        NATS,
    )
    behaviour_kl_nats = latest("KL(mu||pi) of the last batch; estimator = k1 or k3.", estimator=("k1", "k3"))
    source_loss = latest("Policy loss of the last batch; source = fresh or replay.", source=SOURCES)
    clip_ratio = latest(
        "Share of trained tokens of the last batch that were clipped, 0 to 1; source = fresh or replay.", source=SOURCES
    )

    trained_trajectories_total = counter("Trajectories trained; source = fresh or replay.", source=SOURCES)
    source_importance_ratio = latest(
        "pi/mu of recorded tokens of the last batch; source = fresh or replay; stat = mean, min or max.",
        source=SOURCES,
        stat=STATISTICS,
    )
    source_ess_ratio = latest(
        "Token-level ESS of the last batch, 0 to 1; 0 without such tokens; source = fresh or replay.", source=SOURCES
    )
    source_sequence_ess_ratio = latest(
        "Trajectory-level ESS of the last batch, 0 to 1; 0 without such trajectories; source = fresh or replay.",
        source=SOURCES,
    )
    source_kl_nats = latest(
        "KL(mu||pi) of the last batch; source = fresh or replay; estimator = k1 or k3.",
        source=SOURCES,
        estimator=("k1", "k3"),
    )
    policy_loss = latest(
        "Policy loss of the last batch; policy = on (loss of fresh tokens) or off (loss.off_policy).",
        policy=("on", "off"),
    )
    replay_token_ratio = latest("Share of trained tokens of the last batch that are replayed, 0 to 1.")
    off_policy_token_ratio = latest("Share of response tokens of the last batch with the off-policy loss, 0 to 1.")
    replay_age_versions = histogram("Learner version minus behaviour version of each replayed trajectory.", LAG)
    guard_learning_rate_ratio = latest("Factor of the ESS guard on the last learning rate.")
    scored_candidates_total = counter(
        "Stored trajectories scored with the current policy; when = waiting (for rollouts) or update (at its start).",
        when=("waiting", "update"),
    )
    failed_choices_total = counter("Groups trained with the stored choice, because scoring failed.")

    router_entropy_nats = latest(
        "Mean entropy of a router's scores in the last batch; for mixtures of experts. Most is log(experts)."
    )
    expert_imbalance_ratio = latest(
        "Tokens of the expert with most over those of an even load in the last batch, mean over layers; for mixtures "
        "of experts. 1 is even."
    )

    entropy_nats = latest("Mean token entropy of the last batch.")
    loss = gauge("Loss of the last batch; term = policy, kl, entropy, value or supervised.", term=TERMS)
    grad_norm = latest("Global gradient norm before clipping.")
    learning_rate = latest("Learning rate of the last step.")
    reward_mean = latest("Mean reward of the last batch's fresh trajectories.", env="environments")
    nonfinite_steps_total = counter(
        "Steps skipped for a non-finite value; where = loss, gradient, ratio or value (the critic's step).",
        where=NONFINITE,
    )

    reference_kl_nats = latest("KL(pi||reference) of the last batch, per token; 0 without a reference.")
    value_explained_variance = gauge(
        "1 - Var(R - V) / Var(R) of the last batch, V before the update; 1 is perfect, 0 equals a constant.",
    )
    value_clip_ratio = gauge("Share of tokens of the last batch whose value left the clip range, 0 to 1.")
    value_grad_norm = gauge("Global gradient norm of the critic before clipping.")
    supervised_tokens_total = counter("Demonstration tokens trained by cross-entropy beside RL.")
    shared_tokens_total = counter("Tokens of shared prefixes that were not computed again.")
    overlong_trajectories_total = counter("Trained trajectories with an overlong penalty.")

    weight_publish_duration_seconds = histogram("Time to publish one policy version, until an engine serves it.", LONG)
    weight_publish_bytes_total = counter("Bytes of published weights.")
    weight_sent_bytes_total = counter("Bytes sent by NCCL: those of a version, once for each group of engines.")
    weight_load_duration_seconds = histogram("Time in which one engine got one version, over all engines.", LONG)
    weight_publish_failures_total = counter(
        "Engines that did not load a published version; one that takes no connections yet does not count."
    )
    weight_probe_diff_nats = latest("Mean |learner - engine log-probability| of the last weight probe.")
    weight_probes_total = counter(
        "Probes of published weights; result = proven, refuted (the engine serves other weights) or unanswered.",
        result=("proven", "refuted", "unanswered"),
    )
    engine_sleep_seconds_total = counter(
        "Time that engines slept while the learner had the device, summed over engines.",
    )
    device_handovers_total = counter(
        "Hand-overs of a shared device; to = learner or engines.", to=("learner", "engines")
    )
    device_handover_failures_total = counter(
        "Engines that did not sleep or wake on request; operation = sleep or wake.",
        operation=("sleep", "wake"),
    )
    checkpoint_duration_seconds = histogram("Time to write one checkpoint.", LONG)
    checkpoint_age_seconds = latest("Seconds since the last durable checkpoint; NaN before the process wrote one.")
    damaged_checkpoints = gauge("Checkpoints of the run that were found damaged and set aside.")
    checkpoint_limit_seconds = gauge("Age that the last checkpoint may have; follows the time between checkpoints.")
