"""Addresses of the engines of a run: where actors and learner find them, also those that come and go meanwhile.

::

    addresses = engine_addresses(config.engine, directory, key)  # as engine.discovery says
    tasks.start_soon(addresses.follow, set_engines)              # all URLs, at once and after each change
    digests = find_digests(config.engine, directory.path)
    registry = EngineRegistry(directory.engines, digests)        # engines that join a run
    registry.announce("engine-3", "http://b:8103")               # again within LEASE_SECONDS, or it counts as gone
    registry.withdraw("engine-3")                                # it gets no new turns: then drain and end it

A launcher has four ways: ``engine.discovery: registry``, with which each ``afterplay engine FILE --index N`` announces
itself in the run directory, on whatever machine it is; the calls above; a file of URLs that it replaces on each machine
(``file:PATH``); a name with an address for each engine (``dns:NAME:PORT``). ``afterplay engine FILE --join`` announces
one more engine in any case.

Actors and learner show their keys to every engine that they find. So what is written into the run directory, which
others may write to, counts only with a signature: an HMAC of the address under the digest of the reader's key
(:mod:`pipeline.runtime.engine_keys`). Engines know both digests, an actor that of its own key alone, so it can sign
nothing that the learner accepts. A reader that shows no key takes every address.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import orjson

from pipeline.config.rollouts import EngineConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.engine_keys import digest_of
from pipeline.runtime.run_directory import RunDirectory, write_json_atomically

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Time between two looks at the file, the name or the registry."""
LEASE_SECONDS = 30.0
"""An engine that announced itself and has not done so again for so long is gone."""
RENEW_SECONDS = 5.0
"""Time between two announcements."""
URL_MAX = 500
CONTENT_BYTES_MAX = 4096
"""Longest file of one engine."""


class EngineRegistry:
    """Engines that have announced themselves: a folder with one file for each. Processes on several machines may use
    it. A file is gone when its engine withdraws, and does not count once it has stayed the same for ``LEASE_SECONDS``
    of the reader's own time, so clocks need not agree. Safe to use from one thread at a time.

    ``digests``: who announces signs with each; who reads takes what is signed with one of them. Without any, nothing is
    signed and all is taken."""

    def __init__(
        self, folder: Path, digests: Sequence[str] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self._digests = tuple(digests or ())
        self._now = now
        self._unsigned: frozenset[str] = frozenset()
        self._announcements = 0
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Content of each file, and when it was first seen."""

    def announce(self, name: str, url: str) -> None:
        """The engine ``name`` serves at ``url``. Call it every ``RENEW_SECONDS``. Raises :class:`OSError`."""
        self._announcements += 1
        value = {"url": check_url(url), "process": os.getpid(), "announcement": self._announcements}
        signatures = [_signature(digest, name, value) for digest in self._digests]
        self.folder.mkdir(exist_ok=True)
        write_json_atomically(self.folder / f"{name}.json", value | {"signatures": signatures}, make_folder=False)

    def withdraw(self, name: str) -> None:
        """The engine takes no new requests. Harmless when it was not announced."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def read(self) -> tuple[str, ...]:
        """URLs of the announced engines, by name. Raises :class:`OSError` when the folder cannot be read."""
        now, seen, urls, unsigned = self._now(), {}, [], set()
        for name, content in sorted(self._files()):
            before, since = self._seen.get(name, (b"", now))
            seen[name] = (content, since if content == before else now)
            if now - seen[name][1] <= LEASE_SECONDS and (value := _announcement(content)):
                if _is_signed(value, name.removesuffix(".json"), self._digests):
                    urls.append(value["url"])
                else:
                    unsigned.add(name)
        if new := sorted(unsigned - self._unsigned):
            log.warning(
                "%s is not signed with a key of this run, so this engine gets no requests: start it with `afterplay "
                "engine FILE --join`, as the user of the run or with both of its keys",
                self.folder / new[0],
            )
        self._seen, self._unsigned = seen, frozenset(unsigned)
        return tuple(urls)

    def ages(self) -> dict[str, tuple[str, float]]:
        """URL of each engine and seconds since it announced itself, by name and by the clock of the disk. Raises
        :class:`OSError`."""
        found = {}
        for name, content in sorted(self._files()):
            with contextlib.suppress(FileNotFoundError):
                age = max(0.0, time.time() - (self.folder / name).stat().st_mtime)
                found[name.removesuffix(".json")] = _announcement(content).get("url", ""), age
        return found

    def _files(self) -> Iterable[tuple[str, bytes]]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return
        for name in names:
            path = self.folder / name
            if name.endswith(".json") and not name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISREG(path.lstat().st_mode):  # reading a pipe would not end
                        with path.open("rb") as file:
                            yield name, file.read(CONTENT_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class EngineAddresses:
    """Engines of the list ``fixed``, of ``look``, and of ``registry``. Without the last two they never change."""

    fixed: tuple[str, ...] = ()
    look: Callable[[], tuple[str, ...]] | None = None
    """Finds further engines now; blocks. Raises :class:`OSError` or :class:`ConfigurationError`: nothing has changed
    then."""
    registry: EngineRegistry | None = None

    def _looks(self) -> list[Callable[[], tuple[str, ...]]]:
        return [look for look in (self.look, None if self.registry is None else self.registry.read) if look]

    def now(self) -> tuple[str, ...]:
        """All base URLs now; blocks. Raises as ``look``."""
        return tuple(dict.fromkeys((*self.fixed, *(url for look in self._looks() for url in look()))))

    async def follow(self, changed: Callable[[tuple[str, ...]], None]) -> None:
        """Call ``changed`` with all base URLs, at once and whenever they differ, until cancelled."""
        known: tuple[str, ...] | None = None
        looks = self._looks()
        found: list[tuple[str, ...]] = [()] * len(looks)
        reason = ""
        while True:
            for i, look in enumerate(looks):
                try:
                    found[i] = await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
                except (OSError, ValueError, ConfigurationError) as error:
                    if str(error) != reason:
                        log.warning("engines are not looked up, those that are known stay: %s", error)
                    reason = str(error)
            urls = tuple(dict.fromkeys((*self.fixed, *chain(*found))))
            if urls != known:
                log.log(logging.DEBUG if known is None else logging.INFO, "engines now: %s", ", ".join(urls) or "none")
                known = urls
                changed(urls)
            if not looks:
                return
            await anyio.sleep(LOOK_SECONDS)


def engine_addresses(engine: EngineConfig, directory: RunDirectory, key: str | None) -> EngineAddresses:
    """Engines of a run, as ``engine.discovery`` says, and those that join. Where engines and learner share their
    devices, the engines stay. ``key``: what the caller shows them; None: nothing."""
    if engine.colocate != "none":
        return EngineAddresses(engine.addresses())
    digests = () if key is None else (digest_of(key),)
    registry = EngineRegistry(directory.engines, digests)
    kind, _, place = (engine.discovery or "").partition(":")
    if kind == "file":
        file = Path(place).expanduser()
        ours = file.absolute().is_relative_to(directory.path.absolute())
        return EngineAddresses(look=lambda: read_urls(file, digests if ours else ()), registry=registry)
    if kind == "dns":
        host, _, port = place.rpartition(":")
        return EngineAddresses(look=lambda: resolve_name(host, int(port)), registry=registry)
    return EngineAddresses(() if kind == "registry" else engine.addresses(), registry=registry)


def read_urls(file: Path, digests: Sequence[str] = ()) -> tuple[str, ...]:
    """One base URL for each line of ``file``; empty lines and those that begin with ``#`` are passed over. With
    ``digests`` each line must be signed with one of them. Raises :class:`OSError`, and :class:`ConfigurationError` for
    a line that is no URL, or not signed."""
    found = []
    for line in file.read_text().splitlines():
        url, *signatures = line.split() or ["#"]
        if not url.startswith("#"):
            found.append(check_url(url))
            if not _matches(signatures, [_signature(digest, "", {"url": url}) for digest in digests]):
                raise ConfigurationError(
                    f"{file} is in the run directory, where others may write, and names {url} without a signature: "
                    "keep a file of your own elsewhere (engine.discovery)"
                )
    return tuple(found)


def signed_line(url: str, digests: Sequence[str]) -> str:
    """A line of a file that :func:`read_urls` takes with any of ``digests``."""
    return " ".join((url, *(_signature(digest, "", {"url": url}) for digest in digests)))


def resolve_name(host: str, port: int) -> tuple[str, ...]:
    """A base URL for each address of ``host``. Raises :class:`OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    shown = {f"[{at[0]}]" if family == socket.AF_INET6 else str(at[0]) for family, _, _, _, at in found}
    return tuple(f"http://{ip}:{port}" for ip in sorted(shown))


def check_url(url: str) -> str:
    """``url`` without a trailing slash. Raises :class:`ConfigurationError` where it is no base URL."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"expected the base URL of an engine, got {url[:URL_MAX]!r}: {error}") from error
    if len(url) > URL_MAX or parts.scheme not in ("http", "https") or not parts.netloc or parts.query:
        raise ConfigurationError(f"expected the base URL of an engine, like http://host:8100, got {url[:URL_MAX]!r}")
    return url.rstrip("/")


def _announcement(content: bytes) -> dict[str, Any]:
    """The file of an engine; empty where it has no base URL."""
    try:
        value = orjson.loads(content)
        return {**value, "url": check_url(value["url"])}
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError, ConfigurationError):
        return {}


def _signature(digest: str, name: str, value: dict[str, Any]) -> str:
    """Proof that who knows ``digest`` announced ``value`` as ``name``."""
    signed = orjson.dumps([name, *(value.get(key) for key in ("url", "process", "announcement"))])
    return hmac.new(digest.encode(), signed, "sha256").hexdigest()


def _is_signed(value: dict[str, Any], name: str, digests: Sequence[str]) -> bool:
    """True for an announcement that is signed with one of ``digests``, and for each without any."""
    try:
        expected = [_signature(digest, name, value) for digest in digests]
    except orjson.JSONEncodeError:
        return False
    return _matches(value.get("signatures"), expected)


def _matches(signatures: Any, expected: Sequence[str]) -> bool:
    if not expected:
        return True
    shown = [text.encode() for text in signatures if isinstance(text, str)] if isinstance(signatures, list) else []
    return any(hmac.compare_digest(one, other.encode()) for one in shown for other in expected)
