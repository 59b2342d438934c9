"""Every exception that Afterplay raises on purpose, as one tree; and the findings of a preflight.

::

    AfterplayError
    ├── ConfigurationError, SchemaError, DeltaMismatch, NotEnough, EpisodeLimit, TrainingError, TrackerError,
    │   CallsHang, EnvironmentFailing, RunFailed, ForcedExit
    ├── WireError ── ImpossibleClaim, LimitExceeded, HandshakeFailed, VersionMismatch
    ├── TransportError ── PeerGone, TransportClosed
    ├── StoreError ── FormatMismatch, DamagedFiles
    ├── EngineError
    │   ├── EngineUnavailable ── EngineGone, EngineBusy
    │   └── EngineRefused, EngineProtocolError
    └── PlugInError ── PlugInTimeout

Each message has what was expected, what came, and the remedy.
"""

from __future__ import annotations

import asyncio
import dis
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path


class AfterplayError(Exception):
    """Root of the tree. Everything else that is raised is a bug."""


class ConfigurationError(AfterplayError):
    """The run file or an option is wrong; the user can fix it."""


class SchemaError(AfterplayError, ValueError):
    """A value does not satisfy the data model. Raised when it is built."""


class WireError(AfterplayError):
    """Bytes from a peer cannot be understood."""


class ImpossibleClaim(WireError):
    """A message says what cannot be true: a number beyond its bounds, a group that was never delivered."""


class LimitExceeded(WireError):
    """A message is larger than a declared limit."""


class HandshakeFailed(WireError):
    """A connection did not come to its first message: no key, or one that is not known."""


class VersionMismatch(WireError):
    """The peer speaks another schema version."""


class TransportError(AfterplayError):
    """A peer or a socket failed."""


class PeerGone(TransportError):
    """The peer has disappeared; what was sent may not have arrived."""


class TransportClosed(TransportError):
    """This end of the transport was closed on purpose."""


class StoreError(AfterplayError):
    """A file of a run is missing, foreign, corrupt or full."""


class FormatMismatch(StoreError):
    """A file was written by an Afterplay with another format of it, or for another model; starting again does not
    help."""


class DamagedFiles(StoreError):
    """Files are not those that were written, and nothing can take their place; starting again does not help."""


class DeltaMismatch(AfterplayError):
    """A weight delta, applied to the weights at hand, does not give those of its version: load them whole."""


class NotEnough(AfterplayError):
    """More was asked of a buffer than it holds."""


class EngineError(AfterplayError):
    """An inference engine failed, or another server that is asked over HTTP."""


class EngineUnavailable(EngineError):
    """The engine does not answer: try another one, or later. ``seconds``: the wait that it asks for, or None."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineGone(EngineUnavailable):
    """The engine takes no connections, or has restarted. No request can succeed there before a probe of its health."""


class EngineBusy(EngineUnavailable):
    """The engine is healthy and has too much to do for this request now."""


class EngineRefused(EngineError):
    """The engine answered that the request itself is wrong: it must not be repeated."""


class EngineProtocolError(EngineError):
    """The engine answered something that is not in the protocol."""


class PlugInError(AfterplayError):
    """User code failed at a named boundary.

    ``boundary`` is the place (``"environment step"``), ``kind`` the class name of what was raised,
    ``details`` the traceback as text, ``line`` the line of the user's code (:func:`line_of`).
    """

    def __init__(self, boundary: str, kind: str, message: str, details: str = "", line: str = "") -> None:
        self.shown = f"{': ' if message else ''}{message}{f' ({line})' if line else ''}"
        super().__init__(f"{boundary} failed with {kind}{self.shown}")
        self.boundary = boundary
        self.kind = kind
        self.message = message
        self.details = details
        self.line = line


class PlugInTimeout(PlugInError):
    """User code took longer than it was allowed."""


class EpisodeLimit(AfterplayError):
    """An episode reached a limit on turns, tokens or time. It is data, not a crash."""


class TrainingError(AfterplayError):
    """The learner cannot make a step from this batch."""


class TrackerError(AfterplayError):
    """An experiment tracker failed; what was not sent can be sent later."""


class CallsHang(AfterplayError):
    """Too many calls of plug-ins hang in threads, which cannot be ended: the process is started again."""


class EnvironmentFailing(AfterplayError):
    """Every rollout of an environment failed: the run ends."""


class RunFailed(AfterplayError):
    """A run that was started from Python failed; the message is the reason that its supervisor gives."""


class ForcedExit(AfterplayError):
    """A process ended without finishing its work; its exit code is not 0."""


class boundary:
    """Classify whatever user code raises inside as a :class:`PlugInError` that names ``name``.

    Our own errors pass unchanged (but for a :class:`SchemaError`, which is about what user code built), and so does
    what user code did not do (:func:`is_failure`). Everything else is a failure, ``sys.exit`` and other exceptions
    without ``Exception`` as a base included: a plug-in ends neither the process nor another task. A class, because a
    turn enters eight of them and a generator would double their cost.

    >>> with boundary("environment step"):
    ...     1 / 0
    Traceback (most recent call last):
    pipeline.errors.PlugInError: environment step failed with ZeroDivisionError: division by zero
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        placeless = isinstance(error, PlugInError) and not error.boundary
        ours = isinstance(error, AfterplayError) and not isinstance(error, SchemaError) and not placeless
        if not ours and is_failure(error):
            raise failure_of(self._name, error) from error


def failure_of(name: str, error: BaseException) -> PlugInError:
    """An error of user code as a failure at the boundary ``name``, unless it is one already. One whose place was not
    known, because it was raised in a task or thread, gets it."""
    if isinstance(error, PlugInError):
        known = error.boundary or not name
        return error if known else type(error)(name, error.kind, error.message, error.details, error.line)
    inner = next(leaves(error))  # says more than the group
    kind = PlugInTimeout if isinstance(inner, TimeoutError) else PlugInError
    return kind(name, type(inner).__name__, _words(inner), traceback_of(error), line_of(inner) or line_of(error))


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The single exceptions of a group, in order; of anything else itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever user code raises inside, while a run is set up, into a :class:`ConfigurationError` that begins with
    ``what``. One that it is already passes, and so does what is no failure (:func:`is_failure`)."""
    try:
        yield
    except ConfigurationError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(f"{what} {described(error)}") from error


def is_failure(error: BaseException) -> bool:
    """False for the cancellation of the current task, for Ctrl-C, and for a coroutine that is being closed: those pass
    through user code and are not of its making. ``raise KeyboardInterrupt`` is, and a ``CancelledError`` although
    nobody cancelled the task."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_failure, error.exceptions))
    if isinstance(error, asyncio.CancelledError):
        return not being_cancelled()
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return _is_raised_by_user(error)
    return True


_RAISE = dis.opmap["RAISE_VARARGS"]


def _is_raised_by_user(error: BaseException) -> bool:
    """True if a ``raise`` of user code raised it, and not a signal, or the interpreter between two instructions."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or at.tb_frame.f_code.co_filename.startswith(f"{_STANDARD_LIBRARY}asyncio/"):
        return False  # the second Ctrl-C in an event loop
    return at.tb_frame.f_code.co_code[at.tb_lasti] == _RAISE


_ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("pipeline", "actors", "learner"))
_SHIPPED = f"{_ROOT / 'actors' / 'adapters'}/"
_STANDARD_LIBRARY, _INSTALLED = f"{sysconfig.get_path('stdlib')}/", re.compile("/(site|dist)-packages/")


def is_ours(file: str) -> bool:
    """True for a file of Afterplay, other than the environments that it ships."""
    return file.startswith(_OURS) and not file.startswith(_SHIPPED)


def line_of(error: BaseException) -> str:
    """The line of the user's code that raised ``error`` (:func:`line_among`)."""
    return line_among(traceback.extract_tb(error.__traceback__))


def line_among(frames: Iterable[traceback.FrameSummary]) -> str:
    """File, line and function of the user's code among ``frames``, outermost first: the innermost frame that is neither
    Afterplay's (but for the environments that it ships) nor a library's, else the innermost one of an installed
    package. Empty where there is none."""
    installed, own = None, None
    for frame in frames:
        file = frame.filename
        if file.startswith("<") or is_ours(file):
            continue
        if _INSTALLED.search(file):
            installed = frame
        elif not file.startswith(_STANDARD_LIBRARY):
            own = frame
    found = own or installed
    if found is None:
        return ""
    with suppress(OSError, ValueError):  # the working folder is gone, or the file is elsewhere
        return f"{Path(found.filename).relative_to(Path.cwd())}, line {found.lineno}, in {found.name}"
    return f"{found.filename}, line {found.lineno}, in {found.name}"


_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def line_in(text: str) -> str:
    """The same, of the traceback that a Python program has printed; empty where there is none."""
    return line_among(traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(text))


def described(error: BaseException) -> str:
    """Kind and message of an error of user code, with its line where that is known: what is shown of it everywhere.

    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    found = failure_of("", error)
    return f"{found.kind}{found.shown}"


WORDS_CHARACTERS_MAX, DETAILS_CHARACTERS_MAX = 4_000, 8_000
"""Length of what user code raised, and of its traceback, as they are kept and logged."""


def traceback_of(error: BaseException) -> str:
    """The traceback as text; its beginning and its end where it is longer than :data:`DETAILS_CHARACTERS_MAX`. Also of
    an error whose own ``__str__`` fails."""
    try:
        return bounded("".join(traceback.format_exception(error)), DETAILS_CHARACTERS_MAX)
    except Exception as broken:
        return f"{type(error).__name__} (no traceback: {type(broken).__name__})"


def bounded(text: str, characters_max: int) -> str:
    """The beginning and the end of ``text``, where it is longer."""
    if len(text) <= characters_max:
        return text
    half = characters_max // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def being_cancelled() -> bool:
    """True if a caught ``CancelledError`` is the current task's own cancellation. Where there is no task, nobody can
    have cancelled it."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def _words(error: BaseException) -> str:
    """The message of an error, also where its own ``__str__`` fails."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    if isinstance(error, asyncio.CancelledError):
        return "nobody had cancelled it"
    try:
        words = str(error) or ("took too long" if isinstance(error, TimeoutError) else "")
        return bounded(words, WORDS_CHARACTERS_MAX)
    except Exception as broken:
        return f"(its message could not be read: {type(broken).__name__})"


class Interrupted(Exception):
    """The pass was given up because the process is stopping. Nothing was changed by it."""


@dataclass(slots=True)
class Findings:
    """Findings of a preflight: problems, which forbid a start, and notes. Each is a sentence on one line."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forgiving: bool = False
    """True if what user code raises is a note: a run that resumes repeats rollouts that fail."""

    @property
    def told(self) -> list[str]:
        """The list that what user code raises belongs to."""
        return self.notes if self.forgiving else self.problems

    @contextmanager
    def collecting(self, where: str = "") -> Iterator[None]:
        """An error of Afterplay inside becomes a problem, with ``where`` before it."""
        try:
            yield
        except AfterplayError as error:
            found = self.told if isinstance(error, PlugInError) else self.problems
            found.append(where + " ".join(str(error).split()))

    def require_none(self) -> None:
        """Raises :class:`ConfigurationError` with all problems, if there are any."""
        if self.problems:
            raise ConfigurationError("\n".join(dict.fromkeys(self.problems)))
