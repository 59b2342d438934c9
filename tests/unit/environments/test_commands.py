"""``afterplay env``: what is listed can be named, pipes can play, a new package works as it is."""

import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.adapters.catalogue import ADAPTERS, Adapter, package
from actors.env_commands.describe import details, entries, seeds_in_words
from actors.env_commands.play import play
from actors.environments.plugins import BUILT_IN, GROUP, find, names_of
from pipeline.cli.app import app
from pipeline.cli.env import _options
from pipeline.config.load import load
from pipeline.errors import ConfigurationError
from pipeline.replay.demonstrations import read_demonstrations

ROOT = Path(__file__).resolve().parents[3]


def invoke(*args, **more):
    return CliRunner().invoke(app, ["env", *args], **more)


def test_everything_that_can_be_named_is_listed_and_loads_without_its_package():
    assert [entry.name for entry in entries()] == names_of(GROUP, BUILT_IN)
    for name in ADAPTERS:
        assert find(name).__doc__
    output = invoke("list").output
    assert all(name in output for name in names_of(GROUP, BUILT_IN))


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "babyai", Adapter("no_such_module", "pip install it"))
    with pytest.raises(ConfigurationError, match="pip install it"):
        package("babyai")
    assert "pip install it" in invoke("list").output
    output = invoke("show", "babyai").output
    assert "not ready: pip install it" in output and "level: str" in output


@pytest.mark.parametrize("code", [0, 1])
def test_the_java_of_macos_that_only_asks_for_java_is_missing(monkeypatch, code):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(shutil, "which", lambda program: "/usr/bin/java")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code))
    assert (Adapter("json", "pip", program="java").missing is None) == (code == 0)


def test_missing_program_says_so_too():
    assert "install no_such_program" in Adapter("json", "pip", program="no_such_program").missing
    assert Adapter(None, "pip").missing is None
    assert Adapter("no.such.module", "pip install no").missing == "pip install no"


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_every_option_of_every_adapter_is_documented(name):
    for option in details(name, {"urls": ["ws://127.0.0.1:9"]} if name == "openenv" else {}).options:
        assert option.doc or option.name in ("message_bytes_max", "connect_seconds_max", "output_characters",
                                             "request_seconds_max"), option  # fmt: skip


def test_show_tells_options_splits_and_a_start():
    output = invoke("show", "number_guess", "--set", "high=99").output
    assert "closeness: float = 0.0" in output
    assert "All or nothing" in output or "all or nothing" in output
    assert "from 0 to 99" in output and "train: any seed" in output


def test_a_class_without_a_docstring_is_not_described_by_that_of_its_base(tmp_path):
    file = tmp_path / "bare.py"
    file.write_text("from actors.environments import Environment\n\nclass Bare(Environment): pass\n")
    assert details(f"{file}:Bare", {}).doc == ""
    assert "``" not in invoke("list").output


def test_wrong_names_and_options_are_refused():
    assert isinstance(invoke("show", "nothing_of_the_kind").exception, ConfigurationError)
    wrong = invoke("show", "number_guess", "--set", "low=x")
    assert isinstance(wrong.exception, ConfigurationError) and "integer" in str(wrong.exception)
    assert "``" not in wrong.output, "the markup of docstrings is not for terminals"
    assert isinstance(invoke("play", "number_guess", "--set", "hihg=3").exception, ConfigurationError)
    assert isinstance(invoke("play", "number_guess", "--set", "high").exception, ConfigurationError)
    assert isinstance(invoke("play", "number_guess", "--expert").exception, ConfigurationError)


def test_options_are_read_as_a_run_file_reads_them():
    sets = ["a=1e-3", "b=on", "c=2026-01-02", "d=[1, x]", "e=010"]
    assert _options(sets) == {"a": 0.001, "b": "on", "c": "2026-01-02", "d": [1, "x"], "e": 10}
    with pytest.raises(ConfigurationError, match=r"--body x=\[1, line 1"):
        _options(["x=[1"], "--body")


def test_a_pipe_plays_to_the_end(monkeypatch):
    lines = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("0\n1\nI say \\\n2\n3\n"))
    score = play("number_guess", {"high": 3, "turns": 4}, 7, 100, lambda who, text: lines.append((who, text)))
    assert score == 1.0 and lines[-1] == ("done", "score 1")
    assert ("assistant", "0") in lines


def test_the_end_of_the_pipe_leaves(monkeypatch):
    lines = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("77\n"))
    assert play("number_guess", {}, 7, 100, lambda who, text: lines.append(who)) is None
    assert lines[-1] == "left"


def test_demonstrations_can_be_imported(kit, tmp_path):
    kit.build("babyai")
    out = tmp_path / "babyai.jsonl"
    result = invoke("demonstrate", "babyai", "-n", "3", "--first", "5", "--out", str(out), "--section", "ball")
    assert "3 episodes" in result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["environment"], line["seed"], line["reward"]) for line in lines] == [
        ("ball", s, 1.0) for s in (5, 6, 7)
    ]

    def render(messages):
        return [((1, 2), (3, 4)) for message in messages if message.role == "assistant"]

    imported = list(read_demonstrations(out, render, 0))
    assert [trajectory.task.task_id for trajectory in imported] == ["ball/5", "ball/6", "ball/7"]


@pytest.mark.slow
def test_a_new_package_passes_its_own_test(tmp_path):
    result = invoke("new", "paint_pots", "--folder", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "new",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


@pytest.mark.slow
def test_a_new_package_is_found_by_its_name_once_installed(tmp_path):
    for tool in ("pip", "hatchling"):  # asked by metadata: an imported pip keeps setuptools from loading later on
        if not any(importlib.metadata.distributions(name=tool)):
            pytest.skip("pip install pip hatchling")
    invoke("new", "paint_pots", "--folder", str(tmp_path / "new"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*install, "--target", str(tmp_path / "site"), str(tmp_path / "new")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.app", "env", "play", "paint_pots", "--seed", "1"],
        input="mauve\n",
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path / "site")))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "Mix " in run.stdout and "score 0" in run.stdout


@pytest.mark.slow
def test_a_new_project_has_a_test_that_passes_and_a_run_file_that_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", "mine"]).exit_code == 0
    assert isinstance(CliRunner().invoke(app, ["init", "mine"]).exception, ConfigurationError)
    monkeypatch.chdir("mine")
    checked = CliRunner().invoke(app, ["config", "check", "run.yaml"])
    assert checked.exit_code == 0, checked.output
    assert load("run.yaml", environment={}).environments["colours"].max_turns == 2
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(test, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Paint", "arithmetic", "babyai", "../x", "", "paint_", "p__q", "none", "episode"])
def test_a_new_name_must_be_new_and_a_name(tmp_path, name):
    assert isinstance(invoke("new", name, "--folder", str(tmp_path / "n")).exception, ConfigurationError)
    assert not (tmp_path / "n").exists()


def test_new_does_not_write_over_anything(tmp_path):
    (tmp_path / "mine").write_text("x")
    assert isinstance(invoke("new", "paint", "--folder", str(tmp_path)).exception, ConfigurationError)
    shutil.rmtree(tmp_path)


def test_seeds_in_words():
    assert seeds_in_words(range(0)) == "none"
    assert seeds_in_words(range(1, 200, 5)) == "40 seeds: 1, 6, 11, 16, 21, 26, ..."
