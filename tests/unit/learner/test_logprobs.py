import pytest
import torch

from learner.policy.logprobs import Head, sampled_logprobs


def reference(hidden, head, targets, temperatures):
    logits = hidden @ head.weight_VH.t()
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    log_p = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def parts(seed=0, s=7, h=5, v=11, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(s, h, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, h, generator=g, dtype=dtype, requires_grad=True)
    bias = torch.randn(v, generator=g, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, v, (s,), generator=g)
    temperatures = torch.rand(s, generator=g, dtype=torch.float32) + 0.5
    return hidden, weight, bias, targets, temperatures


HEADS = [{}, {"scale": 0.3}, {"softcap": 2.0}, {"scale": 1.7, "softcap": 3.0}]


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("rows_max", [1, 3, 100])
def test_chunked_logprobs_and_entropy_equal_the_full_softmax(options, rows_max):
    hidden, weight, bias, targets, temperatures = parts()
    head = Head(weight, bias, **options)
    ours = sampled_logprobs(hidden, head, targets, temperatures, rows_max=rows_max)
    for came, expected in zip(ours, reference(hidden, head, targets, temperatures.double()), strict=True):
        torch.testing.assert_close(came, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", HEADS)
def test_gradients_pass_gradcheck(options):
    hidden, weight, bias, targets, temperatures = parts(s=4, h=3, v=6)

    def call(x, w, b):
        return sampled_logprobs(x, Head(w, b, **options), targets, temperatures, rows_max=3)

    assert torch.autograd.gradcheck(call, (hidden, weight, bias), atol=1e-6)


def test_gradient_through_logprobs_alone_equals_the_reference():
    hidden, weight, _, targets, temperatures = parts()
    coefficients = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    ours, _ = sampled_logprobs(hidden, Head(weight), targets, temperatures, rows_max=2)
    came = torch.autograd.grad((ours * coefficients).sum(), (hidden, weight))
    theirs, _ = reference(hidden, Head(weight), targets, temperatures.double())
    expected = torch.autograd.grad((theirs * coefficients).sum(), (hidden, weight))
    for a, b in zip(came, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_bfloat16_products_stay_close_to_float32():
    hidden, weight, _, targets, temperatures = parts(s=20, h=32, v=50, dtype=torch.float32)
    rough, _ = sampled_logprobs(hidden, Head(weight), targets, temperatures, rows_max=8, compute_dtype=torch.bfloat16)
    exact, _ = sampled_logprobs(hidden, Head(weight), targets, temperatures, rows_max=8)
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.1


def test_no_tensor_of_tokens_times_vocabulary_is_kept_for_backward():
    hidden, weight, _, targets, temperatures = parts(s=64, h=4, v=1000, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        sampled_logprobs(hidden, Head(weight), targets, temperatures, rows_max=8)
    assert max(saved) < 64 * 1000 // 8
