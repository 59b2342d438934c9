"""Tensors kept for the backward pass: what is computed again is the same, and nothing but last bits is lost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from learner.observability.timing import Stopwatch
from learner.policy.activations import keep_little, recomputed
from learner.policy.lora import Adapters
from pipeline.config.learner import LoraConfig
from tests.support.families import FAMILIES, SMALL

BFLOAT16 = torch.bfloat16


class Whole(nn.Module):
    """A model of one part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.part = nn.Embedding(3, 16), part

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def get_output_embeddings(self) -> None:
        return None


def passed(part: Callable[[Tensor], Tensor], x: Tensor, weights: list[nn.Parameter], *, cast: bool) -> list[Tensor]:
    """Output in bfloat16, and gradients of the input and of the weights."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=BFLOAT16):
        out = part(x)
        out = out.to(BFLOAT16) if cast else out
    factors = torch.linspace(-1, 2, out.numel()).view_as(out).to(BFLOAT16)
    return [out, *torch.autograd.grad(out, [x, *weights], factors)]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, nn.LayerNorm, nn.Linear])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
def test_a_norm_and_a_linear_layer_have_the_values_and_gradients_of_the_plain_one_bit_for_bit(
    kind: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    part, x = kind(16, 16) if kind is nn.Linear else kind(16), torch.randn(5, 16, dtype=dtype)
    for p in part.parameters():
        nn.init.normal_(p)
    expected = passed(part, x, list(part.parameters()), cast=True)
    keep_little(Whole(part))
    for came, wanted in zip(passed(part, x, list(part.parameters()), cast=False), expected, strict=True):
        assert came.dtype == wanted.dtype and torch.equal(came, wanted)
    assert part(x.float()).dtype == torch.float32, "only autocast narrows"


def model_of(name: str) -> Any:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**SMALL | family.options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def gradients(model: Any, *, checkpointing: bool = False, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the gradients of a sum of them by the names of the weights."""
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=BFLOAT16, enabled=autocast):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    (hidden.float() * torch.linspace(-1, 2, hidden.shape[-1])).sum().backward()
    return hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Gemma 4"])
def test_every_family_has_the_values_and_gradients_of_the_plain_model(name: str) -> None:
    plain, little = model_of(name), model_of(name)
    keep_little(little)
    expected, wanted = gradients(plain)
    for checkpointing in (False, True):
        little.zero_grad()
        hidden, came = gradients(little, checkpointing=checkpointing)
        assert torch.equal(hidden, expected)
        assert came.keys() == wanted.keys()
        for n, gradient in wanted.items():
            assert (came[n] - gradient).norm() <= 1e-5 * gradient.norm(), n


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_in_the_compute_type_are_as_far_from_float32_as_those_of_autocast_alone(lora: bool) -> None:
    def far(change: Callable[[Any], None], *, autocast: bool) -> dict[str, Tensor]:
        model = model_of("Qwen3")
        if lora:
            Adapters(model, LoraConfig(rank=4))
            for n, p in model.named_parameters():
                if ".lora_B." in n:
                    nn.init.normal_(p, std=0.1)
        change(model)
        return gradients(model, autocast=autocast)[1]

    exact = far(lambda model: None, autocast=False)
    torch_alone, came = far(lambda model: None, autocast=True), far(keep_little, autocast=True)
    assert came.keys() == exact.keys() and came

    def distance(found: dict[str, Tensor]) -> float:
        return float(sum((found[n] - exact[n]).norm() / (exact[n].norm() + 1e-6) for n in exact))

    assert distance(came) < 1.5 * distance(torch_alone)


def test_what_is_computed_again_has_the_gradient_of_numeric_differences() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    layer = nn.Linear(6, 3, dtype=torch.float64)
    keep_little(Whole(layer))

    def two_readers(x: Tensor, weight: Tensor) -> Tensor:
        out = recomputed(lambda x: torch.nn.functional.silu(x) * weight, x, weights=(weight,))
        return layer(out) + layer(out.view(2, 2, 6)).view(4, 3).sin()

    assert torch.autograd.gradcheck(two_readers, (x, weight))


def kept_bytes(model: Any, tokens: int = 12) -> int:
    """Bytes that autograd keeps of a forward pass beside the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", dtype=BFLOAT16):
        model.base_model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)


@pytest.mark.parametrize("name", ["SmolLM2", "Phi-4"])
@pytest.mark.parametrize("lora", [False, True])
def test_neither_outputs_of_norms_nor_products_nor_weights_in_the_compute_type_are_kept(name: str, lora: bool) -> None:
    model = model_of(name)
    config = model.config
    if lora:
        Adapters(model, LoraConfig(rank=4))
    keep_little(model)
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    queries, keys = heads * size, config.num_key_value_heads * size
    token = 4 * config.hidden_size + 4 * config.intermediate_size + 4 * queries + 4 * keys + 4 * heads
    if name == "Phi-4":  # values are a part of what one layer gives, and attention's output is put in order
        token += 4 * queries + 2 * keys
    ranks = sum(m.out_features for n, m in model.named_modules() if n.endswith("lora_A.default"))
    found = (kept_bytes(model, 24) - kept_bytes(model, 12)) / 12
    outside = 2 * config.hidden_size + 4 * size + 8  # the last norm, rotations, ids
    assert found <= config.num_hidden_layers * token + 2 * ranks + outside + (2 * config.hidden_size if lora else 0)


def test_offload_moves_the_input_of_each_layer(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Size] = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(lambda tensor: moved.append(tensor.shape) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recorded)
    for checkpointing, expected in ((True, 0), ("offload", 1)):
        policy = kit.tiny_policy(gradient_checkpointing=checkpointing, packing="padded")
        (part,) = policy.microbatches(kit.make_rows(2), Stopwatch(policy.device))
        policy.hidden(part)
        inputs = [shape for shape in moved if shape == (*part.token_ids_BT.shape, policy.model.config.hidden_size)]
        assert len(inputs) >= expected * len(policy.layers)
        assert len(inputs) <= expected * (len(policy.layers) + 2), "nothing from within a layer"


@pytest.mark.slow
def test_compiled_layers_have_the_gradients_of_the_others() -> None:
    plain, compiled = model_of("SmolLM2"), model_of("SmolLM2")
    for model in (plain, compiled):
        keep_little(model)
    for layer in compiled.base_model.layers:
        layer.compile(backend="aot_eager")
    expected, came = gradients(plain)[1], gradients(compiled)[1]
    for n, gradient in expected.items():
        assert (came[n] - gradient).norm() <= 1e-5 * gradient.norm(), n


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
    monkeypatch.setattr("learner.policy.policy.keep_little", lambda model: None)
    wide = kit.tiny_policy(compute_dtype="bfloat16").score_rows(rows)
    for expected, came, before in zip(exact, narrow, wide, strict=True):
        assert abs(came - expected).mean() < 2 * abs(before - expected).mean()
