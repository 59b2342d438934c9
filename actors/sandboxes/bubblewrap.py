"""Sandboxes by bubblewrap (bwrap): namespaces of their own, made without a daemon, which end with their parent.

Inside there are the system's programs and libraries, the Python that runs Afterplay, what the settings name, and
``/tmp``, everything but ``/tmp`` and ``/dev/shm`` read-only. Nothing of it is on the machine's disk, so that nothing
can be left there. Where this process is root, commands run as a user of their own without any rights; elsewhere as this
user, in a user namespace.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import site
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from actors.sandboxes.base import SandboxSettings, is_private
from actors.sandboxes.local import SAID_BYTES_MAX, SOURCE, LocalSandbox
from pipeline.runtime.children import ChildGroup

PROBE_SECONDS_MAX = 20.0
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr")
ETC = (
    "alternatives", "ca-certificates", "crypto-policies", "fonts", "hosts", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "pki/ca-trust", "pki/tls/certs", "protocols", "services", "ssl/certs",
    "ssl/openssl.cnf", "timezone",
)  # fmt: skip
"""Names below ``/etc`` that libraries read, without users and secrets."""
SHM_BYTES = 64 * 2**20
"""``/dev/shm``, as in a container."""
READ_ONLY = ("--remount-ro", "/dev", "--remount-ro", "/")
USERS = range(61184, 65520)
"""User ids that systemd gives to services for as long as they run (UIDS-GIDS)."""
_users = itertools.cycle(random.Random().sample([*USERS], len(USERS)))
RIGHTS = ("SETUID", "SETGID", "KILL", "SYS_PTRACE")
"""Capabilities of the first process where it is root: to start, count and end processes of another user."""


def namespaces(bwrap: str, user: bool) -> list[str]:
    """Namespaces without network and without a way to keep anything, and the system's programs and libraries.
    ``user``: of users too."""
    words = [bwrap, "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"]
    words += [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try")]
    if user:
        words += ["--unshare-user"]
    for path in SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for folder in ("/etc", "/etc/ssl", "/etc/pki", "/etc/pki/tls"):
        words += ["--perms", "0755", "--dir", folder]
    for name in ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    words += ["--dev", "/dev", "--proc", "/proc"]
    return words


def showing(readable: Iterable[Path], hidden: Iterable[Path], folder: Path) -> list[str]:
    """Arguments that let ``readable`` be read under their own names, but for ``hidden`` ones below them, and in which
    ``folder`` exists."""
    readable = [path for path in readable if path.exists()]
    shown = {Path(os.path.realpath(path)) for path in readable}
    masked = {Path(os.path.realpath(path)) for path in hidden if path.exists()} - shown
    links: dict[Path, str] = {}
    for path in readable:
        _find_links(path, shown, links)
    folders = {parent for path in (*shown, *links) for parent in path.parents} | {folder, *folder.parents}
    words: list[str] = []
    last: list[str] = []
    for path in sorted(shown | masked | folders, key=lambda path: path.parts):
        above = next((other for other in path.parents if other in shown | masked), None)
        if path in shown:
            words += ["--ro-bind", str(path), str(path)]
        elif path in folders and not any(other in path.parents for other in shown):
            words += ["--perms", "0755", "--dir", str(path)]  # else as closed as what is bound below it
        elif path in masked and path.is_dir() and above in shown:
            words += ["--tmpfs", str(path)]
            last += ["--remount-ro", str(path)]
        elif path in masked and above in shown:
            words += ["--ro-bind", "/dev/null", str(path)]
    for link, target in links.items():
        words += ["--symlink", target, str(link)]
    return words + last


def _find_links(path: Path, shown: set[Path], links: dict[Path, str]) -> None:
    """The links on the way to ``path`` that lie outside everything that is shown."""
    at = Path("/")
    for part in path.parts[1:]:
        at = at / part
        if at.is_symlink() and not any(other in at.parents for other in shown) and str(at) not in SYSTEM:
            links[at] = os.path.realpath(at)
        at = Path(os.path.realpath(at))


def python_paths() -> list[Path]:
    """Folders of the Python that runs Afterplay."""
    found = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix)]
    if site.ENABLE_USER_SITE:
        found.append(Path(site.getusersitepackages()))
    return [path for path in dict.fromkeys(found) if not path.is_relative_to("/usr")]


def refusal(bwrap: str | None) -> str | None:
    """Reason why no sandbox can be made here; None where it can."""
    if bwrap is None:
        return "there is no bwrap on the PATH (package bubblewrap)"
    try:
        command = [*namespaces(bwrap, user=os.geteuid() != 0), "--", "/bin/sh", "-c", ":"]
        done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS_MAX, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{bwrap} does not work on this machine: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}"
    return f"{bwrap} does not work on this machine: {said}"


def _counts_by_namespace() -> bool:
    """True where RLIMIT_NPROC counts the processes of a user namespace alone (Linux 5.14)."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14)


def find() -> str | None:
    """The program ``bwrap``."""
    return shutil.which("bwrap")


class Bubblewrap(LocalSandbox):
    """One sandbox, a child of this process."""

    python = os.path.realpath(sys.executable)

    @classmethod
    def unreadable(cls, path: Path) -> bool:
        return os.geteuid() == 0 and is_private(path)

    def _own_variables(self) -> Mapping[str, str]:
        return {"PATH": os.environ.get("PATH", os.defpath)}

    async def _launch(self) -> tuple[ChildGroup, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            child = ChildGroup(
                self._words(), self.settings.reaper, stdin=theirs.fileno(), output_bytes_max=SAID_BYTES_MAX
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return child, ours

    def _words(self) -> Sequence[str]:
        settings: SandboxSettings = self.settings
        bwrap = find()
        if bwrap is None:
            raise FileNotFoundError("bwrap is no longer on the PATH")
        words = [*namespaces(bwrap, user=os.geteuid() != 0), "--as-pid-1"]
        uid = None
        if os.geteuid() == 0:
            for right in RIGHTS:
                words += ["--cap-add", f"CAP_{right}"]
            uid = next(_users)
        disk = str(settings.options.disk_mib * 2**20)
        words += ["--perms", "1777", "--size", disk, "--tmpfs", "/tmp"]
        words += ["--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
        words += showing([*python_paths(), *settings.readable], settings.hidden, settings.folder or Path("/"))
        words += READ_ONLY
        argument = self._argument(uid=uid, filter=True, count=uid is not None or _counts_by_namespace())
        return [*words, "--", self.python, "-I", "-S", "-c", SOURCE.read_text(), argument]
