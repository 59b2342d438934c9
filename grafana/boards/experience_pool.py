"""Rows about the pool: what is in it, what enters and leaves, and what the selection does to what is learnt."""

from __future__ import annotations

from grafana import experience as e
from grafana import thresholds as limits
from grafana.promql import metric
from grafana.queries import by_label
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import AUDIT_WINDOW, WINDOW

POOL = RowSpec(
    "Pool and difficulty",
    (
        PanelSpec(
            "Pool",
            "short",
            (
                Query(e.pool_entries(), "stored"),
                Query(f"sum({metric('replay_experience_pool_capacity')})", "capacity"),
            ),
            "grows, then stays; far below the capacity with few tasks.",
            "0: nothing is stored, see tasks by difficulty.",
            limit=limits.POOL_ENTRIES,
            runbook="ReplayPoolEmpty",
        ),
        PanelSpec(
            "Pool fill",
            "percentunit",
            (Query(e.pool_fill(), "of the capacity"),),
            "grows, then stays; 100 % is fine: the oldest go.",
            "falls at once: the stage was restored from an older copy.",
        ),
        PanelSpec(
            "Pool bytes",
            "bytes",
            (Query(f"sum by (instance) ({metric('replay_experience_pool_bytes')})", "{{instance}}"),),
            "payload on disk (in memory with replay.memory_only); follows the number of stored trajectories.",
            "too much for the disk: lower replay.capacity or replay.max_trajectories_per_task.",
            stacked=True,
        ),
        PanelSpec(
            "Stored by origin",
            "cps",
            (by_label("origin", "replay_experience_saved_total", window=WINDOW),),
            "steady from rollouts; imports only where someone imported.",
            "0 for long: every group is solved or fails altogether.",
            stacked=True,
            runbook="ReplayPoolEmpty",
        ),
        PanelSpec(
            "Left by reason",
            "cps",
            (by_label("reason", "replay_experience_left_total", window=WINDOW),),
            "full (its task has others that rank before it); retired, as the policy learns; age with replay.max_age.",
            "capacity with a pool that should last: raise replay.capacity.",
            stacked=True,
        ),
        PanelSpec(
            "Tasks by difficulty",
            "short",
            (Query(f"sum by (bucket) ({metric('replay_difficulty_tasks')})", "{{bucket}}"),),
            "tasks move from hard over medium to easy and solved; those of the middle are replayed most.",
            "all hard: tasks are beyond the policy, mix easier ones in. All solved: add harder ones.",
            stacked=True,
            runbook="ReplayPoolEmpty",
        ),
        PanelSpec(
            "Retired tasks",
            "short",
            (Query(f"sum({metric('replay_retired_tasks')})", "retired"),),
            "grows; falls a little when a retest (replay.retest_ratio) fails.",
            "falls for long: the policy forgets what it could do; look at entropy and the learning rate.",
        ),
    ),
)


def _audit(title: str, unit: str, name: str, normal: str, action: str, runbook: str | None = None) -> PanelSpec:
    return PanelSpec(
        title, unit, (Query(e.audit_mean(name), "{{population}}"),), normal, action, width=6, runbook=runbook
    )


BIAS = RowSpec(
    f"Selection bias (means over {AUDIT_WINDOW})",
    (
        _audit(
            "Mean length",
            "short",
            "tokens",
            "sampled and trained together (sampled tokens); stored and replayed may be shorter, they are successes.",
            "trained below sampled: long episodes are lost to errors, time limits or stale drops.",
            "SelectionBias",
        ),
        _audit(
            "Mean reward",
            "none",
            "reward",
            "sampled and trained together; stored and replayed at the top, they are successes.",
            "trained above sampled: failures are lost, and the policy is taught by a better one than it is.",
            "SelectionBias",
        ),
        _audit(
            "Mean duration",
            "s",
            "duration_seconds",
            "sampled and trained together.",
            "trained below sampled: slow episodes are dropped; raise staleness.max or the limits of the episode.",
            "SelectionBias",
        ),
        _audit(
            "Mean age",
            "none",
            "age_versions",
            "versions; trained at most staleness.max, replayed far above, stored low (as it was when it entered).",
            "replayed climbs without end: the pool is not renewed, set replay.max_age.",
        ),
    ),
)
