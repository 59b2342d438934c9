"""All processes of a run: the engine and the learner take turns on the one device."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.case import Facts, Machine
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.ledger import read_ledger

RUN_FILE = Path(__file__).parents[2] / "configs" / "tiny.yaml"
UPDATES = 3
SETTINGS = ("engine.colocate=sleep", "learner.offload=true", "groups.groups_per_step=4", "actor.concurrency=32",
            f"run.total_steps={UPDATES}", "checkpoint.every=2", "run.name=turns")  # fmt: skip
GPU = ("engine.device=cuda", "engine.dtype=bfloat16", "learner.device=cuda", "learner.compute_dtype=bfloat16",
       "publish.dtype=bfloat16", "model.tiny.hidden_size=1024", "model.tiny.layers=16",
       "model.tiny.heads=16")  # fmt: skip
"""A decoder of 200 M parameters, so that moving it takes a time that can be seen."""
VLLM = ("engine.kind=vllm", "engine.sleep_level=2", "importance.anchor=proximal", "model.max_length=256")
LEFT_SECONDS = 30.0
"""Of the case's share, for stopping the run and reading its results."""


def turns(machine: Machine) -> Iterator[tuple[str, Facts]]:
    vllm = machine.cuda and importlib.util.find_spec("vllm") is not None
    yield "engine", {"kind": "vllm" if vllm else "embedded"}
    settings = SETTINGS + (GPU if machine.cuda else ()) + (VLLM if vllm else ())
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pipeline.cli.app", "run", str(RUN_FILE)]
        for setting in (*settings, f"run.directory={scratch}"):
            command += ["--set", setting]
        with (Path(scratch) / "output").open("w+") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},  # it tells then that it falls asleep
            )  # fmt: skip
            try:
                code: int | str = process.wait(machine.seconds - LEFT_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()  # the supervisor stops its children
                process.wait()
                code = f"none within {machine.seconds - LEFT_SECONDS:.0f} s"
            output.seek(0)
            said = output.read()
        yield f"{UPDATES} updates", found(RunDirectory(Path(scratch) / "turns"), code, said)


def found(directory: RunDirectory, code: int | str, said: str) -> Facts:
    steps = [json.loads(line) for line in _text(directory.metrics_file).splitlines()]
    facts: Facts = {"exit": code, "updates": len(steps)}
    if steps:
        facts["last_update_seconds"] = {name: round(s, 3) for name, s in steps[-1]["seconds"].items() if s > 0.001}
    facts["times_asleep"] = len(re.findall(r"asleep \(level|to fall asleep", _text(directory.logs / "engine-0.log")))
    if directory.store_file.is_file():
        facts["faults_of_the_ledger"] = len(read_ledger(directory.store_file).audit())
    if code != 0:
        logs = [_text(directory.logs / f"{name}.log")[-400:] for name in ("learner", "engine-0")]
        facts["failed"] = " ... ".join([said[-400:], *logs])
    return facts


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
