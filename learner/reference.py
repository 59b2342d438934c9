"""The reference policy: log π_ref of an update's tokens, by one of several ways to have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from learner.evidence import TokenArray
from learner.passes import token_pass
from learner.policy import Policy
from learner.report import Stopwatch
from learner.rows import Row
from pipeline.errors import StoreError


class Reference(Protocol):
    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """log π_ref of all sampled tokens of ``rows``, nats, float32 ``[S]``, rows in order. Blocks."""
        ...

    def updated(self, updates: int) -> None:
        """``updates`` updates are made: the reference may follow."""
        ...

    def state(self) -> dict[str, Tensor] | None:
        """What a resumed learner cannot make anew; not copies. None: nothing."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state. Raises :class:`StoreError`."""
        ...


class AdaptersOff:
    """The weights in training without their adapters: no copy, and never another."""

    def __init__(self, policy: Policy, tokens_max: int) -> None:
        self._policy = policy
        self._tokens_max = tokens_max

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """See :meth:`Reference.logprobs`."""
        with self._policy.without_adapters():
            policy = self._policy
            return token_pass(rows, policy.score, 2, self._tokens_max, watch, policy.form, policy.ranks)[0]

    def updated(self, updates: int) -> None:
        """It stays."""

    def state(self) -> dict[str, Tensor] | None:
        """The weights are those of the model."""
        return None

    def load(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to load."""


class FrozenCopy:
    """A model of its own, which takes the weights of ``live`` every ``refresh_every`` updates, or never."""

    def __init__(self, copy: Policy, live: Policy, tokens_max: int, refresh_every: int | None = None) -> None:
        self._copy = copy
        self._live = live
        self._tokens_max = tokens_max
        self._refresh_every = refresh_every
        copy.model.requires_grad_(False)

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._copy.model
        return model

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """See :meth:`Reference.logprobs`."""
        copy = self._copy
        return token_pass(rows, copy.score, 2, self._tokens_max, watch, copy.form, copy.ranks)[0]

    def updated(self, updates: int) -> None:
        """See :meth:`Reference.updated`."""
        if self._refresh_every is not None and updates % self._refresh_every == 0:
            divided = self._live.ranks.size > 1
            self._take(dict(self._live.model.state_dict()) if divided else self._live.snapshot("float32"))

    def state(self) -> dict[str, Tensor] | None:
        """Its weights, where it was ever refreshed or may be."""
        return None if self._refresh_every is None else dict(self._copy.model.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`Reference.load`."""
        try:
            self._take(state)
        except (KeyError, RuntimeError) as error:
            raise StoreError(
                f"the saved reference policy belongs to another model ({error}): choose another run.name"
            ) from error

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        own = self._copy.model.state_dict()
        unknown = sorted(weights.keys() - own.keys())
        if unknown:
            raise KeyError(f"no weights {unknown[:3]} in the reference policy")
        for name, tensor in weights.items():
            own[name].copy_(tensor)


class AskedElsewhere:
    """On ranks other than 0 where the reference is a server: rank 0 asks it, and sends what it says with the rows."""

    def logprobs(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """Nothing reads them."""
        return np.zeros(sum(row.n_sampled for row in rows), np.float32)

    def updated(self, updates: int) -> None:
        """It stays."""

    def state(self) -> dict[str, Tensor] | None:
        """There is none."""
        return None

    def load(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to load."""
