"""Rollouts that succeeded and failed, by environment, with the reasons; and environments that never succeed.

*consumes* every usable and every failed rollout; *produces* counters of the ledger, and the reason to end a run.
"""

from __future__ import annotations

from typing import Any

from pipeline.config import RunConfig
from pipeline.stage.group_records import Clock
from pipeline.store.journal import Journal
from pipeline.store.ledger import EnvironmentOutcomes, outcomes_of

FAILURES_MAX = 100
"""Failed rollouts, in this process, after which an environment that never succeeded ends the run."""
FAILING_SECONDS = 30.0
"""Between the first failure and the verdict: what an environment needs may still be starting."""
ENGINE = "engine: EngineUnavailable"
"""Cause that says nothing about the environment. Engines come back."""
MESSAGE_CHARACTERS_MAX = 500
"""Part of a failure's message that is kept."""


class RolloutOutcomes:
    """Successes and failures of rollouts by environment, and whether the run can continue."""

    def __init__(self, config: RunConfig, journal: Journal, clock: Clock) -> None:
        self._trained = frozenset(config.trained_environments)
        self._journal = journal
        self._clock = clock
        self.successes = 0
        """In this process."""
        self._failed: dict[str, int] = {}
        self._first_failed_at: dict[str, float] = {}

    def succeeded(self, environment: str) -> None:
        """A rollout has a reward."""
        self.successes += 1
        self._journal.succeeded(environment)

    def failed(self, environment: str, reason: str, cause: str = "") -> None:
        """A rollout failed or has no reward. ``reason``: ``boundary: kind: message``, unless ``cause`` is given and it
        is the message alone."""
        message = reason
        if not cause:
            boundary, _, rest = reason.partition(":")
            kind, _, message = rest.partition(":")
            cause = ": ".join(part.strip() for part in (boundary, kind) if part)
        self._journal.failed(environment, cause, " ".join(message.split())[:MESSAGE_CHARACTERS_MAX])
        if cause != ENGINE:
            self._failed[environment] = self._failed.get(environment, 0) + 1
            self._first_failed_at.setdefault(environment, self._clock.now)

    def summary(self) -> dict[str, EnvironmentOutcomes]:
        """Outcomes of each environment, since the start of the run."""
        return outcomes_of(self._journal.counters, self._journal.messages)

    def header(self) -> dict[str, list[Any]]:
        """By environment, where this process saw failures: rollouts that succeeded and failed, and a description.
        Empty as a rule, at no cost."""
        found = self.summary() if self._failed else {}
        return {name: [one.succeeded, one.failed, one.describe(name)] for name, one in found.items() if one.failed}

    def hopeless(self) -> str:
        """Reason why the run must end; empty if it can continue."""
        for environment in self._trained & self._failed.keys():
            long = self._clock.now - self._first_failed_at[environment] >= FAILING_SECONDS
            if self._failed[environment] >= FAILURES_MAX and long:
                outcomes = self.summary()[environment]
                if not outcomes.succeeded:
                    return (
                        f"{outcomes.describe(environment)}. Expected at least one that succeeds within {FAILURES_MAX}: "
                        "fix what fails and start the run again, which resumes it"
                    )
        return ""
