"""Wrong inputs, each answered with one sentence, an exit code that is not 0, and no traceback."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.models.tiny import build_tokenizer
from pipeline.cli.app import entry
from pipeline.config.explain import resolve
from pipeline.config.load import dump, dump_yaml, load
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.run import run_lock

SECONDS_MAX = 5.0
"""CPU time of one answer, once everything is imported."""
NO_NUMBER = "no number for the scripted episode of guess (every reply is '1'): "
GUESS = {"name": "number_guess", "options": {"low": 0, "high": 7, "turns": 3, "compact": True}}
ENVIRONMENT = """
from actors.environments import Environment, Episode, Step
from pipeline.schema import Message

class Account(Episode):
    messages = (Message("user", "guess"),)

    def step(self, reply):
        return {step}

class Bank(Environment):
    {body}
    def start(self, task):
        {start}
"""


def bank(start: str = "return Account()", step: str = "Step(reward=1.0, done=True)", body: str = "") -> str:
    return ENVIRONMENT.format(start=start, step=step, body=body)


class Place:
    """A folder with a run file, in which a case is prepared."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self.run = RunDirectory(folder / "runs" / "bad")
        self.held: list[socket.socket] = []
        self.values: dict[str, Any] = {
            "run": {"directory": "runs", "name": "bad"},
            "model": {"source": "tiny", "max_length": 64, "tiny": {"numbers": 8}},
            "engine": {"kind": "embedded", "port": 0},
            "sampling": {"max_tokens": 1},
            "environments": {"guess": copy.deepcopy(GUESS)},
        }

    def write(self, name: str, text: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    def check(self, **sections: Any) -> list[str]:
        """``config check`` of the run file with these sections in place of its own."""
        self.write("run.yaml", dump_yaml({**self.values, **sections}))
        return ["config", "check", "run.yaml"]

    def text(self, text: str | bytes) -> list[str]:
        self.write("run.yaml", text)
        return ["config", "check", "run.yaml"]

    def plays(self, program: str = "", **section: Any) -> list[str]:
        """With an environment of the user's, in ``bank.py``."""
        self.write("bank.py", program)
        return self.check(environments={"bank": {"name": "bank.py:Bank", **section}})

    def asks(self, rows: str | None, **data: Any) -> list[str]:
        """With rows of data as tasks."""
        if rows is not None:
            self.write("rows.jsonl", rows)
        section = {"name": "question", "tasks_from": {"kind": "jsonl", "path": "rows.jsonl", **data}}
        return self.check(environments={"asked": section}, scorer={"functions": [{"path": "exact"}]})

    def scored(self, **function: Any) -> list[str]:
        return self.check(scorer={"functions": [function]})

    def model(self, **files: str | None) -> list[str]:
        """With a model folder whose files are changed; None removes one."""
        folder = self.folder / "model"
        build_tokenizer(8).save_pretrained(folder)
        (folder / "config.json").write_text('{"max_position_embeddings": 128}')
        for name, text in files.items():
            path = folder / name.replace("__", ".")
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
        return self.check(model={"source": "./model", "max_length": 64})

    def port(self) -> int:
        """One that is in use."""
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        self.held.append(taken)
        return int(taken.getsockname()[1])

    def resumes(self, *changes: str) -> list[str]:
        """``afterplay run`` of a run that has made three steps, with changes."""
        self.check()
        self.run.create()
        self.run.config_file.write_text(dump(resolve(load("run.yaml", environment={}))))
        (self.run.checkpoints / "u000003").mkdir()
        (self.run.checkpoints / "u000003" / "state.json").write_text("{}")
        sets = [part for change in changes for part in ("--set", change)]
        return ["run", "run.yaml", *sets]

    def without_eos(self) -> list[str]:
        self.model()
        path = self.folder / "model" / "tokenizer_config.json"
        values = json.loads(path.read_text())
        del values["eos_token"]
        return self.model(
            tokenizer_config__json=json.dumps(values),
            chat_template__jinja="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        )

    def without_gguf(self) -> list[str]:
        """With a package that carries a GGUF file."""
        self.patch.setitem(sys.modules, "gguf", None)
        for name, text in (("METADATA", "Name: some-model\nVersion: 1\n"), ("RECORD", "some.gguf,,\n")):
            self.write(f"some_model-1.dist-info/{name}", text)
        self.write("some.gguf", "")
        return self.check(model={"source": "package:some-model"})

    def with_variable(self, name: str) -> list[str]:
        self.patch.setenv(name, "1")
        return self.check()

    def without_wandb(self) -> list[str]:
        self.patch.setitem(sys.modules, "wandb", None)
        return self.check(report_to=["wandb"])

    def full(self) -> list[str]:
        self.patch.setattr("pipeline.supervisor.preflight.free_bytes", lambda path: 9_000)
        return self.check()

    def alive(self) -> list[str]:
        arguments = self.check()
        lock = run_lock(self.run)
        lock.__enter__()
        self.patch.setattr(self, "lock", lock, raising=False)
        return ["run", *arguments[2:]]

    def without_locks(self, *command: str) -> list[str]:
        def refuse(file: int, how: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        self.patch.setattr(fcntl, "flock", refuse)
        return [*command, *self.check()[2:]]

    def close(self) -> None:
        for one in self.held:
            one.close()
        if hasattr(self, "lock"):
            self.lock.__exit__(None, None, None)


NAMED = "environments: {guess: {name: number_guess}}\n"
ALIASES = NAMED + "extra:\n- &a0 [x]\n" + "".join(f"- &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
LONG = "guess " * 200
SCHEMA = """
    def tools(self):
        from actors.tools import Tool
        class Broken(Tool):
            name, description, parameters = "pay", "Pays.", {"type": "objekt"}
            async def execute(self, key, arguments): ...
        return [Broken()]
    loop = "tool_agent"
"""
CASES: dict[str, tuple[Callable[[Place], list[str]], str]] = {
    # the file
    "missing file": (
        lambda p: ["config", "check", "nowhere.yaml"],
        "expected a run file at nowhere.yaml, got: No such",
    ),
    "folder": (lambda p: ["run", "."], "expected a run file at ., got: Is a directory"),
    "unknown example": (lambda p: ["run", "@tinny"], "got @tinny; there are"),
    "not text": (lambda p: p.text(b"\xff\xfe\x00run"), "expected a run file in UTF-8 at run.yaml, got:"),
    "syntax": (lambda p: p.text("run: {seed: 1"), "run.yaml, line 1: expected ',' or '}'"),
    "latin-1": (lambda p: p.text(b"run: {}  # caf\xe9\n"), "expected a run file in UTF-8 at run.yaml"),
    "tab": (lambda p: p.text("run:\n\tseed: 1\n"), "run.yaml, line 2: found character '\\t'"),
    "control character": (lambda p: p.text(b"run: \x00"), "run.yaml: expected YAML, got unacceptable character"),
    "two documents": (lambda p: p.text("run: {}\n---\nrun: {}\n"), "expected a single document in the stream, but"),
    "a section within itself": (
        lambda p: p.text(NAMED + "run: &a\n  seed: *a\n"),
        "run.seed: expected a valid integer",
    ),
    "aliases of aliases": (lambda p: p.text(ALIASES), "unknown key extra"),
    "list": (lambda p: p.text("- run"), "expected sections like 'run:' and 'engine:', got a list"),
    "empty": (lambda p: p.text("# nothing yet\n"), "got an empty file; @tiny is a whole run file"),
    "key twice": (lambda p: p.text("run: {}\nrun: {}\n"), "expected each key once, got 'run' on line 1 and again"),
    "wrong type": (lambda p: p.check(groups={"n_rollout": "eight"}), "groups.n_rollout: expected a valid integer"),
    "unknown key": (lambda p: p.check(learner={"learning_rat": 1}), "did you mean learner.learning_rate?"),
    "unknown section": (lambda p: p.check(learnr={}), "unknown key learnr; did you mean learner?"),
    # options
    "no environment": (
        lambda p: [*p.check(), "--set", "environments.gess.weight=2"],
        "environments.gess needs the name of an environment, for example name: number_guess; did you mean "
        "environments.guess?",
    ),
    "space before the value": (
        lambda p: [*p.check(), "--set", "run.seed=", "1"],
        "--set run.seed=: expected section.key=value without spaces around =, as in --set run.seed=VALUE",
    ),
    "spaces around =": (lambda p: [*p.check(), "--set", "run.seed = 1"], "as in --set run.seed=1"),
    "spaces as a shell cuts them": (
        lambda p: [*p.check(), "--set", "run.seed", "=", "1"],
        "as in --set run.seed=VALUE",
    ),
    "key within a number": (lambda p: [*p.check(), "--set", "run.seed.x=3"], "--set run.seed.x=3: run.seed: expected"),
    "section in the environment": (
        lambda p: p.with_variable("AFTERPLAY__RUNN__SEED"),
        "environment variable AFTERPLAY__RUNN__SEED: unknown key runn; did you mean run?",
    ),
    "unknown option": (
        lambda p: ["run", "@tiny", "--fesh"],
        "afterplay: no such option: --fesh (Possible options: --fresh, --nodes); see afterplay run --help",
    ),
    "missing argument": (lambda p: ["status"], "afterplay: missing argument 'RUN'; see afterplay status --help"),
    "unknown command": (lambda p: ["trian", "@tiny"], "afterplay: no such command 'trian'"),
    "value of an option": (
        lambda p: ["chaos", "@tiny", "--minutes", "soon"],
        "unable to parse string as a number; see afterplay chaos --help",
    ),
    "one argument too many": (
        lambda p: ["config", "check", "a.yaml", "b.yaml"],
        "afterplay: got unexpected extra argument(s) (b.yaml); see afterplay config check --help",
    ),
    # numbers and names
    "true for a number": (
        lambda p: [*p.check(), "--set", "run.total_steps=true"],
        "run.total_steps: expected a valid integer, unable to parse string as an integer, got 'true'",
    ),
    "name of another folder": (
        lambda p: [*p.check(), "--set", "run.name=.."],
        "run.name: expected text of the form",
    ),
    "empty text": (
        lambda p: p.check(trackers={"project": ""}),
        "trackers.project: expected at least 1 character, got ''",
    ),
    "text for environments": (
        lambda p: p.check(environments="guess"),
        "environments: expected a section (keys and values), got 'guess'",
    ),
    "more seeds than a study has": (
        lambda p: ["compare", "a=@tiny", "b=@tiny", "--reach", "1", "--seeds", "1-99999999999"],
        "--seeds: expected at most 10000, got '1-99999999999'",
    ),
    "more nodes than a cluster has": (
        lambda p: ["plan", "@tiny", "--nodes", "99999999999"],
        "--nodes: expected at most 10000, got 99999999999",
    ),
    "more GPUs than a node has": (
        lambda p: ["plan", "@tiny", "--nodes", "a:99999999999"],
        "--nodes: expected at most 10000 GPUs on a node, got 99999999999",
    ),
    "negative size": (
        lambda p: p.check(actor={"concurrency": -4}),
        "actor.concurrency: expected greater than or equal",
    ),
    "group of one": (lambda p: p.check(groups={"n_rollout": 1}), "every advantage is 0 and nothing is learned"),
    "replay of groups of one": (
        lambda p: p.check(groups={"n_rollout": 1}, advantage={"estimator": "reinforce_pp"}, replay={"enabled": True}),
        "replay.mode: groups brings back groups of different rewards, which groups.n_rollout: 1 has none of",
    ),
    "unknown loss": (lambda p: p.check(loss={"policy": "pppo"}), "loss.policy: expected one of ppo, gspo"),
    "unknown estimator": (lambda p: p.check(advantage={"estimator": "grpoo"}), "expected one of grpo, rloo"),
    "own loss is missing": (
        lambda p: p.check(loss={"policy": p.write("mine.py", "x = 1") + ":loss"}),
        "loss.policy: function 'mine.py:loss': mine.py has no 'loss'; it has []",
    ),
    "unknown grader": (lambda p: p.scored(path="exakt"), "expected one of the graders exact, contains"),
    "option of a grader": (lambda p: p.scored(path="exact", options={"tolerance": 1}), "tolerance"),
    "own reward with an error": (
        lambda p: p.scored(path=p.write("pay.py", "\nraise ValueError('no rate')") + ":pay"),
        "importing 'pay.py' failed with ValueError: no rate (pay.py, line 2",
    ),
    "own reward is a text": (
        lambda p: p.scored(path=p.write("pay.py", "def pay(trajectory): return 'good'") + ":pay"),
        f"scorer.functions: pay.py:pay: {NO_NUMBER}expected a number or None, got str: good",
    ),
    "own reward is NaN": (
        lambda p: p.scored(path=p.write("nan.py", "def pay(trajectory): return float('nan')") + ":pay"),
        f"scorer.functions: nan.py:pay: {NO_NUMBER}it returned nan",
    ),
    "own async reward is a text": (
        lambda p: p.scored(path=p.write("later.py", "async def pay(trajectory): return 'good'") + ":pay"),
        f"later.py:pay: {NO_NUMBER}expected a number or None, got str: good",
    ),
    "own reward in a worker is a text": (
        lambda p: p.scored(path=p.write("apart.py", "def pay(trajectory): return 'good'") + ":pay", worker=True),
        f"apart.py:pay: {NO_NUMBER}expected a number or None, got str: 'good'",
    ),
    "own reward of a group is one number": (
        lambda p: p.scored(path=p.write("mean.py", "def pay(trajectories): return 1.0") + ":pay", per="group"),
        f"mean.py:pay: {NO_NUMBER}expected a list of 2 numbers, got float: 1.0",
    ),
    "grader without an answer": (
        lambda p: p.asks('{"prompt": "a", "solution": 1}\n'),
        "scorer.functions: exact: expected 'answer' in the payload of task asked",
    ),
    "grader of tasks without data": (
        lambda p: p.scored(path="number"),
        "scorer.functions: number: expected 'answer' in the payload of task guess/0, which has nothing",
    ),
    "question without a grader": (
        lambda p: p.check(environments={"asked": {"name": "question"}}),
        "whose own score is always 0",
    ),
    # environments
    "unknown environment": (
        lambda p: p.check(environments={"guess": {"name": "number_gess"}}),
        "environments.guess: there is no environment 'number_gess'",
    ),
    "environment's file is missing": (
        lambda p: p.check(environments={"bank": {"name": "bank.py:Bank"}}),
        "environments.bank: there is no file ",
    ),
    "environment's class is missing": (lambda p: p.plays("x = 1"), "environments.bank: bank.py has no 'Bank'"),
    "environment's file has an error": (
        lambda p: p.plays("import math\nlimit = math.sqrt(-1)"),
        "importing 'bank.py' failed with ValueError: math domain error (bank.py, line 2, in <module>)",
    ),
    "environment's file is no Python": (lambda p: p.plays("class Bank("), "failed with SyntaxError"),
    "class without start": (lambda p: p.plays("class Bank: pass"), "to be a class with a method start(task)"),
    "unknown option of an environment": (
        lambda p: p.check(environments={"guess": {"name": "number_guess", "options": {"hihg": 3}}}),
        "environments.guess.options: unknown hihg; NumberGuess takes low, high",
    ),
    "constructor raises": (
        lambda p: p.plays(bank(body="def __init__(self): self.rate = 1 / 0")),
        "Bank() raised ZeroDivisionError: division by zero (bank.py, line 12, in __init__)",
    ),
    "reset raises": (
        lambda p: p.plays(bank(start="return {}[task.seed]")),
        "environments.bank: environment start failed with KeyError: 0; afterplay env play bank --config FILE shows it "
        "(bank.py, line 14, in start)",
    ),
    "step raises": (lambda p: p.plays(bank(step="1 / 0")), "(bank.py, line 9, in step)"),
    "program is missing": (
        lambda p: p.check(
            environments={"agent": {"name": "program", "loop": {"name": "program", "options": {"command": ["agnet"]}}}}
        ),
        "environments.agent: expected the program agnet on the PATH, found none",
    ),
    "step returns something else": (lambda p: p.plays(bank(step="7")), "expected step() to return a Step, got 7"),
    "reward of a step is NaN": (
        lambda p: p.plays(bank(step="Step(reward=float('nan'), done=True)")),
        "expected Step.reward to be a finite number, got nan",
    ),
    "reward of a step is a text": (
        lambda p: p.plays(bank(step="Step(reward='1.0', done=True)")),
        "expected Step.reward to be a finite number, got '1.0'",
    ),
    "step exits": (lambda p: p.plays(bank(step="exit(3)")), "failed with SystemExit: it called sys.exit(3)"),
    "no messages": (
        lambda p: p.plays(bank(start="a = Account(); a.messages = (); return a")),
        "expected Episode.messages to hold at least one message",
    ),
    "tool schema": (lambda p: p.plays(bank(body=SCHEMA)), "the parameters of pay are no JSON schema"),
    "unknown loop": (lambda p: p.plays(bank(), loop={"name": "tool_agnet"}), "there is no agent loop 'tool_agnet'"),
    "unknown tool": (
        lambda p: p.plays(bank(), loop={"name": "tool_agent", "options": {"tools": ["calculater"]}}),
        "there is no tool 'calculater'",
    ),
    "env play of one that raises": (
        lambda p: ["env", "play", p.write("bank.py", bank(start="return 1 // 0")) + ":Bank"],
        "environment start failed with ZeroDivisionError: integer division or modulo by zero (bank.py, line 14",
    ),
    "nothing is held out": (
        lambda p: p.check(evaluation={"every": 10}),
        "evaluation.split is eval, which is not there (guess has none): set evaluation.split to another, or hold tasks "
        "out, for example environments: {guess: {held_out: {eval: 64}}}",
    ),
    # data
    "data is missing": (lambda p: p.asks(None), "got rows.jsonl, which does not exist"),
    "bad line": (lambda p: p.asks('{"prompt": "a", "answer": 1}\n{"prompt"\n'), "rows.jsonl, line 2: expected a JSON"),
    "data is empty": (lambda p: p.asks(""), "expected at least one row for split train of rows.jsonl"),
    "prompt is null": (lambda p: p.asks('{"prompt": null}\n'), "rows.jsonl, line 1: expected prompt as text"),
    "answer is empty": (
        lambda p: p.asks('{"prompt": "a", "answer": 1}\n' * 40 + '{"prompt": "a", "answer": " "}\n'),
        "environments.asked.tasks_from: exact cannot grade every row: expected 'answer' of task asked/40-",
    ),
    "answers are no numbers": (
        lambda p: [
            *p.asks('{"prompt": "a", "answer": 1}\n' + '{"prompt": "a", "answer": "?"}\n' * 2),
            "--set",
            "scorer.functions=[{path: number}]",
        ],
        "as a number, got '?' (and 1 more). Mend the data",
    ),
    "column is missing": (
        lambda p: p.asks('{"q": 1}\n', columns={"prompt": "question"}),
        "expected the column 'question'",
    ),
    "rows are not held out": (
        lambda p: [*p.asks('{"prompt": "a", "answer": 1}\n'), "--set", "evaluation.every=10"],
        "evaluation.split is eval, but environments.asked.tasks_from.splits has train: add it there, for example "
        "splits: {train: 0.9, eval: 0.1}",
    ),
    # model
    "model folder is missing": (lambda p: p.check(model={"source": "./nowhere"}), "nowhere is not a folder"),
    "run without its model": (
        lambda p: ["run", *p.check(model={"source": "./nowhere"})[2:]],
        "nowhere is not a folder",
    ),
    "no model in the folder": (lambda p: p.check(model={"source": "."}), "found no config.json"),
    "package is missing": (
        lambda p: p.check(model={"source": "package:nothing-of-it"}),
        "'nothing-of-it' is not installed",
    ),
    "GGUF file without gguf": (Place.without_gguf, "expected the package gguf, which reads some.gguf of 'some-model'"),
    "no source": (lambda p: p.check(model={"source": "a/b/c"}), "model.source: expected a folder, a hub id"),
    "tiny option": (
        lambda p: p.check(model={"source": "tiny", "tiny": {"layer": 2}}),
        "did you mean model.tiny.layers?",
    ),
    "template is missing": (
        lambda p: p.check(model={"source": "tiny", "chat_template": "x.jinja"}),
        "cannot read x.jinja",
    ),
    "no chat template": (lambda p: p.model(chat_template__jinja=None), "has no chat template: set model.chat_template"),
    "template without messages": (
        lambda p: p.model(chat_template__jinja="{% for m in conversations %}{{ m.content }}{% endfor %}<|end|>"),
        "that of ./model leaves out a message of the user",
    ),
    "template that cuts a message": (
        lambda p: p.model(chat_template__jinja="{% for m in messages %}{{ m.content[:20] }}<|end|>{% endfor %}"),
        "environments.guess: renderer failed with TextLost: the chat template of ./model leaves out a message of the",
    ),
    "template of one turn": (
        lambda p: p.model(
            chat_template__jinja="{{ raise_exception('too long') if messages[2] }}{% for m in messages %}"
            "{{ m.content }}<|end|>{% endfor %}"
        ),
        "environments.guess: renderer failed with TemplateError: too long",
    ),
    "no end of turn": (Place.without_eos, "neither the tokenizer nor its chat template has an end-of-turn token"),
    "longer than the model": (
        lambda p: [*p.model(), "--set", "model.max_length=256"],
        "model.max_length: expected at most the 128 positions of './model', got 256",
    ),
    "prompt is too long": (
        lambda p: p.plays(bank(start=f"a = Account(); a.messages = (Message('user', {LONG!r}),); return a")),
        "environments.bank: expected a first prompt shorter than model.max_length (64 tokens), got 203 tokens",
    ),
    # machine
    "no GPU": (lambda p: p.check(learner={"device": "cuda"}), "expected a GPU (learner.device: cuda), found none"),
    "port in use": (lambda p: p.check(engine={"kind": "embedded", "port": p.port()}), "to be free, but it is in use"),
    "metrics port in use": (lambda p: p.check(metrics={"port": p.port()}), "metrics.port: expected 127.0.0.1:"),
    "same engine twice": (
        lambda p: p.check(engine={"kind": "external", "urls": ["http://a:1", "http://a:1/"]}),
        "engine.urls: expected each engine once, got http://a:1 several times",
    ),
    "engine without http": (
        lambda p: p.check(engine={"kind": "external", "urls": ["localhost:8000"]}),
        "engine.urls: expected addresses such as http://127.0.0.1:8000, got 'localhost:8000'",
    ),
    "no engine": (lambda p: p.check(engine={"kind": "external"}), "give engine.urls"),
    "engine is not there": (
        lambda p: p.check(engine={"kind": "external", "urls": ["http://me:secret@127.0.0.1:1"]}),
        "engine.urls: engine http://127.0.0.1:1 takes no connection: ",
    ),
    "run without its engine": (
        lambda p: ["run", *p.check(engine={"kind": "external", "urls": ["http://127.0.0.1:1"]})[2:]],
        ": start it and wait until it is healthy, or correct engine.urls",
    ),
    "key is missing": (
        lambda p: p.check(engine={"kind": "external", "urls": ["http://a:1"], "actor_key": "env:NO_SUCH_KEY"}),
        "expected a key in the environment variable NO_SUCH_KEY",
    ),
    "keys are missing": (lambda p: p.check(stage={"curve": "keys"}), "stage.curve: expected keys/server.key"),
    "directory is a file": (
        lambda p: p.check(run={"directory": p.write("file", ""), "name": "x"}),
        "file, which is no folder: give another one with --set run.directory=DIR",
    ),
    "run in a file": (
        lambda p: ["run", p.check(run={"directory": p.write("file", ""), "name": "x"})[2]],
        "file, which is no folder: give another one with --set run.directory=DIR",
    ),
    "tracker is not installed": (Place.without_wandb, "report_to: expected the package wandb, which is not installed"),
    "full disk": (Place.full, "expected at least 16 MB free for a new run in"),
    # runs
    "run without locks": (
        lambda p: p.without_locks("run"),
        "got: No locks available (its file system has no locks: mount it with them, or use a folder on another one)",
    ),
    "prepare without locks": (
        lambda p: p.without_locks("prepare"),
        ".model.lock, got: No locks available (its file system has no locks",
    ),
    "run is alive": (Place.alive, "is in use by a run that is alive (supervisor pid"),
    "another model": (
        lambda p: p.resumes("model.source=./other"),
        "model.source is ./other, but the run has made 3 steps with tiny, and its weights belong to one model",
    ),
    "another task": (
        lambda p: p.resumes("environments.guess.name=passcode"),
        "environments.guess is passcode, but the run has made 3 steps with the tasks of number_guess",
    ),
    "task is gone": (
        lambda p: p.resumes("environments={sums: {name: arithmetic}}"),
        "environments.guess is gone, but the run has made 3 steps with its tasks",
    ),
    "other adapters": (lambda p: p.resumes("learner.lora.rank=4"), "its checkpoints have adapters of one shape"),
    "fresh in a folder of others": (
        lambda p: ["run", p.check()[2], "--fresh", "--set", p.write("runs/mine/x.tex", "") and "run.name=mine"],
        "--fresh: expected a run directory of Afterplay",
    ),
    "run in a folder of others": (
        lambda p: ["run", p.check()[2], "--set", p.write("runs/mine/config.yaml", "seed: 1") and "run.name=mine"],
        "expected a folder for the run at",
    ),
    "path is too long": (lambda p: ["status", "x" * 300], "got: File name too long"),
    "folders of runs are not set": (
        lambda p: ["compare", "a=.", "b=.", "--reach", "1", "--set", "run.seed=1"],
        "--set run.seed=1: expected a run file among the arms, got folders of runs alone",
    ),
    "import into an example without replay": (
        lambda p: ["replay", "import", "@tiny", p.write("rows.jsonl", "")],
        "expected a run with replay.enabled: true, got false",
    ),
    "changed steps into a run": (
        lambda p: ["retrain", *p.resumes()[:0], str(p.run.path), "--set", "loss.kl=1", "--out", str(p.run.path)],
        "--out: expected a folder of its own, got",
    ),
    "changed steps over others": (
        lambda p: ["retrain", ".", "--set", "loss.kl=1", "--out", str(Path(p.write("mine/metrics.jsonl", "")).parent)],
        "--out: expected a folder of its own, got",
    ),
    "updates of a bundle": (lambda p: ["retrain", ".", "--bundle", "b", "--updates", "2"], "a bundle has one step"),
    "texts of no bundle": (lambda p: ["retrain", ".", "--no-texts"], "--no-texts: expected --bundle beside it"),
    "private and not pushed": (
        lambda p: ["push", ".", "--out", "mine", "--private"],
        "--private: expected --to beside it",
    ),
    "a page as JSON": (
        lambda p: ["show", ".", "--html", "a.html", "--json"],
        "--html: expected neither --json nor --print beside it",
    ),
    "colours of a list": (
        lambda p: ["show", ".", "--colour", "ratio"],
        "--colour: expected TRAJECTORY or --print beside it",
    ),
    "a folder for nothing": (lambda p: ["retrain", ".", "--out", "mine"], "--out: expected --set beside it"),
    "status of no run": (lambda p: ["status", "."], "expected a run directory, got ., which has no config.yaml"),
    "curves of no run": (lambda p: ["plot", "."], "expected a run directory, got ., which has no config.yaml"),
    "rollouts of no run": (lambda p: ["show", "nowhere"], "expected a run directory"),
    "more tasks than an evaluation has": (
        lambda p: ["eval", *p.resumes()[:0], str(p.run.path), "-c", "initial", "--tasks", "9999999"],
        "eval: evaluation.tasks: expected less than or equal to 1048576, got 9999999",
    ),
    "checkpoint is missing": (
        lambda p: ["eval", *p.resumes()[:0], str(p.run.path), "-c", "9"],
        "--checkpoint: expected best, latest",
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = Place(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_run_that_is_refused_does_not_empty_its_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*place.resumes("model.source=./nowhere"), "--fresh"]
    before = sorted(path.name for path in place.run.path.iterdir())
    monkeypatch.setattr(sys, "argv", ["afterplay", *arguments])
    with pytest.raises(SystemExit):
        entry()
    assert set(before) <= {path.name for path in place.run.path.iterdir()}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_input_is_answered_with_one_sentence(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare, words = CASES[name]
    monkeypatch.setattr(sys, "argv", ["afterplay", *prepare(place)])
    monkeypatch.setattr("pipeline.runtime.logs.configure_logging", lambda *_: None)  # onto a stream of this test
    begun = time.process_time()
    with pytest.raises(SystemExit) as ended:
        entry()
    seconds = time.process_time() - begun
    said = capfd.readouterr()
    assert ended.value.code not in (0, None)
    assert words in said.err
    assert len(said.err.splitlines()) == 1 and "Traceback" not in said.err + said.out
    assert seconds < SECONDS_MAX
