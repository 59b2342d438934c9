"""The page holds everything it shows, nothing that a rollout says is markup, and it stays within its bounds."""

import base64
import gzip
import hashlib
import html.parser
import re

import numpy as np
import orjson
import pytest

from pipeline.cli.replay import open_run
from pipeline.errors import ConfigurationError
from pipeline.schema import FinishReason, Message, TokenSpan, Turn, VersionSpan
from pipeline.store.queries import Filters
from pipeline.views import page
from pipeline.views.page import PAGE_FULL, render, write_page
from pipeline.views.reader import RunReader
from pipeline.views.transcript import _turn
from pipeline.views.vocabulary import Vocabulary
from tests.unit.show.making import Rollout, ids_of, make_run, write_tokenizer
from tests.unit.show.test_reading import ROLLOUTS

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>]]>\u2028%%DATA%%&lt;\"'`${1}"
NAME = HOSTILE.replace("\u2028", "")
"""As an identifier: these are printable."""


class Elements(html.parser.HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.inside, self.texts = [], [], None, {}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = f"{tag}:{dict(attrs).get('id', '')}"

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data


def parsed(text):
    elements = Elements()
    elements.feed(text)
    elements.close()
    return elements


def data_of(text):
    elements = parsed(text)
    raw, kind = elements.texts["script:data"], dict(elements.attributes)["data-kind"]
    return orjson.loads(gzip.decompress(base64.b64decode(raw)) if kind == "gzip" else raw)


def written(tmp_path, rollouts, **options):
    path = make_run(tmp_path / "run", rollouts)
    reader = RunReader(*open_run(path))
    out = tmp_path / "page.html"
    made = write_page(out, reader, reader.listing(Filters(), "oldest"), None, Vocabulary.read(reader.model), **options)
    assert made.n_bytes == out.stat().st_size
    return made, out.read_text("utf-8")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_hostile_rollout_is_data_and_nothing_else(tmp_path, monkeypatch, compressed):
    if compressed:
        monkeypatch.setattr(page, "PLAIN_BYTES_MAX", 10)
    evil = Rollout(task=NAME, environment=NAME, said=((HOSTILE, HOSTILE),), extra={"name": HOSTILE}, traced=True)
    _, text = written(tmp_path, [evil])
    quiet = parsed(written(tmp_path / "quiet", [Rollout(traced=True)])[1])
    assert parsed(text).tags == quiet.tags
    assert "alert(1)" not in parsed(text).texts.get("script:", "")
    (row,) = data_of(text)["rows"]
    assert row["task_id"] == NAME
    (turn,) = row["transcript"]["turns"]
    assert "".join(turn["completion"]["texts"]) == HOSTILE + "<|end|>"
    assert turn["messages"] == [{"role": "user", "content": HOSTILE, "extra": {"name": HOSTILE}}]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_page_says_how_much_replay_counts_and_that_one_run_cannot_tell_whether_it_helps(tmp_path, level):
    path = make_run(tmp_path / "run", [Rollout()])
    assert data_of(made(path))["about"]["replay"] == "", "nothing is replayed"
    config, directory = open_run(path)
    guard = config.replay.ess_guard.model_copy(update={"level": level})
    replay = config.replay.model_copy(update={"enabled": True, "ess_guard": guard})
    reader = RunReader(config.model_copy(update={"replay": replay}), directory)
    lines = [
        {"step": 1, "n_replayed": 0, "n_trajectories": 64, "tokens_trained": 300, "replay_share": 0.0,
         "ess_carried": None, "sequence_ess_carried": None, "clip_fraction_replay": None},
        {"step": 2, "n_replayed": 16, "n_trajectories": 64, "tokens_trained": 100, "replay_share": 0.4,
         "ess_carried": 0.5, "sequence_ess_carried": 0.1, "clip_fraction_replay": 0.25},
    ]  # fmt: skip
    directory.metrics_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    said = reader.replay
    count = {"token": "5.0%", "sequence": "1.0%"}[level]
    assert f"16 of 128 trained trajectories, 10.0% of the trained tokens. By their effective sample size they count " \
        f"as {count}; 25.0% of them were clipped." in said  # fmt: skip
    assert "not visible in one run" in said and "afterplay compare" in said
    directory.metrics_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines[:1]))
    assert reader.replay == ""


def made(path):
    reader = RunReader(*open_run(path))
    return page.page_of(reader, reader.listing(Filters()), None, Vocabulary.read(reader.model))[1]


def test_a_hostile_name_of_a_run_is_text():
    text = render(HOSTILE, "{}")
    assert parsed(text).texts["title:"] == f"{HOSTILE}: rollouts"
    assert parsed(text).tags == parsed(render("run", "{}")).tags


def test_the_policy_allows_the_program_and_style_of_the_page_and_nothing_else():
    elements = parsed(render("run", "{}"))
    policy = dict(a for a in elements.attributes if a[0] == "content" and "default-src" in a[1])["content"]
    for name in ("script:", "style:"):
        digest = base64.b64encode(hashlib.sha256(elements.texts[name].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_the_page_names_no_other_file_and_makes_no_markup_from_data():
    text = render("run", "{}")
    assert not re.search(r"https?:|//[a-z]|\bimport\b\s*[({'\"]|fetch\(|XMLHttpRequest|WebSocket|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc", text)
    assert not [v for k, v in parsed(text).attributes if k in ("src", "href") or k.startswith("on")]


def test_tokens_beyond_the_bound_are_left_out_and_said_to_be(tmp_path):
    rollouts = [Rollout(0, i, said=(("q", "a" * 400),)) for i in range(6)]
    made, text = written(tmp_path, rollouts, bytes_max=40_000)
    rows = data_of(text)["rows"]
    with_tokens = [r for r in rows if r["transcript"]]
    assert len(rows) == made.shown == 6 and 0 < made.transcripts == len(with_tokens) < 6
    assert {r["missing"] for r in rows if not r["transcript"]} == {PAGE_FULL}


def test_every_rollout_of_the_list_is_in_the_page_in_its_order(tmp_path):
    made, text = written(tmp_path, ROLLOUTS)
    data = data_of(text)
    assert [r["trajectory_id"] for r in data["rows"]] == [r.name for r in ROLLOUTS]
    assert (made.shown, made.transcripts) == (7, 5)
    assert data["about"]["tokenizer"] is True and data["about"]["count"] == 7


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    reader = RunReader(*open_run(make_run(tmp_path / "run", ROLLOUTS)))
    with pytest.raises(ConfigurationError, match="--html"):
        write_page(tmp_path / "file" / "x.html", reader, reader.listing(Filters()), None, Vocabulary({}))


def test_a_prompt_shows_what_the_template_wrote_beside_the_messages(tmp_path):
    write_tokenizer(tmp_path)
    vocabulary = Vocabulary.read(tmp_path)
    schema = '{"name": "look_up", "description": "' + "looks " * 30 + '"}'
    said = (Message("system", "You help."), Message("assistant", ""), Message("user", "Who?"))
    for tools, shown in ((schema, f"# Tools\n{schema}\nuser"), ("", "")):
        prompt = f"You help.\n# Tools\n{tools}\nuser\nWho?"
        turn = Turn(
            TokenSpan.context([3, *ids_of(prompt), 5]), TokenSpan.sampled([2], np.zeros(1), (VersionSpan(0, 1, 0),)),
            said, Message("assistant", ""), FinishReason.STOP, 1.0,
        )  # fmt: skip
        assert _turn(turn, None, True, vocabulary)["template"] == shown
