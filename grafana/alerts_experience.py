"""Alerts about experience replay and lessons."""

from __future__ import annotations

from grafana import experience as e
from grafana import thresholds as limits
from grafana.rules import Alert, beyond, off_band

EXPERIENCE_ALERTS: tuple[Alert, ...] = (
    Alert(
        "ReplayEssLow",
        beyond(e.replay_ess(panel=False), limits.REPLAY_ESS),
        "5m",
        "warning",
        "Effective sample size of the replayed tokens is {{ $value | humanizePercentage }}.",
    ),
    Alert(
        "ReplayShareCollapsed",
        beyond(e.share_kept(panel=False), limits.REPLAY_SHARE_KEPT),
        "10m",
        "warning",
        "The guard has left {{ $value | humanizePercentage }} of the share of replays for ten minutes.",
    ),
    Alert(
        "ReplayChoiceFailures",
        beyond(e.choice_failures(panel=False), limits.CHOICE_FAILURES),
        "5m",
        "warning",
        "Choices of replays with today's policy that failed: {{ $value | humanizePercentage }} of the replays.",
    ),
    Alert(
        "ReplayPoolEmpty",
        beyond(e.pool_entries(panel=False), limits.POOL_ENTRIES),
        "30m",
        "warning",
        "Replay is on and no stored trajectory has been there for half an hour.",
    ),
    Alert(
        "ReplayDominates",
        beyond(e.replayed_tokens(panel=False), limits.REPLAYED_TOKENS),
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the trained tokens are replayed.",
    ),
    Alert(
        "SelectionBias",
        off_band(e.length_bias(panel=False), limits.SELECTION_BIAS),
        "15m",
        "warning",
        "The mean length of what is trained is {{ $value | humanizePercentage }} off that of what is sampled.",
    ),
    Alert(
        "LessonSearchFailing",
        beyond(e.lesson_search_failures(panel=False), limits.LESSON_SEARCH_FAILURES),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the searches for lessons fail.",
    ),
    Alert(
        "LessonWriterFailing",
        beyond(e.lesson_group_failures(panel=False), limits.LESSON_GROUP_FAILURES),
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the groups that should give lessons give none for an error.",
    ),
)
