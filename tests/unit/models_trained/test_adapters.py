"""LoRA: the policy begins unchanged, only adapters learn, and what is published is what was trained."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Gemma3Config

from learner.data.microbatch import collate
from learner.policy.lora import Adapters
from learner.policy.policy import Policy
from learner.weights.publisher import write_weights
from pipeline.config.learner import LoraConfig
from pipeline.errors import ConfigurationError, FormatMismatch
from tests.support.families import FAMILIES, SMALL
from tests.unit.learner.conftest import learner_config, make_rows, tiny_model, tiny_policy
from tests.unit.models_trained.conftest import LORA, lora_policy


def part_of(rows):
    return collate(rows, [0.0] * len(rows), np.cumsum([0, *(row.n_sampled for row in rows)])[:-1].tolist())


def scores(policy, rows):
    with torch.no_grad():
        return policy.score(part_of(rows))[0]


def test_new_adapters_change_nothing_and_are_all_that_is_trained():
    rows = make_rows(4)
    policy = lora_policy()
    assert torch.equal(scores(policy, rows), scores(tiny_policy(), rows))
    names = [name for name, _ in policy.named_parameters]
    assert names
    assert all("lora_" in name for name in names)
    assert len(names) == 2 * 2 * len(LORA["targets"])


def test_without_targets_every_linear_layer_but_the_output_gets_one():
    policy = lora_policy(targets=())
    names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, _ in policy.named_parameters}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_tower_of_images_gets_no_adapter():
    text = SMALL | dict(FAMILIES["Gemma 3"].options)
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8, "patch_size": 2}
    both = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(both)
    Adapters(model, LoraConfig(rank=2))
    adapted = [name for name, _ in model.named_parameters() if ".lora_" in name]
    assert adapted and not any("vision" in name or "projector" in name for name in adapted)


def test_a_layer_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match=r"query.*q_proj"):
        lora_policy(targets=["query"])


@pytest.mark.parametrize("tie", [True, False])
def test_published_weights_score_like_the_policy_in_training(adapted, tmp_path, tie):
    rows = make_rows(5)
    policy = adapted()
    if not tie:
        torch.manual_seed(1)
        policy = Policy(tiny_model(tie=False), learner_config(lora=LoraConfig(**LORA)), torch.device("cpu"))
        with torch.no_grad():
            for p in policy.parameters:
                p.normal_(std=0.3)
    write_weights(policy.model, tmp_path / "w", policy.snapshot("float32"))
    merged = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "w"), learner_config(), torch.device("cpu"))
    torch.testing.assert_close(scores(merged, rows), scores(policy, rows), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores(merged, rows), scores(tiny_policy(), rows), atol=1e-2)
    whole = Policy(tiny_model(tie=tie), learner_config(), torch.device("cpu"))
    assert set(policy.snapshot("float32")) == set(whole.snapshot("float32"))


def test_a_saved_adapter_is_read_by_peft(adapted, tmp_path):
    rows = make_rows(3)
    policy = adapted()
    policy.adapters.save(tmp_path / "a", policy.adapters.snapshot(torch.float32))
    other = PeftModel.from_pretrained(tiny_model(), tmp_path / "a").get_base_model()
    plain = Policy(other, learner_config(), torch.device("cpu"))
    assert torch.equal(scores(plain, rows), scores(policy, rows))


def test_saved_adapters_are_taken_bit_for_bit_and_others_are_refused(adapted, tmp_path):
    policy = adapted()
    policy.adapters.save(tmp_path / "a", policy.adapters.snapshot(torch.float32))
    config = learner_config(lora=LoraConfig(**LORA))
    again = Policy(tiny_model(), config, torch.device("cpu"), adapter_folder=tmp_path / "a")
    for (name, mine), (other, theirs) in zip(policy.named_parameters, again.named_parameters, strict=True):
        assert name == other
        assert torch.equal(mine, theirs)
    with pytest.raises(FormatMismatch, match="rank"):
        Adapters(tiny_model(), LoraConfig(**{**LORA, "rank": 3}), tmp_path / "a")
    with pytest.raises(FormatMismatch, match="found none"):
        Adapters(tiny_model(), LoraConfig(**LORA), tmp_path)


def test_without_adapters_is_the_initial_policy_and_only_inside_the_block(adapted):
    rows = make_rows(3)
    policy = adapted()
    before = scores(policy, rows)
    with policy.without_adapters():
        assert torch.equal(scores(policy, rows), scores(tiny_policy(), rows))
    assert torch.equal(scores(policy, rows), before)
    assert all(p.requires_grad for p in policy.parameters)
    assert len(policy.parameters) == 2 * 2 * len(LORA["targets"])
    with pytest.raises(ConfigurationError, match="rank"), tiny_policy().without_adapters():
        pass


def test_training_leaves_the_frozen_weights_the_same_bits(config_of, initial, resume, train):
    trainer = resume(config_of({"lora": LORA}), initial)
    frozen = {n: p.detach().clone() for n, p in trainer.policy.model.named_parameters() if not p.requires_grad}
    adapters = [p.detach().clone() for p in trainer.policy.parameters]
    train(trainer, 2)
    trainer.policy.snapshot("bfloat16")
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.policy.model.named_parameters() if n in frozen)
    assert not all(torch.equal(a, b) for a, b in zip(adapters, trainer.policy.parameters, strict=True))


def test_frozen_weights_in_bfloat16_compute_what_float32_ones_do_and_adapters_stay_float32():
    """With weights that are bfloat16 numbers already."""
    rows, found = make_rows(4), []
    for dtype in ("float32", "bfloat16"):
        config = learner_config(lora=LoraConfig(**LORA, frozen_dtype=dtype), compute_dtype="bfloat16")
        model = tiny_model()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
        torch.manual_seed(0)
        policy = Policy(model, config, torch.device("cpu"))
        found.append((scores(policy, rows), policy.snapshot("float32")))
        assert all(p.dtype is torch.float32 for p in policy.parameters)
        kinds = {p.dtype for p in model.parameters() if not p.requires_grad}
        assert kinds == {getattr(torch, dtype)}
    torch.testing.assert_close(found[0][0], found[1][0], atol=0.05, rtol=0.05)
    assert all(torch.equal(t, found[1][1][name]) for name, t in found[0][1].items())
    with pytest.raises(ValueError, match="compute_dtype"):
        learner_config(lora=LoraConfig(**LORA, frozen_dtype="bfloat16"))


def test_gradients_of_adapters_do_not_need_stored_activations(config_of, initial, resume):
    """Gradient checkpointing with frozen first layers."""
    found = []
    for checkpointing in (False, True):
        trainer = resume(config_of({"lora": LORA, "gradient_checkpointing": checkpointing, "grad_clip": 1e9}), initial)
        logprobs, _ = trainer.policy.score(part_of(make_rows(4)))
        logprobs.sum().backward()
        found.append([p.grad.clone() for p in trainer.policy.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert any(bool((g != 0).any()) for g in found[0])
