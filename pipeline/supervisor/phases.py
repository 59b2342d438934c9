"""The phases of a run in plain words: a line when each begins or ends, from preparing the model to the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.supervisor.processes import PREPARE, HealthAnswer
from pipeline.supervisor.restarts import Phase, Process


class Phases:
    """Pure. ``engine`` is what an engine is called: ``vLLM``."""

    def __init__(self, engine: str, total_steps: int) -> None:
        self._engine = engine
        self._total_steps = total_steps
        self._said: set[str] = set()

    def news(
        self, processes: Mapping[str, Process], answers: Mapping[str, HealthAnswer], steps_done: int, now: float
    ) -> list[str]:
        """Lines that were not returned before, in the order in which things happen."""
        lines = dict(self._facts(processes, answers, steps_done, now))
        new = [line for key, line in lines.items() if key not in self._said]
        self._said |= lines.keys()
        return new

    def _facts(
        self, processes: Mapping[str, Process], answers: Mapping[str, HealthAnswer], steps_done: int, now: float
    ) -> Iterator[tuple[str, str]]:
        """Key and line of everything that has happened."""
        prepare = processes.get(PREPARE)
        if prepare is not None and prepare.alive:
            yield "preparing", "preparing the model"
        if prepare is not None and prepare.phase is Phase.DONE and prepare.exit_code == 0:
            yield "prepared", f"the model is ready after {now - prepare.started_at:.0f} s"
        for name, process in processes.items():
            if name.startswith("engine-"):
                label = self._engine if "engine-1" not in processes else f"{self._engine} ({name})"
                key = f"{name} {process.restarts}"
                if process.phase is Phase.STARTING:
                    yield f"starting {key}", f"starting {label}{' again' if process.restarts else ''}"
                elif process.phase is Phase.RUNNING and process.running_since is not None:
                    seconds = process.running_since - process.started_at
                    yield f"ready {key}", f"{label} is ready after {seconds:.0f} s"
        if steps_done:
            return
        playing = sum(int(a.details.get("playing") or 0) for n, a in answers.items() if n.startswith("actor-"))
        if playing:
            yield "playing", f"playing the first episodes ({playing} at once)"
        learner = answers.get("learner")
        if learner is not None and learner.state == "training":
            yield "training", f"step {learner.details.get('step', 1)} of {self._total_steps}: training"
