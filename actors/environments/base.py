"""The interface between an environment and the agent loop.

An :class:`Environment` is built once per actor from the options of its section; :meth:`Environment.start` makes one
:class:`Episode` per order, and the episode owns all state of that one rollout. Every method may be ``def`` or ``async
def``. A plain ``def`` runs on the event loop, so it must return within a millisecond, or the section sets ``blocking:
true`` and it runs in a thread.

A complete environment, in one file::

    from dataclasses import dataclass
    from actors.environments import Environment, Episode, Reply, Step
    from pipeline.schema import Message, Task

    @dataclass
    class Echo(Environment):
        word: str = "hello"

        def start(self, task: Task) -> Episode:
            return EchoEpisode(self.word)

    class EchoEpisode(Episode):
        def __init__(self, word: str) -> None:
            self.messages = (Message("user", f"Say {word}."),)
            self.word = word

        def step(self, reply: Reply) -> Step:
            return Step(reward=float(self.word in reply), done=True)

The built-in environments declare typed and bounded options and refuse unknown ones (:data:`STRICT_OPTIONS`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ConfigDict

from pipeline.schema import FinishReason, Message, Task


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call that was run before a reply."""

    name: str
    arguments: Mapping[str, Any]
    text: str
    """The tool's answer, as the policy saw it."""
    ok: bool
    """False where the tool refused or failed, or the call was wrong."""


class Reply(str):
    """The policy's text of one turn, without its end-of-turn token: a ``str`` with the reason why it ended."""

    finish_reason: FinishReason
    """``LENGTH`` means that the reply was cut off by the limit of one turn."""
    tool_calls: tuple[ToolUse, ...]
    """With the tool agent: the calls since the environment's last answer."""
    files: Mapping[str, str] | None
    """With the loop ``program`` and :attr:`Episode.files`: these files as the program left them, without those that are
    gone or have become too long."""

    __slots__ = ("files", "finish_reason", "tool_calls")

    def __new__(
        cls,
        text: str,
        finish_reason: FinishReason = FinishReason.STOP,
        tool_calls: tuple[ToolUse, ...] = (),
        files: Mapping[str, str] | None = None,
    ) -> Reply:
        self = super().__new__(cls, text)
        self.finish_reason = finish_reason
        self.tool_calls = tool_calls
        self.files = files
        return self


@dataclass(frozen=True, slots=True)
class Step:
    """Answer of the environment to one reply."""

    messages: tuple[Message, ...] = ()
    """Next messages for the policy. Needed unless ``done``."""
    reward: float = 0.0
    """Reward of this turn; the episode's score is the undiscounted sum."""
    done: bool = False
    """The episode ended by itself. A limit on turns or tokens is not ``done``: the loop calls that truncated."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Numbers about this turn for metrics, for example ``{"first_right": 1.0}``; they are not rewards."""


_MARK = "is_tool"

Function = TypeVar("Function", bound=Callable[..., Any])


def tool(function: Function) -> Function:
    """Decorator of a method of an :class:`Episode` or :class:`Environment` that the policy can call as a tool. Its type
    hints and its docstring are the schema that the policy reads."""
    setattr(function, _MARK, True)
    return function


def marked_tools(owner: object) -> tuple[Any, ...]:
    """The methods of ``owner`` that are marked as tools, in the order in which they are defined."""
    marked = {
        name: None
        for cls in reversed(type(owner).__mro__)
        for name, value in vars(cls).items()
        if getattr(value, _MARK, False)
    }
    return tuple(getattr(owner, name) for name in marked)


class _MarkedTools:
    """Default of :attr:`Episode.tools`; an instance may set another value."""

    def __get__(self, owner: object | None, cls: type | None = None) -> Sequence[Any]:
        return () if owner is None else marked_tools(owner)


class Episode(ABC):
    """One episode of one task, and all its state.

    Attributes, which are set before :meth:`Environment.start` returns:

    * ``messages``: the start of the conversation, a tuple of :class:`Message`. Required.
    * ``hint``: help for the task, or its solution, which the policy never sees. None by default.
    * ``files``: files with which an agent program begins. None by default.
    * ``tools``: tools of this episode. By default its methods that are marked with :func:`tool`.
    """

    messages: tuple[Message, ...]
    """The start of the conversation, set before :meth:`Environment.start` returns."""
    hint: str | None = None
    """Help for the task, or its solution, set before :meth:`Environment.start` returns. The policy never sees it: with
    ``advantage.estimator: cpo`` or ``self_distill`` the learner scores replies under a prompt that holds it."""
    files: Mapping[str, str] | None = None
    """Texts by relative path: the working folder of a program (the loop ``program`` with a ``command``). With ``reward:
    environment``, :meth:`step` gets them as :attr:`Reply.files`."""
    tools: Any = _MarkedTools()
    """Tools of this episode (:class:`actors.tools.Tool`, or functions and methods with type hints and a docstring),
    beside the environment's and the run file's: its methods that are marked with :func:`tool`, unless it sets others.
    Needs the loop ``tool_agent``."""

    @abstractmethod
    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Answer one reply of the policy."""

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds. Called exactly once, however the episode ended."""
        return None


class Environment(ABC):
    """A family of tasks. The same ``Task`` must give the same start: draw everything random from ``task.seed``.

    Attributes, of the class or an instance:

    * ``loop``: the agent loop, ``"tool_agent"`` for an environment with tools. None by default.
    * ``splits``: seeds of each split, ``{"train": range(900), "eval": range(900, 1000)}``. Empty by default.
    * ``hidden``: files that its agent programs may not read in their sandboxes. Empty by default.
    * ``blocking``: its plain methods run in threads. False by default.
    """

    loop: str | None = None
    """The agent loop that runs it unless the run file says another: ``"tool_agent"`` for an environment with tools."""

    splits: Mapping[str, Sequence[int]] = MappingProxyType({})
    """Seeds of each split, for environments whose tasks are fixed or partly held out: ``{"train": range(900), "eval":
    range(900, 1000)}``. A class or an instance may set it. Empty: every seed is for training."""
    hidden: Sequence[Path] = ()
    """Files that its agent programs may not read in their sandboxes, although they are installed: solutions."""
    blocking: bool = False
    """Its plain methods take longer than a millisecond and run in threads, as with ``blocking: true`` in the run
    file."""

    @abstractmethod
    def start(self, task: Task) -> Episode | Awaitable[Episode]:
        """Begin one episode of ``task``."""

    def tools(self) -> Sequence[Any]:
        """Tools that all its episodes share, read once. See :attr:`Episode.tools`."""
        return marked_tools(self)


STRICT_OPTIONS = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)
