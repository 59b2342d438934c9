"""The reference policy: log π_ref of an update's tokens.

It is the policy without its adapters, a frozen copy, or a server. The server is a vLLM (OpenAI-compatible):
``POST /v1/completions`` with token ids as prompt and ``prompt_logprobs: 0`` answers with the log-probability of every
prompt token at temperature 1. It is called from the trainer's worker thread, which runs a small event loop of its own
for the requests of one update. Dimension: S sampled tokens of the rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import orjson
import torch
from torch import Tensor

from learner.data.microbatch import token_offsets
from learner.data.rows import Row, TokenArray
from learner.distributed.ranks import Interrupt
from learner.observability.timing import Stopwatch
from learner.policy.policy import Policy
from pipeline.config.learner import ReferenceConfig
from pipeline.errors import EngineError, EngineProtocolError, Interrupted, StoreError, TrainingError
from pipeline.runtime.engine_keys import authorization
from pipeline.runtime.http import TEXT_MAX, HttpClient, retried


class Reference(ABC):
    """A reference policy; one whose weights never change has only ``logprobs``."""

    @abstractmethod
    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """log π_ref of all sampled tokens of ``rows``, nats, float32 ``[S]``, rows in order. Blocks."""

    def updated(self, updates: int) -> None:  # noqa: B027 - optional
        """``updates`` updates are made: the reference may follow."""

    def state(self) -> dict[str, Tensor] | None:
        """State that a resumed learner cannot rebuild; not copies. None: there is none."""
        return None

    def load(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - optional
        """Resume from a saved state. Raises :class:`StoreError`."""


class AdaptersOff(Reference):
    """The policy without its adapters: no copy, never refreshed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        with self._policy.without_adapters():
            return self._policy.token_pass(rows, self._policy.score, 2, watch)[0]


class FrozenCopy(Reference):
    """A second model, which takes the weights of ``live`` every ``refresh_every`` updates, or never."""

    def __init__(self, copy: Policy, live: Policy, refresh_every: int | None = None) -> None:
        self.backbone = copy
        self._live = live
        self._refresh_every = refresh_every
        copy.model.requires_grad_(False)

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.backbone.model
        return model

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        return self.backbone.token_pass(rows, self.backbone.score, 2, watch)[0]

    def updated(self, updates: int) -> None:
        if self._refresh_every is not None and updates % self._refresh_every == 0:
            self._take(self._live.own_weights())

    def state(self) -> dict[str, Tensor] | None:
        """Its weights where it is refreshed; else None."""
        return None if self._refresh_every is None else dict(self.backbone.model.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        try:
            self._take(state)
        except (KeyError, RuntimeError) as error:
            raise StoreError(
                f"the saved reference policy belongs to another model ({error}): choose another run.name"
            ) from error

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        own = self.backbone.model.state_dict()
        unknown = sorted(weights.keys() - own.keys())
        if unknown:
            raise KeyError(f"no weights {unknown[:3]} in the reference policy")
        for name, tensor in weights.items():
            own[name].copy_(tensor)


class AskedElsewhere(Reference):
    """Reference on ranks other than 0 if it is a server: rank 0 queries it and sends the scores with the rows."""

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """Zeros, which nothing reads."""
        return np.zeros(sum(row.n_sampled for row in rows), np.float32)


LOOK_SECONDS = 0.5
"""Bound on how long a stop waits for a request that is under way."""
CONCURRENCY = 8
"""Requests to a reference server in flight."""
TIMEOUT_SECONDS, ATTEMPTS_MAX, RETRY_SECONDS = 60.0, 3, 1.0
"""Limits of one request. The update fails after the last attempt."""
ROUTE = "/v1/completions"
ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""About 100 bytes for each token of a row."""


class ServerReference(Reference):
    """A reference policy behind HTTP. ``interrupt`` cancels the requests; ``key`` opens the server."""

    def __init__(self, config: ReferenceConfig, interrupt: Interrupt, key: str | None = None) -> None:
        self._headers = authorization(key)
        self._url = (config.url or "").rstrip("/")
        self._server = f"the reference server {self._url}"
        self._config = config
        self._interrupt = interrupt

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """See :meth:`Reference.logprobs`. Raises :class:`TrainingError` for tokens that were
        not sampled with temperature 1, :class:`pipeline.errors.EngineError` when the server does not give all in
        :data:`ATTEMPTS_MAX` attempts each, :class:`Interrupted`."""
        for row in rows:
            if not (row.temperatures[row.loss_mask] == 1.0).all():
                raise TrainingError(
                    f"expected {row.trajectory_id} to be sampled with temperature 1, got "
                    f"{row.temperatures[row.loss_mask][0]:g}: a reference server scores with 1; set "
                    "sampling.temperature: 1, or learner.reference.source: initial"
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

        async def watch_interrupt() -> None:
            while not self._interrupt.is_set():
                await anyio.sleep(LOOK_SECONDS)
            raise Interrupted

        async with HttpClient(self._headers) as http, anyio.create_task_group() as watching:
            watching.start_soon(watch_interrupt)
            async with anyio.create_task_group() as tasks:
                for row, offset in zip(rows, token_offsets(rows), strict=True):
                    tasks.start_soon(one, row, int(offset))
            watching.cancel_scope.cancel()

    async def _row(self, http: HttpClient, row: Row) -> TokenArray:
        body: dict[str, Any] = {
            "prompt": row.token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        if self._config.model is not None:
            body["model"] = self._config.model
        data = orjson.dumps(body)

        async def ask() -> TokenArray:
            answer = await http.request(
                "POST", self._url, ROUTE, data=data, seconds=TIMEOUT_SECONDS, bytes_max=ANSWER_BYTES_MAX,
                server=self._server,
            )  # fmt: skip
            return prompt_logprobs(answer.accepted(), row, self._server)

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
    error: BaseException = group.subgroup(Interrupted) or group.subgroup(EngineError) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
