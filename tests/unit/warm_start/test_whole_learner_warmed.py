"""The whole learner after a warm start: engines get the warmed weights as the initial version, also after a kill."""

from __future__ import annotations

import orjson
import torch
from safetensors.torch import load_file

from learner.checkpoint import find_checkpoints
from learner.warm_start import warm_folder
from tests.unit.learner.test_learner_role import kill_after, world

__all__ = ["world"]


def warm_start(tmp_path, **more):
    """Tokens that the actor of these tests samples, after the context that it plays."""
    file = tmp_path / "toy.jsonl"
    lines = [
        {"environment": "toy", "seed": i, "reward": 1, "turns": [{"context_ids": [1, 2], "completion_ids": [3 + i, 4]}]}
        for i in range(4)
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    return {"demonstrations": str(file), "steps": 5, "batch": 2, "learning_rate": 1e-2, **more}


def rl_lines(w):
    return [line for line in w.lines() if "step" in line]


async def test_version_0_is_the_warmed_model(world, tmp_path) -> None:
    async with world(learner={"warm_start": warm_start(tmp_path)}) as w:
        ctx, run = w.learner()
        await run()
        assert ctx.status.state == "finished"
        assert w.engine.versions == [0, 1, 2, 3]
        assert len(w.engine.loaded) == 4, "version 0 was loaded, it is not what the engine was started with"
        (warmed,) = find_checkpoints(warm_folder(w.directory))
        lines = w.lines()
        assert [line.get("warm_step") for line in lines] == [1, 2, 3, 4, 5, None, None, None]
        assert [line["policy_version"] for line in rl_lines(w)] == [0, 1, 2]
        assert lines[4]["loss"] < lines[0]["loss"]
        initial = load_file(w.directory.model / "model.safetensors")
        changed = load_file(warmed / "model" / "model.safetensors")
        assert any(not torch.equal(initial[name], tensor) for name, tensor in changed.items())


async def test_a_learner_killed_after_the_warm_start_publishes_the_same_weights_again(world, tmp_path) -> None:
    learner = {"warm_start": warm_start(tmp_path)}
    async with world(total_steps=3, checkpoint={"every": 100}, learner=learner) as w:
        await kill_after(w, 6)
        _, run = w.learner()
        await run()
        assert all(len(weights) == 1 for weights in w.engine.weights_of.values()), "a version names one set of weights"
        assert w.engine.weights_of["0"] & set().union(*(w.engine.weights_of[str(v)] for v in w.engine.versions[1:]))
    assert [line["step"] for line in rl_lines(w)] == [1, 2, 3]
    assert [line["warm_step"] for line in w.lines() if "warm_step" in line] == [1, 2, 3, 4, 5], "it was made once"


async def test_demonstrations_beside_rl_are_in_every_step(world, tmp_path) -> None:
    supervised = {"weight": 0.5, "source": "file", "batch": 2, "demonstrations": warm_start(tmp_path)["demonstrations"]}
    async with world(loss={"supervised": supervised}) as w:
        ctx, run = w.learner()
        await run()
    lines = w.lines()
    assert [line["supervised_tokens"] for line in lines] == [4, 4, 4]
    assert all(line["optimizer_steps"] == 1 and line["supervised_loss"] > 0 for line in lines)
    assert ctx.registry.get_sample_value("afterplay_learner_loss", {"term": "supervised"}) > 0
