"""Random models in the shapes of published ones, and the arithmetic that a step of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learner.data.microbatch import PassCost
from learner.data.rows import Row

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    "135m": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152},
    "0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936},
    "0.6b": {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "1.5b": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936},
    "1.7b": {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "7b": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "moe": {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 2,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151_936, "tie_word_embeddings": False},
    "tiny-moe": {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
                 "num_experts_per_tok": 2, "vocab_size": 512},
}  # fmt: skip
"""Shapes of SmolLM2-135M, Qwen2.5-0.5B, Qwen3-0.6B, Qwen2.5-1.5B, Qwen3-1.7B, Qwen2.5-7B and two layers of
Qwen3-30B-A3B, and tiny ones for trying programs."""


def make_config(shape: str, **changes: Any) -> Any:
    """Configuration of a decoder; ``changes`` replace entries of its shape."""
    from transformers import AutoConfig

    options = {"tie_word_embeddings": True, "max_position_embeddings": 32_768, **SHAPES[shape], **changes}
    return AutoConfig.for_model(**options, dtype="float32")


def make_model(shape: str, device: str = "cpu", **changes: Any) -> Any:
    """A decoder of random weights, float32, made on ``device``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(make_config(shape, **changes), dtype=torch.float32)


def write_model(shape: str, folder: Path, **changes: Any) -> None:
    make_model(shape, **changes).save_pretrained(folder)


def step_flops(cost: PassCost, rows: Sequence[Row]) -> int:
    """Multiplications and additions of the model for one step, forward and backward. Recomputation is not counted, nor
    is anything saved by sharing."""
    return cost.learning * sum(cost.prefix(len(row)) + cost.sampled * row.n_sampled for row in rows)
