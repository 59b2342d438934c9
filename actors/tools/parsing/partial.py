"""The content of a reply that is still sampled: it ends where a call begins, or may begin with what was sampled last.

Python's ``re`` cannot tell that more text could make a pattern match; the package ``regex`` can (``partial``). What
:meth:`actors.tools.parsing.base.ToolFormat.parse` skips, thoughts, is skipped here too.
"""

from __future__ import annotations

import re

import regex

from actors.tools.parsing.base import Thinking, ToolFormat


class PartialContent:
    """Follows one reply in one form of calls."""

    def __init__(self, form: ToolFormat, thinking: Thinking) -> None:
        self._closings = dict(thinking.marks)
        openings = "|".join(re.escape(mark) for mark in self._closings) or "(?!)"
        self._next = regex.compile(f"(?:{form.mark.pattern})|(?P<thought>{openings})")
        self._start = None if form.start is None else regex.compile(form.start.pattern)
        self._closing = thinking.begun
        """The mark that ends the thought in which the text is; empty outside of one."""
        self._at = 0
        """No call begins before it."""
        self._may_start = True
        """Calls without a mark before them may begin at ``_at``."""

    def known(self, text: str) -> int:
        """Length of the beginning of ``text`` that is content, whatever follows. ``text``: all of the reply so far."""
        return len(text[: self._call_at(text)].rstrip())

    def _call_at(self, text: str) -> int:
        while True:
            if self._closing:
                end = text.find(self._closing, self._at)
                if end < 0:
                    return len(text)
                self._at, self._closing, self._may_start = end + len(self._closing), "", True
            if self._may_start and self._start is not None and self._start.match(text, self._at, partial=True):
                return self._at
            found = self._next.search(text, self._at, partial=True)
            if found is None:
                return len(text)
            places = range(self._at, found.start())
            first = next((i for i in places if self._next.match(text, i, partial=True)), found.start())
            if first > self._at:
                self._at, self._may_start = first, False
            if first < found.start() or found.partial or found["thought"] is None:
                return first
            self._at, self._closing = found.end(), self._closings[found["thought"]]
