"""Sections of the learner (``learner``) and of a run's updates (``groups``, ``staleness``, ``publish``,
``checkpoint``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): ``W + alpha / rank · B A`` with only A and B trained. There
    is no dropout: the engine samples without, and π must be the same in both."""

    rank: int = Field(0, ge=0, le=1024)
    """0: no adapters, all weights are trained."""
    alpha: int | None = Field(None, ge=1)
    """None: twice the rank."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the frozen weights are held; the adapters are float32. bfloat16 takes half the memory and computes
    the same under ``compute_dtype: bfloat16`` where the model's own weights are bfloat16."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the linear layers that get adapters, for example ``[q_proj, v_proj]``. Empty: every linear
    layer except the output layer; with ``publish.lora: adapter`` name them, or vLLM reserves one for that too."""


class ReferenceConfig(Section):
    """The policy that a KL term is taken to. It is loaded only where estimator or loss asks for it."""

    source: Literal["auto", "initial", "folder", "lora_off", "server"] = "auto"
    """``initial``: a frozen copy of the initial model; ``folder``: another Hugging Face model with the same tokenizer;
    ``lora_off``: the weights in training with their adapters disabled, no copy; ``server``: an OpenAI-compatible server
    that scores prompts (vLLM). ``auto``: ``lora_off`` with adapters, else ``initial``."""
    folder: Path | None = None
    """Of ``source: folder``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the copy is held."""
    refresh_every: int | None = Field(None, ge=1)
    """Updates after which the copy takes the weights in training. None: it stays what it was."""
    url: str | None = None
    """Base URL of ``source: server``. Prompts are scored without temperature, so ``sampling.temperature`` must be 1."""
    model: str | None = None
    """Name under which the server knows the model. None: its only one."""
    concurrency: int = Field(8, ge=1, le=256)
    """Requests to the server at once."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Of one request; it is tried ``attempts_max`` times."""
    attempts_max: int = Field(3, ge=1, le=20)

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> ReferenceConfig:
        if (self.source == "folder") != (self.folder is not None):
            raise ValueError("learner.reference.folder belongs to source: folder, and that needs it")
        if (self.source == "server") != (self.url is not None):
            raise ValueError("learner.reference.url belongs to source: server, and that needs it")
        if self.refresh_every is not None and self.source in ("lora_off", "server"):
            raise ValueError(
                f"learner.reference.refresh_every needs a copy that can be refreshed, source {self.source} has none: "
                "set source: initial"
            )
        return self


class CriticConfig(Section):
    """The value function. It exists where the estimator asks for values (GAE)."""

    backbone: Literal["own", "none"] = "own"
    """``own``: a second copy of the initial model, trained whole; ``none``: a value head alone, on the policy's hidden
    states, which it does not change."""
    learning_rate: float = Field(1e-5, gt=0)
    """Follows the warm-up and schedule of ``learner.learning_rate``."""
    warmup_updates: int = Field(0, ge=0)
    """First updates in which only the critic learns."""
    clip: float | None = Field(0.2, gt=0)
    """The value may leave its old value by so much before its gradient stops (PPO's clipped value loss, as in the
    implementation of arXiv:1707.06347). None: plain squared error."""
    grad_clip: float = Field(1.0, gt=0)


class LearnerConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1)
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Autocast type of the forward and backward pass; master weights are float32."""
    learning_rate: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, to 0 at ``run.total_steps`` for linear and cosine."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """``adamw_8bit`` holds both moments in 8 bits (Dettmers et al. 2021, arXiv:2110.02861); it needs torchao or
    bitsandbytes in the learner's environment."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the moments of ``adamw``. bfloat16 takes half the memory; they are rounded stochastically, because the
    second moment would else never fall."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay per optimizer step of an average of the trained weights, saved in the checkpoint. None: no average."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
    epochs: int = Field(1, ge=1)
    """Optimizer passes over each batch."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    tokens_per_microbatch: int = Field(4096, ge=1)
    """Tokens of one forward pass, padding included; memory follows it."""
    packing: Literal["auto", "padded", "packed"] = "auto"
    """Layout of the rows of a forward pass. ``padded``: rows of similar length, padded to the longest;
    ``packed``: end to end without padding, each row attending to itself alone. ``packed`` needs a decoder whose layers
    all attend to the whole row. ``auto``: ``packed`` where the model allows it, except on a GPU in float32."""
    share_prefixes: bool = True
    """Compute once what packed rows of one forward pass begin with alike (the prompt of a group, the turns before a
    branch). Values stay the same up to rounding."""
    logits_tokens_max: int = Field(1024, ge=1)
    """Rows of the ``[tokens, vocabulary]`` matrix held at once."""
    gradient_checkpointing: bool = False
    offload: bool = False
    """With ``engine.colocate: sleep``: weights, optimizer and the other models move to host memory while the engine has
    the device. Without it they stay there, and ``engine.gpu_memory_share`` must leave them room."""
    ranks: int = Field(1, ge=1, le=1024)
    """Processes that share the model and each update (FSDP2): gloo on CPUs, NCCL with a GPU for each. The learner is
    rank 0 and starts the others on its machine. Under torchrun leave it out: there are as many as torchrun starts."""
    ranks_timeout_seconds: float = Field(600.0, gt=0)
    """After which a rank gives the others up, and the learner ends with an error. More than the longest micro-batch
    takes, and than a checkpoint takes to be written."""
    prefetch_batches: int = Field(1, ge=1, le=64)
    """Batches that may wait decoded at the learner beyond the one in training."""
    lora: LoraConfig = LoraConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="after")
    def _parts_agree(self) -> LearnerConfig:
        if self.optimizer == "adamw_8bit" and self.optimizer_dtype != "float32":
            raise ValueError("learner.optimizer_dtype is for adamw: adamw_8bit has moments of 8 bits, leave it out")
        if self.lora.rank and self.lora.frozen_dtype != "float32" and self.compute_dtype != self.lora.frozen_dtype:
            raise ValueError(
                f"learner.lora.frozen_dtype {self.lora.frozen_dtype} needs learner.compute_dtype "
                f"{self.lora.frozen_dtype}, got {self.compute_dtype}"
            )
        if self.reference.source == "lora_off" and not self.lora.rank:
            raise ValueError("learner.reference.source is lora_off, but learner.lora.rank is 0: set source: initial")
        return self


class GroupsConfig(Section):
    """Groups of one update: ``groups_per_step`` groups of exactly ``n_rollout`` trajectories."""

    n_rollout: int = Field(8, ge=1, le=4096)
    groups_per_step: int = Field(8, ge=1, le=65_536)
    attempts_max: int = Field(3, ge=1)
    """Failed rollouts of one slot before its group is cancelled."""
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    """Fate of a finished group whose rewards are all equal: every estimator that compares a group gives it
    advantage 0. ``keep``: it is trained all the same. ``drop``: its update is made from the other groups; an update
    that loses all of them is counted and changes no weights. ``refill``: a newly admitted group takes its place in the
    update (dynamic sampling of DAPO, arXiv:2503.14476). The rewards are the scorer's, before ``advantage.shaping`` and
    the overlong penalty, with those of stored trajectories in the group and, for remax, of the greedy rollout. Groups
    that are left out still count for difficulty, retirement and the pool, but no lessons are written from them."""
    refill_max: float = Field(2.0, ge=0)
    """Most groups that ``refill`` replaces for one update, as a multiple of ``groups_per_step``; what is equal after
    that is trained. 2 lets an update cost three times its groups."""

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories of one update: ``n_rollout * groups_per_step``."""
        return self.n_rollout * self.groups_per_step


class StalenessConfig(Section):
    max: int = Field(1, ge=0, le=1024)
    """η: how many updates behind the policy a trajectory may be when it is trained. 0 is strictly on-policy: rollouts
    and training alternate. 1 lets them overlap."""
    late: Literal["train", "drop"] = "train"
    """Fate of a trajectory that exceeds the bound all the same (after a restart): it is trained with its importance
    weight, or its group is dropped. Both are counted."""


class PublishConfig(Section):
    """Publication of new weights to the engines."""

    keep: int = Field(2, ge=1)
    """Weight folders kept."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of the published weights; engines cast to their own on load."""
    lora: Literal["merged", "adapter"] = "merged"
    """With adapters (``learner.lora.rank``): ``merged`` publishes whole weights, for every engine; ``adapter`` only the
    adapters, for vLLM servers, which then serve them under a name of their own."""
    adapter_name: str = Field("adapter", pattern=r"^[A-Za-z0-9._-]+$", max_length=100)
    """Name under which engines serve published adapters; actors ask for it."""
    timeout_seconds: float = Field(120.0, gt=0)
    """An engine that takes longer to load a version is left behind (and tried again) while the run goes on."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Updates between checkpoints. Updates after the last one are made again, from the same groups, if the learner is
    killed."""
    keep: int = Field(2, ge=1)
    at_end: bool = True
