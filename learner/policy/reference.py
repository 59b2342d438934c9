"""The reference policy: log π_ref of an update's tokens.

It is the policy without its adapters, a frozen copy, or a server. The server is a vLLM (OpenAI-compatible):
``POST /v1/completions`` with token ids as prompt and ``prompt_logprobs: 0`` answers with the log-probability of every
prompt token at temperature 1. It is called from the trainer's worker thread, which runs a small event loop of its own
for the requests of one update. Dimension: S sampled tokens of the rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import anyio
import numpy as np
import orjson
import torch

from learner.data.microbatch import token_offsets
from learner.data.rows import Row, TokenArray
from learner.distributed.ranks import Interrupt
from learner.observability.timing import Stopwatch
from learner.policy.policy import Policy
from pipeline.config import RunConfig
from pipeline.config.learner import ReferenceConfig
from pipeline.errors import (
    AfterplayError,
    ConfigurationError,
    EngineProtocolError,
    Interrupted,
    leaves,
)
from pipeline.runtime.engine_keys import authorization
from pipeline.runtime.http import TEXT_MAX, Answer, HttpClient, retried

log = logging.getLogger(__name__)


class Reference(Protocol):
    """A reference policy."""

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """log π_ref of all sampled tokens of ``rows``, nats, float32 ``[S]``, rows in order. Blocks."""
        ...


class AdaptersOff:
    """The policy without its adapters: no copy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        with self._policy.without_adapters():
            return self._policy.token_pass(rows, self._policy.score, 2, watch)[0]


class FrozenCopy:
    """A second model."""

    def __init__(self, copy: Policy) -> None:
        self.backbone = copy
        copy.model.requires_grad_(False)

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.backbone.model
        return model

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        return self.backbone.token_pass(rows, self.backbone.score, 2, watch)[0]


class AskedElsewhere:
    """Reference on ranks other than 0 if it is a server: rank 0 queries it and sends the scores with the rows."""

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """Zeros, which nothing reads."""
        return np.zeros(sum(row.n_sampled for row in rows), np.float32)


CHECK_TEXT = (
    "The list has 3 apples, 17 pears and 24 plums. Question: how many pieces of fruit are there? Answer: 3 + 17 = 20, "
    "and 20 + 24 = 44."
)


def encoded_check_text(config: RunConfig, model: Path) -> list[int]:
    """Ids of :data:`CHECK_TEXT` by the tokenizer in the folder ``model``."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=config.model.trust_remote_code)
    ids: list[int] = tokenizer.encode(CHECK_TEXT, add_special_tokens=False)
    return ids


LOOK_SECONDS = 0.5
"""Bound on how long a stop waits for a request that is under way."""
CONCURRENCY = 8
"""Requests to a reference server in flight."""
TIMEOUT_SECONDS, ATTEMPTS_MAX, RETRY_SECONDS = 60.0, 3, 1.0
"""Limits of one request. The update fails after the last attempt."""
ROUTE, TOKENIZE = "/v1/completions", "/tokenize"
ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""About 100 bytes for each token of a row."""


class ServerReference:
    """A reference policy behind HTTP. ``interrupt`` cancels the requests; ``key`` opens the server."""

    def __init__(
        self,
        config: ReferenceConfig,
        interrupt: Interrupt,
        key: str | None = None,
        check_ids: list[int] | None = None,
        row_max: int = 0,
    ) -> None:
        """``check_ids``: :func:`encoded_check_text`, with which the server's tokenizer is compared; None: it is not
        checked. ``row_max``: tokens of the longest row."""
        self._headers = authorization(key)
        self._url = (config.url or "").rstrip("/")
        self._server = f"the reference server {self._url}"
        self._config = config
        self._interrupt = interrupt
        self._check_ids = check_ids
        self._row_max = row_max
        self.on_answer: Callable[[], None] = lambda: None
        """Called after each row: the pass makes progress."""

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """See :meth:`Reference.logprobs`. Raises :class:`ConfigurationError` for tokens that were not sampled with
        temperature 1, and for a server with another tokenizer or without room for the longest row,
        :class:`pipeline.errors.EngineError` when the server does not give all in :data:`ATTEMPTS_MAX` attempts each,
        :class:`Interrupted`."""
        for row in rows:
            if not (row.temperatures[row.loss_mask] == 1.0).all():
                raise ConfigurationError(
                    f"expected {row.trajectory_id} to be sampled with temperature 1, got "
                    f"{row.temperatures[row.loss_mask][0]:g}: the server of learner.reference.url scores with 1. It is "
                    "imported, or of before sampling.temperature was changed: set learner.reference.folder in place of "
                    "the url, or give another run.name"
                )
        out = np.zeros(sum(row.n_sampled for row in rows), dtype=np.float32)
        with watch.phase("forward"):
            try:
                anyio.run(self._all, rows, out)
            except BaseExceptionGroup as group:
                raise _first(group) from group
        return out

    async def _all(self, rows: Sequence[Row], out: TokenArray) -> None:
        limit = anyio.CapacityLimiter(CONCURRENCY)

        async def one(row: Row, offset: int) -> None:
            async with limit:
                out[offset : offset + row.n_sampled] = await self._row(http, row)
                self.on_answer()

        async def watch_interrupt() -> None:
            while not self._interrupt.is_set():
                await anyio.sleep(LOOK_SECONDS)
            raise Interrupted

        async with HttpClient(self._headers) as http, anyio.create_task_group() as watching:
            watching.start_soon(watch_interrupt)
            await self._check_server(http)
            async with anyio.create_task_group() as tasks:
                for row, offset in zip(rows, token_offsets(rows), strict=True):
                    tasks.start_soon(one, row, int(offset))
            watching.cancel_scope.cancel()

    async def _check_server(self, http: HttpClient) -> None:
        """Compare the tokenizers, and the longest row with the context, once. A server without vLLM's route is
        trusted."""
        if self._check_ids is None:
            return

        async def ask() -> tuple[Any, Any]:
            answer = await self._post(http, TOKENIZE, {"prompt": CHECK_TEXT, "add_special_tokens": False})
            if answer.status in (404, 405):
                log.warning("%s has no %s: its tokenizer is taken for that of the policy", self._server, TOKENIZE)
                return expected, None
            found = answer.accepted()
            return (found.get("tokens"), found.get("max_model_len")) if isinstance(found, dict) else (found, None)

        expected, needed = self._check_ids, self._row_max + 1
        came, room = await retried(ask, ATTEMPTS_MAX, RETRY_SECONDS)
        if came != expected:
            raise ConfigurationError(
                f"learner.reference.url: expected a model with the policy's tokenizer at {self._url}, but of the same "
                f"text it makes {came} and the policy's {expected}: serve a model of the same family"
            )
        if isinstance(room, int) and room < needed:
            raise ConfigurationError(
                f"learner.reference.url: expected room for {needed} tokens at {self._url}, got {room}: start it with "
                f"--max-model-len {needed}, or set model.max_length: {room}"
            )
        self._check_ids = None

    async def _post(self, http: HttpClient, route: str, body: dict[str, Any]) -> Answer:
        if self._config.model is not None:
            body["model"] = self._config.model
        return await http.request(
            "POST", self._url, route, data=orjson.dumps(body), seconds=TIMEOUT_SECONDS, bytes_max=ANSWER_BYTES_MAX,
            server=self._server,
        )  # fmt: skip

    async def _row(self, http: HttpClient, row: Row) -> TokenArray:
        body: dict[str, Any] = {
            "prompt": row.token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }

        async def ask() -> TokenArray:
            return prompt_logprobs((await self._post(http, ROUTE, body)).accepted(), row, self._server)

        return await retried(ask, ATTEMPTS_MAX, RETRY_SECONDS)


def prompt_logprobs(answer: Any, row: Row, server: str = "the engine") -> TokenArray:
    """log-probs of the sampled tokens of ``row``, float32 ``[S]``, out of an answer of ``/v1/completions`` or
    ``/inference/v1/generate``.

    Raises :class:`EngineProtocolError` when a token's is missing.
    """
    try:
        choice = answer["choices"][0]
        entries = choice.get("prompt_logprobs") or answer["prompt_logprobs"]
        if len(entries) != len(row):
            raise ValueError(f"{len(entries)} entries for {len(row)} tokens")
        found = [float(entries[t][str(row.token_ids[t])]["logprob"]) for t in np.flatnonzero(row.loss_mask)]
        if any(math.isnan(value) for value in found):
            raise ValueError("NaN")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineProtocolError(
            f"expected prompt_logprobs of every token from {server}, got "
            f"{type(error).__name__}: {error} in {str(answer)[:TEXT_MAX]}: does it know prompt_logprobs (vLLM does)?"
        ) from error
    return np.asarray(found, dtype=np.float32)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception: a stop if there was one, else what the server did."""
    return next(leaves(group.subgroup(Interrupted) or group.subgroup(AfterplayError) or group))
