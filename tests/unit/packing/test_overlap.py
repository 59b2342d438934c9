"""In a running learner: the next batch is built while the present one trains, and candidates are scored in the wait."""

import threading

import anyio.to_thread

from learner.process.batches import Prefetcher, needs_scores
from learner.process.session import LearnerSession
from learner.training.trainer import Trainer
from pipeline.store.queries import reading
from pipeline.store.store import store_path
from tests.unit.learner.test_learner_role import world

__all__ = ["world"]


async def test_an_update_that_is_delivered_in_time_is_built_while_the_one_before_trains(world, monkeypatch):
    built, taken = {u: threading.Event() for u in range(4)}, []
    prefetch, take, train = Prefetcher.prefetch, Prefetcher.take, Trainer.train

    async def watched_prefetch(self, update):
        await prefetch(self, update)
        built[update].set()

    def watched_take(self, update, groups):
        made = take(self, update, groups)
        taken.append((update, made is not None))
        return made

    def held_train(self, batch, version):
        assert batch.update == 3 or built[batch.update + 1].wait(30), f"update {batch.update + 1} was not built"
        return train(self, batch, version)

    monkeypatch.setattr(Prefetcher, "prefetch", watched_prefetch)
    monkeypatch.setattr(Prefetcher, "take", watched_take)
    monkeypatch.setattr(Trainer, "train", held_train)
    async with world(total_steps=4) as w:
        await w.learn()
    assert taken == [(0, False), (1, True), (2, True), (3, True)]
    assert [line["step"] for line in w.lines()] == [1, 2, 3, 4]


async def test_candidates_are_scored_while_the_learner_waits_and_the_stage_keeps_their_entropies(world, monkeypatch):
    ready, mean_entropies, train = LearnerSession.ready, Trainer.mean_entropies, Trainer.train
    scored, waited = threading.Event(), set()

    def watched_mean_entropies(self, rows):
        scored.set()
        return mean_entropies(self, rows)

    async def held_ready(self, update):
        """The update begins once a candidate was scored."""
        if needs_scores(await self.peek(update), w.config.replay):
            assert await anyio.to_thread.run_sync(scored.wait, 30)
            waited.add(update)
        return await ready(self, update)

    def watched_train(self, batch, version):
        scored.clear()
        return train(self, batch, version)

    monkeypatch.setattr(Trainer, "mean_entropies", watched_mean_entropies)
    monkeypatch.setattr(Trainer, "train", watched_train)
    monkeypatch.setattr(LearnerSession, "ready", held_ready)
    replay = {
        "enabled": True,
        "mode": "mix",
        "start_ratio": 0.0,
        "task_ratio": 0.5,
        "scoring_share": 0.0,
        "max_age": 50,
    }
    tasks, groups = {"toy": {"name": "arithmetic", "tasks": 3}}, {"n_rollout": 4, "groups_per_step": 2}
    async with world(total_steps=6, replay=replay, environments=tasks, groups=groups) as w:
        await w.learn()
    assert waited
    for line in w.lines():
        counts = line["candidates_scored"]
        assert (line["update"] in waited) == (counts.get("waiting", 0) > 0) and counts.get("update", 0) == 0
        assert line["choice_failed"] == 0
    with reading(store_path(w.config, w.directory)) as store:
        rows = store.execute("SELECT entropy_version FROM pool WHERE entropy_version IS NOT NULL").fetchall()
    assert max(version for (version,) in rows) in range(max(waited), 6)
