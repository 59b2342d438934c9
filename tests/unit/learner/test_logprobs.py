import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.data.rows import Row
from learner.policy.logprobs import Head, Tile, sampled_logprobs
from learner.policy.policy import Policy
from pipeline.errors import ConfigurationError


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
@pytest.mark.parametrize("tile", [Tile(1, 11), Tile(3, 4), Tile(7, 1), Tile(100, 100), None])
def test_logprobs_and_entropy_of_tiles_equal_the_full_softmax(options, tile):
    hidden, weight, bias, targets, temperatures = parts()
    head = Head(weight, bias, **options)
    ours = sampled_logprobs(hidden, head, targets, temperatures, tile=tile)
    for came, expected in zip(ours, reference(hidden, head, targets, temperatures.double()), strict=True):
        torch.testing.assert_close(came, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", HEADS)
def test_gradients_pass_gradcheck(options):
    hidden, weight, bias, targets, temperatures = parts(s=4, h=3, v=6)

    def call(x, w, b):
        return sampled_logprobs(x, Head(w, b, **options), targets, temperatures, tile=Tile(3, 4))

    assert torch.autograd.gradcheck(call, (hidden, weight, bias), atol=1e-6)


def test_gradient_through_logprobs_alone_equals_the_reference():
    hidden, weight, _, targets, temperatures = parts()
    coefficients = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    ours, _ = sampled_logprobs(hidden, Head(weight), targets, temperatures, tile=Tile(2, 3))
    came = torch.autograd.grad((ours * coefficients).sum(), (hidden, weight))
    theirs, _ = reference(hidden, Head(weight), targets, temperatures.double())
    expected = torch.autograd.grad((theirs * coefficients).sum(), (hidden, weight))
    for a, b in zip(came, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_bfloat16_products_stay_close_to_float32():
    hidden, weight, _, targets, temperatures = parts(s=20, h=32, v=50, dtype=torch.float32)
    rough, _ = sampled_logprobs(
        hidden, Head(weight), targets, temperatures, tile=Tile(8, 16), compute_dtype=torch.bfloat16
    )
    exact, _ = sampled_logprobs(hidden, Head(weight), targets, temperatures, tile=Tile(8, 16))
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.1


def test_no_tensor_of_tokens_times_vocabulary_is_kept_for_backward():
    hidden, weight, _, targets, temperatures = parts(s=64, h=4, v=1000, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        sampled_logprobs(hidden, Head(weight), targets, temperatures, tile=Tile(8, 16))
    assert max(saved) <= max(64, 1000) * 4


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write in tensors of ``size`` elements, and the most elements of a tensor made."""

    ALIASES = ("aten::t", "aten::slice", "aten::detach", "aten::gather", "aten::scatter_", "aten::empty_like")

    def __init__(self, size):
        super().__init__()
        self.size, self.n_bytes, self.largest = size, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function._schema.name not in self.ALIASES:
            touched = [*tree_leaves(args), *tree_leaves(out)]
            tensors = [x for x in touched if isinstance(x, torch.Tensor)]
            self.n_bytes += sum(x.numel() * x.element_size() for x in tensors if x.numel() == self.size)
            self.largest = max(self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_tile_and_a_logit_costs_at_most_sixty_bytes(dtype):
    """The bytes are of both passes; a slice of rows by the whole vocabulary cost 100 (float32) and 110 (bfloat16)."""
    s, h, v = 256, 16, 2048
    hidden, weight, _, targets, _ = parts(s=s, h=h, v=v, dtype=torch.float32)
    tile = Tile(128, 512)
    with Traffic(128 * 512) as traffic:
        logprobs, _ = sampled_logprobs(hidden, Head(weight), targets, compute_dtype=dtype, tile=tile)
        logprobs.sum().backward()
    assert traffic.largest == 128 * 512
    assert traffic.n_bytes <= 60 * s * v


SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.5, "pad_token_id": 0,
}  # fmt: skip
CAPPED = SMALL | {
    "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 1.0,
}  # fmt: skip
PADDED = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "head_dim": 8,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8, "rel_extent": 16,
    "logits_mup_width_multiplier": 4.0, "unpadded_vocab_size": 60,
}  # fmt: skip
STATES = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}


@pytest.mark.parametrize(
    "family, options",
    [
        ("Gemma4Config", {"text_config": CAPPED, "vision_config": None, "audio_config": None}),
        ("HyperCLOVAXConfig", SMALL | {"logits_scaling": 0.25}),
        ("InklingTextConfig", SMALL | PADDED),
        ("FalconH1Config", SMALL | STATES | {"lm_head_multiplier": 0.25}),
        ("RecurrentGemmaConfig", SMALL | {"num_hidden_layers": 3, "lru_width": 16, "logits_soft_cap": 1.0}),
        ("xLSTMConfig", SMALL | {"hidden_size": 128, "num_heads": 2, "use_cache": False, "output_logit_soft_cap": 1.0}),
    ],
)
def test_the_policy_has_the_log_probabilities_of_the_models_own_logits(kit, family, options):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family)(**options)).eval()
    ids = np.random.default_rng(0).integers(1, 64, 9)
    with torch.no_grad():
        every = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
    policy = Policy(model, kit.learner_config(packing="padded"), torch.device("cpu"))
    came, _ = policy.score_rows([Row.plain("x", ids)])
    np.testing.assert_allclose(came, every[torch.arange(8), torch.from_numpy(ids[1:])], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["ModernBertDecoderConfig", "RoCBertConfig"])
def test_a_model_with_weights_before_its_output_layer_is_refused(kit, family):
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family)(**SMALL, is_decoder=True))
    with pytest.raises(ConfigurationError, match=r"logits are those of one output layer, got .*dense.weight"):
        Policy(model, kit.learner_config(packing="padded"), torch.device("cpu"))
