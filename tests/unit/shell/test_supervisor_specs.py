"""Processes of a run, their dependencies, and the order in which they drain."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import RunConfig
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import plan
from pipeline.supervisor.processes import ProcessSpec, specs_of
from pipeline.supervisor.restarts import Machine, SendSignal, Start

CONFIG = RunConfig.model_validate({"engine": {"kind": "external", "urls": ["http://127.0.0.1:1"]}})


EMBEDDED = RunConfig.model_validate({"engine": {"kind": "embedded", "port": 8100}})


def specs_on_cpus(config: RunConfig, folder: Path) -> list[ProcessSpec]:
    return specs_of(plan(config, Inventory((Node("laptop"),))).places, config, RunDirectory(folder))


def test_learner_and_actors_wait_for_the_replay_stage(tmp_path: Path) -> None:
    specs = {spec.name: spec for spec in specs_on_cpus(CONFIG, tmp_path)}
    assert list(specs) == ["prepare", "replay", "learner", "actor-0"]
    assert specs["learner"].rule.depends == ("replay",)
    assert set(specs["actor-0"].rule.depends) == {"prepare", "replay"}
    assert list(specs["actor-0"].command)[-2:] == ["--index", "0"]
    assert "--index" not in specs["replay"].command


def test_engine_and_learner_start_while_the_model_is_prepared(tmp_path: Path) -> None:
    specs = {spec.name: spec for spec in specs_on_cpus(EMBEDDED, tmp_path)}
    machine = Machine([spec.rule for spec in specs.values()])
    assert set(machine.begin(0)) == {Start("prepare"), Start("replay"), Start("engine-0")}
    assert machine.healthy("replay", 1) == [Start("learner")]
    assert machine.exited("prepare", 0, 2) == [Start("actor-0")]
    assert specs["engine-0"].command[-1] == "--await-model"


def test_the_replay_stage_restarts_alone_and_drains_after_the_learner(tmp_path: Path) -> None:
    machine = Machine([spec.rule for spec in specs_on_cpus(CONFIG, tmp_path)])
    machine.begin(0)
    assert machine.healthy("replay", 1) == [Start("learner")]
    assert machine.exited("prepare", 0, 2) == [Start("actor-0")]
    for name in ("learner", "actor-0"):
        machine.healthy(name, 3)
    assert machine.exited("replay", -9, 4) == []
    assert machine.tick(5) == [Start("replay")]
    assert machine.stop(6, "done") == [SendSignal("learner"), SendSignal("actor-0")]
    assert machine.exited("actor-0", 0, 6.1) == []
    assert machine.exited("learner", 0, 6.2) == [SendSignal("replay")]


def test_each_tracker_has_a_process_that_ends_last_and_is_not_needed(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"report_to": ("tensorboard", "wandb")})
    specs = {spec.name: spec for spec in specs_on_cpus(config, tmp_path)}
    found = specs["report-wandb"]
    assert list(found.command)[-4:] == ["reporter", str(tmp_path / "config.yaml"), "--index", "1"]
    assert found.rule.optional and found.rule.stateless and not found.probed
    assert found.rule.stage >= max(spec.rule.stage for spec in specs.values())


def test_ranks_of_a_node_without_rank_0_count_as_healthy_while_they_run(tmp_path: Path) -> None:
    """They serve no /healthz: asked for it, they would be killed as never healthy, and all ranks with them."""
    config = RunConfig.model_validate({**CONFIG.model_dump(), "placement": {"learner_gpus": 2}})
    nodes = Inventory(tuple(Node(name, ("0",)) for name in "ab"))
    specs = {spec.name: spec for spec in specs_of(plan(config, nodes).places, config, RunDirectory(tmp_path))}
    assert (specs["learner"].probed, specs["learner-1"].probed) == (True, False)
