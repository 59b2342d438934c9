"""GPUs of this machine: those of the driver that ``CUDA_VISIBLE_DEVICES`` leaves; and inventories given by options."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.errors import ConfigurationError
from pipeline.supervisor import inventory
from pipeline.supervisor.inventory import (
    Inventory,
    Node,
    given_inventory,
    local_inventory,
    parse_list,
    visible_gpus,
)

ROOT = Path(__file__).resolve().parents[3]
TWO = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-bbbb)
"""
MIG = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11111111-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-22222222-bbbb)
"""


@pytest.mark.parametrize(
    ("text", "setting", "expected"),
    [
        (TWO, None, ("0", "1")),
        (TWO, "1,0", ("1", "0")),
        (TWO, " 1 ", ("1",)),
        (TWO, "0,7,1", ("0",)),
        (TWO, "0,-1,1", ("0",)),
        (TWO, "0,0", ("0",)),
        (TWO, "", ()),
        (TWO, "-1", ()),
        (TWO, "NoDevFiles", ()),
        (TWO, "GPU-2222,GPU-1111", ("GPU-2222", "GPU-1111")),
        (TWO, "GPU-9999", ()),
        (MIG, None, ("MIG-c6d4f1ef", "MIG-cba663e8", "GPU-22222222-bbbb")),
        (MIG, "MIG-cba663e8", ("MIG-cba663e8",)),
        ("", "0,1", ()),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(text: str, setting: str | None, expected: tuple[str, ...]) -> None:
    assert visible_gpus(parse_list(text), setting) == expected


def driver(folder: Path, text: str, code: int = 0) -> dict[str, str]:
    """An environment in which ``nvidia-smi -L`` prints ``text``."""
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable} -IS\nimport sys\nprint({text!r})\nsys.exit({code} or sys.argv[1:] != ['-L'])"
    )
    program.chmod(0o755)
    return {"PATH": str(folder)}


def test_this_machine_has_the_gpus_of_its_driver_that_are_visible(tmp_path: Path) -> None:
    environment = driver(tmp_path, TWO)
    [node] = local_inventory(environment, torch_has_cuda=True).nodes
    assert node.gpus == ("0", "1")
    assert node.cpus and node.memory_bytes
    hidden = local_inventory(environment | {"CUDA_VISIBLE_DEVICES": "GPU-2222"}, torch_has_cuda=True)
    assert hidden.nodes[0].gpus == ("GPU-2222",)


def test_the_reason_for_no_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = driver(tmp_path, TWO)
    assert local_inventory(environment, torch_has_cuda=False).lack.endswith("is a build for CPUs")
    hidden = local_inventory(environment | {"CUDA_VISIBLE_DEVICES": ""}, torch_has_cuda=True)
    assert (hidden.gpus, hidden.lack) == (0, "CUDA_VISIBLE_DEVICES= leaves none of 2")
    broken = local_inventory(driver(tmp_path, "Driver/library version mismatch", 18), torch_has_cuda=True)
    assert (broken.gpus, broken.lack) == (0, "nvidia-smi -L failed: Driver/library version mismatch")
    monkeypatch.setattr(inventory.Path, "glob", lambda path, pattern: iter(()))
    bare = local_inventory({"PATH": str(tmp_path / "none"), "CUDA_VISIBLE_DEVICES": "0"}, torch_has_cuda=True)
    assert (bare.gpus, bare.lack) == (0, "no NVIDIA driver was found")


def test_a_given_inventory_replaces_this_machine() -> None:
    here = Inventory((Node("here", ("0",), 2),))
    assert given_inventory(None, "", here) is here
    assert given_inventory(4, "", here).nodes[0].gpus == ("0", "1", "2", "3")
    assert [(n.name, len(n.gpus)) for n in given_inventory(2, "2", here).nodes] == [("node-0", 2), ("node-1", 2)]
    named = given_inventory(2, "head:8, b", here)
    assert [(n.name, len(n.gpus), n.address) for n in named.nodes] == [("head", 8, "head"), ("b", 2, "b")]
    for wrong in ("a:b", "a,a", "0", "a;b"):
        with pytest.raises(ConfigurationError, match="nodes"):
            given_inventory(1, wrong, here)


def test_the_plan_command_shows_a_table_and_json_and_fails_for_what_does_not_fit() -> None:
    file = str(ROOT / "configs" / "gpu.yaml")
    table = CliRunner().invoke(app, ["plan", file, "--gpus", "4"])
    assert table.exit_code == 0
    lines = table.output.splitlines()
    assert next(line for line in lines if line.split()[:1] == ["engine-2"]).split()[1] == "3"
    assert "4 GPUs on a machine: 1 for the learner and 3 for 3 engines" in table.output
    found = CliRunner().invoke(app, ["plan", file, "--nodes", "a:8,b:8", "--json", "--set", "actor.replicas=3"])
    value = orjson.loads(found.output)
    assert found.exit_code == 0 and len(value["places"]) == 2 + 1 + 12 + 3
    assert value["changes"]["learner"]["ranks"] == 4
    engine = next(place for place in value["places"] if place["name"] == "engine-11")
    assert (engine["node"], engine["gpus"], engine["environment"]) == ("b", ["7"], {"CUDA_VISIBLE_DEVICES": "7"})
    assert engine["command"][-4:] == ["FILE", "--index", "11", "--await-model"]
    lacking = CliRunner().invoke(app, ["plan", file, "--gpus", "2", "--set", "placement.tensor_parallel=2"])
    assert lacking.exit_code == 2
    assert "does not fit: expected 3 GPUs" in lacking.output
