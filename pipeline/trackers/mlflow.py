"""MLflow: metrics by step, parameters from the configuration, tables and the curves as artifacts."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
from mlflow import MlflowClient, get_tracking_uri
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from pipeline.trackers.delivery import SentEntry, TrackerRecord
from pipeline.trackers.tracker import MARKS, TrackedRun, Tracker

ID_TAG = "afterplay.id"
METRICS_MAX, PARAMS_MAX = 1000, 100
"""Most in one request, by MLflow's own limits."""
NAME_CHARACTERS_MAX, PARAM_CHARACTERS_MAX = 250, 6000
_FOREIGN = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that MLflow allows in no name."""


class MLflow(Tracker):
    """A record with numbers is one request, which a database stores whole or not at all. An artifact that is sent again
    replaces the first. Address: ``MLFLOW_TRACKING_URI``."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        experiment = self._experiment(run.project)
        known = self._client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        tags = {ID_TAG: run.id}
        found = known[0] if known else self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._id = found.info.run_id
        self._place = f"{get_tracking_uri()}: experiment {run.project}, run {self._id}"
        self._client.update_run(self._id, status="RUNNING")
        # Those that it has cannot be changed, and may be a part of them; the artifact is the newest configuration.
        wanted = {_name(key): str(value)[:PARAM_CHARACTERS_MAX] for key, value in run.settings.items()}
        params = [Param(name, value) for name, value in wanted.items() if name not in found.data.params]
        for at in range(0, len(params), PARAMS_MAX):
            self._client.log_batch(self._id, params=params[at : at + PARAMS_MAX])
        self._client.log_text(self._id, run.run_file, "config.yaml")

    @property
    def place(self) -> str:
        return self._place

    def is_empty(self) -> bool:
        return not any(self._client.get_metric_history(self._id, mark) for mark in MARKS.values())

    def held(self, entries: Sequence[SentEntry]) -> set[str]:
        held = {
            f"{kind}/{int(metric.value)}"
            for kind, mark in MARKS.items()
            for metric in self._client.get_metric_history(self._id, mark)
        }
        return held & {entry.key for entry in entries}

    def send(self, records: Sequence[tuple[TrackerRecord, int]]) -> None:
        for metrics in _requests(record for record, _ in records):
            self._client.log_batch(self._id, metrics=metrics)
        for record, _ in records:
            if record.table is not None:
                value = {"columns": record.table.columns, "data": record.table.rows}
                self._client.log_text(self._id, orjson.dumps(value).decode(), f"{record.key}.json")
            if record.picture is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / f"{record.number}.png"
                    path.write_bytes(record.picture)
                    self._client.log_artifact(self._id, str(path), record.name)

    def close(self, finished: bool = True) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another reporter made it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def _requests(records: Iterator[TrackerRecord]) -> Iterator[list[Metric]]:
    """Metrics of whole records, as many as fit into a request. The mark of a record is the last of its metrics."""
    batch: list[Metric] = []
    for record in records:
        mark = MARKS.get(record.name)
        ordered = sorted(record.numbers.items(), key=lambda pair: pair[0] == mark)
        metrics = [Metric(_name(key), value, round(record.time * 1000), record.step) for key, value in ordered]
        if batch and len(batch) + len(metrics) > METRICS_MAX:
            yield batch
            batch = []
        batch += metrics
        while len(batch) > METRICS_MAX:
            yield batch[:METRICS_MAX]
            batch = batch[METRICS_MAX:]
    if batch:
        yield batch


def _name(key: str) -> str:
    """A name that MLflow allows: also a path, none of whose parts is empty or dots alone."""
    parts = _FOREIGN.sub("_", key)[:NAME_CHARACTERS_MAX].split("/")
    return "/".join(part if part.strip(".") else "_" + part[1:] for part in parts)
