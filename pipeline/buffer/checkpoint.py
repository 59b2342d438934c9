"""The index, the counters and the random state as one file that is replaced as a whole.

``checkpoint`` = ``b"Afterplay buffer checkpoint 1\\n"``, SHA-256 of what follows (32 bytes), length of the JSON
(8 bytes, little-endian), the JSON, then the rows of the index as ``<i8 [n, 7]``. A reader sees the old file or the new
one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from pipeline.buffer.index import COLUMNS, Ints
from pipeline.buffer.layout import Layout
from pipeline.errors import SchemaError, StoreError
from pipeline.rundir import write_bytes_atomically

NAME = "checkpoint"
_MAGIC = b"Afterplay buffer checkpoint 1\n"


@dataclass(frozen=True)
class Checkpoint:
    """A state of a buffer. Payloads are in the segments that ``rows`` name."""

    generation: int
    """Of the segments that belong to it: others are left over from a copy that was never finished."""
    seed: int
    stream: int
    """Rank of the shard that this is: shards of one seed draw differently."""
    draws: int
    """Draws made so far. Draw i of a buffer is a function of the seed, i and what is in the window."""
    next_id: int
    added: int
    """Trajectories ever added. Those that are not in ``rows`` were evicted."""
    end: tuple[int, int]
    """Segment and byte after the last record that this state knows."""
    layouts: tuple[Layout, ...]
    rows: Ints
    """int64 ``[n, 7]``: see :data:`pipeline.buffer.index.COLUMNS`."""

    @property
    def segments(self) -> frozenset[int]:
        """Segments that must lie beside this checkpoint."""
        return frozenset(int(s) for s in np.unique(self.rows[:, 4]))


def write_checkpoint(directory: Path, state: Checkpoint) -> None:
    """Replace the checkpoint of a directory. Killed at any moment, the one before is still there."""
    header = {
        "generation": state.generation,
        "seed": state.seed,
        "stream": state.stream,
        "draws": state.draws,
        "next_id": state.next_id,
        "added": state.added,
        "end": list(state.end),
        "layouts": [layout.fields for layout in state.layouts],
        "n": len(state.rows),
    }
    json = orjson.dumps(header)
    body = len(json).to_bytes(8, "little") + json + state.rows.astype("<i8").tobytes()
    data = _MAGIC + hashlib.sha256(body).digest() + body
    write_bytes_atomically(directory / NAME, data, durable=True)


def read_checkpoint(directory: Path) -> Checkpoint | None:
    """None where there is none. Raises :class:`StoreError` for a file that is damaged or something else."""
    path = directory / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"the buffer checkpoint {path} cannot be read: {error}") from error
    if not data.startswith(_MAGIC):
        raise StoreError(f"expected {path} to be a checkpoint of a trajectory buffer (version 1), got something else")
    digest, body = data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != digest:
        raise StoreError(f"{path} is damaged: its checksum does not fit. Restore it from a copy")
    try:
        length = int.from_bytes(body[:8], "little")
        header = orjson.loads(body[8 : 8 + length])
        rows = np.frombuffer(body, "<i8", offset=8 + length).reshape(header["n"], COLUMNS).astype(np.int64)
        return Checkpoint(
            generation=header["generation"],
            seed=header["seed"],
            stream=header["stream"],
            draws=header["draws"],
            next_id=header["next_id"],
            added=header["added"],
            end=(header["end"][0], header["end"][1]),
            layouts=tuple(Layout.decode(orjson.dumps(fields)) for fields in header["layouts"]),
            rows=rows,
        )
    except (KeyError, IndexError, TypeError, ValueError, SchemaError) as error:
        raise StoreError(f"{path} is not understood ({type(error).__name__}: {error})") from error
