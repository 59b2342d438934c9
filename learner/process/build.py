"""Builds the trainer of a run file: policy, and reference policy and critic where they are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.utils import logging as transformers_logging

from learner.checkpoints.checkpoint import CheckpointState, adapter_folder, restore_training
from learner.data.demonstrations import load_demonstrations
from learner.distributed.collectives import RankGroup
from learner.distributed.ranks import resolve_device
from learner.models.info import require_same_tokenizer
from learner.models.model_folder import ModelFolder
from learner.policy.fsdp import shard
from learner.policy.policy import DTYPES, Backbone, Policy
from learner.policy.reference import (
    AdaptersOff,
    AskedElsewhere,
    FrozenCopy,
    Reference,
    ServerReference,
    encoded_check_text,
)
from learner.training.critic import Critic
from learner.training.trainer import Trainer, needed_scores
from pipeline.config import RunConfig
from pipeline.config.learner import LoraConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.engine_keys import find_key
from pipeline.runtime.run_directory import RunDirectory

log = logging.getLogger(__name__)
B = TypeVar("B", bound=Backbone)


def make_trainer(
    config: RunConfig, initial_model: Path, checkpoint: Path | None, group: RankGroup | None = None
) -> Trainer:
    """Weights of the checkpoint, or of the initial model; optimizer, counters and the other parts' states are restored
    by :func:`learner.checkpoints.checkpoint.restore_training`. Blocks for seconds. With a ``group`` its ranks divide
    all models.

    Raises :class:`ConfigurationError` or :class:`StoreError`.
    """
    if group is not None:
        _check_ranks(config)
    policy = make_policy(config, initial_model, checkpoint, group)
    needed = needed_scores(config)
    reference = make_reference(config, policy, initial_model, group) if "reference" in needed else None
    critic = make_critic(config, policy, initial_model, group) if "values" in needed else None
    supervised = config.loss.supervised
    demonstrations = None
    if supervised.weight and supervised.demonstrations is not None:
        demonstrations = load_demonstrations(supervised.demonstrations, config, initial_model)
    if policy.ranks.shard:
        torch.manual_seed(config.run.seed + policy.ranks.shard)
    return Trainer(policy, config, reference, critic, demonstrations)


def make_policy(
    config: RunConfig, initial_model: Path, checkpoint: Path | None, group: RankGroup | None = None
) -> Policy:
    """Weights of the checkpoint, or of the initial model; adapters always lie over the latter."""
    learner, folder, adapters = config.learner, initial_model, None
    if checkpoint is not None:
        folder, adapters = (folder, adapter_folder(checkpoint)) if learner.lora.rank else (checkpoint / "model", None)
    device = resolve_device(learner.device)
    interrupt = None if group is None else group.interrupt
    make = partial(Policy, config=learner, device=device, interrupt=interrupt, adapter_folder=adapters)
    dtype = DTYPES[learner.lora.frozen_dtype if learner.lora.rank else "float32"]
    return _loaded(folder, config, device, group, make, dtype)


def _loaded(
    folder: Path,
    config: RunConfig,
    device: torch.device,
    group: RankGroup | None,
    make: Callable[[Any], B],
    dtype: torch.dtype = torch.float32,
) -> B:
    """``make`` of the model in ``folder``; with a ``group`` divided among its ranks, each of which reads its shards.
    Weights that get another ``dtype`` than float32 are read in it."""
    model_folder = ModelFolder(folder, trust_remote_code=config.model.trust_remote_code)
    if group is None and dtype is torch.float32:
        return make(model_folder.read(device))
    backbone = make(model_folder.empty())
    if group is not None:
        shard(backbone, group)
    model_folder.fill(backbone.model, device)
    if group is None:
        backbone.model.to(device)
    return backbone


def make_reference(config: RunConfig, policy: Policy, initial_model: Path, group: RankGroup | None = None) -> Reference:
    """The reference policy of ``learner.reference``. Raises :class:`ConfigurationError`."""
    learner = config.learner
    options = learner.reference
    if options.url is not None:
        if policy.ranks.rank:
            return AskedElsewhere()
        ours = options.url.rstrip("/") in config.engine.addresses()
        key = find_key(config.engine, "learner_key") if ours else None
        check_ids = encoded_check_text(config, initial_model)
        return ServerReference(options, policy.interrupt, key, check_ids, config.context_max)
    if options.folder is None and learner.lora.rank:
        return AdaptersOff(policy)
    folder = initial_model
    if options.folder is not None:
        folder = options.folder
        require_same_tokenizer(folder, initial_model, trust_remote_code=config.model.trust_remote_code)
    whole = learner.model_copy(update={"lora": LoraConfig(), "gradient_checkpointing": False})
    dtype = DTYPES[options.dtype]
    make = partial(Policy, config=whole, device=policy.device, interrupt=policy.interrupt, dtype=dtype)
    return FrozenCopy(_loaded(folder, config, policy.device, group, make, dtype))


def make_critic(config: RunConfig, policy: Policy, initial_model: Path, group: RankGroup | None = None) -> Critic:
    """The critic of ``learner.critic``."""
    learner = config.learner
    if learner.critic.backbone == "none":
        return Critic(policy, learner, owns=False)
    options: dict[str, Any] = {"config": learner, "device": policy.device, "interrupt": policy.interrupt}
    backbone = _loaded(initial_model, config, policy.device, group, lambda model: Backbone(model.base_model, **options))
    return Critic(backbone, learner, owns=True)


def _check_ranks(config: RunConfig) -> None:
    """Raises :class:`ConfigurationError`."""
    learner = config.learner
    if learner.optimizer == "adamw_8bit":
        raise ConfigurationError("learner.optimizer adamw_8bit is for one rank: set adamw, or learner.ranks: 1")


def load_trainer(
    config: RunConfig, directory: RunDirectory, checkpoint: Path | None, group: RankGroup | None = None
) -> tuple[Trainer, CheckpointState | None]:
    """A trainer, and the state of the ``checkpoint`` that it resumes from. All ranks load the one of rank 0."""
    transformers_logging.disable_progress_bar()
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    if group is not None:
        name = group.broadcast_text("" if checkpoint is None else checkpoint.name)
        checkpoint = directory.checkpoints / name if name else None
    trainer = make_trainer(config, directory.model, checkpoint, group)
    if checkpoint is None:
        return trainer, None
    log.info("resuming from %s", checkpoint)
    return trainer, restore_training(checkpoint, trainer)
