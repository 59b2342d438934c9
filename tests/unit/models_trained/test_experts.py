"""Experts compute in the compute type, with float32 master weights."""

import pytest
import torch
from transformers.integrations import moe

from tests.support.families import FAMILIES, read_policy, rows, write_family
from tests.unit.packing.test_equality import part_of

EXPERTS = [name for name in FAMILIES if "(experts)" in name]


def gradient(policy):
    """The gradient of the sum of log-probabilities, by parameter."""
    policy.model.zero_grad()
    policy.score(part_of(rows(), policy.form))[0].sum().backward()
    return {name: p.grad for name, p in policy.named_parameters if p.grad is not None}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_compute_in_the_compute_type_and_learn_in_float32(tmp_path, monkeypatch, name):
    folder, seen = write_family(name, tmp_path), []
    product = moe._grouped_mm

    def watched(inputs, weight, offs):
        outputs = product(inputs, weight, offs)
        seen.append((weight.dtype, outputs.dtype))
        return outputs

    monkeypatch.setattr(moe, "_grouped_mm", watched)
    exact = gradient(read_policy(folder))
    assert set(seen) == {(torch.float32, torch.float32)}
    seen.clear()
    policy = read_policy(folder, compute_dtype="bfloat16")
    fast = gradient(policy)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert fast.keys() == exact.keys()
    for parameter, value in exact.items():
        assert fast[parameter].dtype == dict(policy.named_parameters)[parameter].dtype == torch.float32
        if "experts" in parameter:
            assert (fast[parameter] - value).norm() < 0.25 * value.norm(), parameter
