"""Operations of a forward pass, against those that PyTorch counts and against sums over what a mask shows."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from learner.policy.policy import pass_cost
from tests.support.families import FAMILIES, SMALL

TOKENS = 24
DENSE = (
    "SmolLM2", "Qwen3", "Mistral 7B 0.1", "Mistral 7B 0.3", "Gemma 2", "Gemma 3", "Phi-3.5", "OLMo 3", "Command R7B",
    "DeepSeek V3 (experts)",
)  # fmt: skip


def made(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**SMALL | dict(family.options) | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", DENSE)
def test_products_of_a_pass_are_those_that_pytorch_counts(name: str) -> None:
    """Eager attention multiplies all pairs, masked ones too."""
    layers = {"first_k_dense_replace": 2} if name.startswith("DeepSeek") else {}
    model = made(name, **layers)
    cost = pass_cost(model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.base_model(torch.zeros(1, TOKENS, dtype=torch.long))
    all_pairs = (cost.pair + sum(pair for _, pair in cost.windows)) * TOKENS**2
    assert counter.get_total_flops() == pytest.approx(cost.token * TOKENS + all_pairs, rel=2e-3)  # less rotary angles


@pytest.mark.parametrize(
    ("name", "windows"),
    [("Qwen3", (None, None)), ("Mistral 7B 0.1", (8, 8)), ("Phi-3.5", (8, 8)), ("Gemma 3", (8, None)),
     ("gpt-oss (experts)", (8, None)), ("LFM2", (0, None)), ("Qwen3.5", (0, None)), ("Nemotron 3", (0, 0, None, 0))],
)  # fmt: skip
def test_a_token_attends_to_the_keys_that_the_mask_of_its_layer_shows(
    name: str, windows: tuple[int | None, ...]
) -> None:
    cost, far = pass_cost(made(name)), torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    shown = sum(int(((far >= 0) & (far < (TOKENS if window is None else window))).sum()) for window in windows)
    assert cost.prefix(TOKENS) - cost.token * TOKENS == 4 * 4 * 8 * shown


def test_recurrent_and_convolved_layers_cost_their_weights_and_their_state() -> None:
    weights = sum(p.numel() for p in made("LFM2").model.layers.parameters() if p.ndim > 1)
    assert pass_cost(made("LFM2")).token == 2 * weights, "a kernel of a convolution reads as many tokens as it has"
    delta = made("Qwen3.5")
    weights = sum(p.numel() for p in delta.model.layers.parameters() if p.ndim > 1)
    assert pass_cost(delta).token == 2 * weights + 2 * 3 * (2 * 8 * 8), "three times two heads' state of 8 by 8"
    mamba, chosen = made("Nemotron 3"), 0
    for name, p in mamba.model.layers.named_parameters():
        chosen += 0 if p.ndim == 1 else p.numel() // (2 if "experts" in name and "shared" not in name else 1)
    assert pass_cost(mamba).token == 2 * chosen + 2 * 2 * (4 * 8 * 8), "twice four heads' state of 8 by 8"


def test_a_tower_of_images_costs_text_nothing() -> None:
    text = SMALL | dict(FAMILIES["Gemma 3"].options)
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "image_size": 8, "patch_size": 2}
    both = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(both)
        assert any("vision" in name for name, _ in model.named_parameters())
        assert pass_cost(model) == pass_cost(made("Gemma 3"))
