"""``python -m pipeline.cli``."""

from pipeline.cli import entry

entry()
