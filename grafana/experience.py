"""Expressions about experience replay and lessons. Aggregated, so that a stage that moved is one series."""

from __future__ import annotations

from grafana.promql import ess, metric, rate
from grafana.thresholds import AUDIT_WINDOW, WINDOW

REPLAY = 'source="replay"'
FRESH = 'source="fresh"'
GROUP_FAILURES = 'outcome=~"timeout|error|dropped"'
SEARCH_FAILURES = 'outcome=~"timeout|error"'


def _share(part: str, whole: str) -> str:
    """``part`` of ``whole``; nothing while there is nothing of the whole."""
    return f"sum({part}) / (sum({whole}) > 0)"


def replay_ess(panel: bool = True) -> str:
    return ess("token", REPLAY, panel=panel)


def share_kept(panel: bool = True) -> str:
    """The guard's factor."""
    return f"min({metric('replay_guard_factor_ratio', panel=panel)})"


def choice_failures(panel: bool = True) -> str:
    failed = rate("replay_choice_failures_total", window=WINDOW, panel=panel)
    return _share(failed, rate("replay_replays_trained_total", window=WINDOW, panel=panel))


def pool_entries(panel: bool = True) -> str:
    """Stored trajectories; nothing where replay is off (a capacity of 0)."""
    capacity = metric("replay_experience_pool_capacity", panel=panel)
    return f"sum({metric('replay_experience_pool_entries', panel=panel)}) and sum({capacity}) > 0"


def pool_fill(panel: bool = True) -> str:
    entries = metric("replay_experience_pool_entries", panel=panel)
    return _share(entries, metric("replay_experience_pool_capacity", panel=panel))


def replayed_tokens(panel: bool = True) -> str:
    return f"max(avg_over_time({metric('learner_replay_token_ratio', panel=panel)}[{WINDOW}]))"


def oldest_age(panel: bool = True) -> str:
    """Versions since the oldest token of the pool was sampled."""
    oldest = metric("replay_experience_oldest_version", panel=panel)
    return f"max({metric('learner_policy_version', panel=panel)}) - min({oldest})"


def audit_mean(name: str, by: bool = True, population: str = "", panel: bool = True) -> str:
    """Mean of ``replay_audit_<name>`` over its window, by population or of one."""
    match = (f'population="{population}"',) if population else ()
    total = rate(f"replay_audit_{name}_sum", *match, window=AUDIT_WINDOW, panel=panel)
    count = rate(f"replay_audit_{name}_count", *match, window=AUDIT_WINDOW, panel=panel)
    group = "sum by (population)" if by else "sum"
    return f"{group} ({total}) / ({group} ({count}) > 0)"


def length_bias(panel: bool = True) -> str:
    """Mean sampled tokens of what was trained fresh over that of everything that was played."""
    trained = audit_mean("tokens", by=False, population="trained", panel=panel)
    return f"({trained}) / ({audit_mean('tokens', by=False, population='sampled', panel=panel)})"


def lesson_search_failures(panel: bool = True) -> str:
    """As the actors see it: a search that the stage dropped is one that timed out."""
    failed = rate("actor_lesson_searches_total", SEARCH_FAILURES, window=WINDOW, panel=panel)
    return _share(failed, rate("actor_lesson_searches_total", window=WINDOW, panel=panel))


def lesson_group_failures(panel: bool = True) -> str:
    failed = rate("replay_lesson_groups_total", GROUP_FAILURES, window=WINDOW, panel=panel)
    return _share(failed, rate("replay_lesson_groups_total", window=WINDOW, panel=panel))
