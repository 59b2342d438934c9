"""Metrics of the learner. Attribute names are the metric names without ``afterplay_learner_``.

Effective sample size over any window and any number of learners::

    rate(importance_ratio_sum)^2 / (rate(importance_ratio_count) * rate(importance_ratio_squared_total))
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.metrics.base import LAG, LAT, LONG, NATS, RATIO, SOURCES, CollectorRegistry, counter, gauge, histogram

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
_P = "afterplay_learner_"


class LearnerMetrics:
    """``environments`` are the label values to initialise."""

    def __init__(self, registry: CollectorRegistry, environments: Sequence[str] = ()) -> None:
        self._build_steps(registry)
        self._build_off_policy(registry)
        self._build_replay(registry)
        self._build_optimisation(registry, {"env": tuple(environments)})
        self._build_objectives(registry)
        self._build_persistence(registry)

    def _build_steps(self, r: CollectorRegistry) -> None:
        self.policy_version = gauge(r, _P + "policy_version", "Newest published policy version.")
        self.steps_total = counter(r, _P + "steps_total", "Optimizer steps applied.")
        self.updates_total = counter(r, _P + "updates_total", "Batches trained (one or more optimizer steps each).")
        self.tokens_total = counter(
            r, _P + "tokens_total", "Tokens; kind = trained, masked or padding.", {"kind": TOKEN_KINDS}
        )
        self.step_duration_seconds = histogram(
            r,
            _P + "step_duration_seconds",
            "Time of one update by stage; the sums of all stages are the learner's wall time. publish and save: only "
            "what holds the step up.",
            LAT,
            {"stage": STAGES},
        )
        self.wait_seconds_total = counter(r, _P + "wait_seconds_total", "Time idle for lack of data.")

    def _build_off_policy(self, r: CollectorRegistry) -> None:
        by_source = {"level": LEVELS, "source": SOURCES}
        self.importance_ratio = histogram(
            r,
            _P + "importance_ratio",
            "pi/mu before clipping; level = token or sequence, source = fresh or replay.",
            RATIO,
            by_source,
        )
        self.importance_ratio_squared_total = counter(
            r,
            _P + "importance_ratio_squared_total",
            "Sum of (pi/mu)^2; with importance_ratio_sum and _count it gives ESS over any window and set of learners.",
            by_source,
        )
        self.batch_importance_ratio = gauge(
            r,
            _P + "batch_importance_ratio",
            "Last batch; stat = mean, min or max.",
            {"level": LEVELS, "stat": STATISTICS},
        )
        self.batch_ess_ratio = gauge(
            r, _P + "batch_ess_ratio", "Last batch: (sum w)^2 / (N sum w^2), 0 to 1.", {"level": LEVELS}
        )
        self.clipped_tokens_total = counter(
            r, _P + "clipped_tokens_total", "Tokens whose ratio was clipped; side = low or high.", {"side": SIDES}
        )
        self.rejected_tokens_total = counter(
            r,
            _P + "rejected_tokens_total",
            "Tokens masked out of the loss; reason = ratio_cap, stale, sequence_mask, geometric_mask, any_token_mask, "
            "nonfinite or second_moment.",
            {"reason": REJECTIONS},
        )
        self.staleness_versions = histogram(
            r, _P + "staleness_versions", "Learner version minus behaviour version of each fresh trajectory.", LAG
        )
        self.logprob_diff_nats = histogram(
            r,
            _P + "logprob_diff_nats",
            "|learner - actor log-probability| per token at version lag 0 (engine mismatch).",
            NATS,
        )
        self.behaviour_kl_nats = gauge(
            r,
            _P + "behaviour_kl_nats",
            "KL(mu||pi) of the last batch; estimator = k1 or k3.",
            {"estimator": ("k1", "k3")},
        )
        self.source_loss = gauge(
            r, _P + "source_loss", "Policy loss of the last batch; source = fresh or replay.", {"source": SOURCES}
        )
        self.clip_ratio = gauge(
            r,
            _P + "clip_ratio",
            "Clipped tokens among trained tokens of the last batch, 0 to 1; source = fresh or replay.",
            {"source": SOURCES},
        )

    def _build_replay(self, r: CollectorRegistry) -> None:
        self.trained_trajectories_total = counter(
            r,
            _P + "trained_trajectories_total",
            "Trajectories trained; source = fresh or replay.",
            {"source": SOURCES},
        )
        self.source_importance_ratio = gauge(
            r,
            _P + "source_importance_ratio",
            "pi/mu of the last batch's tokens with recorded mu; stat = mean, min or max, source = fresh or replay.",
            {"source": SOURCES, "stat": STATISTICS},
        )
        self.source_ess_ratio = gauge(
            r,
            _P + "source_ess_ratio",
            "Last batch by source: token-level (sum w)^2 / (N sum w^2), 0 to 1; 0 without such tokens.",
            {"source": SOURCES},
        )
        self.source_kl_nats = gauge(
            r,
            _P + "source_kl_nats",
            "KL(mu||pi) of the last batch by source; estimator = k1 or k3.",
            {"source": SOURCES, "estimator": ("k1", "k3")},
        )
        self.policy_loss = gauge(
            r,
            _P + "policy_loss",
            "Policy loss of the last batch; policy = on (fresh clip) or off (off-policy loss).",
            {"policy": ("on", "off")},
        )
        self.replay_token_ratio = gauge(
            r, _P + "replay_token_ratio", "Replayed tokens among trained tokens of the last batch, 0 to 1."
        )
        self.off_policy_token_ratio = gauge(
            r,
            _P + "off_policy_token_ratio",
            "Tokens with the off-policy loss among response tokens of the last batch, 0 to 1.",
        )
        self.replay_age_versions = histogram(
            r, _P + "replay_age_versions", "Learner version minus behaviour version of each replayed trajectory.", LAG
        )
        self.guard_learning_rate_ratio = gauge(
            r, _P + "guard_learning_rate_ratio", "What the ESS guard multiplied the last learning rate with."
        )
        self.scored_candidates_total = counter(
            r, _P + "scored_candidates_total", "Stored trajectories scored with today's policy to choose replays."
        )
        self.failed_choices_total = counter(
            r, _P + "failed_choices_total", "Groups trained with the stored choice because scoring failed."
        )

    def _build_optimisation(self, r: CollectorRegistry, env: dict[str, tuple[str, ...]]) -> None:
        self.entropy_nats = gauge(r, _P + "entropy_nats", "Mean token entropy of the last batch.")
        self.loss = gauge(
            r, _P + "loss", "Last batch; term = policy, kl, entropy, value or supervised.", {"term": TERMS}
        )
        self.grad_norm = gauge(r, _P + "grad_norm", "Global gradient norm before clipping.")
        self.learning_rate = gauge(r, _P + "learning_rate", "Learning rate of the last step.")
        self.reward_mean = gauge(r, _P + "reward_mean", "Mean reward of the last batch's fresh trajectories.", env)
        self.evaluation_score = gauge(r, _P + "evaluation_score", "Mean score of the last evaluation.", env)
        self.nonfinite_steps_total = counter(
            r,
            _P + "nonfinite_steps_total",
            "Steps skipped for a non-finite value; where = loss, gradient, ratio or value (the critic's step).",
            {"where": NONFINITE},
        )

    def _build_objectives(self, r: CollectorRegistry) -> None:
        self.reference_kl_nats = gauge(
            r, _P + "reference_kl_nats", "KL(pi||reference) of the last batch, per token; 0 without a reference."
        )
        self.kl_coefficient = gauge(
            r, _P + "kl_coefficient", "What the KL to the reference was weighed with; an adaptive controller moves it."
        )
        self.value_explained_variance = gauge(
            r,
            _P + "value_explained_variance",
            "1 - Var(R - V) / Var(R) of the last batch, V before the update: 1 is perfect, 0 as good as a constant.",
        )
        self.value_clip_ratio = gauge(
            r, _P + "value_clip_ratio", "Tokens of the last batch whose value left the clip range, 0 to 1."
        )
        self.value_grad_norm = gauge(r, _P + "value_grad_norm", "Global gradient norm of the critic before clipping.")
        self.supervised_tokens_total = counter(
            r, _P + "supervised_tokens_total", "Tokens of demonstrations trained by cross-entropy beside RL."
        )
        self.shared_tokens_total = counter(
            r, _P + "shared_tokens_total", "Tokens not computed, as another row of the same pass begins with them."
        )
        self.overlong_trajectories_total = counter(
            r, _P + "overlong_trajectories_total", "Trained trajectories whose reward lost the overlong penalty."
        )

    def _build_persistence(self, r: CollectorRegistry) -> None:
        self.weight_publish_duration_seconds = histogram(
            r, _P + "weight_publish_duration_seconds", "Time to publish one policy version.", LONG
        )
        self.weight_publish_bytes_total = counter(r, _P + "weight_publish_bytes_total", "Weight bytes published.")
        self.weight_publish_failures_total = counter(
            r, _P + "weight_publish_failures_total", "Engines that did not take a published version."
        )
        self.engine_sleep_seconds_total = counter(
            r,
            _P + "engine_sleep_seconds_total",
            "Time that engines slept so that the learner had the device, added over engines.",
        )
        self.device_handovers_total = counter(
            r,
            _P + "device_handovers_total",
            "Times that a shared device changed hands; to = learner or engines.",
            {"to": ("learner", "engines")},
        )
        self.device_handover_failures_total = counter(
            r,
            _P + "device_handover_failures_total",
            "Engines that did not fall asleep or wake up when told to; operation = sleep or wake.",
            {"operation": ("sleep", "wake")},
        )
        self.checkpoint_duration_seconds = histogram(
            r, _P + "checkpoint_duration_seconds", "Checkpoint write time.", LONG
        )
        self.checkpoint_timestamp_seconds = gauge(
            r, _P + "checkpoint_timestamp_seconds", "Unix time of the last durable checkpoint."
        )
