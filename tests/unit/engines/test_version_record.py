"""Version spans tile the sampled tokens whatever the order of requests, stamps and ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.embedded.requests import FIRST_VERSION, VersionRecord

STEPS = st.lists(st.one_of(st.just("sample"), st.just("stamp"), st.just("begin"), st.just("finish")), max_size=60)


@given(STEPS)
def test_spans_tile_the_tokens_and_name_who_sampled_them(steps: list[str]) -> None:
    record, truth, begun, version = VersionRecord(), {}, 0, FIRST_VERSION
    for step in [*steps, *["finish"] * 60]:
        if step == "begin":
            record.begin(f"r{begun}")
            truth[f"r{begun}"] = []
            begun += 1
        elif step == "sample":
            for tokens in truth.values():
                tokens.append(version)
        elif step == "stamp":
            version = "0" if version == FIRST_VERSION else str(int(version) + 1)
            record.stamp(version, {name: len(tokens) for name, tokens in truth.items()})
        elif truth:
            name, tokens = truth.popitem()
            spans = record.finish(name, len(tokens))
            spread = [span["version"] for span in spans for _ in range(int(span["start"]), int(span["end"]))]
            assert spread == tokens
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][: len(spans)]
    assert len(record) == 0


def test_stamping_the_same_version_again_makes_no_new_span() -> None:
    record = VersionRecord()
    record.stamp("3", {})
    record.begin("a")
    record.stamp("3", {"a": 5})
    assert record.finish("a", 9) == [{"version": "3", "start": 0, "end": 9}]


def test_forgotten_request_leaves_no_trace() -> None:
    record = VersionRecord()
    record.begin("a")
    record.forget("a")
    record.forget("a")
    assert len(record) == 0
