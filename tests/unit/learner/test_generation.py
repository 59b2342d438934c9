"""The model in training is called as any other: generation with a cache, and no dropout anywhere."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from learner.data.rows import Batch
from learner.policy.policy import Policy
from learner.training.trainer import Trainer

PROMPTS = torch.randint(0, 23, (3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])


def generated(model, *, use_cache):
    return model.generate(
        PROMPTS,
        attention_mask=MASK,
        max_new_tokens=40,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
        eos_token_id=None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_policy_generates_what_a_fresh_copy_of_its_weights_does(kit, packing, checkpointing, use_cache):
    """Prompts padded on the left, before training and after an update."""
    config = kit.run_config({"packing": packing, "gradient_checkpointing": checkpointing, "learning_rate": 0.05})
    trainer = Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)
    assert trainer.policy.form.packed == (packing == "packed")
    fresh = kit.tiny_model().eval()
    before = generated(fresh, use_cache=False)
    assert torch.equal(generated(trainer.policy.model, use_cache=use_cache), before)
    trainer.step(Batch(0, (), kit.make_rows(4)), 0)
    fresh.load_state_dict(trainer.policy.model.state_dict())
    after = generated(fresh, use_cache=False)
    assert torch.equal(generated(trainer.policy.model, use_cache=use_cache), after)
    assert not torch.equal(before, after)


@pytest.mark.parametrize(("checkpointing", "calls"), [(False, 1), (True, 2)])
def test_gradient_checkpointing_runs_each_layer_again_in_the_backward_pass(kit, checkpointing, calls):
    config = kit.run_config({"gradient_checkpointing": checkpointing, "packing": "padded"})
    trainer = Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)
    seen = []
    trainer.policy.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append(1))
    trainer.step(Batch(0, (), kit.make_rows(1)), 0)
    assert len(seen) == calls
    trainer.score(kit.make_rows(1))
    assert len(seen) == calls + 1


@pytest.mark.parametrize("checkpointing", [True, False])
def test_dropout_that_a_layer_hands_to_a_function_is_off_too(kit, checkpointing):
    """OPT has no layers of dropout: its modules hold the probability."""
    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=23,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            dropout=0.5,
            attention_dropout=0.5,
        )
    )
    config = kit.run_config({"gradient_checkpointing": checkpointing, "packing": "padded", "learning_rate": 1e-12})
    trainer = Trainer(Policy(model, config.learner, torch.device("cpu")), config)
    rows = kit.make_rows(4)
    expected = trainer.score(rows)
    learned = trainer.step(Batch(0, (), rows), 0).statistics
    assert learned.all.entropy.value == pytest.approx(
        sum(v * row.n_sampled for row, v in zip(rows, trainer.mean_entropies(rows).values(), strict=True))
        / sum(row.n_sampled for row in rows)
    )
    torch.testing.assert_close(torch.from_numpy(trainer.score(rows)), torch.from_numpy(expected))
