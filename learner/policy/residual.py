"""The residual stream in the compute type, and norms that keep nothing but their input for the backward pass.

Autocast alone leaves both in float32: embeddings and norms have float32 weights, and a sum takes the wider type. Here
the embeddings are cast, so every later sum has the compute type, as in engines; a norm still computes in float32, and
its output is cast. Of a token a layer then keeps ``8 H`` bytes for its two norms and their outputs, not ``26 H``: the
float32 values inside of a norm, and a copy of its output for each linear layer that reads it, are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor


def narrow_residual(model: Any, dtype: torch.dtype) -> None:
    """Let ``model`` add up its residual stream in ``dtype`` wherever it runs under autocast."""
    model.get_input_embeddings().register_forward_hook(partial(_cast, dtype))
    for norm in norms_of(model):
        norm.forward = partial(_narrow_norm, norm.forward, dtype, norm)


def norms_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Normalizations, by the names of their classes."""
    return (part for part in module.modules() if "Norm" in type(part).__name__ and not list(part.children()))


def _cast(dtype: torch.dtype, module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(dtype) if torch.is_autocast_enabled(output.device.type) else output


def _narrow_norm(forward: Callable[..., Tensor], dtype: torch.dtype, norm: torch.nn.Module, *args: Any) -> Tensor:
    x = args[0]
    if len(args) > 1 or not torch.is_autocast_enabled(x.device.type):
        return forward(*args)
    if not torch.is_grad_enabled():
        return forward(x).to(dtype)
    out: Tensor = _Recomputed.apply(forward, dtype, x, *norm.parameters(recurse=False))  # type: ignore[no-untyped-call]
    return out


class _Recomputed(torch.autograd.Function):
    """``forward(x)`` in ``dtype``; ``forward`` reads ``weights``, and is called again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[Tensor], Tensor], dtype: torch.dtype, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.forward, ctx.weights = forward, weights
        return forward(x).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        wanted = [x.detach().requires_grad_(ctx.needs_input_grad[2])]
        wanted += [weight for weight, needed in zip(ctx.weights, ctx.needs_input_grad[3:], strict=True) if needed]
        with torch.enable_grad(), torch.autocast(x.device.type, dtype=grads[0].dtype):
            out = ctx.forward(wanted[0])
        sought = [tensor for tensor in wanted if tensor.requires_grad]
        found = iter(torch.autograd.grad(out, sought, grads[0].to(out.dtype)))
        return (None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[2:]))
