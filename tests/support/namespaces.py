"""Hosts as Linux network namespaces: each has an interface of its own, and all are connected to one switch.

A namespace exists as long as a process is in it. Here that is one that waits for the end of its input, so that it ends
with the process that made it, however that ends, and takes interfaces and limits with it: nothing has a name on the
machine, and nothing is left to be cleaned up. It needs iproute2, util-linux, and root or the right to make user
namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

INTERFACE = "link0"
"""The interface of a host, by the same name on each; what goes to the host itself does not pass it."""

HEADERS = 66
"""Bytes of a packet before its payload: Ethernet 14, IP 20, TCP 20 and its time stamp 12. A packet that the kernel has
not cut yet for the wire counts as one."""

QUEUE = 64_000_000
"""Bytes that may wait for a link: so many that none is dropped."""

FIRST_PORT = 20000
"""Below those that the kernel hands out on its own."""

_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_WAYS = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))


class NotPermitted(RuntimeError):
    """This machine makes no network namespaces for us; the message says why."""


def payload(process: int | str) -> int:
    """Bytes of payload that the host of a process (its number, or ``self``) has sent over its interface."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            sent, packets = counters.split()[8:10]
            return int(sent) - HEADERS * int(packets)
    raise OSError(f"process {process} has no interface {INTERFACE}")


class Namespaces:
    """``hosts`` namespaces and a switch.

    Raises:
        NotPermitted: this machine does not allow it.
    """

    kind = "namespaces"

    def __init__(self, hosts: int) -> None:
        missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool, path=_SEARCH) is None]
        if missing:
            raise NotPermitted(f"{', '.join(missing)} are not installed: they come with iproute2 and util-linux")
        self._holders: list[subprocess.Popen[bytes]] = []
        self._user: tuple[str, ...] = ()
        self._ports = itertools.count(FIRST_PORT)
        try:
            self._build(hosts)
        except BaseException:
            self.close()
            raise

    def _build(self, hosts: int) -> None:
        switch = self._first()
        for _ in range(hosts):
            enter = ("nsenter", "--target", str(switch), *self._user) if self._user else ()
            self._hold([*enter, *_WAYS[0]])
        lines = ["link add switch type bridge", "link set switch up"]
        for host in range(hosts):
            lines.append(f"link add port{host} type veth peer name {INTERFACE} netns {self._process(host)}")
            lines.append(f"link set port{host} master switch up")
        self._configure(switch, "ip", lines)
        for host in range(hosts):
            address = f"address add {self.address(host)}/24 dev {INTERFACE}"
            self._configure(self._process(host), "ip", [address, "link set lo up", f"link set {INTERFACE} up"])

    def _first(self) -> int:
        """Return the first namespace, of the switch, in the first way that is permitted; the process that holds it."""
        reasons = []
        for way in _WAYS:
            try:
                process = self._hold(way)
            except NotPermitted as error:
                reasons.append(str(error))
                continue
            self._user = ("--user", "--preserve-credentials") if "--user" in way else ()
            return process
        raise NotPermitted("; ".join(reasons))

    def _hold(self, command: Sequence[str]) -> int:
        """Return a new namespace; the number of the process that keeps it until its input ends."""
        program = shutil.which(command[0], path=_SEARCH)
        assert program is not None
        process = subprocess.Popen(
            [program, *command[1:], "sh", "-c", "echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # else Ctrl-C would end the hosts before their ranks
        )
        self._holders.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            _, problem = process.communicate()
            self._holders.remove(process)
            raise NotPermitted(f"{' '.join(command)}: {problem.decode(errors='replace').strip()}")
        return process.pid

    def _process(self, host: int) -> int:
        return self._holders[1 + host].pid

    def _enter(self, process: int) -> tuple[str, ...]:
        program = shutil.which("nsenter", path=_SEARCH)
        assert program is not None
        return (program, "--target", str(process), *self._user, "--net")

    def _configure(self, process: int, tool: str, lines: Sequence[str]) -> None:
        """Give ``ip`` or ``tc`` some lines in the namespace of a process."""
        program = shutil.which(tool, path=_SEARCH)
        assert program is not None
        done = subprocess.run(
            [*self._enter(process), program, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True
        )
        if done.returncode:
            raise NotPermitted(f"{tool} {lines}: {done.stderr.strip()}")

    def prefix(self, host: int) -> tuple[str, ...]:
        """Return what a command begins with that is to run on a host."""
        return self._enter(self._process(host))

    def address(self, host: int) -> str:
        """Return the host's address; the machine itself knows nothing of it."""
        return f"10.0.0.{1 + host}"

    def variables(self, host: int) -> dict[str, str]:
        """Return what processes of a host need in their environment."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    def port(self) -> int:
        """Return a TCP port that is free on every host."""
        return next(self._ports)

    def set_rate(self, rate: float | None) -> None:
        """Limit every host's interface, in each direction, to ``rate`` bits per second; None is no limit."""
        limit = f"pfifo limit {QUEUE // 1500}"
        if rate is not None:
            # What may pass at once: what the link carries in 2 ms, but not less than some packets.
            limit = f"tbf rate {rate:.0f}bit burst {max(6000, rate / 8 / 500):.0f}b limit {QUEUE}b"
        hosts = range(len(self._holders) - 1)
        ports = [f"qdisc replace dev port{host} root {limit}" for host in hosts]
        self._configure(self._holders[0].pid, "tc", ports)
        for host in hosts:
            self._configure(self._process(host), "tc", [f"qdisc replace dev {INTERFACE} root {limit}"])

    def set_link(self, host: int, connected: bool) -> None:
        """Connect a host to the switch, or cut it off; its processes go on."""
        self._configure(self._holders[0].pid, "ip", [f"link set port{host} {'up' if connected else 'down'}"])

    def processes(self, host: int) -> list[int]:
        """Return the numbers of the processes of a host, except that which holds it."""
        holder = self._process(host)
        place = os.readlink(f"/proc/{holder}/ns/net")
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(folder / "ns/net") == place and int(folder.name) != holder:
                    processes.append(int(folder.name))
        return processes

    def sent(self) -> list[int]:
        """Bytes of payload that each host has sent over its interface so far."""
        return [payload(self._process(host)) for host in range(len(self._holders) - 1)]

    def close(self) -> None:
        """End the processes of the hosts, which go with the last."""
        for holder in reversed(self._holders):
            holder.kill()
            holder.communicate()
        self._holders = []
