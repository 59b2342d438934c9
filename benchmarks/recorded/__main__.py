"""``python -m benchmarks.recorded RUN FILE``; see the package's docstring."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import yaml

from benchmarks.recorded import Origin, RecordedRow, write
from benchmarks.recorded import __doc__ as description
from learner.data.microbatch import common_prefix, lexicographic
from learner.data.rows import Row, trajectory_rows
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Trajectory
from pipeline.schema.codec import Limits, decode_trajectory
from pipeline.store import tables


def played(store: Path, per_update: int) -> dict[int, list[Trajectory]]:
    """The rollouts of complete groups by update: ``per_update`` groups in the order in which they became complete."""
    groups: dict[int, list[Trajectory]] = {}
    with closing(tables.STORE.connect(store, read_only=True)) as connection:
        sizes = dict(connection.execute("SELECT group_number, n_rollout FROM groups"))
        for number, *payload in connection.execute(
            "SELECT group_number, header, token_ids, logprobs, spans FROM trajectories JOIN payloads USING (row_id) "
            "ORDER BY received_at"
        ):
            group = groups.pop(number, [])  # last again: the order is that of the latest rollout
            groups[number] = [*group, decode_trajectory(tuple(payload), Limits())]
    complete = [group for number, group in groups.items() if len(group) == sizes[number]]
    return {
        update: [trajectory for group in complete[first : first + per_update] for trajectory in group]
        for update, first in enumerate(range(0, len(complete) - per_update + 1, per_update))
    }


def recorded(updates: dict[int, list[Trajectory]]) -> Iterator[RecordedRow]:
    """Their rows, in the order of the file."""
    groups: dict[str, int] = {}
    first = 0
    for update, trajectories in updates.items():
        rows = [row for i, t in enumerate(trajectories) for row in trajectory_rows(t, i)]
        ids = [row.token_ids for row in rows]
        before = None
        for i in lexicographic(ids):
            trajectory = trajectories[rows[i].trajectory_index]
            yield RecordedRow(
                update=update,
                group=groups.setdefault(trajectory.group_id, len(groups)),
                rollout=first + rows[i].trajectory_index,
                environment=trajectory.task.environment,
                turns=turns_of(rows[i]),
                shared=0 if before is None else common_prefix(ids[before], ids[i]),
                environment_seconds=round(trajectory.timings.environment_seconds, 6),
            )
            before = i
        first += len(trajectories)


def turns_of(row: Row) -> tuple[tuple[int, int], ...]:
    """(tokens of the context, sampled tokens) of each turn of a row."""
    lengths = np.bincount(row.turns)
    sampled = np.bincount(row.turns, weights=row.loss_mask).astype(int)
    return tuple((int(n - s), int(s)) for n, s in zip(lengths, sampled, strict=True) if n)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="its directory")
    parser.add_argument("file", type=Path)
    parser.add_argument("--groups", type=int, default=8, help="of an update")
    options = parser.parse_args(argv)
    directory = RunDirectory(options.run)
    config = yaml.safe_load(directory.config_file.read_text())  # may be that of another version
    updates = played(directory.store_file, options.groups)
    origin = Origin(config["run"]["name"], config["model"]["source"], config["engine"]["kind"], len(updates))
    count = write(options.file, origin, recorded(updates))
    print(f"{count} rows of {len(updates)} updates in {options.file}")


if __name__ == "__main__":
    main()
