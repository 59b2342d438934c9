"""Row about lessons in the prompt: are they written, found in time, and do they help?"""

from __future__ import annotations

from grafana import promql as q
from grafana.promql import metric, rate
from grafana.queries import by_label, p50_p95
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import WINDOW

_REWARD = "actor_guidance_reward"

LESSONS = RowSpec(
    "Lessons in the prompt",
    (
        PanelSpec(
            "Reward with and without lessons",
            "none",
            (
                Query(
                    f"sum by (guided) ({rate(_REWARD + '_sum', window=WINDOW)}) / "
                    f"(sum by (guided) ({rate(_REWARD + '_count', window=WINDOW)}) > 0)",
                    "guided: {{guided}}",
                ),
            ),
            "guided above unguided, and unguided rising: the policy learns what the lessons say.",
            "guided below unguided: the lessons mislead; look at their text or lower lessons.rollout_ratio.",
        ),
        PanelSpec(
            "Guided episodes",
            "cps",
            (Query(f"sum by (train) ({rate('actor_guided_episodes_total', window=WINDOW)})", "train: {{train}}"),),
            "lessons.rollout_ratio of all episodes once there are lessons; keep and discard by lessons.train_mode.",
            "0: nothing is found (see searches) or nothing is written.",
            stacked=True,
        ),
        PanelSpec(
            "Lessons",
            "short",
            (
                Query(f"max({metric('replay_lessons')})", "in the memory"),
                Query(f"sum({metric('replay_lessons_written_total')})", "written since the stage started"),
            ),
            "grows up to lessons.capacity. 0 in the memory with lessons.source: reme.",
            "stands still: groups give nothing new, or their writer fails.",
            runbook="LessonWriterFailing",
        ),
        PanelSpec(
            "Groups asked for lessons",
            "cps",
            (by_label("outcome", "replay_lesson_groups_total", window=WINDOW),),
            "written or nothing; groups whose rollouts all got the same reward are not asked by the built-in writer.",
            "timeout, error: the writer plug-in. dropped: groups finish faster than it reads.",
            stacked=True,
            runbook="LessonWriterFailing",
        ),
        PanelSpec(
            "Searches of actors",
            "cps",
            (by_label("outcome", "actor_lesson_searches_total", window=WINDOW),),
            "found, after a start with none.",
            "no_room: lessons do not fit in the context, lower lesson_characters_max. timeout: see their duration.",
            stacked=True,
            runbook="LessonSearchFailing",
        ),
        PanelSpec(
            "Searches in the stage",
            "cps",
            (by_label("outcome", "replay_lesson_searches_total", window=WINDOW),),
            "what the actors ask; all 0 with lessons.source: reme.",
            "dropped: more questions waited than the stage takes. error: the memory's file, see the stage's log.",
            stacked=True,
            runbook="LessonSearchFailing",
        ),
        PanelSpec(
            "Search duration",
            "s",
            (
                *p50_p95("actor_lesson_search_duration_seconds", legend=" actors"),
                Query(q.quantile(0.95, "replay_lesson_search_duration_seconds"), "p95 in the stage"),
            ),
            "far below lessons.timeout_seconds; some milliseconds where the processors are not all busy.",
            "slow in the stage: a large memory on a slow disk. Slow for actors only: the stage's loop is busy.",
            runbook="LessonSearchFailing",
        ),
    ),
)
