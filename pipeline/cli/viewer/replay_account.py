"""Account of what replay added to a run, in words, from its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal


def replay_account(lines: Sequence[Mapping[str, Any]], level: Literal["token", "sequence"] = "token") -> str:
    """Share of replays, and how much of it is on-policy enough to count; empty where nothing was replayed.

    ``level``: of the effective sample size, as ``replay.ess_guard.level`` has it. What one run cannot say is said too.

    >>> line = {"n_replayed": 8, "n_trajectories": 64, "tokens_trained": 100, "replay_share": 0.1}
    >>> print(replay_account([line | {"ess_carried": 0.5, "clip_fraction_replay": 0.2}]).split(". Whether")[0])
    Replay: 8 of 64 trained trajectories, 10.0% of the trained tokens. By their effective sample size they count as \
5.0%; 20.0% of them were clipped
    """
    carried = "ess_carried" if level == "token" else "sequence_ess_carried"
    replayed = sum(line.get("n_replayed") or 0 for line in lines)
    if not replayed:
        return ""
    trained = sum(line.get("n_trajectories") or 0 for line in lines)
    tokens = [(line.get("tokens_trained") or 0) * (line.get("replay_share") or 0.0) for line in lines]
    total = max(1, sum(line.get("tokens_trained") or 0 for line in lines))

    def weighted(key: str) -> float:
        return sum(n * (line.get(key) or 0.0) for n, line in zip(tokens, lines, strict=True))

    return (
        f"Replay: {replayed:,} of {trained:,} trained trajectories, {sum(tokens) / total:.1%} of the trained tokens. "
        f"By their effective sample size they count as {weighted(carried) / total:.1%}; "
        f"{weighted('clip_fraction_replay') / max(1.0, sum(tokens)):.1%} of them were clipped. "
        "Whether replay saves tokens is not visible in one run, because replayed and fresh groups train the same "
        "weights: compare it with a run without replay (afterplay compare)."
    )
