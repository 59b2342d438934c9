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
from tests.support.quick import slow_but

QUICK = ("Qwen3", "Qwen3 (experts)", "Qwen3.5", "Gemma 3", "Nemotron 3")
"""One of each kind of layer."""
some_families = pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES), indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    transformers.utils.logging.disable_progress_bar()
    return request.param, write_family(request.param, tmp_path_factory.mktemp("family"))


def test_rows_score_alike_in_every_form(family):
    check_learning(family[1])


def test_a_checkpoint_is_read_bit_for_bit(family, tmp_path):
    check_saving(family[1], tmp_path)


def test_published_weights_have_the_names_of_the_files(family, tmp_path):
    check_publication(family[1], tmp_path)


@some_families
def test_the_engine_samples_with_what_the_learner_publishes(family, tmp_path):
    check_engine(family[1], tmp_path)


@some_families
def test_adapters_train_and_are_published_merged(family, tmp_path):
    name, folder = family
    if name != "Nemotron 3":
        check_adapters(folder, tmp_path)
        return
    with pytest.raises(ConfigurationError, match=r"learner\.lora\.targets: choose other layers: .*'out_proj'"):
        check_adapters(folder, tmp_path)
