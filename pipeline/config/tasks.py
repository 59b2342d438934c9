"""Section ``environments.<name>.tasks_from``: tasks that are rows of a data set (docs/DATA.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section

TRAIN = "train"
"""The split that is trained on."""
OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "in", "not_in", "contains", "missing", "present")


class FilterConfig(Section):
    """One condition on a row of the data; a row is used when it meets every condition."""

    column: str = Field(min_length=1)
    """Column of the data as it is called there; dots lead into nested columns (``extra_info.level``)."""
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not_in", "contains", "missing", "present"] = "=="
    """``in`` and ``not_in``: the value is a list, the column one of it or not; ``contains``: the column is a text or a
    list that holds the value; ``missing`` and ``present``: whether the column is there and not null."""
    value: Any = None

    @model_validator(mode="after")
    def _value_fits(self) -> FilterConfig:
        if self.op in ("in", "not_in") and not isinstance(self.value, list | tuple):
            raise ValueError(f"filter on {self.column}: {self.op} needs a list as value, got {self.value!r}")
        if self.op in ("missing", "present") and self.value is not None:
            raise ValueError(f"filter on {self.column}: {self.op} takes no value, got {self.value!r}")
        return self


class TasksFromConfig(Section):
    """Rows of a data set, each a task whose ``payload`` is the row."""

    kind: Literal["jsonl", "parquet", "huggingface"]
    """``jsonl``: a JSON object a line; ``parquet``: needs pyarrow; ``huggingface``: needs datasets (both come with
    ``pip install 'afterplay[data]'``)."""
    path: Path | None = None
    """A file, a folder (every ``*.jsonl`` or ``*.parquet`` in it, by name) or a pattern with ``*``. With
    ``huggingface``: a folder, saved by ``save_to_disk`` or readable by ``load_dataset``."""
    name: str | None = None
    """With ``huggingface``: the data set's id on the hub, in place of ``path``."""
    subset: str | None = None
    """With ``huggingface``: which configuration of the data set, where it has several (``main`` of gsm8k)."""
    revision: str | None = None
    """With ``huggingface`` and ``name``: the commit or tag; without it, the latest on the hub."""
    split: str = TRAIN
    """With ``huggingface``: its split that ``splits`` divides; not used where ``splits`` names theirs."""
    splits: dict[str, float | str] = Field(default={TRAIN: 1.0})
    """Our splits, ``train`` among them unless the environment's ``weight`` is 0. Shares (``{train: 0.9, eval: 0.1}``)
    divide the rows by a hash of their question, so the same question is never in two. Names (``{train: a.jsonl, eval:
    b.jsonl}``, or with ``huggingface`` names of its splits) say where each lies; a question of train that is in
    another split too is left out of train, and counted."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our name to theirs: ``{prompt: question, answer: reward_model.ground_truth}``; dots lead into nested columns.
    Only these are in the payload. Empty: every column under its own name."""
    filter: tuple[FilterConfig, ...] = ()
    """Rows that do not meet every condition are not used."""
    limit: int | None = Field(None, ge=1)
    """Use the first so many rows that pass the filter (of each split). None: all."""
    shuffle: bool | int = True
    """An order of its own in every pass, by this seed (true: ``run.seed``); false: as the data has them."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the data, which bound ``run.total_steps``: a run that needs more is refused when it starts. None: as
    many as the run needs."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """A row that cannot be used (no JSON, a column missing, too large) ends the start with its place, or is left out
    and counted."""
    on_change: Literal["refuse", "restart"] = "refuse"
    """Reaction of a resumed run to data (or a selection of it) that has changed: refuse, or begin the first pass over
    the new data. Ids of tasks hold a hash of their row, so a changed row is another task either way."""
    row_bytes_max: int = Field(256 * 1024, ge=64, le=2 * 1024 * 1024)
    """A payload larger than this is a bad row: it travels in every message about the task."""
    cache_bytes: int = Field(256 * 1024 * 1024, ge=1024)
    """With ``parquet``: decoded row groups that are kept in memory, at least one."""

    @model_validator(mode="after")
    def _splits_make_sense(self) -> TasksFromConfig:
        if not self.splits:
            raise ValueError("tasks_from.splits is empty: name at least one")
        for name in self.splits:
            if not name.isidentifier():
                raise ValueError(f"tasks_from.splits: expected names of letters, digits and _, got {name!r}")
        if len({type(value) for value in self.splits.values()}) > 1:
            raise ValueError("tasks_from.splits: expected shares of one data set or a source for each, got both")
        if self.divides:
            shares = [float(value) for value in self.splits.values()]
            if any(not 0 < share <= 1 for share in shares) or math.fsum(shares) > 1 + 1e-9:
                raise ValueError(f"tasks_from.splits: expected shares above 0 of at most 1 together, got {shares}")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> TasksFromConfig:
        hub = self.kind == "huggingface"
        named = not self.divides
        if self.name is not None and not hub:
            raise ValueError(f"tasks_from.name is for kind: huggingface, but kind is {self.kind}: give path")
        if hub and (self.path is None) == (self.name is None):
            raise ValueError("tasks_from with kind: huggingface needs either path (a folder) or name (a hub id)")
        if not hub and (self.path is None) != named:
            what = "splits names the files, so path is not used" if named else f"kind: {self.kind} needs path"
            raise ValueError(f"tasks_from: {what}")
        if not hub and (self.subset is not None or self.revision is not None):
            raise ValueError("tasks_from.subset and revision are for kind: huggingface")
        return self

    @property
    def divides(self) -> bool:
        """True if the splits are shares of one data set."""
        return all(isinstance(value, float) for value in self.splits.values())

    @property
    def where(self) -> str:
        """The data, for messages."""
        return str(self.name or self.path or ", ".join(str(place) for place in self.splits.values()))
