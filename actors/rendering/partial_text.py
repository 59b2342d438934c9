"""The text of a completion that is still sampled, as far as no later token changes it.

Two decodings of the last tokens are compared, with and without the new ones, so that the cost of a token does not grow
with the completion. Text is held back while it ends in the replacement character, which bytes of an unfinished
character decode to; behind tokens that are single bytes (``<0x0A>``), because a decoder takes a run of them together;
and behind an end-of-turn token, which is no text if it stays the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class PartialText:
    """Text of the tokens so far. Methods raise what the tokenizer raises."""

    def __init__(self, decode: Callable[[list[int]], str], is_open: Callable[[int], bool]) -> None:
        """``is_open``: what the text of a token is depends on the next one."""
        self.text = ""
        self._decode, self._is_open = decode, is_open
        self._ids: list[int] = []
        self._known: tuple[int, int] = (0, 0)
        """The last tokens whose text is known."""

    def add(self, token_ids: Sequence[int]) -> None:
        """The next tokens."""
        self._ids += token_ids
        end = len(self._ids)
        while end > self._known[1] and self._is_open(self._ids[end - 1]):
            end -= 1
        start, at = self._known
        if end == at:
            return
        before, now = self._decode(self._ids[start:at]), self._decode(self._ids[start:end])
        if len(now) > len(before) and not now.endswith(_REPLACEMENT):
            self.text += now[len(before) :]
            self._known = at, end
