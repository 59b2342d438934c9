"""Tokens, hits and shares of the replay benchmark are what it says they are."""

from __future__ import annotations

import pytest

from benchmarks.replay_efficiency.picture import draw
from benchmarks.replay_efficiency.records import Point, first_order_at, hit_version, tokens_until, training_of
from pipeline.errors import AfterplayError, StoreError
from pipeline.store import tables


def points(*successes):
    return [Point(5 * i, success, 10 * i, float(i)) for i, success in enumerate(successes)]


@pytest.fixture
def store(tmp_path):
    """(group, received at, state, sampled tokens) of trajectories, and two orders."""
    path = tmp_path / "replay.sqlite"
    tables.STORE.create(path)
    connection = tables.STORE.connect(path)
    rows = [
        (0, 10.0, "trained", 2), (0, 11.0, "dropped", 4), (1, 12.0, "ready", 8), (2, 12.5, "dropped", 16),
        (3, 13.0, "trained", 32), (-1, 9.0, "trained", 1000),
    ]  # fmt: skip
    insert = f"INSERT INTO trajectories VALUES ({', '.join('?' * 26)})"
    for row, (group, received_at, state, sampled) in enumerate(rows):
        connection.execute(
            insert,
            (row, f"t{row}", group, row, 0, state, "", 1.0, b"{}", 0, received_at, "complete", 1, 9, sampled, 0, 0, 0.1,
             "actor-0", 9, None, 0.5, 1, 0, None, 0),
        )  # fmt: skip
    for slot, issued_at in enumerate((8.5, 8.25)):
        connection.execute(
            f"INSERT INTO orders VALUES ({', '.join('?' * 12)})",
            (0, slot, 0, "actor-0", 0, 0, "open", "", 0, issued_at, None, 0),
        )
    connection.close()
    return path


def test_every_received_trajectory_counts_whatever_became_of_it(store):
    assert tokens_until(store, 12.5) == 2 + 4 + 8 + 16
    assert tokens_until(store, 9.5) == 0, "imported ones were not generated here"
    assert tokens_until(store, 1e12) == 62
    assert first_order_at(store) == 8.25


def test_store_without_orders_or_without_a_file_is_refused(tmp_path):
    tables.STORE.create(tmp_path / "empty.sqlite")
    with pytest.raises(StoreError, match="no orders"):
        first_order_at(tmp_path / "empty.sqlite")
    with pytest.raises(StoreError, match="has the run been started"):
        tokens_until(tmp_path / "none.sqlite", 1.0)


@pytest.mark.parametrize(
    ("successes", "hit"),
    [
        ((0.1, 0.5, 0.8, 0.8), 10),
        ((0.1, 0.9, 0.7, 0.9, 0.81, 0.2), 15),
        ((0.1, 0.9, 0.7, 0.9), None),
        ((0.9, 0.9), 0),
        ((0.9,), None),
        ((), None),
    ],
)
def test_hit_is_the_first_of_two_measurements_in_a_row(successes, hit):
    assert hit_version(points(*successes), 0.8) == hit


def line(update, **changes):
    return {
        "step": update + 1, "update": update, "policy_version": update, "finished": 100.0 + update, "replay_share": 0.0,
        "tokens_trained": 100, "n_replayed": 0, "ess_ratio": 0.9, "ess_replay": None, "staleness_mean": 1.0,
        "staleness_max": 1, "replay_age_mean": None, "guard_lr_factor": 1.0, **changes,
    }  # fmt: skip


def test_shares_and_ages_are_weighted_by_what_they_are_shares_and_ages_of():
    lines = [
        line(0),
        line(1, replay_share=0.5, tokens_trained=300, n_replayed=3, replay_age_mean=2.0, ess_replay=0.6, ess_ratio=0.8),
        line(2, replay_share=0.25, n_replayed=1, replay_age_mean=6.0, ess_replay=0.4, staleness_max=3),
    ]
    found = training_of(lines)
    assert found.replay_share == pytest.approx((150 + 25) / 500)
    assert found.replay_age_mean == pytest.approx((3 * 2 + 6) / 4)
    assert (found.ess, found.ess_replay, found.staleness_max) == (0.9, pytest.approx(0.5), 3)
    assert training_of([line(0)]).ess_replay is None


def test_run_whose_versions_are_not_its_updates_is_no_result():
    with pytest.raises(AfterplayError, match="restarted"):
        training_of([line(0), line(1, policy_version=3)])


def test_picture_is_drawn_of_runs_that_never_get_there_and_of_a_single_one(tmp_path, run_of):
    results = [
        run_of("off", 0, 12_000), run_of("off", 1, 10_000), run_of("on", 0, 6000), run_of("on", 1, 7000, hit=False)
    ]  # fmt: skip
    draw(results, 0.8, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    draw([run_of("on", 0, 5)], 0.8, tmp_path / "one.png")
