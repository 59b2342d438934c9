"""The real shells under seeded faults: every history ends its run in time and its ledger agrees. The auditor notices
when a mechanism that it relies on is taken away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from actors.engine.pool import EnginePool
from actors.servers.authorization import LearnerFence
from learner.weights.engine_client import EngineControl
from learner.weights.engine_keeper import EngineKeeper
from pipeline.errors import EngineBusy, EngineError, EngineRefused
from pipeline.runtime.progress import EngineSilence
from pipeline.schema.orders import whole
from pipeline.stage import learner_control
from pipeline.stage.dispatch import Dispatch
from pipeline.stage.ingest import Ingest
from pipeline.stage.learner_control import LearnerControl
from pipeline.store.records import Drop
from pipeline.store.store import ReplayStore
from pipeline.transport.hub import Peers
from pipeline.transport.outbox import ControlLog
from tests.simulation.schedules import blocks
from tests.support.shell_auditor import Violation
from tests.support.shell_faults import FAULTS
from tests.support.shell_simulation import ShellSimulation, play

PER_TEST = 5


@pytest.mark.parametrize("block", blocks(100, PER_TEST))
def test_a_run_goes_on_after_every_fault(block: int, tmp_path: Path) -> None:
    for seed in range(block * PER_TEST, (block + 1) * PER_TEST):
        play(tmp_path, seed, joins=seed % 2 == 1)


@pytest.mark.parametrize("seed", [4, 5, 7, 10, 13])
def test_the_books_are_right_after_the_newest_checkpoint_is_damaged(seed: int, tmp_path: Path) -> None:
    history = ShellSimulation(tmp_path, seed, ("tear_checkpoint",))
    history.play()
    assert history.disk.torn_checkpoints


def _never_repeated(log: ControlLog) -> None:
    log.grant(1)


def _forgotten_without_a_word(hello: Callable[..., Any]) -> Callable[..., Any]:
    def forgets(self: Peers, peer: Any, connection: bytes, message: Any) -> Any:
        if peer is not None:
            del self._by_connection[peer.connection], self._by_name[peer.name]
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


def _without_keys(hello: Callable[..., Any]) -> Callable[..., Any]:
    def trusts(self: Peers, *arguments: Any) -> Any:
        self.identity = lambda connection: None
        return hello(self, *arguments)

    return trusts


def _unbounded(header: Any, key: str, least: int = 0, most: int = 0, **more: Any) -> int:
    return whole(header, key, 0, **more)


def _blind_to_pauses(call: Callable[..., Any]) -> Callable[..., Any]:
    async def blind(self: EngineControl, method: str, path: str, *more: Any, **named: Any) -> Any:
        if path == "/is_paused":
            return {"is_paused": False}
        with suppress(EngineError) if path == "/resume" else nullcontext():
            return await call(self, method, path, *more, **named)

    return blind


def _dead_at_once(ended: Callable[..., Any]) -> Callable[..., Any]:
    def dies(self: EnginePool, lease: Any, error: BaseException | None) -> None:
        if not isinstance(error, EngineError) or isinstance(error, EngineRefused | EngineBusy):
            return ended(self, lease, error)
        self.router.probed(lease.engine, 0.0, healthy=False, problem=str(error))
        self.poke(lease.engine)

    return dies


def _trusts_the_store(agree: Callable[..., Any]) -> Callable[..., Any]:
    def trusts(self: ReplayStore) -> None:
        self._marks.mark = None
        agree(self)

    return trusts


async def _resumes(self: EngineKeeper) -> None:
    await self._try(self.control.resume, "resumed")


MUTANTS: dict[str, tuple[Any, str, Any, int]] = {
    "what was under way is not repeated": (ControlLog, "repeat", _never_repeated, 5),
    "two names on one connection": (Peers, "_hello", _forgotten_without_a_word(Peers._hello), 0),
    "an engine that did not resume is live": (EngineControl, "_call", _blind_to_pauses(EngineControl._call), 17),
    "one failed request is the death of an engine": (EnginePool, "_ended", _dead_at_once(EnginePool._ended), 0),
    "a store that went back is trusted": (ReplayStore, "_agree", _trusts_the_store(ReplayStore._agree), 0),
    "a duplicate is never acknowledged": (Ingest, "_unexpected", _silent_about_duplicates(Ingest._unexpected), 0),
    "a payload is forgotten one update early": (
        Dispatch,
        "checkpointed",
        _one_update_early(Dispatch.checkpointed),
        108,
    ),
    "a learner that was replaced is let in": (LearnerControl, "refuses", lambda self, hello: None, 3),
    "a stranger is taken for the learner": (Peers, "_hello", _without_keys(Peers._hello), 3),
    "any claim is believed": (learner_control, "whole", _unbounded, 5),
    "groups that nobody got may be trained": (LearnerControl, "_require_delivered", lambda self, text: None, 1),
    "a learner that was replaced labels engines": (LearnerFence, "refusal", lambda self, numbers: None, 5),
    "an engine that hangs is not noticed": (EngineSilence, "too_long", False, 0),
    "an engine samples with half of its weights": (EngineKeeper, "_withdraw", _resumes, 5),
    "what a damaged checkpoint had counts as trained": (Dispatch, "_lose", lambda self, number, group: None, 12),
}
"""Class or module, name, replacement, and the first history whose audit fails with it."""
DRAWN: dict[str, tuple[str, ...]] = {
    "what was under way is not repeated": ("cut", "cut_again_and_again"),
    "two names on one connection": ("two_names",),
    "an engine that did not resume is live": ("control_fails",),
    "one failed request is the death of an engine": ("engine_refuses",),
    "a duplicate is never acknowledged": ("cut", "cut_again_and_again"),
    "a payload is forgotten one update early": ("kill",),
    "a learner that was replaced is let in": ("replace",),
    "a stranger is taken for the learner": ("stranger",),
    "any claim is believed": ("impossible_claim",),
    "groups that nobody got may be trained": ("impossible_claim",),
    "a learner that was replaced labels engines": ("replace",),
    "an engine that hangs is not noticed": ("stop_engine",),
    "an engine samples with half of its weights": ("load_fails_half_way",),
    "what a damaged checkpoint had counts as trained": ("tear_checkpoint",),
}
"""Faults of the histories of a mutant that all faults together show more rarely."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_auditor_notices(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, first = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(Violation):
        for seed in range(first, first + PER_TEST):
            play(tmp_path, seed, DRAWN.get(mutant, tuple(FAULTS)))
