"""Groups with replays: assembly, choice, rows and masks, facts for the stage."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import anyio
import anyio.from_thread
import anyio.lowlevel
import hypothesis.strategies as st
import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings

from learner.advantages.estimate import with_advantages
from learner.checkpoints.checkpoint import CheckpointState
from learner.data.rows import Group, StoredRollout, TokenScores, Trained, build_batch, trajectory_rows
from learner.process.batches import TRAINING_PASSES, CandidateScorer, CandidateScores, choose_replays, ranked
from learner.process.recorder import trained_facts
from learner.process.session import GroupAssembler
from pipeline.config.advantages import AdvantageConfig
from pipeline.config.replay import ReplayConfig
from pipeline.errors import Interrupted, TrainingError
from pipeline.schema import GroupPlan, PromptLessons, Task

slow = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plan_of(name="g", n=3, k=1, pool=("a", "b", "c")):
    return GroupPlan(name, Task(f"task/{name}", "toy", 0), n, n - k, tuple(pool[:k]), tuple(pool))


def group_of(kit, name="g", n=3, k=1, pool=("a", "b", "c"), entropies=None, **facts):
    plan = plan_of(name, n, k, [f"{name}.{p}" for p in pool])
    fresh = [kit.make_trajectory(f"{name}.{i}", group=name, reward=0.0, seed=i) for i in range(n - k)]
    stored = [kit.make_trajectory(p, group="old", reward=1.0, seed=50 + i) for i, p in enumerate(plan.candidates)]
    return Group(plan, (*fresh, *stored), {t.trajectory_id: StoredRollout(**facts) for t in stored})


def scorer(values, calls=None):
    """Entropy of each sequence in the order of candidates."""

    def score(rows):
        if calls is not None:
            calls.append(rows)
        return {row.trajectory_index: values[row.trajectory_index] for row in rows}

    return score


@slow
@given(data=st.data(), n=st.integers(2, 4), extra=st.integers(0, 3))
def test_a_group_is_complete_with_all_delivered_in_any_order_and_keeps_its_facts(kit, data, n, extra):
    k = data.draw(st.integers(1, n - 1))
    pool = tuple(f"p{i}" for i in range(k + extra))
    plan = plan_of(n=n, k=k, pool=pool)
    assembler = GroupAssembler(1)
    assembler.plan(plan, 0)
    names = [*(f"f{i}" for i in range(plan.n_fresh)), *pool]
    for index in data.draw(st.permutations(range(plan.delivered))):
        assert not assembler.ready(0)
        fact = StoredRollout(weight=0.5 + index) if index >= plan.n_fresh else None
        t = kit.make_trajectory(names[index], group="old", reward=None)
        assembler.deliver("g", index, t, float(index), {}, fact)
    (group,) = assembler.take(0)
    assert [t.trajectory_id for t in group.trajectories] == names
    assert [t.trajectory_id for t in group.fresh] == names[: n - k]
    assert [t.reward for t in group.trajectories] == list(map(float, range(plan.delivered)))
    assert {name: fact.weight for name, fact in group.stored_rollouts.items()} == {
        name: 0.5 + i for i, name in enumerate(names) if i >= n - k
    }
    assert [t.trajectory_id for t in group.with_planned_replays().candidates] == list(pool[:k])


def test_a_candidate_in_another_place_is_an_error(kit):
    assembler = GroupAssembler(1)
    assembler.plan(plan_of(), 0)
    with pytest.raises(TrainingError, match="stored a at index 2"):
        assembler.deliver("g", 2, kit.make_trajectory("b"), 1.0, {})


def test_a_weight_that_is_not_finite_is_an_error():
    for weight in (float("nan"), -1.0, float("inf")):
        with pytest.raises(TrainingError, match="finite weight"):
            StoredRollout(weight=weight)


@given(st.lists(st.none() | st.floats(0, 5) | st.just(float("nan")), min_size=1, max_size=8))
def test_unknown_entropy_ranks_worst_in_both_directions(values):
    known = [v for v in values if v is not None and v == v]
    for select, order in (("argmin", sorted(known)), ("argmax", sorted(known, reverse=True))):
        places = ranked(values, select)
        assert sorted(places) == list(range(len(values)))
        assert [values[i] for i in places[: len(known)]] == order


@slow
@given(values=st.lists(st.floats(0, 5), min_size=6, max_size=6), select=st.sampled_from(["argmin", "argmax"]))
def test_the_current_policy_chooses_k_of_each_group_in_one_pass(kit, values, select):
    groups, calls = [group_of(kit, "g", k=2, n=4), group_of(kit, "h"), kit.make_group("i", [1.0, 0.0])], []
    choice = choose_replays(groups, ReplayConfig(select=select, scoring_share=None), scorer(values, calls))
    assert len(calls) == 1
    assert choice.failed == frozenset()
    assert choice.scored == {"waiting": 0, "update": 6}
    sign = 1 if select == "argmin" else -1
    for group, part in zip(choice.groups, (values[:3], values[3:]), strict=False):
        order = sorted(range(3), key=lambda i: sign * part[i])
        names = [f"{group.group_id}.{'abc'[i]}" for i in order[: group.n_replayed]]
        assert [t.trajectory_id for t in group.candidates] == names
        assert group.settled
    assert choice.groups[2] is groups[2]


@pytest.mark.parametrize("config", [{"entropy": "stored"}, {"select": "random"}])
def test_the_stored_choice_needs_no_scoring(kit, config):
    choice = choose_replays([group_of(kit)], ReplayConfig(**config), lambda rows: pytest.fail("scored"))
    assert [t.trajectory_id for t in choice.groups[0].candidates] == ["g.a"]


def test_where_scoring_fails_the_stored_choice_is_trained_and_counted(kit):
    def broken(rows):
        raise RuntimeError("out of memory")

    groups = [group_of(kit, "g"), group_of(kit, "h")]
    for score, failed in ((broken, {"g", "h"}), (scorer([0.1, float("nan"), 0.2, 3.0, 1.0, 2.0]), {"g"})):
        choice = choose_replays(groups, ReplayConfig(scoring_share=None), score)
        assert choice.failed == failed
        assert [t.trajectory_id for t in choice.groups[0].candidates] == ["g.a"]
        expected = "h.a" if "h" in failed else "h.b"
        assert [t.trajectory_id for t in choice.groups[1].candidates] == [expected]


def with_facts(group, **facts):
    """The group, with these facts of its candidates, in their order."""
    stored = {
        t.trajectory_id: StoredRollout(**{name: values[i] for name, values in facts.items()})
        for i, t in enumerate(group.candidates)
    }
    return Group(group.plan, group.trajectories, stored)


def test_an_update_scores_what_its_share_affords_and_ranks_the_rest_by_what_is_stored(kit):
    facts = {"entropy": [0.4, 0.3, None], "entropy_age": [1, 8, None]}
    group = with_facts(group_of(kit), **facts)
    trained = sum(t.n_tokens for t in group.with_planned_replays().trajectories)
    a, b, c = (t.n_tokens for t in group.candidates)
    names = {"g.a": 0, "g.b": 0, "g.c": 0}
    for tokens, scored, chosen in ((c - 1, [], "g.b"), (c, ["g.c"], "g.c"), (b + c, ["g.c", "g.b"], "g.c"),
                                   (a + b + c, ["g.c", "g.b", "g.a"], "g.a")):  # fmt: skip
        calls = []

        def score(rows, calls=calls):
            calls += [row.trajectory_id for row in rows]
            exact = {"g.a": 0.1, "g.b": 0.9, "g.c": 0.2}
            return {row.trajectory_index: exact[row.trajectory_id] for row in rows}

        config = ReplayConfig(scoring_share=tokens / trained / TRAINING_PASSES)
        choice = choose_replays([group], config, score)
        assert calls == scored, "unknown ones first, then those that were measured longest ago"
        assert [t.trajectory_id for t in choice.groups[0].candidates] == [chosen]
        assert set(choice.entropies["g"]) == set(scored) <= set(names)
        assert choice.scored == {"waiting": 0, "update": len(scored)} and not choice.failed


def test_what_was_scored_while_waiting_is_not_scored_again_and_all_of_it_is_reported(kit):
    groups = [group_of(kit, "g"), group_of(kit, "h")]
    config, scores = ReplayConfig(scoring_share=0), CandidateScores()
    for part, values in ((groups[0], [0.3, 0.1, 0.2]), (groups[1], [0.3, 0.2, 0.1])):
        scores.score(scores.unscored([part]), scorer(values))
    assert scores.unscored(groups) == []
    choice = choose_replays(groups, config, lambda rows: pytest.fail("scored again"), scores)
    assert [t.trajectory_id for g in choice.groups for t in g.candidates] == ["g.b", "h.c"]
    assert choice.scored == {"waiting": 6, "update": 0}
    batch = build_batch(0, choice.groups)
    report = SimpleNamespace(statistics=batch_statistics_of(batch, {2: 0.15}), policy_version=4)
    facts = trained_facts(batch, report, choice)
    assert facts.header()["replayed"] == {"g": ["g.b"], "h": ["h.c"]}
    assert facts.header()["entropy"] == {
        "g.a": 0.3, "g.b": 0.15, "g.c": 0.2, "h.a": 0.3, "h.b": 0.2, "h.c": 0.1
    }, "of what was trained, the value of the update"  # fmt: skip


def batch_statistics_of(batch, entropies):
    """Statistics of an update whose trajectories have these entropies, by index."""
    none = SimpleNamespace(ess_ratio=None, carried_ratio=None)
    source = SimpleNamespace(ratio=none, sequence_ratio=none)
    return SimpleNamespace(
        all=source, by_source={"fresh": source, "replay": source}, entropy_by_trajectory=dict(entropies)
    )


class Waiting:
    """A session, and its assembler, whose groups of an update become complete when a test says so."""

    def __init__(self):
        self.groups, self._changed, self.assembler = [], anyio.Event(), self

    def complete(self, update):
        return tuple(self.groups)

    def progress(self, update):
        return SimpleNamespace(complete=len(self.groups))

    def add(self, *groups):
        self.groups += groups
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def changed(self):
        await self._changed.wait()


async def test_candidates_are_scored_as_their_groups_come_in_passes_of_bounded_size(kit):
    session, passes, free = Waiting(), [], True
    scored = anyio.Event()

    def score(rows):
        passes.append([row.trajectory_id for row in rows])
        if sum(map(len, passes)) == 6:
            anyio.from_thread.run_sync(scored.set)
        return {row.trajectory_index: 0.5 for row in rows}

    first, second = group_of(kit, "g"), group_of(kit, "h")
    tokens = sum(t.n_tokens for t in first.candidates[:2])
    scorer_ = CandidateScorer(session, ReplayConfig(), score, tokens, lambda: free)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scorer_.run, 3)
        session.add(first)
        session.add(second)
        await scored.wait()
        tasks.cancel_scope.cancel()
    assert passes[0] == ["g.a", "g.b"] and sorted(itertools.chain(*passes)) == [f"{g}.{c}" for g in "gh" for c in "abc"]
    assert len(scorer_.scores(3)) == 6
    assert len(scorer_.scores(4)) == 0, "the weights are others"
    free = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scorer_.run, 4)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert sum(map(len, passes)) == 6, "the device belongs to the engines"


def test_an_interrupt_is_no_failed_choice(kit):
    def stop(rows):
        raise Interrupted

    with pytest.raises(Interrupted):
        choose_replays([group_of(kit)], ReplayConfig(scoring_share=None), stop)


def test_the_trainer_scores_candidates_with_its_own_weights(kit):
    import torch

    from learner.policy.policy import Policy
    from learner.training.trainer import Trainer

    config = kit.run_config({"tokens_per_microbatch": 8})
    trainer = Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)
    group = group_of(kit)
    choice = choose_replays([group], ReplayConfig(scoring_share=None), trainer.mean_entropies)
    exact = {}
    for t in group.candidates:
        (row,) = trajectory_rows(t, 0)
        with torch.no_grad():
            z = trainer.policy.model(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0].double()
        log_p = torch.log_softmax(z, -1)
        h = -(log_p.exp() * log_p).sum(-1).numpy()
        exact[t.trajectory_id] = h[np.flatnonzero(row.loss_mask) - 1].mean()
    assert choice.groups[0].candidates[0].trajectory_id == min(exact, key=exact.get)


def test_an_unsettled_group_is_not_trained(kit):
    with pytest.raises(TrainingError, match="choose"):
        build_batch(0, [group_of(kit)])


def test_fresh_and_chosen_share_one_advantage_group_with_the_stored_reward(kit):
    group = group_of(kit, weight=0.25).with_planned_replays()
    batch, _ = with_advantages(build_batch(0, [group]), TokenScores(), AdvantageConfig())
    assert [row.replayed for row in batch.rows] == [False, False, True]
    assert [row.replay_weight for row in batch.rows] == [1.0, 1.0, 0.25]
    assert batch.rows[2].advantages.min() > 0 > batch.rows[0].advantages.max()
    assert [len(part) for part in (batch.fresh, batch.replayed)] == [2, 1]


@slow
@given(data=st.data(), n_turns=st.integers(1, 4), replayed=st.booleans(), keep=st.booleans(), seed=st.integers(0, 99))
def test_masks_lie_on_sampled_tokens_and_follow_them_through_every_change(kit, data, n_turns, replayed, keep, seed):
    rng = np.random.default_rng(seed)
    turns, branch = [], 0
    for i in range(n_turns):
        branch += int(i > 0 and data.draw(st.booleans()))
        turns.append(kit.make_turn(rng, int(rng.integers(1, 5)), int(rng.integers(1, 5)), version=i, branch=branch))
    plain = {i: (7,) * int(rng.integers(1, 4)) for i in range(n_turns) if rng.random() < 0.5} or {0: (7, 7)}
    lessons = data.draw(st.sampled_from([None, PromptLessons(("l",), keep, {} if keep else plain)]))
    t = replace(kit.make_trajectory("t", turns=turns), lessons=lessons)
    rows = trajectory_rows(t, 0, StoredRollout() if replayed else None)
    for name, field in (("token_ids", "token_ids"), ("behaviour_logprobs", "behaviour_logprobs")):
        came = np.concatenate([getattr(row, name)[row.loss_mask] for row in rows])
        np.testing.assert_array_equal(came, np.concatenate([getattr(turn.completion, field) for turn in turns]))
    versions = np.concatenate([row.policy_versions[row.loss_mask] for row in rows])
    np.testing.assert_array_equal(versions, np.repeat(range(n_turns), [len(turn.completion) for turn in turns]))
    for row in rows:
        assert (row.replayed, row.with_lessons) == (replayed, lessons is not None)
        assert row.discarded == (lessons is not None and not keep)
    spans = []
    for i, turn in enumerate(turns):
        context = turn.context.token_ids
        if lessons is not None and not keep and i in plain:
            context = np.asarray(plain[i])
        spans += [context, turn.completion.token_ids]
    np.testing.assert_array_equal(np.concatenate([row.token_ids for row in rows]), np.concatenate(spans))


def test_facts_survive_a_checkpoint_and_json():
    entropy = {"a": 0.5, "x": float("nan"), "f": 1.5}
    facts = Trained({"all": 0.5, "fresh": 1.0, "replay": None}, {"g": ["a"]}, entropy, 1, 12)
    assert facts.header() == {
        "replayed": {"g": ["a"]},
        "ess": {"all": 0.5, "fresh": 1.0, "replay": None},
        "entropy": {"a": 0.5, "f": 1.5},
        "choice_failed": 1,
        "policy_version": 12,
    }
    again = Trained(**orjson.loads(orjson.dumps(facts.header())))
    assert again.header() == facts.header()
    state = CheckpointState(1, 1, {0: ["g", "h"]}, trained={0: facts})
    assert (
        orjson.loads(orjson.dumps(state.as_json(), option=orjson.OPT_NON_STR_KEYS))["trained"]["0"]["ess"]["all"] == 0.5
    )
