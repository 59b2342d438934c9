"""Values of the Helm chart, generated from run files; the manifests where helm can be found."""

from __future__ import annotations

import base64
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import jsonschema
import orjson
import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config import RunConfig
from pipeline.config.load import dump, load, loads
from pipeline.errors import ConfigurationError
from pipeline.launchers import kubernetes
from pipeline.launchers.kubernetes import (
    CHART,
    cluster_options,
    config_in_pods,
    end_pods,
    secrets_of,
    values_of,
)
from pipeline.launchers.launcher import Launch
from pipeline.transport.curve import peer_keys, server_keys

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = orjson.loads((CHART / "values.schema.json").read_bytes())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCENES: dict[str, tuple[str, list[str], int | None, str]] = {
    "tiny": ("tiny", [], None, ""),
    "gpu": ("gpu", [], 8, ""),
    "replay": ("replay_tiny", ["run.name=replay-tiny", "actor.replicas=3"], None, ""),
    "several ranks": ("gpu", ["placement.learner_gpus=4", "placement.engine_gpus=4"], 2, "4"),
}
"""Run file, changes, GPUs of a node, nodes."""


def generated(scene: str) -> tuple[RunConfig, dict[str, Any]]:
    file, sets, gpus, nodes = SCENES[scene]
    return values_of(Launch(load(ROOT / "configs" / f"{file}.yaml", sets, environment={}), gpus=gpus, nodes=nodes))


def values(scene: str) -> dict[str, Any]:
    config, found = generated(scene)
    return {**found, "config": dump(config)}


@pytest.mark.parametrize("scene", SCENES)
def test_generated_values_are_what_the_chart_expects(scene: str) -> None:
    jsonschema.validate({**DEFAULTS, **values(scene)}, SCHEMA)


def test_a_chart_installed_without_a_run_file_is_refused() -> None:
    with pytest.raises(jsonschema.ValidationError, match="required"):
        jsonschema.validate(DEFAULTS, SCHEMA)


def test_defaults_and_generated_values_do_not_overlap() -> None:
    assert not DEFAULTS.keys() & values("tiny").keys()
    assert DEFAULTS.keys() | values("tiny").keys() == SCHEMA["properties"].keys() - {"global"}


def test_requests_are_those_of_the_plan() -> None:
    found = values("gpu")
    assert (found["engine"]["pods"], found["engine"]["gpus"]) == (6, 1)
    assert (found["learner"]["pods"], found["learner"]["gpus"], found["learner"]["ranksPerPod"]) == (1, 2, 2)
    assert found["actor"]["gpus"] == found["replay"]["gpus"] == 0
    assert (found["engine"]["memory"], found["learner"]["memory"]) == ("4096Mi", "4096Mi"), "a process for each GPU"
    several = values("several ranks")
    assert (several["learner"]["pods"], several["learner"]["gpus"], several["learner"]["ranksPerPod"]) == (2, 2, 2)


def test_a_run_is_not_continued_where_it_should_start_over() -> None:
    with pytest.raises(ConfigurationError, match=r"--fresh: .* --set run\.name=NAME"):
        kubernetes.launch(Launch(load(ROOT / "configs" / "tiny.yaml", environment={}), fresh=True, dry_run=True))


def test_an_engine_on_several_nodes_is_refused() -> None:
    config = load(ROOT / "configs" / "gpu.yaml", ["placement.tensor_parallel=4"], environment={})
    with pytest.raises(ConfigurationError, match=r"an engine of 4 GPUs takes several nodes.*one by one.*--on ray"):
        values_of(Launch(config, gpus=2, nodes="3"))


def test_the_grace_of_pods_follows_from_the_time_for_the_last_checkpoint() -> None:
    config = load(ROOT / "configs" / "tiny.yaml", ["checkpoint.drain_seconds_max=299.5"], environment={})
    assert values_of(Launch(config))[1]["graceSeconds"] == 310


def test_the_run_file_of_the_pods_names_their_services_and_no_keys() -> None:
    config = generated("gpu")[0]
    assert config.stage.address == "tcp://gpu-replay:5555"
    assert config.engine.addresses()[5] == "http://gpu-engine-5.gpu-engine:8100"
    assert config.engine.actor_key == "env:AFTERPLAY_ENGINE_ACTOR_KEY"
    assert str(config.run.path) == "/runs/gpu" and config.run.id == "gpu"


def test_the_run_file_of_the_pods_can_be_read_whatever_finds_the_engines() -> None:
    config = load(ROOT / "configs" / "tiny.yaml", ["engine.discovery=registry"], environment={})
    assert loads(dump(config_in_pods(config, "run")), "the pods").engine.discovery is None
    elsewhere = load(ROOT / "configs" / "tiny.yaml", ["engine.discovery='dns:engines:8100'"], environment={})
    with pytest.raises(ConfigurationError, match="this launcher places the engines"):
        config_in_pods(elsewhere, "run")


class Cluster:
    """kubectl and helm, with the secrets that were made; ``refuses``: what helm says to the dry run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> None:
        self.calls: list[list[str]] = []
        self.refuses = refuses
        self.secrets: dict[str, Any] = {}
        monkeypatch.setattr(kubernetes, "require_program", lambda name, _: name)
        monkeypatch.setattr(subprocess, "run", self._run)

    def _run(self, command: list[str], input: str = "", **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if "--dry-run" in command and self.refuses:
            return subprocess.CompletedProcess(command, 1, "", self.refuses)
        if "create" in command and "namespace" not in command:
            items = {item["metadata"]["name"]: item for item in orjson.loads(input)["items"]}
            exist = items.keys() & self.secrets.keys()
            self.secrets = items | self.secrets  # kubectl makes the others all the same
            return subprocess.CompletedProcess(command, bool(exist), "", f"{exist} already exist")
        if "get" in command or "delete" in command:
            named = [name for name in command if name in self.secrets]
            if "delete" in command:
                self.secrets = {name: item for name, item in self.secrets.items() if name not in named}
            elif "json" in command:
                return subprocess.CompletedProcess(
                    command, not named, orjson.dumps(self.secrets[named[0]]).decode(), ""
                )
            return subprocess.CompletedProcess(command, 0, "".join(f"secret/{name}\n" for name in named), "")
        return subprocess.CompletedProcess(command, 0, "", "")


def launch_tiny(*sets: str) -> int:
    return kubernetes.launch(Launch(load(ROOT / "configs" / "tiny.yaml", list(sets), environment={})))


def test_trackers_of_a_run_that_nothing_reports_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch)
    launch_tiny("report_to=[tensorboard]")
    assert "`afterplay report /runs/tiny --to tensorboard`" in capsys.readouterr().err


def test_what_helm_refuses_is_refused_before_the_learner_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, refuses="values do not meet the schema")
    with pytest.raises(ConfigurationError, match="do not meet the schema"):
        launch_tiny()
    assert len(cluster.calls) == 1 and not cluster.secrets


def test_the_old_learner_is_gone_before_the_new_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pods of a job, kubectl waits for the job alone."""
    cluster = Cluster(monkeypatch)
    launch_tiny()
    (deletion,) = (call for call in cluster.calls if "delete" in call)
    assert {"--wait", "--cascade=foreground"} <= set(deletion)


def test_pods_that_ended_with_the_run_are_there_again_before_it_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    launch_tiny("actor.replicas=3")
    scaled = [call[2:] for call in cluster.calls if call[:2] == ["kubectl", "scale"]]
    assert scaled == [
        ["statefulset/tiny-replay", "--current-replicas=0", "--replicas=1"],
        ["statefulset/tiny-engine", "--current-replicas=0", "--replicas=1"],
        ["statefulset/tiny-actor", "--current-replicas=0", "--replicas=3"],
    ]


def test_a_namespace_that_helm_is_to_make_is_there_before_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    config = load(ROOT / "configs" / "tiny.yaml", environment={})
    kubernetes.launch(Launch(config, arguments=("--create-namespace", "-n", "rl")))
    made = [call for call in cluster.calls if call[0] == "kubectl"]
    assert made[0] == ["kubectl", "--namespace=rl", "create", "namespace", "rl"]


def test_printed_commands_are_for_the_cluster_and_namespace_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch)
    config = load(ROOT / "configs" / "tiny.yaml", environment={})
    kubernetes.launch(Launch(config, arguments=("-n", "rl", "--kube-context=my lab", "--kube-token=a")))
    shown, ends = capsys.readouterr().out.split("`")[1::2]
    assert shown == "kubectl get pods --namespace=rl '--context=my lab' -l app.kubernetes.io/instance=tiny"
    assert ends == "helm uninstall tiny --namespace=rl '--kube-context=my lab'"


class Api(BaseHTTPRequestHandler):
    """The scale of stateful sets, of which there is none of an engine."""

    asked: ClassVar[list[tuple[str, str, Any]]] = []

    def do_PATCH(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        self.send_response(404 if "engine" in self.path else 403 if "denied" in self.path else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_learner_that_has_finished_ends_the_other_pods(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "namespace").write_text("rl")
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        api = f"http://127.0.0.1:{server.server_port}"
        end_pods("mine", tmp_path, api)
        assert Api.asked == [
            (f"/apis/apps/v1/namespaces/rl/statefulsets/mine-{role}/scale", "Bearer secret", {"spec": {"replicas": 0}})
            for role in ("actor", "engine", "replay")
        ]
        assert not caplog.messages
        end_pods("denied", tmp_path, api)
        server.shutdown()
        thread.join()
    end_pods("mine", tmp_path / "absent", api)
    assert len(caplog.messages) == 2 and all("helm uninstall" in message for message in caplog.messages)


@pytest.mark.parametrize("made", range(5))
def test_keys_whose_making_was_interrupted_are_made_again_together(monkeypatch: pytest.MonkeyPatch, made: int) -> None:
    cluster = Cluster(monkeypatch)
    before = {secret["metadata"]["name"]: secret for secret in secrets_of("tiny", 64)[:made]}
    cluster.secrets = dict(before)
    launch_tiny()
    assert len(cluster.secrets) == 4
    same = {name for name, secret in cluster.secrets.items() if secret == before.get(name)}
    assert same == (before.keys() if made == 4 else set())


def test_a_run_is_given_more_actors_as_long_as_there_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    launch_tiny()
    made = dict(cluster.secrets)
    launch_tiny("actor.replicas=16")
    assert cluster.secrets == made
    before = len(cluster.calls)
    with pytest.raises(ConfigurationError, match=r"keys for 68 actors .*got 64 .*at most 16.*kubectl delete secret"):
        launch_tiny("actor.replicas=17")
    assert not any("delete" in call for call in cluster.calls[before:])


def test_an_external_engine_keeps_its_address_and_key() -> None:
    engine = {"kind": "external", "urls": ["http://vllm:8000"], "actor_key": "env:KEY", "learner_key": "env:KEY"}
    config = RunConfig.model_validate({"engine": engine})
    assert config_in_pods(config, "run").engine == config.engine
    assert values_of(Launch(config))[1]["engine"]["pods"] == 0


def test_every_role_gets_its_own_keys_alone(tmp_path: Path) -> None:
    secrets = {secret["metadata"]["name"]: secret["data"] for secret in secrets_of("run", 2)}
    private = {name: {f for f in data if f.endswith("_secret")} for name, data in secrets.items()}
    assert private == {
        "run-replay-keys": {"server.key_secret"},
        "run-learner-keys": {"learner.key_secret"},
        "run-actor-keys": {"actor-0.key_secret", "actor-1.key_secret"},
        "run-engine-keys": set(),
    }
    for name, data in secrets.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in data.items():
            (folder / file).write_bytes(base64.b64decode(text))
            (folder / file).chmod(0o600)
    hub = server_keys(tmp_path / "run-replay-keys")
    for role, name in (("actor", "actor-1"), ("learner", "learner")):
        keys = peer_keys(tmp_path / f"run-{role}-keys", name)
        assert (keys.server, hub.name_of(keys.public)) == (hub.public, name)


@pytest.mark.parametrize(
    ("file", "sets", "gpus", "nodes", "sentence"),
    [
        ("gpu", ["placement.learner_gpus=6", "placement.engine_gpus=2"], 4, "2", r"as many ranks .* got \[4, 2\]"),
        ("gpu", [], 1, "", "two pods cannot share a GPU"),
        ("tiny", ["run.name=Tiny_2"], None, "", "run.name: expected at most 40 lower-case letters"),
        ("gpu", [], None, "", "expected a GPU"),
    ],
)
def test_what_pods_cannot_do_is_refused_in_a_sentence(
    file: str, sets: list[str], gpus: int | None, nodes: str, sentence: str
) -> None:
    config = load(ROOT / "configs" / f"{file}.yaml", sets, environment={})
    with pytest.raises(ConfigurationError, match=sentence):
        values_of(Launch(config, gpus=gpus, nodes=nodes))


@pytest.mark.parametrize("missing", ["helm", "kubectl"])
def test_a_missing_program_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"helm", "kubectl"} - {missing}:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["run", str(ROOT / "configs" / "tiny.yaml"), "--on", "kubernetes"])
    assert f"expected the program {missing} on the PATH" in str(result.exception)


def test_secrets_go_to_the_cluster_and_namespace_that_helm_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["-n", "rl", "--kube-context=lab", "--set", "a=b", "--kubeconfig", "k"]
    assert cluster_options(given) == ["--namespace=rl", "--context=lab", "--kubeconfig=k"]
    assert cluster_options(["-nrl", "--no-hooks", "-n=rl"]) == ["--namespace=rl", "--namespace=rl"]
    given = ["--kube-insecure-skip-tls-verify", "--kube-token", "secret", "--kube-as-user=me"]
    assert cluster_options(given) == ["--insecure-skip-tls-verify=true", "--token=secret", "--as=me"]
    monkeypatch.setenv("HELM_NAMESPACE", "mine")
    monkeypatch.setenv("HELM_KUBEAPISERVER", "https://b")
    cluster = Cluster(monkeypatch)
    launch_tiny()
    there = ["--namespace=mine", "--server=https://b"]
    assert all(call[1:3] == there for call in cluster.calls if call[0] == "kubectl")
