"""What ``afterplay env`` plays: an environment by name, or a section of a run file with its loop and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.load import load
from pipeline.config.play import EnvironmentConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError
from pipeline.schema import Task
from pipeline.tasks.open import open_source

STEP_SECONDS_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Subject:
    """One environment, configured."""

    section: str
    config: EnvironmentConfig
    run_seed: int = 0
    notes: tuple[str, ...] = ()
    """What a score leaves out."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], run_file: Path | None) -> Subject:
        """``options`` go over those of the section. Raises :class:`ConfigurationError`."""
        if run_file is None:
            config = EnvironmentConfig(name=name, options=dict(options), step_seconds_max=STEP_SECONDS_MAX)
            return cls(name, config)
        run = load(run_file)
        section = run.environments.get(name)
        if section is None:
            raise ConfigurationError(
                f"expected one of the environments of {run_file} ({', '.join(run.environments)}), got {name!r}"
            )
        parts = [part.known_as for part in run.scorer.parts if part.applies_to(name)]
        notes = (f"the scorer adds {', '.join(parts)}, which only a run computes",) if parts else ()
        config = section.model_copy(
            update={"options": {**section.options, **options}, "step_seconds_max": STEP_SECONDS_MAX}
        )
        return cls(name, config, run.run.seed, notes)

    def task(self, seed: int) -> Task:
        """The task with ``seed``; where tasks are rows, the one at place ``seed`` of what is trained on (of the
        first split where nothing is)."""
        if self.config.tasks_from is None:
            return Task(f"{self.section}/{seed}", self.section, seed)
        source = open_source(self.section, self.config, self.run_seed)
        try:
            split = source.splits.get(TRAIN) or next(iter(source.splits.values()))
            return split[seed % len(split)]
        finally:
            source.close()
