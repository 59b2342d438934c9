"""The pool of a run into one file."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import RunConfig
from pipeline.replay.portable import Header, write_portable
from pipeline.replay.reading import origin, pooled, reading
from pipeline.replay.store import store_path
from pipeline.rundir import RunDirectory


def export_run(
    config: RunConfig, directory: RunDirectory, file: Path, *, compress: bool = True, replace: bool = False
) -> int:
    """Write every trajectory of the pool as of one moment; returns how many. A run may be going on.

    Raises :class:`ConfigurationError` where ``file`` is there already (unless ``replace``), :class:`StoreError` for a
    store that is missing or not ours.
    """
    with reading(store_path(config, directory)) as store:
        header = Header(
            run=config.run.name,
            model=config.model.source,
            compression="zlib" if compress else None,
            origins=tuple(filter(None, [origin(store)])),
        )
        return write_portable(file, header, pooled(store), replace=replace)
