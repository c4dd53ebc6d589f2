"""Rendezvous of ranks: the store of rank 0, and messages there before the group starts."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeromesh.comm.detect import Environment
from zeromesh.comm.failure import StartError
from zeromesh.comm.launchers import FILE, LOOPBACK

START_SECONDS = 300.0  # that ranks wait for each other, unless ZEROMESH_START_TIMEOUT is set

FAREWELL_SECONDS = 10.0  # that a rank that cannot go on tries to report why to the others

_TCPStore, _PrefixStore = dist.TCPStore, dist.PrefixStore  # type: ignore[attr-defined]

# Starts of a group at each address and port: torchrun's store outlives groups, and one must not read another's keys.
_starts: Counter[tuple[str, int]] = Counter()


def start_limit(timeout: timedelta | None = None) -> timedelta:
    """Return the limit of the wait for other ranks: ``timeout``, else ZEROMESH_START_TIMEOUT, else five minutes."""
    text = os.environ.get("ZEROMESH_START_TIMEOUT")
    try:
        seconds = timeout.total_seconds() if timeout is not None else START_SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e8:
        shown = f"ZEROMESH_START_TIMEOUT is {text!r}" if timeout is None else f"start_timeout is {timeout}"
        raise ValueError(f"{shown}, but must be a number of seconds above 0, such as 60")
    return timedelta(seconds=seconds)


def join_rendezvous(environment: Environment, limit: timedelta, problem: Exception | None) -> Any:
    """Join the other ranks at the master and return the store that they share; all of them go on, or none does.

    Raises:
        StartError: the master's port is in use, the master or some rank does not come, or another rank has a problem.
        Exception: ``problem``, why this rank cannot go on; the others are told.
    """
    master = environment.master_address, environment.master_port
    prefix = f"zeromesh/{_starts[master]}"
    _starts[master] += 1
    if problem is not None:
        _report(environment, prefix, problem)
        raise problem
    store = _PrefixStore(prefix, _store(environment, limit))
    store.set(f"here/{environment.rank}", "")
    if store.add("count", 1) == environment.world_size:
        store.set("go", "")
    _await_all(store, environment, limit)
    problem_of_another = store.get("go").decode()
    if problem_of_another:
        store.add("heard", 1)  # the process that holds the store waits for this before it goes
        raise StartError(problem_of_another)
    return store


def _await_all(store: Any, environment: Environment, limit: timedelta) -> None:
    end, pause, missing = time.monotonic() + limit.total_seconds(), 0.005, []
    master = f"{environment.master_address}:{environment.master_port}"
    try:
        # Polled, as torch's own wait ignores Ctrl-C, and prints two warnings on a timeout.
        while not store.check(["go"]) and time.monotonic() < end:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, 0.2)
        if not store.check(["go"]):
            missing = [str(rank) for rank in range(environment.world_size) if not store.check([f"here/{rank}"])]
    except RuntimeError as error:
        raise StartError(
            f"rank 0 at {master} went away while this rank waited for the others: {_first_line(error)}; see the "
            "output of rank 0"
        ) from None
    if missing:
        shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        raise StartError(
            f"of {environment.world_size} ranks, {shown} did not come to {master} within {_text(limit)}; see "
            "whether they are running, have failed before, and can reach that address. ZEROMESH_START_TIMEOUT sets "
            "how many seconds to wait"
        )


def _report(environment: Environment, prefix: str, problem: Exception) -> None:
    """Tell the other ranks, as far as they come in time, of a problem of this one."""
    limit = timedelta(seconds=min(FAREWELL_SECONDS, start_limit().total_seconds()))
    end = time.monotonic() + limit.total_seconds()
    try:
        store = _PrefixStore(prefix, _store(environment, limit))
        store.set("go", f"rank {environment.rank} on {socket.gethostname()} cannot start: {problem}")
        heard = store.add("heard", 1)
        # The store goes with the process that holds it, so that one stays until the others have read the problem.
        while _serves(environment) and heard < environment.world_size and time.monotonic() < end:
            time.sleep(0.02)
            heard = store.add("heard", 0)
    except RuntimeError:
        return  # the problem itself is what this rank's user is to see


def _serves(environment: Environment) -> bool:
    return environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else the agent does


def _store(environment: Environment, limit: timedelta) -> Any:
    address, port = environment.master_address, environment.master_port
    if address.startswith(FILE):
        store = dist.FileStore(address.removeprefix(FILE), environment.world_size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        return store
    if _serves(environment):
        return _serve(address, port, environment.world_size, limit)
    end = time.monotonic() + limit.total_seconds()
    tries, failure = reach(address, port, end)
    if failure:
        raise StartError(
            f"the master at {address}:{port} cannot be reached from {socket.gethostname()}: {tries} attempts in "
            f"{_text(limit)}, the last one: {failure}; see that rank 0 is running and has not failed before, that "
            f"MASTER_ADDR is the machine of rank 0, under a name or address that this one can reach, and that no "
            f"firewall blocks port {port}. ZEROMESH_START_TIMEOUT sets how many seconds to wait"
        )
    # Torch waits for ever on a program that accepts connections and is not a store.
    made: list[Any] = []
    size = environment.world_size
    in_background(
        lambda: _TCPStore(address, port, size, False, limit, wait_for_workers=False), made
    )(max(1.0, end - time.monotonic()))  # fmt: skip
    if made and not isinstance(made[0], Exception):
        return made[0]
    why = f": {_first_line(made[0])}" if made else ""
    raise StartError(
        f"something listens at {address}:{port}, the master's address, but it did not answer as rank 0 does within "
        f"{_text(limit)}{why}; another program has that port, or rank 0 is stuck: see the output of rank 0, and set "
        "MASTER_PORT to a free port on all ranks"
    )


def in_background(action: Callable[[], Any], result: list[Any]) -> Callable[[float], None]:
    """Call ``action`` in a thread that appends its result or error; return a function that waits for it."""

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread.join


def _serve(address: str, port: int, world_size: int, limit: timedelta) -> Any:
    # TCPStore itself listens on all interfaces. On one machine nobody else shall reach it.
    listener, families = None, (socket.AF_INET,) if address in LOOPBACK[:2] else (socket.AF_INET6, socket.AF_INET)
    host = "127.0.0.1" if address in LOOPBACK[:2] else address if address in LOOPBACK else ""
    for family in families:  # IPv6 first, which takes IPv4's connections too
        try:
            listener = socket.create_server(
                (host, port), family=family, backlog=2048, dualstack_ipv6=family is socket.AF_INET6 and not host
            )
            break
        except OSError as error:
            failure = error
    # If the port is in use by this process, for a group that it had before, torch finds that one's store again.
    descriptor = None if listener is None else listener.detach()
    try:
        return _TCPStore(
            host or "localhost", port, world_size, True, limit,
            wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor,
        )  # fmt: skip
    except RuntimeError:
        if listener is not None:
            raise
        holder = _holder_of(port) if failure.errno == errno.EADDRINUSE else ""
        raise StartError(
            f"rank 0 cannot listen on port {port}, MASTER_PORT: {os.strerror(failure.errno or 0)}{holder}; set "
            "MASTER_PORT to a free port on all ranks, or end what uses it"
        ) from None


def reach(address: str, port: int, end: float) -> tuple[int, str]:
    """Wait for a listener at an address; return the number of attempts, and why the last one failed, else ""."""
    pause, tries = 0.01, 0
    while True:
        tries += 1
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(10.0, end - time.monotonic()))).close()
            return tries, ""
        except socket.gaierror as error:
            failure = f"the name {address!r} is not known here ({error.strerror})"
        except TimeoutError:
            failure = "no answer, as behind a firewall, or where the machine is off"
        except OSError as error:
            failure = f"{error.strerror or error}"
        if time.monotonic() + pause >= end:
            return tries, failure
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _holder_of(port: int) -> str:
    """Name the process that listens on a TCP port: " (process 12, python train.py)", or "" if unknown."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = table.read_text().splitlines()[1:] if table.is_file() else []
        fields = [row.split() for row in rows]
        # 0A is the kernel's number of the state LISTEN.
        inodes |= {f"socket:[{f[9]}]" for f in fields if f[3] == "0A" and int(f[1].rpartition(":")[2], 16) == port}
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # another user's process, or it has ended meanwhile
            if inodes & {os.path.basename(os.path.realpath(entry)) for entry in (process / "fd").iterdir()}:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" (process {process.name}, {command[:100]})"
    return ""


def _text(limit: timedelta) -> str:
    return f"{limit.total_seconds():g} s"


def _first_line(error: Exception) -> str:
    return re.split(r"\n|Exception raised from", str(error))[0].strip()  # torch adds its own C++ stack
