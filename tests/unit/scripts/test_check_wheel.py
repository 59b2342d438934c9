"""The command that proves the wheel finds its files in the pages, and fails where a step does."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_wheel = loaded()


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    check = check_wheel.Check(Namespace(folder=tmp_path / "proof", torch="torch", uv=None))
    check.prepare()
    return check


def test_the_files_are_blocks_of_their_pages(prepared: Any) -> None:
    for name in check_wheel.PAGES:
        prepared.write_block(name)
        assert (prepared.here / name).read_text().startswith(f"# {name}\n")
    assert "total_steps: 30" in (prepared.here / "run.yaml").read_text()


def test_a_command_with_another_exit_code_is_a_failure_with_its_output(prepared: Any) -> None:
    assert prepared.call("sh", "-c", "echo $PYTHONPATH; cat", typed="typed") == "\ntyped"
    with pytest.raises(check_wheel.Failed, match=r"expected exit code 0 of sh .*, got 3:\nwhy"):
        prepared.call("sh", "-c", "echo why; exit 3")
    with pytest.raises(check_wheel.Failed, match="no-such-program on the path"):
        prepared.call("no-such-program")


def test_only_its_own_folder_is_emptied(prepared: Any, tmp_path: Path) -> None:
    (prepared.here / "left").write_text("")
    prepared.prepare()
    assert not (prepared.here / "left").exists() and (prepared.here / "pipeline").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(check_wheel.Failed, match="an empty or missing folder"):
        check_wheel.Check(Namespace(folder=tmp_path / "mine", torch="torch", uv=None)).prepare()
    assert (tmp_path / "mine" / "thesis.tex").exists()
