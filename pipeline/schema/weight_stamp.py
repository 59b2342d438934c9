"""The label of an engine's weights: the run that published them and their policy version, ``RUN/7``.

A run without ``run.id`` labels with the version alone. An engine that has a stamp of another run, or none, is not
routed to: :func:`read_stamp` gives no version for it.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import SchemaError

UNSTAMPED = "default"
"""vLLM's label of the weights that it was started with."""
WITHDRAWN = "withdrawn"
"""Label of weights that nobody may sample from: half loaded, or not those of their version."""
_DIGITS_MAX = 9


def write_stamp(run: str | None, version: int) -> str:
    """
    >>> write_stamp("3f9c", 7), write_stamp(None, 7)
    ('3f9c/7', '7')
    """
    return str(version) if run is None else f"{run}/{version}"


def read_stamp(label: Any, run: str | None) -> int | None:
    """The policy version of ``label`` in ``run``; None for weights that are not of this run. Raises
    :class:`SchemaError` for what is no label of weights.

    >>> read_stamp("3f9c/7", "3f9c"), read_stamp("3f9c/7", "0a1b"), read_stamp("default", "3f9c")
    (7, None, None)
    """
    if label in (UNSTAMPED, WITHDRAWN):
        return None
    text = str(label) if isinstance(label, str | int) and not isinstance(label, bool) else ""
    owner, slash, number = text.rpartition("/")
    if not (number.isascii() and number.isdecimal() and len(number) <= _DIGITS_MAX) or bool(slash) != bool(owner):
        raise SchemaError(f"expected a weight version that is a number (stamped by the learner), got {label!r}")
    return int(number) if (owner or None) == run else None
