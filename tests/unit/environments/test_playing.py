"""``afterplay env play`` runs an episode as an actor does: with agent loop, tools, and the data of a run file."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.adapters.games import NumberGuess
from actors.env_commands.demonstrate import demonstrate
from actors.env_commands.describe import shown
from actors.env_commands.play import play
from pipeline.errors import ConfigurationError
from pipeline.schema import Message

ROOT = Path(__file__).resolve().parents[3]


def call(expression):
    return "<tool_call>" + json.dumps({"name": "calculator", "arguments": {"expression": expression}}) + "</tool_call>"


def typed(monkeypatch, *lines, name="big_sums", seed=0, **more):
    """(score, printed lines) of an episode with these lines on standard input."""
    printed = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    score = play(name, more.pop("options", {}), seed, 100, lambda *line: printed.append(line), **more)
    return score, printed


def test_tools_are_told_and_can_be_called_by_hand(monkeypatch):
    score, lines = typed(monkeypatch, call("60494 + 65125"), "125619", options={"examples": 0})
    assert next(text for who, text in lines if who == "tools").startswith("calculator(expression: string)")
    assert ("tool", "125619") in lines and score == 1.0 and lines[-1] == ("done", "score 1")


def test_a_wrong_call_is_told_and_the_play_goes_on(monkeypatch):
    score, lines = typed(monkeypatch, call("60494 +"), "1", options={"examples": 0})
    assert score == 0.0 and any(who == "tool" and "Error" in text for who, text in lines)


def test_calls_that_stand_in_the_prompt_are_shown():
    calls = [{"id": "1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}]
    assert "calculator" in shown(Message("assistant", "", {"tool_calls": calls}))
    assert shown(Message("user", "Hello")) == "Hello"


def run_file(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"q": f"What is {i}?", "a": i}) + "\n" for i in range(20)))
    tasks = {"kind": "jsonl", "path": str(data), "columns": {"prompt": "q", "answer": "a"}, "splits": {"train": 1.0}}
    section = {"name": "question", "options": {"template": "{prompt} Be brief."}, "tasks_from": tasks, "max_turns": 1}
    path = tmp_path / "run.yaml"
    run = {"environments": {"asked": section}, "scorer": {"environment_weight": 0, "functions": [{"path": "number"}]}}
    path.write_text(json.dumps(run))
    return path


def test_a_section_of_a_run_file_is_played_with_its_data(monkeypatch, tmp_path):
    path = run_file(tmp_path)
    for seed in (0, 7, 27):
        score, lines = typed(monkeypatch, "42", name="asked", seed=seed, run_file=path)
        assert lines[0] == ("user", f"What is {seed % 20}? Be brief.")
        assert score == 0.0
        assert lines[-1] == ("note", "the score does not include number: the scorer runs only in a run")
    with pytest.raises(ConfigurationError, match=r"environments of .* \(asked\), got 'other'"):
        typed(monkeypatch, "42", name="other", run_file=path)


def test_a_demonstration_that_fails_leaves_the_file_that_was_there(monkeypatch, tmp_path):
    out = tmp_path / "mine.jsonl"
    out.write_text("precious")
    with pytest.raises(ConfigurationError, match="has no expert"):
        demonstrate("number_guess", {}, "guess", range(3), out)
    monkeypatch.setattr(NumberGuess, "expert", lambda self, task: ["1"], raising=False)
    with pytest.raises(ConfigurationError, match=r"--out: .* cannot be written"):
        demonstrate("number_guess", {}, "guess", range(3), tmp_path / "no" / "x.jsonl")
    monkeypatch.setattr(NumberGuess, "splits", {"train": range(4), "eval": range(4, 8)}, raising=False)
    with pytest.raises(ConfigurationError, match=r"--first, --count: expected seeds of the split train, .* got 4 to 5"):
        demonstrate("number_guess", {}, "guess", range(4, 6), out)
    monkeypatch.setattr(NumberGuess, "splits", {"eval": [3]})
    with pytest.raises(ConfigurationError, match="got 3 to 3: afterplay env show number_guess lists"):
        demonstrate("number_guess", {}, "guess", range(3, 4), out)
    assert out.read_text() == "precious" and list(tmp_path.iterdir()) == [out]


def test_demonstrations_are_of_trained_seeds_though_held_out_ones_lie_between_them(monkeypatch, tmp_path):
    guesses = [str(guess) for guess in range(8)]
    monkeypatch.setattr(NumberGuess, "expert", lambda self, task: guesses, raising=False)
    splits = {"train": tuple(seed for seed in range(20) if seed % 5), "eval": range(0, 20, 5)}  # as bfcl has them
    monkeypatch.setattr(NumberGuess, "splits", splits, raising=False)
    out = tmp_path / "demonstrations.jsonl"
    found = demonstrate("number_guess", {"high": 7, "turns": 8}, "guess", range(4, 12), out)
    assert found == (6, 0, 2)
    assert [json.loads(line)["seed"] for line in out.read_text().splitlines()] == [4, 6, 7, 8, 9, 11]


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_leaves_at_once():
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "pipeline.cli.app", "env", "play", "number_guess"]
    pipes = {"stdin": terminal, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A suite that runs in the background ignores Ctrl-C, and a player that it starts would too.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        player = subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": str(ROOT)})
    finally:
        signal.signal(signal.SIGINT, inherited)
    try:
        os.close(terminal)
        assert player.stdout is not None
        while b"Guess" not in player.stdout.readline():
            pass
        os.write(keyboard, b"8\n")
        while b"step" not in player.stdout.readline():
            pass
        player.send_signal(signal.SIGINT)
        _, error = player.communicate(timeout=60)
        assert player.returncode not in (0, None) and b"Traceback" not in error and b"Fatal" not in error
    finally:
        player.kill()
        os.close(keyboard)
