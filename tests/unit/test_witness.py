"""The audit of ``afterplay chaos`` against what actors and learner recorded: no valid history is accused, whatever was
killed in it, and every single change of a valid history is found."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.witness import WITNESS, open_witness, turn_digests
from pipeline.store.records import OrderKey, group_id
from pipeline.store.witness import (
    LearnerProcess,
    MadeRollout,
    StoredGroupOutcome,
    StoredOutcomes,
    StoredRolloutOutcome,
    TrainedRollout,
    TrainedUpdate,
    Witness,
    audit,
    read_witness,
)

GROUPS, ROLLOUTS, WEIGHT = 2, 2, 2.0


@dataclasses.dataclass
class History:
    witness: Witness
    stored: StoredOutcomes
    weights: list[TrainedUpdate]
    """Updates in the final weights."""

    @property
    def problems(self) -> list[str]:
        return audit(self.witness, self.stored, WEIGHT)


class Run:
    """A run whose learner is killed at random and resumes from its last checkpoint, if there is one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.version = rng, 0, 0
        self.witness, self.stored = Witness(), StoredOutcomes()
        self.placed: list[list[int]] = []
        """Groups of each update, also of those that a learner must make again."""
        self.next_group = 0
        self.checkpoint: tuple[int, int, list[TrainedUpdate]] | None = None
        """Updates, version, and the updates in its weights."""

    def play(self) -> History:
        weights: list[TrainedUpdate] = []
        for _ in range(self.rng.randint(1, 4)):
            weights = self.learn()
        self.settle(weights)
        return History(self.witness, self.stored, weights)

    def tick(self) -> int:
        self.now += 1
        return self.now

    def rollout(self, key: OrderKey, state: str, order: str = "delivered", *, usable: bool = True) -> None:
        """One order, made and perhaps acknowledged: a line may be lost with its writer."""
        name, score = key.text, self.rng.randint(0, 3) / 2
        self.witness.made[name].append(MadeRollout(usable, score, f"0:{name} 1:{name}"))
        if self.rng.random() < 0.1:  # the order came twice: the store took the first answer
            self.witness.made[name].append(MadeRollout(usable, score + 1, "0:other"))
        if self.rng.random() < 0.9:
            self.witness.acknowledged.add(name)
        reward = WEIGHT * score if usable else None
        self.stored.rollouts[name] = StoredRolloutOutcome(order, state, reward, order if state == "dropped" else "")

    def group(self) -> int:
        """A group that is complete; some of its orders failed before."""
        number, self.next_group = self.next_group, self.next_group + 1
        for slot in range(ROLLOUTS):
            if self.rng.random() < 0.2:
                order = self.rng.choice(["failed", "aborted"])
                self.rollout(OrderKey(number, slot, 1), "dropped", order, usable=False)
            if self.rng.random() < 0.2:
                self.stored.rollouts[OrderKey(number, slot, 2).text] = StoredRolloutOutcome("expired")
            self.rollout(OrderKey(number, slot, 0), "held")
        self.stored.groups[number] = StoredGroupOutcome("ready", None)
        if self.rng.random() < 0.2:
            reason = self.rng.choice(["cancelled", "zero_variance"])
            self.end(number, "dropped", StoredGroupOutcome("cancelled", None, reason), reason)
            return self.group()
        if self.rng.random() < 0.1:
            self.end(number, "dropped", StoredGroupOutcome("zero_variance", 0, dropped=True), "zero_variance")
            return self.group()
        return number

    def end(self, number: int, state: str, outcome: StoredGroupOutcome, reason: str = "") -> None:
        for slot in range(ROLLOUTS):
            name = OrderKey(number, slot, 0).text
            self.stored.rollouts[name] = dataclasses.replace(
                self.stored.rollouts[name], trajectory=state, reason=reason
            )
        self.stored.groups[number] = outcome

    def trained(self, name: str, version: int, *, replayed: bool = False) -> TrainedRollout:
        made, stored = self.witness.made[name][0], self.stored.rollouts[name]
        return TrainedRollout(name, replayed, stored.reward, made.environment, made.digests, version, 4, 4)

    def learn(self) -> list[TrainedUpdate]:
        """One learner process, until it is killed."""
        rng = self.rng
        updates, version, weights = self.checkpoint or (0, 0, [])
        version = version if self.version <= version else self.version + 1
        learner = LearnerProcess(self.tick(), updates, version)
        self.witness.learners.append(learner)
        weights = list(weights)
        for _ in range(rng.randint(0, 5)):
            update = len(weights)
            if update == len(self.placed):
                self.placed.append([self.group() for _ in range(GROUPS)])
            groups = {}
            for number in self.placed[update]:
                names = [OrderKey(number, slot, 0).text for slot in range(ROLLOUTS)]
                rollouts = [self.trained(name, version) for name in names]
                old = [r.id for u in weights for of in u.groups.values() for g in of for r in g if not r.replayed]
                if old and rng.random() < 0.5:
                    rollouts.append(self.trained(rng.choice(old), 0, replayed=True))
                groups[group_id(number)] = [tuple(rollouts)]
            weights.append(TrainedUpdate(update, version, False, groups))
            learner.trained.append(weights[-1])
            version += 1
            if rng.random() < 0.7:
                learner.published.append((self.tick(), version, len(weights)))
                self.version = version
            if rng.random() < 0.4:
                learner.saving.append((self.tick(), len(weights)))
                if rng.random() < 0.7:  # else it is killed while it writes
                    self.checkpoint = len(weights), version, list(weights)
        self.version = max(self.version, version)  # weights may be in a folder although nobody announced them
        return weights

    def settle(self, weights: list[TrainedUpdate]) -> None:
        """The store at the end; it may lack the last update."""
        self.stored.updates = max(0, len(weights) - self.rng.randint(0, 1))
        for update, groups in enumerate(self.placed):
            for number in groups:
                if update >= self.stored.updates:
                    self.stored.groups[number] = StoredGroupOutcome("placed", update)
                    continue
                (rollouts,) = weights[update].groups[group_id(number)]
                fresh = frozenset(r.id for r in rollouts if not r.replayed)
                replayed = frozenset(r.id for r in rollouts if r.replayed)
                self.end(number, "trained", StoredGroupOutcome("trained", update, "", fresh, replayed))


def history(seed: int, trained: int = 0) -> History:
    """The first valid one from ``seed`` on in whose store at least ``trained`` updates are."""
    while True:
        found = Run(random.Random(seed)).play()
        if found.stored.updates >= trained:
            return copy.deepcopy(found)
        seed += 1_000_003


@given(st.integers(0, 2**32))
def test_no_valid_history_is_accused(seed: int) -> None:
    assert history(seed).problems == []


def change_rollout(h: History, rng: random.Random, **facts: object) -> None:
    """Another fact of one trajectory of the final weights."""
    update = h.weights[rng.randrange(h.stored.updates)]
    name = rng.choice(sorted(update.groups))
    rollouts = list(update.groups[name][0])
    i = rng.randrange(len(rollouts))
    rollouts[i] = dataclasses.replace(rollouts[i], **facts)  # type: ignore[arg-type]
    replace_update(h, update, {**update.groups, name: [tuple(rollouts)]})


def replace_update(h: History, update: TrainedUpdate, groups: dict[str, list[tuple[TrainedRollout, ...]]]) -> None:
    for learner in h.witness.learners:
        learner.trained = [dataclasses.replace(u, groups=groups) if u is update else u for u in learner.trained]


def acked(h: History, rng: random.Random, states: tuple[str, ...]) -> str:
    return rng.choice([n for n in sorted(h.witness.acknowledged) if h.stored.rollouts[n].trajectory in states])


def forget_trajectory(h: History, rng: random.Random) -> None:
    name = acked(h, rng, ("held", "trained", "dropped"))
    outcome = rng.choice(
        [None, StoredRolloutOutcome("delivered"), *map(StoredRolloutOutcome, ("expired", "leased", "cancelled"))]
    )
    del h.stored.rollouts[name]
    if outcome is not None:
        h.stored.rollouts[name] = outcome


def fail_good_trajectory(h: History, rng: random.Random) -> None:
    name = acked(h, rng, ("trained",))
    h.stored.rollouts[name] = StoredRolloutOutcome("failed", "dropped", None, "failed")


def drop_good_trajectory(h: History, rng: random.Random) -> None:
    """As what it was not: its group was trained with another."""
    name, reason = (
        acked(h, rng, ("trained",)),
        rng.choice(["unscored", "cancelled", "zero_variance", "failed"]),
    )
    outcome = dataclasses.replace(h.stored.rollouts[name], trajectory="dropped", reason=reason)
    h.stored.rollouts[name] = outcome


def hold_for_ever(h: History, rng: random.Random) -> None:
    name = acked(h, rng, ("trained",))
    h.stored.rollouts[name] = dataclasses.replace(h.stored.rollouts[name], trajectory="held")


def invent_trajectory(h: History, rng: random.Random) -> None:
    h.stored.rollouts["g000000.0.9"] = StoredRolloutOutcome("delivered", "dropped")


def train_group_twice(h: History, rng: random.Random) -> None:
    """In place of another, as the given mutant does."""
    update = h.weights[rng.randrange(h.stored.updates)]
    first, *_ = update.groups
    replace_update(h, update, {first: [update.groups[first][0]] * 2})


def train_group_again_later(h: History, rng: random.Random) -> None:
    a, b = rng.sample(h.weights[: h.stored.updates], 2)
    name = rng.choice(sorted(a.groups))
    replace_update(h, b, {**b.groups, name: a.groups[name]})


def skip_group(h: History, rng: random.Random) -> None:
    update = h.weights[rng.randrange(h.stored.updates)]
    name = rng.choice(sorted(update.groups))
    replace_update(h, update, {n: g for n, g in update.groups.items() if n != name})


def report_dropped_group_as_trained(h: History, rng: random.Random) -> None:
    h.stored.groups[10_000] = StoredGroupOutcome("trained", rng.randrange(h.stored.updates))


def forget_trained_group(h: History, rng: random.Random) -> None:
    number = rng.choice([n for n, g in h.stored.groups.items() if g.state == "trained"])
    h.stored.groups[number] = rng.choice(
        [StoredGroupOutcome("cancelled", None, "late"), StoredGroupOutcome("placed", 0)]
    )


def move_trained_group(h: History, rng: random.Random) -> None:
    number = rng.choice([n for n, g in h.stored.groups.items() if g.state == "trained"])
    group = h.stored.groups[number]
    assert group.update is not None
    h.stored.groups[number] = dataclasses.replace(group, update=group.update + 1)


def count_other_trajectories(h: History, rng: random.Random) -> None:
    number = rng.choice([n for n, g in h.stored.groups.items() if g.state == "trained"])
    group, key = h.stored.groups[number], rng.choice(["trained", "replayed"])
    h.stored.groups[number] = dataclasses.replace(group, **{key: getattr(group, key) ^ {"g000000.0.0"}})


def lose_update(h: History, rng: random.Random) -> None:
    h.stored.updates = len(h.weights) + 1


def swap_rewards(h: History, rng: random.Random) -> None:
    """In the stage, of store and delivery alike: the environment's score is the witness."""
    name = rng.choice([r.id for u in h.weights[: h.stored.updates] for g in u.groups.values() for r in g[0]])
    other = 99.0
    h.stored.rollouts[name] = dataclasses.replace(h.stored.rollouts[name], reward=other)
    for update in list(h.weights):
        groups = {
            n: [tuple(dataclasses.replace(r, reward=other) if r.id == name else r for r in g) for g in of]
            for n, of in update.groups.items()
        }
        replace_update(h, update, groups)


def use_version_again(h: History, rng: random.Random) -> None:
    learner = rng.choice([learner for learner in h.witness.learners if learner.trained])
    i = rng.randrange(len(learner.trained))
    learner.trained[i] = dataclasses.replace(learner.trained[i], version=learner.trained[i].version - 1)


def begin_with_old_version(h: History, rng: random.Random) -> None:
    last = h.witness.learners[-1]
    h.witness.learners.append(LearnerProcess(2**62, len(h.weights), last.version + len(last.trained) + 5))
    last.saving.append((2**61, len(h.weights)))
    last.published.append((2**61, last.version + len(last.trained), len(h.weights)))
    h.witness.learners[-1].version = last.version + len(last.trained) - 1


def resume_from_nothing(h: History, rng: random.Random) -> None:
    h.witness.learners.append(LearnerProcess(2**62, 10**4, 10**6))


def skip_update(h: History, rng: random.Random) -> None:
    learner = rng.choice([learner for learner in h.witness.learners if learner.trained])
    learner.trained[0] = dataclasses.replace(learner.trained[0], update=learner.trained[0].update + 1)


def write_garbage(h: History, rng: random.Random) -> None:
    h.witness.unreadable.append("actor-0.jsonl")


def publish_other_weights(h: History, rng: random.Random) -> None:
    learner = rng.choice(h.witness.learners)
    learner.published.append((2**61, learner.version + 3, learner.updates + 2))


Mutation = Callable[[History, random.Random], None]
MUTATIONS: dict[Mutation, str] = {
    forget_trajectory: "acknowledged and not in the store",
    fail_good_trajectory: "acknowledged that count as failed",
    drop_good_trajectory: "acknowledged and dropped as",
    hold_for_ever: "wait for groups that have ended",
    invent_trajectory: "in the store that no actor made",
    train_group_twice: "groups trained twice in one update",
    train_group_again_later: "groups trained in two updates",
    skip_group: "counts as trained and that are in no update",
    report_dropped_group_as_trained: "counts as trained and that are in no update",
    forget_trained_group: "the store does not count as trained in that update",
    move_trained_group: "the store does not count as trained in that update",
    count_other_trajectories: "with other trajectories than the store counts",
    lose_update: "updates in the store and not in the weights",
    swap_rewards: "another reward than their score gives",
    use_version_again: "updates from another version than the one before them gave",
    begin_with_old_version: "began with a version that others were published as",
    publish_other_weights: "versions published of other weights",
    resume_from_nothing: "resumed from and that no process wrote",
    skip_update: "whose updates do not follow each other",
    write_garbage: "a line that cannot be read",
}
FACTS: list[tuple[dict[str, object], str]] = [
    ({"id": "g009999.0.0"}, "trained that no actor made"),
    ({"id": "g009999.0.0"}, "with other trajectories than the store counts"),
    ({"reward": 77.0}, "another reward than the store has"),
    ({"reward": None}, "another reward than the store has"),
    ({"environment": 77.0}, "another score than their environment gave"),
    ({"environment": None}, "another score than their environment gave"),
    ({"digests": "0:altered"}, "other tokens than their actor sent"),
    ({"digests": ""}, "other tokens than their actor sent"),
    ({"version_max": 10**6}, "tokens of a version to come"),
    ({"tokens": 0, "tokens_in_loss": 0}, "tokens were not in its loss"),
    ({"tokens_in_loss": 3}, "tokens were not in its loss"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@given(seed=st.integers(0, 2**32))
def test_every_change_of_a_history_is_found(mutation: Mutation, seed: int) -> None:
    changed = history(seed, trained=2)
    mutation(changed, random.Random(seed))
    assert MUTATIONS[mutation] in "; ".join(changed.problems)


@pytest.mark.parametrize(("facts", "problem"), FACTS, ids=str)
@given(seed=st.integers(0, 2**32))
def test_every_change_of_what_was_trained_is_found(facts: dict[str, object], problem: str, seed: int) -> None:
    changed = history(seed, trained=1)
    change_rollout(changed, random.Random(seed), **facts)
    assert problem in "; ".join(changed.problems)


def test_an_imported_trajectory_is_trained_although_no_actor_made_it() -> None:
    changed = history(0, trained=1)
    update = changed.weights[0]
    name = sorted(update.groups)[0]
    imported = TrainedRollout("g000777.0.0", True, 1.0, None, None, 0, 4, 4)
    replace_update(changed, update, {**update.groups, name: [(*update.groups[name][0], imported)]})
    group = changed.stored.groups[int(name[1:])]
    trained_with = dataclasses.replace(group, replayed=group.replayed | {imported.id})
    changed.stored.groups[int(name[1:])] = trained_with
    assert changed.problems != []
    changed.stored.imported.add(imported.id)
    assert changed.problems == []


@given(st.integers(0, 2**32))
def test_groups_that_were_rolled_up_unread_accuse_nobody(seed: int) -> None:
    seen = history(seed, trained=1)
    below = random.Random(seed).randrange(max(seen.stored.groups) + 1)
    seen.stored.groups = {n: g for n, g in seen.stored.groups.items() if n >= below}
    seen.stored.rollouts = {n: r for n, r in seen.stored.rollouts.items() if n >= group_id(below)}
    seen.stored.rolled_below = below
    assert seen.problems == []


def test_a_line_that_a_kill_cut_is_not_read_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_witness("actor-0") is None
    monkeypatch.setenv(WITNESS, str(tmp_path))
    file = open_witness("actor-0")
    assert file is not None
    file.write("acknowledged", ids=["g000000.0.0"])
    (path,) = tmp_path.iterdir()
    with path.open("ab") as written:
        written.write(b'{"what": "acknowledged", "ids": ["g0000')
    assert read_witness(tmp_path).acknowledged == {"g000000.0.0"}
    assert read_witness(tmp_path).unreadable == []
    with path.open("ab") as written:
        written.write(b"\n")
    assert read_witness(tmp_path).unreadable != []


def test_a_digest_of_a_turn_has_all_that_is_trained_of_it() -> None:
    ids = np.array([5, 6, 7, 8, 9, 10], np.int32)
    mask = np.array([0, 1, 0, 1, 1, 0], np.bool_)
    logprobs = np.array([0, -1, 0, -2, -3, 0], np.float32)
    versions = np.array([-1, 4, -1, 4, 5, -1], np.int32)
    turns = np.array([0, 0, 1, 1, 1, 1], np.int32)
    digests = turn_digests(ids, mask, logprobs, versions, turns)
    assert [digest.split(":")[0] for digest in digests] == ["0", "1"]
    assert turn_digests(ids, mask & (turns == 1), logprobs, versions, turns) == digests[1:]
    assert turn_digests(ids[:5], mask[:5], logprobs[:5], versions[:5], turns[:5]) == digests
    for array, place in ((ids, 0), (ids, 3), (logprobs, 3), (versions, 4)):
        other = array.copy()
        other[place] += 1
        arrays = [other if given is array else given for given in (ids, mask, logprobs, versions, turns)]
        assert turn_digests(*arrays)[1] != digests[1]
