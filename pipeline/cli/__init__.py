"""The command ``afterplay``."""

from __future__ import annotations

import sys

from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.role import ExitCode

__all__ = ["entry"]


def entry() -> None:
    """Console script: refusals are one message on stderr, not a traceback."""
    from pipeline.cli.app import app

    try:
        app(prog_name="afterplay")
    except AfterplayError as error:
        print(f"afterplay: {error}", file=sys.stderr)
        wrong = isinstance(error, ConfigurationError)
        sys.exit(ExitCode.CONFIGURATION if wrong else ExitCode.FAILED)
