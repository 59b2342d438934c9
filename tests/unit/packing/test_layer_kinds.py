"""Windows, sinks and capped scores in packed rows are those of transformers' eager attention in padded rows."""

import logging

import numpy as np
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import sliding_window_causal_mask_function

from learner.data.microbatch import SHARED_TOKENS_MIN, Form, lay_out
from learner.policy import attention
from learner.policy.attention import NAME, Runs, packed_attention
from learner.policy.policy import Policy
from pipeline.errors import ConfigurationError
from tests.unit.packing.conftest import PACKED, SHARED, grouped_rows
from tests.unit.packing.test_equality import assert_same, part_of, scores, slow_varlen

PADDED = Form()
WINDOW = 4
SMALL = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "sliding_window": WINDOW,
}  # fmt: skip
HEADS = {"head_dim": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "mistral": ("MistralConfig", HEADS),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", HEADS | MIXED | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", HEADS | MIXED | {"query_pre_attn_scalar": 8}),
    "cohere2": ("Cohere2Config", HEADS | MIXED),
    "olmo3": ("Olmo3Config", MIXED),
    "gpt_oss": ("GptOssConfig", HEADS | MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
PADDED_FAMILIES = {
    "linear_attention": (
        "Qwen3_5TextConfig",
        HEADS | {"layer_types": ["linear_attention", "full_attention"], "sliding_window": None},
    ),
    "conv": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
}
of_each_family = pytest.mark.parametrize("family", FAMILIES)
of_each_form = pytest.mark.parametrize("form", [PACKED, SHARED], ids=["packed", "shared"])


def model_of(family):
    name, options = (FAMILIES | PADDED_FAMILIES)[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**SMALL | options))


def eager_model(family):
    model = model_of(family)
    model.set_attn_implementation("eager")
    return model


def changed(name, change):
    """Packed attention that is given another value of one argument."""

    def attend(*arguments, **options):
        if options.get("runs") is not None and options.get(name) is not None:
            options[name] = change(options[name])
        return packed_attention(*arguments, **options)

    return attend


MUTANTS = {
    "a key more": ("mistral", changed("sliding_window", lambda window: window + 1)),
    "a key less": ("mistral", changed("sliding_window", lambda window: window - 1)),
    "not handed on": ("gemma3", changed("sliding_window", lambda window: None)),
    "another than the config's": ("olmo3", changed("sliding_window", lambda window: 4096)),
    "no sinks": ("gpt_oss", changed("s_aux", lambda sinks: None)),
    "no cap": ("gemma2", changed("softcap", lambda cap: None)),
}


@pytest.fixture(params=MUTANTS)
def mutant(request):
    """A family, and a function that puts its wrong attention into force."""
    family, attend = MUTANTS[request.param]
    yield family, lambda: AttentionInterface.register(NAME, attend)
    AttentionInterface.register(NAME, packed_attention)


@of_each_family
@of_each_form
@pytest.mark.parametrize("prompt", [2, 9], ids=["prefix in the window", "prefix beyond it"])
def test_log_probs_entropies_and_gradients_are_those_of_padded_rows(policy_of, family, form, prompt):
    rows = grouped_rows(prompt, prompt=prompt, longest=30)
    expected = scores(policy_of(PADDED, eager_model(family)), rows)
    assert_same(scores(policy_of(form, model_of(family)), rows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_gradient_checkpointing_changes_nothing(policy_of, family):
    rows = grouped_rows(5, longest=30)
    expected = scores(policy_of(PADDED, eager_model(family)), rows)
    checkpointed = policy_of(SHARED, model_of(family), gradient_checkpointing=True)
    assert_same(scores(checkpointed, rows), expected, rtol=1e-5, atol=1e-5)


@of_each_family
def test_half_precision_stays_near(policy_of, family):
    rows = grouped_rows(9, longest=30)
    with torch.no_grad():
        exact = policy_of(PADDED, eager_model(family)).score(part_of(rows, PADDED))[0]
        for form in (PADDED, PACKED, SHARED):
            near = policy_of(form, model_of(family), compute_dtype="bfloat16").score(part_of(rows, form))[0]
            assert float((near - exact).abs().mean()) < 0.1, form


def test_a_wrong_window_sink_or_cap_is_refused(policy_of, mutant):
    family, install = mutant
    install()
    with pytest.raises(ConfigurationError, match="differ"):
        policy_of(SHARED, model_of(family))


def test_a_wrong_window_sink_or_cap_changes_scores(policy_of, mutant):
    """So the comparison with padded rows can fail."""
    family, install = mutant
    rows = grouped_rows(2, longest=30)
    with torch.no_grad():
        expected = policy_of(PADDED, eager_model(family)).score(part_of(rows, PADDED))[0]
        policy = policy_of(SHARED, model_of(family))
        install()
        assert float((policy.score(part_of(rows, SHARED))[0] - expected).abs().max()) > 1e-2


def test_a_window_has_as_many_keys_as_transformers_masks_give_it():
    for keys in range(1, 8):
        for queries in range(1, keys + 1):
            rows = [np.arange(keys + 1, dtype=np.int32)]
            runs = Runs.of(lay_out(rows, None), torch.device("cpu"), varlen=False)
            for window in range(1, keys + 2):
                mask = runs.mask(torch.zeros(1, 1, queries, 1), keys, window)
                expected = torch.zeros(queries, keys)
                sees = sliding_window_causal_mask_function(window)
                for i in range(queries):
                    for j in range(keys):
                        if not sees(0, 0, torch.tensor(keys - queries + i), torch.tensor(j)):
                            expected[i, j] = -torch.inf
                if mask is None:
                    assert queries == keys
                    mask = torch.full((keys, keys), -torch.inf).triu(1)
                assert torch.equal(mask, expected), (keys, queries, window)


def test_masks_are_made_once_for_all_layers_and_blocks(policy_of, monkeypatch):
    made = []
    of = Runs.of.__func__
    monkeypatch.setattr(Runs, "of", classmethod(lambda cls, *a, **k: made.append(of(cls, *a, **k)) or made[-1]))
    policy = policy_of(PACKED, model_of("mistral"))
    made.clear()
    rows = grouped_rows(3, longest=60)
    with torch.no_grad():
        policy.score(part_of(rows, PACKED))
    (runs,) = made
    assert max(runs.query_lengths) > 10 * WINDOW
    assert len(runs.masks) <= 2 * WINDOW
    assert all(mask.numel() <= WINDOW * (2 * WINDOW - 1) for mask in runs.masks.values())


@of_each_family
def test_windows_and_caps_are_as_before_after_the_trial(policy_of, family):
    def values(model):
        holders = [model.config, *model.modules()]
        return [[getattr(h, n, None) for h in holders] for n in ("sliding_window", "attn_logit_softcapping")]

    assert values(policy_of(SHARED, model_of(family)).model) == values(model_of(family))


@of_each_family
def test_an_empty_model_is_tried_with_a_layer_of_each_kind(kit, family):
    config = model_of(family).config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    policy = Policy(model, kit.learner_config(packing="packed"), torch.device("cpu"))
    assert policy.form == Form(packed=True, shared_min=SHARED_TOKENS_MIN)


def test_an_empty_model_is_tried_though_its_tokens_of_images_are_beyond_the_vocabulary_of_the_trial(kit):
    text = SMALL | HEADS | MIXED | {"vocab_size": 2000, "global_head_dim": 8, "num_kv_shared_layers": 0}
    ids = {"image_token_id": 1999, "video_token_id": 1998, "audio_token_id": 1997}
    config = transformers.Gemma4Config(
        text_config=text | {"hidden_size_per_layer_input": 0}, vision_config=None, audio_config=None, **ids
    )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    policy = Policy(model, kit.learner_config(packing="packed"), torch.device("cpu"))
    assert policy.form == Form(packed=True, shared_min=SHARED_TOKENS_MIN)


@pytest.mark.parametrize("kind", PADDED_FAMILIES)
def test_layers_that_hand_on_a_state_are_padded_untouched_and_named(policy_of, kit, caplog, kind):
    model = model_of(kind)
    before = model.config._attn_implementation
    with caplog.at_level(logging.INFO):
        policy = Policy(model, kit.learner_config(), torch.device("cpu"))
    assert (policy.form, policy.form.padded_because) == (PADDED, "model")
    assert model.config._attn_implementation == before
    assert kind in caplog.text
    with pytest.raises(ConfigurationError, match=kind):
        policy_of(PACKED, model_of(kind))


def test_padded_rows_have_capped_scores(policy_of):
    rows = grouped_rows(4, longest=30)
    expected = scores(policy_of(PADDED, eager_model("gemma2")), rows)
    assert_same(scores(policy_of(PADDED, model_of("gemma2")), rows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_a_packed_model_is_called_as_any_other(policy_of, family):
    """With padding on the left and a mask, as generation calls it."""
    ids = torch.randint(3, 23, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model, eager = policy_of(SHARED, model_of(family)).model, eager_model(family).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for given in (mask, None):
            came, expected = (m(input_ids=ids, attention_mask=given).logits[mask.bool()] for m in (model, eager))
            torch.testing.assert_close(came, expected, rtol=1e-5, atol=1e-5)
        came, expected = (m.generate(ids, attention_mask=mask, **options) for m in (model, eager))
    assert torch.equal(came, expected)


@of_each_form
@pytest.mark.parametrize("family", ["mistral", "gemma3", "cohere2"])
def test_the_call_of_variable_length_attention_slides_the_same_window(policy_of, monkeypatch, family, form):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen)
    rows = grouped_rows(8, longest=30)
    policy = policy_of(form, model_of(family))
    policy._varlen = True
    assert_same(scores(policy, rows), scores(policy_of(PADDED, eager_model(family)), rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "packed"), [("gemma3", True), ("gemma2", False), ("gpt_oss", False)])
def test_sinks_and_caps_are_padded_where_one_call_does_all_runs(kit, monkeypatch, caplog, family, packed):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen)
    monkeypatch.setattr(attention, "can_varlen", lambda *_: True)
    with caplog.at_level(logging.INFO):
        policy = Policy(model_of(family), kit.learner_config(), torch.device("cpu"))
    assert policy.form.packed is packed
    assert ("neither sinks nor capped scores" in caplog.text) is not packed
    assert (policy.model.config._attn_implementation == NAME) is packed
