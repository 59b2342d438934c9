"""A trainer with everything that the run file asks for: policy, reference policy and critic, each only where needed."""

from __future__ import annotations

import logging
from pathlib import Path

from learner.backbone import DTYPES, Backbone, read_model
from learner.checkpoint import adapter_folder
from learner.critic import Critic
from learner.policy import Policy
from learner.reference import AdaptersOff, FrozenCopy, Reference
from learner.reference_server import ServerReference
from learner.trainer import Trainer, needed_by
from pipeline.config import RunConfig
from pipeline.config.learner import LoraConfig

log = logging.getLogger(__name__)


def make_trainer(config: RunConfig, initial_model: Path, checkpoint: Path | None) -> Trainer:
    """Weights of the checkpoint, or of the initial model; optimizer, counters and the other parts' states are restored
    by :func:`learner.checkpoint.restore_training`. Blocks for seconds.

    Raises :class:`ConfigurationError` or :class:`StoreError`.
    """
    learner, trust = config.learner, config.model.trust_remote_code
    if learner.lora.rank:
        adapters = None if checkpoint is None else adapter_folder(checkpoint)
        policy = Policy.load(initial_model, learner, trust_remote_code=trust, adapter_folder=adapters)
    else:
        folder = initial_model if checkpoint is None else checkpoint / "model"
        policy = Policy.load(folder, learner, trust_remote_code=trust)
    needed = needed_by(config)
    reference = make_reference(config, policy, initial_model) if "reference" in needed else None
    critic = make_critic(config, policy, initial_model) if "values" in needed else None
    return Trainer(policy, config, reference, critic)


def make_reference(config: RunConfig, policy: Policy, initial_model: Path) -> Reference:
    """As ``learner.reference`` says. Raises :class:`ConfigurationError`."""
    learner = config.learner
    options, tokens_max = learner.reference, learner.tokens_per_microbatch
    follows = options.refresh_every is not None
    source = options.source
    if source == "auto":
        source = "lora_off" if learner.lora.rank and not follows else "initial"
    log.info("reference policy: %s", source)
    if source == "lora_off":
        return AdaptersOff(policy, tokens_max)
    if source == "server":
        return ServerReference(options, policy.interrupt)
    folder = options.folder if options.folder is not None else initial_model
    model = read_model(folder, trust_remote_code=config.model.trust_remote_code)
    whole = learner.model_copy(update={"lora": LoraConfig(), "gradient_checkpointing": False})
    copy = Policy(model, whole, policy.device, policy.interrupt, DTYPES[options.dtype])
    return FrozenCopy(copy, policy, tokens_max, options.refresh_every)


def make_critic(config: RunConfig, policy: Policy, initial_model: Path) -> Critic:
    """As ``learner.critic`` says."""
    learner = config.learner
    if learner.critic.backbone == "none":
        return Critic(policy, learner, owns=False)
    model = read_model(initial_model, trust_remote_code=config.model.trust_remote_code).base_model
    return Critic(Backbone(model, learner, policy.device, policy.interrupt), learner, owns=True)
