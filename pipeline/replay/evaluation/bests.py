"""The best evaluations so far, each better than the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.replay.evaluation.result import Result


class Bests:
    """By ``metric`` (``score`` or ``pass@K``). ``kept``: what :meth:`as_json` gave; of another metric it is dropped.

    Those before the best stay: a learner that goes back takes the last ones with it."""

    def __init__(self, metric: str, kept: Sequence[dict[str, Any]]) -> None:
        self._metric = metric
        self._bests = list(kept) if kept and kept[-1]["metric"] == metric else []

    @property
    def best(self) -> dict[str, Any] | None:
        return self._bests[-1] if self._bests else None

    def offer(self, result: Result, shape: dict[str, Any]) -> None:
        """A complete evaluation. Of other tasks, or played otherwise (``shape``), it begins anew: such values are not
        to be compared. Of equals the first stays."""
        if self.best is not None and self.best["of"] != shape:
            self._bests = []
        value = result.value(self._metric)
        if value is not None and (self.best is None or value > self.best["value"]):
            self._bests.append(
                {
                    "evaluation": result.number, "updates": result.updates, "policy_version": result.policy_version,
                    "metric": self._metric, "value": value, "of": shape,
                }
            )  # fmt: skip

    def go_back(self, updates: int) -> None:
        """The learner has ``updates`` updates: had the checkpoint of a later best been durable, it would not have gone
        back behind it."""
        while self._bests and self._bests[-1]["updates"] > updates:
            self._bests.pop()

    def as_json(self) -> list[dict[str, Any]]:
        return self._bests
