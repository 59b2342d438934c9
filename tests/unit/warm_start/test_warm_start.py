"""A warm start: the loss falls, the game is solved, and a stop in between changes nothing."""

from __future__ import annotations

import anyio
import numpy as np
import orjson
import pytest
import torch

from learner.checkpoint import find_checkpoints
from learner.making import make_trainer
from learner.metrics_log import MetricsLog
from learner.models.prepare import prepare_model
from learner.role import load
from learner.skipped import read_skipped
from learner.warm_start import WarmStart, initial_model, is_due, step_line, warm_folder, warm_up
from pipeline.errors import TrainingError
from pipeline.role import RoleContext
from pipeline.supervisor.progress import describe, read_lines


def begin(game, name="run", **warm):
    config, directory = game.run(name, **warm)
    torch.manual_seed(0)
    prepare_model(config, directory.model)
    return config, directory, WarmStart(config, directory)


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.policy.named_parameters}


def lines_of(directory):
    return [orjson.loads(line) for line in directory.metrics_file.read_bytes().splitlines()]


def test_the_cross_entropy_falls_and_the_game_is_solved(game) -> None:
    model = {"tiny": {"hidden_size": 64, "layers": 2, "heads": 2}, "source": "tiny", "max_length": 64}
    learner = {"betas": [0.9, 0.95]}
    _, directory, warm = begin(
        game, sections={"model": model}, learner=learner, steps=160, batch=24, learning_rate=5e-3
    )
    before = game.solve_rate(warm.trainer.policy, directory.model)
    losses = [warm.step().loss for _ in range(warm.steps)]
    assert losses[0] > 3.0 and np.mean(losses[-5:]) < 0.2
    after = game.solve_rate(warm.trainer.policy, directory.model)
    assert before < 0.2 and after > 0.8, (before, after)


@pytest.mark.parametrize("stop", [3, 4])
def test_a_warm_start_that_was_stopped_ends_in_the_same_weights(game, stop) -> None:
    """Stopped after a checkpoint, and between two of them: what came after the checkpoint is made again."""
    _, _, whole = begin(game, "whole", steps=8)
    for _ in range(8):
        whole.step()
    config, directory, first = begin(game, "stopped", steps=8)
    for _ in range(stop):
        first.step()
        if first.due:
            first.save()
    assert is_due(config, directory) and initial_model(directory) == directory.model
    second = WarmStart(config, directory)
    assert second.trainer.updates == 3
    while not second.done:
        second.step()
        if second.due:
            second.save()
    for name, expected in weights_of(whole.trainer).items():
        torch.testing.assert_close(dict(second.trainer.policy.named_parameters)[name].detach(), expected)
    assert not is_due(config, directory)
    assert initial_model(directory) == find_checkpoints(warm_folder(directory))[0] / "model"
    assert len(find_checkpoints(warm_folder(directory))) == 1


def test_epochs_and_steps_say_how_long_it_takes(game) -> None:
    assert begin(game, "a", epochs=2)[2].steps == 6, "2 passes over 24 trajectories, 8 in a step"
    assert begin(game, "b")[2].steps == 3
    assert begin(game, "c", steps=5)[2].steps == 5


@pytest.mark.parametrize("lora", [0, 2])
def test_rl_begins_from_the_warmed_weights_with_a_fresh_optimizer_and_they_are_its_reference(game, lora) -> None:
    learner = {"lora": {"rank": lora}} if lora else {}
    config, directory = game.run(learner={"ema_decay": 0.9, **learner}, sections={"loss": {"kl": "loss"}}, steps=6)
    prepare_model(config, directory.model)
    torch.manual_seed(0)
    warm = WarmStart(config, directory)
    while not warm.done:
        warm.step()
    warm.save()
    start = load(config, directory)
    assert start.warmed and start.checkpoint is None and start.trainer.updates == 0
    assert start.standing.policy_version == -1, "the initial version is the warmed one"
    assert not start.trainer.optimizer.state
    warmed = warm.trainer.policy.snapshot("float32")
    for name, tensor in start.trainer.policy.snapshot("float32").items():
        torch.testing.assert_close(tensor, warmed[name])
    rows = warm.demonstrations.draw((0,), 0, 4)
    evidence = start.trainer.gather(rows)
    np.testing.assert_allclose(evidence.reference, start.trainer.score(rows), rtol=1e-5, atol=1e-6)
    cold = make_trainer(config, directory.model, None)
    assert not np.allclose(cold.score(rows), start.trainer.score(rows), atol=1e-3)


async def test_the_role_shows_it_writes_its_lines_and_goes_on_after_a_stop(game, monkeypatch) -> None:
    config, directory = game.run(steps=8)
    ctx = RoleContext("learner", 0, config, directory)
    said = []
    report = ctx.report
    monkeypatch.setattr(ctx, "report", lambda state, *a, **d: (said.append((state, d)), report(state, *a, **d)))
    write = MetricsLog.write

    def stop_after_five(log, line):
        write(log, line)
        if line["warm_step"] == 5:
            ctx.stopping.set()

    monkeypatch.setattr(MetricsLog, "write", stop_after_five)
    with anyio.fail_after(60):
        await warm_up(ctx)
    assert is_due(config, directory)
    monkeypatch.setattr(MetricsLog, "write", write)
    with anyio.fail_after(60):
        await warm_up(RoleContext("learner", 0, config, directory))
    assert not is_due(config, directory)
    lines = lines_of(directory)
    assert [line["warm_step"] for line in lines] == list(range(1, 9)), "lines after the checkpoint were made again"
    assert all(line["phase"] == "warm_start" and "step" not in line for line in lines)
    assert ("warm start", {"warm_step": 1, "warm_steps": 8, "demonstrations": 24}) in said
    assert read_lines(directory.metrics_file) == [], "the curves of a run are those of RL"
    assert describe(lines[2], 4).startswith("warm start 3/8  cross-entropy ")
    with MetricsLog(directory.metrics_file, 0) as log:
        log.write({"step": 1})
    with MetricsLog(directory.metrics_file, 0):
        pass
    assert len(lines_of(directory)) == 8, "lines of RL that are made again go, those of the warm start stay"


def test_nothing_is_due_without_demonstrations_or_once_rl_has_a_checkpoint(game, kit) -> None:
    config, directory = game.run(demonstrations=None)
    assert not is_due(config, directory) and initial_model(directory) == directory.model
    config, directory, warm = begin(game, "other", steps=4)
    assert is_due(config, directory)
    for _ in range(4):
        report = warm.step()
    assert step_line(report, 4)["warm_step"] == 4
    assert is_due(config, directory), "an end that was not saved is no end"


def test_steps_that_are_not_finite_are_skipped_and_end_the_warm_start_when_they_do_not_stop(game) -> None:
    _, directory, warm = begin(game, steps=40)
    weight = warm.trainer.policy.parameters[0]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    report = warm.step()
    assert step_line(report, 40)["loss"] is None and sum(report.nonfinite.values()) == 1
    found = read_skipped(directory.skipped / "warm_start" / "u000000.batch")
    assert [row.trajectory_id for row in found.rows] == [row.trajectory_id for row in report.skipped.rows]
    with torch.no_grad():
        weight.copy_(kept)
    assert warm.step().optimizer_steps == 1
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="10 warm-start steps in a row"):
        for _ in range(10):
            warm.step()
    assert warm.trainer.updates == 12
