"""Every family of models of docs/MODELS.md, as a small random model: it trains, is saved, published and served."""

import pytest
import transformers

from pipeline.errors import ConfigurationError
from tests.support.families import (
    FAMILIES,
    check_adapters,
    check_engine,
    check_learning,
    check_publication,
    check_saving,
    write_family,
)

NAMES = [name for name in FAMILIES if name != "Gemma 4"]
"""The learner cannot read the sizes of Gemma 4's heads, which differ among layers."""
UNSERVED = {"Qwen3.5", "Gemma 2", "gpt-oss (experts)", "DeepSeek V3 (experts)", "LFM2", "Nemotron 3"}
"""Families that transformers' continuous batching does not generate with."""


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    transformers.utils.logging.disable_progress_bar()
    return request.param, write_family(request.param, tmp_path_factory.mktemp("family"))


def test_rows_score_alike_in_every_form(family):
    check_learning(family[1])


def test_a_checkpoint_is_read_bit_for_bit(family, tmp_path):
    check_saving(family[1], tmp_path)


def test_published_weights_have_the_names_of_the_files(family, tmp_path):
    check_publication(family[1], tmp_path)


def test_the_engine_serves_what_the_learner_publishes_or_says_why_not(family, tmp_path):
    name, folder = family
    if name not in UNSERVED:
        check_engine(folder, tmp_path)
        return
    with pytest.raises(ConfigurationError, match=r"cannot generate with \w+, which .*: set engine.kind: vllm"):
        check_engine(folder, tmp_path)


def test_adapters_train_and_are_published_merged(family, tmp_path):
    name, folder = family
    if name != "Nemotron 3":
        check_adapters(folder, tmp_path)
        return
    with pytest.raises(ConfigurationError, match=r"learner\.lora\.targets: choose other layers: .*'out_proj'"):
        check_adapters(folder, tmp_path)
