"""Evaluation beside training under seeded schedules of faults: exactly once, never trained, nothing disturbed."""

from __future__ import annotations

import heapq
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.store.effects import Evaluated
from pipeline.store.ledger import read_ledger
from tests.simulation.schedules import PER_TEST, blocks
from tests.support.simulated_roles import Faults
from tests.support.simulation import Simulation


def config_of(rng: random.Random, seed: int) -> RunConfig:
    samples = rng.randint(1, 3)
    greedy = samples == 1 and rng.random() < 0.5
    n = rng.randint(1, 4)
    replay = {
        "enabled": n > 1 and rng.random() < 0.5, "start_ratio": 0.0, "trajectories_per_task": 1,
    }  # fmt: skip
    return RunConfig.model_validate(
        {
            "run": {"total_steps": rng.randint(3, 9), "seed": seed},
            "groups": {"n_rollout": n, "groups_per_step": rng.randint(1, 3), "attempts_max": rng.randint(2, 4)},
            "staleness": {"max": rng.randint(0, 2)},
            "checkpoint": {"every": rng.randint(1, 4)},
            "environments": {
                "a": {"weight": 2, "tasks": 6, "max_seconds": 5, "held_out": {"eval": 7}},
                "b": {"tasks": 3, "max_seconds": 5, "held_out": {"eval": 3, "test": 2}},
            },
            "stage": {"silence_seconds_max": 4.0},
            "replay": replay,
            "evaluation": {
                "every": rng.randint(1, 4),
                "tasks": 5,
                "samples": samples,
                "temperature": 0 if greedy else None,
                "pass_at": tuple({1, samples}),
                "strict": rng.random() < 0.4,
                "seconds_max": rng.choice((3600.0, 3600.0, 15.0)),
            },
        }
    )


class Recorded(Simulation):
    """Keeps the results that were said once they were durable."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.results: dict[int, dict[str, Any]] = {}
        super().__init__(*arguments, **more)

    def _do_round(self) -> None:
        core = self.core
        collect = core.collect if core is not None else None
        if core is not None and collect is not None:

            def kept() -> Any:
                changes, effects = collect()
                for effect in effects:
                    if isinstance(effect, Evaluated):
                        self.results[effect.result["evaluation"]] = effect.result
                return changes, effects

            core.collect = kept  # type: ignore[method-assign]
        try:
            super()._do_round()
        finally:
            if core is not None and collect is not None:
                core.collect = collect  # type: ignore[method-assign]

    def finish(self) -> None:
        """The end of the run waits for the last evaluation."""
        until = self.now + 600
        while self._heap and self.now < until and not self.ended:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self._do_round()

    @property
    def ended(self) -> bool:
        core = self.core
        last = None if core is None or core.evaluations.active is not None else core.evaluations.last
        return last is not None and bool(last["updates"] == self.config.run.total_steps)


@pytest.mark.parametrize("block", blocks(40))
def test_evaluations_keep_every_account_under_faults(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = 0
    for seed in range(block * PER_TEST, (block + 1) * PER_TEST):
        rng = random.Random(seed)
        config = config_of(rng, seed)
        monkeypatch.setattr("pipeline.stage.evaluation_schedule.SLOTS_SHARE", rng.choice((0.25, 0.5, 1.0)))
        faults = Faults() if seed % 5 == 0 else Faults.drawn(rng, until=200.0)
        folder = tmp_path / str(seed)
        folder.mkdir()
        sim = Recorded(config, folder / "r.sqlite", seed, faults, rng.randint(1, 3), slots=rng.randint(1, 8))
        sim.run()
        sim.finish()
        try:
            check(sim, calm=seed % 5 == 0)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        finally:
            sim.close()
        complete += sum(r["status"] == "complete" for r in sim.results.values())
    assert complete >= PER_TEST


def check(sim: Recorded, *, calm: bool) -> None:
    weights, core, store, section = sim.learner.weights, sim.core, sim.store, sim.config.evaluation
    assert core is not None and store is not None
    assert weights.updates == sim.config.run.total_steps, f"no progress: {weights.updates} updates at {sim.now:.0f} s"
    assert not any(peer.refused for peer in sim.peers), [peer.refused for peer in sim.peers]
    ledger = read_ledger(sim.path, rows=True)
    assert ledger.audit() == []
    with sqlite3.connect(sim.path) as connection:
        rows = connection.execute(
            "SELECT g.state, t.state, g.task FROM trajectories t JOIN groups g ON g.group_number = t.group_number"
        ).fetchall()
        payloads = {row[0] for row in connection.execute("SELECT row_id FROM payloads")}
        tasks = {row[0] for row in connection.execute("SELECT task_id FROM tasks")}
        ids = [row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories")]
    connection.close()
    assert len(ids) == len(set(ids))
    assert payloads == core.payloads.holders.keys()
    held_out = [b"/eval/" in task for _, _, task in rows]
    for (group, trajectory, task), out in zip(rows, held_out, strict=True):
        assert (trajectory == "evaluated") <= out, f"a task of training was evaluated: {task!r}"
        assert not out or trajectory in ("evaluated", "dropped"), f"a held-out task was {trajectory}"
        assert not out or group in ("evaluated", "cancelled", "evaluating")
    assert not any("/eval/" in task for task in tasks), "difficulty is kept of a held-out task"
    last = sim.results[max(sim.results)]
    assert sim.ended, f"the last evaluation did not end: {core.evaluations.progress}"
    assert last["updates"] == weights.updates and last["reason"] == "end"
    assert core.evaluations.last is not None and core.evaluations.last["evaluation"] == last["evaluation"]
    for number, result in sim.results.items():
        if result["status"] != "complete":
            continue
        assert set(result["environments"]) == {"a", "b"}
        for name, wanted in (("a", 5), ("b", 3)):
            told = result["environments"][name]
            assert told["tasks"] == wanted and told["rollouts"] + told["missing"] == wanted * section.samples
        oldest, newest = result["versions"] or (result["policy_version"],) * 2
        assert oldest >= result["policy_version"], "sampled by weights older than those evaluated"
        if section.strict and calm:
            assert newest == result["policy_version"], f"evaluation {number} is of one version only"
        if calm:
            assert told["missing"] == 0
    if calm:
        assert [r["evaluation"] for r in sim.results.values()] == list(range(len(sim.results)))
        assert sim.results[0]["reason"] == "start"
