"""A pushed folder loads like any model folder and says how the model was made."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.cli.push import card, push, upload, write_folder
from pipeline.cli.replay import open_run
from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.runtime.run_directory import write_json_atomically
from pipeline.store.evaluation_results import write_results
from tests.unit.show.making import Rollout, make_run


def make_checkpoint(run: Path) -> None:
    model = run / "checkpoints" / "u000002" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    write_json_atomically(model.parent / "state.json", {"updates": 2, "policy_version": 3})


def test_the_folder_has_the_model_and_a_card_with_curves_scores_configuration_and_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.views.plots.draw", lambda lines, picture: picture.write_bytes(b"png") and None)
    monkeypatch.setattr("pipeline.runtime.folders.find_damage", lambda folder: None)
    run = make_run(tmp_path / "some", [Rollout(0, 0, 1.0, "sums/1", step=1)])
    make_checkpoint(run)
    config, directory = open_run(run, ["learner.learning_rate=0.25", "model.source=org/base"])
    results = [
        {"evaluation": n, "updates": 2, "status": status, "environments": {"sums": {"score": score, "se": None}}}
        for n, (status, score) in enumerate((("complete", 0.5), ("abandoned", 0.25), ("complete", 0.75)))
    ]  # the learner made the second update again
    write_results(directory.evaluations_file, results)
    write_folder(config, directory, "latest", tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "README.md", "curves.png"}
    _, header, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["base_model"] == "org/base"
    assert "learning_rate: 0.25" in text and "| 2 | sums | 0.750 |  |" in text and text.count("| sums |") == 1
    assert "![Curves" in text
    assert "## Rollouts" in text and str(tmp_path) not in text
    configuration = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert configuration["environments"] == {"guess": {"name": "number_guess"}}
    assert "differs from the defaults, and all options of the estimator and of the loss:" in text
    with pytest.raises(ConfigurationError, match="new or empty folder"):
        write_folder(config, directory, "latest", tmp_path / "out")


def test_the_card_names_no_folder_and_no_address_of_a_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "some", [Rollout(0, 0, 1.0, "sums/1", step=1)])
    data = f"{{kind: jsonl, splits: {{train: {tmp_path}/a.jsonl, eval: {tmp_path}/b.jsonl}}}}"
    options = f"{{files: [{tmp_path}/c.txt], url: 'http://user:password@host:8000'}}"
    overrides = [f"environments.guess.tasks_from={data}", f"environments.guess.options={options}"]
    text = card(*open_run(run, overrides), 2, False)
    configuration = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    section = configuration["environments"]["guess"]
    assert str(tmp_path) not in text and section["options"] == {"files": ["c.txt"], "url": "(an address)"}
    assert "password" not in text
    assert section["tasks_from"]["splits"] == {"train": "a.jsonl", "eval": "b.jsonl"}


@pytest.mark.parametrize(
    ("to", "words"), [(None, "--to hf:USER/MODEL or --out DIR"), ("s3:x", "expected hf:USER/MODEL")]
)
def test_what_cannot_be_pushed_is_one_sentence(to: str | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        push(tmp_path, to=to)


def test_an_upload_without_a_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(AfterplayError, match="me/model could not be uploaded") as caught:
        upload(tmp_path, "me/model", private=True)
    assert len(str(caught.value).splitlines()) == 1
