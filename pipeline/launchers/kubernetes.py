"""Kubernetes: values of the Helm chart from a run file, keys as secrets, and the installation.

``afterplay run FILE --on kubernetes`` needs ``helm`` and ``kubectl``. The chart beside this file starts the same
commands as every other launcher: replay stage, engines and actors are stateful sets, the learner is a job, which ends
with the run. Kubernetes starts again what ends; each pod finds the others by the names of its services. The same
command updates a run that was installed before, and continues it.
"""

from __future__ import annotations

import base64
import itertools
import logging
import math
import os
import re
import shlex
import ssl
import sys
import tempfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from shutil import which
from typing import Any
from urllib.error import HTTPError

import orjson

from pipeline.config import RunConfig
from pipeline.config.explain import ACTOR_KEY_FILE
from pipeline.config.load import dump, dump_yaml
from pipeline.errors import ConfigurationError
from pipeline.launchers.launcher import Launch, require_program, run_program
from pipeline.runtime.engine_keys import LEARNER_KEY_FILE, make_key_files
from pipeline.runtime.process import ExitCode, metrics_port
from pipeline.runtime.run_directory import PREPARE_SECONDS_MAX, write_bytes_atomically
from pipeline.supervisor.cluster import require_own_addresses
from pipeline.supervisor.inventory import Inventory, Node, given_inventory
from pipeline.supervisor.plan import Place, Plan, plan
from pipeline.transport.curve import make_keys

CHART = Path(__file__).with_name("chart")
GRAFANA = Path(__file__).parents[2] / "grafana"
FILE, VALUES = "run.yaml", "values.yaml"
HUB_PORT, ENGINE_PORT, METRICS_PORT = 5555, 8100, 9400
LIBRARIES_BYTES = 2 * 2**30
"""Memory of a process besides the buffers that its place counts. A guess, which ``--set ROLE.memory=…`` replaces. A
place with GPUs has a process for each, and an engine one more."""
SCALE_MAX = 4
"""Times their number in the run file: most actors and engines of the autoscalers. Actors have keys from the start."""
KEYS_MIN = 64
"""Actors that get keys from the start, so that a run can be given more of them."""
START_SECONDS = 300
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
HELM_VARIABLES = {
    "HELM_NAMESPACE": "--namespace",
    "HELM_KUBECONTEXT": "--kube-context",
    "HELM_KUBEAPISERVER": "--kube-apiserver",
    "HELM_KUBETOKEN": "--kube-token",
    "HELM_KUBECAFILE": "--kube-ca-file",
    "HELM_KUBEASUSER": "--kube-as-user",
    "HELM_KUBETLS_SERVER_NAME": "--kube-tls-server-name",
    "HELM_KUBEINSECURE_SKIP_TLS_VERIFY": "--kube-insecure-skip-tls-verify",
}
"""Environment variables that helm reads and kubectl does not, and the options that they stand for."""
SWITCH = "--kube-insecure-skip-tls-verify"
KUBECTL_OPTIONS = {
    "-n": "--namespace",
    "--namespace": "--namespace",
    "--kubeconfig": "--kubeconfig",
    "--kube-context": "--context",
    "--kube-apiserver": "--server",
    "--kube-token": "--token",
    "--kube-ca-file": "--certificate-authority",
    "--kube-as-user": "--as",
    "--kube-as-group": "--as-group",
    "--kube-tls-server-name": "--tls-server-name",
    SWITCH: "--insecure-skip-tls-verify",
}
"""Options of helm that choose a cluster, and those of kubectl."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API, API_SECONDS_MAX = "https://kubernetes.default.svc", 30.0
KEEPING = ("actor", "engine", "replay")
"""Roles that are stateful sets, which start again whatever ends, also with exit code 0: their pods cannot end
themselves."""

log = logging.getLogger(__name__)


def launch(request: Launch) -> int:
    """Install or update the run. A dry run shows run file and values, and the manifests where helm is. Raises
    :class:`ConfigurationError`."""
    if request.fresh:
        raise ConfigurationError(
            "--fresh: the run directory is on a volume of the cluster, which this command does not empty: start over "
            "under another name with --set run.name=NAME"
        )
    config, values = values_of(request)
    if config.report_to:
        print(
            f"afterplay: report_to: the chart starts no reporters. Where {config.run.path} can be read, report with "
            + " and ".join(f"`afterplay report {config.run.path} --to {tracker}`" for tracker in config.report_to),
            file=sys.stderr,
        )
    if request.dry_run:
        return _show(config, values, request)
    helm = require_program("helm", "install Helm 3 or newer, or see the values with --dry-run")
    kubectl = require_program("kubectl", "install it and choose a cluster with `kubectl config use-context`")
    name = values["name"]
    variables = [f"{option}={os.environ[name]}" for name, option in HELM_VARIABLES.items() if os.environ.get(name)]
    place = cluster_options([*variables, *request.arguments])
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(config, values, Path(folder))
        install = [helm, "upgrade", "--install", name, str(CHART), *files, *request.arguments]
        run_program([*install, "--dry-run"])  # what is refused is refused before anything is changed
        namespaces = [option.removeprefix("--namespace=") for option in place if option.startswith("--namespace=")]
        if "--create-namespace" in request.arguments and namespaces:  # for the keys, before helm would make it
            run_program([kubectl, *place, "create", "namespace", namespaces[-1]], check=False)  # it may be there
        _make_secrets([kubectl, *place], name, values["actor"]["podsMax"])
        # A job cannot be changed. The learner drains, and the new one resumes.
        gone = ["--ignore-not-found", "--wait", "--cascade=foreground"]  # with its pods
        run_program([kubectl, *place, "delete", "job", f"{name}-learner", *gone])
        for role in ("replay", "engine", "actor"):  # a run that had finished has none
            sets = [f"statefulset/{name}-{role}", "--current-replicas=0", f"--replicas={values[role].get('pods', 1)}"]
            run_program([kubectl, *place, "scale", *sets], check=False)
        print(run_program(install).stdout, end="")
    there = shlex.join([*_shown(place), "-l", f"app.kubernetes.io/instance={name}"])
    print(f"`kubectl get pods {there}` shows the pods; `{_uninstall(name, place)}` ends the run")
    return ExitCode.FINISHED


def _shown(place: Iterable[str]) -> list[str]:
    """The options of kubectl in ``place`` that may be printed: no tokens."""
    return [option for option in place if option.startswith(("--namespace=", "--context=", "--kubeconfig="))]


def _uninstall(name: str, place: Iterable[str]) -> str:
    """The command that ends a run; ``place``: options of kubectl that choose the cluster and namespace."""
    options = [re.sub("^--context=", "--kube-context=", option) for option in _shown(place)]
    return shlex.join(["helm", "uninstall", name, *options])


def _make_secrets(kubectl: list[str], name: str, actors: int) -> None:
    """Make the keys of a run that has none. Raises :class:`ConfigurationError` where it has too few."""
    secrets = secrets_of(name, max(actors, KEYS_MIN))
    owners = [secret["metadata"]["name"] for secret in secrets]
    there = run_program([*kubectl, "get", "secret", *owners, "--ignore-not-found", "--output=name"]).stdout.split()
    if f"secret/{owners[-1]}" not in there:  # the last one that is made
        if there:  # the command was interrupted: keys of two starts do not fit together
            run_program([*kubectl, "delete", "secret", *owners, "--ignore-not-found"])
        listed = {"apiVersion": "v1", "kind": "List", "items": secrets}
        run_program([*kubectl, "create", "-f", "-"], stdin=orjson.dumps(listed).decode())
        return
    found = orjson.loads(run_program([*kubectl, "get", "secret", f"{name}-actor-keys", "-o", "json"]).stdout)
    keys = sum(file.endswith(".key_secret") for file in found.get("data") or ())
    if keys < actors:
        raise ConfigurationError(
            f"expected keys for {actors} actors ({SCALE_MAX} times actor.replicas), got {keys} in the secret "
            f"{name}-actor-keys: set actor.replicas to at most {keys // SCALE_MAX}, or end the run with "
            f"`{_uninstall(name, kubectl[1:])}`, remove its keys with "
            f"`{shlex.join(['kubectl', 'delete', 'secret', *_shown(kubectl[1:]), *owners])}`, and repeat this"
        )


def write_files(config: RunConfig, values: dict[str, Any], folder: Path) -> list[str]:
    """Write run file and values; returns the arguments with which helm reads them."""
    write_bytes_atomically(folder / FILE, dump(config).encode())
    write_bytes_atomically(folder / VALUES, dump_yaml(values).encode())
    texts = {"config": folder / FILE, "alerts": GRAFANA / "prometheus" / "alerts.yml"}
    texts |= {f"dashboards.{path.stem}": path for path in sorted((GRAFANA / "dashboards").glob("*.json"))}
    named = (("--set-file", name + "=" + re.sub(r"[\\,]", r"\\\g<0>", str(path))) for name, path in texts.items())
    values_file = str(folder / VALUES).replace('"', '""')  # helm splits lists of files at commas, as those of a CSV
    return ["--values", f'"{values_file}"', *itertools.chain.from_iterable(named)]


def _show(config: RunConfig, values: dict[str, Any], request: Launch) -> int:
    """Print run file, values and what ``helm template`` makes of them; or write them to files."""
    helm, manifests = which("helm"), ""
    with tempfile.TemporaryDirectory() as temporary:
        folder = request.out or Path(temporary)
        files = write_files(config, values, folder)
        if helm is not None:
            manifests = run_program([helm, "template", values["name"], str(CHART), *files, *request.arguments]).stdout
            write_bytes_atomically(folder / "manifests.yaml", manifests.encode())
        if request.out is None:
            print(f"# {FILE}\n{(folder / FILE).read_text()}---\n# {VALUES}\n{(folder / VALUES).read_text()}{manifests}")
    if request.out is not None:
        print(f"written to {folder}: the same command without --dry-run and --out makes the keys and installs it")
    if helm is None:
        print("# helm is not on the PATH: without it there are no manifests")
    return ExitCode.FINISHED


def values_of(request: Launch) -> tuple[RunConfig, dict[str, Any]]:
    """The run file that the pods read, and the values of the chart. Raises :class:`ConfigurationError` for what pods
    cannot do."""
    nodes = request.nodes or "1"
    chosen = plan(request.config, given_inventory(request.gpus, nodes, Inventory((Node("here"),)))).fitting()
    config = chosen.config
    name = config.run.name
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"run.name: expected at most 40 lower-case letters, digits and hyphens, as names in Kubernetes are, got "
            f"{name!r}: use --set run.name=NAME"
        )
    if config.engine.colocate != "none":
        raise ConfigurationError(
            f"engine.colocate is {config.engine.colocate}, but two pods cannot share a GPU: give the run a GPU more "
            "(--gpus 2) and set colocate: none"
        )
    return config_in_pods(config, name), {
        "name": name,
        "graceSeconds": math.ceil(config.checkpoint.drain_seconds_max) + 10,
        "stuckSeconds": math.ceil(config.supervisor.stuck_seconds_max),
        **_roles(config, chosen),
    }


def config_in_pods(config: RunConfig, name: str) -> RunConfig:
    """A copy with the addresses, folders and keys of pods."""
    engine: dict[str, Any] = {}
    if config.engine.kind != "external":
        require_own_addresses(config.engine)
        replicas = range(config.engine.replicas)
        engine = {
            "discovery": None,
            "host": "0.0.0.0",
            "port": 0,  # each has that of its URL
            "urls": tuple(f"http://{name}-engine-{i}.{name}-engine:{ENGINE_PORT}" for i in replicas),
            "actor_key": "env:AFTERPLAY_ENGINE_ACTOR_KEY",
            "learner_key": "env:AFTERPLAY_ENGINE_LEARNER_KEY",
        }
    address = f"tcp://{name}-replay:{HUB_PORT}"
    return config.updated(
        engine=engine,
        run={"directory": Path("/runs"), "id": config.run.id or name},
        stage={"address": address, "store": Path("/store/replay.sqlite"), "curve": Path("/keys")},
        metrics={"host": "0.0.0.0", "port": METRICS_PORT},
    )


def _roles(config: RunConfig, chosen: Plan) -> dict[str, dict[str, Any]]:
    places: dict[str, list[Place]] = {"engine": [], "learner": [], "replay": [], "actor": []}
    for place in chosen.places:
        if place.role in places:
            places[place.role].append(place)
    counts = [len(place.gpus) for place in places["learner"] if place.gang is not None]
    if len(set(counts)) > 1:
        raise ConfigurationError(
            f"expected as many ranks of the learner on each node, as the pods of a job are equal, got {counts}: set "
            "placement.learner_gpus to a multiple of the GPUs of a node"
        )
    if any(place.gang is not None for place in places["engine"]):
        raise ConfigurationError(
            f"an engine of {config.placement.gpus_per_engine} GPUs takes several nodes, and its parts start again "
            "together, but pods of a stateful set do so one by one: lower placement.tensor_parallel or data_parallel, "
            "or run on a Ray cluster of the same nodes (--on ray)"
        )
    more: dict[str, dict[str, Any]] = {
        "replay": {"port": HUB_PORT, "metricsPort": metrics_port("replay", 0, METRICS_PORT)},
        "learner": {
            "startSeconds": math.ceil(START_SECONDS + PREPARE_SECONDS_MAX),
            "pods": len(places["learner"]),
            "ranksPerPod": counts[0] if counts else config.learner.ranks,
            "restarts": config.supervisor.restarts_max,
            "metricsPort": metrics_port("learner", 0, METRICS_PORT),
        },
        "engine": {
            "startSeconds": math.ceil(config.engine.start_seconds_max + PREPARE_SECONDS_MAX),
            "pods": len(places["engine"]),
            "podsMax": SCALE_MAX * len(places["engine"]),
            "graceSeconds": math.ceil(config.engine.request_seconds_max) + 20,  # one that is removed ends its requests
            "port": ENGINE_PORT,
            "shares": config.engine.weight_transfer != "files",
        },
        "actor": {
            "pods": config.actor.replicas,
            "podsMax": SCALE_MAX * config.actor.replicas,
            "concurrency": config.actor.concurrency,
            "metricsPort": metrics_port("actor", 0, METRICS_PORT),
        },
    }
    return {r: {**_resources(found), "startSeconds": START_SECONDS, **more[r]} for r, found in places.items()}


def _resources(places: Iterable[Place]) -> dict[str, Any]:
    """Requests of each pod of a role; the largest of its places."""
    found = list(places)
    gpus = max((len(place.gpus) for place in found), default=0)
    processes = max(1, gpus) + any(place.role == "engine" and place.gpus for place in found)
    memory = processes * LIBRARIES_BYTES + max((place.memory_bytes for place in found), default=0)
    return {
        "cpus": max((place.cpus for place in found), default=1),
        "memory": f"{math.ceil(memory / 2**20)}Mi",
        "gpus": gpus,
    }


def secrets_of(name: str, actors: int) -> list[dict[str, Any]]:
    """New secrets: the CURVE keys of each role, and the keys of the engines. Each role mounts its own alone."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "keys"
        make_keys(folder, actors)
        make_key_files(folder)
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    public = {file: data for file, data in files.items() if file.endswith(".key")}
    pairs = {file: data for file, data in files.items() if file.endswith((".key", ".key_secret"))}
    owned = {
        "replay-keys": {**public, "server.key_secret": files["server.key_secret"]},
        "learner-keys": {k: v for k, v in pairs.items() if k.startswith("learner.") or k == "server.key"},
        "actor-keys": {k: v for k, v in pairs.items() if k.startswith("actor-") or k == "server.key"},
        "engine-keys": {"actor": files[ACTOR_KEY_FILE], "learner": files[LEARNER_KEY_FILE]},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{name}-{suffix}", "labels": {"app.kubernetes.io/instance": name}},
            "type": "Opaque",
            "data": {file: base64.b64encode(data).decode() for file, data in data_of.items()},
        }
        for suffix, data_of in owned.items()
    ]


def cluster_options(arguments: Iterable[str]) -> list[str]:
    """The options for kubectl that choose the cluster and namespace of these options for helm.

    >>> cluster_options(["-n", "rl", "--kube-context=lab", "--set", "a=b"])
    ['--namespace=rl', '--context=lab']
    """
    found, name = [], ""
    for argument in arguments:
        option, _, value = re.sub(r"^-n(?=[^=])", "-n=", argument).partition("=")  # -nrl is -n rl
        if name:
            found.append(f"{name}={argument}")
            name = ""
        elif option in KUBECTL_OPTIONS and (value or option == SWITCH):
            found.append(f"{KUBECTL_OPTIONS[option]}={value or 'true'}")
        else:
            name = KUBECTL_OPTIONS.get(option, "")
    return found


def end_pods(run: str, account: Path = ACCOUNT, api: str = API) -> None:
    """Scale the stateful sets of ``run`` to 0, from the pod of its learner, which may do just that. What cannot be
    reached or is not allowed is logged with its remedy: the run has finished all the same."""
    try:
        token, namespace = ((account / name).read_text().strip() for name in ("token", "namespace"))
        context = ssl.create_default_context(cafile=account / "ca.crt") if api.startswith("https") else None
        for role in KEEPING:
            request = urllib.request.Request(
                f"{api}/apis/apps/v1/namespaces/{namespace}/statefulsets/{run}-{role}/scale",
                data=orjson.dumps({"spec": {"replicas": 0}}),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
                method="PATCH",
            )
            try:
                urllib.request.urlopen(request, timeout=API_SECONDS_MAX, context=context).close()
            except HTTPError as error:
                if error.code != 404:  # engines of others
                    raise
    except OSError as error:
        log.warning(
            "the run has finished, but its other pods stay (%s): end them with `helm uninstall %s`, or `kubectl scale "
            "statefulset --replicas=0 -l app.kubernetes.io/instance=%s`", error, run, run
        )  # fmt: skip
