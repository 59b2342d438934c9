"""Which policy version sampled which token: a pure record, no threads, no engine."""

from __future__ import annotations

from collections.abc import Mapping

FIRST_VERSION = "default"
"""What vLLM calls the weights before the first stamp."""

Span = dict[str, int | str]


class VersionRecord:
    """Marks ``(first token, version)`` for each request in flight.

    A request begins with the version that is current; :meth:`stamp` adds a mark to each request that has tokens left to
    sample; :meth:`finish` turns the marks into spans that tile the sampled tokens.
    """

    def __init__(self) -> None:
        self.current = FIRST_VERSION
        self._marks: dict[str, list[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def begin(self, request_id: str) -> None:
        """Start recording. Raises ValueError for an id that is in flight."""
        if request_id in self._marks:
            raise ValueError(f"request {request_id!r} is in flight already")
        self._marks[request_id] = [(0, self.current)]

    def stamp(self, version: str, sampled: Mapping[str, int]) -> None:
        """From now on tokens come from ``version``; ``sampled`` counts the tokens of each unfinished request so far.

        A request that is not in ``sampled`` has none if it begins later, or has finished.
        """
        self.current = version
        for request_id, count in sampled.items():
            marks = self._marks.get(request_id)
            if marks is None:
                continue
            while marks and marks[-1][0] >= count:
                marks.pop()
            if not marks or marks[-1][1] != version:
                marks.append((count, version))

    def finish(self, request_id: str, count: int) -> list[Span]:
        """Stop recording; spans ``{version, start, end}`` that tile ``[0, count)``. KeyError for an unknown id."""
        marks = self._marks.pop(request_id)
        ends = [start for start, _ in marks[1:]] + [count]
        return [
            {"version": version, "start": start, "end": end}
            for (start, version), end in zip(marks, ends, strict=True)
            if end > start
        ]

    def forget(self, request_id: str) -> None:
        """Stop recording a request that was cancelled or failed."""
        self._marks.pop(request_id, None)
