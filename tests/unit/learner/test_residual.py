"""The residual stream in the compute type: norms keep only their input, and lose nothing but the last bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from learner.policy.residual import narrow_residual

BFLOAT16 = torch.bfloat16


class Normed(nn.Module):
    """A model of one norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.norm = nn.Embedding(3, 16), norm

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings


def passed(norm: nn.Module, x: Tensor, *, cast: bool) -> list[Tensor]:
    """Output in bfloat16, and gradients of the input and of the norm's weights."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=BFLOAT16):
        out = norm(x)
        out = out.to(BFLOAT16) if cast else out
    weights = torch.linspace(-1, 2, out.numel()).view_as(out).to(BFLOAT16)
    return [out, *torch.autograd.grad(out, [x, *norm.parameters()], weights)]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
def test_a_narrow_norm_has_the_values_and_gradients_of_the_plain_one_bit_for_bit(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm, x = kind(16), torch.randn(5, 16, dtype=dtype)
    for p in norm.parameters():
        nn.init.normal_(p)
    expected = passed(norm, x, cast=True)
    narrow_residual(Normed(norm), BFLOAT16)
    for came, wanted in zip(passed(norm, x, cast=False), expected, strict=True):
        assert came.dtype == wanted.dtype and torch.equal(came, wanted)
    assert norm(x.float()).dtype == torch.float32, "only autocast narrows"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_layer_adds_in_the_compute_type(kit: SimpleNamespace, checkpointing: bool) -> None:
    found: list[torch.dtype] = []
    policy = kit.tiny_policy(compute_dtype="bfloat16", gradient_checkpointing=checkpointing)

    def seen(layer: nn.Module, inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).dtype)

    for layer in policy.layers:
        layer.register_forward_hook(seen)
    policy.score_rows(kit.make_rows(2))
    assert found and set(found) == {BFLOAT16}


def test_scores_are_about_as_far_from_those_of_float32_as_with_a_float32_stream(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = kit.make_rows(40)
    exact = kit.tiny_policy(compute_dtype="float32").score_rows(rows)
    narrow = kit.tiny_policy(compute_dtype="bfloat16").score_rows(rows)
    monkeypatch.setattr("learner.policy.policy.narrow_residual", lambda model, dtype: None)
    wide = kit.tiny_policy(compute_dtype="bfloat16").score_rows(rows)
    for expected, came, before in zip(exact, narrow, wide, strict=True):
        assert abs(came - expected).mean() < 2 * abs(before - expected).mean()
