"""Network interface over which ranks on several machines connect.

gloo takes the address that the machine's own name resolves to. On many machines that is a loopback address, at which
no other one reaches it. A launcher tells each process the address of its machine, which decides here.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

from pipeline.runtime.process import ADDRESS

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable in which gloo reads the name of an interface."""
SIOCGIFADDR = 0x8915
"""Request for the address of an interface (Linux)."""
NAME_BYTES_MAX = 15
"""Longest name of an interface (Linux)."""


def choose_interface() -> None:
    """Let gloo use the interface with the address that a launcher told, unless the user has chosen one."""
    address = os.environ.get(ADDRESS)
    if address and VARIABLE not in os.environ and (name := interface_of(address)) is not None:
        os.environ[VARIABLE] = name


def interface_of(address: str) -> str | None:
    """Name of the interface with this address, of which a name is resolved. None for a loopback address, where no
    interface has it, and where the system cannot be asked (IPv6, macOS)."""
    if sys.platform != "linux":
        return None
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = socket.gethostbyname(address)
        if address.startswith("127."):
            return None
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:NAME_BYTES_MAX])
            with suppress(OSError):  # it has no address
                if socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None
