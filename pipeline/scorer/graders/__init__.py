"""Built-in graders: functions of a trajectory that compare its last reply with the task's payload, 1.0 or 0.0.

A wrong or missing answer of the policy is 0.0. A payload that cannot be graded with raises, so the trajectory has no
reward.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from pipeline.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Grader:
    """Where a built-in grader is, and what it needs."""

    path: str
    worker: bool = False
    """It can take long, or for ever, on what a policy says: only a process can be stopped."""
    needs: str | None = None
    """Module of the extra ``graders``."""

    def check(self, name: str) -> None:
        """Raises :class:`ConfigurationError` when what it needs is not installed."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            raise ConfigurationError(
                f"score function {name}: expected the package {self.needs.replace('_', '-')} to be installed, got "
                "none: pip install 'afterplay[graders]'"
            )


_TEXT, _HERE = "pipeline.scorer.graders.text", "pipeline.scorer.graders"
BUILT_IN = {
    "exact": Grader(f"{_TEXT}:exact"),
    "contains": Grader(f"{_TEXT}:contains"),
    "number": Grader(f"{_TEXT}:number"),
    "choice": Grader(f"{_TEXT}:choice"),
    "regex": Grader(f"{_HERE}.patterns:regex", worker=True),
    "json_schema": Grader(f"{_HERE}.json_schema:json_schema", worker=True, needs="jsonschema"),
    "math": Grader(f"{_HERE}.mathematics:math", worker=True, needs="math_verify"),
}
