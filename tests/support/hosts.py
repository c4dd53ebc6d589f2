"""Several hosts on one machine, with ranks on each and links whose rate is limited and whose bytes are counted.

    with Hosts(2, 2, rate="100mbit") as hosts:
        results = hosts.run(fn, *args)

The hosts are network namespaces where this machine permits them, and otherwise ``throttle``'s stand-in, with the same
ranks and results; the variable TEST_HOSTS names one of the two. Every host's link has the rate in each direction, at
the same time. Ranks of one host reach each other without it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import throttle
from harness import Place, Pool, RankFailure, run_command
from namespaces import Namespaces, NotPermitted, payload
from throttle import Throttle

KINDS = ("namespaces", "throttle")
VARIABLE = "TEST_HOSTS"

_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def bits_per_second(rate: str | None) -> float | None:
    """From ``tc``'s words, such as ``100mbit``; None is no limit.

    Raises:
        ValueError: it is no rate.
    """
    if rate is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if found is None or not float(found[1]):
        raise ValueError(f"the rate is {rate!r}, but must be a number with kbit, mbit or gbit, such as '100mbit'")
    return float(found[1]) * _UNITS[found[2]]


def make_network(kind: str, hosts: int, ranks: int) -> Namespaces | Throttle:
    """Return the network of a kind.

    Raises:
        ValueError: there is no such kind.
        NotPermitted: this machine does not permit it.
    """
    match kind:
        case "namespaces":
            return Namespaces(hosts)
        case "throttle":
            return Throttle(hosts, ranks)
    raise ValueError(f"hosts of the kind {kind!r} are asked for, but there are {' and '.join(KINDS)}")


class Hosts:
    """``hosts`` hosts with ``ranks`` ranks each; ranks are numbered host by host, as torchrun does.

    Attributes:
        kind: what they are, one of ``KINDS``.

    Args:
        hosts: number of hosts.
        ranks: number of ranks of each.
        rate: of every host's link, in ``tc``'s words; None is no limit.
        kind: one of ``KINDS``; None is the best that this machine permits, unless the variable says another.

    Raises:
        NotPermitted: namespaces are asked for by name, and this machine does not permit them.
        ValueError: there is no such kind or rate.
    """

    def __init__(self, hosts: int, ranks: int, rate: str | None = None, kind: str | None = None) -> None:
        self.hosts, self.ranks = hosts, ranks
        self._network = make_network(kind or best_kind(), hosts, ranks)
        self._pool = Pool(self._place, self._network.port)
        self.kind = self._network.kind
        try:
            self.set_rate(rate)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        """Number of ranks of all hosts."""
        return self.hosts * self.ranks

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks that run now."""
        return self._pool.pids

    def close(self) -> None:
        """End the ranks, and with them the hosts."""
        self._pool.close()
        self._network.close()

    def _place(self, rank: int) -> Place:
        host, local_rank = divmod(rank, self.ranks)
        numbers = {"LOCAL_RANK": local_rank, "GROUP_RANK": host, "LOCAL_WORLD_SIZE": self.ranks}
        variables = {name: str(number) for name, number in numbers.items()}
        return Place(self._network.prefix(host), variables | self.variables(host))

    def variables(self, host: int) -> dict[str, str]:
        """Return what every process of a host has in its environment."""
        return {"MASTER_ADDR": self.address(0), **self._network.variables(host)}

    def address(self, host: int) -> str:
        """By which other hosts reach a host."""
        return self._network.address(host)

    def port(self) -> int:
        """Return a TCP port that is free on every host."""
        return self._network.port()

    def set_rate(self, rate: str | None) -> None:
        """Limit every link from now on, as at the start."""
        self._network.set_rate(bits_per_second(rate))

    def sent(self) -> list[int]:
        """Bytes of payload that each host has sent over its link so far."""
        return self._network.sent()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 180,
        environment: Mapping[int, Mapping[str, str]] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank of every host; what each returned, by rank.

        Args:
            fn: function of an importable module.
            args: positional arguments, the same on every rank.
            timeout: seconds that all ranks have together.
            environment: by host, variables that its ranks get for this call.
            kwargs: keyword arguments, the same on every rank.

        Raises:
            RankFailure: if a rank raised, died, or did not return in time.
        """
        __tracebackhide__ = True
        variables = [dict((environment or {}).get(rank // self.ranks, {})) for rank in range(self.world_size)]
        outcomes = self._pool.run(fn, self.world_size, args, kwargs, timeout, variables=variables)
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise RankFailure(fn.__name__, outcomes)
        return [outcome.value for outcome in outcomes]

    def command(
        self, host: int, command: Sequence[str | Path], timeout: float = 180, **variables: str
    ) -> CompletedProcess[str]:
        """``harness.run_command`` on a host."""
        found = self.variables(host) | variables
        return run_command([*self._network.prefix(host), *command], timeout, **found)

    def commands(
        self, commands: Mapping[int, Sequence[str | Path]], timeout: float = 180, **variables: str
    ) -> dict[int, CompletedProcess[str]]:
        """One command on each of several hosts at the same time; what became of them, by host."""
        with ThreadPoolExecutor(len(commands)) as threads:
            begun = {host: threads.submit(self.command, host, line, timeout, **variables)
                     for host, line in commands.items()}  # fmt: skip
            return {host: future.result() for host, future in begun.items()}


def sent_by_this_host() -> int:
    """On a rank: bytes of payload that its host has sent over its link so far."""
    return throttle.this_rank().sent() if throttle.VARIABLE in os.environ else payload("self")


@functools.cache
def best_kind() -> str:
    """Return what the variable asks for, or namespaces where they are permitted."""
    if not os.environ.get(VARIABLE):
        try:
            Namespaces(1).close()
        except NotPermitted:
            return "throttle"
    return os.environ.get(VARIABLE) or "namespaces"


_shared: dict[str, Hosts] = {}


def session_hosts(kind: str | None = None) -> Hosts:
    """2 hosts with 2 ranks each, without a limit, that all tests of the session share; of the best kind by default."""
    kind = kind or best_kind()
    if kind not in _shared:
        _shared[kind] = Hosts(2, 2, kind=kind)
    _shared[kind].set_rate(None)
    return _shared[kind]


def close_session_hosts(kind: str | None = None) -> None:
    """End those of a kind, or all."""
    for name in [kind] if kind else list(_shared):
        if name in _shared:
            _shared.pop(name).close()
