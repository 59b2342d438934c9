"""Make the model folder of a run, once, however many processes ask for it."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from learner.models.info import MANIFEST, ModelInfo, inspect_folder, request_of
from learner.models.sources import make_readable, write_folder_model, write_hub_model, write_package_model
from learner.models.tiny import TinyOptions, write_tiny_model
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError


def prepare_model(config: RunConfig, target: Path) -> ModelInfo:
    """Make ``target`` the folder of ``config.model``: config, safetensors, tokenizer, chat template.

    Idempotent: a folder that was made from the same request is returned as it is. Atomic: the folder appears
    complete, by rename. Safe when several processes call it at once: one works, the others wait for its lock file
    beside ``target``.

    Raises :class:`ConfigurationError` when the source is missing or unusable, when the run needs longer sequences than
    the model has positions, or when ``target`` already holds another model (weights of a run belong to one model).
    """
    target = target.expanduser().absolute()
    request = request_of(config)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if (target / MANIFEST).exists():
            info = ModelInfo.load(target)
            if info.request != request:
                raise ConfigurationError(
                    f"{target} holds model {info.source!r}, the run file asks for {config.model.source!r} "
                    "(or other options of it): choose another run.name, or delete the run directory"
                )
        else:
            info = _make(config, request, target)
    if config.model.max_length > info.max_position:
        raise ConfigurationError(
            f"model.max_length is {config.model.max_length}, but {info.source!r} supports at most "
            f"{info.max_position} tokens"
        )
    return info


def _make(config: RunConfig, request: dict[str, object], target: Path) -> ModelInfo:
    if target.exists():
        if not target.is_dir() or any(target.iterdir()):
            raise ConfigurationError(
                f"expected {target} to be absent or a prepared model, found something else: remove it"
            )
        target.rmdir()
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(config, scratch)
        if request["chat_template"] is not None:
            _replace_template(scratch, str(request["chat_template"]), config.model.trust_remote_code)
        info = inspect_folder(scratch, config.model.source, request, config.model.trust_remote_code)
        info.save()
        make_readable(scratch)
        os.rename(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return ModelInfo.load(target)


def _write(config: RunConfig, folder: Path) -> None:
    source = config.model.source
    if source == "tiny":
        write_tiny_model(TinyOptions.parse(config.model.tiny, config.model.max_length), folder)
    elif source.startswith("package:"):
        write_package_model(source.removeprefix("package:"), folder)
    elif _looks_like_path(source):
        write_folder_model(Path(source).expanduser(), folder)
    else:
        write_hub_model(source, folder, config.model.trust_remote_code)


def _looks_like_path(source: str) -> bool:
    return source.startswith(("/", "./", "../", "~", ".")) or Path(source).is_dir()


def _replace_template(folder: Path, template: str, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """``FILE [--set section.key=value ...]``. Exit code 0, or 2 with one line about what is wrong."""
    from pipeline.config.load import load_config
    from pipeline.runtime.rundir import RunDirectory

    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m learner.models.prepare FILE [--set section.key=value ...]", file=sys.stderr)
        return 2
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        sets = [value for flag, value in itertools.pairwise(arguments[1:]) if flag == "--set"]
        config = load_config(Path(arguments[0]), sets)
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
