"""In a running learner: the next batch is built while the present one trains."""

import threading

from learner.prefetch import Prefetcher
from learner.training.trainer import Trainer
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
    async with world(total_steps=4, learner={"prefetch_batches": 2}) as w:
        _, run = w.learner()
        await run()
    assert taken == [(0, False), (1, True), (2, True), (3, True)]
    assert [line["step"] for line in w.lines()] == [1, 2, 3, 4]
