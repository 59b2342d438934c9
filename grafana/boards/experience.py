"""The dashboard of experience replay: is what is replayed still worth training, and how much of it is there?"""

from __future__ import annotations

from grafana import experience as e
from grafana import thresholds as limits
from grafana.boards import stats
from grafana.boards.experience_pool import BIAS, POOL
from grafana.boards.experience_use import OFF_POLICY, SHARE
from grafana.boards.lessons import LESSONS
from grafana.specs import BoardSpec, RowSpec, alert_stat

GLANCE = RowSpec(
    "At a glance",
    (
        alert_stat(
            "ESS of replays",
            "percentunit",
            e.replay_ess(),
            limits.REPLAY_ESS,
            "ReplayEssLow",
            "above 0.5; below that of fresh tokens. No data before the first replay.",
            "stored trajectories are too far from today's policy: set replay.max_age or replay.ess_guard.enabled.",
            1,
        ),
        alert_stat(
            "Share kept by the guard",
            "percentunit",
            e.share_kept(),
            limits.REPLAY_SHARE_KEPT,
            "ReplayShareCollapsed",
            "100 %; always so without replay.ess_guard.enabled.",
            "the guard found the ESS of replays below its floor again and again: see ESS of replays.",
            0,
        ),
        alert_stat(
            "Replayed tokens",
            "percentunit",
            e.replayed_tokens(),
            limits.REPLAYED_TOKENS,
            "ReplayDominates",
            "about task_ratio x k / n_rollout once mixing has begun; 0 before.",
            "the run trains on its past more than on its present: lower replay.task_ratio or trajectories_per_task.",
            1,
        ),
        alert_stat(
            "Failed choices",
            "percentunit",
            e.choice_failures(),
            limits.CHOICE_FAILURES,
            "ReplayChoiceFailures",
            "0 %, as a part of the replayed trajectories. No data before the first replay.",
            "the learner's log names why candidates were not scored; the stored choice is trained meanwhile.",
            1,
        ),
        alert_stat(
            "Stored trajectories",
            "short",
            e.pool_entries(),
            limits.POOL_ENTRIES,
            "ReplayPoolEmpty",
            "grows from the first partly solved group on. No data where replay.enabled is false.",
            "no group has successes and failures both: look at tasks by difficulty.",
            0,
        ),
        stats.LENGTH_BIAS,
        stats.LESSON_SEARCHES,
        alert_stat(
            "Lesson writing failed",
            "percentunit",
            e.lesson_group_failures(),
            limits.LESSON_GROUP_FAILURES,
            "LessonWriterFailing",
            "0 %. No data where lessons.enabled is false.",
            "the writer plug-in raises, is slow, or more groups finish than it can read: see the stage's log.",
            1,
        ),
    ),
)

EXPERIENCE = BoardSpec(
    "Afterplay / Experience replay",
    "afterplay-experience",
    (GLANCE, OFF_POLICY, SHARE, POOL, BIAS, LESSONS),
)
