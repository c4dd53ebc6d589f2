"""Run a command as every rank of this node, with torchrun's library: rendezvous, watching, restarts, ending."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    MultiprocessContext,
    SignalException,
    Std,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zeromesh.apps.launch.signed_rendezvous import RUN, signed_rendezvous
from zeromesh.comm.failure import HASTE, SAVED, SAVED_AND_ENDED, RankFailure, first_failure, grace, handled_signals
from zeromesh.comm.interface import own_address
from zeromesh.comm.launchers import ALONE
from zeromesh.comm.rank import FAILURES, OUTPUT
from zeromesh.comm.rendezvous import in_background, reach
from zeromesh.comm.trust import LASTING, TOKEN, sign

PREFIX = "[${rank}] "  # begins each line of a rank whose output is copied
KILLED_BEFORE = 1.0  # seconds before a rank that ends the run goes, in which stopped ones are killed

# Signals that are passed on to the ranks, and end the run.
SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"))


@dataclass(frozen=True)
class LaunchPlan:
    """Ranks to start, and their rendezvous."""

    ranks: int  # on this node
    least_nodes: int = 1  # with fewer nodes the run does not begin, or go on
    most_nodes: int = 1  # with more it does not go on
    master: str = ""  # HOST:PORT of the rendezvous; empty for one node, which uses a free port on loopback
    node_rank: int | None = None  # 0 on the node that is the master; None to find out by its host name
    restarts: int = 0  # how often all ranks may be started again after one failed
    timeout: float = 300.0  # seconds that nodes have to find each other
    secret: bytes = field(default=b"", repr=False)  # of all nodes; must not get into logs
    variables: Mapping[str, str] = field(default_factory=dict)  # for the ranks, beside this process's and torchrun's
    start_method: str = "spawn"  # or fork, for functions


def run(command: Sequence[Any], plan: LaunchPlan, folder: Path, report: Callable[[str], None]) -> Mapping[int, Any]:
    """Run a command or a function as every rank of this node, wait for it, and return a function's results by rank.

    ``folder`` is an empty one for files that live as long as the run. ``report`` receives lines for the user.

    Raises:
        ValueError: this system has no groups of processes.
        RankFailure: a rank of this node raised or died, and no restarts were left. The others have been ended.
        ConnectionError: the master cannot be reached, or its port is in use.
        TimeoutError: too few nodes came.
        KeyboardInterrupt: on Ctrl-C, once all ranks have ended.
        SystemExit: on another of ``SIGNALS``.
    """
    if not hasattr(os, "killpg"):
        raise ValueError(
            "several ranks need Linux or macOS, whose processes end in groups; on Windows use WSL2, or one rank, which "
            "is this process"
        )
    with ExitStack() as stack:
        # From now on, as nodes may wait for others for long; torchrun's library sets the same ones for the ranks.
        stack.enter_context(handled_signals(_end, SIGNALS))
        # Keep torchrun's own log lines off the terminal: this process only waits, and the ranks speak for themselves.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.ERROR)
        if plan.restarts:
            # Ranks that are started again must not find what those before left in the store, such as their addresses;
            # the one that torchrun's library shares with them by default stays the same.
            stack.enter_context(_variables({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}))
        if callable(command[0]):  # before spawned ranks import torch, which reads them
            stack.enter_context(_variables(plan.variables))
        try:
            agent = _agent(command, plan, folder, report)
            stack.enter_context(handled_signals(agent.pass_on, (signal.SIGUSR1, signal.SIGUSR2)))
            closes = True
            try:
                result = agent.run()
            except SignalException:
                closes = False  # other nodes may go on
                raise
            finally:
                if closes:
                    agent.rendezvous.shutdown()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            if (folder / SAVED).exists():
                raise SystemExit(SAVED_AND_ENDED) from None
            raise SystemExit(128 + error.sigval) from None
        except elastic.RendezvousTimeoutError:
            raise TimeoutError(
                f"fewer than {plan.least_nodes} nodes met at {plan.master} in {plan.timeout:.0f} s; start zeromesh "
                "launch with the same --nnodes, --master and secret on every node, see what it says there, or lower "
                "--nnodes"
            ) from None
        except elastic.RendezvousStateError:
            raise ConnectionError(
                f"what nodes tell each other at {plan.master} is not signed with this node's secret: nodes have "
                "different secrets, or a stranger writes there; pass the same --secret-file on every node"
            ) from None
        except elastic.RendezvousClosedError:
            raise ConnectionError(f"the run at {plan.master} has ended already; start it anew on all nodes") from None
        except elastic.RendezvousConnectionError:
            raise ConnectionError(
                f"the master {plan.master} has gone: zeromesh launch has ended there, or the network has failed; see "
                "its output, and start the run anew on all nodes"
            ) from None
    if result is not None and result.is_failed():
        assert agent.failure is not None
        raise agent.failure
    return {} if result is None else result.return_values


def _agent(command: Sequence[Any], plan: LaunchPlan, folder: Path, report: Callable[[str], None]) -> _Agent:
    local = _address_towards(plan) if plan.master else "127.0.0.1"
    rendezvous = _rendezvous(plan, local) if plan.master else _Loopback(plan.timeout)
    spec = WorkerSpec(
        role="rank",
        local_world_size=plan.ranks,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=plan.restarts,
        monitor_interval=0.1,
        local_addr=local,
    )
    # The ranks of a launch that is alone are several.
    variables = {**plan.variables, FAILURES: str(folder), ALONE: ""}
    streams = _Output(folder, variables, plan.start_method == "fork", plan.secret)
    return _Agent(spec, streams, plan.start_method, folder, report)


def _rendezvous(plan: LaunchPlan, local: str) -> elastic.RendezvousHandler:
    """Join the rendezvous of the nodes."""
    if not plan.secret:
        raise ValueError("several nodes need a secret that they share")
    # A node that is gone is missed after six seconds, and after five more the others go on without it.
    options: dict[str, Any] = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3, "last_call_timeout": 5}
    if plan.node_rank is not None:
        options["is_host"] = plan.node_rank == 0
    parameters = elastic.RendezvousParameters(
        backend="c10d",
        endpoint=plan.master,
        run_id=RUN,
        min_nodes=plan.least_nodes,
        max_nodes=plan.most_nodes,
        local_addr=local,
        join_timeout=int(plan.timeout),
        read_timeout=max(1, int(plan.timeout)),
        **options,
    )
    end, failure = time.monotonic() + plan.timeout, ""
    if plan.node_rank:
        host, _, port = plan.master.rpartition(":")
        failure = reach(host.strip("[]"), int(port), end)[1]
    results: list[Any] = []
    if not failure:
        # In a thread: torch waits for ever where the master is no store, and ignores Ctrl-C meanwhile.
        in_background(lambda: signed_rendezvous(parameters, plan.secret), results)(max(1.0, end - time.monotonic()))
        if results and not isinstance(results[0], Exception):
            handler: elastic.RendezvousHandler = results[0]
            return handler
        if results and not isinstance(results[0], elastic.RendezvousConnectionError):
            raise results[0]
        failure = str(results[0].__cause__ or results[0]) if results else "what listens there is no zeromesh launch"
    raise ConnectionError(
        f"{socket.gethostname()} could not reach the master {plan.master} in {plan.timeout:.0f} s; start zeromesh "
        "launch with the same --nnodes and --master on the node that --master names too, with --node-rank 0, and see "
        f"that no firewall or other program holds the port: {failure}"
    )


class _Loopback(StaticTCPRendezvous):
    """Rendezvous of a single node. Each start of its ranks gets a new store on the loopback interface."""

    # torch's own for one node keeps pickled state in a store that takes connections from everybody.

    def __init__(self, timeout: float) -> None:
        super().__init__("127.0.0.1", 0, 0, 1, RUN, max(1, int(timeout)))
        self._server: Any = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Make the store, and one of this process for the agent."""
        listener = socket.create_server((self.master_addr, 0), backlog=2048)
        port = int(listener.getsockname()[1])
        # Kept here, as it ends with the object. The socket is made before, as TCPStore would listen on all interfaces.
        self._server = dist.TCPStore(  # type: ignore[attr-defined]
            self.master_addr, port, None, True, self.timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.master_addr, port))

    def shutdown(self) -> bool:
        """End the store."""
        self._server = None
        return True


class _Output(DefaultLogsSpecs):
    """Log settings for the agent: rank 0 keeps the terminal, torchrun's ``tee`` copies what the others write."""

    def __init__(self, folder: Path, variables: dict[str, str], forks: bool, secret: bytes) -> None:
        super().__init__(log_dir=str(folder))  # of the files that the copied output passes through
        self._secret = secret or secrets.token_bytes(32)
        self._variables = variables  # torch has no other place for further variables of the ranks
        self._forks = forks

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destinations for one start of the ranks, given their variables by local rank."""
        replaced = sys.stdout is not sys.__stdout__  # as in a notebook, where descriptor 1 is not what the user sees
        self._tee = {local: Std.ALL if replaced or int(env["RANK"]) else Std.NONE for local, env in envs.items()}
        for variables in envs.values():
            # Another token for each start of the ranks, which all nodes know without another message.
            place = (variables[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
            keys = {TOKEN: sign(self._secret, "start", *place), LASTING: sign(self._secret, "run")}
            variables.update(self._variables, **{name: key.hex() for name, key in keys.items()})
        destination = super().reify(envs)
        if self._forks:
            # torch redirects the descriptors of ``sys.stdout``, which a notebook's stream may not have.
            for local in destination.tee_stdouts:
                envs[local][OUTPUT] = str(Path(destination.stdouts[local]).parent)
            destination.stdouts = destination.stderrs = dict.fromkeys(envs, "")
        return destination


class _Agent(LocalElasticAgent):
    """torchrun's agent, which reports restarts and does not wait long for ranks that it ends."""

    def __init__(
        self, spec: WorkerSpec, streams: _Output, start_method: str, folder: Path, report: Callable[[str], None]
    ) -> None:
        super().__init__(spec, streams, start_method, log_line_prefix_template=PREFIX)
        self.rendezvous = spec.rdzv_handler
        self.failure: RankFailure | None = None  # the first one of the last start
        self._folder = folder
        self._report = report
        self._left = spec.max_restarts
        self._world = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for file in (*self._folder.glob("*.failure"), *self._folder.glob("*.step")):
            file.unlink()  # of the ranks before
        world = worker_group.workers[0].world_size
        if self._world and self._world != world:
            self._report(f"the run goes on with {world} rank{'s' * (world > 1)} instead of {self._world}")
        elif self._world and self.failure is None:
            self._report("the ranks are started again, because nodes came or went")
        self.failure, self._world = None, world
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._kill_stopped()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and isinstance(self._pcontext, MultiprocessContext):
            # Ranks of a function stay until all have returned. torch would wait for one that is gone for ever.
            for rank, process in enumerate(self._pcontext._pc.processes if self._pcontext._pc else ()):
                if process.exitcode == 0:
                    raise RankFailure(rank, "the function ended the process with status 0; let it return")
        if result.is_failed():
            if (self._folder / SAVED).exists() and {f.exitcode for f in result.failures.values()} == {SAVED_AND_ENDED}:
                raise SystemExit(SAVED_AND_ENDED)  # a batch system told the ranks alone
            exitcodes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self.failure = first_failure(self._folder, exitcodes)
            if self._left:
                self._left -= 1
                restarts = worker_group.spec.max_restarts - self._left
                self._report(
                    f"{self.failure}\nall ranks are started again ({restarts} of {worker_group.spec.max_restarts})"
                )
        return result

    def _kill_stopped(self) -> None:
        """Kill stopped ranks of a run that another rank is about to end."""
        # They heed no SIGTERM, and torch would wait for them for 30 seconds. Not at once, as they may go on meanwhile.
        records = [json.loads(file.read_text(encoding="utf-8")) for file in self._folder.glob("*.failure")]
        ends = min((record["at"] + record["lingers"] for record in records if record["lingers"]), default=math.inf)
        if time.time() > ends - KILLED_BEFORE and self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                with suppress(OSError):
                    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t"):
                        os.kill(pid, signal.SIGKILL)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        with handled_signals(self._end_at_once, SIGNALS):
            # Ranks that outlive a failed one have nothing to save, and may heed no signal: they wait for it.
            # The ranks are ended here: before torch 2.13 its method takes no time to wait for them.
            ranks, self._pcontext = self._pcontext, None
            try:
                super()._shutdown(death_sig)
            finally:
                self._pcontext = ranks
            if ranks is not None:
                ranks.close(death_sig, grace(death_sig) if self.failure is None else HASTE)  # type: ignore[arg-type]
        if self._worker_group.state is not WorkerState.SUCCEEDED:
            self._end_at_once()  # what ranks left behind that died

    def pass_on(self, number: int, _: Any) -> None:
        """Hand a signal to the ranks, and go on."""
        for pid in self._pcontext.pids().values() if self._pcontext else ():
            with suppress(OSError):
                os.kill(pid, number)

    def _end_at_once(self, *_: object) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext else ():
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _address_towards(plan: LaunchPlan) -> str:
    """Return this machine's address on the way to the master."""
    host, port = plan.master.rsplit(":", 1)
    try:
        # torch would give the others this machine's name, which they need not be able to look up.
        address = own_address(host.strip("[]"), int(port))
    except OSError as error:
        raise ConnectionError(
            f"the master {plan.master} cannot be found from {socket.gethostname()} ({error}); --master takes the name "
            "or address of the first node as the other nodes know it, and a free port: --master HOST:29500"
        ) from None
    if plan.node_rank == 0:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            # A run that has just ended leaves connections of the port behind, which do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except OSError as error:
                raise ConnectionError(
                    f"port {port} of --master {plan.master} cannot be used on {socket.gethostname()} "
                    f"({error.strerror}): another program, or another run, listens on it; choose another port on all "
                    "nodes"
                ) from None
    return address


def _end(number: int, _: Any) -> None:
    raise SignalException(f"got signal {number}", signal.Signals(number))


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in this context, unless they are set."""
    additions = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(additions)
    try:
        yield
    finally:
        for name in additions:
            del os.environ[name]
