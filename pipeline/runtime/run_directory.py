"""Layout of a run directory, the wait for its model, atomic writes, and file locks.

::

    runs/NAME/
      config.yaml        the resolved configuration every process of the run reads
      history.jsonl      the first configuration, and each later change with its step (supervisor/history.py)
      model/             the initial model as a Hugging Face folder (config, safetensors, tokenizer)
      weights/v000007/   published weights, one folder for each policy version
      checkpoints/       what the learner resumes from
      replay.sqlite      trajectories, groups, orders and their states
      lessons.sqlite     the memory of lessons, if they are on
      traces/            some trained, evaluated and failed rollouts, for ``afterplay show``
      metrics.jsonl      one JSON object for each update
      updates/           what each of the newest updates computed (learner/process/update_record.py)
      evaluations.jsonl  one JSON object for each evaluation that ended, written by the replay stage
      evaluations/NAME/  one ``afterplay eval`` of a checkpoint: a small run directory
      curves.png         the picture of metrics.jsonl
      trackers/NAME.jsonl  what was sent to an experiment tracker
      tensorboard/       event files, with report_to: [tensorboard]
      logs/NAME.log      stdout and stderr of each process
      processes/NAME.json  pid and metrics port of each process that lives
      processes.json     state of all processes, written by the supervisor
      outcome.json       exit code of the last start and its reason, once that has ended
      source/            run file and plug-ins of a run that was started from Python
      engines/NAME.json  engines that have joined the run while it is alive
      engine_actor.secret  key with which actors may use the run's engines
      run.lock           held by the supervisor while the run lives
      hub                link to the folder of the replay stage's socket (transport/socket_folder.py), while it lives
      keys/              CURVE keys that ``afterplay run`` made, if the stage listens on TCP
      chaos/             what ``afterplay chaos`` did, and what the processes recorded for it (runtime/witness.py)
      slurm.sh, slurm.yaml, slurm.log  job script, its run file and its output, if the run was submitted to SLURM
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from pipeline.errors import ConfigurationError, StoreError

LOOK_SECONDS = 0.05
"""Interval at which a model folder is looked for: there is no event to wait for across processes."""
PREPARE_SECONDS_MAX = 3600.0
"""Longest preparation of a model: it may be downloaded."""
AWAIT_MODEL = "AFTERPLAY_AWAIT_MODEL_SECONDS"
"""Environment variable: how long an engine waits for its model folder."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""

log = logging.getLogger(__name__)


class Inside:
    """A path in the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory, owner: type) -> Path:
        return directory.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run, as in the table above. Building it creates nothing; :meth:`create` does."""

    path: Path

    config_file = Inside("config.yaml")
    history_file = Inside("history.jsonl")
    model = Inside("model")
    metrics_file = Inside("metrics.jsonl")
    evaluations_file = Inside("evaluations.jsonl")
    evaluated_file = Inside("evaluated.json")
    """In the folder of one ``afterplay eval``: ``{updates, policy_version, checkpoint}`` of its weights."""
    evaluations = Inside("evaluations")
    store_file = Inside("replay.sqlite")
    lessons_file = Inside("lessons.sqlite")
    checkpoints = Inside("checkpoints")
    traces = Inside("traces")
    updates = Inside("updates")
    logs = Inside("logs")
    processes = Inside("processes")
    engines = Inside("engines")
    processes_file = Inside("processes.json")
    finished_file = Inside("finished.json")
    """``{steps, exit_code}``, written when the run has made all its steps, by the supervisor or by a learner that was
    started alone. Absent while it runs."""
    outcome_file = Inside("outcome.json")
    """``{exit_code, reason}`` of the last start, written by the supervisor when it has ended."""
    source = Inside("source")
    curves_file = Inside("curves.png")
    lock_file = Inside("run.lock")
    keys = Inside("keys")

    def create(self) -> RunDirectory:
        """Make the folder and the folders in it; harmless when they exist."""
        for folder in (self.path, self.checkpoints, self.logs, self.processes, self.path / "weights"):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    def weights(self, version: int) -> Path:
        """Folder of the weights published as policy ``version`` (``weights/v000007``)."""
        if version < 0:
            raise ValueError(f"expected a policy version of at least 0, got {version}")
        return self.path / "weights" / f"v{version:06d}"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def process_file(self, name: str) -> Path:
        """``{pid, machine, metrics_host, metrics_port, started_at}`` of one process, written by itself."""
        return self.processes / f"{name}.json"

    def has_finished(self, steps: int) -> bool:
        """True once the run has made so many steps."""
        finished = read_json(self.finished_file)
        return finished is not None and finished.get("steps", 0) >= steps


def await_model(folder: Path, seconds_max: float | None = None) -> None:
    """Block until ``folder``, which appears complete by rename, is a prepared model; at most ``seconds_max``, or the
    seconds that :data:`AWAIT_MODEL` says, none without it. A signal ends the wait with the process.

    Raises :class:`ConfigurationError`.
    """
    seconds_max = float(os.environ.get(AWAIT_MODEL, 0)) if seconds_max is None else seconds_max
    deadline = time.monotonic() + seconds_max
    if not (folder / "config.json").exists() and seconds_max:
        log.info("waiting for the model in %s, at most %g s", folder, seconds_max)
    while not (folder / "config.json").exists():
        if time.monotonic() >= deadline:
            waited = f" after {seconds_max:g} s" if seconds_max else ""
            raise ConfigurationError(
                f"expected a prepared model in {folder} (with config.json), found none{waited}: 'afterplay run FILE' "
                "prepares it, or 'afterplay prepare FILE' alone does"
            )
        time.sleep(LOOK_SECONDS)


def write_json_atomically(path: Path, value: Any, *, durable: bool = False, make_folder: bool = True) -> None:
    """Replace ``path`` by ``value`` as JSON so that a reader sees the old file or the new one, never a part.

    ``durable``: when this returns, the new one also survives a power loss. ``make_folder``: false for files of a run
    that is alive, whose directory must not come back when it was removed.
    """
    data = orjson.dumps(value, option=orjson.OPT_INDENT_2)
    write_bytes_atomically(path, data, durable=durable, make_folder=make_folder)


def write_bytes_atomically(path: Path, data: bytes, *, durable: bool = False, make_folder: bool = True) -> None:
    """Write beside ``path`` and rename. The name is per process, so two writers cannot mix their bytes."""
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``; None where there is no such file or no object in it. The ``config.json`` of a model
    may have ``Infinity`` in it (Mamba 2, Nemotron-H), which orjson does not read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def vocabulary_size(model: Path) -> int | None:
    """Token ids of the model in a folder are below this; None where its ``config.json`` does not say."""
    facts = read_json(model / "config.json") or {}
    size = (facts.get("text_config") or facts).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def take_index(
    directory: RunDirectory,
    role: str,
    index: int | None = None,
    first: int = 0,
    keys: Path | None = None,
    placed: bool = False,
) -> tuple[int, FileLock | None]:
    """``index``, or the least from ``first`` on that no other ``role`` of the run holds. It is ours until the lock is
    released. On a file system without locks ``index`` is taken without one. In a container that may not write to the
    run directory the lock is on the key of that index in the folder ``keys``. ``placed``: a launcher gave ``index`` to
    this process alone, so it is taken without the lock of one that stands still on a lost machine.

    Raises :class:`StoreError` if another process holds ``index``.
    """

    def take(index: int) -> FileLock:
        name = f"{role}-{index}"
        taken = f"{name} of the run {directory.path} is alive in another process: expected an --index of its own"
        try:
            directory.processes.mkdir(parents=True, exist_ok=True)
            return FileLock(directory.processes / f"{name}.lock", taken)
        except OSError as error:
            key = None if keys is None else keys / f"{name}.key_secret"
            if error.errno != errno.EROFS or key is None:
                raise
            if not key.exists():
                raise ConfigurationError(
                    f"expected a key of {name} in {keys}, and others have all that are there: "
                    f"`afterplay keys {keys} --actors {index + 1}` makes more"
                ) from error
            return FileLock(key, taken, os.O_RDONLY)

    if index is not None:
        try:
            return index, take(index)
        except StoreError:
            if not placed:
                raise
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return index, None
    for free in count(first):
        with suppress(StoreError):
            return free, take(free)
    raise AssertionError


class PathWatch:
    """Tells when a path leads no longer to the folder or file that it led to at first, which must be open in this
    process: what is written there is lost then. A file system that cannot be asked does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        # closing a file that SQLite has open would release its locks, and an open folder keeps its number from others
        self._folder = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC) if self.path.is_dir() else None
        self._first = os.stat(self.path)
        self._gone = 0

    def gone(self, looks: int = 2) -> str:
        """Says that it is gone, once so many calls in a row have found that; else empty."""
        try:
            there = os.path.samestat(os.stat(self.path), self._first)
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:
            there = True
        self._gone = 0 if there else self._gone + 1
        if not self._gone or self._gone < looks:
            return ""
        return (
            f"{self.path} was moved, removed or replaced while the run used it (put it back, and start the run again "
            "to resume it)"
        )

    def close(self) -> None:
        """Harmless when done already."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


class FileLock:
    """Exclusive lock on ``file``, which is created if missing (by default) and never removed. It ends with the process.

    Raises :class:`StoreError` with the message ``taken`` when another process holds it, else :class:`OSError`.
    """

    def __init__(self, file: Path, taken: str, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        self.descriptor = os.open(file, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self.descriptor)
            raise StoreError(taken) from error
        except OSError as error:
            os.close(self.descriptor)
            raise lock_error(error, file) from error

    def release(self) -> None:
        os.close(self.descriptor)


def is_locked(file: Path) -> bool:
    """True if a process holds a :class:`FileLock` on ``file``, which need not be writable for us."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise lock_error(error, file) from error
    finally:
        os.close(descriptor)
    return False


def lock_error(error: OSError, file: str | Path) -> OSError:
    """The ``error`` of a lock on ``file``, in words where the file system has no locks."""
    words = error.strerror or str(error)
    if error.errno in NO_LOCKS:
        words = f"{words} (its file system has no locks: mount it with them, or use a folder on another one)"
    return OSError(error.errno, words, str(file))
