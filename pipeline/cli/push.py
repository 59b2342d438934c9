"""``afterplay push``: a checkpoint as a Hugging Face model folder with a model card, written or uploaded."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.options import Checkpoint, Run
from pipeline.cli.replay import open_run
from pipeline.errors import AfterplayError, ConfigurationError, StoreError

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.runtime.run_directory import RunDirectory

SHOWN = (
    "model", "sampling", "environments", "groups", "staleness", "advantage", "importance", "loss", "learner", "replay",
    "evaluation",
)  # fmt: skip
"""Sections of the run file in the card. Addresses, keys and folders of the machine are in others."""
SCHEME = "hf:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def push(
    run: Run,
    to: Annotated[str | None, typer.Option(metavar="hf:NAME", help="Hub repository, as hf:USER/MODEL.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the folder here.")] = None,
    checkpoint: Checkpoint = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Publish a checkpoint: model, tokenizer, and a model card with curves, evaluations, configuration and ledger.

    With --out alone nothing is uploaded: look at the folder first. The upload uses the token of `hf auth login` or
    HF_TOKEN.

      afterplay push runs/tiny --out model
      afterplay push runs/NAME --checkpoint best --to hf:USER/MODEL --private
    """
    if to is None and out is None:
        raise ConfigurationError("push: expected --to hf:USER/MODEL or --out DIR, got neither")
    if private and to is None:
        raise ConfigurationError("--private: expected --to beside it, which makes the repository")
    if to is not None and not (to.startswith(SCHEME) and _HUB_ID.fullmatch(to.removeprefix(SCHEME))):
        raise ConfigurationError(f"--to: expected hf:USER/MODEL, got {to!r}")
    config, directory = open_run(run)
    with tempfile.TemporaryDirectory() as scratch:
        folder = out if out is not None else Path(scratch) / "model"
        write_folder(config, directory, checkpoint, folder)
        if out is not None:
            typer.echo(f"written to {out}")
        if to is not None:
            typer.echo(upload(folder, to.removeprefix(SCHEME), private))


def write_folder(config: RunConfig, directory: RunDirectory, checkpoint: str | None, folder: Path) -> None:
    """Copy the model of a checkpoint and write its card. Raises :class:`ConfigurationError`."""
    from pipeline.runtime.folders import find_damage
    from pipeline.supervisor.evaluate import find_weights
    from pipeline.views.plots import draw

    weights = find_weights(directory, checkpoint)
    if weights.model is None:
        got = "the initial model" if checkpoint else "none yet"
        raise ConfigurationError(f"push: expected a checkpoint in {directory.checkpoints}, got {got}")
    if problem := find_damage(weights.model.parent):
        raise ConfigurationError(f"push: {weights.name} is damaged ({problem}): name another with --checkpoint")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"--out: expected a new or empty folder, got {folder}")
    shutil.copytree(weights.model, folder, dirs_exist_ok=True)
    has_curves = draw(directory.metrics_file, folder / "curves.png") is None
    (folder / "README.md").write_text(card(config, directory, weights.updates, has_curves), encoding="utf-8")


def card(config: RunConfig, directory: RunDirectory, updates: int, has_curves: bool) -> str:
    """The model card of the weights after ``updates`` updates."""
    from pipeline.config.load import dump_yaml

    header: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["afterplay", "reinforcement-learning"],
    }
    if _HUB_ID.fullmatch(config.model.source) and not Path(config.model.source).exists():
        header["base_model"] = config.model.source
    source = header.get("base_model") or Path(config.model.source).name
    trained = ", ".join(config.trained_environments) or "none"
    parts = [
        f"---\n{dump_yaml(header)}---\n\n# {config.run.name}",
        f"Trained from `{source}` with Afterplay, {updates} updates, on the environments {trained}.",
    ]
    if has_curves:
        parts.append("![Curves of the run](curves.png)")
    parts += _evaluations(directory, updates)
    what = "What differs from the defaults, and all options of the estimator and of the loss:"
    parts.append(f"## Configuration\n\n{what}\n\n```yaml\n{dump_yaml(_changed(config))}```")
    parts += _ledger(config, directory)
    return "\n\n".join(parts) + "\n"


def upload(folder: Path, name: str, private: bool) -> str:
    """Create the repository if needed and upload; returns its address. Raises :class:`AfterplayError`."""
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload with Afterplay")
    except Exception as error:  # its own errors, and those of its HTTP library: httpx, since 2.0 httpx2
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AfterplayError(
            f"push: {name} could not be uploaded ({reason}). Check the network, the name and the token (hf auth login, "
            "or HF_TOKEN), and repeat"
        ) from error
    return str(address)


def _evaluations(directory: RunDirectory, updates: int) -> list[str]:
    from pipeline.store.evaluation_results import results_by_updates

    rows = [
        (str(of), name, f"{scores['score']:.3f}", "" if scores["se"] is None else f"{scores['se']:.3f}")
        for of, result in results_by_updates(directory.evaluations_file).items()
        if of in (0, updates)
        for name, scores in result["environments"].items()
        if scores["score"] is not None
    ]
    return [f"## Evaluation\n\n{_table(('updates', 'environment', 'score', 'standard error'), rows)}"] if rows else []


def _ledger(config: RunConfig, directory: RunDirectory) -> list[str]:
    """Counts of orders, trajectories and groups by state; nothing where there is no store."""
    from pipeline.store.ledger import read_ledger
    from pipeline.store.store import store_path

    try:
        found = read_ledger(store_path(config, directory))
    except StoreError:
        return []
    accounts = ("orders", "trajectories", "groups")
    rows = [(what, state, str(n)) for what in accounts for state, n in getattr(found, what).items() if n]
    return [f"## Rollouts\n\n{_table(('account', 'state', 'count'), rows)}"]


def _changed(config: RunConfig) -> dict[str, Any]:
    """Values of :data:`SHOWN` sections that were set."""
    from pipeline.config.rollouts import EnvironmentConfig

    set_, default = config.model_dump(mode="json"), type(config)().model_dump(mode="json")
    usual = EnvironmentConfig().model_dump(mode="json", exclude={"name"})
    default["environments"] = dict.fromkeys(config.environments, usual)
    found = {section: _difference(set_[section], default[section]) for section in SHOWN}
    return {section: value for section, value in found.items() if value}


def _difference(value: Any, default: Any) -> Any:
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name  # no folders of this machine
    if isinstance(value, str) and "://" in value:
        return "(an address)"  # none of other machines either: one may have a password
    if isinstance(value, list):
        return [_difference(inner, None) for inner in value]
    if not isinstance(value, dict):
        return value
    usual = default if isinstance(default, dict) else {}
    return {key: _difference(inner, usual.get(key)) for key, inner in value.items() if inner != usual.get(key)}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
