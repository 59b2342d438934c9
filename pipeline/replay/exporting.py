"""The pools of a run into one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.replay.portable import Header, Portable, write_portable
from pipeline.replay.reading import origin, pooled, reading
from pipeline.replay.sharding import store_paths
from pipeline.rundir import RunDirectory


def export_run(
    config: RunConfig, directory: RunDirectory, file: Path, *, compress: bool = True, replace: bool = False
) -> int:
    """Write every trajectory of the pools of all shards, each pool as of one moment; returns how many. A run may be
    going on.

    Raises :class:`ConfigurationError` where ``file`` is there already (unless ``replace``), :class:`StoreError` for
    stores that are missing or not ours.
    """
    with ExitStack() as stack:
        stores = [stack.enter_context(reading(path)) for path in store_paths(config, directory)]
        header = Header(
            run=config.run.name,
            model=config.model.source,
            compression="zlib" if compress else None,
            origins=tuple(filter(None, map(origin, stores))),
        )

        def records() -> Iterator[Portable]:
            for store in stores:
                yield from pooled(store)

        return write_portable(file, header, records(), replace=replace)
