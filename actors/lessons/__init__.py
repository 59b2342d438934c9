"""Lessons in the prompt of an episode: who gets them, where they come from, what the training row looks like."""

from actors.lessons.guide import Guide, Guided
from actors.lessons.recall import StageRecall

__all__ = ["Guide", "Guided", "StageRecall"]
