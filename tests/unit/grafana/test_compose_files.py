"""The compose files, the run file in the image and Prometheus' configuration agree with each other."""

from __future__ import annotations

import re
import tomllib
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
    if role == "actor":
        found = discovered("afterplay-actor")
        assert (found["names"], found["type"], found["port"]) == ([role], "A", port)
    else:
        assert targets(f"afterplay-{role}") == [f"{role}:{port}"]


def test_engine_is_scraped_and_probed_where_the_others_expect_it() -> None:
    assert probed_port(COMPOSE["services"]["engine"]) == CONFIG.engine.port
    assert [f"http://{t}" for t in targets("afterplay-engine")] == list(CONFIG.engine.addresses())


def test_alerts_reach_the_service_whose_log_has_them() -> None:
    prometheus = yaml.safe_load((ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text())
    (manager,) = prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert manager == f"alertmanager:{probed_port(COMPOSE['services']['alertmanager'])}"
    (receiver,) = yaml.safe_load((ROOT / "grafana" / "alertmanager" / "alertmanager.yml").read_text())["receivers"]
    assert receiver["webhook_configs"][0]["url"] == f"http://alerts:{probed_port(COMPOSE['services']['alerts'])}/"


def test_every_target_of_the_composition_has_the_run_as_its_label() -> None:
    for section in yaml.safe_load((ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]:
        static = [group.get("labels", {}).get("run") for group in section.get("static_configs", [])]
        rules = section.get("relabel_configs", [])
        relabelled = [rule["replacement"] for rule in rules if rule["target_label"] == "run"]
        assert {*static, *relabelled} == {CONFIG.run.name}, section["job_name"]


def scrape(job: str) -> dict[str, Any]:
    jobs = yaml.safe_load((ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    return next(s for s in jobs if s["job_name"] == job)


def targets(job: str) -> list[str]:
    return scrape(job)["static_configs"][0]["targets"]


def discovered(job: str) -> dict[str, Any]:
    return scrape(job)["dns_sd_configs"][0]


@pytest.mark.parametrize("composition", [COMPOSE, GPU], ids=["cpu", "gpu"])
def test_replicas_of_the_actor_take_names_and_keys_of_their_own(composition: dict[str, Any]) -> None:
    assert "--free-index" in composition["services"]["actor"]["command"]


def test_roles_have_longer_to_stop_than_they_take_at_most() -> None:
    for role in (*ROLES, "engine"):
        assert int(COMPOSE["services"][role]["stop_grace_period"].rstrip("s")) > CONFIG.checkpoint.drain_seconds_max


def test_every_container_is_guarded() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys(), name
        if name not in ("prepare", "keys"):
            assert service["mem_limit"] and service["pids_limit"], name


def mounts(role: str) -> set[str]:
    return {volume.split(":")[0] for volume in COMPOSE["services"][role]["volumes"]}


def test_each_role_gets_its_own_keys_and_no_other() -> None:
    assert {name: mounts(name) - {"runs"} for name in ("prepare", "engine", *ROLES)} == {
        "prepare": set(),
        "engine": {"engine_actor", "engine_learner"},
        "replay": {"keys"},
        "learner": {"keys_learner", "engine_learner"},
        "actor": {"keys_actor", "engine_actor"},
    }


def test_actors_write_nothing_that_the_others_read() -> None:
    """The run directory says, among others, where the engines are."""
    writable = {volume for volume in COMPOSE["services"]["actor"]["volumes"] if not volume.endswith(":ro")}
    assert writable == set() == mounts("actor") & mounts("replay") - {"runs"}


def test_the_image_has_every_package_of_the_wheel_in_the_tested_versions() -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied == {*wheel["packages"], *wheel["force-include"]}
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in (*copied, "constraints.txt", "pyproject.toml")} <= set(context)
    installs = (ROOT / "Dockerfile").read_text().partition("ENV PIP_CONSTRAINT=/src/constraints.txt")
    assert "pip install" not in installs[0] and "pip install" in installs[2]


def test_grafana_has_no_password_that_is_known() -> None:
    environment = COMPOSE["services"]["grafana"]["environment"]
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environment
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/secrets/grafana-password"


def test_the_image_takes_every_argument_and_that_for_gpus_has_a_compiler() -> None:
    """Triton, which vLLM calls on a GPU, builds its launcher with a C compiler; slim images have none."""
    taken = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    arguments = {**COMPOSE["services"]["prepare"]["build"]["args"], **GPU["services"]["prepare"]["build"]["args"]}
    assert arguments.keys() == taken
    assert arguments["APT"] == "${APT:-g++}"


def test_images_of_others_have_a_version() -> None:
    for name in ("prometheus", "alertmanager", "grafana"):
        assert re.search(r":-[\w/]+:v?\d+\.\d+\.\d+\}$", COMPOSE["services"][name]["image"]), name


@pytest.mark.parametrize("name", ["prepare", "engine", *ROLES])
def test_every_container_of_both_compositions_gets_a_configuration_it_accepts(name: str) -> None:
    environment = COMPOSE["services"][name].get("environment", {})
    load(ROOT / "configs" / "compose.yaml", environment=environment)
    config = load(ROOT / "configs" / "gpu.yaml", environment=GPU["services"][name]["environment"])
    assert config.engine.addresses() == CONFIG.engine.addresses()
    assert config.metrics == CONFIG.metrics and config.stage.curve == CONFIG.stage.curve
    assert config.run.directory == CONFIG.run.directory


def test_only_the_replay_stage_leaves_loopback_and_it_has_keys() -> None:
    bound = COMPOSE["services"]["replay"]["environment"]["AFTERPLAY__STAGE__ADDRESS"]
    assert bound == CONFIG.stage.address.replace("replay", "0.0.0.0")
    assert str(CONFIG.stage.curve) == "/keys"


def test_both_compositions_know_the_same_keys_of_the_engine() -> None:
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
