"""A rollout that begins with stored turns: they are played and never trained, and another episode is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.environments import Environment, Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.preflight import check_environments
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Game
from actors.rollout.services import Services, can_restart
from learner.data.rows import trajectory_rows
from pipeline.config import RunConfig
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import WireError
from pipeline.runtime.findings import Findings
from pipeline.schema import Message, Order, Task, Trajectory, TrajectoryStatus
from pipeline.transport.codec import decode_order, encode_order, encode_trajectory
from tests.support.stub_engine import StubEngine
from tests.unit.actors.conftest import run_order, script

TURNS = 5


class Count(Environment):
    """Answers with the number of the turn, and pays 0.5 a turn. ``offset`` changes every answer."""

    replayable = True

    def __init__(self, turns: int = TURNS, offset: int = 0) -> None:
        self.turns, self.offset = turns, offset
        self.seen: list[str] = []

    def start(self, task: Task) -> Episode:
        return CountEpisode(self)


class CountEpisode(Episode):
    def __init__(self, count: Count) -> None:
        self.messages = (Message("user", "say hello"),)
        self.count, self.turn = count, 0

    def step(self, reply: Reply) -> Step:
        self.turn += 1
        self.count.seen.append(str(reply))
        said = Message("user", str(self.turn + self.count.offset))
        return Step((said,), 0.5, self.turn >= self.count.turns)


@pytest.fixture
def played(make_services: Any, make_order: Any, tokenizer: Any) -> Callable[..., Any]:
    """Plays an order against an environment; the trajectory, the engine and the services."""

    async def play(environment: Environment, order: Order | None = None, loop: AgentLoop | None = None) -> Any:
        engine = StubEngine(script=script(tokenizer))
        services: Services = make_services([engine], environment, tokenizer=tokenizer, max_length=512)
        if loop is not None:
            services = dataclasses.replace(services, loops={"game": loop})
        return await run_order(services, order or make_order()), engine

    return play


def order_after(stored: Trajectory, turns: int, order: Order) -> Order:
    """As it comes over the wire."""
    return decode_order({**encode_order(order), "restart": turns}, encode_trajectory(stored))


@pytest.mark.parametrize("turns", range(1, TURNS))
async def test_the_policy_continues_from_the_very_tokens_of_the_stored_turn_and_only_its_own_are_trained(
    played: Any, make_order: Any, turns: int
) -> None:
    first = Count()
    stored, engine = await played(first)
    prompts = [list(prompt) for _, prompt in engine.requests]
    again = Count()
    trajectory, engine = await played(again, order_after(stored, turns, make_order(2)))
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert again.seen[:turns] == first.seen[:turns], "the environment was played with the stored replies"
    assert len(engine.requests) == TURNS - turns == len(trajectory.turns), "stored turns are not sampled"
    assert list(engine.requests[0][1]) == prompts[turns]
    assert trajectory.turns[0].context.token_ids.tolist() == prompts[turns]
    assert trajectory.rewards == {"environment": 0.5 * TURNS} and trajectory.turn_rewards == (0.5,) * (TURNS - turns)
    assert trajectory.n_sampled == sum(len(turn.completion) for turn in trajectory.turns)

    rows = trajectory_rows(trajectory, 0)
    assert not rows[0].loss_mask[: len(prompts[turns])].any(), "nothing of the stored turns is trained"
    own = [t for turn in trajectory.turns for t in turn.completion.token_ids.tolist()]
    logprobs = np.concatenate([turn.completion.behaviour_logprobs for turn in trajectory.turns])
    assert np.concatenate([row.token_ids[row.loss_mask] for row in rows]).tolist() == own
    assert np.array_equal(np.concatenate([row.behaviour_logprobs[row.loss_mask] for row in rows]), logprobs)


async def test_the_same_replies_after_the_stored_turns_give_the_same_tokens(played: Any, make_order: Any) -> None:
    stored, _ = await played(Count())
    turns = 3  # the script says three replies over and over, so it continues as it did
    trajectory, _ = await played(Count(), order_after(stored, turns, make_order(2)))
    for ours, theirs in zip(trajectory.turns, stored.turns[turns:], strict=True):
        assert ours.completion.token_ids.tolist() == theirs.completion.token_ids.tolist()
    assert list(trajectory.branches())[-1].token_ids.tolist() == list(stored.branches())[-1].token_ids.tolist()


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Count(offset=1), "expected the prompt of turn 2 as it was stored"),
        (Count(turns=2), "expected the episode to go on after turn 2"),
    ],
)
async def test_an_episode_that_answers_otherwise_is_a_failure_with_that_reason_and_never_a_reward(
    played: Any, make_order: Any, environment: Environment, says: str
) -> None:
    stored, _ = await played(Count())
    trajectory, engine = await played(environment, order_after(stored, 3, make_order(2)))
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.reward is None and trajectory.rewards == {}
    assert trajectory.failure.kind == "NotReproducible" and says in trajectory.failure.message
    assert not engine.requests and not trajectory.turns


class OwnRun(AgentEpisode):
    async def run(self, dialogue: Any) -> TrajectoryStatus:
        recorder, renderer = dialogue.recorder, dialogue.recorder.renderer
        call = recorder.begin(renderer.start(self.game.episode.messages))
        completion = await dialogue.policy.complete(call.prompt_ids, 4)
        recorder.finish(call, completion.generation, renderer.completed(completion.generation.token_ids.tolist()), 1.0)
        recorder.judge(1.0, {})
        return TrajectoryStatus.COMPLETE


class OwnLoop(AgentLoop):
    def begin(self, game: Game) -> AgentEpisode:
        return OwnRun(game)


async def test_a_loop_that_would_begin_at_the_start_after_all_is_a_failure(played: Any, make_order: Any) -> None:
    stored, _ = await played(Count())
    trajectory, _ = await played(Count(), order_after(stored, 2, make_order(2)), OwnLoop())
    assert trajectory.failure.kind == "NotReproducible" and "restarts = False" in trajectory.failure.message


async def test_an_order_with_turns_that_are_not_there_is_refused(played: Any, make_order: Any) -> None:
    stored, _ = await played(Count())
    for turns in (0, TURNS, -1):
        with pytest.raises(WireError, match="restart after 1 to 4 turns"):
            order_after(stored, turns, make_order())


@pytest.mark.parametrize(
    ("section", "can"),
    [
        ({"name": "passcode"}, True),
        ({"name": "number_guess"}, True),
        ({"name": "arithmetic"}, False),
        ({"name": "number_guess", "loop": {"name": "single_turn"}}, False),
        ({"name": "number_guess", "loop": {"name": "program"}}, False),
    ],
)
def test_an_environment_declares_that_it_can_be_played_again_and_the_loop_must_be_able_to(
    section: dict[str, Any], can: bool
) -> None:
    assert can_restart(EnvironmentHost("game", EnvironmentConfig.model_validate(section))) is can


@pytest.mark.parametrize(("name", "problems"), [("arithmetic", 1), ("number_guess", 0)])
def test_config_check_refuses_restarts_where_no_environment_can(name: str, problems: int) -> None:
    config = RunConfig.model_validate(
        {"environments": {"game": {"name": name}}, "replay": {"enabled": True, "mode": "restart"}}
    )
    found = Findings()
    check_environments(config, {}, found)
    assert len(found.problems) == problems
    assert all("no environment of the run file can" in problem for problem in found.problems)


@pytest.mark.parametrize(
    "section",
    [
        {"name": "number_guess", "options": {"compact": True}},
        {"name": "passcode", "options": {"compact": True, "lengths": [4], "answers": [4], "numbers": 4}},
        {"name": "babyai", "options": {"compact": True}},
    ],
)
async def test_built_in_environments_that_declare_it_answer_the_same_replies_alike(section: dict[str, Any]) -> None:
    if section["name"] == "babyai":
        pytest.importorskip("minigrid")
    seen = []
    for _ in range(2):
        host = EnvironmentHost("game", EnvironmentConfig.model_validate(section))
        assert host.replayable
        episode = await host.start(Task("game/7", "game", 7))
        steps = [episode.messages]
        for reply in ("1", "2", "3", "forward"):
            step = await host.step(episode, Reply(reply))
            steps.append(step)
            if step.done:
                break
        await host.close(episode)
        seen.append(steps)
    assert seen[0] == seen[1]
