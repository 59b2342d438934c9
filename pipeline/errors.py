"""Every exception that Afterplay raises on purpose, as one tree.

::

    AfterplayError
    ├── ConfigurationError      the run file or an option is wrong; the user can fix it
    ├── SchemaError             a value does not satisfy the data model (raised when it is built)
    ├── WireError               bytes from a peer cannot be understood
    │   ├── LimitExceeded       ... because they are larger than a declared limit
    │   ├── HandshakeFailed     ... because it did not prove who it is
    │   └── VersionMismatch     ... because the peer speaks another schema version
    ├── TransportError          a peer or a socket failed
    │   ├── PeerGone            the peer has disappeared; what was sent may not have arrived
    │   └── TransportClosed     this end was closed on purpose
    ├── StoreError              a file of a run is missing, foreign, corrupt or full
    │   ├── FormatMismatch      ... because another Afterplay wrote it; starting again does not help
    │   └── DamagedFiles        ... its bytes are not those that were written; starting again does not help
    ├── DeltaMismatch           a weight delta does not give the weights of its version (load them whole)
    ├── NotEnough               more was asked of a buffer than it holds
    ├── EngineError             an inference engine failed
    │   ├── EngineUnavailable   ... it does not answer (try another engine, or later)
    │   │   ├── EngineGone      ... no request can succeed there before a probe of its health does
    │   │   └── EngineBusy      ... it has too much to do for this request now
    │   ├── EngineRefused       ... it answered that the request is wrong (never retry)
    │   └── EngineProtocolError ... it answered something that is not in the protocol
    ├── PlugInError             user code failed; ``boundary`` names which and keeps the traceback
    │   ├── PlugInTimeout       ... it took longer than it was allowed
    │   └── NotReproducible     ... an environment answered stored turns otherwise than it did before
    ├── EpisodeLimit            an episode reached a limit on turns, tokens or time (data, not a crash)
    ├── TrainingError           the learner cannot make a step from this batch
    ├── TrackerError            an experiment tracker failed; training continues
    ├── CallsHang               too many calls of plug-ins hang in threads; the process is started again
    ├── EnvironmentFailing      every rollout of an environment failed; the run ends
    ├── RunFailed               a run that was started from Python failed
    └── ForcedExit              a process ended without finishing its work; its exit code is not 0

Each message has what was expected, what came, and the remedy.
"""

from __future__ import annotations

import asyncio
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class AfterplayError(Exception):
    """Root of the tree. Everything else that is raised is a bug."""


class ConfigurationError(AfterplayError):
    """The run file or an option is wrong."""


class SchemaError(AfterplayError, ValueError):
    """A value does not satisfy the data model."""


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
    """The replay store is missing, foreign, corrupt or full."""


class FormatMismatch(StoreError):
    """A file was written by an Afterplay with another format of it."""


class DamagedFiles(StoreError):
    """Files are not those that were written, and nothing can take their place."""


class DeltaMismatch(AfterplayError):
    """A weight delta, applied to the weights at hand, does not give those of its version."""


class NotEnough(AfterplayError):
    """More was asked of a buffer than it holds."""


class EngineError(AfterplayError):
    """An inference engine failed."""


class EngineUnavailable(EngineError):
    """The engine does not answer."""


class EngineGone(EngineUnavailable):
    """The engine takes no connections, or has restarted."""


class EngineBusy(EngineUnavailable):
    """The engine is healthy and has too much to do. ``seconds``: the wait that it asks for; None: it names none."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineRefused(EngineError):
    """The engine answered that the request itself is wrong."""


class EngineProtocolError(EngineError):
    """The engine answered something that is not in the protocol."""


class PlugInError(AfterplayError):
    """User code failed at a named boundary.

    ``boundary`` is the place (``"environment step"``), ``kind`` the class name of what was raised,
    ``details`` the traceback as text, ``line`` the line of the user's code (:func:`line_of`).
    """

    def __init__(self, boundary: str, kind: str, message: str, details: str = "", line: str = "") -> None:
        super().__init__(f"{boundary} failed with {kind}: {message}")
        self.boundary = boundary
        self.kind = kind
        self.message = message
        self.details = details
        self.line = line

    @property
    def sentence(self) -> str:
        """The message with the line of the user's code behind it, where that is known."""
        return f"{self} ({self.line})" if self.line else str(self)


class PlugInTimeout(PlugInError):
    """User code took longer than it was allowed."""


class NotReproducible(PlugInError):
    """An episode did not answer the turns of a stored trajectory as it did when they were sampled."""

    def __init__(self, message: str) -> None:
        super().__init__("environment step", type(self).__name__, message)


class EpisodeLimit(AfterplayError):
    """An episode reached a limit on turns, tokens or time."""


class TrainingError(AfterplayError):
    """The learner cannot make a step from this batch."""


class TrackerError(AfterplayError):
    """An experiment tracker failed; what was not sent can be sent later."""


class CallsHang(AfterplayError):
    """Too many calls of plug-ins hang in threads, which cannot be ended: the process is started again."""


class EnvironmentFailing(AfterplayError):
    """Every rollout of an environment failed."""


class RunFailed(AfterplayError):
    """A run that was started from Python failed; the message is the reason that its supervisor gives."""


class ForcedExit(AfterplayError):
    """A process ended without finishing its work."""


@contextmanager
def boundary(name: str) -> Iterator[None]:
    """Classify whatever user code raises inside as a :class:`PlugInError` that names ``name``.

    Our own errors pass unchanged; so do ``KeyboardInterrupt`` and the cancellation of the task. ``SystemExit``, and a
    ``CancelledError`` though nobody cancelled the task, are failures like any other: a plug-in ends neither the process
    nor another task.

    >>> with boundary("environment step"):
    ...     1 / 0
    Traceback (most recent call last):
    pipeline.errors.PlugInError: environment step failed with ZeroDivisionError: division by zero
    """
    try:
        yield
    except AfterplayError:
        raise
    except TimeoutError as error:
        words = _words(error) or "took too long"
        raise PlugInTimeout(name, "TimeoutError", words, traceback.format_exc(), line_of(error)) from error
    except SystemExit as error:
        message = f"it called sys.exit({error.code!r})"
        raise PlugInError(name, "SystemExit", message, traceback.format_exc(), line_of(error)) from error
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        message = "it raised CancelledError, and nobody had cancelled it"
        raise PlugInError(name, "CancelledError", message, traceback.format_exc(), line_of(error)) from error
    except Exception as error:
        kind, details = type(error).__name__, traceback.format_exc()
        raise PlugInError(name, kind, _words(error), details, line_of(error)) from error


_ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("pipeline", "actors", "learner"))
_SHIPPED = f"{_ROOT / 'actors' / 'adapters'}/"
_STANDARD_LIBRARY, _INSTALLED = f"{sysconfig.get_path('stdlib')}/", re.compile("/(site|dist)-packages/")


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
        if file.startswith("<") or (file.startswith(_OURS) and not file.startswith(_SHIPPED)):
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


def described(error: Exception) -> str:
    """Kind and message of an error of user code, with its line where that is known.

    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    line = line_of(error)
    return f"{type(error).__name__}: {_words(error)}{f' ({line})' if line else ''}"


def being_cancelled() -> bool:
    """True if a caught ``CancelledError`` is the current task's own cancellation, and if there is no current task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True
    return task is None or task.cancelling() > 0


def _words(error: Exception) -> str:
    """Its message, also where its own ``__str__`` fails."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its message could not be read: {type(broken).__name__})"


class Interrupted(Exception):
    """The pass was given up because the process is stopping. Nothing was changed by it."""
