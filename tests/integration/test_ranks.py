"""A learner of several ranks: the same numbers as one process, resumed by any number, and never left hanging."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.integration.ranks_program import run
from tests.support.fork_server import ForkServer
from tests.unit.learner.conftest import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "integration" / "ranks_program.py"
SECONDS = 300
"""A guard against hanging, far above what they take."""
GAE = {"advantage": {"estimator": "gae"}}
LORA = {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}
CASES = {
    "plain": {},
    "several_steps": {
        "learner": {"epochs": 2, "minibatches": 2},
        "sections": {"loss": {"entropy_bonus": 0.05, "aggregation": "sequence_mean"}},
    },
    "many_microbatches": {"rows": 24, "learner": {"tokens_per_microbatch": 1}},
    "fewer_rows_than_ranks": {"rows": 1},
    "rows_without_signal": {"without_signal": [0, 2, 3, 4, 5, 6], "learner": {"gradient_checkpointing": True}},
    "critic": {"sections": GAE},
    "critic_on_the_policy": {"sections": GAE, "learner": {"critic": {"backbone": "none"}}},
    "reference": {"sections": {"loss": {"kl": "loss"}}},
    "sequence_ratios": {"sections": {"loss": {"policy": "gspo"}}},
    "masks": {"sections": {"loss": {"off_policy": "second_moment"}, "replay": {"ess_guard": {"enabled": True}}}},
    "adapters": {"sections": {"loss": {"kl": "loss"}}, "learner": {"lora": LORA}},
    "turns": {"turns": True, "sections": {**GAE, "loss": {"kl": "loss"}}},
    "turns_of_adapters": {"turns": True, "learner": {"lora": LORA}},
    "experts": {"model": "experts", "sections": GAE},
    "recorded_experts": {
        "model": "experts",
        "recorded": True,
        "learner": {"routing_replay": True, "gradient_checkpointing": True, "tokens_per_microbatch": 1},
        "sections": {"loss": {"load_balancing": 0.5}},
    },
    "not_finite": {"poison": 1},
    "groups": {
        "groups": 4,
        "replayed": 3,
        "learner": {"tokens_per_microbatch": 500},
        "sections": {
            "replay": {
                "correction": {"name": "sequence", "max": 20},
                "ess_guard": {"enabled": True, "level": "sequence"},
            }
        },
    },
    "a_divided_group": {
        "groups": 1,
        "sections": {"loss": {"policy": "gspo", "aggregation": "sequence_mean"}},
    },
}
ROUNDED = {
    "bfloat16": {"learner": {"compute_dtype": "bfloat16"}},
    "bfloat16_moments": {"learner": {"optimizer_dtype": "bfloat16"}},
}
"""Other micro-batches, other roundings."""
PARTS = {"sections": {**GAE, "loss": {"kl": "loss"}}}


MESHES = ("2x4", "4x2")
"""Replicas times shards, of eight processes."""
OF_LAYOUT = {
    "2": tuple(CASES),
    "4": (
        "plain",
        "rows_without_signal",
        "reference",
        "sequence_ratios",
        "recorded_experts",
        "groups",
        "a_divided_group",
        "turns",
    ),
    "2x4": (
        *("many_microbatches", "several_steps", "fewer_rows_than_ranks", "critic", "masks", "adapters", "experts"),
        "not_finite",
    ),
    "4x2": ("several_steps", "adapters", "not_finite", "turns"),
}
"""Cases of each number of ranks, and of each mesh of two dimensions: more processes share the same cores. One process
runs all."""
RESUMED = [("1", "2"), ("2", "1"), ("2", "2"), ("2", "4"), ("2", "2x4"), ("2x4", "4x2"), ("2x4", "1")]
"""Layouts before and after a checkpoint."""


def by_ranks(layout: str) -> dict:
    """Cases that the processes of a layout run, with one that saves and some that go on from others' checkpoints."""
    cases = {name: CASES[name] for name in OF_LAYOUT.get(layout, CASES)} | ROUNDED
    for name, parts in (
        ("saved", PARTS),
        ("adapters_saved", {"learner": {"lora": LORA}}),
        ("experts_saved", {"model": "experts"}),
    ):
        if layout in {before for before, _ in RESUMED}:
            cases[name] = {**parts, "save": f"{name}{layout}"}
        for before in [before for before, after in RESUMED if after == layout]:
            cases[f"{name}_from{before}"] = {**parts, "load": f"{name}{before}", "seed": 9}
    return {**cases, "transfer": {"transfer": True}} if layout == "2" else cases


def train(server: ForkServer, layout: str, folder: Path) -> None:
    """The processes of a layout with the cases of their file, to their end."""
    size = math.prod(map(int, layout.split("x")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(PROGRAM), str(folder), layout]
    processes = []
    try:
        for rank in range(size):
            with (folder / f"{rank}-of-{layout}.log").open("wb") as log:
                env = {**environment, "RANK": str(rank)}
                processes.append(server.start(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT))
        for rank, process in enumerate(processes):
            code = process.wait(SECONDS)
            assert code == 0, f"rank {rank}:\n{(folder / f'{rank}-of-{layout}.log').read_text()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def experts_model() -> Qwen3MoeForCausalLM:
    """Of six experts a layer, four ranks have two, two, two and none."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, initializer_range=0.4,
            max_position_embeddings=128,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fork_server):
    """Results of one, two, four and eight processes: ``ranksLAYOUT/CASE.json`` and ``.safetensors``."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model().save_pretrained(folder / "model")
    experts_model().save_pretrained(folder / "experts")
    for name in ("model", "experts"):
        (folder / name / "tokenizer.json").write_text("{}")
    torch.set_num_threads(1)
    of_one = by_ranks("1")
    for layout in ("2", "4", *MESHES):
        (folder / f"cases{layout}.json").write_bytes(orjson.dumps(by_ranks(layout)))
    run(folder, {name: case for name, case in of_one.items() if "load" not in case}, None)
    for layout in ("2", "4", *MESHES):
        train(fork_server, layout, folder)
    run(folder, {name: case for name, case in of_one.items() if "load" in case}, None)
    return folder


def found(folder, layout, name):
    where = folder / f"ranks{layout}"
    return orjson.loads((where / f"{name}.json").read_bytes()), load_file(where / f"{name}.safetensors")


def assert_same(came, expected, updates=slice(None), rtol=1e-4, atol=1e-5):
    for report, other in zip(came[0]["updates"], expected[0]["updates"][updates], strict=True):
        if not any(other["nonfinite"].values()):  # a sum that was given up has no meaning
            for name, value in other.items():
                alike = value if not isinstance(value, float) else pytest.approx(value, rel=rtol, abs=atol)
                assert report[name] == alike or name == "microbatches", name
    assert came[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(came[1][name], tensor, rtol=rtol, atol=atol)


pytestmark = pytest.mark.timeout(2 * SECONDS + 120)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout, names in OF_LAYOUT.items() for name in names])
def test_several_ranks_make_the_updates_of_one(folder, layout, name):
    assert_same(found(folder, layout, name), found(folder, 1, name))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), [(m, name) for m in MESHES for name in (*OF_LAYOUT[m], *ROUNDED)])
def test_replicas_stay_equal_by_gradients_norm_and_random_state_once_an_optimizer_step(folder, layout, name):
    facts = found(folder, layout, name)[0]
    critics = sum(report["critic"] is not None for report in facts["updates"])
    steps = sum(report["steps"] + sum(report["nonfinite"].values()) for report in facts["updates"])
    assert facts["between"] == 3 * (steps + critics)
    assert facts["differing"] == 0, "replicas are equal bit for bit"
    if name == "many_microbatches":
        assert all(report["microbatches"] == 24 for report in facts["updates"]), "three of each rank"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2", "4", *MESHES])
@pytest.mark.parametrize("name", ROUNDED)
def test_reduced_precision_changes_an_update_by_roundings(folder, layout, name):
    """The first one: later ones begin from weights that differ, which AdamW makes more of than the gradient does."""
    came, expected = (({"updates": found(folder, n, name)[0]["updates"][:1]}, {}) for n in (layout, 1))
    assert_same(came, expected, rtol=5e-3)


@pytest.mark.slow
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(folder):
    for layout in (1, 2, *MESHES):
        reports = found(folder, layout, "not_finite")[0]["updates"]
        assert [sum(r["nonfinite"].values()) for r in reports] == [0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), RESUMED)
@pytest.mark.parametrize("name", ["saved", "adapters_saved", "experts_saved"])
def test_another_number_of_ranks_and_replicas_goes_on_from_a_checkpoint(folder, before, after, name):
    came = found(folder, after, f"{name}_from{before}")
    assert_same(came, found(folder, 1, name), slice(2, None))
    assert (came[0]["updates"][0]["critic"] is not None) == (name == "saved")


@pytest.mark.slow
def test_the_model_of_a_checkpoint_has_the_bits_of_the_weights_in_training(folder):
    for name, parts in (("saved", []), ("adapters_saved", ["adapter"])):
        for layout, of_several in (("1", []), ("2", ["shards"]), ("2x4", ["shards"])):
            facts = found(folder, layout, name)[0]
            assert facts["same"] and facts["damage"] == "" and (facts["files"] > 1) == (layout != "1")
            assert facts["names"] == sorted(
                ["contents.json", "model", "state.json", "training.pt", *parts, *of_several]
            )
    for before, after in RESUMED:
        assert found(folder, after, f"saved_from{before}")[0]["resumed"]


@pytest.mark.slow
def test_the_random_state_goes_with_the_checkpoint(folder):
    drawn = {layout: found(folder, layout, "saved")[0]["random"] for layout, _ in RESUMED}
    for before, after in RESUMED:
        came = found(folder, after, f"saved_from{before}")[0]["random"]
        assert came[0] == drawn[before][0]
        if before == after:
            assert came == drawn[before]
        shards = int(after.rpartition("x")[2])
        assert len(set(came)) == shards, "each shard has draws of its own, the same in all replicas"
        assert came == came[:shards] * (len(came) // shards)


@pytest.mark.slow
def test_every_rank_takes_part_in_a_transfer_and_none_hangs_when_the_engine_fails(folder):
    found = orjson.loads((folder / "transfer.json").read_bytes())
    started = ["start"], ["start", "update"], ["start", "update", "finish"], ["start", "update", "finish"], []
    assert [publication["calls"] for publication in found] == list(started)
    assert [bool(publication["error"]) for publication in found] == [True, True, True, False, False]
    whole = found[3]
    assert whole["handles"] == {name: {"GPU-0": d, "GPU-1": d} for name, d in whole["digests"].items()}


@pytest.mark.slow
def test_ranks_gather_one_weight_at_a_time_for_an_engine_and_none_hangs_when_it_is_lost(folder):
    found = orjson.loads((folder / "broadcast.json").read_bytes())
    assert [publication["same"] for publication in found] == [[True, True], [False, True], [False, True], [True, True]]
    assert ["reset" in found[1]["error"], "held up others" in found[2]["error"]] == [True, True]
    most = [publication["most"] for publication in found]
    assert most[0] <= 3 and most[3] <= 3 and max(most) <= 5, most
