"""Network interface that leads to the master."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

ANYWHERE = "192.0.2.1"  # an address for documentation, which the default route leads to; nothing is sent there

_GET_ADDRESS = 0x8915  # Linux' SIOCGIFADDR


def stay_on_loopback() -> None:
    """Keep sockets inside the machine; without this, gloo and nccl ask the name service for an interface."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", names[0])


def interface_to(address: str, port: int) -> str | None:
    """Return the name of the interface that leads to an address; None if it is unknown."""
    # On the machine of that address itself the route may go over loopback, which the other nodes cannot reach: there
    # the interface counts that leads to the outside.
    for target in (address, ANYWHERE):
        with contextlib.suppress(OSError):
            local_address = own_address(target, port)
            if not ipaddress.ip_address(local_address).is_loopback:
                return _interface_with(local_address)
    return None


def own_address(address: str, port: int) -> str:
    """Return this machine's address on the way to another; raise OSError if there is no way."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0]).partition("%")[0]


def _interface_with(address: str) -> str | None:
    if sys.platform != "linux":
        return None
    if ":" in address:
        wanted = ipaddress.ip_address(address).packed.hex()
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((row[5] for row in rows if row[0] == wanted), None)
        return None
    import fcntl  # absent on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
