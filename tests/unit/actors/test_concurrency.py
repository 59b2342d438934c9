"""Episodes at once rise while engines keep up, fall when they do not, and stay within their bounds."""

from __future__ import annotations

import random

import pytest

from actors.engine.base import EngineReport
from actors.engine.concurrency import FALL, RISE, ConcurrencyLimit

CALM = EngineReport(running=10, prefix_queries=0, prefix_hits=0)


class Player:
    """Plays as many episodes as it may; each look all of them end."""

    def __init__(self, least: int = 8, most: int = 256) -> None:
        self.limit, self.ended = ConcurrencyLimit(least, most), 0

    def look(self, *reports: EngineReport, asked: float = 0, known: float = 0, playing: int | None = None) -> int:
        playing = self.limit.value if playing is None else playing
        self.ended += playing
        return self.limit.observe(reports, playing, self.ended, asked, known)


def test_it_doubles_until_the_first_sign_of_too_many_and_then_rises_by_a_constant() -> None:
    player = Player()
    assert [player.look(CALM) for _ in range(3)] == [16, 32, 64]
    assert player.look(EngineReport(10, kv_used=0.99)) == 64 * FALL
    assert [player.look(CALM) for _ in range(3)] == [48 + 256 * RISE * i for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "signs",
    [
        [EngineReport(10, 5), EngineReport(10, 5)],
        [EngineReport(10, kv_used=0.96)],
        [EngineReport(10, preemptions=3)],
    ],
    ids=["waiting", "KV cache", "preemptions"],
)
def test_each_sign_of_too_many_lowers_it(signs: list[EngineReport]) -> None:
    player = Player(8, 64)
    while player.limit.value < 64:
        player.look(CALM)
    values = [player.look(sign) for sign in signs]
    assert values == [64] * (len(signs) - 1) + [64 * FALL]


def test_prefixes_that_the_cache_has_lost_lower_it() -> None:
    for hits, value in ((0.85, 64), (0.7, 64 * FALL)):
        player = Player(8, 64)
        while player.limit.value < 64:
            player.look(CALM)
        report = EngineReport(10, prefix_queries=400_000, prefix_hits=400_000 * 0.9 * hits)
        assert player.look(report, asked=100_000, known=90_000) == value


def test_burst_that_waits_for_one_look_lowers_nothing() -> None:
    player = Player(64, 64 * 2)
    assert player.look(EngineReport(10, 5), playing=60) == player.look(CALM, playing=60) == 64


def test_it_neither_falls_nor_rises_while_more_episodes_are_played_than_it_allows() -> None:
    player, full = Player(8, 64), EngineReport(10, kv_used=0.99)
    while player.limit.value < 64:
        player.look(CALM)
    assert [player.look(full, playing=playing) for playing in (64, 60, 50)] == [48, 48, 48]
    assert player.look(full, playing=48) == 36


def test_it_does_not_rise_beyond_what_is_used_nor_without_reports() -> None:
    player = Player()
    assert [player.look(CALM, playing=4) for _ in range(9)] == [8] * 9
    assert [player.look() for _ in range(9)] == [8] * 9


def test_counters_of_an_engine_that_joins_are_no_sign() -> None:
    player, other = Player(8, 64), EngineReport(10, preemptions=3, prefix_queries=10**6)
    while player.limit.value < 64:
        player.look(CALM)
    assert [player.look(CALM, other, asked=10**5 * i, known=9 * 10**4 * i) for i in (1, 2)] == [64, 64]


def test_it_stays_within_its_bounds_whatever_is_reported() -> None:
    draw = random.Random(0)
    for _ in range(50):
        least = draw.randint(1, 20)
        player = Player(least, least + draw.randint(0, 50))
        for _ in range(100):
            report = EngineReport(*(draw.uniform(0, 5) for _ in range(7)))
            value = player.look(report, asked=draw.uniform(0, 1e6), known=draw.uniform(0, 1e6))
            assert player.limit.least <= value <= player.limit.most


def test_actors_that_share_engines_come_to_equal_parts() -> None:
    players = [Player(4, 256), Player(4, 256)]
    players[0].limit.value = 200
    for _ in range(300):
        total = sum(player.limit.value for player in players)
        report = EngineReport(total, kv_used=total / 260)
        for player in players:
            player.look(report)
    low, high = sorted(player.limit.value for player in players)
    assert high <= 1.3 * low
