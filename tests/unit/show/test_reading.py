"""A list is what the stores hold, whatever is asked; tokens come from where they are, or it is said why not."""

import itertools
import sqlite3
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli.replay import open_run
from pipeline.errors import StoreError
from pipeline.schema import Failure
from pipeline.store import queries, tables
from pipeline.store.queries import Filters, Span
from pipeline.store.store import ReplayStore
from pipeline.views.reader import FREED, NOT_EVALUATED, NOT_STORED, TRACE_GONE, RunReader
from tests.unit.show.making import Rollout, make_run

BROKEN = Failure("environment step", "TimeoutError", "no answer [in] 5 s", "Traceback: deep inside")
ROLLOUTS = (
    Rollout(0, 0, 1.0, "game/0", step=1, traced=True, stored=False),
    Rollout(0, 1, 0.0, "game/0", step=1, stored=False),
    Rollout(1, 0, 0.25, "sums/1", "arithmetic", step=2, replays=(4, 7), traced=True, versions=((1, 3), (2, 99))),
    Rollout(1, 1, None, "sums/1", "arithmetic", "dropped", "failed", None, failure=BROKEN, traced=True, stored=False),
    Rollout(2, 0, None, "game/[2]", "game", "dropped", "failed", None, failure=BROKEN, stored=False),
    Rollout(2, 1, None, "game/[2]", "game", "held", "", None, said=(("a", "b"), ("c", "d"), ("e", "f" * 30))),
    Rollout(3, 0, -1.0, "game/3", step=3, stored=True),
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    path = make_run(tmp_path_factory.mktemp("runs") / "some", ROLLOUTS)
    return RunReader(*open_run(path))


def names(reader, sort="oldest", reverse=False, limit=100, **filters):
    listing = reader.listing(Filters(**filters), sort, reverse, limit)
    assert listing.count >= len(listing.rows)
    return (
        sorted(r.trajectory_id for r in listing.rows) if sort == "oldest" else [r.trajectory_id for r in listing.rows]
    )


def expected(fits):
    return sorted(r.name for r in ROLLOUTS if fits(r))


@pytest.mark.parametrize(
    ("filters", "fits"),
    [
        ({}, lambda r: True),
        ({"step": Span(2, 3)}, lambda r: r.step in (2, 3)),
        ({"step": Span(7, None)}, lambda r: 7 in r.replays),
        ({"step": Span(1, 1)}, lambda r: r.step == 1),
        ({"reward_min": 0.0}, lambda r: r.reward is not None and r.reward >= 0),
        ({"reward_max": 0.0, "reward_min": -2.0}, lambda r: r.reward is not None and -2 <= r.reward <= 0),
        ({"task": "game"}, lambda r: "game" in r.task),
        ({"task": "game/[2]"}, lambda r: r.task == "game/[2]"),
        ({"task": "game/[2*"}, lambda r: r.task == "game/[2]"),
        ({"task": "*/?"}, lambda r: r.task != "game/[2]"),
        ({"environment": "arithmetic"}, lambda r: r.environment == "arithmetic"),
        ({"status": "error"}, lambda r: r.failure is not None),
        ({"status": "held"}, lambda r: r.state == "held"),
        ({"failure": ""}, lambda r: r.failure is not None),
        ({"failure": "timeouterror"}, lambda r: r.failure is not None),
        ({"failure": "DEEP inside"}, lambda r: r.failure is not None),
        ({"failure": "absent%_"}, lambda r: False),
        ({"version": Span(2, None)}, lambda r: r.versions[-1][0] >= 2),
        ({"replayed": True}, lambda r: bool(r.replays)),
        ({"trajectory_id": "g000003.0.0"}, lambda r: r.group == 3),
        ({"kept": frozenset({"g000000.1.0"})}, lambda r: r.stored or r.name == "g000000.1.0"),
        ({"task": "'; DROP TABLE trajectories; --"}, lambda r: False),
    ],
)
def test_a_filter_leaves_exactly_what_fits(reader, filters, fits):
    assert names(reader, **filters) == expected(fits)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *((text, True) for text in ("Änderung", "ÄNDERUNG", 'File "x.py"', "C:\\tmp", "deep\ninside", "FAILED")),
        ("environment step: TimeoutError: Änderung", True),
        *((name, False) for name in ("boundary", "message")),
    ],
)
def test_text_of_a_failure_finds_it_as_it_is_listed(tmp_path, text, found):
    broken = Failure("environment step", "TimeoutError", "Änderung in C:\\tmp", 'File "x.py": deep\ninside')
    rollout = Rollout(1, 1, None, "sums/1", "game", "dropped", "failed", None, failure=broken)
    reader = RunReader(*open_run(make_run(tmp_path / "some", [rollout])))
    assert bool(names(reader, failure=text)) == found


@pytest.mark.parametrize("reverse", [False, True])
def test_what_has_no_value_comes_last(reader, reverse):
    by_reward = [r.reward for r in reader.listing(Filters(), "reward", reverse, 100).rows]
    known = sorted((r.reward for r in ROLLOUTS if r.reward is not None), reverse=not reverse)
    assert by_reward == [*known, *[None] * 3]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_rollout_that_sampled_nothing_has_no_version(tmp_path, reverse):
    nothing = Rollout(1, 0, None, "game/1", "game", "dropped", "failed", None, failure=BROKEN, said=())
    reader = RunReader(*open_run(make_run(tmp_path / "some", [nothing, Rollout(0)])))
    assert [r.version_max for r in reader.listing(Filters(), "version", reverse).rows] == [0, -1]


@given(st.sampled_from(["newest", "step", "reward", "tokens", "turns", "replays", "version"]), st.booleans())
@settings(max_examples=20)
def test_a_limit_takes_the_first_of_the_whole_order(reader, sort, reverse):
    values = {"newest": "received_at", "tokens": "n_sampled", "turns": "n_turns", "version": "version_max"}

    def value(row):
        return len(row.replays) if sort == "replays" else getattr(row, values.get(sort, sort))

    whole = [value(r) for r in reader.listing(Filters(), sort, reverse, 100).rows]
    for limit in (1, 3, 7):
        listing = reader.listing(Filters(), sort, reverse, limit)
        assert ([value(r) for r in listing.rows], listing.count) == (whole[:limit], len(ROLLOUTS))


def test_a_list_reads_no_payload(reader, monkeypatch):
    whole = queries.reading

    @contextmanager
    def watched(path):
        with whole(path) as connection:
            connection.set_authorizer(
                lambda action, table, *_: (
                    sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_READ and table == "payloads" else sqlite3.SQLITE_OK
                )
            )
            yield connection

    monkeypatch.setattr(queries, "reading", watched)
    for filters in (
        Filters(),
        Filters(step=Span(1, 9), reward_min=0.0, task="game", failure=""),
        Filters(replayed=True),
    ):
        reader.listing(filters, "reward")
    with pytest.raises(StoreError, match="prohibited"):
        reader.listing(Filters(kept=frozenset()))


def found(reader, step=None):
    rows = reader.listing(Filters(), "oldest", False, 100).rows
    return {f.listed.trajectory_id: f for f in reader.find(rows, step)}


def test_tokens_come_from_traces_and_the_store_and_what_is_gone_is_said(reader):
    by_name = found(reader)
    for r in ROLLOUTS:
        one = by_name[r.name]
        if r.traced or r.stored:
            text = [t.completion_message.content for t in one.transcript.trajectory.turns]
            assert text == [answer for _, answer in r.said]
            assert one.transcript.trajectory.reward == r.reward
            assert (one.transcript.seen is not None) == (r.traced and r.failure is None)
        else:
            assert one.missing == (NOT_STORED if r.failure else FREED)


def test_of_several_traces_that_of_the_asked_step_is_taken_else_the_newest(reader):
    assert found(reader)["g000001.0.0"].transcript.step == 7
    taken = found(reader, Span(3, 5))["g000001.0.0"].transcript
    assert (taken.step, taken.replayed) == (4, True)
    assert found(reader, Span(2, 2))["g000001.0.0"].transcript.replayed is False


def test_evaluated_rollouts_are_found_by_the_weights_and_the_split_and_are_no_training(tmp_path):
    evaluated = [
        Rollout(5 + i, 0, float(i), f"game/{split}/1", state="evaluated", step=None, evaluation=updates, stored=False,
                traced=i == 0)
        for i, (split, updates) in enumerate((("eval", 0), ("eval", 20), ("test", 20)))
    ]  # fmt: skip
    reader = RunReader(*open_run(make_run(tmp_path / "evaluated", (*ROLLOUTS, *evaluated))))
    first, second, third = (r.name for r in evaluated)
    assert names(reader, evaluation=Span(0, None)) == [first, second, third]
    assert names(reader, evaluation=Span(20, 20)) == [second, third]
    assert names(reader, split="eval") == [first, second]
    assert names(reader, split="train") == expected(lambda r: True)
    assert names(reader, split="eva") == names(reader, step=Span(21, 21)) == []
    found = {f.listed.trajectory_id: f for f in reader.find(reader.listing(Filters(split="eval")).rows)}
    assert found[first].transcript.trajectory.turns[0].completion_message.content == "answer"
    assert (found[second].transcript, found[second].missing) == (None, NOT_EVALUATED)
    assert (found[first].listed.evaluation, found[second].listed.evaluation) == (0, 20)


def test_replays_are_listed_with_the_steps_that_made_them(reader):
    (row,) = reader.listing(Filters(replayed=True)).rows
    assert (row.step, row.replays) == (2, (4, 7))


def test_a_run_that_lives_and_one_that_was_killed_are_read_alike(tmp_path):
    path = make_run(tmp_path / "alive", ROLLOUTS)
    with ReplayStore(path / "replay.sqlite") as store:
        assert len(RunReader(*open_run(path)).listing(Filters()).rows) == len(ROLLOUTS)
        store._writer.execute("UPDATE trajectories SET reward = 0.5 WHERE row_id = 0")
    assert names(RunReader(*open_run(path)), reward_min=0.5, reward_max=0.5) == ["g000000.0.0"]


def test_a_trace_or_payload_that_is_damaged_or_gone_hides_nothing_else(tmp_path):
    path = make_run(tmp_path / "run", ROLLOUTS)
    connection = tables.STORE.connect(path / "replay.sqlite")
    connection.execute("UPDATE payloads SET token_ids = x'00' WHERE row_id = 6")
    connection.close()
    reader = RunReader(*open_run(path))
    (path / "traces" / "failed-00000000.traces").unlink()
    by_name = found(reader)
    assert "cannot be read" in by_name["g000003.0.0"].missing
    assert by_name["g000001.1.0"].missing == TRACE_GONE
    assert by_name["g000000.0.0"].transcript is not None


def test_a_run_without_a_store_says_what_to_do(tmp_path):
    path = make_run(tmp_path / "run", ROLLOUTS)
    (path / "replay.sqlite").unlink()
    with pytest.raises(StoreError, match="has the run been started"):
        RunReader(*open_run(path))


def test_all_pairs_of_filters_agree_with_both_alone(reader):
    some = [{"step": Span(1, 3)}, {"reward_min": 0.0}, {"task": "game"}, {"status": "trained"}, {"version": Span(0, 0)}]
    for one, other in itertools.combinations(some, 2):
        assert set(names(reader, **one, **other)) == set(names(reader, **one)) & set(names(reader, **other))
