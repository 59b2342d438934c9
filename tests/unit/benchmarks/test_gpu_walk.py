"""The walk over a GPU: small shapes give every part, and what was found is kept whatever happens to a case."""

from __future__ import annotations

import json
import threading

import pytest

from benchmarks.gpu import learner
from benchmarks.gpu.__main__ import CASES, COMPILED, MODELS, Results, Walk, about, main, table
from benchmarks.gpu.case import Case, Machine, attempt
from benchmarks.learner_step.model import SHAPES, make_config
from learner.policy.memory import GIB

ABOUT = {"device": "none", "shapes": "small", "revision": "none"}
SMALL = Machine("cpu", small=True)


def case(function, name="", weight=1.0, **options):
    return Case(name or function, f"tests.support.gpu_cases:{function}", weight, options)


@pytest.fixture
def walk(tmp_path):
    """Walks and returns the results in the file."""

    def run(*cases, results=None, seconds=600.0, **times):
        Walk(results or Results(tmp_path / "gpu.json", ABOUT), SMALL, tmp_path, seconds, **times).run(cases)
        return on_disk(tmp_path)

    return run


def on_disk(folder):
    return json.loads((folder / "gpu.json").read_text())["cases"]


@pytest.mark.parametrize(("function", "reason"), [("raising", "MemoryError: no room"), ("crashing", "exit code -6")])
def test_a_case_that_fails_keeps_what_it_found_and_the_next_one_runs(walk, function, reason):
    failed, worked = walk(case(function), case("working")).values()
    assert failed["parts"] == {"predicted": {"gib": 1.0}}
    assert reason in failed["ended"]
    assert worked["ended"] == "done"
    assert list(worked["parts"]) == ["first", "second"]


def test_a_case_is_ended_with_its_share_and_what_it_leaves_is_for_the_others(walk, tmp_path):
    """The timer of the endless case is over as soon as its first part is in the file."""
    limits, stops, found = [], [], threading.Event()

    class Timer(threading.Thread):
        def __init__(self, seconds, stop):
            super().__init__(daemon=True)
            limits.append(seconds)
            self.stop, self.second = stop, len(limits) == 2

        def run(self):
            if self.second:
                found.wait()
                stops.append(on_disk(tmp_path)["endless"])
                self.stop()

        def cancel(self):
            pass

    class Told(Results):
        def add(self, case, part, facts):
            super().add(case, part, facts)
            if case == "endless":
                found.set()

    now = iter([0.0, 0.0, 100.0, 200.0])  # at the start, and before each case
    cases = case("working", "a", 1.0), case("endless", weight=2.0), case("working", "b", 1.0)
    results = walk(*cases, results=Told(tmp_path / "gpu.json", ABOUT), clock=lambda: next(now), timer=Timer)
    assert limits == [150.0, 500.0 * 2 / 3, 400.0]
    assert [results[name]["ended"] for name in "ab"] == ["done", "done"]
    assert results["b"]["parts"]["first"]["seconds"] == 400.0
    assert results["endless"]["ended"].startswith("not done within its 333 s")
    assert stops == [{"revision": "none", "parts": {"predicted": {"gib": 1.0}}}]


def test_no_case_begins_when_the_time_is_over(walk, capsys):
    now = iter([0.0, 0.0, 598.0])
    assert list(walk(case("working"), case("raising"), clock=lambda: next(now))) == ["working"]
    assert "goes on with: raising" in capsys.readouterr().out


def test_a_second_call_goes_on_behind_the_cases_that_ended(tmp_path, monkeypatch, capsys):
    cases = [case("working", "a"), case("raising", "b"), case("working", "c")]
    monkeypatch.setattr("benchmarks.gpu.__main__.CASES", tuple(cases))
    arguments = ["--out", str(tmp_path), "--device", "cpu"]
    assert main(arguments) == 1
    held = on_disk(tmp_path)
    del held["c"]["ended"]  # interrupted
    about = json.loads((tmp_path / "gpu.json").read_text())["about"]
    (tmp_path / "gpu.json").write_text(json.dumps({"about": about, "cases": held}))
    cases[0] = case("working", "a", value=2)
    cases[2] = case("working", "c", value=2)
    monkeypatch.setattr("benchmarks.gpu.__main__.CASES", tuple(cases))
    assert main(arguments) == 1
    assert [on_disk(tmp_path)[name]["parts"]["first"]["value"] for name in "ac"] == [1, 2]
    assert main([*arguments, "--only", "a"]) == 1
    assert on_disk(tmp_path)["a"]["parts"]["first"]["value"] == 2
    assert "b: failed with exit code 1: MemoryError: no room" in capsys.readouterr().out


def test_results_of_two_machines_do_not_share_a_file(walk, tmp_path):
    walk(case("working"))
    with pytest.raises(SystemExit, match="another device"):
        Results(tmp_path / "gpu.json", {**ABOUT, "device": "other"})


def test_a_machine_without_git_has_an_unknown_revision(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert about(SMALL)["revision"] == "unknown"


def test_a_part_that_fails_says_why():
    def broken():
        raise RuntimeError("no kernel")

    assert attempt("bare", broken) == ("bare", {"failed": "RuntimeError: no kernel"})


def test_a_model_that_does_not_fit_by_its_prediction_is_not_made(monkeypatch):
    monkeypatch.setattr(learner, "make_model", None)
    monkeypatch.setattr(learner, "memory_bytes", lambda machine: GIB // 1024)
    options = next(c.options for c in MODELS if c.name == "7b-full")
    predicted, skipped = learner.study(SMALL, **options)
    assert skipped[0] == "skipped"
    assert skipped[1]["needs_gib"] == predicted[1]["gib"] > skipped[1]["has_gib"]


@pytest.mark.parametrize("shape", ["1.7b", "moe"])
def test_new_shapes_are_those_of_their_models(shape):
    """Parameters as the model cards give them: Qwen3-1.7B without its embedding, a layer of Qwen3-30B-A3B."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(shape))
    layers = sum(p.numel() for p in model.model.layers.parameters())
    expected = 1.4e9 if shape == "1.7b" else 29.9e9 / 48 * SHAPES[shape]["num_hidden_layers"]
    assert layers == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("case", [MODELS[2], MODELS[4]], ids=lambda case: case.name)
def test_a_model_has_its_memory_predicted_and_measured_its_speed_and_its_publication(walk, case, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = walk(case)
    parts = found[case.name]["parts"]
    assert list(parts) == ["predicted", "chip", "learner", "publication", "kernels", "bare"]
    assert not [part for part, facts in parts.items() if "failed" in facts]
    assert parts["publication"]["equal"]
    assert parts["learner"]["skipped_steps"] == 0
    assert "–" not in table(found)[-1]
    assert parts["learner"]["tokens"] == parts["bare"]["tokens"]


@pytest.mark.slow
def test_compiled_layers_take_their_steps(walk, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (found,) = walk(COMPILED[0]).values()
    assert found["ended"] == "done"
    assert found["parts"]["learner"]["skipped_steps"] == 0


def whole(name):
    return next(c for c in CASES if c.name == name)


@pytest.mark.slow
def test_layouts_agree_and_rows_that_see_each_other_do_not(walk):
    found = {part: facts["tolerance"] for part, facts in walk(whole("layouts"))["layouts"]["parts"].items()}
    assert found.pop("control: rows see each other") == "outside"
    assert found == dict.fromkeys(("padded", "packed", "shared", "shared, checkpointed"), "within")


@pytest.mark.slow
def test_divided_weights_are_copied_whole_and_resume_where_they_were(walk):
    divided, resumed = walk(whole("ranks"))["ranks"]["parts"].values()
    assert divided["snapshot_equals_weights"]
    assert resumed["weight_distance_after_a_step"] == 0.0
