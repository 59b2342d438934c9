"""Key ``report_to`` and section ``trackers``: reports to experiment trackers (docs/TRACKERS.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.base import Section

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackersConfig(Section):
    """Names and amounts of what is reported to the trackers of ``report_to``. Addresses, keys and offline modes are set
    with the environment variables of each tracker."""

    project: str = Field("afterplay", min_length=1, max_length=100)
    """Project of Weights & Biases and trackio, experiment of MLflow."""
    name: str | None = Field(None, min_length=1, max_length=100)
    """Name of the run at the tracker. None: ``run.name``."""
    rollouts: int = Field(8, ge=0, le=1000)
    """Most rollouts in a table, taken from those whose tokens are kept (``traces``). 0: no tables."""
    rollouts_every: int = Field(10, ge=1)
    """Steps between two tables of trained rollouts. Each evaluation has a table too."""
