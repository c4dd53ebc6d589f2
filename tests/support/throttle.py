"""Hosts that are none: ranks on one loopback interface whose messages to other hosts are counted and held back.

The stand-in for ``namespaces`` where those are not permitted. It sees what one rank sends to another
(``ProcessGroup.send``), which is what ZeroMesh trains with over gloo; it does not see gloo's own collectives, such as
a broadcast or those of DDP, nor plain commands. A message arrives whole when the link would have carried its last byte.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

VARIABLE = "TEST_HOSTS_LINKS"
"""By this variable a rank knows its links: their file, the number of hosts, and how many ranks each has."""


class Links:
    """A file that all processes map: the rate, when each host's link is free again, and what has been sent.

    Args:
        path: the file; it is made if it is not there.
        hosts: number of hosts.
    """

    def __init__(self, path: Path, hosts: int) -> None:
        self._lock = path.open("ab")
        self._lock.truncate(8 * (1 + 3 * hosts))
        table = numpy.memmap(path, numpy.float64, "r+")
        self._rate, self._out, self._in, self._sent = numpy.split(table, [1, 1 + hosts, 1 + 2 * hosts])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def set_rate(self, rate: float | None) -> None:
        """Bits per second of each host's link in each direction; None is no limit."""
        with self._alone():
            self._rate[0] = rate or 0.0

    def sent(self) -> list[int]:
        """Bytes that each host has sent so far."""
        with self._alone():
            return [int(count) for count in self._sent]

    def send(self, source: int, target: int, nbytes: int) -> float:
        """Count a message, and take the time that it needs on both links; when it has arrived (``time.monotonic``)."""
        with self._alone():
            self._sent[source] += nbytes
            if not self._rate[0]:
                return 0.0
            begin = max(time.monotonic(), self._out[source], self._in[target])
            end = begin + 8 * nbytes / float(self._rate[0])
            self._out[source] = self._in[target] = end
            return end


class Throttle:
    """The network of ``hosts`` hosts with ``ranks`` ranks each: the same as ``namespaces.Namespaces`` offers."""

    kind = "throttle"

    def __init__(self, hosts: int, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="links-")
        self._described = f"{self._folder.name}/links:{hosts}:{ranks}"
        self._links = Links(Path(self._folder.name, "links"), hosts)
        self.set_rate = self._links.set_rate
        self.sent = self._links.sent

    def prefix(self, host: int) -> tuple[str, ...]:
        """Return what a command begins with that is to run on a host."""
        return ()

    def address(self, host: int) -> str:
        """Return the host's address. On Linux each of 127.0.0.0/8 is this machine."""
        return f"127.0.0.{2 + host}" if sys.platform == "linux" else "127.0.0.1"

    def variables(self, host: int) -> dict[str, str]:
        """Return what processes of a host need in their environment."""
        return {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", VARIABLE: self._described}

    def port(self) -> int:
        """Return a TCP port that nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def close(self) -> None:
        """Remove the file."""
        self._folder.cleanup()


class Rank:
    """What holds back the messages of one rank, one after the other, as its host's link does."""

    def __init__(self) -> None:
        path, hosts, ranks = os.environ[VARIABLE].rsplit(":", 2)
        self.links, self._ranks = Links(Path(path), int(hosts)), int(ranks)
        self._host = int(os.environ["RANK"]) // self._ranks
        self._line = ThreadPoolExecutor(1)

    def sent(self) -> int:
        """Bytes that this rank's host has sent."""
        return self.links.sent()[self._host]

    def install(self) -> None:
        """From now on ``ProcessGroup.send`` goes through here."""
        from torch.distributed import ProcessGroup, get_global_rank

        from zeromesh.comm import local

        local.network_place = lambda: f"host {self._host}"  # ranks of different hosts have no memory in common
        send = ProcessGroup.send

        def carry(group: Any, tensors: list[Any], to: int, tag: int, target: int) -> Any:
            arrives = self.links.send(self._host, target, sum(tensor.nbytes for tensor in tensors))
            time.sleep(max(0.0, arrives - time.monotonic()))
            return send(group, tensors, to, tag)

        def throttled(group: Any, tensors: list[Any], to: int, tag: int) -> Any:
            target = get_global_rank(group, to) // self._ranks
            if target == self._host:
                return send(group, tensors, to, tag)
            return Carried(self._line.submit(carry, group, tensors, to, tag, target))

        ProcessGroup.send = throttled

    def drain(self) -> None:
        """Wait until all has been sent."""
        self._line.submit(int).result()


class Carried:
    """A message on its way: the part of ``torch.distributed.Work`` that is used of one."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, *timeout: Any) -> bool:
        """Until the message has been taken."""
        return bool(self._future.result().wait(*timeout))

    def is_completed(self) -> bool:
        """Whether it has."""
        return self._future.done() and bool(self._future.result().is_completed())


@functools.cache
def this_rank() -> Rank:
    """Of this process, if it is a rank."""
    return Rank()
