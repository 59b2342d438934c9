"""Sections of the learner (``learner``) and of a run's updates (``groups``, ``staleness``, ``publish``,
``checkpoint``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.base import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): ``W + alpha / rank · B A``, where only A and B are trained.
    There is no dropout, because the engine samples without it and both must compute the same π."""

    rank: int = Field(0, ge=0, le=1024)
    """Rank of A and B. 0: no adapters; all weights are trained."""
    alpha: int | None = Field(None, ge=1)
    """Numerator of the scale ``alpha / rank``. None: twice the rank, which makes the scale 2."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the frozen weights; the adapters are float32. ``bfloat16`` halves their memory. The result is the same if
    ``compute_dtype`` is ``bfloat16`` and the model's weights are stored in it."""
    targets: tuple[str, ...] = ()
    """Linear layers that get adapters, by the end of their names, for example ``[q_proj, v_proj]``. Empty: every linear
    layer except the output layer. With ``publish.lora: adapter`` list them, or vLLM also reserves an adapter for the
    output layer."""


class ReferenceConfig(Section):
    """Reference policy of the KL term, or teacher of ``advantage.estimator: distill``. It is loaded only if the
    estimator or the loss needs it. Without ``folder`` and ``url`` it is the initial model: a frozen copy, or with
    ``learner.lora`` the model in training with its adapters disabled, without a copy."""

    folder: Path | None = None
    """Folder of another Hugging Face model with the same tokenizer, in place of the initial model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the copy's weights."""
    url: str | None = None
    """Base URL of an OpenAI-compatible server that scores prompts (vLLM), in place of the initial model. It scores at
    temperature 1, so ``sampling.temperature`` must be 1. Rollouts have at most ``model.max_length`` - 1 tokens, because
    vLLM samples one more for each."""
    model: str | None = None
    """Name of the model at the server. None: the only one that it serves."""

    def check(self) -> None:
        if self.folder is not None and self.url is not None:
            raise ValueError("learner.reference has a folder and a url: omit one")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"learner.reference.url: expected an address such as http://127.0.0.1:8000, got {self.url!r}"
            )


class CriticConfig(Section):
    """Value function. It exists only if the estimator needs values (``gae``)."""

    backbone: Literal["own", "none"] = "own"
    """``own``: a second copy of the initial model, fully trained. ``none``: only a value head on the policy's hidden
    states; its gradient does not reach the policy."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate. It follows the warm-up and the schedule of ``learner.learning_rate``."""
    warmup_updates: int = Field(0, ge=0)
    """The critic's first updates, in which only it is trained."""
    clip: float | None = Field(0.2, gt=0)
    """Range around the old value outside of which the value's gradient is clipped (PPO's clipped value loss, as in the
    implementation of arXiv:1707.06347). None: plain squared error."""


class LearnerConfig(Section):
    """The learner: optimizer, batches, memory and processes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the learner. ``auto``: CUDA if available, else the CPU."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of PyTorch. None: PyTorch's default."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast type of the forward and backward passes. Master weights are float32. ``auto``: bfloat16 on a GPU, on a
    CPU with instructions for it, and with ``lora.frozen_dtype: bfloat16``; else float32."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. 1e-6 suits full fine-tuning of pretrained models; small or random models need more."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up. ``linear`` and ``cosine`` decay to 0 at ``run.total_steps``."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """``adamw_8bit`` stores both moments in 8 bits (Dettmers et al. 2021, arXiv:2110.02861). It needs torchao or
    bitsandbytes in the learner's environment."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the moments of ``adamw``. ``bfloat16`` halves their memory; they are rounded stochastically, because with
    ordinary rounding the second moment would never decrease."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm, of the policy and of the critic."""
    epochs: int = Field(1, ge=1)
    """Passes over each update's trajectories. More than 1 reuses them off-policy."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps in each pass."""
    tokens_per_microbatch: int = Field(4096, ge=1)
    """Tokens of one forward pass, padding included. It determines peak memory; larger is faster on a GPU."""
    packing: Literal["auto", "padded", "packed"] = "auto"
    """Layout of the rows of a forward pass. ``padded``: rows of similar length, padded to the longest. ``packed``: rows
    end to end without padding; each attends only to itself, and a common prefix (the prompt of a group, the turns
    before a branch) is computed only once. ``packed`` needs a decoder with full or sliding attention in every layer, on
    a GPU without sinks and capped scores. ``auto``: ``packed`` if the model supports it, except on a GPU in float32.
    Results are equal up to rounding."""
    gradient_checkpointing: bool | Literal["offload"] = False
    """Recompute activations in the backward pass: less memory, more compute. ``offload``: keep what it begins from, the
    input of each layer, in host memory, for long rows."""
    routing_replay: bool = False
    """For a mixture of experts: the learner's routers choose the experts that the engine chose for the same token
    (R3, arXiv:2510.11370), weighted by the learner's own scores. Engines return their choice, which is stored with each
    trajectory: for each token ``layers x k`` bytes, twice that with more than 256 experts. vLLM on a GPU, or the
    embedded engine; vLLM on a CPU cannot return it."""
    offload: bool = False
    """With ``engine.colocate: sleep``: move weights, optimizer state and the other models to host memory while the
    engine uses the device. False: they stay, and ``engine.gpu_memory_share`` must leave room for them."""
    ranks: int = Field(1, ge=1, le=1024)
    """Processes that share the model and each update (FSDP2): gloo on CPUs, NCCL with one GPU each. The learner is rank
    0 and starts the others on its machine. Under torchrun omit it: torchrun determines the number. Ranks on several
    nodes meet at port 29500 of the first; set ``MASTER_PORT`` where ``afterplay run`` starts to use another."""
    replicas: int = Field(1, ge=1, le=1024)
    """Copies of the model among the ranks (HSDP): each is divided among ``ranks / replicas`` of them, which gather and
    reduce in every micro-batch; between copies gradients are summed once an optimizer step. Worth it where ranks are on
    several nodes and fewer have room for the model: docs/SCALE.md. Under torchrun name ``ranks`` too."""
    context_ranks: int = Field(1, ge=1, le=1024)
    """Ranks that divide the tokens of a row longer than ``tokens_per_microbatch`` (context parallelism, Ulysses,
    arXiv:2309.14509), so that a rank holds one part of it. Shorter rows stay on one rank. A divisor of ``ranks`` and of
    the model's attention heads, and with ``replicas`` of the ranks of each; every layer must have full or sliding
    attention. Under torchrun name ``ranks`` too."""
    ranks_timeout_seconds: float = Field(600.0, gt=0)
    """Seconds that a rank waits for the others before the learner ends with an error. Must exceed the longest
    micro-batch and the longest checkpoint write."""
    lora: LoraConfig = LoraConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()

    def check(self) -> None:
        if self.optimizer == "adamw_8bit" and self.optimizer_dtype != "float32":
            raise ValueError("learner.optimizer_dtype is for adamw: adamw_8bit has 8-bit moments, omit it")
        frozen = self.lora.frozen_dtype if self.lora.rank else "float32"
        if frozen != "float32" and self.compute_dtype not in (frozen, "auto"):
            raise ValueError(
                f"learner.lora.frozen_dtype {frozen} needs learner.compute_dtype {frozen}, got {self.compute_dtype}"
            )


class PublishConfig(Section):
    """Publication of new weights to the engines."""

    keep: int = Field(2, ge=1)
    """Newest weight folders kept on disk. A finished ``afterplay run`` deletes them, since the last checkpoint has the
    same weights; without ``checkpoint.at_end`` they stay."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """Type of the published weights. Engines convert them to their own type. ``auto``: the type that the learner
    computes in. With bfloat16 here and ``compute_dtype: float32`` engines follow late: most updates change a weight by
    less than half of the distance between two bfloat16 numbers, so what is published stays as it was."""
    lora: Literal["merged", "adapter"] = "merged"
    """With adapters (``learner.lora.rank`` above 0). ``merged``: whole weights with the adapters merged in, for every
    engine. ``adapter``: only the adapters, for vLLM servers, which serve them as the model ``adapter``."""
    timeout_seconds: float = Field(120.0, gt=0)
    """Seconds that an engine has to load a version. The run does not wait longer for a slow engine, which is tried
    again in the background."""
    probe_nats_max: float | None = Field(0.5, gt=0)
    """Largest mean difference, in nats, between the log-probabilities that learner and engine give the tokens of a
    short fixed text after a publication. An engine beyond it serves other weights: it gets no requests until it has
    loaded them again. Costs one prefill of 32 tokens in each engine and one forward pass of the learner. None: off."""

    @property
    def served_name(self) -> str | None:
        """Name under which engines serve published adapters; None: the weights are whole and need none."""
        return "adapter" if self.lora == "adapter" else None


class CheckpointConfig(Section):
    """Checkpoints that the learner resumes from: float32 weights and the optimizer's state."""

    every: int = Field(10, ge=1)
    """Updates between checkpoints. After a crash, updates since the last checkpoint are repeated from the same
    groups."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept on disk. The best evaluated one is kept too (``evaluation.keep_best``)."""
    optimizer: bool = True
    """Save the optimizer's state, so that the learner resumes exactly. False: a third of the size with AdamW; a resumed
    learner starts with a fresh optimizer."""
    at_end: bool = True
    """Also write a checkpoint after the last update."""
    drain_seconds_max: float = Field(60.0, gt=0)
    """Seconds between SIGTERM and SIGKILL, for all processes together. A run that is stopped writes a checkpoint of its
    last update first, so set it above the time that one takes. The notice that SLURM gives and the grace of Kubernetes
    follow from it. A run whose processes obey stops sooner."""
