"""Experience in the prompt: a memory of lessons, what writes them, and the part of the stage that serves them."""

from pipeline.lessons.memory import Memory
from pipeline.lessons.records import Lesson
from pipeline.lessons.writer import Writer, contrast

__all__ = ["Lesson", "Memory", "Writer", "contrast"]
