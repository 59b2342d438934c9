"""Section ``placement``: the division of GPUs between engines and learner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pipeline.config.base import Section
from pipeline.config.learner import LearnerConfig
from pipeline.config.rollouts import EngineConfig


def _gpus(value: Any) -> Any:
    if value in (None, "auto") or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024):
        return value
    raise ValueError(f"expected a number of GPUs from 1 to 1024, auto or null, got {value!r}")


def _size(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 64):
        return value
    raise ValueError(f"expected a number of GPUs from 1 to 64, or auto, got {value!r}")


Gpus = Annotated[int | Literal["auto"] | None, BeforeValidator(_gpus)]
Size = Annotated[int | Literal["auto"], BeforeValidator(_size)]


class PlacementConfig(Section):
    """GPUs of engines and learner (``afterplay plan FILE`` shows the result). Every GPU belongs to one process, unless
    ``engine.colocate`` shares it. Without GPUs, and for roles that you start yourself, only ``tensor_parallel`` and
    ``data_parallel`` have an effect."""

    engine_gpus: Gpus = None
    """GPUs of all engines together. A number sets ``engine.replicas``. ``auto``: three quarters of the GPUs, or what
    ``learner_gpus`` leaves; with one GPU engine and learner take turns on it; with ``engine.colocate: sleep`` all GPUs,
    or as many as ``learner_gpus``. None: as ``engine.replicas`` says."""
    learner_gpus: Gpus = None
    """GPUs of the learner. A number sets ``learner.ranks``. ``auto``: what the engines leave; with ``engine_gpus:
    auto`` a quarter of the GPUs, or more where the estimate of memory needs more; with ``engine.colocate: sleep`` as
    many as the engines. None: as ``learner.ranks`` says."""
    tensor_parallel: Size = "auto"
    """GPUs among which vLLM divides each copy of the model (``--tensor-parallel-size``). ``auto``: the fewest on which
    the model fits by the estimate of memory; 1 where that is unknown, and for engines that you start yourself."""
    data_parallel: int = Field(1, ge=1, le=64)
    """Copies of the model behind the port of one engine (``--data-parallel-size``). An engine has ``tensor_parallel``
    times ``data_parallel`` GPUs: on one machine, or if none has so many, all GPUs of several. Then ``tensor_parallel``
    is a divisor of the GPUs of a machine; or a multiple, with one copy."""

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one engine."""
        return self.gpus_per_copy * self.data_parallel

    @property
    def gpus_per_copy(self) -> int:
        """GPUs of one copy of the model."""
        return 1 if self.tensor_parallel == "auto" else self.tensor_parallel


_ARGUMENTS = {
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--data-parallel-size": "data_parallel",
    "-dp": "data_parallel",
}


def check_placement(placement: PlacementConfig, engine: EngineConfig, learner: LearnerConfig) -> None:
    """Raises :class:`ValueError` with the remedy if the numbers of GPUs, engines and ranks contradict each other."""
    size, gpus = placement.gpus_per_engine, placement.engine_gpus
    for argument in engine.args:
        if key := _ARGUMENTS.get(argument.split("=")[0]):
            raise ValueError(f"engine.args has {argument}: set placement.{key} instead")
    if size > 1 and engine.kind != "vllm":
        raise ValueError(
            f"placement.tensor_parallel and data_parallel are for engine.kind: vllm, got {engine.kind}: omit them"
        )
    if size > 1 and engine.colocate == "split":
        raise ValueError(
            f"an engine of {size} GPUs (placement.tensor_parallel, data_parallel) cannot share one with the learner: "
            "set engine.colocate: sleep or none"
        )
    if isinstance(gpus, int) and gpus % size:
        raise ValueError(f"placement.engine_gpus ({gpus}) must be a multiple of the {size} GPUs of one engine")
    if isinstance(gpus, int) and engine.urls and gpus != size * len(engine.urls):
        raise ValueError(f"placement.engine_gpus is {gpus}, but engine.urls lists {len(engine.urls)}: omit engine_gpus")
    _check_count("placement.engine_gpus", gpus, "engine.replicas", engine.replicas, size)
    _check_count("placement.learner_gpus", placement.learner_gpus, "learner.ranks", learner.ranks, 1)
    key, ranks = "placement.learner_gpus", placement.learner_gpus
    if ranks is None:
        key, ranks = "learner.ranks", learner.ranks
    if isinstance(ranks, int) and ranks % (learner.replicas * learner.context_ranks):
        raise ValueError(
            f"{key} ({ranks}) must be a multiple of learner.replicas ({learner.replicas}) times learner.context_ranks "
            f"({learner.context_ranks})"
        )
    ranks_min = ranks if isinstance(ranks, int) else learner.replicas * learner.context_ranks
    if learner.optimizer == "adamw_8bit" and ranks_min > 1:
        raise ValueError(
            f"learner.optimizer is adamw_8bit, which is for one rank, got at least {ranks_min}: set learner.optimizer: "
            f"adamw, or {key}, learner.replicas and learner.context_ranks to 1"
        )
    if engine.colocate == "split" and not {gpus, placement.learner_gpus} <= {None, "auto", 1}:
        raise ValueError(
            "engine.colocate is split, where engine and learner share one GPU: omit placement.engine_gpus and "
            "learner_gpus, or set colocate: none"
        )
    if engine.colocate == "sleep":
        _check_turns(size, gpus, key, ranks, engine)


def _check_turns(
    size: int, gpus: int | Literal["auto"] | None, key: str, ranks: int | Literal["auto"], engine: EngineConfig
) -> None:
    """Refuse numbers of ranks and of the engines' GPUs that differ. Whoever starts a server knows how many it has."""
    if engine.kind == "external" or "auto" in (gpus, ranks):
        return
    of_engines = gpus if gpus is not None else engine.replicas * size
    if of_engines != ranks:
        raise ValueError(
            f"engine.colocate is sleep, where each rank of the learner shares a GPU with an engine: expected as many "
            f"ranks as the engines have GPUs ({of_engines}), got {key} {ranks}: set one of them to the other"
        )


def _check_count(key: str, gpus: int | Literal["auto"] | None, other: str, count: int, size: int) -> None:
    """Refuse a count of processes that the number of GPUs contradicts; 1 is the default of both."""
    if gpus is not None and count not in (1, gpus if gpus == "auto" else gpus // size):
        raise ValueError(f"{key} is {gpus}, but {other} is {count}: omit one of them")
