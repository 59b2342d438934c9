"""Packed rows in one call of torch's variable-length attention, whose arguments differ between versions of torch."""

from __future__ import annotations

import pytest
import torch

from learner.data.microbatch import SHARED_TOKENS_MIN, Form
from learner.policy import attention
from learner.policy.attention import can_varlen
from learner.policy.policy import Policy
from tests.unit.packing.conftest import grouped_rows
from tests.unit.packing.test_equality import assert_same, scores


def by_runs(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
    """Run by run; of fewer queries than keys the last query sees all keys, as flash attention has it."""
    assert window_size == (-1, 0)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    ends = zip(
        cu_seq_q.tolist()[:-1], cu_seq_q.tolist()[1:], cu_seq_k.tolist()[:-1], cu_seq_k.tolist()[1:], strict=True
    )
    parts = []
    for q0, q1, k0, k1 in ends:
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def of_torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    raise AssertionError("its scale cannot be chosen")


def of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    return by_runs(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def of_torch_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa or key.shape[1] == query.shape[1], "it refuses fewer key heads unless told"
    return by_runs(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


@pytest.fixture
def of_version(monkeypatch):
    def install(function):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    return install


@pytest.mark.parametrize(("function", "works"), [(of_torch_2_10, False), (of_torch_2_11, True), (of_torch_2_12, True)])
def test_one_call_is_used_where_torch_lets_its_scale_be_chosen(of_version, function, works):
    of_version(function)
    assert can_varlen(torch.device("cuda"), torch.bfloat16, 128) is works


@pytest.mark.parametrize("function", [of_torch_2_11, of_torch_2_12])
def test_rows_are_packed_and_scored_alike_under_every_version(of_version, monkeypatch, kit, policy_of, function):
    rows = grouped_rows(0, prompt=SHARED_TOKENS_MIN + 4)
    expected = scores(policy_of(Form()), rows)
    of_version(function)
    monkeypatch.setattr(attention, "can_varlen", lambda *_: True)
    policy = Policy(kit.tiny_model(), kit.learner_config(packing="packed"), torch.device("cpu"))
    assert policy.form == Form(packed=True, shared_min=SHARED_TOKENS_MIN)
    assert_same(scores(policy, rows), expected)
