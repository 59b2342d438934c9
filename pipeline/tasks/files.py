"""Which files a path of the run file means."""

from __future__ import annotations

import glob
from pathlib import Path

from pipeline.errors import ConfigurationError


def find_files(path: Path, suffix: str, key: str) -> list[Path]:
    """The file, the ``*suffix`` files of the folder, or what the pattern matches, by name.

    Raises :class:`ConfigurationError` when that is none."""
    path = path.expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.glob(f"*{suffix}") if p.is_file())
        if not found:
            there = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
            raise ConfigurationError(f"{key}: expected *{suffix} files in the folder {path}, got {there}")
        return found
    found = sorted(Path(p) for p in glob.glob(str(path)) if Path(p).is_file())
    if not found:
        raise ConfigurationError(
            f"{key}: expected a file, a folder or a pattern that matches, got {path}, which does not exist "
            f"(looked in {Path.cwd()})"
        )
    return found
