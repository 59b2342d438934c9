"""Replies that a later prompt holds in place of the history they sum up (compaction)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.schema import Message

_PIECES = re.compile(r"</?[\w:-]+>|\n")


def is_summary(reply: str, before: Sequence[Message], opening: Sequence[Message]) -> bool:
    """True if ``reply``, the last one of a branch, whose prompt was ``before``, sums the branch up for another one that
    begins with the messages ``opening``: at least half of it stands there, what it answered does not, and it is not the
    same history with its messages rewritten.

    A reply is compared line by line, tags and ``<think>`` apart, because programs often cut a summary out of it. What
    tools answered (a helper's report, say) is not looked at.
    """
    asked, index = before[-1] if before else None, len(before)
    if asked is None or asked in opening:
        return False
    if index < len(opening) and opening[index].role == "assistant" and _share(reply, opening[index].content) >= 0.5:
        return False
    return _share(reply, "\n".join(m.content for m in opening if m.role != "tool")) >= 0.5


def _share(reply: str, text: str) -> float:
    """Share of the characters of ``reply`` in lines that stand in ``text`` as whole words; 0 where it says nothing."""
    lines = [line for line in map(str.strip, _PIECES.split(reply.rpartition("</think>")[2])) if line]
    found = [line for line in lines if re.search(rf"(?<!\w){re.escape(line)}(?!\w)", text)]
    return sum(map(len, found)) / max(1, sum(map(len, lines)))
