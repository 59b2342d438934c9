"""The console's line for each phase of a run."""

from __future__ import annotations

from pipeline.supervisor.display import FailureNews, Phases, waiting_in_words
from pipeline.supervisor.processes import HealthAnswer
from pipeline.supervisor.restarts import Machine, Rule

RULES = (
    Rule("prepare", 3, once=True),
    Rule("engine-0", 3, awaits=("prepare",)),
    Rule("learner", 1, ends_run=True),
    Rule("actor-0", 0, depends=("prepare",)),
)
PLAYING = {"actor-0": HealthAnswer(True, "playing", "", {"playing": 64})}
TRAINING = {"learner": HealthAnswer(True, "training", "", {"step": 1})}


def test_each_phase_is_printed_once_in_plain_words() -> None:
    machine, phases = Machine(RULES), Phases("vLLM", 16)
    machine.begin(0)
    assert phases.news(machine.processes, {}, 0, 0) == ["preparing the model", "starting vLLM"]
    assert phases.news(machine.processes, {}, 0, 1) == []
    machine.exited("prepare", 0, 2)
    assert phases.news(machine.processes, {}, 0, 2) == ["the model is ready after 2 s"]
    machine.healthy("engine-0", 14)
    machine.healthy("learner", 14)
    assert phases.news(machine.processes, {}, 0, 15) == ["vLLM is ready after 14 s"]
    assert phases.news(machine.processes, PLAYING, 0, 16) == ["playing the first episodes (64 at once)"]
    assert phases.news(machine.processes, TRAINING | PLAYING, 0, 20) == ["step 1 of 16: training"]
    assert phases.news(machine.processes, TRAINING | PLAYING, 1, 24) == []


def test_an_engine_that_starts_again_is_printed_again() -> None:
    machine, phases = Machine(RULES), Phases("vLLM", 16)
    machine.begin(0)
    machine.healthy("engine-0", 14)
    phases.news(machine.processes, {}, 0, 14)
    machine.exited("engine-0", -9, 20)
    machine.tick(21)
    assert phases.news(machine.processes, {}, 3, 21) == ["starting vLLM again"]
    machine.healthy("engine-0", 33)
    assert phases.news(machine.processes, {}, 3, 33) == ["vLLM is ready after 12 s"]


def test_a_run_that_resumes_has_no_first_episodes() -> None:
    machine, phases = Machine(RULES), Phases("vLLM", 16)
    machine.begin(0)
    assert "playing" not in " ".join(phases.news(machine.processes, TRAINING | PLAYING, 8, 1))


def test_a_notice_of_a_role_is_printed_once() -> None:
    phases = Phases("vLLM", 16)
    answers = {"learner": HealthAnswer(True, "loading", notices=("checkpoint u000006 is damaged",))}
    assert phases.news({}, answers, 3, 0) == ["checkpoint u000006 is damaged"]
    assert phases.news({}, answers, 4, 1) == []


def test_several_engines_have_their_names() -> None:
    machine, phases = Machine((Rule("engine-0", 3), Rule("engine-1", 3))), Phases("vLLM", 1)
    machine.begin(0)
    assert phases.news(machine.processes, {}, 0, 0) == ["starting vLLM (engine-0)", "starting vLLM (engine-1)"]


def test_an_environment_whose_rollouts_fail_is_named_when_noticed_and_when_the_failures_have_doubled() -> None:
    news = FailureNews()

    def lines(succeeded: int, failed: int) -> list[str]:
        return news.news({"maze": [succeeded, failed, f"environment maze: {failed} failed"]})

    assert news.news(None) == lines(0, 7) == []
    assert lines(0, 8) == ["environment maze: 8 failed"]
    assert lines(0, 15) == []
    assert lines(1, 16) == ["environment maze: 16 failed"]
    assert lines(100, 17) == [], "it has recovered"
    assert lines(103, 24) == []
    assert lines(103, 25) == ["environment maze: 25 failed (8 of the newest 11)"]


def test_the_console_says_what_a_run_waits_for_in_words_of_a_newcomer() -> None:
    rules = (Rule("preflight", 3, once=True), Rule("prepare", 3, once=True), Rule("engine-0", 3), Rule("learner", 1))
    machine = Machine(rules)
    machine.begin(0)
    assert waiting_in_words(machine.processes, {}, 20) == "the model is being prepared, for 20 s so far"
    machine.exited("prepare", 0, 25)
    assert waiting_in_words(machine.processes, {}, 30) == "engine-0, learner load programs and model, for 30 s so far"
    machine.healthy("learner", 31)
    assert waiting_in_words(machine.processes, {}, 40) == "engine-0 loads programs and model, for 40 s so far"
    machine.healthy("engine-0", 41)
    assert waiting_in_words(machine.processes, {}, 42) == ""
    answers = {"learner": HealthAnswer(True, "waiting for rollouts", "5 of 16 groups of step 2")}
    assert waiting_in_words(machine.processes, answers, 50) == (
        "episodes are played until a batch is complete (5 of 16 groups of step 2)"
    )
