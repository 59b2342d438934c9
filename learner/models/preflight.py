"""Preflight of the model: what ``model.source`` names is there and fits the run file.

Nothing is downloaded or converted, and neither PyTorch nor transformers is imported, but for the tokenizer of ``tiny``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from learner.models.cache import newest_entry
from learner.models.info import MANIFEST, ModelInfo, request_of
from learner.models.sources import find_in_package, is_hub_id, is_path, require_model_folder
from learner.models.tiny import TinyOptions, build_tokenizer
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.findings import Findings
from pipeline.runtime.rundir import RunDirectory, read_json


def check_model(config: RunConfig, found: Findings) -> None:
    """Add what is wrong with the section ``model``."""
    with found.collecting():
        request = request_of(config)
        prepared = RunDirectory(config.run.path).model
        if (prepared / MANIFEST).exists() and ModelInfo.load(prepared).request != request:
            raise ConfigurationError(
                f"model: expected the model of the run in {prepared.parent}, {ModelInfo.load(prepared).source!r} with "
                f"the same options, got {config.model.source!r}: give another run.name, or start over with --fresh"
            )
        folder = model_folder(config)
        if folder is not None:
            _check_positions(config, folder)
        elif config.model.source != "tiny" and not config.model.source.startswith("package:"):
            found.notes.append(f"model.source {config.model.source} is not on this machine: a run downloads it")


@contextmanager
def tokenizer_folder(config: RunConfig) -> Iterator[Path | None]:
    """A folder with the tokenizer of the model, where one is on this machine: that of the run, of the source, of an
    earlier conversion, or one that is made for ``tiny``. Raises :class:`ConfigurationError` as :func:`check_model`."""
    prepared = RunDirectory(config.run.path).model
    if (prepared / MANIFEST).exists():
        yield prepared
    elif config.model.source == "tiny":
        options = TinyOptions.parse(config.model.tiny, config.model.max_length)
        with tempfile.TemporaryDirectory(prefix="afterplay-tokenizer-") as folder:
            build_tokenizer(options.numbers, options.words).save_pretrained(folder)
            yield Path(folder)
    else:
        yield model_folder(config)


def model_folder(config: RunConfig) -> Path | None:
    """The folder of the source; None for one that is made or downloaded. Raises :class:`ConfigurationError`."""
    source = config.model.source
    if source == "tiny":
        TinyOptions.parse(config.model.tiny, config.model.max_length)
        return None
    if source.startswith("package:"):
        packaged = find_in_package(source.removeprefix("package:"))
        return packaged if packaged.is_dir() else newest_entry(config.model.cache, source.removeprefix("package:"))
    if is_path(source):
        folder = Path(source).expanduser()
        require_model_folder(folder)
        return folder
    if not is_hub_id(source):
        raise ConfigurationError(
            f"model.source: expected a folder, a hub id like Qwen/Qwen2.5-0.5B-Instruct, package:NAME or tiny, got "
            f"{source!r}, which is none of them and no folder in {Path.cwd()}"
        )
    return _cached(source)


def _cached(repository: str) -> Path | None:
    """The snapshot in the local hub cache. Raises :class:`ConfigurationError` where there is none and the hub is
    switched off."""
    from huggingface_hub import constants, try_to_load_from_cache

    file = try_to_load_from_cache(repository, "config.json")
    if isinstance(file, str):
        return Path(file).parent
    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(
            f"model.source: expected {repository!r} in the hub cache {constants.HF_HUB_CACHE}, because HF_HUB_OFFLINE "
            "is set, found none: unset it, or name a local folder"
        )
    return None


def _check_positions(config: RunConfig, folder: Path) -> None:
    facts = read_json(folder / "config.json") or {}
    most = facts.get("max_position_embeddings") or (facts.get("text_config") or {}).get("max_position_embeddings")
    if isinstance(most, int) and config.model.max_length > most:
        raise ConfigurationError(
            f"model.max_length: expected at most the {most} positions of {config.model.source!r}, got "
            f"{config.model.max_length}: set model.max_length: {most}"
        )
