"""Make the model folder of a run, once, however many processes ask for it; and the preflight of ``model.source``.

The preflight downloads and converts nothing, and imports neither PyTorch nor transformers but for the tokenizer of
``tiny``.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

from learner.models.cache import acquire, cache_folder, fill_from_cache, newest_entry
from learner.models.info import MANIFEST, ModelInfo, inspect_folder, max_position, request_of, require_plain_weights
from learner.models.sources import (
    TEMPLATES,
    find_in_package,
    is_path,
    make_readable,
    require_hub_id,
    require_model_folder,
    write_folder_model,
    write_hub_model,
    write_package_model,
)
from learner.models.tiny import TinyOptions, build_tokenizer, write_tiny_model
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.errors import AfterplayError, ConfigurationError, DamagedFiles, Findings
from pipeline.runtime.disk import FULL, wait_for_room
from pipeline.runtime.embedded_models import check_embedded
from pipeline.runtime.folders import CONTENTS, find_damage, set_aside
from pipeline.runtime.routers import choice_bytes
from pipeline.runtime.run_directory import PREPARE_SECONDS_MAX, RunDirectory, read_json

log = logging.getLogger(__name__)


def prepare_model(config: RunConfig, target: Path, give_up: Callable[[], bool] = lambda: False) -> ModelInfo:
    """Make ``target`` the folder of ``config.model``: config, safetensors, tokenizer, chat template.

    Idempotent: a folder that was made from the same request is returned as it is; one from the cache is compared with
    what was written, and made again where it is damaged. Atomic: the folder appears complete, by rename. Safe when
    several processes call it at once: one works, the others wait for its lock file beside ``target``, until ``give_up``
    is true or ``PREPARE_SECONDS_MAX`` have passed.

    Raises :class:`Interrupted` when it gives up, and :class:`ConfigurationError` when the source is missing or
    unusable, when the run needs longer sequences than the model has positions, or when ``target`` already holds another
    model (weights of a run belong to one model); :class:`DamagedFiles` when it was damaged and cannot be made again.
    """
    target = target.expanduser().absolute()
    request = request_of(config)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        held = acquire(lock, f"prepares {target}", PREPARE_SECONDS_MAX, give_up)
    except TimeoutError as error:
        raise ConfigurationError(f"expected {target} to be prepared, but {error}: end that process") from error
    with held:
        if (target / CONTENTS).exists() and (problem := find_damage(target)):
            info = _replace(config, request, target, problem, give_up)
        elif (target / MANIFEST).exists():
            info = ModelInfo.load(target)
            if info.request != request:
                raise ConfigurationError(
                    f"{target} holds model {info.source!r}, the run file asks for {config.model.source!r} "
                    "(or other options of it): choose another run.name, or delete the run directory"
                )
        else:
            make = partial(_make, config, request, target, give_up)
            info = wait_for_room(make, target, "the initial model", FULL)  # it also reads what the user names
    if config.model.max_length > info.max_position:
        raise ConfigurationError(
            f"model.max_length is {config.model.max_length}, but {info.source!r} supports at most "
            f"{info.max_position} tokens"
        )
    return info


def _replace(
    config: RunConfig, request: dict[str, object], target: Path, problem: str, give_up: Callable[[], bool]
) -> ModelInfo:
    """Make a damaged folder again and set it aside. The run's reference policy and adapters belong to its weights."""
    log.error("the model in %s is damaged (%s): it is made again", target, problem)
    again = target.with_name(f".{target.name}.again")
    shutil.rmtree(again, ignore_errors=True)
    _make(config, request, again, give_up)
    before = _weights_of(target)
    if before and _weights_of(again) != before:
        shutil.rmtree(again)
        raise DamagedFiles(
            f"the model in {target} is damaged ({problem}), and {config.model.source} gives other weights than those "
            "that the run began with: put back a copy of it, or start over with --fresh"
        )
    set_aside(target, {"problem": problem, "at": time.time()})
    again.rename(target)
    return ModelInfo.load(target)


def _weights_of(folder: Path) -> dict[str, Any]:
    """Size and digest of each file of weights, as ``contents.json`` has them; empty where that is damaged."""
    files = (read_json(folder / CONTENTS) or {}).get("files")
    return {k: v for k, v in files.items() if k.endswith(".safetensors")} if isinstance(files, dict) else {}


def _make(config: RunConfig, request: dict[str, object], target: Path, give_up: Callable[[], bool]) -> ModelInfo:
    if target.exists():
        if not target.is_dir() or any(target.iterdir()):
            raise ConfigurationError(
                f"expected {target} to be absent or a prepared model, found something else: remove it"
            )
        target.rmdir()
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    fill = partial(_fill, config, request)
    try:
        name, made_from = _identity(config)
        if name:
            made_from |= {"request": request, "trust_remote_code": config.model.trust_remote_code}
            fill_from_cache(cache_folder(), name, made_from, fill, scratch, give_up)
        else:
            fill(scratch)
        make_readable(scratch)
        os.rename(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return ModelInfo.load(target)


def _identity(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Name in the cache and facts of the source, for sources that take long to prepare. An empty name: folders and hub
    models, whose files are linked anyway."""
    source = config.model.source
    if source == "tiny":
        return "tiny", {"max_length": config.model.max_length}
    if not source.startswith("package:"):
        return "", {}
    name = source.removeprefix("package:")
    found = find_in_package(name)
    files = [found] if found.is_file() else sorted(path for path in found.rglob("*") if path.is_file())
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return re.sub(r"[^\w.-]", "_", name), {"version": metadata.version(name), "files": facts}


def _fill(config: RunConfig, request: dict[str, object], folder: Path) -> None:
    """Write the files of the model and the manifest into the empty ``folder``."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    log.info("making the model folder of %s", config.model.source)
    _write(config, folder)
    if request["chat_template"] is not None:
        _replace_template(folder, str(request["chat_template"]), config.model.trust_remote_code)
    inspect_folder(folder, config.model.source, request, config.model.trust_remote_code).save()
    make_readable(folder)


def _write(config: RunConfig, folder: Path) -> None:
    source = config.model.source
    if source == "tiny":
        write_tiny_model(TinyOptions.parse(config.model.tiny, config.model.max_length), folder)
    elif source.startswith("package:"):
        write_package_model(source.removeprefix("package:"), folder)
    elif is_path(source):
        write_folder_model(Path(source).expanduser(), folder)
    else:
        write_hub_model(source, folder, config.model.trust_remote_code)


def _replace_template(folder: Path, template: str, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    tokenizer.chat_template = template
    shutil.rmtree(folder / TEMPLATES, ignore_errors=True)  # it replaces all of them
    tokenizer.save_pretrained(folder)


def holds_model(config: RunConfig, folder: Path) -> bool:
    """True for a folder that was made of the section ``model``, and is not damaged where its contents are known."""
    if (folder / CONTENTS).exists() and find_damage(folder):
        return False
    return (folder / MANIFEST).exists() and ModelInfo.load(folder).request == request_of(config)


def check_model(config: RunConfig, found: Findings, fresh: bool = False) -> None:
    """Add what is wrong with the section ``model``. ``fresh``: the run directory will be emptied, so its model need not
    be the one of the run file."""
    with found.collecting():
        request = request_of(config)
        prepared = RunDirectory(config.run.path).model
        if not fresh and (prepared / MANIFEST).exists() and ModelInfo.load(prepared).request != request:
            raise ConfigurationError(
                f"model: expected the model of the run in {prepared.parent}, {ModelInfo.load(prepared).source!r} with "
                f"the same options, got {config.model.source!r}: give another run.name, or start over with --fresh"
            )
        folder = model_folder(config, fresh=fresh)
        if folder is not None:
            require_plain_weights(folder, "model.source")
            _check_positions(config, folder)
            if config.engine.kind == "embedded":
                check_embedded(folder)
            if config.learner.routing_replay and not choice_bytes(read_json(folder / "config.json") or {}):
                raise ConfigurationError(
                    f"learner.routing_replay is true, but {config.model.source} is no mixture of experts: set it to "
                    "false"
                )
        elif config.model.source != "tiny" and not config.model.source.startswith("package:"):
            found.notes.append(f"model.source {config.model.source} is not on this machine: a run downloads it")


def routing_replay_size(config: RunConfig) -> str:
    """A sentence on the size of recorded experts."""
    folder = model_folder(config)
    n_bytes = choice_bytes(read_json(folder / "config.json") or {}) if folder is not None else 0
    if not n_bytes:
        return "learner.routing_replay stores the experts of each token: layers x k bytes of a model that is not here"
    longest, megabytes = config.model.max_length, n_bytes * config.model.max_length / 1e6
    return (
        f"learner.routing_replay stores {n_bytes:,} bytes for each token, {megabytes:.1f} MB for a trajectory of "
        f"{longest:,} tokens (model.max_length)"
    )


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


def model_folder(config: RunConfig, *, fresh: bool = False) -> Path | None:
    """The folder of the model: that of the run, which may outlive its source, or else of the source; None for one that
    is made or downloaded. ``fresh``: the run directory will be emptied. Raises :class:`ConfigurationError`."""
    source = config.model.source
    if source == "tiny":
        TinyOptions.parse(config.model.tiny, config.model.max_length)
        return None
    prepared = RunDirectory(config.run.path).model
    if not fresh and (prepared / MANIFEST).exists() and ModelInfo.load(prepared).request == request_of(config):
        return prepared
    if source.startswith("package:"):
        packaged = find_in_package(source.removeprefix("package:"))
        return packaged if packaged.is_dir() else newest_entry(source.removeprefix("package:"))
    if is_path(source):
        folder = Path(source).expanduser()
        require_model_folder(folder)
        return folder
    require_hub_id(source)
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
    most = max_position(read_json(folder / "config.json") or {})
    if most is not None and config.model.max_length > most:
        raise ConfigurationError(
            f"model.max_length: expected at most the {most} positions of {config.model.source!r}, got "
            f"{config.model.max_length}: set model.max_length: {most}"
        )


def main(arguments: list[str]) -> int:
    """``FILE [--set section.key=value ...]``. Exit code 0, or 2 with one line about what is wrong."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m learner.models.prepare FILE [--set section.key=value ...]", file=sys.stderr)
        return 2
    try:
        sets = [value for flag, value in itertools.pairwise(arguments[1:]) if flag == "--set"]
        config = load(Path(arguments[0]), sets)
        info = prepare_model(config, RunDirectory(config.run.path).model)
    except AfterplayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{info.source}: {info.architecture}, {info.parameters:,} parameters, "
        f"vocabulary {info.vocabulary_size}, in {info.path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
