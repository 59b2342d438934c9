"""The weights of a backbone divided among ranks by FSDP2 (``torch.distributed.fsdp.fully_shard``).

Each decoder layer is gathered for its own time only, and so are the embeddings and the output layer where they have
weights of their own. What is left (the last norm, tied embeddings) belongs to a root module whose forward is a whole
scoring pass, because the output layer is applied outside of the model's forward.

Gradients are summed over ranks, not averaged: the weights of tokens have denominators of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from learner.distributed.collectives import RankGroup, sum_gradients
from learner.policy.policy import Backbone


class Root(torch.nn.Module):
    """Runs any work that reads ``model``'s own parameters, with FSDP's hooks around it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._inside = False

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()

    def run(self, work: Callable[[], Any]) -> Any:
        """``work``; inside of another run simply its call."""
        if self._inside:
            return work()
        self._inside = True
        try:
            return self(work)
        finally:
            self._inside = False
            if not torch.is_grad_enabled():
                # FSDP keeps the order of layers for the backward pass, and forgets it there: a pass without one would
                # leave it behind. Older versions of torch cannot: they gather one layer in vain.
                getattr(self, "reset_iter_state", lambda: None)()


def float32_modules(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules of a layer whose weights autocast does not cast: all of one dimension."""
    own = [(module, list(module.parameters(recurse=False))) for module in layer.modules()]
    return [module for module, weights in own if weights and all(p.ndim == 1 for p in weights)]


def shard(backbone: Backbone, group: RankGroup) -> None:
    """Divide the weights of ``backbone``; they must be the same on all ranks, or empty, and no optimizer may hold them
    yet.

    Master weights stay float32. Layers and an output layer of its own are gathered in the compute type, as autocast
    would cast them. The embeddings, the root, and the norms of each layer as one more unit, are gathered in float32, so
    that they have the type that they have in one process. Gradients are reduced in float32.
    """
    compute = None if backbone.compute_dtype is torch.float32 else backbone.compute_dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    model, root = backbone.model, Root(backbone.model)
    for layer in backbone.layers:
        norms = [] if compute is None else float32_modules(layer)
        if norms:
            fully_shard(norms, mesh=group.mesh, mp_policy=whole, reshard_after_forward=True)
        fully_shard(layer, mesh=group.mesh, mp_policy=policy, reshard_after_forward=True)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    run_head = None
    if head is not None and head.weight is not embeddings.weight:
        head.forward = _apply
        for module, kind in ((embeddings, whole), (head, policy)):
            fully_shard(module, mesh=group.mesh, mp_policy=kind, reshard_after_forward=True)
        run_head = head
    fully_shard(root, mesh=group.mesh, mp_policy=whole, reshard_after_forward=True)
    sum_gradients(root)
    backbone.divided(group, root, root.run, run_head)


def _apply(work: Callable[[Tensor], Any], hidden_SH: Tensor) -> Any:
    """Forward of a divided output layer. FSDP frees its weights once ``hidden_SH`` has its gradient."""
    return work(hidden_SH)
