"""The replay stage plays the rows of a file in their order, over restarts too."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import orjson
import pytest

from pipeline.errors import ConfigurationError
from pipeline.store.ledger import read_ledger
from pipeline.tasks.open import open_source
from tests.support.instant_peers import InstantActor, InstantLearner
from tests.support.memory_transport import MemoryNetwork
from tests.unit.stage.test_replay_role import configuration, playing, stage
from tests.unit.tasks.conftest import environment, questions, write_jsonl


@pytest.mark.slow
async def test_a_stage_that_restarts_plays_every_row_once_in_every_pass(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", questions(13))
    section = environment(kind="jsonl", path=path)
    scorer = {"functions": [{"path": "exact", "weight": 1.0, "environments": ["q"]}]}
    config = configuration(tmp_path, total_steps=20, environments={"q": section.model_dump()}, scorer=scorer)
    network, trainer, player = MemoryNetwork(), InstantLearner(20, 3, 2), InstantActor()
    with anyio.fail_after(120):
        async with playing(network, trainer, player):
            for until in (4, 11):
                async with stage(config, network):
                    while trainer.updates < until:
                        await trainer.progress()
            async with stage(config, network) as ctx:
                await trainer.done.wait()
    assert ctx.registry.get_sample_value("afterplay_replay_task_rows", {"env": "q", "kind": "used"}) == 13
    assert read_ledger(tmp_path / "r" / "replay.sqlite", rows=True).audit() == []
    with closing(sqlite3.connect(tmp_path / "r" / "replay.sqlite")) as store:
        played = [
            orjson.loads(row[0])["task_id"] for row in store.execute("SELECT task FROM groups ORDER BY group_number")
        ]
    source = open_source("q", section, config.run.seed)
    split = source.splits["train"]
    assert len(played) >= 40
    assert played == [split.task_id(split.order(position)) for position in range(len(played))]
    source.close()


async def test_a_stage_whose_data_was_changed_refuses_to_go_on(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", questions(13))
    section = environment(kind="jsonl", path=path).model_dump()
    scorer = {"functions": [{"path": "exact"}]}
    config = configuration(tmp_path, total_steps=9, environments={"q": section}, scorer=scorer)
    network, trainer, player = MemoryNetwork(), InstantLearner(9, 3, 2), InstantActor()
    with anyio.fail_after(120):
        async with playing(network, trainer, player), stage(config, network):
            while trainer.updates < 2:
                await trainer.progress()
        write_jsonl(path, reversed(questions(13)))
        with pytest.raises(BaseExceptionGroup) as caught:
            async with stage(config, MemoryNetwork()):
                await anyio.Event().wait()
    assert caught.group_contains(ConfigurationError, match="expected the data that this run began with")
