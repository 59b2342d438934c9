"""Every family of models of docs/MODELS.md, as a small random model: it trains, is saved, published and served."""

from pathlib import Path

import pytest
import transformers

from pipeline.errors import ConfigurationError
from scripts import models_page
from tests.support.chat_templates import published, tokenizer_of
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


PAGE = (Path(__file__).parents[3] / "docs" / "MODELS.md").read_text()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    transformers.utils.logging.disable_progress_bar()
    return request.param, write_family(request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture
def page(family):
    """Cells of the family's row in docs/MODELS.md, by their columns, from which each test takes what it shows."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    (columns,) = [row for row in rows if row[0] == "family"]
    (row,) = [row for row in rows if row[0] == family[0]]
    return dict(zip(columns, row, strict=True))


def test_rows_score_alike_in_every_form(family, page):
    form = check_learning(family[1])
    assert (page["computes"], page["rows"]) == ("yes", "packed" if form.packed else "padded")


def test_a_checkpoint_is_read_bit_for_bit(family, page, tmp_path):
    check_saving(family[1], tmp_path)
    assert page["checkpoint"] == "yes"


def test_published_weights_have_the_names_of_the_files(family, page, tmp_path):
    check_publication(family[1], tmp_path)
    assert page["published"] == "yes"


@some_families
def test_the_engine_samples_with_what_the_learner_publishes(family, page, tmp_path):
    check_engine(family[1], tmp_path)
    assert page["embedded engine"] == "yes"


@some_families
def test_adapters_train_and_are_published_merged(family, page, tmp_path):
    name, folder = family
    if name != "Nemotron 3":
        check_adapters(folder, tmp_path)
        assert page["adapters"] == "yes"
        return
    with pytest.raises(ConfigurationError, match=r"learner\.lora\.targets: choose other layers: .*'out_proj'"):
        check_adapters(folder, tmp_path)
    assert page["adapters"].startswith("no: peft refuses a layer")


def test_classes_and_parsers_are_those_of_the_page(family, page):
    name, folder = family
    assert page["class in transformers"] == f"`{models_page.architecture_of(folder)}`"
    template = FAMILIES[name].template
    if template is None:
        assert page["tool calls"] == "-"
    elif template in (sources := published()):  # else its package is not installed
        assert page["tool calls"] == models_page.parser_of_template(sources[template], tokenizer_of(template))
