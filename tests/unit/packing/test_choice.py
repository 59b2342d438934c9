import pytest
import torch
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

from learner.data.microbatch import SHARED_TOKENS_MIN, Form
from learner.policy.attention import NAME, packed_attention
from learner.policy.policy import Policy
from pipeline.config.learner import LoraConfig
from pipeline.errors import ConfigurationError


def policy_with(kit, model, **options):
    return Policy(model, kit.learner_config(**options), torch.device("cpu"))


def test_full_attention_decoders_are_packed(kit):
    policy = policy_with(kit, kit.tiny_model())
    assert policy.form == Form(packed=True, shared_min=SHARED_TOKENS_MIN)


@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, {"compute_dtype": "bfloat16"}, {"lora": LoraConfig(rank=2)}]
)
def test_the_trial_passes_with_what_a_run_file_may_ask_for_and_leaves_no_gradient(kit, options):
    policy = policy_with(kit, kit.tiny_model(), packing="packed", **options)
    assert policy.form.packed
    assert all(p.grad is None for p in policy.model.parameters())


def test_a_wrong_backward_pass_is_found(kit):
    """Right values with a wrong gradient are not packed."""

    def detached(*arguments, **options):
        out, _ = packed_attention(*arguments, **options)
        return (out.detach() if "runs" in options else out), None

    AttentionInterface.register(NAME, detached)
    try:
        assert policy_with(kit, kit.tiny_model()).form == Form()
    finally:
        AttentionInterface.register(NAME, packed_attention)


def test_padded_rows_leave_the_attention_as_it_is(kit):
    model = kit.tiny_model()
    before = model.config._attn_implementation
    assert policy_with(kit, model, packing="padded").form == Form()
    assert model.config._attn_implementation == before


def test_a_model_whose_layers_see_other_rows_is_padded(kit):
    """As one whose layers do not hand the runs on to their attention."""
    AttentionInterface.register(NAME, lambda *a, runs=None, **k: packed_attention(*a, **k))
    try:
        model = kit.tiny_model()
        before = model.config._attn_implementation
        assert policy_with(kit, model).form == Form()
        assert model.config._attn_implementation == before
        with pytest.raises(ConfigurationError, match="differ"):
            policy_with(kit, kit.tiny_model(), packing="packed")
    finally:
        AttentionInterface.register(NAME, packed_attention)


def test_learned_positions_are_packed_too(kit):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    assert policy_with(kit, model).form.packed


def test_a_saved_model_does_not_name_our_attention(kit, tmp_path):
    policy_with(kit, kit.tiny_model()).model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
