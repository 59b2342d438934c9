"""Log-probability and entropy of sampled tokens, from hidden states, a slice of the vocabulary matrix at a time.

Dimensions: S sampled tokens, H hidden size, V vocabulary. Only ``[rows_max, V]`` exists at once, in the forward and,
recomputed, in the backward pass; what is kept between them is ``[S, H]`` and three numbers per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer: ``logits = softcap · tanh((scale · (x Wᵀ + b)) / softcap)``."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    """Cohere's ``logit_scale``, or one over Granite's ``logits_scaling``."""
    softcap: float | None = None
    """Gemma's ``final_logit_softcapping``."""


def sampled_logprobs(
    hidden_SH: Tensor,
    head: Head,
    targets_S: Tensor,
    temperatures_S: Tensor,
    *,
    rows_max: int,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``(log p(target), entropy)`` in nats of ``softmax(logits / temperature)``, each float32 ``[S]`` (float64 for
    float64 input).

    The matrix products run in ``compute_dtype`` (None: the type of ``hidden_SH``), everything after them in float32.
    Both outputs are differentiable in ``hidden_SH`` and in the head's weight and bias.
    """
    logprobs, entropy = _SampledLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_SH,
        head.weight_VH,
        head.bias_V,
        targets_S,
        temperatures_S,
        head.scale,
        head.softcap,
        rows_max,
        compute_dtype,
    )
    return logprobs, entropy


def _logits(h: Tensor, w: Tensor, bias: Tensor | None, scale: float, softcap: float | None, out: torch.dtype) -> Tensor:
    """Float ``[rows, V]`` before temperature, and after the softcap."""
    logits = (h @ w.t()).to(out)
    if bias is not None:
        logits += bias.to(out)
    if scale != 1.0:
        logits *= scale
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits


class _SampledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        scale: float,
        softcap: float | None,
        rows_max: int,
        compute_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype or hidden.dtype
        out = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            logprobs = torch.empty(len(targets), dtype=out, device=hidden.device)
            lse, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
            for start in range(0, len(targets), rows_max):
                part = slice(start, start + rows_max)
                z = _logits(h[part], w, bias, scale, softcap, out).div_(temperatures[part, None].to(out))
                lse[part] = torch.logsumexp(z, dim=-1)
                logprobs[part] = z.gather(1, targets[part, None]).squeeze(1) - lse[part]
                p = torch.exp(z - lse[part, None])
                entropy[part] = lse[part] - p.mul_(z).sum(dim=-1)
        ctx.save_for_backward(h, w, weight, bias, targets, temperatures, lse, entropy)
        ctx.scale, ctx.softcap, ctx.rows_max, ctx.hidden_dtype = scale, softcap, rows_max, hidden.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        h, w, weight, bias, targets = ctx.saved_tensors[:5]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 9
        grad_h = torch.empty_like(h) if need_hidden else None
        grad_w = torch.zeros_like(w, dtype=weight.dtype) if need_weight else None
        grad_b = torch.zeros_like(bias) if need_bias else None
        with torch.autocast(h.device.type, enabled=False):
            for start in range(0, len(targets), ctx.rows_max):
                part = slice(start, start + ctx.rows_max)
                g = _grad_logits(ctx, part, grad_logprobs, grad_entropy)
                if grad_b is not None:
                    grad_b += g.sum(dim=0).to(grad_b.dtype)
                g = g.to(h.dtype)
                if grad_h is not None:
                    grad_h[part] = g @ w
                if grad_w is not None:
                    grad_w += g.t() @ h[part]
        return (None if grad_h is None else grad_h.to(ctx.hidden_dtype), grad_w, grad_b, *(None,) * 6)


def _grad_logits(ctx: Any, part: slice, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """d loss / d (x Wᵀ + b) of some rows, float ``[rows, V]``; with p = softmax(z):

    d log p_t / d z = 1_t - p;  d H / d z = -p (log p + H);  d z / d logits = 1 / temperature, then softcap and scale.
    """
    h, w, _, bias, targets, temperatures, lse, entropy = ctx.saved_tensors
    inverse = 1.0 / temperatures[part, None].to(lse.dtype)
    capped = _logits(h[part], w, bias, ctx.scale, ctx.softcap, lse.dtype)
    slope = 1.0 - (capped / ctx.softcap).square_() if ctx.softcap is not None else None
    log_p = capped.mul_(inverse).sub_(lse[part, None])
    if grad_entropy is None:
        assert grad_logprobs is not None
        g = log_p.exp_().mul_(-grad_logprobs[part, None])
    else:
        p = log_p.exp()
        g = log_p.add_(entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
        if grad_logprobs is not None:
            g.addcmul_(p, grad_logprobs[part, None], value=-1.0)
    if grad_logprobs is not None:
        g.scatter_add_(1, targets[part, None], grad_logprobs[part, None].to(g.dtype))
    g *= inverse * ctx.scale
    return g if slope is None else g.mul_(slope)
