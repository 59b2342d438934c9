"""Training never draws a held-out task, whatever the splits are and wherever the run begins and goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.adapters.bfcl import BFCL
from actors.environments.host import EnvironmentHost
from pipeline.config import RunConfig
from pipeline.config.rollouts import HELD_OUT_SEED, EnvironmentConfig
from pipeline.errors import ConfigurationError
from pipeline.stage.core import StageCore
from pipeline.stage.evaluation_rollouts import HeldOut
from pipeline.supervisor.inventory import local_inventory
from pipeline.supervisor.plan import plan
from pipeline.tasks.open import open_source, open_sources
from pipeline.tasks.sampler import TaskSampler
from pipeline.tasks.splits import Seeds, decode_splits, encode_splits

SEEDS = st.one_of(
    st.builds(range, st.integers(0, 50), st.integers(51, 90)),
    st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=20).map(tuple),
)


@given(SEEDS)
def test_seeds_are_the_same_after_the_wire(seeds: Any) -> None:
    made = Seeds.decode(Seeds.of(seeds).encode())
    assert list(made) == list(seeds) and len(made) == len(seeds)
    assert [made[i] for i in range(len(made))] == list(seeds)
    assert all((s in made) == (s in seeds) for s in range(100))


def test_a_long_range_is_one_run() -> None:
    assert Seeds.of(range(10**9, 2 * 10**9)).encode() == [[10**9, 2 * 10**9, 1]]
    assert Seeds.of(tuple(range(0, 200, 5))).encode() == Seeds.of(np.arange(0, 200, 5)).encode() == [[0, 196, 5]]
    with pytest.raises(ValueError, match="seeds from 0"):
        Seeds.of((-1,))
    with pytest.raises(TypeError, match="whole numbers"):
        Seeds.of(("a",))  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    own=st.dictionaries(st.sampled_from(["train", "eval", "test"]), SEEDS, max_size=3),
    seed=st.integers(0, 30),
    tasks=st.one_of(st.none(), st.integers(1, 40)),
    cut=st.integers(1, 60),
)
def test_no_held_out_seed_is_ever_drawn(own: dict[str, Any], seed: int, tasks: int | None, cut: int) -> None:
    section = EnvironmentConfig(seed=seed, tasks=tasks)
    plain = EnvironmentConfig(weight=2)
    splits = decode_splits({"a": encode_splits(own)})
    environments = {"a": section, "b": plain}
    sampler = TaskSampler(environments, 0)
    try:
        sampler.learn(splits)
    except ConfigurationError:
        return
    drawn = [sampler.draw() for _ in range(cut)]
    again = TaskSampler(environments, 0, sampler.state())
    again.learn(splits)
    drawn += [again.draw() for _ in range(120 - cut)]
    seeds = [task.seed for task in drawn if task.environment == "a"]
    held = {s for name, members in own.items() if name != "train" for s in members}
    assert not held & set(seeds)
    if "train" in own:
        assert set(seeds) <= set(own["train"])
    assert abs(len(seeds) - 40) <= 1, "what is held out takes no turn"


def test_of_bfcl_only_train_rows_are_trained_and_all_of_its_eval_rows_are_evaluated() -> None:
    splits = decode_splits({"bfcl": encode_splits(BFCL.splits)})
    config = RunConfig.model_validate(
        {"environments": {"bfcl": {"name": "bfcl"}}, "evaluation": {"every": 5, "tasks": 500}}
    )
    sampler = TaskSampler(config.environments, 0)
    sampler.learn(splits)
    trained = {sampler.draw().seed for _ in range(500)}
    held_out = HeldOut(config, {}, splits)
    evaluated = {held_out[i].seed for i in range(len(held_out))}
    assert trained == set(BFCL.splits["train"]) and evaluated == set(BFCL.splits["eval"])
    assert not trained & evaluated


def test_an_environment_without_splits_is_drawn_as_before() -> None:
    sampler, other = TaskSampler({"a": EnvironmentConfig(tasks=5, seed=3)}, 1), None
    other = TaskSampler({"a": EnvironmentConfig(tasks=5, seed=3)}, 1)
    other.learn({})
    assert [sampler.draw().seed for _ in range(20)] == [other.draw().seed for _ in range(20)]


def test_data_and_made_up_seeds_are_disjoint_too(tmp_path: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "q{i}", "answer": "{i}"}}\n' for i in range(60)))
    data = {"kind": "jsonl", "path": rows, "splits": {"train": 0.7, "eval": 0.3}}
    config = RunConfig.model_validate(
        {
            "environments": {
                "q": {"name": "question", "tasks_from": data},
                "g": {"held_out": {"eval": 8}},
            },
            "scorer": {"functions": [{"path": "exact"}]},
            "evaluation": {"every": 1, "tasks": 1000},
        }
    )  # fmt: skip
    source = open_source("q", config.environments["q"])
    sampler = TaskSampler(config.environments, 0, sources={"q": source.splits["train"]})
    sampler.learn({})
    drawn = [sampler.draw() for _ in range(300)]
    held_out = HeldOut(config, {"q": source.splits["eval"]}, {})
    evaluated = [held_out[i] for i in range(len(held_out))]
    assert not {t.task_id for t in drawn} & {t.task_id for t in evaluated}
    prompts = {t.payload["prompt"] for t in drawn if t.environment == "q"}
    assert not prompts & {t.payload["prompt"] for t in evaluated if t.environment == "q"}
    assert {t.seed >= HELD_OUT_SEED for t in evaluated if t.environment == "g"} == {True}
    assert [held_out.environment(i) for i in range(len(held_out))] == ["q"] * len(source.splits["eval"]) + ["g"] * 8
    source.close()


def test_an_environment_of_weight_0_is_evaluated_and_never_drawn(tmp_path: Any) -> None:
    rows = tmp_path / "benchmark.jsonl"
    rows.write_text("".join(f'{{"prompt": "q{i}", "answer": "{i}"}}\n' for i in range(6)))
    data = {"kind": "jsonl", "path": rows, "splits": {"eval": 1.0}}
    sections: dict[str, Any] = {
        "environments": {
            "train": {"held_out": {"eval": 3}},
            "benchmark": {"name": "question", "weight": 0, "tasks_from": data},
        },
        "scorer": {"functions": [{"path": "exact"}]},
        "evaluation": {"every": 1},
    }
    config = RunConfig.model_validate(sections)
    sources = open_sources(config)
    core = StageCore(config, held_out={"benchmark": sources["benchmark"].splits["eval"]})
    assert {core.sampler.draw().environment for _ in range(100)} == {"train"}
    core.evaluations.learn({})
    tasks = core.evaluations.tasks
    assert tasks is not None
    assert [tasks.environment(i) for i in range(len(tasks))] == ["train"] * 3 + ["benchmark"] * 6
    for source in sources.values():
        source.close()
    sections["evaluation"]["split"] = "test"
    sections["environments"]["train"]["held_out"] = {"test": 3}
    with pytest.raises(ValidationError, match=r"environments.benchmark.tasks_from.splits has eval"):
        RunConfig.model_validate(sections)
    with pytest.raises(ConfigurationError, match="weight above 0 to train on"):
        plan(RunConfig.model_validate({"environments": {"a": {"weight": 0}}}), local_inventory())


def test_the_tasks_are_spread_over_the_split_and_always_the_same() -> None:
    config = RunConfig.model_validate(
        {"environments": {"a": {"held_out": {"eval": 100}}}, "evaluation": {"every": 1, "tasks": 4}}
    )
    held_out = HeldOut(config, {}, {})
    assert [held_out[i].task_id for i in range(4)] == ["a/eval/0", "a/eval/25", "a/eval/50", "a/eval/75"]
    assert HeldOut(config, {}, {}).fingerprint == held_out.fingerprint


def test_a_split_that_is_not_there_is_refused_with_what_there_is() -> None:
    config = RunConfig.model_validate({"evaluation": {"every": 1, "split": "exam"}})
    with pytest.raises(ConfigurationError, match=r"exam.*not there.*arithmetic has train, dev"):
        HeldOut(config, {}, decode_splits({"arithmetic": {"train": [[0, 5, 1]], "dev": [[5, 6, 1]]}}))
    plain = RunConfig.model_validate(
        {"environments": {"a": {"held_out": {"eval": 4}}, "b": {}}, "evaluation": {"every": 1, "split": "exam"}}
    )
    with pytest.raises(ConfigurationError, match="a has eval; b has none"):
        HeldOut(plain, {}, {})
    both = RunConfig.model_validate(
        {"environments": {"a": {"held_out": {"exam": 4}}}, "evaluation": {"every": 1, "split": "exam"}}
    )
    with pytest.raises(ConfigurationError, match="splits of its own"):
        HeldOut(both, {}, decode_splits({"a": {"train": [[0, 5, 1]]}}))


def test_no_training_left_is_refused() -> None:
    sampler = TaskSampler({"a": EnvironmentConfig(tasks=2)}, 0)
    with pytest.raises(ConfigurationError, match="leave none of the 2 seeds"):
        sampler.learn(decode_splits({"a": {"eval": [[0, 5, 1]]}}))


@pytest.mark.parametrize("tasks", [None, 5001])
def test_seeds_behind_those_that_are_held_out_are_trained(tasks: int | None) -> None:
    sampler = TaskSampler({"a": EnvironmentConfig(tasks=tasks)}, 0)
    sampler.learn(decode_splits({"a": {"eval": [[0, 5000, 1]]}}))
    assert sampler.draw().seed == 5000


def test_a_host_tells_the_splits_of_its_environment() -> None:
    class Fixed:
        splits = {"train": range(3), "eval": [5, 7]}  # noqa: RUF012

        def start(self, task: Any) -> Any: ...

    host = EnvironmentHost("a", EnvironmentConfig(), environment=Fixed())  # type: ignore[arg-type]
    assert host.splits() == {"train": [[0, 3, 1]], "eval": [[5, 8, 2]]}
    Fixed.splits = {"train": ["x"]}  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"environments\.a: expected splits"):
        host.splits()
