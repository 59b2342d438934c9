"""The Helm chart with real run files: lint, template, and strict validation of every manifest.

``scripts/setup.py --dev`` installs helm and the schemas.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load
from pipeline.launchers.kubernetes import CHART, launch, values_of, write_files
from pipeline.launchers.launcher import Launch
from tests.support.helm import find_helm

ROOT = Path(__file__).resolve().parents[2]
SCENES = {
    "tiny": ("tiny", [], None, ""),
    "gpu": ("gpu", [], 8, ""),
    "replay, evaluation, several actors": (
        "replay_tiny",
        ["run.name=replay-tiny", "actor.replicas=3", "evaluation.every=5"],
        None,
        "",
    ),
    "ranks on two nodes": ("gpu", ["placement.learner_gpus=8", "placement.engine_gpus=4"], 4, "3"),
}
"""Run file, changes, GPUs of a node, nodes."""
KINDS = {"ConfigMap": 1, "Service": 4, "StatefulSet": 3, "Job": 1, "NetworkPolicy": 4, "HorizontalPodAutoscaler": 1,
         "PersistentVolumeClaim": 1, "PodMonitor": 1}  # fmt: skip


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = find_helm(tmp_path_factory.mktemp("helm"))
    if found is None:
        pytest.skip("helm is neither on the PATH nor in an installed package")
    return found


def request_of(scene: str, **more: Any) -> Launch:
    file, sets, gpus, nodes = SCENES[scene]
    return Launch(load(ROOT / "configs" / f"{file}.yaml", sets, environment={}), gpus=gpus, nodes=nodes, **more)


def call(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def containers(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pod = manifest["spec"]["template"]["spec"]
    yield from (*pod.get("initContainers", []), *pod["containers"])


@pytest.mark.parametrize("scene", SCENES)
def test_every_manifest_is_valid_and_every_container_without_rights(scene: str, helm: Path, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    config, values = values_of(request_of(scene))
    files = write_files(config, values, tmp_path)
    call(helm, "lint", "--strict", CHART, *files)
    text = call(helm, "template", values["name"], CHART, *files, "--set", "podMonitor.enabled=true")
    manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    kinds = [manifest["kind"] for manifest in manifests]
    assert {kind: kinds.count(kind) for kind in kinds} == KINDS
    for manifest in manifests:
        if manifest["kind"] != "PodMonitor":  # a custom resource
            validate.validate(manifest, validate.latest_version(), strict=True)
    for manifest in manifests:
        if manifest["kind"] in ("StatefulSet", "Job"):
            pod = manifest["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
            for container in containers(manifest):
                rights = container["securityContext"]
                runs = [mount for mount in container.get("volumeMounts", ()) if mount["name"] == "runs"]
                is_actor = manifest["metadata"]["name"].endswith("-actor")
                assert all(mount.get("readOnly", False) or not is_actor for mount in runs), "actors write there"
                assert rights["readOnlyRootFilesystem"] and rights["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    written = next(m for m in manifests if m["kind"] == "ConfigMap")["data"]["run.yaml"]
    (tmp_path / "written.yaml").write_text(written)
    assert load(tmp_path / "written.yaml", environment={}) == config, "the pods read the same configuration"


def test_only_actors_and_learner_reach_the_replay_stage(helm: Path, tmp_path: Path) -> None:
    config, values = values_of(request_of("tiny"))
    text = call(helm, "template", "tiny", CHART, *write_files(config, values, tmp_path))
    policies = {
        manifest["metadata"]["name"]: manifest["spec"]
        for manifest in yaml.safe_load_all(text)
        if manifest and manifest["kind"] == "NetworkPolicy"
    }
    callers = {
        rule["ports"][0]["port"]: rule["from"][0]["podSelector"]["matchExpressions"][0]["values"]
        for rule in policies["tiny-replay"]["ingress"]
        if "podSelector" in rule["from"][0]
    }
    assert callers == {5555: ["actor", "learner"]}
    assert [rule["ports"][0]["port"] for rule in policies["tiny-actor"]["ingress"]] == [9402], "only metrics"
    assert len(policies["tiny-engine"]["egress"]) == 1, "only names"


def test_a_dry_run_shows_what_helm_would_install(
    helm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{helm.parent}{os.pathsep}{os.environ['PATH']}")
    assert launch(request_of("tiny", dry_run=True)) == 0
    output = capsys.readouterr().out
    assert "kind: StatefulSet" in output and "tcp://tiny-replay:5555" in output


def test_values_that_the_schema_does_not_know_are_refused(helm: Path, tmp_path: Path) -> None:
    config, values = values_of(request_of("tiny"))
    command = [helm, "template", "tiny", CHART, *write_files(config, values, tmp_path), "--set", "actr.pods=3"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode and "actr" in done.stderr
