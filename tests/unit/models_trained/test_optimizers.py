"""Optimizers against torch's float32 AdamW, and clipping."""

import importlib.util

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from learner.training.optimizer import (
    EIGHT_BIT,
    BFloat16AdamW,
    clip_gradients,
    gradient_norm,
    make_optimizer,
    set_rate,
    stochastic_bfloat16,
)
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError


def parameter(seed=0, shape=(8, 16)):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def descend(p, optimizer, steps, seed=1):
    """Noisy steps towards zero."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        p.grad = p.detach() + 0.3 * torch.randn(p.shape, generator=generator)
        optimizer.step()


def test_the_default_is_torchs_adamw_in_float32():
    p = parameter()
    optimizer = make_optimizer([p], LearnerConfig(betas=(0.8, 0.9), weight_decay=0.1), 0.01)
    assert type(optimizer) is torch.optim.AdamW
    descend(p, optimizer, 1)
    assert optimizer.state[p]["exp_avg"].dtype is torch.float32
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_bfloat16_moments_follow_float32_ones(decay):
    torch.manual_seed(0)
    exact, rounded = parameter(), parameter()
    options = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": decay}
    descend(exact, torch.optim.AdamW([exact], **options), 60)
    optimizer = BFloat16AdamW([rounded], **options)
    descend(rounded, optimizer, 60)
    assert optimizer.state[rounded]["exp_avg_sq"].dtype is torch.bfloat16
    moved = (exact - parameter()).norm()
    assert (exact - rounded).norm() < 0.02 * moved


def test_the_first_step_equals_float32_to_the_last_bits():
    """Moments are rounded after they are used."""
    exact, rounded = parameter(), parameter()
    options = {"lr": 0.02, "betas": (0.9, 0.999), "weight_decay": 0.1}
    descend(exact, torch.optim.AdamW([exact], **options), 1)
    descend(rounded, BFloat16AdamW([rounded], **options), 1)
    torch.testing.assert_close(rounded, exact, rtol=1e-6, atol=1e-7)


def test_a_second_moment_in_bfloat16_falls_when_gradients_do():
    """Rounded to nearest it would stay for ever: one step takes 0.1 % off it, half of a last bit is 0.2 %."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(512))
    optimizer = BFloat16AdamW([p], lr=0.0, betas=(0.9, 0.999))
    p.grad = torch.ones(512)
    optimizer.step()
    start = optimizer.state[p]["exp_avg_sq"].float().mean()
    p.grad = torch.zeros(512)
    for _ in range(500):
        optimizer.step()
    assert float(optimizer.state[p]["exp_avg_sq"].float().mean() / start) == pytest.approx(0.999**500, rel=0.1)


def test_stochastic_rounding_is_right_on_average_and_exact_on_bfloat16_values():
    torch.manual_seed(0)
    x = torch.tensor([1.001, -1.001, 3.3e-12, -7e20]).repeat(20_000, 1)
    mean = stochastic_bfloat16(x).double().mean(0)
    np.testing.assert_allclose(mean, x[0].double(), rtol=2e-4)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(stochastic_bfloat16(exact.float()), exact)
    assert torch.equal(stochastic_bfloat16(torch.zeros(3)), torch.zeros(3).bfloat16())


def test_bfloat16_moments_are_restored_bit_for_bit():
    torch.manual_seed(0)
    p = parameter()
    optimizer = BFloat16AdamW([p], lr=0.01)
    descend(p, optimizer, 5)
    other = torch.nn.Parameter(p.detach().clone())
    restored = BFloat16AdamW([other], lr=0.01)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.state[other]["exp_avg"].dtype is torch.bfloat16
    random = torch.get_rng_state()
    descend(p, optimizer, 5, seed=2)
    torch.set_rng_state(random)
    descend(other, restored, 5, seed=2)
    assert torch.equal(p, other)


def test_eight_bits_without_a_library_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"torchao or bitsandbytes.*pip install"):
        make_optimizer([parameter()], LearnerConfig(optimizer="adamw_8bit"), 0.1)


def test_eight_bit_moments_follow_float32_ones():
    if not any(importlib.util.find_spec(name) for name in EIGHT_BIT):
        pytest.skip(f"needs one of {EIGHT_BIT}: neither is installed")
    exact, rounded = parameter(shape=(64, 128)), parameter(shape=(64, 128))
    config = LearnerConfig(optimizer="adamw_8bit", betas=(0.9, 0.99))
    optimizer = make_optimizer([rounded], config, 1.0)
    set_rate(optimizer, 0.02)
    descend(exact, torch.optim.AdamW([exact], lr=0.02, betas=(0.9, 0.99), weight_decay=0.0), 20)
    descend(rounded, optimizer, 20)
    assert (exact - rounded).norm() < 0.1 * (exact - parameter(shape=(64, 128))).norm()


def test_eight_bits_and_bfloat16_are_not_asked_for_together():
    with pytest.raises(ValidationError, match="omit it"):
        LearnerConfig(optimizer="adamw_8bit", optimizer_dtype="bfloat16")


def test_rates_reach_numbers_and_tensors():
    p = parameter()
    optimizer = torch.optim.AdamW([p], lr=torch.tensor(1.0), foreach=False, capturable=False)
    place = optimizer.param_groups[0]["lr"]
    set_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is place
    assert float(place) == 0.25
    plain = torch.optim.AdamW([p], lr=1.0)
    set_rate(plain, 0.5)
    assert plain.param_groups[0]["lr"] == 0.5


def test_gradients_are_scaled_together_to_the_limit_and_never_up():
    a, b, idle = parameter(0), parameter(1), parameter(2)
    a.grad, b.grad = torch.full((8, 16), 3.0), torch.full((8, 16), 4.0)
    norm = float(gradient_norm([a, b, idle]))
    assert norm == pytest.approx(5.0 * 128**0.5, rel=1e-5)
    clip_gradients([a, b, idle], norm, 5.0)
    assert float(torch.cat([a.grad, b.grad]).norm()) == pytest.approx(5.0, rel=1e-5)
    before = a.grad.clone()
    clip_gradients([a, b], float(gradient_norm([a, b])), 50.0)
    assert torch.equal(a.grad, before)
    b.grad[0, 0] = float("inf")
    assert not np.isfinite(float(gradient_norm([a, b])))
