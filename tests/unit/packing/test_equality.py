"""Padded, packed and prefix-sharing passes are the same function of the rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.data.microbatch import Form, collate, token_offsets
from learner.policy.attention import can_varlen
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from tests.unit.learner.conftest import gradients
from tests.unit.packing.conftest import PACKED, SHARED, grouped_rows, row_of

PADDED = Form()


def part_of(rows, form):
    return collate(rows, [1.0] * len(rows), token_offsets(rows).tolist(), form=form)


def scores(policy, rows):
    """log π and entropy of all sampled tokens, and the gradient of a sum of both with unequal weights."""
    logprobs, entropy = policy.score(part_of(rows, policy.form))
    along = torch.linspace(-1, 2, len(logprobs))
    policy.model.zero_grad()
    (along * logprobs + along.flip(0) * entropy).sum().backward()
    gradient = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    return logprobs.detach(), entropy.detach(), gradient


def assert_same(came, expected, rtol=1e-4, atol=2e-5):
    for a, b in zip(came[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    for name in expected[2]:
        scale = float(expected[2][name].abs().max())
        torch.testing.assert_close(came[2][name], expected[2][name], rtol=rtol, atol=max(atol, rtol * scale))


@pytest.mark.parametrize("form", [PACKED, SHARED], ids=["packed", "shared"])
@pytest.mark.parametrize("seed", range(4))
def test_log_probs_entropies_and_gradients_are_those_of_padded_rows(policy_of, form, seed):
    rows = grouped_rows(seed)
    assert_same(scores(policy_of(form), rows), scores(policy_of(PADDED), rows))


@pytest.mark.parametrize("form", [PACKED, SHARED], ids=["packed", "shared"])
def test_gradient_checkpointing_changes_nothing(policy_of, form):
    rows = grouped_rows(5)
    assert_same(scores(policy_of(form, gradient_checkpointing=True), rows), scores(policy_of(PADDED), rows))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_loss_and_gradient_of_a_step_do_not_depend_on_the_layout(kit, policy_of, aggregation):
    rows = grouped_rows(6)
    found = {}
    for name, form, tokens in (
        ("padded", PADDED, 10_000),
        ("packed", PACKED, 70),
        ("shared", SHARED, 100),
        ("one", SHARED, 1),
    ):
        config = kit.run_config({"tokens_per_microbatch": tokens, "grad_clip": 1e9}, loss={"aggregation": aggregation})
        trainer = Trainer(policy_of(form, tokens_per_microbatch=tokens), config)
        found[name] = gradients(trainer, rows)
    report, expected = found.pop("padded")
    assert report.tokens_padding > 0
    for name, (came, grads) in found.items():
        assert came.loss == pytest.approx(report.loss, rel=1e-5), name
        assert came.tokens_padding == 0
        assert (came.tokens_shared > 0) == (name == "shared")
        for key in expected:
            torch.testing.assert_close(grads[key], expected[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("form", [PACKED, SHARED], ids=["packed", "shared"])
def test_a_changed_neighbour_changes_nothing(policy_of, form):
    """Not in the values, and no gradient flows to its tokens."""
    policy = policy_of(form)
    rows = grouped_rows(7)
    mine, other = rows[0], rows[1]
    ids = other.token_ids.copy()
    ids[-6:] = (ids[-6:] + 7) % 23
    with torch.no_grad():
        before = policy.score(part_of([mine, other], form))[0][: mine.n_sampled]
        after = policy.score(part_of([mine, replace(other, token_ids=ids)], form))[0][: mine.n_sampled]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    part = part_of([mine, other], form)
    seen = {}
    embed = policy.model.get_input_embeddings()

    def keep(_, __, out):
        out.retain_grad()
        seen["hidden"] = out

    hook = embed.register_forward_hook(keep)
    policy.score(part)[0][: mine.n_sampled].sum().backward()
    hook.remove()
    touched = set(np.flatnonzero(seen["hidden"].grad[0].abs().sum(-1).numpy()).tolist())
    assert touched and touched <= set(part.layout.indices[0].tolist())


def test_a_row_that_is_the_beginning_of_another_and_equal_rows_are_scored_alike(policy_of):
    ids = np.random.default_rng(3).integers(0, 23, 20)
    late = np.arange(20) >= 12
    rows = [row_of(ids, late), row_of(ids, late, 1), row_of(ids[:15], late[:15], 2)]
    with torch.no_grad():
        policy = policy_of(SHARED)
        part = part_of(rows, SHARED)
        assert part.n_real == 19
        logprobs = policy.score(part)[0]
        alone = policy_of(PADDED).score(part_of(rows[:1], PADDED))[0]
    torch.testing.assert_close(logprobs, torch.cat([alone, alone, alone[:3]]), rtol=1e-5, atol=1e-5)


def slow_varlen(q, k, v, from_q, from_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """Variable-length flash attention, written out: causal, aligned to the last key, ``left`` keys before a query's
    own."""
    left, right = window_size
    assert right == 0 and from_q.dtype == from_k.dtype == torch.int32
    assert max_q == int(from_q.diff().max()) and max_k == int(from_k.diff().max())
    repeat = q.shape[1] // k.shape[1]
    assert enable_gqa or repeat == 1
    out = []
    for a, b, c, d in zip(from_q[:-1], from_q[1:], from_k[:-1], from_k[1:], strict=True):
        keys, values = (x[c:d].repeat_interleave(repeat, 1) for x in (k, v))
        z = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        allowed = torch.ones(b - a, d - c, dtype=torch.bool).tril(int((d - c) - (b - a)))
        if left >= 0:
            allowed = allowed.triu(int((d - c) - (b - a)) - left)
        out.append(torch.einsum("hqk,khd->qhd", z.masked_fill(~allowed, -torch.inf).softmax(-1), values))
    return torch.cat(out)


@pytest.mark.parametrize("form", [PACKED, SHARED], ids=["packed", "shared"])
def test_the_call_of_variable_length_attention_means_the_same(policy_of, form, monkeypatch):
    import torch.nn.attention.varlen as varlen

    monkeypatch.setattr(varlen, "varlen_attn", slow_varlen)
    rows = grouped_rows(8)
    policy = policy_of(form)
    policy._varlen = True
    assert_same(scores(policy, rows), scores(policy_of(PADDED), rows))


def test_half_precision_stays_near(policy_of):
    rows = grouped_rows(9)
    with torch.no_grad():
        exact = policy_of(PADDED).score(part_of(rows, PADDED))[0]
        for form in (PADDED, PACKED, SHARED):
            near = policy_of(form, compute_dtype="bfloat16").score(part_of(rows, form))[0]
            assert float((near - exact).abs().mean()) < 0.1


def test_gradients_of_a_prompt_that_many_share_are_not_lost_in_half_precision(policy_of):
    """Against float32: the prompt computed once is as near as the prompt computed for each row."""
    rng = np.random.default_rng(11)
    prompt = rng.integers(0, 23, 12)
    rows = [row_of([*prompt, *rng.integers(0, 23, 4)], np.arange(16) >= 12, i) for i in range(64)]
    exact = scores(policy_of(PADDED), rows)[2]

    def error(form):
        found = scores(policy_of(form, compute_dtype="bfloat16"), rows)[2]
        return np.mean([float((found[n] - exact[n]).norm() / exact[n].norm()) for n in exact])

    assert error(SHARED) < 1.2 * error(PADDED)


def test_a_packed_model_is_called_as_any_other(kit, policy_of):
    """With padding on the left and a mask, as generation calls it: the exchange of the attention is not seen."""
    model = policy_of(SHARED).model
    ids = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = kit.tiny_model()(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[mask.bool()], expected)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        found = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(found, kit.tiny_model().generate(ids, attention_mask=mask, **options))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: variable-length attention has no CPU form")
@pytest.mark.parametrize("window", [None, 4], ids=["full", "sliding"])
def test_variable_length_attention_on_a_gpu(kit, window):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = MistralConfig(vocab_size=23, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                          num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
                          initializer_range=0.1, sliding_window=window)  # fmt: skip
    model = MistralForCausalLM(shape)
    rows = grouped_rows(10)
    found = {}
    for packing in ("padded", "packed"):
        config = kit.learner_config(device="cuda", compute_dtype="bfloat16", packing=packing)
        policy = Policy(model, config, torch.device("cuda"))
        assert can_varlen(policy.device, torch.bfloat16, 32)
        for form in (PADDED,) if packing == "padded" else (PACKED, SHARED):
            policy.form = form
            found[form] = scores(policy, rows)
    for form in (PACKED, SHARED):
        for name, gradient in found[PADDED][2].items():
            assert float((found[form][2][name] - gradient).norm() / gradient.norm()) < 0.05, (form, name)
