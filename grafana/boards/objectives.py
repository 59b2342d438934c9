"""Rows about what is learned beside the policy loss, and about the learner's own time."""

from __future__ import annotations

from grafana import promql as q
from grafana.promql import metric, rate
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import WINDOW


def _tokens(match: str = "") -> str:
    return f"sum({rate('learner_tokens_total', *((match,) if match else ()), window=WINDOW)})"


REAL = _tokens('kind!="padding"')
TRAINED = _tokens('kind="trained"')
PADDING = _tokens('kind="padding"')
CROSS_ENTROPY = metric("learner_loss", 'term="supervised"')

OBJECTIVES = RowSpec(
    "KL to the reference, critic, demonstrations",
    (
        PanelSpec(
            "KL(π‖reference)",
            "none",
            (
                Query(f"max({metric('learner_reference_kl_nats')})", "KL of the last batch, nats per token"),
                Query(f"max({metric('learner_kl_coefficient')})", "coefficient"),
            ),
            "grows slowly, and an adaptive coefficient holds it near loss.kl_target. 0 without loss.kl.",
            "a KL that runs away with a fixed coefficient: raise loss.kl_coef, or loss.kl_controller: adaptive.",
        ),
        PanelSpec(
            "Critic",
            "percentunit",
            (
                Query(f"min({metric('learner_value_explained_variance')})", "explained variance of returns"),
                Query(f"max({metric('learner_value_clip_ratio')})", "values clipped"),
            ),
            "explained variance rises from 0 towards 100 %; few values clipped. 0 without a critic.",
            "below 0 %: worse than a constant. Raise learner.critic.warmup_updates or its learning rate.",
        ),
        PanelSpec(
            "Gradient norm of the critic",
            "none",
            (Query(f"max({metric('learner_value_grad_norm')})", "before clipping"),),
            "steady. 0 without a critic.",
            "spikes: rewards of very different size; lower learner.critic.grad_clip or its learning rate.",
        ),
        PanelSpec(
            "Demonstrations",
            "none",
            (
                Query(f"max({CROSS_ENTROPY})", "cross-entropy, nats per token"),
                Query(
                    f"sum({rate('learner_supervised_tokens_total', window=WINDOW)}) / ({TRAINED} > 0)",
                    "their tokens, to one trained token",
                ),
            ),
            "the cross-entropy falls. Both 0 without loss.supervised.weight.",
            "it rises while reward rises too: the policy has left the demonstrations behind, lower the weight.",
        ),
        PanelSpec(
            "Overlong trajectories",
            "percentunit",
            (
                Query(
                    f"sum({rate('learner_overlong_trajectories_total', window=WINDOW)}) / "
                    f"(sum({rate('learner_trained_trajectories_total', window=WINDOW)}) > 0)",
                    "with the overlong penalty",
                ),
            ),
            "a small share that falls. 0 without advantage.overlong_tokens.",
            "it grows: answers get longer all the time; raise the penalty or sampling.max_tokens.",
        ),
        PanelSpec(
            "Optimizer steps skipped",
            "short",
            (Query(f"sum by (where) ({q.nonfinite_steps()})", "{{where}}"),),
            f"0 (within {WINDOW}).",
            "where says what was not finite; value is the critic's step, which the policy's survives.",
            stacked=True,
            runbook="NonFinite",
        ),
    ),
)

_SPENT = rate("learner_step_duration_seconds_sum", window=WINDOW)

TIME = RowSpec(
    "Where the learner's time goes",
    (
        PanelSpec(
            "Share of each stage",
            "percentunit",
            (Query(f"sum by (stage) ({_SPENT}) / on () group_left () (sum({_SPENT}) > 0)", "{{stage}}"),),
            "all together 100 %: every second belongs to one stage. Data can only cause wait.",
            "publish or save: the engines or the disk are slower than a step. prepare: batches are not built ahead.",
            stacked=True,
            runbook="LearnerStarved",
        ),
        PanelSpec(
            "Beside training",
            "percentunit",
            (
                Query(f"sum({rate('learner_weight_publish_duration_seconds_sum', window=WINDOW)})", "publication"),
                Query(f"sum({rate('learner_checkpoint_duration_seconds_sum', window=WINDOW)})", "checkpoints"),
            ),
            "share of the time in which each is under way; it costs steps nothing while it stays below 100 %.",
            "near 100 %: steps begin to wait for it, see publish and save.",
            runbook="WeightUpdateFailing",
        ),
        PanelSpec(
            "Tokens saved and wasted",
            "percentunit",
            (
                Query(f"sum({rate('learner_shared_tokens_total', window=WINDOW)}) / ({REAL} > 0)", "shared beginnings"),
                Query(f"{PADDING} / ({_tokens()} > 0)", "padding"),
            ),
            "shared: the prompts of a group, computed once. Padding 0 % where rows are packed.",
            "much padding: raise learner.tokens_per_microbatch, or see in the log why rows are not packed.",
        ),
        PanelSpec(
            "Shared device",
            "percentunit",
            (
                Query(f"sum({rate('learner_engine_sleep_seconds_total', window=WINDOW)})", "engines asleep"),
                Query(f"sum by (to) ({rate('learner_device_handovers_total', window=WINDOW)})", "handovers to {{to}}"),
                Query(
                    f"sum by (operation) ({rate('learner_device_handover_failures_total', window=WINDOW)})",
                    "failed {{operation}}",
                ),
            ),
            "asleep for the share of training; two handovers an update, none failed. 0 where each has its own device.",
            "handovers that fail: an engine without --enable-sleep-mode, or one that hangs; the learner's log says.",
            runbook="WeightUpdateFailing",
        ),
    ),
)
