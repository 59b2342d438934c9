"""Restart, back-off and drain order, without a process."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.runtime.children import describe_exit
from pipeline.runtime.process import ExitCode
from pipeline.supervisor.restarts import Machine, Phase, RestartLimits, Rule, SendSignal, Start

RULES = (
    Rule("prepare", 0, once=True),
    Rule("engine-0", 4, depends=("prepare",), stateless=True, start_seconds_max=600),
    Rule("replay", 3),
    Rule("learner", 2, depends=("prepare", "replay"), ends_run=True),
    Rule("actor-0", 1, depends=("prepare", "replay")),
    Rule("actor-1", 1, depends=("prepare", "replay")),
)
LIMITS = RestartLimits(restarts_max=3, backoff_seconds=1.0, backoff_seconds_max=4.0, drain_seconds_max=8.0)


def running() -> Machine:
    machine = Machine(RULES, LIMITS)
    machine.begin(0)
    machine.exited("prepare", 0, 0)
    for name in ("replay", "engine-0", "learner", "actor-0", "actor-1"):
        machine.healthy(name, 0)
    assert all(p.phase is Phase.RUNNING for n, p in machine.processes.items() if n != "prepare")
    return machine


def test_a_process_starts_when_what_it_needs_has_been_ready():
    machine = Machine(RULES, LIMITS)
    assert machine.begin(0) == [Start("prepare"), Start("replay")]
    assert machine.healthy("replay", 1) == []
    assert machine.exited("prepare", 0, 2) == [Start("engine-0"), Start("learner"), Start("actor-0"), Start("actor-1")]


def test_the_start_limit_counts_from_when_what_a_process_awaits_is_ready():
    machine = Machine((Rule("prepare", 1, once=True, start_seconds_max=900), Rule("engine-0", 0, awaits=("prepare",))))
    assert machine.begin(0) == [Start("prepare"), Start("engine-0")]
    assert machine.tick(800) == []
    machine.exited("prepare", 0, 800)
    assert machine.next_wake() == 1100
    assert machine.tick(1099) == []
    assert machine.tick(1100) == [SendSignal("engine-0", kill=True)]
    machine.exited("engine-0", -9, 1100)
    assert machine.tick(1101) == [Start("engine-0")]
    assert machine.next_wake() == 1401


def test_the_run_goes_on_without_an_optional_process():
    rules = (*RULES, Rule("report-wandb", 4, depends=("replay",), stateless=True, optional=True))
    machine = Machine(rules, LIMITS)
    machine.begin(0)
    machine.healthy("replay", 0)
    machine.exited("report-wandb", ExitCode.CONFIGURATION, 0)
    assert machine.processes["report-wandb"].phase is Phase.DONE
    assert machine.draining_since is None and machine.culprit is None


def test_an_optional_process_comes_back_as_often_as_allowed_within_an_hour_for_as_long_as_the_run():
    rules = (Rule("replay", 2), Rule("report-wandb", 4, depends=("replay",), stateless=True, optional=True))
    machine = Machine(rules, LIMITS)
    machine.begin(0)
    machine.healthy("replay", 0)
    now, starts = 0.0, []
    while now < 24 * 3600:
        machine.healthy("report-wandb", now)
        machine.exited("report-wandb", ExitCode.FAILED, now)
        now = machine.next_wake()
        assert machine.tick(now) == [Start("report-wandb")]
        starts.append(now)
    assert len(starts) >= 24 * LIMITS.restarts_max
    assert all(sum(at - 3600 < other <= at for other in starts) <= LIMITS.restarts_max + 1 for at in starts)
    assert machine.draining_since is None and machine.culprit is None


def test_one_death_restarts_one_process():
    machine = running()
    assert machine.exited("replay", -9, 10) == []
    assert machine.next_wake() == 11
    assert machine.tick(10.5) == []
    assert machine.tick(11) == [Start("replay")]
    assert [p.restarts for p in machine.processes.values()] == [0, 0, 1, 0, 0, 0]


def test_the_back_off_doubles_up_to_its_bound_and_begins_again_after_a_steady_time():
    machine = Machine(RULES, RestartLimits(restarts_max=9, backoff_seconds=1, backoff_seconds_max=4))
    machine.begin(0)
    waits, now = [], 0.0
    for _ in range(4):
        machine.exited("replay", 1, now)
        waits.append(machine.processes["replay"].wake_at - now)
        now = machine.processes["replay"].wake_at
        machine.tick(now)
    assert waits == [1, 2, 4, 4]
    machine.healthy("replay", now)
    machine.exited("replay", 1, now + 61)
    assert machine.processes["replay"].wake_at - now - 61 == 1


RANKS = (
    Rule("learner", 1, ends_run=True, gang="learner"),
    Rule("learner-1", 1, gang="learner"),
    Rule("actor-0", 0),
)


def gang_running() -> Machine:
    machine = Machine(RANKS, LIMITS)
    machine.begin(0)
    for rule_ in RANKS:
        machine.healthy(rule_.name, 0)
    return machine


@pytest.mark.parametrize(("lost", "other"), [("learner", "learner-1"), ("learner-1", "learner")])
def test_a_lost_rank_takes_its_gang_with_it_and_all_start_again(lost: str, other: str):
    machine = gang_running()
    assert machine.exited(lost, -9, 10) == [SendSignal(other, kill=True)]
    assert machine.exited(other, -9, 10.2) == [], "what was killed kills nobody"
    assert (machine.processes[other].killed_with, machine.processes[lost].killed_with) == (lost, "")
    assert machine.tick(12) == [Start("learner"), Start("learner-1")]
    assert machine.processes["actor-0"].phase is Phase.RUNNING


def test_a_stuck_rank_takes_its_gang_with_it():
    machine = gang_running()
    machine.unhealthy("learner-1", 10)
    assert machine.tick(310) == [SendSignal("learner-1", kill=True), SendSignal("learner", kill=True)]
    assert (machine.processes["learner"].killed_with, machine.processes["learner-1"].killed_with) == ("learner-1", "")


def test_a_rank_that_has_finished_leaves_the_others_to_finish():
    machine = gang_running()
    assert machine.exited("learner-1", 0, 10) == []
    assert machine.tick(20) == [] and machine.processes["learner-1"].restarts == 0, "there is nobody to join"
    machine.exited("learner", 0, 20.1, finished=True)
    assert machine.code is ExitCode.FINISHED


def test_a_rank_that_has_finished_starts_again_with_its_gang():
    machine = gang_running()
    machine.exited("learner-1", 0, 10)
    assert machine.exited("learner", 1, 20) == []
    assert machine.tick(30) == [Start("learner"), Start("learner-1")]


PARTS = (
    Rule("engine-0", 1, stateless=True, gang="engine-0"),
    Rule("engine-0-node-1", 1, stateless=True, gang="engine-0"),
    Rule("engine-1", 1, stateless=True),
    Rule("learner", 0, ends_run=True),
)


def parts_running() -> Machine:
    machine = Machine(PARTS, LIMITS)
    machine.begin(0)
    for rule_ in PARTS:
        machine.healthy(rule_.name, 0)
    return machine


@pytest.mark.parametrize("code", [0, 1, -9])
@pytest.mark.parametrize(("lost", "other"), [("engine-0", "engine-0-node-1"), ("engine-0-node-1", "engine-0")])
def test_no_part_of_an_engine_ends_alone_whatever_its_exit_code(lost: str, other: str, code: int):
    machine = parts_running()
    assert machine.exited(lost, code, 10) == [SendSignal(other, kill=True)]
    assert machine.exited(other, -9, 10.2) == []
    assert machine.tick(12) == [Start("engine-0"), Start("engine-0-node-1")]
    assert all(machine.processes[name].phase is Phase.RUNNING for name in ("engine-1", "learner"))


def test_a_gang_starts_again_only_when_all_that_were_killed_have_ended():
    machine = parts_running()
    machine.exited("engine-0", -9, 10)
    assert machine.tick(11) == [], "the other would meet the one that is still there"
    assert machine.next_wake() == math.inf, "its end is an event"
    assert machine.exited("engine-0-node-1", -9, 50) == []
    assert machine.next_wake() == 11 and machine.tick(50) == [Start("engine-0")]
    assert machine.tick(51) == [Start("engine-0-node-1")]


def test_an_engine_that_never_serves_takes_its_other_parts_with_it():
    machine = Machine(PARTS, LIMITS)
    machine.begin(0)
    for name in ("engine-0-node-1", "engine-1", "learner"):
        machine.healthy(name, 0)
    assert machine.tick(300) == [SendSignal("engine-0", kill=True), SendSignal("engine-0-node-1", kill=True)]
    assert machine.processes["engine-0-node-1"].killed_with == "engine-0"


def test_the_drain_ends_all_parts_of_an_engine():
    machine = parts_running()
    assert machine.stop(0, "Ctrl-C") == [SendSignal("learner")]
    parts = [SendSignal("engine-0"), SendSignal("engine-0-node-1"), SendSignal("engine-1")]
    assert machine.exited("learner", 0, 1) == parts
    assert machine.exited("engine-0", 0, 2) == [] and machine.exited("engine-1", 0, 2) == []
    machine.exited("engine-0-node-1", 0, 3)
    assert (machine.over, machine.code) == (True, ExitCode.FINISHED)


def test_the_wait_for_a_node_is_no_time_of_the_start():
    machine = Machine((Rule("replay", 0, start_seconds_max=300),), LIMITS)
    machine.begin(0)
    machine.placed("replay", math.inf)
    assert machine.tick(5000) == []
    machine.placed("replay", 5000)
    assert machine.tick(5299) == []
    assert machine.tick(5300) == [SendSignal("replay", kill=True)]


def test_too_many_restarts_end_the_run_and_name_the_culprit():
    machine = running()
    for now in range(0, 100, 10):
        machine.exited("actor-1", 1, now)
        machine.tick(now + 9)
        if machine.draining_since is not None:
            break
    assert machine.code is ExitCode.GAVE_UP
    assert machine.culprit == "actor-1"
    assert "actor-1 failed (exit code 1) after 3 restarts within an hour" in machine.reason


def test_a_kill_every_eight_hours_never_ends_a_run():
    machine = running()
    for now in range(0, 365 * 24 * 3600, 8 * 3600):
        machine.exited("learner", -9, now)
        assert machine.tick(now + 4) == [Start("learner")]
        machine.healthy("learner", now + 5)
    assert machine.processes["learner"].restarts == 365 * 3


def test_starts_that_never_get_to_work_end_the_run_however_long_each_takes():
    machine = running()
    machine.exited("learner", -9, 0)
    for now in range(2000, 20_000, 2000):
        machine.tick(now - 1000)
        machine.healthy("learner", now - 1000, worked=False)
        machine.exited("learner", 1, now)
        if machine.draining_since is not None:
            break
    assert (machine.code, machine.processes["learner"].restarts) == (ExitCode.GAVE_UP, 4)
    assert "learner failed (exit code 1) 4 times in a row before it did any work" in machine.reason


def test_an_environment_that_never_succeeds_ends_the_run_with_its_own_code():
    machine = running()
    assert machine.exited("replay", ExitCode.ENVIRONMENT, 1)[0] == SendSignal("actor-0")
    assert (machine.code, machine.culprit) == (ExitCode.ENVIRONMENT, "replay")


def test_a_configuration_error_ends_the_run_at_once():
    machine = running()
    assert machine.exited("learner", ExitCode.CONFIGURATION, 1)[0] == SendSignal("actor-0")
    assert machine.code is ExitCode.CONFIGURATION


def test_a_failed_preparation_ends_the_run_before_anything_depends_on_it():
    machine = Machine(RULES, LIMITS)
    machine.begin(0)
    assert machine.exited("prepare", 1, 1) == [SendSignal("replay")]
    machine.exited("replay", 0, 1)
    assert (machine.over, machine.code, machine.culprit) == (True, ExitCode.FAILED, "prepare")


def test_the_learner_is_restarted_unless_its_work_is_done():
    machine = running()
    assert machine.exited("learner", 0, 1, finished=False) == []
    assert machine.tick(2) == [Start("learner")]
    assert machine.exited("learner", 0, 3, finished=True) == [SendSignal("actor-0"), SendSignal("actor-1")]


def test_the_drain_goes_stage_by_stage():
    machine = running()
    assert machine.stop(0, "Ctrl-C") == [SendSignal("actor-0"), SendSignal("actor-1")]
    assert machine.stop(0.1, "again") == []
    assert machine.exited("actor-0", 0, 0.2) == []
    assert machine.exited("actor-1", 0, 0.3) == [SendSignal("learner")]
    assert machine.exited("learner", 0, 0.4) == [SendSignal("replay")]
    assert machine.exited("replay", 0, 0.5) == [SendSignal("engine-0")]
    assert not machine.over
    machine.exited("engine-0", -15, 0.6)
    assert (machine.over, machine.code, machine.reason) == (True, ExitCode.FINISHED, "Ctrl-C")


def test_a_stage_that_hangs_delays_the_others_by_its_share_and_is_killed():
    machine = running()
    machine.stop(0, "Ctrl-C")
    machine.exited("actor-0", 0, 1)
    now = machine.next_wake()
    assert now < 8
    assert machine.tick(now) == [SendSignal("learner")]
    machine.exited("learner", 0, now)
    machine.exited("replay", 0, now)
    machine.exited("engine-0", 0, now)
    assert machine.tick(8) == [SendSignal("actor-1", kill=True)]
    assert machine.next_wake() == math.inf
    machine.exited("actor-1", -9, 8.1)
    assert (machine.over, machine.code) == (True, ExitCode.FORCED)


def test_a_killed_engine_does_not_make_an_orderly_end_a_forced_one():
    machine = running()
    machine.stop(0, "Ctrl-C")
    for name in ("actor-0", "actor-1", "learner", "replay"):
        machine.exited(name, 0, 1)
    assert machine.tick(8) == [SendSignal("engine-0", kill=True)]
    machine.exited("engine-0", -9, 8)
    assert machine.code is ExitCode.FINISHED


def test_insisting_kills_everything():
    machine = running()
    machine.stop(0, "Ctrl-C")
    assert {a.name for a in machine.force(1, "twice") if a.kill} == {r.name for r in RULES} - {"prepare"}
    assert machine.code is ExitCode.FORCED


def test_a_process_that_never_gets_ready_or_gets_stuck_is_killed_and_restarted():
    machine = Machine(RULES, LIMITS)
    machine.begin(0)
    assert machine.next_wake() == 300
    assert SendSignal("replay", kill=True) in machine.tick(300)
    assert machine.tick(301) == []
    machine = running()
    machine.unhealthy("actor-0", 10)
    machine.unhealthy("actor-0", 20)
    assert machine.next_wake() == 310
    machine.healthy("actor-0", 30)
    assert machine.next_wake() == math.inf


@pytest.mark.parametrize(("start", "bound"), [(0.0, 30.0), (20.0, 30.0), (90.0, 90.0), (400.0, 305.0)])
def test_an_engine_that_gives_no_answer_is_killed_after_as_long_as_its_start_took(start: float, bound: float):
    machine = Machine((Rule("engine-0", 0, stateless=True, start_seconds_max=600), Rule("actor-0", 0)), LIMITS)
    machine.begin(0)
    for name in ("engine-0", "actor-0"):
        machine.healthy(name, start)
    for now in range(1005, 1000 + int(bound)):
        for name in machine.processes:
            machine.unhealthy(name, now, silent_since=now - 5)
        assert machine.tick(now) == [], "not before"
    assert machine.tick(1000 + bound)[0] == SendSignal("engine-0", kill=True)


def test_an_engine_that_answers_now_and_then_or_that_it_is_stuck_has_the_longer_limit():
    machine = Machine((Rule("engine-0", 0, stateless=True),), LIMITS)
    machine.begin(0)
    machine.healthy("engine-0", 1)
    for now in range(100, 300, 20):
        machine.unhealthy("engine-0", now, silent_since=now)
        machine.healthy("engine-0", now + 15)
        assert machine.tick(now + 15) == []
    machine.unhealthy("engine-0", 300, silent_since=300)
    machine.unhealthy("engine-0", 320)
    assert machine.next_wake() == 600


def test_restarts_for_calls_that_hang_wait_longer_each_time_and_never_end_the_run():
    machine, now = running(), 0.0
    for _ in range(10 * LIMITS.restarts_max):
        machine.healthy("actor-0", now, worked=True)
        assert machine.exited("actor-0", ExitCode.CALLS_HANG, now) == []
        assert machine.processes["actor-0"].wake_at - now <= LIMITS.backoff_seconds_max
        now = machine.processes["actor-0"].wake_at
        assert machine.tick(now) == [Start("actor-0")]
    assert machine.draining_since is None


def test_a_wrong_dependency_is_refused():
    with pytest.raises(ValueError, match="nobody"):
        Machine((Rule("a", 0, depends=("nobody",)),))


def test_exits_in_words():
    assert (describe_exit(-9), describe_exit(3)) == ("killed by SIGKILL", "exit code 3")


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens, the machine starts nothing twice, signals only what lives, and ends."""

    members = RULES

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.machine = Machine(self.members, LIMITS)
        self.alive = set()
        self.ended = {}
        self.starts = {r.name: [] for r in self.members}
        self.told = []
        self.perform(self.machine.begin(0.0))

    def perform(self, actions):
        for action in actions:
            if isinstance(action, Start):
                assert action.name not in self.alive
                assert self.machine.draining_since is None
                self.alive.add(action.name)
                self.starts[action.name].append(self.now)
            else:
                assert action.name in self.alive
                if not action.kill:
                    self.told.append(action.name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 70.0, 400.0]))
    def wait(self, seconds):
        self.now = min(self.now + seconds, max(self.machine.next_wake(), self.now))
        self.perform(self.machine.tick(self.now))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 0, 1, 2, -9, -15]), finished=st.booleans())
    def die(self, data, code, finished):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(name)
        self.ended[name] = self.now
        self.perform(self.machine.exited(name, code, self.now, finished))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), well=st.booleans())
    def answer(self, data, well):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.perform((self.machine.healthy if well else self.machine.unhealthy)(name, self.now))

    @rule()
    def stop(self):
        self.perform(self.machine.stop(self.now, "asked"))

    @rule()
    def force(self):
        self.perform(self.machine.force(self.now, "asked twice"))

    @invariant()
    def what_lives_is_what_was_started_and_has_not_ended(self):
        assert self.alive == {n for n, p in self.machine.processes.items() if p.alive}

    @invariant()
    def nothing_is_restarted_more_often_than_allowed_within_an_hour(self):
        for times in self.starts.values():
            assert all(sum(at - 3600 < other <= at for other in times) <= LIMITS.restarts_max + 1 for at in times)

    @invariant()
    def each_process_is_asked_to_end_once(self):
        assert len(self.told) == len(set(self.told))

    def teardown(self):
        """From any state, a stop ends within the drain time though nothing obeys."""
        self.perform(self.machine.stop(self.now, "end of test"))
        end = self.machine.draining_since + LIMITS.drain_seconds_max
        while self.alive:
            wake = self.machine.next_wake()
            if wake == math.inf:
                break
            assert wake > self.now or wake <= end
            before = self.now, wake
            self.now = max(self.now, wake)
            self.perform(self.machine.tick(self.now))
            assert (self.now, self.machine.next_wake()) != before, "a wake-up with nothing to do is a busy loop"
        assert all(self.machine.processes[name].killed for name in self.alive)
        for name in sorted(self.alive):
            self.alive.discard(name)
            self.perform(self.machine.exited(name, -9, self.now))
        assert self.machine.over


class AnyHistoryOfAGang(AnyHistory):
    """Also, a part of an engine on several nodes outlives no other."""

    members = PARTS

    @invariant()
    def a_part_that_lives_was_started_after_the_end_of_each_other(self):
        parts = [self.machine.processes[name] for name in ("engine-0", "engine-0-node-1")]
        ended = [self.ended[p.rule.name] for p in parts if p.phase is Phase.BACKOFF]
        if self.machine.draining_since is None:
            assert Phase.DONE not in [p.phase for p in parts], "an engine has never done its work"
            assert all(p.started_at >= max(ended, default=0) for p in parts if p.alive and not p.killed)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistoryOfAGang = AnyHistoryOfAGang.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyHistoryOfAGang.settings = TestAnyHistory.settings


@pytest.mark.parametrize(("code", "ends"), [(0, False), (1, False), (-9, False), (2, True)])
def test_only_a_refusal_of_an_optional_check_ends_the_run(code: int, ends: bool) -> None:
    rules = (Rule("preflight", 3, once=True, only_refuses=True, start_seconds_max=math.inf), Rule("replay", 2))
    machine = Machine(rules)
    machine.begin(0)
    machine.healthy("replay", 1)
    assert machine.next_wake() == math.inf, "it may take as long as it wants"
    machine.exited("preflight", code, 1)
    assert (machine.draining_since is not None, machine.culprit) == (ends, "preflight" if ends else None)
    assert machine.code == (2 if ends else 0)
