"""Forecast of a run: staleness, idle time and duration, from the seconds of its rollouts, updates and publications.

:func:`play` plays a run in virtual time under the stage's own rule of admission and placement
(:class:`StalenessLedger`). It is pure. Legend: ``G`` groups and ``N`` rollouts of an update, ``S`` slots of the actors,
``s`` mean seconds of a rollout, ``M`` mean seconds of the slowest of an update's rollouts, ``T`` seconds of the learner
for an update without waiting, ``P`` of a publication, ``η`` the bound on staleness. On average an update takes at least

``T``
    The learner is always busy.
``N·s / S``
    The slots are always taken: Little's law (Little 1961), ``S = λ·s`` for ``λ`` rollouts a second.
``(M + T + P) / (η + 1)``
    A group is trained at most ``η`` updates after those in the weights that it began with. For ``η = 0`` this is a
    barrier, and ``M`` an expected maximum: ``s·(1 + 1/2 + … + 1/N)`` for exponential times (Rényi 1953). It is exact
    where each version begins ``N`` rollouts, as under a full bound, and else an estimate.

Not in a forecast: the start of processes, evaluations, scores that take long, and that a rollout takes longer where the
engines have more of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.stage.staleness import StalenessLedger, StalenessRule
from pipeline.store.queries import GroupTimes, Span, order_times
from pipeline.store.store import store_path
from pipeline.supervisor.display import clock
from pipeline.views.step_lines import read_lines, step_of

DRAWN = 2000
"""Groups that are drawn from given speeds."""
ROLLOUTS_MAX, UPDATES_MIN, UPDATES_MAX = 100_000, 20, 500
"""A forecast plays so many rollouts, about a second, within these numbers of updates."""
GROUPS_MAX, LINES_MAX, LINES_MIN = 10_000, 100, 3
"""Groups and updates that measured speeds are taken from, the newest; and fewest updates, without those of the start.
The store keeps the orders of 20,000 groups."""
PAUSE_SECONDS = 1.0
"""Longest time between two updates that the clocks explain; after a longer one the learner was started again."""
Z_95 = 1.6448536269514722
"""95th percentile of the standard normal distribution."""
FORM = "rollout=MEAN:P95,update=SECONDS,publish=SECONDS"


@dataclass(frozen=True, slots=True)
class Outlook:
    """Course of a run, forecast or measured: means over updates after those of the start."""

    update_seconds: float
    """Between the ends of two updates."""
    learner_idle: float
    """Share of the learner's time in which rollouts are missing."""
    slots_idle: float
    """Share of the slots of the actors without a rollout."""
    staleness: float
    """Versions between the learner and the weights that a trained rollout began with."""
    updates_left: int = 0

    def rows(self) -> dict[str, str]:
        """The values in words, by label."""
        return {
            "seconds of an update": f"{self.update_seconds:.3g}",
            "learner waits for rollouts": f"{self.learner_idle:.0%}",
            "slots of actors without a rollout": f"{self.slots_idle:.0%}",
            "mean staleness, versions": f"{self.staleness:.2f}",
            "time left": clock(self.updates_left * self.update_seconds),
        }


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of which a run is made; each is drawn with replacement."""

    groups: Sequence[GroupTimes]
    updates: Sequence[float]
    """Times of the learner for one update, without waiting for rollouts."""
    publish: float

    @classmethod
    def parse(cls, text: str, n_rollout: int) -> Speeds:
        """From :data:`FORM`. Times of rollouts are independent and lognormal. Raises :class:`ConfigurationError`."""
        try:
            given = dict(part.split("=") for part in text.split(","))
            mean, p95 = map(float, given.pop("rollout").split(":"))
            update, publish = float(given.pop("update")), float(given.pop("publish", "0"))
            # mean = exp(m + d²/2), p95 = exp(m + z·d): of the two d the one with the shorter tail
            deviation = Z_95 - math.sqrt(Z_95**2 - 2 * math.log(p95 / mean))
            valid = not given and deviation >= 0 < mean and math.isfinite(update + publish) and update > 0 <= publish
        except (ValueError, KeyError, ZeroDivisionError):
            valid = False
        if not valid:
            raise ConfigurationError(
                f"--speeds: expected a run directory, or {FORM} with a 95th percentile of 1 to "
                f"{math.exp(Z_95**2 / 2):.2f} times the mean, got {text!r}"
            )
        rng, location = random.Random(0), math.log(mean) - deviation**2 / 2
        groups = [
            GroupTimes(tuple(rng.lognormvariate(location, deviation) for _ in range(n_rollout))) for _ in range(DRAWN)
        ]
        return cls(groups, (update,), publish)

    def bounds(self, rule: StalenessRule, slots: int) -> tuple[float, float, float]:
        """Least seconds of an update, as in the docstring of this module. Groups that are replaced take slots too."""
        trained = [max(group.seconds, default=0.0) for group in self.groups if group.trained]
        work = sum(sum(group.seconds) for group in self.groups) / len(trained) * rule.groups_per_step
        size = min(rule.groups_per_step, len(trained))
        slowest = [max(trained[at : at + size]) for at in range(0, len(trained) - size + 1, size)]
        update = sum(self.updates) / len(self.updates)
        barrier = sum(slowest) / len(slowest) + update + self.publish
        return update, work / slots, barrier / (rule.bound + 1)


class _Play:
    """One run in virtual time, without an end. The learner grants credit for two batches, as
    :mod:`learner.process.role`."""

    def __init__(
        self, rule: StalenessRule, slots: int, groups: Iterator[GroupTimes], updates: Iterator[float], publish: float
    ) -> None:
        self._ledger, self._free, self._slots = StalenessLedger(rule, live=0, policy_version=0), slots, slots
        self._groups, self._updates, self._publish_seconds = groups, updates, publish
        self._numbers, self._serial = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._open: dict[int, GroupTimes] = {}
        self._versions: defaultdict[int, list[int]] = defaultdict(list)
        """Versions with which the rollouts of each group began."""
        self._out: dict[int, int] = {}
        """Number of rollouts of each group that have not ended."""
        self._pending: deque[tuple[int, float]] = deque()
        self._placed: defaultdict[int, list[int]] = defaultdict(list)
        self._training = self._publishing = self._blocked = False
        self._idle_since = self._waited = self.now = 0.0
        self.busy = 0.0
        """Seconds of slots with a rollout."""
        self.marks: list[tuple[float, float, float]] = []
        """End of each update, seconds that the learner waited for it, and ``busy``."""
        self.staleness: list[list[int]] = []
        """Staleness of each rollout, by update."""

    def run(self, updates: int) -> None:
        self._order()
        while len(self.marks) < updates:
            at, _, happen, what = heapq.heappop(self._events)
            self.busy += (self._slots - self._free) * (at - self.now)
            self.now = at
            happen(what)

    def _after(self, seconds: float, happen: Callable[[Any], None], what: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), happen, what))

    def _order(self) -> None:
        """Fill the free slots: rollouts of open groups first, then new groups as far as admission allows."""
        while self._free:
            if self._pending:
                number, seconds = self._pending.popleft()
                self._free -= 1
                self._versions[number].append(self._ledger.live or 0)
                self._after(seconds, self._ended, number)
            elif self._ledger.capacity():
                number, group = next(self._numbers), next(self._groups)
                self._ledger.admit(number)
                self._open[number], self._out[number] = group, len(group.seconds)
                self._pending.extend((number, seconds) for seconds in group.seconds)
                if not group.seconds:
                    self._complete(number)
            else:
                return

    def _ended(self, number: int) -> None:
        self._free += 1
        self._out[number] -= 1
        if not self._out[number]:
            self._complete(number)
        self._order()

    def _complete(self, number: int) -> None:
        del self._out[number]
        if self._open.pop(number).trained:
            self._ledger.complete(number)
            self._place()
        else:
            self._ledger.cancel(number)
            del self._versions[number]

    def _place(self) -> None:
        size, ledger = self._ledger.rule.groups_per_step, self._ledger
        while len(ledger.placed) < 2 * size and (placement := ledger.place_next()) is not None:
            self._placed[placement.update].append(placement.group)
        if not self._training and len(self._placed[ledger.consumed]) == size:
            self._training = True
            self._after(next(self._updates), self._trained, self.now - self._idle_since)

    def _trained(self, waited: float) -> None:
        update = self._ledger.consumed
        groups = self._placed.pop(update)
        self.staleness.append([update - version for number in groups for version in self._versions.pop(number, ())])
        self._ledger.consume(update, groups)
        self._waited = waited
        self._place()
        if self._publishing:
            self._blocked = True
        else:
            self._publish()

    def _publish(self) -> None:
        """Free the learner, while the engines take its weights."""
        self.marks.append((self.now, self._waited, self.busy))
        self._idle_since, self._training, self._blocked, self._publishing = self.now, False, False, True
        self._after(self._publish_seconds, self._published, self._ledger.consumed)
        self._place()

    def _published(self, updates: int) -> None:
        self._ledger.live, self._publishing = updates, False
        if self._blocked:
            self._publish()
        self._order()


def play(
    rule: StalenessRule,
    slots: int,
    groups: Iterator[GroupTimes],
    updates: Iterator[float],
    publish: float,
    total: int,
) -> tuple[Outlook, list[list[int]]]:
    """Play ``total`` updates, more than ``rule.bound + 1``, with ``groups`` in the order of their admission. Returns
    how they went, with nothing left, and by update the staleness of its rollouts."""
    game, warm = _Play(rule, slots, groups, updates, publish), rule.bound + 1
    game.run(total)
    (begin, _, busy_before), (end, _, busy) = game.marks[warm - 1], game.marks[-1]
    ages = [age for of_update in game.staleness[warm:] for age in of_update]
    outlook = Outlook(
        (end - begin) / (total - warm),
        sum(waited for _, waited, _ in game.marks[warm:]) / (end - begin),
        1 - (busy - busy_before) / ((end - begin) * slots),
        sum(ages) / len(ages) if ages else 0.0,
    )
    return outlook, game.staleness


def forecast(config: RunConfig, speeds: Speeds, left: int) -> tuple[Outlook, str]:
    """Forecast with ``left`` updates to make, and the bounds in words. Raises :class:`ConfigurationError`."""
    if config.engine.colocate == "sleep":
        raise ConfigurationError("no forecast: with engine.colocate: sleep, rollouts stop while the learner trains")
    rule, rng = StalenessRule(config.staleness.max, config.groups.groups_per_step), random.Random(0)
    slots = _slots(config)
    groups = (rng.choice(speeds.groups) for _ in itertools.repeat(None))
    updates = (rng.choice(speeds.updates) for _ in itertools.repeat(None))
    played = max(UPDATES_MIN, min(UPDATES_MAX, ROLLOUTS_MAX // (rule.groups_per_step * config.groups.n_rollout)))
    outlook, _ = play(rule, slots, groups, updates, speeds.publish, rule.bound + 1 + played)
    learner, full, barrier = speeds.bounds(rule, slots)
    return replace(outlook, updates_left=left), (
        f"an update takes at least {learner:.3g} s of the learner, {full:.3g} s of {slots} slots for rollouts, and "
        f"about {barrier:.3g} s for the slowest rollouts with staleness.max: {rule.bound}"
    )


def measure(config: RunConfig, directory: RunDirectory) -> tuple[Speeds, Outlook]:
    """Speeds and course of the newest updates of a run. Raises :class:`ConfigurationError` if there are too few, and
    :class:`pipeline.errors.StoreError`."""
    bound, slots = config.staleness.max, _slots(config)
    most = min(LINES_MAX, max(LINES_MIN, GROUPS_MAX // config.groups.groups_per_step))
    every = read_lines(directory.metrics_file)
    lines = every[bound + 1 :][-most:]
    if len(lines) < LINES_MIN:
        least = bound + 1 + LINES_MIN
        raise ConfigurationError(f"expected at least {least} updates in {directory.metrics_file}, got {len(every)}")
    total = sum(line["seconds"]["step"] for line in lines)
    waited = sum(line["seconds"]["wait"] for line in lines)
    begun = [line["finished"] - line["seconds"]["step"] for line in lines]
    starts = [i for i in range(1, len(lines)) if begun[i] > lines[i - 1]["finished"] + PAUSE_SECONDS]
    alive = [(begun[i], lines[j - 1]["finished"]) for i, j in itertools.pairwise([0, *starts, len(lines)])]
    updates = Span(lines[0]["update"], lines[-1]["update"])
    groups, busy = order_times(store_path(config, directory), updates, alive)
    if not any(group.trained for group in groups):
        raise ConfigurationError(f"expected groups of the newest updates in the store of {directory.path}, got none")
    published = [line["published"]["seconds"] for line in lines if line.get("published")]
    ages = [line["staleness_mean"] for line in lines if line.get("staleness_mean") is not None]
    left = max(0, config.run.total_steps - step_of(lines[-1]))
    speeds = Speeds(
        groups,
        [line["seconds"]["step"] - line["seconds"]["wait"] for line in lines],
        sum(published) / len(published) if published else 0.0,
    )
    return speeds, Outlook(
        total / len(lines),
        waited / total,
        1 - busy / (slots * sum(until - since for since, until in alive)),
        sum(ages) / len(ages) if ages else 0.0,
        left,
    )


def _slots(config: RunConfig) -> int:
    return config.actor.replicas * config.actor.concurrency
