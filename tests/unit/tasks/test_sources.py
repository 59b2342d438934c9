"""The same task is the same row in every kind of data; what is wrong with data is told with its place."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.adapters.question import Question
from pipeline.errors import ConfigurationError
from pipeline.tasks.readers import BadRow, JsonlRows
from tests.unit.tasks.conftest import Opened, questions, write_jsonl


def parquet(path: Path, n: int, group: int = 7) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[data]'")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(questions(n)), path, row_group_size=group)
    return path


def saved(path: Path, n: int) -> Path:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install '.[data]'")
    train, test = datasets.Dataset.from_list(questions(n)), datasets.Dataset.from_list(questions(2 * n)[n:])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(path))
    return path


def test_all_kinds_give_the_same_tasks(tmp_path: Path, opened: Opened) -> None:
    jsonl = opened(kind="jsonl", path=write_jsonl(tmp_path / "q.jsonl", questions(20))).splits["train"]
    others = [
        opened(kind="parquet", path=parquet(tmp_path / "q.parquet", 20)).splits["train"],
        opened(kind="huggingface", path=saved(tmp_path / "saved", 20)).splits["train"],
    ]
    assert jsonl[3].payload == {"prompt": "What is 3 + 1?", "answer": 4}
    assert jsonl[3].task_id.startswith("q/3-") and jsonl[3].environment == "q" and jsonl[3].seed == 3
    for other in others:
        assert list(other) == list(jsonl)
        assert other.fingerprint == jsonl.fingerprint
        assert [other[i] for i in (19, 0, 7, 8)] == [jsonl[i] for i in (19, 0, 7, 8)]


def test_a_column_with_dots_in_its_name_is_found_in_every_kind(tmp_path: Path, opened: Opened) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install '.[data]'")
    rows = [{"in.prompt": f"Add {n}", "out": {"answer": n, "other": 0}, "out.level": n, "a": 1} for n in range(5)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "q.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    columns = {"prompt": "in.prompt", "answer": "out.answer", "level": "out.level"}
    chosen = {"columns": columns, "splits": {"train": 1.0}}
    jsonl = opened(kind="jsonl", path=write_jsonl(tmp_path / "q.jsonl", rows), **chosen).splits["train"]
    assert jsonl[2].payload == {"prompt": "Add 2", "answer": 2, "level": 2}
    for kind, path in (("parquet", tmp_path / "q.parquet"), ("huggingface", tmp_path / "saved")):
        assert list(opened(kind=kind, path=path, **chosen).splits["train"]) == list(jsonl)


def test_messages_out_of_arrow_are_asked_as_they_were_written(tmp_path: Path, opened: Opened) -> None:
    """Arrow gives each message every key that any message has; chat templates ask whether a key is there."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[data]'")
    import pyarrow.parquet as pq

    rows = [
        {"asked": [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "4", "name": "calculator"}]},
        {"asked": [{"role": "user", "content": "Ho"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    columns = {"messages": "asked"}
    jsonl = opened(kind="jsonl", path=write_jsonl(tmp_path / "q.jsonl", rows), columns=columns).splits["train"]
    parquet_rows = opened(kind="parquet", path=tmp_path / "q.parquet", columns=columns).splits["train"]
    for ours, theirs in zip(jsonl, parquet_rows, strict=True):
        assert Question().start(ours).messages == Question().start(theirs).messages


def test_a_data_set_of_the_hub_without_a_network_says_what_to_do(opened: Opened, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install '.[data]'")

    def unreachable(*args: object, **more: object) -> None:
        raise ConnectionError("Couldn't reach 'some/data' on the Hub (offline)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigurationError, match=r"some/data, split train.*Couldn't reach.*save_to_disk"):
        opened(kind="huggingface", name="some/data")


def test_a_folder_that_load_dataset_reads_is_a_data_set(tmp_path: Path, opened: Opened, monkeypatch) -> None:
    pytest.importorskip("datasets", reason="needs datasets: pip install '.[data]'")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", questions(6))
    write_jsonl(folder / "test.jsonl", questions(9)[6:])
    source = opened(kind="huggingface", path=folder, splits={"train": "train", "eval": "test"})
    assert [len(split) for split in source.splits.values()] == [6, 3]
    assert source.splits["eval"][0].task_id.startswith("q/eval/0-")


def test_named_splits_of_a_saved_data_set(tmp_path: Path, opened: Opened) -> None:
    splits = {"train": "train", "eval": "test"}
    source = opened(kind="huggingface", path=saved(tmp_path / "saved", 5), splits=splits)
    assert [task.payload["answer"] for task in source.splits["eval"]] == [6, 7, 8, 9, 10]


def test_several_files_are_one_data_set_by_name(tmp_path: Path, opened: Opened) -> None:
    rows = questions(9)
    write_jsonl(tmp_path / "b.jsonl", rows[4:])
    write_jsonl(tmp_path / "a.jsonl", rows[:4])
    whole = opened(kind="jsonl", path=write_jsonl(tmp_path / "all.json", rows)).splits["train"]
    for path in (tmp_path, tmp_path / "*.jsonl"):
        assert list(opened(kind="jsonl", path=path).splits["train"]) == list(whole)
    parquet(tmp_path / "a.parquet", 4)
    both = opened(kind="parquet", path=tmp_path).splits["train"]
    assert len(both) == 4


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path, opened: Opened) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"question": "a", "solution": {"value": 1}}\n\n  \n{"question": "b", "solution": {"value": 2}}'
    )
    assert [task.payload["prompt"] for task in opened(kind="jsonl", path=path).splits["train"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "expected a JSON object on each line, got b'{'"),
        ("[1]", "expected a JSON object on each line, got a list"),
        ('{"question": "x"}', "expected the column 'solution.value', got only question"),
        ('{"question": "", "solution": {"value": 1}}', "an empty text"),
    ],
)
def test_a_bad_row_is_told_with_its_line_or_skipped_and_counted(
    tmp_path: Path, opened: Opened, line: str, says: str
) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", questions(3))
    path.write_text(path.read_text() + "\n" + line + "\n" + path.read_text())
    with pytest.raises(ConfigurationError) as caught:
        opened(kind="jsonl", path=path)
    assert f"environments.q.tasks_from: {path}, line 5: " in str(caught.value)
    assert says in str(caught.value) and "bad_rows: skip" in str(caught.value)
    source = opened(kind="jsonl", path=path, bad_rows="skip")
    assert source.counts["bad"] == 1 and source.counts["used"] == 6 and says in source.bad[0]
    assert [task.payload["answer"] for task in source.splits["train"]] == [1, 2, 3, 1, 2, 3]


def test_filter_and_limit_choose_rows_in_order(tmp_path: Path, opened: Opened) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", questions(20))
    source = opened(kind="jsonl", path=path, filter=[{"column": "level", "op": ">", "value": 0}], limit=4)
    assert [task.payload["answer"] for task in source.splits["train"]] == [2, 3, 5, 6]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"kind": "jsonl", "path": "nowhere.jsonl"}, "which does not exist"),
        ({"kind": "jsonl", "path": "{tmp}/empty"}, r"expected \*.jsonl files in the folder"),
        ({"kind": "jsonl", "path": "{tmp}/q.jsonl.gz"}, "decompress it"),
        ({"kind": "parquet", "path": "{tmp}/q.jsonl"}, "expected a Parquet file"),
        ({"kind": "jsonl", "path": "{tmp}/q.jsonl", "filter": [{"column": "level", "value": 9}]}, "3 filtered"),
        ({"kind": "huggingface", "path": "{tmp}/empty"}, "expected to load the data set"),
    ],
)
def test_data_that_is_not_there_is_a_clear_error(
    tmp_path: Path, opened: Opened, section: dict[str, object], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    write_jsonl(tmp_path / "q.jsonl", questions(3))
    (tmp_path / "q.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    section = {**section, "path": str(section["path"]).replace("{tmp}", str(tmp_path))}
    if section["kind"] != "jsonl":
        pytest.importorskip("datasets", reason="needs datasets and pyarrow: pip install '.[data]'")
    with pytest.raises(ConfigurationError, match=says) as caught:
        opened(**section)
    assert "environments.q.tasks_from" in str(caught.value)


def test_columns_that_are_not_there_are_named(tmp_path: Path, opened: Opened) -> None:
    for kind, path in (("parquet", parquet(tmp_path / "q.parquet", 3)), ("huggingface", saved(tmp_path / "s", 3))):
        with pytest.raises(ConfigurationError, match=r"expected the columns text in .* which has question, solution"):
            opened(kind=kind, path=path, columns={"prompt": "text"})


def test_a_split_that_is_not_there_is_named(tmp_path: Path, opened: Opened) -> None:
    with pytest.raises(ConfigurationError, match=r"expected the split dev in .* which has train, test"):
        opened(kind="huggingface", path=saved(tmp_path / "s", 3), split="dev")


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path, opened: Opened) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", questions(900))
    split = opened(kind="jsonl", path=path).splits["train"]
    path.write_bytes(path.read_bytes().replace(b"What is 5 ", b"What is 7 "))
    assert split[4].payload["answer"] == 5
    with pytest.raises(ConfigurationError, match=r"q\.jsonl, line 6 as it was when this process started"):
        split[5]
    path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match="changed while the run uses it"):
        split[899]


def test_parquet_keeps_few_row_groups_in_memory(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tasks.readers.CACHE_BYTES", 2048)
    source = opened(kind="parquet", path=parquet(tmp_path / "q.parquet", 400, group=10))
    split, rows = source.splits["train"], source.rows[0]
    assert sorted(split[split.order(i)].payload["answer"] for i in range(400)) == list(range(1, 401))
    assert rows._held <= 2048 and len(rows._cache) < 10  # type: ignore[attr-defined]


def test_the_command_line_shows_the_data_or_what_is_wrong_with_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from pipeline.cli.app import app

    path = write_jsonl(tmp_path / "q.jsonl", questions(9))
    file = tmp_path / "run.yaml"
    file.write_text(
        "environments:\n  q:\n    name: question\n    tasks_from:\n      kind: jsonl\n"
        f"      path: {path}\n      columns: {{prompt: question, answer: solution.value}}\n"
        "scorer: {functions: [{path: exact}]}\n"
    )
    said = CliRunner().invoke(app, ["config", "check", str(file), "--data"])
    assert said.exit_code == 0 and "environments.q: 9 used" in said.output and "train: 9 tasks, first q/" in said.output
    path.write_text("no\n")
    said = CliRunner().invoke(app, ["config", "check", str(file), "--data"])
    assert said.exit_code != 0 and "line 1: expected a JSON object" in str(said.exception)


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("huggingface", "datasets")])
def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "q.parquet").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=rf"needs {package} .*pip install '\.\[data\]'"):
        opened(kind=kind, path=tmp_path)


@pytest.mark.parametrize("text", ['[{"a": "?"}]', '[\n{"prompt": "?"}\n]', "\ufeff[\n", "prompt,answer\n1+1,2", "'a'"])
def test_data_in_another_form_are_refused_with_what_makes_them_jsonl(text: str, tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "q.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"a JSON object on each line.*read_json.*read_csv.*lines=True"):
        opened(kind="jsonl", path=tmp_path / "q.jsonl")


WHOLE = st.integers(-(2**80), 2**80) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1])


@given(answer=WHOLE, where=st.sampled_from(["{}", "[{}]", '{{"a": [1.5, {}]}}']))
def test_a_whole_number_is_read_exactly_or_the_row_is_refused(answer: int, where: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.jsonl"
        path.write_text(f'{{"prompt": "?", "float": 1e30, "answer": {where.format(answer)}}}\n')
        rows = JsonlRows([path])
        (row,) = rows.scan()
        if -(2**63) <= answer < 2**64:
            assert row == rows.read(0) == json.loads(path.read_text())
        else:
            assert isinstance(row, BadRow) and f"of at most 64 bits, got {answer} in 'answer'" in str(row)
        rows.close()


@pytest.mark.parametrize("length", [39, 40, 81, 82, 200])
def test_a_line_that_is_too_long_is_one_bad_row(
    length: int, tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tasks.readers.LINE_BYTES_MAX", 40)
    rows = [json.dumps({"prompt": text}) for text in ("a", "b" * (length - 14), "c")]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join([*rows, "no JSON"]))
    source = opened(kind="jsonl", path=path, bad_rows="skip", columns={})
    whole = length < 40
    assert dict(source.counts)["bad"] == 2 - whole
    assert [task.payload["prompt"][0] for task in source.splits["train"]] == (["a", "b", "c"] if whole else ["a", "c"])
    assert source.bad[-1].startswith(f"{path}, line 4: ")
