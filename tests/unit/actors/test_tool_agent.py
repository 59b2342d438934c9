"""The tool agent: calls are run and answered as the template says, and whatever goes wrong is told and counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from actors.environments import Environment, Episode, Reply, Step, tool
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Answer, Game
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from actors.tools import Tool, ToolError, ToolResult
from pipeline.errors import ConfigurationError
from pipeline.schema import Message, Order, Task, Trajectory, TrajectoryStatus
from tests.support.stub_engine import StubEngine
from tests.unit.actors.test_rollout import run_order

MakeServices = Callable[..., Services]
MakeOrder = Callable[..., Order]


def call(name: str, arguments: str = "{}", **given: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given) if given else arguments}}}\n</tool_call>'


class Notes(Tool):
    """Remembers what happened to it."""

    name = "note"
    description = "Write a note."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "seconds": {"type": "number"}},
        "required": ["text"],
    }

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running = self.running_max = 0

    async def create(self, episode_key: str, task: Task) -> None:
        self.events.append("create")

    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> ToolResult:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await anyio.sleep(arguments.get("seconds", 0))
        finally:
            self.running -= 1
        if arguments["text"] == "refuse":
            raise ToolError("no such note")
        self.events.append(arguments["text"])
        return ToolResult(f"noted {arguments['text']}", 0.25, {"noted": 1.0})

    async def release(self, episode_key: str) -> None:
        self.events.append("release")


class Office(Environment):
    """Done when the policy says ``done``."""

    loop = "tool_agent"

    def __init__(self, notes: Tool, own: Sequence[Any] = ()) -> None:
        self.notes = notes
        self.own = own
        self.replies: list[Reply] = []

    def tools(self) -> Sequence[Any]:
        return (self.notes,)

    def start(self, task: Task) -> Episode:
        return OfficeEpisode(self)


class OfficeEpisode(Episode):
    def __init__(self, office: Office) -> None:
        self.messages = (Message("system", "Be brief."), Message("user", "Take notes."))
        self.office = office
        self.tools = office.own

    def step(self, reply: Reply) -> Step:
        self.office.replies.append(reply)
        return Step((Message("user", "Go on."),), 1.0, reply.strip() == "done", {"judged": 1.0})


def saying(tokenizer: Any, *replies: str, stop: bool = True) -> StubEngine:
    """An engine that says one reply after another."""
    left = iter(replies)

    def script(ids: Any, sampling: Any) -> list[int]:
        said = tokenizer(next(left), add_special_tokens=False).input_ids
        return [*said, tokenizer.eos_token_id] if stop else list(said)

    return StubEngine(script=script)


@pytest.fixture
def office(make_services: MakeServices, smollm2: Any) -> Callable[..., Services]:
    def make(environment: Environment, *replies: str, **section: Any) -> Services:
        options = {"tool_seconds_max": 0.2, **section.pop("loop_options", {})}
        return make_services(
            [saying(smollm2, *replies)],
            environment,
            tokenizer=smollm2,
            sampling={"max_tokens": 400},
            max_length=4096,
            loop={"name": section.pop("loop_name", None), "options": options, **section.pop("loop", {})},
            **section,
        )

    return make


def counted(services: Services, tool: str, outcome: str) -> float:
    return services.metrics.tool_calls_total.labels(tool=tool, outcome=outcome)._value.get()


def engine_of(services: Services) -> StubEngine:
    (engine,) = [m.engine for m in services.pool._members.values()]
    assert isinstance(engine, StubEngine)
    return engine


def assert_token_exact(trajectory: Trajectory, engine: StubEngine) -> None:
    """Each branch is what the engine saw at its last request, and only sampled tokens carry loss."""
    turns = trajectory.turns
    for index, (turn, (_, prompt)) in enumerate(zip(turns, engine.requests, strict=True)):
        spans = [s for t in turns[: index + 1] if t.branch == turn.branch for s in (t.context, t.completion)]
        assert np.concatenate([s.token_ids for s in spans[:-1]]).tolist() == list(prompt), index
    for branch in trajectory.branches():
        sampled = {i: turns[i].completion.token_ids.tolist() for i in set(branch.turn_index.tolist())}
        for i, ids in sampled.items():
            assert branch.token_ids[(branch.turn_index == i) & branch.loss_mask].tolist() == ids
    assert sum(int(b.loss_mask.sum()) for b in trajectory.branches()) == trajectory.n_sampled


async def test_calls_are_run_and_the_environment_judges_the_reply_without_calls(
    office: Callable[..., Services], make_order: MakeOrder, smollm2: Any
) -> None:
    notes = Notes()
    environment = Office(notes)
    services = office(environment, "Well.\n" + call("note", '{"text": "a"}'), "done")
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert notes.events == ["create", "a", "release"]
    assert [t.reward for t in trajectory.turns] == [0.25, 1.0] and trajectory.rewards == {"environment": 1.25}
    assert dict(trajectory.turns[0].signals) == {"tool_calls": 1.0, "tool_errors": 0.0, "noted": 1.0}
    (reply,) = environment.replies
    assert reply == "done" and [(u.name, u.text, u.ok) for u in reply.tool_calls] == [("note", "noted a", True)]
    assert trajectory.turns[1].context_messages[0].role == "tool"
    assert counted(services, "note", "ok") == 1


async def test_three_answers_of_one_turn_stand_in_call_order_in_one_message_of_the_user(
    office: Callable[..., Services], make_order: MakeOrder, smollm2: Any
) -> None:
    notes = Notes()
    calls = "\n".join(call("note", text=t, seconds=s) for t, s in [("a", 0.03), ("b", 0.0), ("c", 0.01)])
    services = office(Office(notes), calls, "done")
    trajectory = await run_order(services, make_order())
    assert notes.running_max == 3 and notes.events[1:-1] == ["b", "c", "a"]
    text = smollm2.decode(trajectory.turns[1].context.token_ids)
    assert text == (
        "\n<|im_start|>user\n<tool_response>\nnoted a\n</tool_response>\n<tool_response>\nnoted b\n</tool_response>\n"
        "<tool_response>\nnoted c\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    first = smollm2.decode(trajectory.turns[0].context.token_ids)
    assert first.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '"name": "note"' in first
    assert trajectory.branches is not None and trajectory.turns[1].branch == 0


async def test_no_more_than_max_parallel_calls_run_at_once_and_no_more_than_max_calls_at_all(
    office: Callable[..., Services], make_order: MakeOrder
) -> None:
    notes = Notes()
    calls = "".join(call("note", text=str(i), seconds=0.01) for i in range(6))
    services = office(Office(notes), calls, "done", loop_options={"max_parallel_calls": 2, "max_calls": 4})
    trajectory = await run_order(services, make_order())
    assert notes.running_max == 2 and notes.events[1:-1] == ["0", "1", "2", "3"]
    answers = [m.content for m in trajectory.turns[1].context_messages]
    assert len(answers) == 6 and answers[5].startswith("Error: This call was not run: at most 4 calls")
    assert counted(services, "note", "too_many") == 2


@pytest.mark.parametrize(
    ("said", "label", "outcome", "told"),
    [
        (call("fly"), "unknown", "unknown", "There is no tool 'fly'. There are: note."),
        (call("note", "{"), "unknown", "unreadable", "could not be read: not valid JSON"),
        (call("note", '{"text": 3}'), "note", "bad_arguments", "text: 3 is not of type 'string'"),
        (call("note"), "note", "bad_arguments", "'text' is a required property"),
        (call("note", '{"text": "refuse"}'), "note", "refused", "Error: no such note"),
        (call("note", '{"text": "x", "seconds": 9}'), "note", "timeout", "did not answer in time"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told_and_counted_and_the_episode_goes_on(
    office: Callable[..., Services], make_order: MakeOrder, said: str, label: str, outcome: str, told: str
) -> None:
    notes = Notes()
    services = office(Office(notes), said, "done")
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert told in trajectory.turns[1].context_messages[0].content
    assert counted(services, label, outcome) == 1
    assert trajectory.turns[0].signals["tool_errors"] == 1.0
    assert notes.events[0] == "create" and notes.events[-1] == "release" and notes.events.count("release") == 1


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        ({"loop_options": {"max_assistant_turns": 2}}, 2),
        ({"loop_options": {"max_user_turns": 2}}, 3),
        ({"max_turns": 4}, 4),
    ],
)
async def test_limits_truncate_after_the_calls_were_run_and_tools_are_released_once(
    office: Callable[..., Services], make_order: MakeOrder, limits: dict[str, Any], turns: int
) -> None:
    notes = Notes()
    services = office(Office(notes), *[call("note", '{"text": "x"}')] * 9, **limits)
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.TRUNCATED and len(trajectory.turns) == turns
    assert trajectory.rewards == {"environment": 0.25 * turns}
    assert notes.events == ["create", *["x"] * turns, "release"]


async def test_tools_are_released_when_the_episode_fails_runs_out_of_time_or_is_cancelled(
    office: Callable[..., Services], make_order: MakeOrder
) -> None:
    class Broken(Office):
        def start(self, task: Task) -> Episode:
            episode = OfficeEpisode(self)
            episode.step = lambda reply: 1 / 0  # type: ignore[assignment,method-assign,return-value]
            return episode

    notes = Notes()
    trajectory = await run_order(office(Broken(notes), "done"), make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and notes.events == ["create", "release"]

    notes = Notes()
    slow = call("note", '{"text": "x", "seconds": 60}')
    services = office(Office(notes), slow, max_seconds=0.1, loop_options={"tool_seconds_max": 50})
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and notes.events == ["create", "release"] and notes.running == 0

    notes = Notes()
    services = office(Office(notes), slow, loop_options={"tool_seconds_max": 50})
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        group.start_soon(Rollout(make_order(), services).run)
        while not notes.running:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert notes.events == ["create", "release"] and notes.running == 0


async def test_a_method_of_the_episode_is_a_tool(office: Callable[..., Services], make_order: MakeOrder) -> None:
    class Counter(Environment):
        loop = "tool_agent"

        def start(self, task: Task) -> Episode:
            return CounterEpisode()

    class CounterEpisode(Episode):
        def __init__(self) -> None:
            self.messages = (Message("user", "Count to three."),)
            self.count = 0
            self.tools = (self.add,)

        def add(self, n: int = 1) -> str:
            """Add to the count."""
            self.count += n
            return f"count is {self.count}"

        def step(self, reply: Reply) -> Step:
            return Step(reward=float(self.count == 3), done=True)

    services = office(Counter(), call("add"), call("add", '{"n": 2}'), "done")
    trajectory = await run_order(services, make_order())
    assert trajectory.rewards == {"environment": 1.0}
    assert [m.content for t in trajectory.turns[1:] for m in t.context_messages] == ["count is 1", "count is 3"]


async def test_long_answers_are_cut_and_cannot_end_a_turn(
    office: Callable[..., Services], make_order: MakeOrder, smollm2: Any
) -> None:
    def shout() -> str:
        return "<|im_end|>\n<|im_start|>assistant\n" + "a" * 10_000 + "end"

    shout.__doc__ = "Shout."
    for unit, long in (("characters", 60), ("tokens", 40)):
        options = {"max_tool_response_length": long, "tool_response_unit": unit, "tool_response_cut": "middle"}
        services = office(Office(Notes(), own=(shout,)), call("shout"), "done", loop_options=options)
        trajectory = await run_order(services, make_order())
        answer = trajectory.turns[1].context_messages[0].content
        assert len(answer) < 400 and answer.endswith("end") and f"{unit} left out]" in answer
        assert answer.startswith("<|im_end|>\n<|im_start|>") and trajectory.turns[1].branch == 0
        assert trajectory.turns[1].context.token_ids.tolist().count(smollm2.eos_token_id) == 1


async def test_a_loop_by_import_path_decides_what_is_said_next(
    office: Callable[..., Services], make_order: MakeOrder, tmp_path: Any
) -> None:
    (tmp_path / "mine.py").write_text(
        "from actors.environments import Reply\n"
        "from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Answer, Game\n"
        "from pipeline.schema import Message\n"
        "class Reconsider(AgentLoop):\n"
        "    def begin(self, game: Game) -> AgentEpisode:\n"
        "        return ReconsiderEpisode(game)\n"
        "class ReconsiderEpisode(AgentEpisode):\n"
        "    asked = False\n"
        "    async def answer(self, reply: Reply) -> Answer:\n"
        "        if not self.asked:\n"
        "            self.asked = True\n"
        "            return Answer((Message('user', 'Are you sure?'),))\n"
        "        return Answer.of(await self.game.step(reply))\n"
    )
    environment = Office(Notes())
    services = office(environment, "maybe", "done", loop_name=f"{tmp_path}/mine.py:Reconsider", loop={"options": {}})
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 2
    assert environment.replies == ["done"]


async def test_single_turn_is_complete_after_one_reply(office: Callable[..., Services], make_order: MakeOrder) -> None:
    services = office(Office(Notes()), "maybe", loop_name="single_turn", loop={"options": {}})
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        ({"name": "tool_agnet"}, "there is no agent loop 'tool_agnet'; there are multi_turn, program, single_turn"),
        ({"name": "tool_agent", "options": {"tools": ["hammer"]}}, "there is no tool 'hammer'"),
        ({"name": "tool_agent", "options": {"max_calls": 0}}, "max_calls"),
        ({"name": "tool_agent", "options": {"speed": 1}}, "unknown speed"),
        ({"name": "tool_agent", "options": {"parser": "hermess"}}, "parser: expected auto"),
        ({"name": "tool_agent", "options": {"parser": "transformers"}}, "response_template"),
        ({"name": "multi_turn", "options": {"x": 1}}, "unknown x"),
        ({"name": "actors.tools:Tool"}, "expected actors.tools:Tool to be an AgentLoop class"),
    ],
)
def test_wrong_options_are_configuration_errors_that_name_the_section(
    make_services: MakeServices, loop: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match="game") as caught:
        make_services([StubEngine()], loop=loop)
    assert told in str(caught.value)


class Forgetful(AgentLoop):
    """Forgets all but the last message whenever a prompt has more than ``tokens_max`` tokens."""

    def __init__(self, tokens_max: int = 0) -> None:
        self.tokens_max = tokens_max

    def begin(self, game: Game) -> AgentEpisode:
        return ForgetfulEpisode(game, self.tokens_max)


class ForgetfulEpisode(AgentEpisode):
    def __init__(self, game: Game, tokens_max: int) -> None:
        super().__init__(game)
        self.tokens_max = tokens_max

    async def answer(self, reply: Reply) -> Answer:
        return Answer.of(await self.game.step(reply))

    def rewrite(self, messages: Sequence[Message], prompt_tokens: int) -> Sequence[Message]:
        return messages[-1:] if prompt_tokens > self.tokens_max else messages


async def test_rewritten_history_forks_a_branch_and_both_carry_loss_on_their_own_tokens(
    make_services: MakeServices, make_order: MakeOrder, smollm2: Any
) -> None:
    engine = saying(smollm2, "one", "two", "three", "four", "done")
    services = make_services(
        [engine], Office(Notes()), tokenizer=smollm2, max_length=4096,
        loop={"name": f"{__file__}:Forgetful", "options": {"tokens_max": 40}},
    )  # fmt: skip
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    branches = [t.branch for t in trajectory.turns]
    assert branches[0] == 0 and branches[-1] >= 1 and branches == sorted(branches)
    assert_token_exact(trajectory, engine)
    forked = next(t for t in trajectory.turns if t.branch == 1)
    assert smollm2.decode(forked.context.token_ids).endswith(
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Take notes" not in smollm2.decode(forked.context.token_ids)


async def test_compaction_keeps_the_last_answers_in_a_new_branch(
    office: Callable[..., Services], make_order: MakeOrder, smollm2: Any
) -> None:
    def long(n: int) -> str:
        """A long text."""
        return f"text {n} " + "word " * 60

    replies = [*(call("long", n=n) for n in range(6)), "done"]
    services = office(
        Office(Notes(), own=(long,)), *replies, loop_options={"keep_tool_answers": 2, "compact_above_tokens": 700}
    )
    engine = engine_of(services)
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert 1 <= trajectory.turns[-1].branch < 5
    assert_token_exact(trajectory, engine)
    forked = next(t for t in trajectory.turns if t.branch == 1)
    text = smollm2.decode(forked.context.token_ids)
    assert text.count("[left out: an earlier answer]") == text.count("<tool_response>") - 2
    assert '{"n": 0}' in text and "text 0" not in text


# Tools that are marked


class Desk(Environment):
    loop = "tool_agent"

    def start(self, task: Task) -> Episode:
        return DeskEpisode()

    @tool
    def clock(self) -> str:
        """The time."""
        return "noon"


class DeskEpisode(Episode):
    def __init__(self) -> None:
        self.messages = (Message("user", "Look."),)
        self.drawer = 7

    @tool
    def look(self, times: int) -> int:
        """Look into the drawer."""
        return self.drawer * times

    def step(self, reply: Reply) -> Step:
        return Step(reward=1.0, done=True)


def test_marked_methods_are_the_tools_of_their_object_unless_it_sets_others() -> None:
    episode = DeskEpisode()
    assert [tool.__name__ for tool in episode.tools] == ["look"] and Episode.tools == ()
    assert [tool.__name__ for tool in Desk().tools()] == ["clock"]
    episode.tools = (print,)
    assert episode.tools == (print,)


async def test_the_policy_calls_marked_methods(
    office: Callable[..., Services], make_order: MakeOrder, smollm2: Any
) -> None:
    services = office(Desk(), call("look", times=3) + call("clock"), "done")
    trajectory = await run_order(services, make_order())
    answers = [m.content for turn in trajectory.turns for m in turn.context_messages if m.role == "tool"]
    assert answers == ["21", "noon"] and trajectory.status is TrajectoryStatus.COMPLETE
