"""Histories that are made shorter: older tool answers left out, thinking dropped. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.schema import Message

LEFT_OUT = "[left out: an earlier answer]"
_THINK_END = "</think>"


def keep_last_answers(messages: Sequence[Message], n: int) -> tuple[Message, ...]:
    """All but the last ``n`` tool answers replaced by a mark. Answers that the policy has not read yet (those at the
    end) are kept, however many they are."""
    unread = 0
    while unread < len(messages) and messages[len(messages) - 1 - unread].role == "tool":
        unread += 1
    left, kept = max(n, unread), []
    for message in reversed(messages):
        if message.role == "tool":
            if left <= 0 and len(message.content) > len(LEFT_OUT):
                message = replace(message, content=LEFT_OUT)
            left -= 1
        kept.append(message)
    return tuple(reversed(kept))


def without_thinking(messages: Sequence[Message]) -> tuple[Message, ...]:
    """``<think>…</think>`` taken out of replies before the user's last message, as the templates of Qwen3 and others
    do; the thinking of a reply whose tool calls are still being answered stays."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    return tuple(
        replace(message, content=message.content.rpartition(_THINK_END)[2].lstrip("\n"))
        if i < last_user and message.role == "assistant" and _THINK_END in message.content
        else message
        for i, message in enumerate(messages)
    )
