"""Tokens laid and the cost of the slowest rank when an update's rows are divided among ranks: arithmetic, no model.

::

    python -m benchmarks.rank_division                  # synthetic updates, and those of a real run
    python -m benchmarks.rank_division MORE.jsonl       # and those of another one (python -m benchmarks.recorded)

Of each update, for 1 to 8 ranks: *laid*, tokens computed over tokens of the rows; *slowest*, the cost of the rank with
most over an equal part of what one rank would compute; *step*, the same when ranks wait for each other in each
micro-batch. ``by length``: longest rows first, each to the rank with the fewest tokens, whatever rows share.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.recorded import QUICKSTART, read
from learner.data.division import divide
from learner.data.microbatch import SHARED_TOKENS_MIN, Form, MicroBatch, PassCost, collate, plan_rows
from learner.data.rows import Row

COST = PassCost(token=2 * 357_900_000, pair=4 * 24 * 896, sampled=2 * 896 * 151_936)
"""Of Qwen2.5-0.5B."""
FORM = Form(packed=True, shared_min=SHARED_TOKENS_MIN, cost=COST)
RANKS = (1, 2, 4, 8)
RECORDED_TOKENS = 2048
"""Of a micro-batch, as in the recorded run."""
Division = Callable[[Sequence[Row], int], list[list[int]]]


def by_length(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """Longest rows first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + len(rows[i]), rank))
    return [sorted(share) for share in shares]


DIVISIONS: dict[str, Division] = {"by length": by_length, "by prefix": lambda rows, ranks: divide(rows, ranks, FORM)}


def measure(rows: Sequence[Row], shares: list[list[int]], tokens_max: int) -> dict[str, float]:
    """Laid, slowest and step of a division (see above)."""

    def passes(share: list[int], budget: int) -> list[MicroBatch]:
        chosen = [rows[i] for i in share]
        plans = plan_rows(chosen, budget, FORM) if chosen else []
        return [collate([chosen[i] for i in p], [0.0] * len(p), [0] * len(p), form=FORM) for p in plans]

    endless = 1 << 40
    alone = sum(part.operations for part in passes(list(range(len(rows))), endless)) / len(shares)
    whole = [part for share in shares for part in passes(share, endless)]
    costs = [sorted((part.operations for part in passes(share, tokens_max)), reverse=True) for share in shares]
    count = max(map(len, costs))
    step = sum(max((own[k] for own in costs if k < len(own)), default=0) for k in range(count))
    return {
        "laid": sum(part.n_real for part in whole) / sum(len(row) - 1 for row in rows),
        "slowest": max(part.operations for part in whole) / alone,
        "step": step / alone,
    }


def synthetic(
    seed: int, groups: int, rollouts: int, prompt: int, answer: int, longest: int, turns: int = 1, system: int = 0,
    branches: float = 0.0,
) -> list[Row]:  # fmt: skip
    """Groups of multi-turn rollouts with log-normal lengths (sigma 0.5 of prompts, 1 of answers), and a geometric
    number of turns; with the chance ``branches`` a turn's history is rewritten, which begins another row."""
    rng = np.random.default_rng(seed)
    start, rows = rng.integers(0, 1 << 16, system), list[Row]()
    for g in range(groups):
        own = rng.integers(0, 1 << 16, int(np.clip(rng.lognormal(np.log(prompt), 0.5), 2, longest // 2)))
        first = np.concatenate([start, own])
        for r in range(rollouts):
            history, mask = first, np.zeros(len(first), bool)
            for turn in range(n_turns := min(4 * turns, int(rng.geometric(1 / turns)))):
                length = int(np.clip(rng.lognormal(np.log(answer), 1.0), 1, longest))
                before, before_mask = history, mask
                history = np.concatenate([history, rng.integers(0, 1 << 16, length)])
                mask = np.concatenate([mask, np.arange(length) >= (length // 2 if turn else 0)])
                if rng.random() < branches and turn < n_turns - 1:
                    rows.append(_row(history[:longest], mask[:longest], g * rollouts + r))
                    kept = len(first) + (len(before) - len(first)) // 2
                    history, mask = before[:kept], np.zeros_like(before_mask[:kept])
            if mask[:longest].any():
                rows.append(_row(history[:longest], mask[:longest], g * rollouts + r))
    return rows


def _row(ids: npt.NDArray[Any], mask: npt.NDArray[np.bool_], trajectory: int) -> Row:
    zeros = np.zeros(len(ids), np.int32)
    return Row(
        trajectory_id=str(trajectory), trajectory_index=trajectory, environment="none", token_ids=ids.astype(np.int32),
        loss_mask=mask, behaviour_logprobs=zeros.astype(np.float32), policy_versions=zeros,
        temperatures=np.ones(len(ids), np.float32), turns=zeros, advantages=np.ones(int(mask.sum()), np.float32),
    )  # fmt: skip


SYNTHETIC: dict[str, tuple[dict[str, Any], int]] = {
    "64 groups of 8, short": ({"groups": 64, "rollouts": 8, "prompt": 100, "answer": 30, "longest": 1024}, 8192),
    "8 groups of 8, one turn": ({"groups": 8, "rollouts": 8, "prompt": 700, "answer": 700, "longest": 8192}, 32768),
    "32 groups of 8, 4 turns, one system prompt": (
        {"groups": 32, "rollouts": 8, "prompt": 256, "answer": 120, "longest": 8192, "turns": 4, "system": 800}, 32768),
    "8 groups of 16, long tail, branches": (
        {"groups": 8, "rollouts": 16, "prompt": 500, "answer": 800, "longest": 32768, "turns": 3, "branches": 0.2},
        32768),
    "1 group of 64": ({"groups": 1, "rollouts": 64, "prompt": 2000, "answer": 500, "longest": 16384}, 32768),
}  # fmt: skip
"""Options of :func:`synthetic`, and tokens of a micro-batch."""


def recorded(file: Path) -> list[list[Row]]:
    """The updates of a real run (:mod:`benchmarks.recorded`). Token ids are others, alike wherever the run's were."""
    updates: dict[int, list[Row]] = {}
    before = np.zeros(0, np.int32)
    for each in read(file):
        rows = updates.setdefault(each.update, [])
        own = int(before.max(initial=0)) + 1 + np.arange(each.tokens - each.shared, dtype=np.int32)
        before = np.concatenate([before[: each.shared], own])
        mask = np.concatenate([np.arange(context + reply) >= context for context, reply in each.turns])
        rows.append(_row(before, mask, each.rollout))
    return list(updates.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", help="recorded runs")
    parser.add_argument("--out", type=Path, help="JSON")
    a = parser.parse_args()
    cases = {name: ([synthetic(0, **options)], budget) for name, (options, budget) in SYNTHETIC.items()}
    cases |= {file.stem: (recorded(file), RECORDED_TOKENS) for file in (QUICKSTART, *a.files)}
    found: dict[str, Any] = {}
    for name, (updates, budget) in cases.items():
        print(f"{name}: {len(updates)} updates, {sum(map(len, updates))} rows")
        print(f"{'':12}{'ranks':>6}{'laid':>8}{'slowest':>9}{'step':>7}")
        for division, rule in DIVISIONS.items():
            for ranks in RANKS:
                ones = [measure(rows, rule(rows, ranks), budget) for rows in updates]
                mean = {key: round(float(np.mean([one[key] for one in ones])), 3) for key in ones[0]}
                found.setdefault(name, {}).setdefault(division, {})[ranks] = mean
                print(f"{division:12}{ranks:6}{mean['laid']:8.2f}{mean['slowest']:9.2f}{mean['step']:7.2f}", flush=True)
    if a.out is not None:
        a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
