"""A reply that is still sampled, as far as no later token changes it.

Held back are unfinished characters, what may be a stop text or a tool call, and, for dialects that state it apart, a
thought until it is closed. What is shown is a beginning of the reply that the recorder makes of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from actors.engine.base import Generation
from actors.gateway.reply import ChatReply, Choice, thought_of
from actors.rendering.partial_text import PartialText
from actors.tools.parsing.base import Thinking
from pipeline.schema import FinishReason


class Preview:
    """The beginning of one reply. Methods raise what the tokenizer raises."""

    def __init__(
        self, text: PartialText, prompt: str, stop: Sequence[str], content: Callable[[str], int] | None
    ) -> None:
        """``prompt``: its text. ``content``: the length of the content at the beginning of a reply, whatever follows;
        None where no calls are read."""
        self._text, self._prompt, self._stop, self._content = text, prompt.rstrip(), stop, content
        self._ids, self._logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self._new: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
        """Tokens that are not decoded yet."""

    def add(self, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
        """The next tokens."""
        self._new.append((token_ids, logprobs))

    def choice(self, apart: bool) -> Choice:
        """The reply so far. ``apart``: a thought with which it begins is shown when it is closed."""
        new, self._new = self._new, []
        for ids, _ in new:
            self._text.add(ids.tolist())
        self._ids = np.concatenate((self._ids, *(ids for ids, _ in new)))
        self._logprobs = np.concatenate((self._logprobs, *(logprobs for _, logprobs in new)))
        text = self._text.text
        text = text[: min((known_before(stop, text) for stop in self._stop), default=len(text))]
        if self._content is not None:
            text = text[: self._content(text)]
        thought, end = thought_of(self._prompt, text) if apart else ("", 0)
        if apart and not end and _may_think(self._prompt, text):
            text = ""
        reply = ChatReply(text, (), "", thought=thought, thought_end=end)
        return Choice(reply, Generation(self._ids, self._logprobs, (), FinishReason.LENGTH))


def known_before(stop: str, text: str) -> int:
    """Length of the beginning of ``text`` that stands before ``stop``, whatever follows.

    >>> known_before("</a>", "x</a>y"), known_before("</a>", "x < y</"), known_before("</a>", "x")
    (1, 5, 1)
    """
    found = text.find(stop)
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1)) if found < 0 else found
    while found < 0 <= at and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) if at < 0 else at


def _may_think(prompt: str, text: str) -> bool:
    """True if a thought may begin ``text`` that is not closed."""
    openings = [opening for opening, _ in Thinking().marks]
    return any(prompt.endswith(mark) or text.startswith(mark) or mark.startswith(text) for mark in openings)
