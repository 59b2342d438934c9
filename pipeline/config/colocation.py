"""What ``engine.colocate`` asks of the other sections."""

from __future__ import annotations

from pipeline.config.learner import LearnerConfig
from pipeline.config.play import EngineConfig
from pipeline.config.training import PublishConfig

RESERVE = 0.05
"""Of the device, in ``split``: what CUDA itself takes in the two processes, outside of both shares."""
_UTILIZATION = "--gpu-memory-utilization"


def learner_share(engine: EngineConfig) -> float | None:
    """Part of the device's memory that the learner may take; None: no bound."""
    if engine.colocate != "split" or engine.memory_share is None:
        return None
    return 1.0 - engine.memory_share - RESERVE


def check_colocation(engine: EngineConfig, learner: LearnerConfig, publish: PublishConfig) -> None:
    """Raises :class:`ValueError` that says what to change."""
    given = [argument for argument in engine.args if argument.split("=")[0] == _UTILIZATION]
    if given and engine.memory_share is not None:
        raise ValueError(f"engine.args has {given[0]}: give it as engine.gpu_memory_share, once")
    if engine.colocate != "none":
        _check_one_device(engine, learner)
    if engine.colocate == "split" and (learner_share(engine) or 0.0) <= 0:
        raise ValueError(
            f"engine.gpu_memory_share ({engine.memory_share}) leaves the learner nothing: with engine.colocate: split "
            f"it must be below {1 - RESERVE:g}"
        )
    if engine.colocate == "sleep":
        _check_sleep(engine, learner, publish)
    elif learner.offload:
        raise ValueError(
            f"learner.offload is for engine.colocate: sleep, where the learner gives the device away; it is "
            f"{engine.colocate}: leave it out"
        )


def _check_one_device(engine: EngineConfig, learner: LearnerConfig) -> None:
    what = f"engine.colocate is {engine.colocate}: one device for one engine and one learner"
    if learner.ranks > 1:
        raise ValueError(f"{what}, but learner.ranks is {learner.ranks}: set learner.ranks: 1, or colocate: none")
    engines = len(engine.urls) if engine.kind == "external" else engine.replicas
    if engines > 1:
        raise ValueError(f"{what}, but there are {engines} engines: name one, or set colocate: none")
    if engine.weight_transfer == "nccl":
        raise ValueError(
            f"{what}, but engine.weight_transfer is nccl, which cannot join two processes on one device: set ipc or "
            "files"
        )
    if {engine.device, learner.device} == {"cpu", "cuda"}:
        raise ValueError(
            f"{what}, but engine.device is {engine.device} and learner.device {learner.device}: set both to one, or "
            "colocate: none"
        )


def _check_sleep(engine: EngineConfig, learner: LearnerConfig, publish: PublishConfig) -> None:
    if engine.kind == "external" and not engine.sleep_external:
        raise ValueError(
            "engine.colocate is sleep and engine.kind external: the learner would put somebody else's server to sleep. "
            "If it is there for this run alone and has --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, say "
            "engine.sleep_external: true"
        )
    if engine.sleep_level == 2 and publish.lora == "adapter":
        raise ValueError(
            "engine.sleep_level 2 discards the weights, and publish.lora: adapter brings only adapters back: set "
            "sleep_level: 1, or publish.lora: merged"
        )
    if learner.offload and learner.optimizer == "adamw_8bit":
        raise ValueError("learner.offload cannot move the state of adamw_8bit: set learner.optimizer: adamw")
    on_gpu = "cpu" not in (engine.device, learner.device)
    if engine.kind == "vllm" and on_gpu and not learner.offload and engine.gpu_memory_share is None:
        raise ValueError(
            "engine.colocate is sleep and learner.offload false: the learner's weights and optimizer stay on the "
            "device, so say with engine.gpu_memory_share how much of it vLLM may take, or set learner.offload: true"
        )
