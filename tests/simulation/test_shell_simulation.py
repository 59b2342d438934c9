"""The real shells under seeded faults: every history ends its run in time and its books agree; and the auditor notices
when a mechanism that it relies on is taken away."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.stage.dispatch import Dispatch
from pipeline.stage.ingest import Ingest
from pipeline.stage.learner_control import LearnerControl
from pipeline.store.records import Drop
from pipeline.transport.hub import Peers
from pipeline.transport.link import Session
from pipeline.transport.outbox import ControlLog
from tests.support.shell_simulation import Violation, play

PER_TEST = 10
HISTORIES = int(os.environ.get("AFTERPLAY_SCHEDULES", "200"))


@pytest.mark.parametrize("block", range(max(1, HISTORIES // PER_TEST)))
def test_a_run_goes_on_after_every_fault(block: int, tmp_path: Path) -> None:
    for seed in range(block * PER_TEST, (block + 1) * PER_TEST):
        play(tmp_path, seed)


def _never_repeated(log: ControlLog) -> None:
    log.grant(1)


def _forgotten_without_a_word(hello: Callable[..., Any]) -> Callable[..., Any]:
    def forgets(self: Peers, peer: Any, connection: bytes, message: Any) -> Any:
        if peer is not None:
            self._forget(peer)
        return hello(self, None, connection, message)

    return forgets


def _silent_about_duplicates(unexpected: Callable[..., Any]) -> Callable[..., Any]:
    def answers(self: Ingest, actor: str, trajectory_id: str, key: Any, order: Any) -> None:
        if self._why_unexpected(key, order) is not Drop.DUPLICATE:
            unexpected(self, actor, trajectory_id, key, order)

    return answers


def _one_update_early(checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    def forgets(self: Dispatch, updates: int) -> None:
        checkpointed(self, updates)
        for group in [g for g in self._records.values() if g.consumed and g.update == updates]:
            self.forget(group)

    return forgets


MUTANTS: dict[str, tuple[type, str, Any, int]] = {
    "what was under way is not repeated": (ControlLog, "repeat", _never_repeated, 0),
    "two names on one connection": (Peers, "_hello", _forgotten_without_a_word(Peers._hello), 12),
    "any answer connects": (Session, "_is_answered", lambda self, message: True, 91),
    "a duplicate is never acknowledged": (Ingest, "_unexpected", _silent_about_duplicates(Ingest._unexpected), 0),
    "a payload is forgotten one update early": (Dispatch, "checkpointed", _one_update_early(Dispatch.checkpointed), 0),
    "a learner that was replaced is let in": (LearnerControl, "refuses", lambda self, hello: None, 7),
}
"""Class, name, replacement, and the first history whose audit fails with it."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_auditor_notices(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, first = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(Violation):
        for seed in range(first, first + PER_TEST):
            play(tmp_path, seed)
