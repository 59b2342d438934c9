"""The commands of ``afterplay replay``: what they take, print and refuse."""

import sqlite3
from contextlib import closing
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.errors import ConfigurationError
from pipeline.store.store import ReplayStore, store_path
from pipeline.supervisor.run import run_lock
from tests.support.tokens import flattened
from tests.unit.portable.conftest import demonstration, pooled, write_lines


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


@pytest.fixture(scope="module")
def words() -> Any:
    return pytest.importorskip("learner.models.tiny").build_tokenizer(16)


def test_the_commands_import_text_inspect_and_export(make_run, tmp_path, words):
    run = make_run()
    words.save_pretrained(run.directory.model)
    chat = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "7"},
            {"role": "user", "content": "higher"}, {"role": "assistant", "content": "9"}]  # fmt: skip
    file = write_lines(tmp_path / "d.jsonl", {"environment": "a", "seed": 1, "reward": 1, "messages": chat})
    result = invoke("replay", "import", run.path, file)
    assert result.output == "1 imported\n", result.exception
    ((entry, trajectory),) = pooled(run).values()
    assert not entry.recorded and entry.n_turns == 2
    whole = words.apply_chat_template(chat, tokenize=True, add_generation_prompt=False)
    whole = list(whole["input_ids"] if hasattr(whole, "keys") else whole)
    ids = flattened(trajectory).token_ids.tolist()
    assert ids == whole[: len(ids)] and trajectory.turns[1].completion_message.content == "9"
    assert all(turn.completion.token_ids[-1] == words.eos_token_id for turn in trajectory.turns)
    shown = invoke("replay", "inspect", run.path).output
    for word in ("pool: 1 of 50000", "1 without recorded log-probs", "bias audit", "ESS guard off", "imported"):
        assert word in shown
    value = orjson.loads(invoke("replay", "inspect", run.path, "--json").output)
    assert value["pool"]["trajectories"] == 1 and value["audit"]["stored"]["reward"] == 1.0
    nothing = dict.fromkeys(("tokens", "seconds", "reward", "age", "tasks_effective"))
    assert value["audit"]["replayed"] == {"count": 0, "tasks": 0, **nothing}
    assert "1 trajectories in" in invoke("replay", "export", run.path, tmp_path / "pool").output
    assert isinstance(invoke("replay", "export", run.path, tmp_path / "pool").exception, ConfigurationError)
    bad = write_lines(tmp_path / "e.jsonl", {"environment": "a", "seed": 1, "reward": 1, "messages": chat[:3]})
    assert "end with assistant" in str(invoke("replay", "import", run.path, bad).exception)
    with run_lock(run.directory):
        assert "is running: stop it first" in str(invoke("replay", "import", run.path, file).exception)
        assert invoke("replay", "inspect", run.path).exit_code == 0


def test_text_is_imported_before_the_run_has_prepared_its_model(tmp_path):
    text = f"""
run: {{name: new, directory: {tmp_path}}}
model: {{source: tiny, max_length: 64, tiny: {{numbers: 8}}}}
sampling: {{max_tokens: 1}}
environments: {{a: {{name: number_guess}}}}
replay: {{enabled: true, mode: mix}}
"""
    (tmp_path / "r.yaml").write_text(text)
    chat = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "7"}]
    file = write_lines(tmp_path / "d.jsonl", {"environment": "a", "seed": 1, "reward": 1, "messages": chat})
    result = invoke("replay", "import", tmp_path / "r.yaml", file)
    assert result.output == "1 imported\n", result.exception


def test_a_mistyped_command_of_replay_is_not_taken_for_a_run_file():
    assert "did you mean export?" in str(invoke("replay", "exprot", "runs/a", "b").exception)


def test_stored_groups_are_shown_and_not_exported_as_an_empty_pool(make_run, tmp_path):
    run = make_run(mode="groups")
    path = store_path(run.config, run.directory)
    with ReplayStore(path, "NORMAL"), closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO stored_groups VALUES (3, x'00', '[]', 0.5, 1, 2, 0)")
    shown = invoke("replay", "inspect", run.path).output
    assert "no policy version yet" in shown
    assert "stored: 1 of 512 groups, replayed 2 times" in shown and "pool:" not in shown
    refused = invoke("replay", "export", run.path, tmp_path / "pool").exception
    assert isinstance(refused, ConfigurationError) and "replay.mode: mix" in str(refused)
    assert not (tmp_path / "pool").exists()


def test_a_run_that_has_not_started_is_named_by_its_file(tmp_path):
    text = f"""
run: {{name: new, directory: {tmp_path}}}
groups: {{n_rollout: 4, groups_per_step: 2}}
environments: {{a: {{name: arithmetic}}}}
replay: {{enabled: true, mode: mix}}
"""
    (tmp_path / "r.yaml").write_text(text)
    file = write_lines(tmp_path / "d.jsonl", demonstration(1))
    result = invoke("replay", "import", tmp_path / "r.yaml", file)
    assert result.output == "1 imported\n", result.exception
    assert (tmp_path / "new" / "replay.sqlite").exists()


@pytest.mark.parametrize("arguments", [["FILE"], ["start", "FILE"], ["-s", "run.seed=1", "FILE"]])
def test_what_is_no_command_is_the_run_file_of_a_stage(tmp_path, arguments):
    missing = str(tmp_path / "missing.yaml")
    result = invoke("replay", *(missing if a == "FILE" else a for a in arguments))
    assert isinstance(result.exception, ConfigurationError) and "expected a run file" in str(result.exception)


@pytest.mark.parametrize("command", ["inspect", "export", "import", "start"])
def test_every_command_of_replay_explains_itself(command):
    result = invoke("replay", command, "--help")
    assert result.exit_code == 0 and len(result.output.splitlines()) > 10
