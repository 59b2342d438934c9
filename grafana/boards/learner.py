"""The dashboard of the learner: the update in full, its time, publication and checkpoints."""

from __future__ import annotations

from grafana import promql as q
from grafana import thresholds as limits
from grafana.boards import stats
from grafana.boards.learning import LEARNING, OFF_POLICY, STALENESS
from grafana.boards.objectives import OBJECTIVES, TIME
from grafana.boards.process import processes
from grafana.promql import metric, rate
from grafana.queries import p50_p95
from grafana.specs import BoardSpec, PanelSpec, Query, RowSpec, alert_stat
from grafana.thresholds import WINDOW

GLANCE = RowSpec(
    "At a glance",
    (
        stats.ESS,
        stats.RATIO_MEAN,
        alert_stat(
            "Ratios outside (0.5, 2]",
            "percentunit",
            q.ratio_tail(),
            limits.RATIO_TAIL,
            "RatioHeavyTail",
            "below 5 % of tokens.",
            "see ESS; the clip removes the gradient of most of these tokens.",
            1,
        ),
        stats.MISMATCH,
        stats.STALENESS,
        stats.IDLE,
        alert_stat(
            "Steps skipped",
            "short",
            f"sum({q.nonfinite_steps()})",
            limits.NONFINITE_STEPS,
            "NonFinite",
            f"0 in {WINDOW}.",
            "loss, gradient or ratio was not finite: lower the learning rate, look at the rewards.",
            0,
        ),
        alert_stat(
            "Age of the checkpoint",
            "s",
            q.checkpoint_age(),
            limits.CHECKPOINT_AGE_SECONDS,
            "CheckpointStale",
            "below 30 minutes. No data before the first.",
            "lower checkpoint.every, or look for a full disk.",
            0,
        ),
    ),
)

WORK = RowSpec(
    "Steps, publication, checkpoints",
    (
        PanelSpec(
            "Updates and optimizer steps",
            "cpm",
            (
                Query(f"60 * sum({rate('learner_updates_total', window=WINDOW)})", "updates"),
                Query(f"60 * sum({rate('learner_steps_total', window=WINDOW)})", "optimizer steps"),
            ),
            "steady; steps are updates x minibatches x epochs.",
            "fewer steps than that: some are skipped, see NonFinite.",
            runbook="LearnerStalled",
        ),
        PanelSpec(
            "Duration of a stage",
            "s",
            (
                Query(
                    f"sum by (stage) ({rate('learner_step_duration_seconds_sum', window=WINDOW)}) / "
                    f"(sum by (stage) ({rate('learner_step_duration_seconds_count', window=WINDOW)}) > 0)",
                    "{{stage}}",
                ),
            ),
            "means of one update; forward and backward dominate, choose only with replay.entropy: current.",
            "choose as long as forward: lower replay.max_trajectories_per_task or set replay.entropy: stored.",
        ),
        PanelSpec(
            "Learning rate",
            "none",
            (Query(f"max({metric('learner_learning_rate')})", "of the last step"),),
            "as scheduled, times what the ESS guard leaves.",
            "jumps: the guard of replay shortens steps, see the dashboard of experience replay.",
            runbook="ReplayEssLow",
        ),
        PanelSpec(
            "Weights published",
            "Bps",
            (Query(f"sum({rate('learner_weight_publish_bytes_total', window=WINDOW)})", "bytes"),),
            "the size of the model at every version.",
            "0 while steps are made: publication hangs, see WeightUpdateFailing.",
            runbook="WeightUpdateFailing",
        ),
        PanelSpec(
            "Checkpoint duration",
            "s",
            p50_p95("learner_checkpoint_duration_seconds", window="1h", legend=", last hour"),
            "steady; set by the disk.",
            "as long as several steps: checkpoint less often, or on a faster disk.",
            runbook="CheckpointStale",
        ),
    ),
)

LEARNER = BoardSpec(
    "Afterplay / Learner",
    "afterplay-learner",
    (GLANCE, OFF_POLICY, STALENESS, LEARNING, WORK, processes("learner"), TIME, OBJECTIVES),
)
