"""``python -m learner.models FILE``: prepare the model folder of a run (the supervisor's first step)."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from learner.models.prepare import prepare_model
from pipeline.errors import AfterplayError


def main(arguments: list[str]) -> int:
    """``FILE [--set section.key=value ...]``. Exit code 0, or 2 with one line about what is wrong."""
    from pipeline.config.load import load_config
    from pipeline.rundir import RunDirectory

    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m learner.models FILE [--set section.key=value ...]", file=sys.stderr)
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
