"""Log-probability and entropy of sampled tokens, from hidden states, a tile of the logits at a time.

Dimensions: S sampled tokens, H hidden size, V vocabulary. A tile is some rows of S by some columns of V. The forward
pass, and the backward pass, which computes the logits again, hold a few tensors of one tile; what is kept between them
is ``[S, H]`` and three numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE = {"cpu": 2**20, "cuda": 2**25}
"""Logits of a tile by type of device: in the cache of a core; enough to occupy a GPU."""
ROWS = {"cpu": 512, "cuda": 4096}
"""Rows of a tile at most, by type of device: the gradient of a column is added up once for so many."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer: ``logits = softcap · tanh((scale · (x Wᵀ + b)) / softcap)``."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    """Cohere's ``logit_scale``, Falcon-H1's ``lm_head_multiplier``, HyperCLOVA X's ``logits_scaling``, or one over
    Granite's or Inkling's ``logits_mup_width_multiplier``."""
    softcap: float | None = None
    """Gemma's ``final_logit_softcapping``, RecurrentGemma's ``logits_soft_cap``, xLSTM's ``output_logit_soft_cap``."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int


def tile_of(n_tokens: int, vocabulary: int, device: torch.device) -> Tile:
    kind = device.type if device.type in TILE else "cuda"
    rows = max(1, min(n_tokens, ROWS[kind]))
    return Tile(rows, min(vocabulary, TILE[kind] // rows))


def sampled_logprobs(
    hidden_SH: Tensor,
    head: Head,
    targets_S: Tensor,
    temperatures_S: Tensor | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """``(log p(target), entropy)`` in nats of ``softmax(logits / temperature)``, each float32 ``[S]`` (float64 for
    float64 input). Without temperatures they are 1.

    The matrix products run in ``compute_dtype`` (None: the type of ``hidden_SH``), everything after them in float32.
    Both outputs are differentiable in ``hidden_SH`` and in the head's weight and bias.
    """
    logprobs, entropy = _SampledLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_SH,
        head.weight_VH,
        head.bias_V,
        targets_S,
        temperatures_S,
        head,
        compute_dtype or hidden_SH.dtype,
        tile or tile_of(len(targets_S), len(head.weight_VH), hidden_SH.device),
    )
    return logprobs, entropy


class _SampledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor | None,
        head: Head,
        dtype: torch.dtype,
        tile: Tile,
    ) -> tuple[Tensor, Tensor]:
        out = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        temperatures = None if temperatures is None else temperatures.to(out)[:, None]
        h = hidden.to(dtype)
        target_logits = torch.zeros(len(targets), dtype=out, device=hidden.device)
        lse = torch.full_like(target_logits, -torch.inf, dtype=torch.float64)
        entropy = torch.zeros_like(lse)
        for rows, columns, _, z, _ in _tiles(h, weight, bias, temperatures, head, tile):
            p = torch.softmax(z, dim=-1, dtype=out)
            top, at = z.max(dim=-1, keepdim=True)
            lse_here = (top - p.gather(1, at).log_()).squeeze(1)
            inside, place = _places(targets[rows], columns)
            target_logits[rows] = torch.where(inside, z.gather(1, place).squeeze(1).to(out), target_logits[rows])
            entropy_here = torch.special.entr(p, out=p).sum(dim=-1)
            lse[rows], entropy[rows] = _joined(lse[rows], entropy[rows], lse_here.double(), entropy_here.double())
            del z, p  # else they would live beside those of the next tile
        lse_out = lse.to(out)
        logprobs = (target_logits - lse).to(out)
        entropy_out = entropy.to(out)
        ctx.save_for_backward(h, weight, bias, targets, temperatures, lse_out, entropy_out, logprobs)
        ctx.head, ctx.tile, ctx.hidden_dtype = head, tile, hidden.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """With p = softmax(z): d log p_t / d z = 1_t - p;  d H / d z = -p (log p + H);  d z / d logits =
        1 / temperature, then softcap and scale. What is the same for a whole row is multiplied outside of the tiles."""
        grad_logprobs, grad_entropy = grads
        h, weight, bias, targets, temperatures, lse, entropy, logprobs = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        factor = torch.full_like(lse, -ctx.head.scale)
        if grad_logprobs is not None and grad_entropy is None:
            factor *= grad_logprobs
        if temperatures is not None:
            factor /= temperatures.squeeze(1)
        grad_h = torch.zeros_like(h, dtype=lse.dtype) if need_hidden else None
        grad_w, total = torch.zeros_like(weight) if need_weight else None, lse
        grad_b = torch.zeros_like(bias) if need_bias else None
        scaled_h = (h * factor[:, None]).to(h.dtype)
        with torch.autocast(h.device.type, enabled=False):
            for rows, columns, w, z, capped in _tiles(h, weight, bias, temperatures, ctx.head, ctx.tile):
                log_p = z.sub_(lse[rows, None]) if z.dtype == lse.dtype else z - lse[rows, None]
                inside, place = _places(targets[rows], columns)
                if grad_entropy is None:
                    # p - 1 of a target is exact before it is rounded to the compute type
                    here = torch.where(inside, logprobs[rows].expm1(), log_p.gather(1, place).squeeze(1).exp())
                    g = log_p.exp_()
                    g.scatter_(1, place, here[:, None])
                else:
                    more = grad_entropy[rows] * entropy[rows]
                    if grad_logprobs is not None:
                        more = more + grad_logprobs[rows]
                    p = log_p.exp()
                    g = log_p.mul_(grad_entropy[rows, None]).add_(more[:, None]).mul_(p)
                    if grad_logprobs is not None:
                        g.scatter_add_(1, place, torch.where(inside, -grad_logprobs[rows], 0.0)[:, None])
                if capped is not None:
                    g = g * (1.0 - (capped / ctx.head.softcap).square_())
                g = g.to(h.dtype)
                if grad_b is not None:
                    grad_b[columns] += (factor[rows] @ g.to(factor.dtype)).to(grad_b.dtype)
                if grad_h is not None:
                    grad_h[rows] += g @ w
                if grad_w is not None:
                    product = g.t() @ scaled_h[rows]
                    total = product.to(lse.dtype) if rows.start == 0 else total.add_(product)
                    if rows.stop == len(h):
                        grad_w[columns] = total
                p = None
                del z, log_p, g, capped
        if grad_h is not None:
            grad_h = grad_h.mul_(factor[:, None]).to(ctx.hidden_dtype)
        return (grad_h, grad_w, grad_b, *(None,) * 5)


def _tiles(
    h: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor | None, head: Head, tile: Tile
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor | None]]:
    """Rows and columns of each tile; the weights of the columns in the compute type; ``z = logits / temperature``, in
    the compute type where nothing but the product made it, else float; and the logits where they are capped."""
    out = torch.float64 if h.dtype == torch.float64 else torch.float32
    for columns in _parts(len(weight), tile.columns):
        w = weight[columns].to(h.dtype)
        for rows in _parts(len(h), tile.rows):
            with torch.autocast(h.device.type, enabled=False):
                z, capped = h[rows] @ w.t(), None
                if bias is not None:
                    z = z.to(out).add_(bias[columns])
                if head.scale != 1.0:
                    z = z.to(out).mul_(head.scale)
                if head.softcap is not None:
                    z = capped = z.to(out).div_(head.softcap).tanh_().mul_(head.softcap)
                if temperatures is not None:
                    z = z / temperatures[rows]
                elif capped is not None:
                    z = capped.clone()
            yield rows, columns, w, z, capped
            del z, capped


def _parts(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _places(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Mask of the targets within ``columns``, and their column there ``[rows, 1]``; of the others any column."""
    place = targets - columns.start
    inside = (place >= 0) & (place < columns.stop - columns.start)
    return inside, place.clamp(0, columns.stop - columns.start - 1)[:, None]


def _joined(lse: Tensor, entropy: Tensor, lse_here: Tensor, entropy_here: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the summed exponentials, and entropy, of the tokens of two sets together: H = Σ w (H_i - log w) for the
    probabilities w of the sets."""
    both = torch.logaddexp(lse, lse_here)
    log_w, log_w_here = lse - both, lse_here - both
    before = torch.where(log_w > -torch.inf, log_w.exp() * (entropy - log_w), 0.0)
    return both, before + log_w_here.exp() * (entropy_here - log_w_here)
