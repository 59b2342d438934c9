"""The compose files, the run file in the image and Prometheus' configuration agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load
from pipeline.runtime.process import metrics_port, role_name

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
GPU = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())
CONFIG = load(ROOT / "configs" / "compose.yaml", environment={})
ROLES = ("replay", "learner", "actor")


def probed_port(service: dict[str, Any]) -> int:
    return int(re.search(r":(\d+)/", " ".join(service["healthcheck"]["test"]))[1])


@pytest.mark.parametrize("role", ROLES)
def test_health_check_and_prometheus_ask_the_port_that_the_role_takes(role: str) -> None:
    port = metrics_port(role_name(role, 0), 0, CONFIG.metrics.port)
    assert probed_port(COMPOSE["services"][role]) == port
    assert targets(f"afterplay-{role}") == [f"{role}:{port}"]


def test_engine_is_scraped_and_probed_where_the_others_expect_it() -> None:
    assert probed_port(COMPOSE["services"]["engine"]) == CONFIG.engine.port
    assert [f"http://{t}" for t in targets("afterplay-engine")] == list(CONFIG.engine.addresses())


def targets(job: str) -> list[str]:
    scrape = yaml.safe_load((ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    return next(s for s in scrape if s["job_name"] == job)["static_configs"][0]["targets"]


@pytest.mark.parametrize("name", ["prepare", "engine", *ROLES])
def test_every_container_of_both_compositions_gets_a_configuration_it_accepts(name: str) -> None:
    environment = COMPOSE["services"][name].get("environment", {})
    load(ROOT / "configs" / "compose.yaml", environment=environment)
    config = load(ROOT / "configs" / "gpu.yaml", environment=GPU["services"][name]["environment"])
    assert config.engine.addresses() == CONFIG.engine.addresses()
    assert config.metrics == CONFIG.metrics and config.transport.curve == CONFIG.transport.curve
    assert config.run.directory == CONFIG.run.directory


def test_only_the_replay_stage_leaves_loopback_and_it_has_keys() -> None:
    bound = COMPOSE["services"]["replay"]["environment"]["AFTERPLAY__REPLAY__ADDRESS"]
    assert bound == CONFIG.replay.address.replace("replay", "0.0.0.0")
    assert str(CONFIG.transport.curve) == "/keys"


def mounts(role: str) -> set[str]:
    return {volume.split(":")[0] for volume in COMPOSE["services"][role]["volumes"]}


def test_no_container_but_the_engines_and_its_own_roles_has_a_key_of_the_engine() -> None:
    secret = {"engine_actor", "engine_learner"}
    assert {name: mounts(name) & secret for name in ("prepare", "engine", *ROLES)} == {
        "prepare": set(),
        "engine": secret,
        "replay": set(),
        "learner": {"engine_learner"},
        "actor": {"engine_actor"},
    }
    for service in ("engine", "learner", "actor"):
        environment = GPU["services"][service]["environment"]
        config = load(ROOT / "configs" / "gpu.yaml", environment=environment)
        assert config.engine.actor_key == CONFIG.engine.actor_key
        assert config.engine.learner_key == CONFIG.engine.learner_key


def test_actors_and_learner_are_stopped_before_what_they_drain_into() -> None:
    for role in ("actor", "learner"):
        assert {"replay", "engine"} <= COMPOSE["services"][role]["depends_on"].keys()


def test_published_ports_are_loopback_only_and_roles_publish_none() -> None:
    for name, service in COMPOSE["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    assert COMPOSE["networks"]["loop"]["internal"] is True
    assert not any(COMPOSE["services"][role].get("ports") for role in ("engine", *ROLES))
