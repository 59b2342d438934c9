"""Models that are loaded by shards, in a group of one rank, against the ordinary load."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft  # noqa: F401  its import takes seconds
import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from learner.checkpoints.checkpoint import CheckpointState, restore_training, save_checkpoint
from learner.data.microbatch import collate
from learner.data.rows import Batch
from learner.models.model_folder import ModelFolder
from learner.policy.fsdp import float32_modules
from learner.policy.policy import Policy
from learner.process.build import make_critic, make_policy, make_reference, make_trainer
from pipeline.config.learner import LoraConfig
from pipeline.errors import ConfigurationError
from tests.unit.models.test_memory import allocated

SHAPE = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}  # fmt: skip
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama_scaled_positions": LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=SCALED),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=8, tie_word_embeddings=False
    ),
}
CPU = torch.device("cpu")


def written(folder, config, dtype=torch.float32, **options):
    """A folder with random weights; norms have values that bfloat16 cannot hold."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 2**-9)
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def assert_same(came, expected):
    for own, other in (
        (came.state_dict(), expected.state_dict()),
        (dict(came.named_buffers()), dict(expected.named_buffers())),
    ):
        assert own.keys() == other.keys()
        for name, tensor in other.items():
            value = own[name].full_tensor() if isinstance(own[name], DTensor) else own[name]
            assert value.dtype == tensor.dtype and torch.equal(value, tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_filled_equals_one_that_is_read(tmp_path, name, dtype):
    folder = written(tmp_path, CONFIGS[name], dtype, max_shard_size="4KB")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random = torch.get_rng_state()
    model = ModelFolder(folder).empty()
    assert all(p.is_meta for p in model.parameters())
    ModelFolder(folder).fill(model, CPU)
    assert torch.equal(random, torch.get_rng_state())
    for came in (model, ModelFolder(folder).read(CPU)):
        assert_same(came, expected)
        ids = torch.arange(20)[None]
        assert torch.equal(came(ids).logits, expected(ids).logits)
        assert came.config.to_dict() == expected.config.to_dict()
        assert came.generation_config.to_dict() == expected.generation_config.to_dict()
        assert (came.lm_head.weight is came.get_input_embeddings().weight) == expected.config.tie_word_embeddings


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_of_all_ranks_are_the_model(kit, tmp_path, group, name):
    folder = written(tmp_path, CONFIGS[name])
    config = kit.run_config()
    policy = make_policy(config, folder, None, group)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(isinstance(p, DTensor) for p in policy.parameters)
    assert_same(policy.model, expected)
    alone = Policy(expected, config.learner, CPU)
    assert policy.form == alone.form and policy.form.packed and policy.form.cost == alone.form.cost
    part = collate(kit.make_rows(4), [1.0] * 4, [0] * 4, form=policy.form)
    for came, other in zip(policy.score(part), alone.score(part), strict=True):
        assert torch.equal(came, other)


@pytest.mark.parametrize("frozen", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama_scaled_positions", "qwen2", "qwen3_moe"])
def test_adapters_begin_as_over_a_model_that_is_cast_afterwards(kit, tmp_path, group, name, frozen):
    folder = written(tmp_path, CONFIGS[name])
    lora = {"rank": 2, "targets": ["q_proj", "o_proj"], "frozen_dtype": frozen}
    config = kit.run_config({"lora": lora, "compute_dtype": frozen})
    torch.manual_seed(3)
    expected = Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config.learner, CPU)
    assert {p.dtype for p in expected.parameters} == {torch.float32}
    part = collate(kit.make_rows(3), [1.0] * 3, [0] * 3, form=expected.form)
    for ranks in (None, group):
        torch.manual_seed(3)
        came = make_policy(config, folder, None, ranks)
        assert_same(came.model, expected.model)
        assert [n for n, _ in came.named_parameters] == [n for n, _ in expected.named_parameters]
        assert torch.equal(came.score(part)[0], expected.score(part)[0])


def test_one_rank_holds_weights_in_no_other_type_than_their_own(kit, tmp_path):
    wide = LlamaConfig(**SHAPE | {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 16})
    folder = written(tmp_path, wide)
    narrow = {"lora": {"rank": 2, "frozen_dtype": "bfloat16"}, "reference": {"dtype": "bfloat16"}}
    config = kit.run_config(narrow | {"compute_dtype": "bfloat16"})
    copied = config.updated(learner={"lora": LoraConfig()})
    found = []
    peaks = [
        allocated(lambda: found.append(make_policy(config, folder, None)), tmp_path / "policy.json"),
        allocated(lambda: found.append(make_reference(copied, found[0], folder)), tmp_path / "reference.json"),
    ]
    sizes = [sum(p.nbytes for p in model.parameters()) for model in (found[0].model, found[1].model)]
    assert peaks[0] < 1.25 * sizes[0] and peaks[1] < sizes[0] + 1.25 * sizes[1]
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(torch.bfloat16)
    assert_same(found[1].model, expected)


def test_a_checkpoint_of_one_process_is_resumed_into_shards(kit, tmp_path, group):
    """Weights, moments and critic: the next update is that of a learner that was never stopped."""
    folder = written(tmp_path / "model", CONFIGS["qwen2"])
    config = kit.run_config(advantage={"estimator": "gae"}, loss={"kl": "loss"})

    def update(trainer):
        rows = kit.make_rows(4, seed=trainer.updates)
        scores = trainer.token_scores(rows)
        scores = replace(scores, returns=np.sin(np.arange(len(scores.values))).astype(np.float32))
        return trainer.step(Batch(trainer.updates, (), rows), 0, scores)

    whole = make_trainer(config, folder, None)
    update(whole)
    path = save_checkpoint(tmp_path / "saved", whole, CheckpointState(1, 0, {}), folder, keep=1)
    resumed = make_trainer(config, folder, path, group)
    restore_training(path, resumed)
    mapped = (path / "training.pt").stat()
    if sys.platform == "linux":
        assert f"{mapped.st_ino} " not in Path("/proc/self/maps").read_text(), "the file is let go"
    expected, report = update(whole), update(resumed)
    assert (report.loss, report.critic.loss) == pytest.approx((expected.loss, expected.critic.loss), rel=1e-6)
    served = resumed.policy.snapshot("float32")
    for name, tensor in whole.policy.snapshot("float32").items():
        torch.testing.assert_close(served[name], tensor, rtol=1e-6, atol=1e-7)


def test_the_critic_s_backbone_is_filled_from_the_same_folder(kit, tmp_path, group):
    folder = written(tmp_path, CONFIGS["qwen3"])
    config = kit.run_config(advantage={"estimator": "gae"})
    policy = make_policy(config, folder, None, group)
    critic = make_critic(config, policy, folder, group)
    assert_same(critic.backbone.model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model)


def test_other_names_in_the_files_are_read_whole(tmp_path):
    """As a model's whose weights transformers converts while it loads them."""
    from safetensors.torch import load_file, save_file

    folder = written(tmp_path, CONFIGS["llama"])
    file = folder / "model.safetensors"
    save_file(
        {name.replace("model.", "old."): t for name, t in load_file(file).items()}, file, metadata={"format": "pt"}
    )
    model = ModelFolder(folder).empty()
    read = ModelFolder(folder)
    read.read = lambda device: AutoModelForCausalLM.from_config(CONFIGS["llama"])
    read.fill(model, CPU)
    assert not any(p.is_meta for p in model.parameters())


def test_weights_of_another_shape_are_an_error(tmp_path):
    folder = written(tmp_path, CONFIGS["llama"])
    config = LlamaConfig(**{**SHAPE, "intermediate_size": 48}, tie_word_embeddings=True)
    config.save_pretrained(folder)
    with pytest.raises(ConfigurationError, match="of the shape"):
        ModelFolder(folder).fill(ModelFolder(folder).empty(), CPU)


def test_a_rank_reads_the_experts_of_its_rows_alone(tmp_path, monkeypatch):
    """Of 12 experts those of 4 … 6: from the files of these, in the order of their numbers, into one weight."""
    folder = written(tmp_path, CONFIGS["qwen3_moe"])
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    seen = []

    class File:
        def __init__(self, *arguments, **options):
            self._file = safe_open(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def __getattr__(self, name):
            return getattr(self._file, name)

        def get_tensor(self, name):
            seen.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr("learner.models.model_folder.safe_open", File)
    own = [f"model.layers.1.mlp.experts.{kind}" for kind in ("gate_up_proj", "down_proj")]
    reader = ModelFolder(folder)
    model = reader.empty()
    read = reader._reader(model, [[name] for name in own])
    for name in own:
        seen.clear()
        shape = list(expected[name].shape)
        came = torch.empty(3, *shape[1:])
        read(name, slice(4, 7), shape, came)
        assert torch.equal(came, expected[name][4:7])
        assert {int(n.split(".")[5]) for n in seen} == {4, 5, 6} and len(seen) == (6 if "gate" in name else 3)
        read(name, slice(12, 12), shape, torch.empty(0, *shape[1:]))
        with pytest.raises(ConfigurationError, match=r"of the shape \[13, .* got \[12, "):
            read(name, slice(0, 3), [13, *shape[1:]], came)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_norms_keep_their_float32_weights_under_bfloat16(kit, tmp_path, group, name):
    """What bfloat16 cannot hold of a norm's weight changes the log-probabilities of several ranks as those of one."""
    folder = written(tmp_path, CONFIGS[name])
    config = kit.run_config({"compute_dtype": "bfloat16"})
    policy, alone = make_policy(config, folder, None, group), make_policy(config, folder, None)
    seen = {}
    for name, module in policy.model.named_modules():
        if module in float32_modules(policy.model):
            module.register_forward_pre_hook(lambda m, _, name=name: seen.update({name: m.weight.detach().clone()}))
    part = collate(kit.make_rows(4), [1.0] * 4, [0] * 4, form=policy.form)
    assert torch.equal(policy.score(part)[0], alone.score(part)[0])
    weights = dict(alone.model.named_parameters())
    assert len(seen) == 2 * 4 + 1
    for name, weight in seen.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, weights[f"{name}.weight"]), name
    served = policy.snapshot("float32")
    assert all(torch.equal(served[f"{name}.weight"], weights[f"{name}.weight"]) for name in seen)
