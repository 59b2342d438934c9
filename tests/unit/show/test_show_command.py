"""``afterplay show`` in the terminal: what it prints is safe, and what it refuses it explains."""

import orjson
import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.cli.show import SortBy, span
from pipeline.errors import ConfigurationError
from pipeline.store.queries import _ORDER, Span
from pipeline.views.terminal import COLUMN, json_line, safe
from tests.unit.show.making import Rollout, make_run
from tests.unit.show.test_reading import BROKEN, ROLLOUTS

EVIL = "\x1b[2J\x1b]0;owned\x07[bold red]not markup[/] \x9b31m"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    evil = Rollout(4, 0, 1.0, "[red]game[/]", said=((EVIL, EVIL),), step=4, traced=True)
    return str(make_run(tmp_path_factory.mktemp("runs") / "some", (*ROLLOUTS, evil)))


def invoke(*arguments):
    result = CliRunner().invoke(app, ["show", *arguments], catch_exceptions=True, terminal_width=160)
    return result


def output(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_a_list_has_a_line_for_each_and_says_how_many_there_are(run):
    text = output(run, "--limit", "3")
    assert "3 of 8" in text and text.count("g0000") == 3


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_a_narrow_terminal_leaves_columns_out_and_never_cuts_an_id(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [line for line in output(run, "--limit", "3").splitlines() if "g0000" in line]
    assert len(lines) == 3 and all(len(line) <= width for line in lines)
    assert all(any(word.count(".") == 2 and word[-1].isdigit() for word in line.split()) for line in lines)


def test_one_trajectory_is_printed_whole(run):
    text = output(run, "g000001.0.0", "--colour", "ratio")
    for part in ("question", "answer", "replayed in 4, 7", "versions", "1 to 2", "engine 1.5 s", "environment 0.25 s",
                 "turn 1 · stop · 7 tokens · reward 0.5 · solved 1", "step 7"):  # fmt: skip
        assert part in text, part
    failed = output(run, "g000001.1.0")
    assert "TimeoutError" in failed and BROKEN.details in failed and "not recorded" not in failed


@pytest.mark.parametrize("colour", ["sampled", *COLUMN])
def test_a_value_that_nobody_recorded_is_said_to_be_missing(run, colour):
    kept = output(run, "g000003.0.0", "--colour", colour)
    assert ("not recorded for this trajectory" in kept) == (colour in ("ratio", "entropy", "advantage"))
    assert "not recorded" not in output(run, "g000001.0.0", "--colour", colour)


def test_what_a_model_wrote_never_steers_the_terminal(run):
    for arguments in ((), ("--print",), ("--json",), ("--print", "--json")):
        text = output(run, "--step", "4", *arguments)
        assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert "[bold red]not markup[/]" in output(run, "g000004.0.0")
    assert safe("a\tb\nc\r") == "a\tb\nc\\x0d"
    assert safe("pay \u202e001 \u2066x") == "pay \\u202e001 \\u2066x" and "\u202e" not in json_line({"a": "\u202e"})


def test_json_is_one_object_a_line_with_tokens_where_they_are_asked_for(run):
    lines = [orjson.loads(line) for line in output(run, "--json", "--sort", "oldest").splitlines()]
    assert [line["trajectory_id"] for line in lines][:2] == ["g000000.0.0", "g000000.1.0"]
    assert "transcript" not in lines[0]
    (one,) = [orjson.loads(line) for line in output(run, "g000000.0.0", "--json").splitlines()]
    (turn,) = one["transcript"]["turns"]
    completion = turn["completion"]
    assert "".join(completion["texts"]) == "answer<|end|>"
    assert {
        len(completion[k]) for k in ("ids", "logprobs", "versions", "ratios", "entropies", "advantages", "flags")
    } == {7}
    assert one["transcript"]["trained"] == {"step": 1, "policy_version": 3, "replayed": False}
    (plain,) = [orjson.loads(line) for line in output(run, "g000003.0.0", "--json").splitlines()]
    assert plain["transcript"]["turns"][0]["completion"]["ratios"] is None


def test_refusals_say_what_was_expected(run, tmp_path):
    for arguments, message in (
        ((run, "g000099.0.0"), "expected a trajectory"),
        ((run, "--step", "x"), "--step: expected a whole number or a range"),
        ((run, "--step", "9" * 20), "up to 1,000,000,000,000,000, got '99"),
        ((run, "--status", "completed"), "status: expected one of complete, truncated,"),
        ((run, "--environment", "nothing"), "environment: expected one of "),
        ((run, "--version", "3-1"), "from the smaller to the larger"),
        ((str(tmp_path),), "no config.yaml"),
        ((run, "--html", str(tmp_path / "nowhere" / "\0")), ""),
    ):
        result = invoke(*arguments)
        assert result.exit_code != 0 and message in str(result.exception)
    for arguments, word in ((("--html", str(tmp_path)), "directory"), (("--limit", "9" * 20), str(10**15))):
        result = invoke(run, *arguments)
        assert result.exit_code == 2 and word in result.output


def test_ranges_are_read_in_every_form():
    assert [span("--step", t) for t in ("7", "7-9", "7-", "-9", None)] == [
        Span(7, 7), Span(7, 9), Span(7, None), Span(None, 9), None,
    ]  # fmt: skip
    for wrong in ("", "-", "1.5", "a-b", "1-2-3", "--3"):
        with pytest.raises(ConfigurationError):
            span("--step", wrong)


def test_every_order_of_the_store_can_be_asked_for():
    assert {s.value for s in SortBy} == set(_ORDER)
