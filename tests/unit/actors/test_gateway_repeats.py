"""A request that a client sends again is one request: its reply is sampled and trained once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from actors.gateway import server, session
from actors.gateway.repeats import Delivery, Repeats, sent
from pipeline.schema import Order, Trajectory, TrajectoryStatus
from tests.support.agent_programs import SECONDS, Caller, Serve, assert_exact, echoing, hear_outcomes, run_order, user
from tests.support.http_server import serving
from tests.support.stub_engine import StubEngine

pytestmark = pytest.mark.timeout(400)
TURNS = 10


def gated(engine: StubEngine, gate: Callable[[], anyio.Event]) -> StubEngine:
    """The engine, whose answers wait for the event that ``gate`` gives."""
    generate = engine.generate

    async def waiting(*args: Any, **options: Any) -> Any:
        await gate().wait()
        return await generate(*args, **options)

    engine.generate = waiting  # type: ignore[method-assign]
    return engine


@asynccontextmanager
async def cutting(base_url: str, every: int, inside: Callable[[], object] | None = None) -> AsyncIterator[str]:
    """A proxy before the gateway that loses every ``every``-th answer: it takes it whole and loses it on its way to the
    client, before its first byte or after half of them. ``inside``: it breaks both connections after the first bytes
    instead, and calls this before it asks."""
    answers = 0

    async def forward(request: web.Request) -> web.StreamResponse:
        nonlocal answers
        headers = {n: v for n, v in request.headers.items() if n.lower() not in ("host", "content-length")}
        url = f"{base_url.removesuffix('/v1')}{request.path}"
        answers += 1
        number = answers
        assert request.transport is not None
        data = await request.read()
        if inside is not None and not number % every:
            inside()
        async with aiohttp.ClientSession() as client, client.post(url, data=data, headers=headers) as got:
            response = web.StreamResponse(status=got.status, headers={"Content-Type": got.headers["Content-Type"]})
            if inside is not None:
                await response.prepare(request)
                async for chunk in got.content.iter_any():
                    await response.write(chunk)
                    if not number % every:
                        got.close()
                        request.transport.abort()
                        break
                return response
            body = await got.read()
        if number % every:
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body)
        elif number % (2 * every):
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
        if not number % every:
            request.transport.abort()
        return response

    async with serving(forward) as url:
        yield f"{url}/v1"


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenAI's package, whose clients ask again at once."""
    openai = pytest.importorskip("openai", reason="pip install openai to test the repeats of its clients")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
    return openai


def tokens(trajectory: Trajectory) -> list[tuple[list[int], list[bool]]]:
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    return [(branch.token_ids.tolist(), branch.loss_mask.tolist()) for branch in trajectory.branches()]


class SlowOnce(StubEngine):
    """Replies to a prompt by its length. Waits for the event that ``gate`` gives before an answer; of a stream after
    its first token has come."""

    def __init__(self, words: Any, gate: Callable[[], anyio.Event]) -> None:
        super().__init__(script=lambda ids, _: [10 + len(ids) % 7, 11, 12, words.eos_token_id])
        self.gate = gate

    async def generate(self, *args: Any, **options: Any) -> Any:
        if options.get("heard") is None:
            await self.gate().wait()
        return await super().generate(*args, **options)

    async def between(self, n_heard: int) -> None:
        if n_heard == 2:
            await self.gate().wait()


FAULTS = ["every 3rd is lost", "every 5th is lost", "times out after 1 s", "asks twice at once"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_trained_tokens_of_a_client_with_faults_are_those_without(
    serve: Serve,
    make_order: Callable[..., Order],
    words: Any,
    quick_retries: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    stream: bool,
) -> None:
    """Answers are lost whole or in part, and streams in the middle, where the gateway sees it: no client asks again for
    the rest of a stream by itself, so the program does."""
    found = []
    every = int(fault[6]) if fault.startswith("every") else 10**6
    for faulty in (False, True):
        release, n_came = anyio.Event(), 0
        waits = faulty and not fault.startswith("every")

        def heard(outcome: str) -> None:
            """The client gave up: it asks again, and gets the reply."""
            if outcome == "hung_up":
                release.set()  # noqa: B023 - of this run

        def hold() -> None:
            nonlocal release
            release = anyio.Event()

        def counting(*args: Any) -> Any:
            """Two requests are there."""
            nonlocal n_came
            n_came += 1
            if n_came == 2:
                release.set()  # noqa: B023
            return sent(*args)

        async def ask(api: Any, history: list[Any]) -> str:
            """The text of a reply. A stream that breaks is asked for again."""
            while True:
                try:
                    answer = await api.chat.completions.create(model="m", messages=history, stream=stream)
                    if not stream:
                        return str(answer.choices[0].message.content)
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
                except quick_retries.APIConnectionError:
                    assert stream
                    api = api.with_options(timeout=SECONDS)

        async def run(task: Any, client: Caller) -> float:
            nonlocal n_came
            history = [user("say hello")]
            lost = every if faulty else 10**6  # noqa: B023
            async with cutting(client.base_url, lost, hold if stream else None) as proxy:
                url = proxy if fault.startswith("every") else client.base_url
                api = quick_retries.AsyncOpenAI(base_url=url, api_key="unused", timeout=SECONDS, max_retries=9)
                for turn in range(TURNS):
                    hold()
                    n_came = 0
                    late = waits and fault.startswith("times") and turn % 4 == 1  # noqa: B023
                    twice = waits and fault.startswith("asks")  # noqa: B023
                    if not (late or twice):
                        release.set()  # noqa: B023
                    texts: list[str] = []

                    async def once(asking: Any) -> None:
                        texts.append(await ask(asking, history))  # noqa: B023

                    async with anyio.create_task_group() as group:
                        for _ in range(2 if twice else 1):
                            group.start_soon(once, api.with_options(timeout=1.0) if late else api)
                    assert len({*texts}) == 1
                    history += [{"role": "assistant", "content": texts[0]}, user("again")]
                await api.close()
            return 1.0

        monkeypatch.setattr(server, "sent", counting if waits and fault.startswith("asks") else sent)
        engine = SlowOnce(words, lambda: release)  # noqa: B023
        services = serve(engine, run, max_turns=TURNS, max_tokens=2048)
        hear_outcomes(services, heard)
        trajectory = await run_order(services, make_order(seconds_max=SECONDS))
        found.append(tokens(trajectory))
        assert_exact(trajectory, engine)
        assert engine.n_requests == len(trajectory.turns) == TURNS
    assert found[0] == found[1]


async def test_equal_requests_at_once_are_one(
    serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_sent, both = 0, anyio.Event()

    def counting(*args: Any) -> Any:
        nonlocal n_sent
        n_sent += 1
        if n_sent == 2:
            both.set()
        return sent(*args)

    monkeypatch.setattr(server, "sent", counting)

    async def run(task: Any, client: Caller) -> float:
        answers: list[tuple[int, Any, Mapping[str, str]]] = []

        async def ask() -> None:
            answers.append(await client.post("/chat/completions", {"messages": [user("say hello")]}))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            group.start_soon(ask)
        assert [status for status, _, _ in answers] == [200, 200] and answers[0][1] == answers[1][1]
        assert sorted("X-Afterplay-Repeated" in headers for _, _, headers in answers) == [False, True]
        return 1.0

    engine = gated(echoing(words), lambda: both)
    services = serve(engine, run)
    trajectory = await run_order(services, long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 1, trajectory.failure
    assert engine.n_requests == 1


async def test_a_question_that_was_answered_is_sampled_again_unless_it_is_a_retry(
    serve: Serve, long_order: Order, words: Any
) -> None:
    async def run(task: Any, client: Caller) -> float:
        async def number(**headers: str) -> str:
            stated = {name.replace("_", "-"): value for name, value in headers.items()}
            status, answer, told = await client.post("/chat/completions", {"messages": [user("say")]}, headers=stated)
            assert status == 200
            assert ("X-Afterplay-Repeated" in told) == (answer["id"] in numbers)
            return str(answer["id"])

        numbers: list[str] = []
        for headers in ({}, {}, {"x_stainless_retry_count": "0"}, {"idempotency_key": "a"}, {"idempotency_key": "b"}):
            numbers.append(await number(**headers))
        assert len(set(numbers)) == 5
        assert await number(x_stainless_retry_count="1") == numbers[2]
        assert await number(idempotency_key="a") == numbers[3]
        return 1.0

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 5, trajectory.failure


async def test_a_retry_of_a_request_that_found_no_place_is_no_repeat_of_an_older_one(
    serve: Serve, long_order: Order, words: Any
) -> None:
    asked, release = anyio.Event(), anyio.Event()
    release.set()

    def gate() -> anyio.Event:
        asked.set()
        return release

    async def run(task: Any, client: Caller) -> float:
        nonlocal asked, release

        async def say(count: int) -> tuple[int, Any, Mapping[str, str]]:
            headers = {"X-Stainless-Retry-Count": f"{count}"}
            return await client.post("/chat/completions", {"messages": [user("say")]}, headers=headers)

        _, first, _ = await say(0)
        asked, release = anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(client.chat, [user("say hello")])
            await asked.wait()
            assert (await say(0))[0] == 429
            release.set()
        _, second, headers = await say(1)
        assert second["id"] != first["id"] and "X-Afterplay-Repeated" not in headers
        return 1.0

    services = serve(gated(echoing(words), gate), run, loop_options={"max_concurrent_calls": 1})
    trajectory = await run_order(services, long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 3, trajectory.failure


@pytest.mark.parametrize("again", ["never", "another", "later"])
async def test_a_call_whose_client_hung_up_leaves_nothing_behind_and_takes_no_place(
    serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Its program asks nothing more; or something else, for which there is room for one turn alone; or the same, when
    nobody waits for it any more."""
    if again == "later":
        monkeypatch.setattr(session, "ABANDONED_SECONDS_MAX", 0.0)
    asked, hung_up, forever = anyio.Event(), anyio.Event(), anyio.Event()

    def gate() -> anyio.Event:
        asked.set()
        return forever

    async def run(task: Any, client: Caller) -> float:
        async with anyio.create_task_group() as asking:
            asking.start_soon(client.chat, [user("say")])
            await asked.wait()
            asking.cancel_scope.cancel()
        await hung_up.wait()
        forever.set()
        if again == "another":
            await client.chat([user("say hello")])
        elif again == "later":
            await client.chat([user("say")])
        return 1.0

    services = serve(gated(echoing(words), gate), run, max_turns=1)
    hear_outcomes(services, lambda outcome: hung_up.set() if outcome == "hung_up" else None)
    trajectory = await run_order(services, long_order)
    if again == "never":
        assert trajectory.failure is not None and trajectory.failure.kind == "NoCalls"
    else:
        assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 1, trajectory.failure


@given(seed=st.integers(0, 2**32))
def test_a_request_is_a_repeat_until_its_answer_was_delivered(seed: int) -> None:
    """Against a list of all requests that is searched from the newest. One that failed is no retry of those
    before it."""
    rng = random.Random(seed)
    repeats: Repeats[Delivery] = Repeats()
    begun: list[tuple[tuple[str, bytes], Delivery]] = []
    for number in range(rng.randrange(1, 40)):
        body, key, count = rng.choice([b"a", b"b"]), rng.choice(["", "", "k"]), rng.choice([None, "0", "1"])
        headers = CIMultiDict({"x-stainless-retry-count": count} if count else {})
        if key:
            headers["Idempotency-Key"] = key
        asked = sent("chat", headers, body)
        newest = next((delivery for identity, delivery in reversed(begun) if identity == (key, body)), None)
        expected = newest if newest is not None and (not newest.delivered or key or count == "1") else None
        assert repeats.find(asked) is expected
        if expected is None:
            delivery = Delivery(told=((number, "reply"),))
            repeats.begin(asked, delivery)
            begun.append(((key, body), delivery))
        action, place = rng.randrange(4), rng.randrange(len(begun)) if begun else 0
        if action == 1:
            begun[place][1].deliver()
        elif action == 2 and begun[place][1].told:
            repeats.continued((*begun[place][1].told[0], "more"))
            assert begun[place][1].delivered
        elif action == 3 and not begun[place][1].delivered:
            gone = begun[place]
            repeats.forget(gone[1])
            begun = [entry for entry in begun if entry[0] != gone[0]]
