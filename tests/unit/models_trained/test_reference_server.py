"""A reference policy behind HTTP: each number at its token, and a bounded wait for a server that fails."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import orjson
import pytest
import torch
from aiohttp import web

from learner.distributed.ranks import Interrupt
from learner.observability.timing import Stopwatch
from learner.policy.reference import ServerReference
from learner.training.trainer import Trainer
from pipeline.config.learner import ReferenceConfig
from pipeline.errors import (
    ConfigurationError,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    Interrupted,
)
from tests.support.http_server import in_thread, serving
from tests.unit.learner.conftest import make_rows, run_config, tiny_policy

WATCH = Stopwatch(torch.device("cpu"))


def value(token, position):
    return -(token + 1) / 100 - position


class Server:
    """Scores ``value(token, position)``; ``faults`` are statuses, texts or events for the first requests."""

    def __init__(self):
        self.bodies, self.faults, self.most, self.now = [], [], 0, 0
        self.tokenized, self.tokens = [], None
        self.arrived = threading.Event()

    async def handle(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        self.arrived.set()
        try:
            return await self._answer(orjson.loads(await request.read()))
        finally:
            self.now -= 1

    async def tokenize(self, request):
        self.tokenized.append(orjson.loads(await request.read()))
        if self.tokens is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"count": len(self.tokens), "max_model_len": 64, "tokens": self.tokens})

    async def _answer(self, body):
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "no"}}, status=fault)
        if isinstance(fault, str):
            return web.Response(text=fault)
        if fault is not None:
            await fault.wait()
        entries = [None]
        for position, token in enumerate(body["prompt"][1:], 1):
            top = {"logprob": -0.5, "rank": 1}
            entries.append({"99": top, str(token): {"logprob": value(token, position), "rank": 2}})
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": entries}]})


@pytest.fixture
def server():
    """In a thread of its own, as a server is a process of its own."""
    server, app = Server(), web.Application()
    app.router.add_post("/v1/completions", server.handle)
    app.router.add_post("/tokenize", server.tokenize)
    with in_thread(serving(app)) as server.url:
        yield server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("learner.policy.reference.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("learner.policy.reference.LOOK_SECONDS", 0.05)


def reference_of(server, interrupt=None, **options):
    config = ReferenceConfig(url=server.url + "/", **options)
    return ServerReference(config, interrupt or Interrupt())


def rows_at_one(count):
    rows = make_rows(count)
    for row in rows:
        row.temperatures[:] = 1.0
    return rows


def expected(rows):
    return np.concatenate([[value(int(row.token_ids[t]), t) for t in np.flatnonzero(row.loss_mask)] for row in rows])


def test_every_sampled_token_gets_its_own_number(server, monkeypatch):
    monkeypatch.setattr("learner.policy.reference.CONCURRENCY", 2)
    rows = rows_at_one(9)
    came = reference_of(server, model="ref").logprobs(rows, WATCH)
    np.testing.assert_allclose(came, expected(rows), rtol=1e-6)
    assert came.dtype == np.float32
    assert server.most <= 2
    assert {body["model"] for body in server.bodies} == {"ref"}
    assert "seed" not in server.bodies[0]


def test_each_answer_is_progress_of_the_learner(server):
    answers, reference = [], reference_of(server)
    trainer = Trainer(tiny_policy(), run_config(loss={"kl": "loss"}), reference)
    trainer.on_layer(lambda: answers.append(len(server.bodies)))
    reference.logprobs(rows_at_one(9), WATCH)
    assert len(answers) == 9


def test_other_ranks_wait_outside_of_a_command_while_rank_0_asks(server, monkeypatch):
    policy, steps = tiny_policy(), []
    trainer = Trainer(policy, run_config(loss={"kl": "loss"}), reference := reference_of(server))
    reference.on_answer = lambda: steps.append("answer")

    @contextlib.contextmanager
    def together(command, *sent):
        steps.append(command)
        yield

    monkeypatch.setattr(policy.ranks, "together", together)
    rows = rows_at_one(2)
    np.testing.assert_allclose(trainer.token_scores(rows).reference, expected(rows), rtol=1e-6)
    assert steps == ["answer", "answer", "gather"]


def test_a_server_with_another_tokenizer_is_refused_before_it_scores_a_token(server):
    server.tokens = [1, 2, 4]
    reference = ServerReference(ReferenceConfig(url=server.url), Interrupt(), check_ids=[1, 2, 3])
    with pytest.raises(ConfigurationError, match=r"policy's tokenizer at .*\[1, 2, 4\] and the policy's \[1, 2, 3\]"):
        reference.logprobs(rows_at_one(1), WATCH)
    assert server.bodies == []


def test_a_server_without_room_for_the_longest_row_and_a_token_is_refused_before_it_scores_one(server):
    server.tokens = [1, 2, 3]
    config = ReferenceConfig(url=server.url)
    with pytest.raises(ConfigurationError, match=r"room for 65 tokens at .*, got 64.*set model.max_length: 64"):
        ServerReference(config, Interrupt(), check_ids=[1, 2, 3], row_max=64).logprobs(rows_at_one(1), WATCH)
    assert server.bodies == []
    rows = rows_at_one(1)
    fits = ServerReference(config, Interrupt(), check_ids=[1, 2, 3], row_max=63)
    np.testing.assert_allclose(fits.logprobs(rows, WATCH), expected(rows), rtol=1e-6)


@pytest.mark.parametrize("tokens", [[1, 2, 3], None])
def test_a_server_with_the_same_tokenizer_or_without_the_route_is_asked_once_for_it(server, tokens):
    server.tokens = tokens
    config = ReferenceConfig(url=server.url, model="ref")
    reference, rows = ServerReference(config, Interrupt(), check_ids=[1, 2, 3]), rows_at_one(1)
    for _ in range(2):
        np.testing.assert_allclose(reference.logprobs(rows, WATCH), expected(rows), rtol=1e-6)
    (asked,) = server.tokenized
    assert (asked["model"], asked["add_special_tokens"]) == ("ref", False)


def test_a_server_that_stumbles_is_asked_again(server):
    server.faults = [503, 500]
    rows = rows_at_one(1)
    np.testing.assert_allclose(reference_of(server).logprobs(rows, WATCH), expected(rows), rtol=1e-6)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("fault", "error", "requests"),
    [
        (503, EngineUnavailable, 3),
        (400, EngineRefused, 1),
        ("<html>", EngineProtocolError, 1),
        ("{}", EngineProtocolError, 1),
    ],
)
def test_a_server_that_fails_ends_in_one_error_that_says_why(server, fault, error, requests):
    server.faults = [fault] * 10
    with pytest.raises(error, match="reference server"):
        reference_of(server).logprobs(rows_at_one(1), WATCH)
    assert len(server.bodies) == requests


def test_a_server_that_hangs_or_is_gone_is_given_up_in_bounded_time(server, monkeypatch):
    monkeypatch.setattr("learner.policy.reference.TIMEOUT_SECONDS", 0.1)
    server.faults = [asyncio.Event()] * 10
    start = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"within 0\.1 s"):
        reference_of(server).logprobs(rows_at_one(2), WATCH)
    assert time.monotonic() - start < 5
    gone = ReferenceConfig(url="http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable, match="failed"):
        ServerReference(gone, Interrupt()).logprobs(rows_at_one(1), WATCH)


def test_a_stop_does_not_wait_for_the_server(server):
    server.faults = [asyncio.Event()] * 10
    interrupt = Interrupt()

    def stop():
        server.arrived.wait(10)
        interrupt.set()

    threading.Thread(target=stop, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(Interrupted):
        reference_of(server, interrupt).logprobs(rows_at_one(2), WATCH)
    assert time.monotonic() - start < 5


def test_another_temperature_is_refused_because_the_server_cannot_score_it(server):
    with pytest.raises(ConfigurationError, match=r"temperature 1, got 0\.8"):
        reference_of(server).logprobs(make_rows(1), WATCH)
    assert server.bodies == []


def test_a_reference_is_at_one_place():
    with pytest.raises(ValueError, match="omit one"):
        ReferenceConfig(folder="teacher", url="http://x")
