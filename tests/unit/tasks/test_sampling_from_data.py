"""Rows are drawn once in every pass, and a run that goes on draws what would have come, or refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config import RunConfig
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import Task
from pipeline.stage.core import StageCore
from pipeline.store.snapshot import Snapshot
from pipeline.tasks.open import open_source, open_sources
from pipeline.tasks.sampler import DrawOutcome, TaskSampler
from tests.unit.tasks.conftest import environment, questions, write_jsonl


@contextmanager
def sampler_of(environments: dict[str, EnvironmentConfig], seed: int = 0, state: Any = None) -> Iterator[TaskSampler]:
    with ExitStack() as stack:
        sources = {}
        for name, section in environments.items():
            if section.tasks_from is not None:
                source = open_source(name, section, seed)
                stack.callback(source.close)
                sources[name] = source.splits["train"]
        yield TaskSampler(environments, seed, state, sources)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "q.jsonl", questions(17))


quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(seed=st.integers(0, 5), shuffle=st.sampled_from([True, False, 11]))
def test_every_row_comes_once_in_every_pass(data: Path, seed: int, shuffle: bool | int) -> None:
    with sampler_of({"q": environment(kind="jsonl", path=data, shuffle=shuffle)}, seed) as sampler:
        passes = [[sampler.draw().payload["answer"] for _ in range(17)] for _ in range(3)]
    assert all(sorted(one) == list(range(1, 18)) for one in passes)
    if shuffle is False:
        assert passes[0] == passes[1] == list(range(1, 18))
    else:
        assert len({tuple(one) for one in passes}) == 3


@quick
@given(drawn=st.integers(0, 60), seed=st.integers(0, 3), weight=st.floats(0.2, 5))
def test_a_run_that_goes_on_draws_what_would_have_come(data: Path, drawn: int, seed: int, weight: float) -> None:
    environments = {
        "q": environment(kind="jsonl", path=data).model_copy(update={"weight": weight}),
        "b": EnvironmentConfig(),
    }
    with sampler_of(environments, seed) as one:
        for _ in range(drawn):
            one.draw()
        with sampler_of(environments, seed, one.state()) as two:
            assert [one.draw() for _ in range(40)] == [two.draw() for _ in range(40)]


@pytest.mark.parametrize("kept", ["q", "b"])
def test_an_environment_that_is_taken_out_and_put_back_continues(data: Path, kept: str) -> None:
    both = {"q": environment(kind="jsonl", path=data), "b": EnvironmentConfig(tasks=20)}
    (taken,) = both.keys() - {kept}
    with sampler_of({taken: both[taken]}) as alone:
        order = [alone.draw().task_id for _ in range(12)]
    state: Any = None
    found: list[str] = []
    for environments in (both, {kept: both[kept]}, both):
        with sampler_of(environments, state=state) as sampler:
            found += [sampler.draw().task_id for _ in range(12)]
            state = json.loads(json.dumps(sampler.state()))
    assert [name for name in found if name.startswith(f"{taken}/")] == order


def test_weights_that_the_run_file_changed_hold_from_there_on() -> None:
    def environments(weight: float) -> dict[str, EnvironmentConfig]:
        return {"a": EnvironmentConfig(), "b": EnvironmentConfig(weight=weight)}

    with sampler_of(environments(1)) as before:
        for _ in range(100):
            before.draw()
    with sampler_of(environments(3), state=json.loads(json.dumps(before.state()))) as sampler:
        drawn = [sampler.draw().environment for _ in range(12)]
    assert [drawn[i : i + 4].count("b") for i in (0, 4, 8)] == [3, 3, 3]


def test_rows_that_are_passed_over_are_not_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sampler_of({"q": environment(kind="jsonl", path=data)}) as sampler:
        reads: list[int] = []
        source = sampler._sources["q"]
        read = source._rows.read
        monkeypatch.setattr(source._rows, "read", lambda number: reads.append(number) or read(number))
        seen: list[str] = []

        def third(drawn: Any) -> DrawOutcome:
            seen.append(drawn.task_id)
            return DrawOutcome.TAKE if len(seen) == 3 else DrawOutcome.PASS

        task = sampler.draw_where(third)
    assert isinstance(task, Task) and len(seen) == 3 and len(reads) == 1


def changed(path: Path, data: Path, how: str) -> dict[str, Any]:
    rows = questions(17)
    if how == "content":
        rows[3]["solution"]["value"] = 99
    elif how == "order":
        rows.reverse()
    elif how == "more":
        rows += questions(20)[17:]
    write_jsonl(path, rows)
    extra = {"filter": {"filter": [{"column": "level", "op": ">", "value": 0}]}, "shuffle": {"shuffle": 5}}
    return {"kind": "jsonl", "path": path, **extra.get(how, {})}


@pytest.mark.parametrize("how", ["content", "order", "more", "filter", "shuffle"])
def test_other_data_is_refused_when_a_run_goes_on(tmp_path: Path, data: Path, how: str) -> None:
    with sampler_of({"q": environment(kind="jsonl", path=data)}) as one:
        before = [one.draw() for _ in range(5)]
        state = one.state()
    section = changed(tmp_path / "q.jsonl", data, how)
    with (
        pytest.raises(ConfigurationError, match="expected the data that this run began with"),
        sampler_of({"q": environment(**section)}, state=state),
    ):
        pass
    with sampler_of({"q": environment(**section)}) as two:
        after = [two.draw() for _ in range(30)]
    ids = {task.task_id: task for task in before}
    assert all(ids[task.task_id] == task for task in after if task.task_id in ids), "an id means one content for ever"


def test_unchanged_data_elsewhere_is_the_same_data(tmp_path: Path, data: Path) -> None:
    with sampler_of({"q": environment(kind="jsonl", path=data)}) as one:
        one.draw()
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(data.read_bytes())
        with sampler_of({"q": environment(kind="jsonl", path=copy)}, state=one.state()) as two:
            assert one.draw() == two.draw()


def test_an_environment_that_had_its_passes_gives_its_turns_to_the_others(data: Path) -> None:
    environments = {"q": environment(kind="jsonl", path=data, epochs=2), "b": EnvironmentConfig()}
    with sampler_of(environments) as sampler:
        drawn = [sampler.draw().environment for _ in range(100)]
    assert drawn.count("q") == 34 and set(drawn[70:]) == {"b"}


def test_when_all_passes_are_over_a_further_one_begins(data: Path) -> None:
    with sampler_of({"q": environment(kind="jsonl", path=data, epochs=1)}) as sampler:
        assert len([sampler.draw() for _ in range(20)]) == 20
        assert sampler.draw_where(lambda drawn: DrawOutcome.TAKE) is not None


@pytest.mark.parametrize(
    ("batch", "remedy"), [(4, r"set run\.total_steps: 12"), (60, r"set groups\.groups_per_step to at most 51")]
)
def test_a_run_longer_than_its_passes_is_refused_with_values_that_fit(data: Path, batch: int, remedy: str) -> None:
    config = {
        "run": {"total_steps": 100},
        "groups": {"groups_per_step": batch},
        "environments": {"q": environment(kind="jsonl", path=data, epochs=3).model_dump()},
        "scorer": {"functions": [{"path": "exact"}]},
    }
    with pytest.raises(ConfigurationError, match=remedy):
        open_sources(RunConfig.model_validate(config))
    fitting = {**config, "run": {"total_steps": 12}, "groups": {"groups_per_step": 4}}
    sources = open_sources(RunConfig.model_validate(fitting))
    for source in sources.values():
        source.close()


def test_a_stage_without_its_data_is_an_error(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="to be open"):
        TaskSampler({"q": environment(kind="jsonl", path=data)}, 0)


@pytest.mark.parametrize("replay", [False, True])
def test_the_stage_knows_how_many_tasks_the_data_has(data: Path, replay: bool) -> None:
    config = RunConfig.model_validate(
        {
            "replay": {"enabled": replay},
            "environments": {"q": environment(kind="jsonl", path=data).model_dump()},
            "scorer": {"functions": [{"path": "exact"}]},
        }
    )
    sources = open_sources(config)
    core = StageCore(config, Snapshot(), sources={name: s.splits["train"] for name, s in sources.items()})
    assert core.sampler.sizes == {"q": 17}
    tasks = [core.replays.next().task for _ in range(17)]
    assert {task.payload["prompt"] for task in tasks} == {row["question"] for row in questions(17)}
    for source in sources.values():
        source.close()
