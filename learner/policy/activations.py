"""Tensors that a model keeps of a token for the backward pass: a residual stream in the compute type, and none that is
cheap to compute again.

Autocast alone leaves the residual stream in float32: embeddings and norms have float32 weights, and a sum takes the
wider type. Here the embeddings are cast, so every later sum has the compute type, as in engines; a norm still computes
in float32, and its output is cast.

A linear layer keeps its input for the gradient of its weights. Where that is the output of a norm, or the product of a
gated MLP (Shazeer 2020, arXiv:2002.05202), the layer keeps nothing: the backward pass computes the input again, once
for all layers that read it and for the gradient of the norm or product, from what these keep (as selective
recomputation does, Korthikanti et al. 2022, arXiv:2205.05198). Nor does it keep its weights in the compute type. Of a
token a layer of Llama then keeps ``4 H + 4 I + 4 Q + 4 K`` bytes in 16 bits (hidden, intermediate, query and key size),
not ``8 H + 8 I + 4 Q + 4 K``.

Code that ``torch.compile`` compiles is left as it is: the compiler chooses what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP


def keep_little(model: Any) -> None:
    """Let ``model`` add up its residual stream in autocast's type, and compute cheap values again in the backward pass.
    Results of the forward pass are those of the model as it was, but for the types."""
    model.get_input_embeddings().register_forward_hook(_cast)
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module).forward is torch.nn.Linear.forward and module is not head:
            module.forward = partial(_linear, module)
        elif _same_code(type(module).forward, LlamaMLP.forward):
            module.forward = partial(_gated, module)
        elif _same_code(type(module).forward, Phi3MLP.forward):
            module.forward = partial(_fused_gated, module)
    for norm in norms_of(model):
        norm.forward = partial(_norm, norm.forward, norm)


def norms_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Normalizations, by the names of their classes."""
    return (part for part in module.modules() if "Norm" in type(part).__name__ and not list(part.children()))


def recomputed(work: Callable[..., Tensor], *inputs: Tensor, weights: tuple[Tensor, ...] = ()) -> Tensor:
    """``work(*inputs)``, of which the backward pass has ``inputs`` only; ``work`` reads ``weights`` by itself."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return work(*inputs)
    out: Tensor = _Recomputed.apply(work, len(inputs), *inputs, *weights)  # type: ignore[no-untyped-call]
    return out


def _same_code(one: FunctionType, other: FunctionType) -> bool:
    """transformers copies the code of an MLP from model to model."""
    a, b = one.__code__, other.__code__
    return (a.co_code, a.co_names) == (b.co_code, b.co_names)


def _compute_type(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _cast(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(_compute_type(output))


def _norm(forward: Callable[..., Tensor], norm: torch.nn.Module, *args: Any) -> Tensor:
    if len(args) > 1:
        return forward(*args)

    def work(x: Tensor) -> Tensor:
        if isinstance(norm, FSDPModule):
            norm.unshard()  # in the backward pass a linear layer reads the output before FSDP expects it
        out = forward(x)
        return out.to(_compute_type(out))

    return recomputed(work, args[0], weights=tuple(norm.parameters(recurse=False)))


def _gated(mlp: Any, x: Tensor) -> Any:
    return mlp.down_proj(recomputed(lambda gate, up: mlp.act_fn(gate) * up, mlp.gate_proj(x), mlp.up_proj(x)))


def _fused_gated(mlp: Any, x: Tensor) -> Any:
    def product(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return up * mlp.activation_fn(gate)  # type: ignore[no-any-return]

    return mlp.down_proj(recomputed(product, mlp.gate_up_proj(x)))


def _linear(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.nn.functional.linear(x, layer.weight, layer.bias)
    source: Any = (x._base if x._is_view() else x).grad_fn  # type: ignore[union-attr]
    if getattr(source, "_forward_cls", None) is not _Recomputed or source.size != x.numel() or not x.is_contiguous():
        source = None
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias, source)  # type: ignore[no-untyped-call]
    return out


class _Recomputed(torch.autograd.Function):
    """``work`` of the first ``count`` tensors; the others are weights that it reads."""

    @staticmethod
    def forward(ctx: Any, work: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
        device = tensors[0].device.type
        ctx.save_for_backward(*tensors[:count])
        ctx.work, ctx.weights, ctx.made = work, tensors[count:], None
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        out = work(*tensors[:count])
        ctx.size = out.numel()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, out = _made_again(ctx)
        ctx.made = None
        needed = ctx.needs_input_grad[2:]
        sought = [tensor for tensor, wanted in zip((*inputs, *ctx.weights), needed, strict=True) if wanted]
        found = iter(torch.autograd.grad(out, sought, grads[0]))
        return (None, None, *(next(found) if wanted else None for wanted in needed))


def _made_again(node: Any) -> tuple[list[Tensor], Tensor]:
    """Inputs and output of a :class:`_Recomputed`, connected for autograd; made once, because checkpointing hands out
    what is kept once."""
    if node.made is None:
        needed = node.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(wanted) for x, wanted in zip(node.saved_tensors, needed, strict=False)]
        enabled, dtype = node.autocast
        with torch.enable_grad(), torch.autocast(inputs[0].device.type, dtype, enabled):
            node.made = inputs, node.work(*inputs)
    made: tuple[list[Tensor], Tensor] = node.made
    return made


class _Linear(torch.autograd.Function):
    """``x Wᵀ + b`` in autocast's type. ``source``: the node that computes ``x`` again; None: it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, source: Any) -> Tensor:
        dtype = _compute_type(x)
        x = x.to(dtype)
        ctx.source = source if ctx.needs_input_grad[1] else None
        keeps = ctx.needs_input_grad[1] and source is None
        ctx.save_for_backward(weight, *([x] if keeps else []))
        with torch.autocast(x.device.type, enabled=False):
            return torch.nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad = grads[0].reshape(-1, weight.shape[0])
        grad_x = grad_weight = grad_bias = None
        if need_weight:
            x = kept[0] if ctx.source is None else _made_again(ctx.source)[1].detach()
            grad_weight = grad.t() @ x.reshape(-1, weight.shape[1])
        if need_x:
            grad_x = (grad @ weight.to(grad.dtype)).view(*grads[0].shape[:-1], weight.shape[1])
        if need_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None
