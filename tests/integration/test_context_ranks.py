"""Long rows divided over ranks: the same numbers as one process, in every layout."""

import orjson
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.integration.ranks_program import run
from tests.integration.test_ranks import GAE, LORA, assert_same, found, train

SIZE = dict(
    vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=8, initializer_range=0.4,
    max_position_embeddings=128,
)  # fmt: skip


def case(**options):
    sections = options.pop("sections", {})
    model = options.pop("model", "heads")
    facts = {name: options.pop(name) for name in ("rows", "recorded", "poison") if name in options}
    groups = {} if "rows" in facts else {"groups": 2}
    return {
        **groups,
        **facts,
        "model": model,
        "learner": {"ranks": 4, "context_ranks": 4, **options},
        "sections": sections,
    }


CASES = {
    "shared": case(),
    "padded": case(packing="padded"),
    "alone": case(rows=9, tokens_per_microbatch=6),
    "pairs": case(context_ranks=2, packing="padded"),
    "pairs_shared": case(context_ranks=2, tokens_per_microbatch=35),
    "all_long": case(tokens_per_microbatch=4),
    "all_short": case(tokens_per_microbatch=200),
    "checkpointing": case(gradient_checkpointing=True),
    "sequences": case(sections={"loss": {"policy": "gspo", "aggregation": "sequence_mean", "entropy_bonus": 0.05}}),
    "masks": case(
        epochs=2,
        minibatches=2,
        sections={"loss": {"off_policy": "second_moment", "kl": "loss"}, "replay": {"ess_guard": {"enabled": True}}},
    ),
    "critic": case(sections=GAE),
    "critic_on_the_policy": case(sections=GAE, critic={"backbone": "none"}),
    "adapters": case(lora=LORA),
    "windows": case(model="windows", tokens_per_microbatch=30),
    "experts": case(
        model="experts",
        rows=9,
        recorded=True,
        tokens_per_microbatch=1,
        routing_replay=True,
        gradient_checkpointing=True,
        sections={"loss": {"load_balancing": 0.5}},
    ),
    "not_finite": case(rows=9, tokens_per_microbatch=6, poison=1),
}


def models():
    torch.manual_seed(0)
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
    windows = dict(sliding_window=7, query_pre_attn_scalar=8)
    return {
        "heads": LlamaForCausalLM(LlamaConfig(**SIZE, intermediate_size=32, num_key_value_heads=2)),
        "windows": Gemma2ForCausalLM(Gemma2Config(**SIZE, **windows, intermediate_size=32, num_key_value_heads=1)),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, **experts, num_key_value_heads=4)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fork_server):
    """Results of one and four processes."""
    folder = tmp_path_factory.mktemp("context")
    for name, model in models().items():
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")
    torch.set_num_threads(1)
    (folder / "cases4.json").write_bytes(orjson.dumps(CASES))
    run(folder, CASES, None)
    train(fork_server, "4", folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_rows_divided_over_ranks_make_the_updates_of_one_process(folder, name):
    assert_same(found(folder, "4", name), found(folder, "1", name))
