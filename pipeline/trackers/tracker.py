"""The interface of an experiment tracker, and the list of those that there are."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.load import dump, flat
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import load_main
from pipeline.trackers.delivery import SentEntry, TrackerRecord

ADAPTERS: Mapping[str, str] = {
    "tensorboard": "pipeline.trackers.tensorboard:TensorBoard",
    "wandb": "pipeline.trackers.wandb:WeightsAndBiases",
    "mlflow": "pipeline.trackers.mlflow:MLflow",
    "trackio": "pipeline.trackers.trackio:Trackio",
    "otel": "pipeline.trackers.otel:OpenTelemetry",
}
"""Class of each tracker. The name is that of the extra that installs its package."""
PACKAGES: Mapping[str, str] = {"otel": "opentelemetry.exporter.otlp.proto.http"}
"""Package of a tracker with another name."""

MARKS: Mapping[str, str] = {"step": "time/step", "evaluation": "eval/evaluation"}
"""Name of the number that counts the records of a kind: a tracker that is asked for it tells which have arrived."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Facts of a run that a tracker shows."""

    id: str
    """Identity for the tracker, kept in the run directory: a run that resumes continues under it."""
    name: str
    project: str
    directory: Path
    config: RunConfig

    @property
    def settings(self) -> dict[str, str | int | float | bool]:
        """The configuration as one level: ``learner.learning_rate``. Lists are text."""
        values = flat(self.config.model_dump(mode="json")).items()
        return {k: v if isinstance(v, str | int | float) else "none" if v is None else str(v) for k, v in values}

    @property
    def run_file(self) -> str:
        """The configuration as YAML."""
        return dump(self.config)


class Tracker(ABC):
    """One tracker of one run. Methods block, and raise whatever the tracker's package raises: the reporter ends then,
    is started again, and continues from what it finds."""

    rewinds = False
    """True if it can drop what it has from a step on. Then a step that was made again replaces the first one; else
    the first one stays."""
    reads_store = False
    """True if it looks for rollouts in the store. Then a step waits until the replay stage has counted its update."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Open the run, or continue it."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Address or folder where a user finds the run."""

    @abstractmethod
    def held(self, entries: Sequence[SentEntry]) -> set[str]:
        """Keys of those ``entries`` that it has. Asked once, after a kill, before anything is sent."""

    def is_empty(self) -> bool:
        """True if it has nothing of the run, for certain. Asked where its :attr:`place` is another one than before, and
        of a tracker that rewinds."""
        return False

    def rewind(self, step: int) -> None:
        """Drop everything from ``step`` on. Only of a tracker that rewinds."""
        raise TypeError(f"{type(self).__name__} does not rewind")

    @abstractmethod
    def send(self, records: Sequence[tuple[TrackerRecord, int]]) -> None:
        """Take records, each with its position (:class:`SentEntry`)."""

    def flush(self) -> bool:
        """True if all that was sent is durable now. False: only :meth:`close` makes it so."""
        return True

    @abstractmethod
    def close(self, finished: bool = True) -> None:
        """Make everything durable. ``finished``: the run has made all its steps."""


def trace_id(run: str, trajectory_id: str) -> str:
    """Id of a rollout's trace in OpenTelemetry, 32 hexadecimal digits. ``run``: :attr:`TrackedRun.id`."""
    return blake2b(f"{run}/{trajectory_id}".encode(), digest_size=16).hexdigest()


def require_package(name: str) -> None:
    """Raises :class:`ConfigurationError` with the command to install it, if the package of a tracker is missing."""
    package, spec = PACKAGES.get(name, name), None
    with suppress(ModuleNotFoundError):  # of a package around it
        spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder without code: wandb keeps its offline runs in ./wandb
        raise ConfigurationError(
            f"report_to: expected the package {package}, which is not installed: pip install '.[{name}]'"
        )


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Raises :class:`ConfigurationError` for a package that is missing."""
    require_package(name)
    tracker: Tracker = load_main(ADAPTERS[name])(run)
    return tracker
