"""Families of models, each as a small random one, and what Afterplay does with it, as checks.

``tests/unit/models_trained/test_families.py`` runs them, and ``scripts/models_page.py`` writes their outcomes into
docs/MODELS.md. Layers have the width of 32, so that the checks of a family take a second or two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from actors.embedded.generator import Generator
from actors.embedded.options import EngineOptions
from actors.embedded.requests import EngineRequest
from learner.checkpoints.checkpoint import CheckpointState, save_checkpoint
from learner.data.microbatch import Form, collate, token_offsets
from learner.data.rows import Batch, Row
from learner.models.model_folder import ModelFolder
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from learner.weights.delta_loader import bits_of
from learner.weights.publisher import write_weights
from pipeline.runtime.embedded_models import check_embedded
from pipeline.runtime.weights import write_delta
from tests.unit.learner.conftest import run_config
from tests.unit.packing.conftest import PACKED, SHARED, grouped_rows, row_of

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
HEADS = {"head_dim": 8}
WINDOW = HEADS | {"sliding_window": 8}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
SHARING = WINDOW | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 4,
    "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Configuration class in transformers, options of a small model, and a published template if one is at hand."""

    config: str
    template: str | None
    options: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "SmolLM2": Family("LlamaConfig", "smollm2", HEADS),
    "SmolLM3": Family("SmolLM3Config", None),
    "Llama 3.1, 3.2": Family("LlamaConfig", "llama3_1", HEADS),
    "Qwen2.5": Family("Qwen2Config", "qwen2_5"),
    "Qwen3": Family("Qwen3Config", "qwen3", HEADS),
    "Qwen3 (experts)": Family("Qwen3MoeConfig", "qwen3", HEADS | EXPERTS),
    "Qwen3.5": Family("Qwen3_5TextConfig", "qwen3_5_think", HEADS | LINEAR),
    "Mistral 7B 0.1": Family("MistralConfig", "mistral_v1", WINDOW),
    "Mistral 7B 0.3": Family("MistralConfig", "mistral_v3", HEADS | {"sliding_window": None}),
    "Ministral 3": Family("Ministral3Config", "mistral_v13", HEADS),
    "Gemma 2": Family("Gemma2Config", "gemma", MIXED | {"attn_logit_softcapping": 0.5}),
    "Gemma 3": Family("Gemma3TextConfig", "gemma3", MIXED),
    "Gemma 4": Family("Gemma4TextConfig", "gemma4", SHARING),
    "Phi-3.5": Family("Phi3Config", "phi3_5", {"sliding_window": 8}),
    "Phi-4": Family("Phi3Config", None, {"sliding_window": None}),
    "Granite 3": Family("GraniteConfig", "granite3"),
    "GLM-4": Family("Glm4Config", None, HEADS),
    "GLM-4.5 (experts)": Family("Glm4MoeConfig", "glm4moe", HEADS | EXPERTS),
    "OLMo 2": Family("Olmo2Config", None),
    "OLMo 3": Family("Olmo3Config", None, MIXED),
    "gpt-oss (experts)": Family("GptOssConfig", "gptoss", MIXED | EXPERTS),
    "DeepSeek V3 (experts)": Family("DeepseekV3Config", "deepseekv3", EXPERTS | LATENT),
    "Command R": Family("CohereConfig", "cohere"),
    "Command R7B": Family("Cohere2Config", "cohere2", MIXED),
    "LFM2": Family("Lfm2Config", "lfm2_v2", {"layer_types": ["conv", "full_attention"]}),
    "Nemotron 3": Family("NemotronHConfig", "nemotron_3_nano", HEADS | EXPERTS | MAMBA),
}


def write_family(name: str, folder: Path) -> Path:
    """A folder with a random model of the family; no weight is a constant."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**SMALL | family.options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.state_dict().values():
                if weight.ndim == 1:
                    weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    return folder


def read_policy(folder: Path, **learner: Any) -> Policy:
    return Policy(ModelFolder(folder).read(CPU), run_config(learner).learner, CPU)


def trained(policy: Policy, updates: int = 1) -> Trainer:
    trainer = Trainer(policy, run_config({"learning_rate": 0.02, "lora": policy._config.lora.model_dump()}))
    for update in range(updates):
        trainer.step(Batch(update, (), rows(update)), update)
    return trainer


def rows(seed: int = 0) -> tuple[Row, ...]:
    return grouped_rows(seed, groups=1, members=3, longest=24)


def check_learning(folder: Path) -> Form:
    """Log-probabilities are those of transformers' plainest attention, and with entropies and gradients the same in
    each form of rows that the model takes. Returns the form that is chosen."""
    policy = read_policy(folder)
    chosen = policy.form
    expected = _scores(policy, Form())
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(expected["log-probs"], _plain_logprobs(plain.eval()), rtol=1e-4, atol=1e-4)
    assert all(torch.isfinite(value).all() for value in expected.values())
    assert all(value.any() for name, value in expected.items() if "expert" not in name and "bias" not in name)
    for form in (PACKED, SHARED) if chosen.packed else ():
        for name, value in _scores(policy, form).items():
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4 * max(1.0, scale), msg=name)
    return chosen


def check_saving(folder: Path, scratch: Path) -> None:
    """A checkpoint has the weights bit for bit, read whole and by shards, and the names of the files of ``folder``."""
    trainer = trained(read_policy(folder))
    path = save_checkpoint(scratch, trainer, CheckpointState(1, 0, {}), folder, keep=1) / "model"
    assert names_in(path) == names_in(folder)
    filled = ModelFolder(path).empty()
    ModelFolder(path).fill(filled, CPU)
    for model in (ModelFolder(path).read(CPU), filled):
        assert_same(model.state_dict(), trainer.policy.model.state_dict())


def check_publication(folder: Path, scratch: Path) -> None:
    """A published version has the names of the files of ``folder``, and transformers reads the weights from it."""
    policy = trained(read_policy(folder)).policy
    tensors = policy.snapshot("bfloat16")
    assert tensors.keys() == names_in(folder)
    assert policy.description("bfloat16") == [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
    write_weights(policy.model, scratch / "v1", tensors)
    read = transformers.AutoModelForCausalLM.from_pretrained(scratch / "v1", dtype="auto").state_dict()
    assert_same(read, {name: t.to(read[name].dtype) for name, t in policy.model.state_dict().items()})


def check_engine(folder: Path, scratch: Path) -> None:
    """The embedded engine takes a whole version and a delta, has the weights of the learner then, bit for bit, and
    samples with its log-probabilities. Raises :class:`ConfigurationError` where it does not serve the model."""
    check_embedded(folder)
    trainer = trained(read_policy(folder))
    policy, first = trainer.policy, trainer.policy.snapshot("float32")
    write_weights(policy.model, scratch / "v1", first)
    trainer.step(Batch(1, (), rows(1)), 1)
    write_delta(scratch / "delta", 1, 2, bits_of(first), bits_of(policy.snapshot("float32")))
    answers, served = asyncio.run(_sampled(folder, scratch))
    assert_same(served, policy.model.state_dict())
    for ids, logprobs in answers:
        row = row_of(ids, np.arange(len(ids)) >= len(ids) - len(logprobs))
        np.testing.assert_allclose(policy.score_rows([row])[0], logprobs, rtol=1e-3, atol=1e-3)


def check_adapters(folder: Path, scratch: Path) -> None:
    """Adapters of the linear layers train and are saved, and the published weights are those of a model that scores as
    the policy with its adapters."""
    lora = {"rank": 2}
    policy = trained(read_policy(folder, lora=lora)).policy
    tensors, adapters = policy.snapshot("float32"), policy.adapter_snapshot(torch.float32)
    assert tensors.keys() == names_in(folder)
    assert policy.adapters is not None and adapters is not None
    write_weights(policy.model, scratch / "v1", tensors)
    policy.adapters.save(scratch / "adapter", adapters)
    resumed = Policy(ModelFolder(folder).read(CPU), run_config({"lora": lora}).learner, CPU, None, torch.float32,
                     scratch / "adapter")  # fmt: skip
    expected, initial = (p.score_rows(rows(2))[0] for p in (policy, read_policy(folder)))
    assert np.abs(expected - initial).max() > 0.01
    assert np.array_equal(resumed.score_rows(rows(2))[0], expected)
    np.testing.assert_allclose(read_policy(scratch / "v1").score_rows(rows(2))[0], expected, rtol=1e-3, atol=2e-3)


def names_in(folder: Path) -> set[str]:
    """Names of the weights in a folder's files."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def assert_same(came: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert came.keys() == expected.keys()
    for name, tensor in expected.items():
        assert came[name].dtype == tensor.dtype and torch.equal(came[name], tensor), name


def _scores(policy: Policy, form: Form) -> dict[str, Tensor]:
    policy.form = form
    batch = rows()
    part = collate(batch, [1.0] * len(batch), token_offsets(batch).tolist(), form=form)
    logprobs, entropy = policy.score(part)
    policy.model.zero_grad()
    (torch.linspace(-1, 2, len(logprobs)) * logprobs + 0.1 * entropy).sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters if p.grad is not None}
    return {"log-probs": logprobs.detach(), "entropy": entropy.detach(), **gradients}


@torch.no_grad()
def _plain_logprobs(model: Any) -> Tensor:
    """log π of the sampled tokens of :func:`rows`, a row at a time."""
    found = []
    for row in rows():
        ids, sampled = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.loss_mask)[1:]
        scores = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / 0.8, dim=-1)
        found.append(scores.gather(1, ids[1:, None])[sampled, 0])
    return torch.cat(found)


async def _sampled(folder: Path, scratch: Path) -> tuple[list[tuple[list[int], list[float]]], dict[str, Tensor]]:
    """Prompts with their answers and log-probabilities after a whole version and a delta, and the engine's weights."""
    options = EngineOptions(
        folder, dtype="float32", device="cpu", threads=1, max_length=64, max_sequences=2, block_size=4, batch_tokens=16
    )
    failures: list[BaseException] = []
    generator = Generator(options, failures.append)
    generator.start()
    try:
        await generator.try_out()
        await generator.reload(scratch / "v1")
        await generator.load_deltas([scratch / "delta"])
        prompts = [list(range(3, 12)), list(range(5, 25))]
        requests = [EngineRequest(str(i), p, 12, 0.8, frozenset(), True, True) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*(generator.generate(request) for request in requests))
        found = [([*p, *a.token_ids], a.logprobs) for p, a in zip(prompts, answers, strict=True)]
        assert failures == []
        return found, {name: tensor.clone() for name, tensor in generator._model.state_dict().items()}
    finally:
        await generator.stop()


def with_infinity(folder: Path) -> None:
    """Give the ``config.json`` in ``folder`` a value that JSON does not have, as those of Nemotron-H have it."""
    file = folder / "config.json"
    file.write_text(file.read_text().replace("{", '{"time_step_limit": [0.0, Infinity],', 1))
