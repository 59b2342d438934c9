"""Who says the replies in ``afterplay env play``: somebody at the terminal, an engine, or an expert."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.environments.base import Reply
from actors.loop.base import Opening
from actors.rendering import Renderer
from pipeline.schema import FinishReason, Message

READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Said:
    """What was said since the last reply."""

    messages: tuple[Message, ...]
    opening: Opening
    """How the conversation began."""
    reply: Message | None = None
    """The last reply with its tool calls apart, where it had some."""


Speak = Callable[[Said], Awaitable[Reply | None]]
"""From what was said to the next reply; None: the player leaves."""


class Typed:
    """In the place of :class:`Renderer` where somebody types: no template, so tool calls are read in the hermes form,
    and answers are shown as they are."""

    template = ""
    tokenizer = None

    def without_special(self, text: str) -> str:
        return text

    def encode_text(self, text: str) -> tuple[int, ...]:
        """A token is a character."""
        return tuple(map(ord, text))

    def decode_ids(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def typing() -> Speak:
    """Replies from standard input; a line that ends with a backslash goes on. The end of the input leaves."""
    lines = Lines()

    async def speak(_: Said) -> Reply | None:
        parts: list[str] = []
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        while (line := await lines.next()) is not None:
            parts.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return Reply("\n".join(parts)) if parts else None

    return speak


class Lines:
    """Standard input line by line. Waiting for one can be cancelled, which a thread in ``readline`` cannot."""

    def __init__(self) -> None:
        self._held = b""
        self._ended = False
        self._fd: int | None = None
        with suppress(OSError, ValueError):  # a stand-in without a file
            self._fd = sys.stdin.fileno()

    async def next(self) -> str | None:
        """Without its end; None at the end of the input."""
        if self._fd is None:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        while b"\n" not in self._held and not self._ended:
            with suppress(OSError, NotImplementedError):  # a file on disk never has to be waited for
                await anyio.wait_readable(self._fd)
            came = os.read(self._fd, READ_BYTES)
            self._held += came
            self._ended = not came
        if not self._held:
            return None
        first, _, self._held = self._held.partition(b"\n")
        return first.removesuffix(b"\r").decode("utf-8", "replace")


def replaying(replies: Sequence[str]) -> Speak:
    """Replies that are known beforehand."""
    left = iter(replies)

    async def speak(_: Said) -> Reply | None:
        text = next(left, None)
        return None if text is None else Reply(text)

    return speak


def sampling(client: EngineClient, renderer: Renderer, how: Sampling) -> Speak:
    """Replies sampled as in training: token ids in and out, the template's way of going on, tools told to it."""
    held: dict[str, Any] = {}

    async def speak(said: Said) -> Reply | None:
        if not held:
            held["conversation"] = renderer.start(said.messages, said.opening.tools)
        else:
            held["conversation"] = renderer.extend(
                held["conversation"], held["ids"], held["completed"], said.messages, said=said.reply
            )
        generation = await client.generate(held["conversation"].prompt_ids, how)
        held["ids"] = generation.token_ids.tolist()
        held["completed"] = renderer.completed(held["ids"])
        return Reply(held["completed"].text, generation.finish_reason or FinishReason.STOP)

    return speak
