"""``python -m benchmarks.routing``; see the package's docstring."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from actors.engine import engine_state as load
from actors.engine import router
from benchmarks.recorded import NUMBER_GUESS, QUICKSTART
from benchmarks.routing import __doc__ as description
from benchmarks.routing.conversations import coding, games, recorded, synthetic
from benchmarks.routing.simulation import Conversation, Costs, Fixed, Informed, Result, Routed, Rule, Simulation
from pipeline.runtime.run_directory import write_json_atomically

ACTORS, ENGINES, UPDATE_SECONDS = 4, 4, 300.0
SEEDS = range(500, 510)
SLOW = (1.0, 2.0, 4.0)
RULES = ("hashing", "sticky", "least", "router", "informed")
GAMES = Path(__file__).parent / "games.json"


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    costs: Costs
    groups: Callable[[int, int], list[list[Conversation]]]
    """From their number and the seed."""
    n_groups: int
    concurrency: int


GPU = Costs(first=0.010, each=0.00005, prompt=0.00004, batch_max=256, kv_tokens=400_000)
CPU = Costs(first=0.0404, each=0.00183, prompt=0.00103, batch_max=64, kv_tokens=46_000)
WORKLOADS = (
    Workload("gpu", GPU, synthetic, 64, 256),
    Workload("cpu", CPU, lambda groups, seed: synthetic(groups, seed, 0.25), 24, 64),
    Workload("games", GPU, lambda groups, seed: games(GAMES, groups, seed), 12, 64),
    Workload("recorded", CPU, lambda groups, seed: recorded(QUICKSTART, groups, seed), 32, 128),
    Workload("steady", CPU, lambda groups, seed: recorded(QUICKSTART, groups, seed), 160, 128),
    Workload("coding", GPU, coding, 12, 48),
    Workload("crowded", GPU, coding, 24, 96),
    Workload("guess", CPU, lambda groups, seed: recorded(NUMBER_GUESS, groups, seed), 40, 64),
)


def rules_of(kind: str, seed: int) -> list[Rule]:
    if kind == "router":
        return [Routed(ENGINES, 100 * seed + actor) for actor in range(ACTORS)]
    if kind == "informed":
        return [Informed() for _ in range(ACTORS)]
    return [Fixed(kind, ENGINES, 100 * seed + actor) for actor in range(ACTORS)]


def simulate(
    workload: Workload,
    kind: str,
    slow: float,
    seed: int,
    *,
    n_groups: int | None = None,
    concurrency: int | None = None,
    concurrency_min: int | None = None,
) -> Result:
    """One run, with one engine so many times slower."""
    costs = [workload.costs] * (ENGINES - 1) + [workload.costs.slower(slow)]
    return Simulation(
        workload.groups(n_groups or workload.n_groups, seed),
        costs,
        rules_of(kind, seed),
        concurrency=concurrency or workload.concurrency,
        concurrency_min=concurrency_min,
        update_seconds=UPDATE_SECONDS,
        seed=seed,
    ).run()


def play(workload: Workload, kind: str, slow: float, seed: int, **more: int | None) -> dict[str, Any]:
    """The numbers of one run."""
    result = simulate(workload, kind, slow, seed, **more)
    return {
        "workload": workload.name,
        "rule": kind,
        "slow": slow,
        "seed": seed,
        "mean": round(result.mean, 2),
        "p90": round(result.quantile(0.9), 2),
        "longest": round(max(result.groups), 2),
        "seconds": round(result.seconds, 2),
        "moves_per_turn": round(result.moves / result.turns, 4),
        "hits": round(result.hits, 4),
        "preemptions": result.preemptions,
        "concurrency": round(ACTORS * statistics.mean(result.concurrency), 1),
    }


def compare_rules(seeds: Sequence[int], workloads: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    print(
        f"{'workload':>9} {'slow':>4} {'rule':>8} {'mean s':>14} {'p90 s':>14} {'to none':>8} {'to hashing':>10} "
        "moves hits"
    )
    for workload in workloads:
        p90: dict[tuple[float, str], float] = {}
        for slow in SLOW:
            for kind in RULES:
                rows = [play(workload, kind, slow, seed) for seed in seeds]
                yield from rows
                p90[slow, kind] = average(rows, "p90")
                print(
                    f"{workload.name:>9} {slow:>4g} {kind:>8} {spread(rows, 'mean'):>14} {spread(rows, 'p90'):>14} "
                    f"{p90[slow, kind] / p90[1.0, kind]:>8.2f} {p90[slow, kind] / p90[slow, 'hashing']:>10.2f} "
                    f"{average(rows, 'moves_per_turn'):5.2f} {average(rows, 'hits'):.2f}",
                    flush=True,
                )


@contextmanager
def constants(free_batch: float, prefill_cost: float) -> Iterator[None]:
    """The router believes that these are the costs of an engine."""
    batch, cost = load.FREE_BATCH * free_batch, load.PREFILL_COST * prefill_cost
    with (
        mock.patch.object(load, "FREE_BATCH", batch),
        mock.patch.object(router, "FREE_BATCH", batch),
        mock.patch.object(router, "PREFILL_COST", cost),
    ):
        yield


def wrong_costs(seeds: Sequence[int], workloads: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    print(f"{'workload':>9} {'slow':>4} {'free batch':>10} {'prefill':>8} {'mean s':>14} {'p90 s':>14}")
    for workload in workloads:
        for slow in SLOW[:2]:
            for factors in ((1, 1), (0.25, 1), (4, 1), (1, 0.25), (1, 4)):
                with constants(*factors):
                    rows = [play(workload, "router", slow, seed) for seed in seeds]
                yield from (row | {"free_batch": factors[0], "prefill_cost": factors[1]} for row in rows)
                print(
                    f"{workload.name:>9} {slow:>4g} {factors[0]:>10g} {factors[1]:>8g} {spread(rows, 'mean'):>14} "
                    f"{spread(rows, 'p90'):>14}",
                    flush=True,
                )


def concurrencies(seeds: Sequence[int], workloads: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    print(f"{'workload':>9} {'episodes':>10} {'all s':>14} {'p90 s':>14} {'hits':>5} {'on average':>10}")
    for workload in workloads:
        numbers = [workload.concurrency * 2**i // 4 for i in range(5)]
        for most, least in [*((n, None) for n in numbers), (numbers[-1], numbers[0])]:
            n_groups = 5 * workload.n_groups
            rows = [
                play(workload, "router", 1.0, seed, n_groups=n_groups, concurrency=most, concurrency_min=least)
                for seed in seeds
            ]
            yield from (row | {"most": most, "least": least or most} for row in rows)
            print(
                f"{workload.name:>9} {f'{least}-{most}' if least else most:>10} {spread(rows, 'seconds'):>14} "
                f"{spread(rows, 'p90'):>14} {average(rows, 'hits'):>5.2f} {average(rows, 'concurrency'):>10.0f}",
                flush=True,
            )


def average(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.mean(row[key] for row in rows))


def spread(rows: Sequence[dict[str, Any]], key: str) -> str:
    """Mean and its standard error over seeds."""
    values = [row[key] for row in rows]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.0f} ± {error:.0f}"


TAIL = ("coding", "crowded")


def tails(seeds: Sequence[int], workloads: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    """The 99th percentile of rollouts with one engine that is three times slower, over the one with equal engines."""
    print(f"{'workload':>9} {'rule':>8} {'equal s':>10} {'one slow s':>10} {'ratio':>6}")
    for workload in [w for w in workloads if w.name in TAIL]:
        for kind in ("sticky", "router", "informed"):
            p99 = []
            for slow in (1.0, 3.0):
                rollouts = sorted(t for seed in seeds for t in simulate(workload, kind, slow, seed).rollouts)
                p99.append(rollouts[int(0.99 * len(rollouts))])
            found = {"workload": workload.name, "rule": kind, "rollouts": len(rollouts), "seeds": list(seeds)}
            yield found | {"equal_p99": round(p99[0], 1), "slow_p99": round(p99[1], 1)}
            print(f"{workload.name:>9} {kind:>8} {p99[0]:>10.0f} {p99[1]:>10.0f} {p99[1] / p99[0]:>6.2f}", flush=True)


TABLES = {"tail": tails, "rules": compare_rules, "costs": wrong_costs, "concurrency": concurrencies}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument(
        "--workloads", nargs="+", choices=[w.name for w in WORKLOADS], default=[w.name for w in WORKLOADS]
    )
    parser.add_argument("--json", type=Path, help="every run")
    options = parser.parse_args(argv)
    workloads = [w for w in WORKLOADS if w.name in options.workloads]
    rows = list(TABLES[options.table](options.seeds, workloads))
    if options.json:
        write_json_atomically(options.json, rows)


if __name__ == "__main__":
    main()
