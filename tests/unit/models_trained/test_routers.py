"""Routers of a mixture of experts: recorded choices, the load-balancing loss and the metrics."""

import asyncio
import contextlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from actors.embedded.generator import Generator
from actors.embedded.options import EngineOptions
from actors.embedded.requests import EngineRequest
from learner.data.microbatch import Form, collate, token_offsets
from learner.data.rows import Batch
from learner.models.model_folder import ModelFolder
from learner.models.prepare import check_model, routing_replay_size
from learner.policy.policy import Policy
from learner.policy.routers import check_routers
from learner.training.trainer import Trainer
from pipeline.errors import ConfigurationError, Findings, TrainingError
from pipeline.runtime.routers import choice_bytes, routers_of
from pipeline.schema.trajectory import unknown_experts
from tests.support.families import (
    CPU,
    EXPERTS,
    FAMILIES,
    HEADS,
    LATENT,
    Family,
    read_policy,
    with_infinity,
    write_family,
)
from tests.unit.learner.conftest import run_config, tiny_model
from tests.unit.packing.conftest import PACKED, SHARED, grouped_rows, row_of

E, K, L = 4, 2, 2
GROUPED = (
    EXPERTS | LATENT | {"n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2}
)
MORE = {
    "Mixtral": Family("MixtralConfig", None, HEADS | EXPERTS),
    "OLMoE": Family("OlmoeConfig", None, EXPERTS),
    "Granite (experts)": Family("GraniteMoeConfig", None, EXPERTS),
    "MiniMax M2": Family("MiniMaxM2Config", None, HEADS | EXPERTS),
    "DeepSeek V3 (groups)": Family("DeepseekV3Config", None, GROUPED),
}
SOFTMAX, CHOSEN, SIGMOID = "softmax", "chosen", "sigmoid"
SCORES = {
    "Qwen3 (experts)": SOFTMAX, "Mixtral": SOFTMAX, "OLMoE": SOFTMAX, "gpt-oss (experts)": CHOSEN,
    "Granite (experts)": CHOSEN, "GLM-4.5 (experts)": SIGMOID, "DeepSeek V3 (experts)": SIGMOID,
    "DeepSeek V3 (groups)": SIGMOID, "Nemotron 3": SIGMOID, "MiniMax M2": SIGMOID,
}  # fmt: skip
"""Weights of the chosen experts: of a softmax over all, over the chosen ones, or of sigmoids."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    transformers.utils.logging.disable_progress_bar()
    made = {}

    def folder(name="Qwen3 (experts)"):
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                for more in MORE:
                    patch.setitem(FAMILIES, more, MORE[more])
                made[name] = write_family(name, tmp_path_factory.mktemp("family"))
        return made[name]

    return folder


def recorded(rows, seed=0, width=E, layers=L, known=1.0):
    """Rows with K different experts for each token, that follow from the ids up to it; a share is known."""
    random = np.random.default_rng(seed)
    chosen = {}

    def of(prefix):
        if prefix not in chosen:
            rows = [random.permutation(width)[:K] for _ in range(layers)]
            chosen[prefix] = rows if random.random() < known else np.full((layers, K), 255)
        return chosen[prefix]

    ids = [row.token_ids.tolist() for row in rows]
    return tuple(
        replace(row, experts=np.asarray([of(tuple(i[: t + 1])) for t in range(len(i))], np.uint8))
        for row, i in zip(rows, ids, strict=True)
    )


def passes(policy, rows, form=None):
    """log-probs and gradients of one pass over ``rows``."""
    if form is not None:
        policy.form = form
    part = collate(rows, [1.0] * len(rows), token_offsets(rows).tolist(), form=policy.form)
    policy.model.zero_grad()
    logprobs, entropy = policy.score(part)
    (torch.linspace(-1, 2, len(logprobs)) * logprobs + 0.1 * entropy).sum().backward()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters if p.grad is not None}
    return {"log-probs": logprobs.detach(), **gradients}


def assert_close(came, expected, **tolerance):
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(came[name].double(), value.double(), rtol=1e-3, atol=1e-4 * scale, msg=name)


@contextlib.contextmanager
def watched_experts(model):
    """Inputs of the experts: index and weights ``[N, K]``, by layer."""
    seen = []
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[1:3])) for m in experts]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", SCORES)
def test_experts_are_those_recorded_and_their_weights_the_routers_own(folders, name):
    width = 8 if "groups" in name else E
    policy = read_policy(folders(name), routing_replay=True)
    layers = policy.model.config.num_hidden_layers
    rows = sorted(grouped_rows(0, groups=1, members=1), key=len)[-1:]
    (row,) = recorded(rows, width=width, layers=layers, known=0.6)
    logits = {}
    for layer, (router, place) in routers_of(policy.model).items():
        router.register_forward_hook(lambda m, _, out, i=layer, p=place: logits.update({i: out[p]}))
    part = collate([row], [1.0], [0], form=policy.form)
    with watched_experts(policy.model) as seen, torch.no_grad():
        policy.score(part)
    known = (row.experts != 255).any(axis=(1, 2))[: len(logits[next(iter(logits))])]
    for (layer, of_layer), (index, weights) in zip(logits.items(), seen, strict=True):
        chosen = torch.from_numpy(row.experts[: len(index), layer].astype(np.int64))
        assert torch.equal(index[known], chosen[known])
        own = of_layer.double()
        scores = {SOFTMAX: own.softmax(-1), CHOSEN: own.exp(), SIGMOID: own.sigmoid()}[SCORES[name]].gather(1, index)
        normal = scores / scores.sum(-1, keepdim=True)
        if not getattr(policy.model.config, "norm_topk_prob", True):
            normal = scores
        normal = normal * getattr(policy.model.config, "routed_scaling_factor", 1.0)
        torch.testing.assert_close(weights.double(), normal, rtol=1e-4, atol=1e-6)
    assert 0 < known.sum() < len(known)


def test_gradients_are_those_of_routers_written_out_in_float64(folders):
    rows = recorded(grouped_rows(0, groups=1, members=3, longest=20))
    policy = read_policy(folders(), routing_replay=True)
    came = passes(policy, rows, Form())
    model = ModelFolder(folders()).read(CPU).double()
    model.set_experts_implementation("eager")
    total, found = 0.0, []
    for row in rows:
        for layer, (router, _) in routers_of(model).items():
            chosen = torch.from_numpy(row.experts[:, layer].astype(np.int64))

            def forward(hidden, router=router, chosen=chosen):
                logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
                scores = (logits - logits.logsumexp(-1, keepdim=True)).exp().gather(1, chosen)
                return logits, scores, chosen

            router.forward = forward
        ids, sampled = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.loss_mask)[1:]
        scores = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / 0.8, dim=-1)
        found.append(scores.gather(1, ids[1:, None])[sampled, 0])
        total = total - 0.1 * (scores.exp() * scores).sum(-1)[sampled].sum()
    logprobs = torch.cat(found)
    ((torch.linspace(-1, 2, len(logprobs)) * logprobs).sum() + total).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(came, {"log-probs": logprobs.detach(), **gradients})
    assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 0.01


@pytest.mark.parametrize("name", ["Qwen3 (experts)", "DeepSeek V3 (experts)", "Granite (experts)"])
def test_choices_stay_with_their_tokens_in_every_form_of_rows(folders, name):
    rows = recorded(grouped_rows(1, groups=2, members=3, longest=24), known=0.8)
    policy = read_policy(folders(name), routing_replay=True)
    expected = passes(policy, rows, Form())
    for form in (PACKED, SHARED):
        assert_close(passes(policy, rows, form), expected)
    without = passes(policy, [replace(row, experts=None) for row in rows], Form())
    assert (without["log-probs"] - expected["log-probs"]).abs().max() > 0.01


def test_a_shared_token_has_the_choice_of_any_row_that_knows_it(folders):
    rows = recorded(grouped_rows(1, groups=1, members=3, longest=24))
    policy = read_policy(folders(), routing_replay=True)
    expected = passes(policy, rows, SHARED)
    (first,) = [i for i in range(len(rows)) if collate(rows, [1.0] * len(rows), [0] * len(rows), SHARED)
                .layout.indices[i][0] == 0 and len(rows[i]) == min(map(len, rows))]  # fmt: skip
    prompt = int(np.flatnonzero(rows[first].loss_mask)[0])
    experts = rows[first].experts.copy()
    experts[:prompt] = 255
    gone = tuple(replace(row, experts=experts) if i == first else row for i, row in enumerate(rows))
    assert_close(passes(policy, gone, SHARED), expected)


def test_a_layer_that_is_computed_again_has_the_same_choice(folders):
    rows = recorded(grouped_rows(2, groups=1, members=3, longest=24), known=0.8)
    expected = passes(read_policy(folders(), routing_replay=True), rows)
    assert_close(passes(read_policy(folders(), routing_replay=True, gradient_checkpointing=True), rows), expected)


def test_choices_are_left_alone_unless_asked_for(folders):
    rows = recorded(grouped_rows(2, groups=1, members=2, longest=24))
    plain = [replace(row, experts=None) for row in rows]
    expected = passes(read_policy(folders()), plain)
    for policy, given in ((read_policy(folders()), rows), (read_policy(folders(), routing_replay=True), plain)):
        came = passes(policy, given)
        assert all(torch.equal(came[name], value) for name, value in expected.items())


@pytest.mark.parametrize("change", [lambda e: e[:, :1], lambda e: e[:, :, :1], lambda e: e + 1])
def test_choices_of_another_model_are_refused(folders, change):
    row = recorded(grouped_rows(0, groups=1, members=1))[0]
    policy = read_policy(folders(), routing_replay=True)
    with pytest.raises(TrainingError, match="the engine serves another model"):
        policy.score_rows([replace(row, experts=change(row.experts))])


def test_a_model_whose_routers_cannot_be_followed_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "dense")
    replayed, balanced = run_config({"routing_replay": True}), run_config(loss={"load_balancing": 0.1})
    for config, message in ((replayed, "routing_replay is true, but .* no router"), (balanced, "load_balancing")):
        with pytest.raises(ConfigurationError, match=message):
            check_routers(config, tmp_path / "dense")
    config = transformers.PhimoeConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
                                       num_key_value_heads=1, intermediate_size=16, num_local_experts=4)  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "phi")
    with pytest.raises(ConfigurationError, match="PhimoeForCausalLM, layer 0 does not choose experts by one call"):
        check_routers(replayed, tmp_path / "phi")


def balance_of(folder, rows, sigmoid):
    """Load-balancing loss, mean entropy and imbalance in float64, row by row; its gradients."""
    model = ModelFolder(folder).read(CPU).double()
    model.set_experts_implementation("eager")
    logits = {layer: [] for layer in routers_of(model)}
    indices = {layer: [] for layer in logits}
    for layer, (router, place) in routers_of(model).items():
        router.register_forward_hook(lambda m, _, out, i=layer, p=place: logits[i].append(out[p].double()))
        router.register_forward_hook(lambda m, _, out, i=layer: indices[i].append(out[2]))
    for row in rows:
        model(input_ids=torch.from_numpy(row.token_ids[None]).long())
    losses, entropies, imbalances = [], [], []
    for layer, of_layer in logits.items():
        z, chosen = torch.cat(of_layer), torch.cat(indices[layer])
        scores = z.sigmoid() / z.sigmoid().sum(-1, keepdim=True) if sigmoid else z.exp() / z.exp().sum(-1, keepdim=True)
        counts = torch.stack([(chosen == e).sum() for e in range(E)]).double()
        losses.append(E * sum(counts[e] / counts.sum() * scores[:, e].mean() for e in range(E)))
        entropies.append(-(scores * scores.log()).sum(-1).mean().item())
        imbalances.append((counts.max() / counts.mean()).item())
    loss = sum(losses) / len(losses)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return loss.item(), np.mean(entropies), np.mean(imbalances), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["Qwen3 (experts)", "GLM-4.5 (experts)"])
def test_balance_entropy_and_imbalance_are_those_of_the_real_tokens_in_float64(folders, name, checkpointing):
    rows = grouped_rows(3, groups=1, members=3, longest=20)
    loss, entropy, imbalance, gradients = balance_of(folders(name), rows, sigmoid="GLM" in name)
    policy = read_policy(folders(name), gradient_checkpointing=checkpointing)
    policy.routers.balances = True
    policy.form = Form()
    part = collate(rows, [1.0] * len(rows), token_offsets(rows).tolist(), form=policy.form)
    policy.score(part)
    routing = policy.routers.taken()
    routing.balance.backward()
    assert routing.balance.item() == pytest.approx(loss, rel=1e-5)
    assert policy.routers.measured(routing.sums.numpy()) == pytest.approx((entropy, imbalance), rel=1e-5)
    came = {n: p.grad for n, p in policy.named_parameters if p.grad is not None and p.grad.any()}
    assert_close(came, gradients)


def test_the_balance_loss_of_an_update_weighs_micro_batches_by_tokens_and_is_measured(folders):
    """With no advantage the policy loss has no gradient; a row without one takes no part in the balance loss."""
    rows = tuple(replace(r, advantages=r.advantages * 0 + 1e-12) for r in grouped_rows(3, groups=1, members=3))
    silent = replace(rows[0], advantages=rows[0].advantages * 0)
    found = {}
    for tokens in (4096, 40):
        config = run_config({"tokens_per_microbatch": tokens, "packing": "padded"}, loss={"load_balancing": 0.5})
        trainer = Trainer(Policy(ModelFolder(folders()).read(CPU), config.learner, CPU), config)
        report = trainer.step(Batch(0, (), rows), 0)
        found[tokens] = report
        assert report.router_entropy is not None and report.expert_imbalance >= 1
    config = run_config({"packing": "padded"}, loss={"load_balancing": 0.5})
    whole, one = (
        Trainer(Policy(ModelFolder(folders()).read(CPU), config.learner, CPU), config).step(Batch(0, (), r), 0)
        for r in (rows[1:], (silent, *rows[1:]))
    )
    assert one.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    _, entropy, imbalance, gradients = balance_of(folders(), rows, sigmoid=False)
    norm = 0.5 * torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    assert found[4096].grad_norm == pytest.approx(norm, rel=1e-3)
    for report in found.values():
        assert (report.router_entropy, report.expert_imbalance) == pytest.approx((entropy, imbalance), rel=1e-4)


@pytest.mark.parametrize(
    "name", ["Qwen3 (experts)", "GLM-4.5 (experts)", "gpt-oss (experts)", "DeepSeek V3 (experts)", "Nemotron 3"]
)
def test_the_engine_returns_the_choice_of_each_token_that_it_read(folders, name):
    """In float32 engine and learner choose alike. Prompts are read in pieces, beside others."""
    prompts = [list(range(3, 12)), list(range(5, 25)), list(range(3, 12))]

    async def sample():
        failures = []
        options = EngineOptions(folders(name), dtype="float32", device="cpu", threads=1, max_length=64,
                                max_sequences=2, block_size=4, batch_tokens=8, return_routed_experts=True)  # fmt: skip
        generator = Generator(options, failures.append)
        generator.start()
        try:
            requests = [
                EngineRequest(str(i), p, 12, 0.8, frozenset(), True, True, experts_from=2 * i)
                for i, p in enumerate(prompts)
            ]
            answers = await asyncio.gather(*(generator.generate(request) for request in requests))
            assert not failures and not generator._batching._experts._rows
            return answers
        finally:
            await generator.stop()

    policy = read_policy(folders(name))
    for i, (prompt, answer) in enumerate(zip(prompts, asyncio.run(sample()), strict=True)):
        ids = [*prompt, *answer.token_ids]
        assert answer.experts.shape == (len(ids) - 1 - 2 * i, policy.model.config.num_hidden_layers, K)
        assert answer.experts.dtype == np.uint8
        row = row_of(ids, np.arange(len(ids)) >= len(prompt))
        with watched_experts(policy.model) as seen, torch.no_grad():
            policy.score(collate([row], [1.0], [0], form=Form()))
        for layer, (index, _) in zip(routers_of(policy.model), seen, strict=True):
            own = np.sort(index.numpy()[2 * i : -1], axis=-1)
            np.testing.assert_array_equal(np.sort(answer.experts[:, layer], axis=-1), own)


def test_unknown_choices_are_the_routers_own(folders):
    rows = grouped_rows(2, groups=1, members=2, longest=24)
    like = np.zeros((1, L, K), np.uint8)
    unknown = [replace(row, experts=unknown_experts(len(row), like)) for row in rows]
    expected = passes(read_policy(folders()), rows)
    came = passes(read_policy(folders(), routing_replay=True), unknown)
    assert_close(came, expected)


def test_bytes_of_a_token_are_told_and_a_model_without_experts_is_refused_before_a_run(folders, tmp_path):
    tiny_model().save_pretrained(tmp_path / "dense")
    shutil.copytree(folders(), tmp_path / "states")
    with_infinity(tmp_path / "states")
    for folder, refused in ((folders(), False), (tmp_path / "states", False), (tmp_path / "dense", True)):
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text("{}")
        config = run_config({"routing_replay": True}, model={"source": str(folder), "max_length": 100})
        found = Findings()
        check_model(config, found)
        assert ["is no mixture of experts" in problem for problem in found.problems] == [True] * refused
    assert "stores 4 bytes for each token, 0.0 MB" in routing_replay_size(
        run_config({"routing_replay": True}, model={"source": str(folders()), "max_length": 100})
    )
    many = {"num_hidden_layers": 61, "num_experts_per_tok": 8}
    assert [choice_bytes(many | {"n_routed_experts": n}) for n in (0, 256, 384)] == [0, 488, 976]
    assert choice_bytes({"text_config": many | {"num_experts": 128}}) == 488
