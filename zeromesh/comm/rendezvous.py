"""Rendezvous of ranks: the store of rank 0, and messages there before the group starts."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from hmac import compare_digest
from itertools import chain, islice
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from zeromesh.base.worker import Worker
from zeromesh.comm.detect import Environment
from zeromesh.comm.failure import StartError
from zeromesh.comm.launchers import FILE, LOOPBACK, is_loopback, names_of, value
from zeromesh.comm.trust import SECRET, SealedStore, run_name, run_token, sign

START_SECONDS = 300.0  # that ranks wait for each other, unless ZEROMESH_START_TIMEOUT is set

PATIENCE_SECONDS = 10.0  # of a wait in silence; then the log says what may be wrong

FAREWELL_SECONDS = 10.0  # that a rank that cannot go on tries to report why to the others

LEAVING_SECONDS = 5.0  # that rank 0 stays at its end for others that still use its store

POLLS = 4000  # calls per second that all ranks that wait make of the store
SHOWN = 20  # ranks that did not come and are named, at most

_log = logging.getLogger("zeromesh")

_SIGNATURE = 64  # digits in front of a greeting

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


def join_rendezvous(environment: Environment, limit: timedelta, problem: Exception | None) -> SealedStore:
    """Join the other ranks at the master and return the store that they share; all of them go on, or none does.

    Raises:
        StartError: the master's port is in use, the master or some rank does not come, another rank has a problem, or
            another run or a stranger is in the place of a rank.
        Exception: ``problem``, why this rank cannot go on; the others are told.
    """
    master = environment.master_address, environment.master_port
    # Ranks of several nodes may have counted different restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if environment.one_node else "0"
    meeting = Meeting(environment, f"zeromesh/{attempt}/{_starts[master]}", limit)
    _starts[master] += 1
    if problem is not None:
        meeting.report(problem)
        raise problem
    meeting.connect()
    return meeting.meet()


class Meeting:
    """Ranks of one run that come together in a store which anybody may reach.

    Each puts a greeting there, with a number that it has drawn and its signature with the run's token. The key that
    follows from all greetings is another one each time: nobody knows it who has recorded an earlier meeting.
    """

    def __init__(self, environment: Environment, prefix: str, limit: timedelta) -> None:
        self._environment, self._prefix, self._limit = environment, prefix, limit
        self._end = time.monotonic() + limit.total_seconds()
        self._rank, self._ranks = environment.rank, range(environment.world_size)
        self._master = f"{environment.master_address}:{environment.master_port}"
        self._token, self._run = run_token(environment), run_name(environment)
        self._store: Any = None

    def connect(self) -> None:
        """Serve the store, or connect to it."""
        self._store = _PrefixStore(self._prefix, _store(self._environment, self._limit))

    def meet(self) -> SealedStore:
        """Wait for all ranks, see that each belongs to this run, and return their store."""
        if self._rank:  # what comes first may be another run's, which this rank must not disturb
            self._await("here/0", ranks=(0,))
            self._require_member(0, self._store.get("here/0"))
        words = {"run": self._run, "by": f"process {os.getpid()} on {socket.gethostname()}", "draws": token_hex()}
        text = json.dumps(words)
        greetings = self._exchange("here", (self._signature(self._rank, text) + text).encode())
        for rank, greeting in enumerate(greetings):
            self._require_member(rank, greeting)
        if not self._token and self._rank == 0:
            _log.warning(
                "connections to %s are not verified, because the nodes of this run share no secret. Set %s to the same "
                "16 or more characters on all ranks, which nobody else knows, or use zeromesh launch",
                self._master,
                SECRET,
            )
        store = SealedStore(self._store, sign(self._token, *greetings), self._master)
        # What the ranks ask each other before they are connected has the limit of the start, too.
        store.set_timeout(self._limit)
        for rank, proof in enumerate(self._exchange("knows", store.seal(f"knows/{self._rank}", b""))):
            store.unseal(f"knows/{rank}", proof)
        return store

    def report(self, problem: Exception) -> None:
        """Tell the other ranks, as far as they come in time, of a problem of this one."""
        self._limit = timedelta(seconds=min(FAREWELL_SECONDS, self._limit.total_seconds()))
        end = time.monotonic() + self._limit.total_seconds()
        text = f"rank {self._rank} on {socket.gethostname()} cannot start: {problem}"
        try:
            self.connect()
            self._store.set("problem", self._signature("problem", text) + text)
            heard = self._store.add("heard", 1)
            # The store goes with the process that holds it, so that one stays until the others have read the problem.
            while _serves(self._environment) and heard < len(self._ranks) and time.monotonic() < end:
                time.sleep(0.02)
                heard = self._store.add("heard", 0)
        except RuntimeError:
            return  # the problem itself is what this rank's user is to see

    def _signature(self, *what: object) -> str:
        return sign(self._token, *map(str, what)).hex()

    def _require_member(self, rank: int, greeting: bytes) -> None:
        """Raise StartError unless a greeting is that of a rank of this run."""
        text = greeting[_SIGNATURE:].decode(errors="replace")
        signed = compare_digest(greeting[:_SIGNATURE], self._signature(rank, text).encode())
        try:
            words = json.loads(text)
            run, by = str(words["run"])[:200], str(words["by"])[:200]
        except (ValueError, KeyError, TypeError):
            run, by = "none that can be read", "a process without a name"
        if signed and run == self._run:
            return
        if run == self._run and os.environ.get(SECRET):
            raise StartError(
                f"at {self._master}, rank {rank} ({by}) does not have this rank's {SECRET}: the ranks of a run need "
                f"the same one. Set {SECRET} to the same text on all ranks; if these are two runs, give each a "
                "MASTER_PORT of its own. A stranger may have connected, too"
            )
        why = "" if run != self._run else ", whose token it does not have"
        raise StartError(
            f"at {self._master}, rank {rank} is {by}, of another run: it says {run!r}{why}, and this is rank "
            f"{self._rank} of {self._run!r}. Set MASTER_PORT to a free port, the same on all ranks of a run and "
            f"another one for each run; start all ranks with one launcher, as one user, and with the same {SECRET}, if "
            "any. A stranger may have connected, too"
        )

    def _loopback(self) -> str:
        """Return what to change if the others may be on other hosts, which do not reach this rank; else ""."""
        # A launcher that tells the ranks of this node has counted all of them.
        if not (_serves(self._environment) and is_loopback(self._environment.master_address)) or (
            value(os.environ, names_of(self._environment.launcher).local_size)
        ):
            return ""
        return (
            f"the master listens on loopback, as MASTER_ADDR is {self._environment.master_address}, and other hosts "
            "cannot reach it; for ranks on several hosts set MASTER_ADDR to a name or address of this host on all "
            "ranks, this one too"
        )

    def _exchange(self, stage: str, value: bytes) -> list[bytes]:
        """Return the values of all ranks in a stage of the meeting."""
        current = self._store.compare_set(f"{stage}/{self._rank}", "", value)
        if current != value:
            self._require_member(self._rank, current)
            raise StartError(
                f"at {self._master}, another process has come as rank {self._rank} of {self._run!r} before this one: "
                f"{json.loads(current[_SIGNATURE:])['by']}; give each process another RANK, and each run a MASTER_PORT "
                "of its own; under torchrun --max-restarts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        if self._store.add(f"{stage}/count", 1) == len(self._ranks):
            self._store.set(f"{stage}/go", "")
        self._await(f"{stage}/go", self._ranks, f"{stage}/")
        keys = [f"{stage}/{rank}" for rank in self._ranks]
        if not self._store.check(keys):
            raise StartError(
                f"not all ranks have come to {self._master}, though the store there says so: a stranger writes to it; "
                "start the run anew, on another port and where strangers cannot connect"
            )
        values: list[bytes] = self._store.multi_get(keys)
        return values

    def _await(self, key: str, ranks: Sequence[int], shown: str = "here/") -> None:
        """Wait for a key; raise StartError, which names those of the ranks that have not come, after the limit."""
        pause, missing, count, silent_until = 0.001, [], 0, time.monotonic() + PATIENCE_SECONDS
        # Polled, as torch's own wait ignores Ctrl-C, and prints two warnings on a timeout; the less often the more
        # ranks there are, as one store serves some 20,000 calls a second.
        longest = max(0.02, 2 * len(self._ranks) / POLLS)
        try:
            while not (come := self._store.check([key])) and not self._store.check(["problem"]):
                if time.monotonic() > self._end:
                    # A rank that ends between its greeting and its count is none that can be named.
                    missing = [*islice(self._missing([f"{shown}{rank}" for rank in ranks]), SHOWN)] or ["some rank"]
                    count = len(ranks) - (self._store.add(f"{shown}count", 0) if len(ranks) > 1 else 0)
                    break
                if time.monotonic() > silent_until and (hint := self._loopback()):
                    _log.warning("not all ranks have come to %s in %g s: %s", self._master, PATIENCE_SECONDS, hint)
                    silent_until = self._end
                time.sleep(min(pause, max(0.0, self._end - time.monotonic())))
                pause = min(2 * pause, longest)
            problem = "" if come or missing else self._store.get("problem").decode(errors="replace")
        except RuntimeError as error:
            raise StartError(
                f"rank 0 at {self._master} went away while this rank waited for the others: {_first_line(error)}; see "
                "the output of rank 0"
            ) from None
        if missing:
            more = count - len(missing)
            shown = ", ".join(key.removeprefix(shown) for key in missing) + (f" and {more} more" if more > 0 else "")
            hint = self._loopback() or (
                f"see whether they are running, have failed before, can reach that address, and have the same {SECRET}"
            )
            raise StartError(
                f"of {len(self._ranks)} ranks, {shown} did not come to {self._master} within {_text(self._limit)}; "
                f"{hint}. ZEROMESH_START_TIMEOUT sets how many seconds to wait; if this process is a run of its own, "
                "set ZEROMESH_ALONE=1"
            )
        if problem:
            self._store.add("heard", 1)  # the process that holds the store waits for this before it goes
            text = problem[_SIGNATURE:]
            if not compare_digest(problem[:_SIGNATURE].encode(), self._signature("problem", text).encode()):
                text = f"somebody who does not have the token of {self._run!r} has reported a problem at {self._master}"
            raise StartError(text)

    def _missing(self, keys: Sequence[str]) -> Iterator[str]:
        """Yield the keys that are not there, of which many are asked for at once."""
        if not self._store.check(keys):
            half = len(keys) // 2
            yield from keys if not half else chain(self._missing(keys[:half]), self._missing(keys[half:]))


def leave(environment: Environment, store: SealedStore, process: int) -> None:
    """Tell that this rank needs the store no more; if this process holds it, stay until no other one does.

    At most for ``LEAVING_SECONDS``. A rank whose store is gone ends with a stack of C++ calls, as if it had failed.
    """
    if os.getpid() != process or (getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")):
        return  # in a fork, whose connection is its parent's, and after an exception, when nobody waits
    with contextlib.suppress(RuntimeError):
        end, left = time.monotonic() + LEAVING_SECONDS, store.add("left", 1)
        while _serves(environment) and left < environment.world_size and time.monotonic() < end:
            time.sleep(0.02)
            left = store.add("left", 0)


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
    if is_loopback(address):
        where = f"on this host, as MASTER_ADDR {address} reaches no other one"
    else:
        where = (
            "and does not have localhost as MASTER_ADDR, so that it listens on loopback, where others cannot reach it"
        )
    tries, failure = reach(address, port, min(end, time.monotonic() + PATIENCE_SECONDS))
    if failure and time.monotonic() < end - 1:
        _log.warning(
            "rank %d has not reached the master at %s:%d in %g s: %s; see that rank 0 is running, %s; waiting for "
            "%.0f s more",
            environment.rank,
            address,
            port,
            PATIENCE_SECONDS,
            failure,
            where,
            end - time.monotonic(),
        )
        more, failure = reach(address, port, end)
        tries += more
    if failure:
        raise StartError(
            f"the master at {address}:{port} cannot be reached from {socket.gethostname()}: {tries} attempts in "
            f"{_text(limit)}, the last one: {failure}; see that rank 0 is running, has not failed before, {where}, "
            "that MASTER_ADDR is the machine of rank 0, under a name or address that this one can reach, and that no "
            f"firewall blocks port {port}. ZEROMESH_START_TIMEOUT sets how many seconds to wait"
        )
    # Torch waits for ever on a program that accepts connections and is not a store.
    answers: list[Any] = []
    size = environment.world_size
    in_background(lambda: _TCPStore(address, port, size, False, limit, wait_for_workers=False), answers)(
        max(1.0, end - time.monotonic())
    )
    if answers and not isinstance(answers[0], Exception):
        return answers[0]
    why = f": {_first_line(answers[0])}" if answers else ""
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

    thread = Worker(run)
    thread.start()
    return thread.join


def _serve(address: str, port: int, world_size: int, limit: timedelta) -> Any:
    # TCPStore itself listens on all interfaces. On one machine nobody else shall reach it.
    v4 = is_loopback(address) and address != LOOPBACK[2]
    listener, families = None, (socket.AF_INET,) if v4 else (socket.AF_INET6, socket.AF_INET)
    host = LOOPBACK[0] if address == LOOPBACK[1] else address if is_loopback(address) else ""
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
            host or "localhost",
            port,
            world_size,
            True,
            limit,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )
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
