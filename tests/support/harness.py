"""Tests on several ranks: worker processes that are started once per session, and commands with a time limit.

``on_ranks`` decorates tests that run on ranks with their asserts, ``run_ranks`` calls a function there for its results,
``run_mpi_ranks`` does the same on ranks that ``mpiexec`` starts, ``spawn_ranks`` is for tests that kill ranks,
``run_command`` for command lines.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Listener, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(
    {str(file.parent) for folder in ("tests", "benchmarks", "tools") for file in (ROOT / folder).rglob("*.py")}
)
"""Folders of the modules that tests import, for the module path of programs that tests start."""
STARTED = str(Path(__file__).parent / "started")
"""Folder whose sitecustomize.py programs that tests start run first."""
START_LIMIT = 120.0
"""Seconds that importing torch may take on a busy machine."""
HEAVY = ("transformers.modeling_utils", "transformers.models.llama.modeling_llama")
"""Modules that ranks are forked with where the pytest process has imported them too."""
READ_LATER = (
    "PYTEST_", "ZEROMESH_", "HOROVOD_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GLOO_", "NCCL_",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
"""Beginnings of variables that are read when they are needed. Some are set by what tests call in the pytest process."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: ``kind`` is returned, raised, died or hung.

    ``value`` is what it returned, ``text`` its traceback, its signal or its stack, ``output`` what it printed,
    ``at`` when it was known (seconds since the epoch).
    """

    rank: int
    kind: str
    value: Any
    text: str
    output: str
    at: float


class RankFailure(Exception):
    """A rank raised, died or hung; the message shows all ranks, the first failure first."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = sorted((o for o in outcomes if o.kind != "returned"), key=lambda o: (o.kind == "hung", o.at))
        blocks = [_block(outcome) for outcome in failed]
        well = [str(o.rank) for o in outcomes if o.kind == "returned"]
        blocks += [f"ranks that returned: {', '.join(well)}"] if well else []
        super().__init__(f"{name} failed on {len(failed)} of {len(outcomes)} ranks\n\n" + "\n\n".join(blocks))


def _block(outcome: Outcome) -> str:
    text = f"---- rank {outcome.rank} {outcome.kind} ----\n{outcome.text.rstrip()}"
    return text + (f"\n-- its output --\n{outcome.output.rstrip()}" if outcome.output.strip() else "")


@dataclass(frozen=True)
class Place:
    """Where a rank runs: what its command begins with, and the variables that it gets beside RANK."""

    prefix: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def this_machine(rank: int) -> Place:
    """Return the place of every rank where there is one host: the loopback interface."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    return Place(
        variables={
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": interface,
        }
    )


def free_port() -> int:
    """Return a TCP port of the loopback interface without a listener, which no outgoing connection gets meanwhile."""
    draw = random.SystemRandom()  # not the generator that tests seed, or two pytest processes would draw the same
    while True:
        port = draw.randrange(15000, 28000)  # below those of outgoing connections, and of torchrun and zeromesh
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class MpiProcess:
    """A process that ``mpiexec`` started, with those methods of ``Popen`` that the pool uses."""

    pid: int
    launcher: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return None
        return self.launcher.poll() or 1

    def wait(self, timeout: float = START_LIMIT) -> None:
        limit = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class ForkedProcess:
    """A process that was forked from the nursery, with those methods of ``Popen`` that the pool uses."""

    process: ForkServerProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self.process.join(timeout)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a process takes over at its start: the variables that libraries read once."""
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATER)}


def module_path() -> str:
    """Return this process's module path for a program, which sitecustomize.py begins."""
    return os.pathsep.join([STARTED, *(path or os.getcwd() for path in sys.path)])


@functools.cache
def nursery() -> tuple[ForkServerContext, dict[str, str]]:
    """Start a process that has imported torch and ZeroMesh, and forks ranks in hundredths of a second.

    Returns:
        The context of ``multiprocessing``, and what the process has inherited: others need a process of their own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*(name for name in HEAVY if name in sys.modules), "nursery"])
    with patch.dict(os.environ, PYTHONPATH=module_path().removeprefix(STARTED + os.pathsep)):
        forkserver.ensure_running()
    return context, inherited(os.environ)


def _forked(*arguments: Any) -> None:
    importlib.import_module("harness_worker").forked(*arguments)  # not above: it imports torch


@dataclass
class Worker:
    """One worker process with its socket and the files that it writes."""

    rank: int
    process: subprocess.Popen[bytes] | MpiProcess | ForkedProcess
    connection: Connection
    output: Path
    stacks: Path
    read: int = 0

    def new_output(self) -> str:
        """Return what the worker has printed since the last call began."""
        return self.output.read_bytes()[self.read :].decode(errors="replace")

    def death(self) -> str | None:
        """How the process ended, or None if it lives."""
        code = self.process.poll()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def stack(self) -> str:
        """Return the Python stacks of all its threads; it must have been asked for by SIGUSR1."""
        text = ""
        for _ in range(40):
            time.sleep(0.05)
            text = self.stacks.read_text(errors="replace")
            if text.endswith("in <module>\n"):  # the main thread's outermost frame is written last
                break
        return text or f"no stack: the process does not answer signals; its threads:\n{self.threads()}"

    def threads(self) -> str:
        """Return name, state and system call of each thread, as the kernel sees them; nothing where it does not say."""
        lines = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                lines.append(" ".join((task / name).read_text().strip() for name in ("stat", "wchan", "syscall")))
        return "\n".join(lines)

    def kill(self) -> None:
        """End the process with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            if isinstance(self.process, MpiProcess):  # its process group may be another's
                self.process.send_signal(signal.SIGKILL)
            else:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class Pool:
    """Workers for ranks 0, 1, ...; started when first needed, and anew after any failure.

    Args:
        place: where each rank runs.
        port: gives a port for MASTER_PORT, another one for each call.
    """

    def __init__(self, place: Callable[[int], Place] = this_machine, port: Callable[[], int] = free_port) -> None:
        self._place = place
        self._port = port
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._workers: list[Worker] = []
        self._environment: dict[str, str] = {}  # of all workers, whatever variables the test has that needs another one
        self._calls = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process numbers of the workers that run now."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers and remove their files."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = 180,
        grace: float = 0.5,
        variables: Sequence[Mapping[str, str]] | None = None,
    ) -> list[Outcome]:
        """Call ``fn`` on every rank and collect the outcomes.

        Args:
            fn: function of an importable module.
            world_size: number of ranks.
            args: positional arguments, the same on every rank.
            kwargs: keyword arguments, the same on every rank.
            timeout: seconds that all ranks have together, without the start of the workers.
            grace: seconds that the others still have after the first failure.
            variables: environment variables of each rank, for this call.
        """
        call = pickle.dumps((fn, tuple(args), kwargs or {}))
        outcomes: dict[int, Outcome] = {}
        try:
            self._start(world_size)
            self._send(call, world_size, timeout, variables or [{}] * world_size)
            self._collect(outcomes, world_size, timeout, grace)
        finally:
            if len(outcomes) < world_size or any(outcome.kind != "returned" for outcome in outcomes.values()):
                self._kill()
        return [outcomes[rank] for rank in range(world_size)]

    def _start(self, world_size: int) -> None:
        if any(worker.death() for worker in self._workers):
            self._kill()
        if not self._workers:
            self._environment = dict(os.environ)
        new = [self._launch(rank) for rank in range(len(self._workers), world_size)]
        self._workers += new
        limit = time.monotonic() + START_LIMIT
        for worker in new:
            if not worker.connection.poll(max(0.0, limit - time.monotonic())):
                raise RuntimeError(f"worker {worker.rank} did not start in {START_LIMIT} s: {worker.new_output()}")
            try:
                worker.connection.recv_bytes()
            except EOFError:
                raise RuntimeError(f"worker {worker.rank} did not start: {worker.new_output()}") from None

    def _launch(self, rank: int) -> Worker:
        stem = self._folder / f"{time.monotonic_ns()}-{rank}"
        output, stacks = stem.with_suffix(".out"), stem.with_suffix(".stacks")
        output.touch()
        place = self._place(rank)
        environment = self._environment | {"PYTHONPATH": module_path(), "RANK": str(rank), **place.variables}
        context, given = nursery()
        if not place.prefix and given == inherited(self._environment):
            own, other = context.Pipe()
            with other:
                arguments = (other, str(output), str(stacks), environment)
                process = context.Process(target=_forked, args=arguments)
                process.start()
            return Worker(rank, ForkedProcess(process), own, output, stacks)
        ours, theirs = socket.socketpair()
        script = Path(__file__).with_name("harness_worker.py")
        with theirs, output.open("wb") as file:
            started = subprocess.Popen(
                [*place.prefix, sys.executable, "-u", str(script), str(theirs.fileno()), str(stacks)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        return Worker(rank, started, Connection(ours.detach()), output, stacks)

    def _send(self, call: bytes, world_size: int, timeout: float, variables: Sequence[Mapping[str, str]]) -> None:
        self._calls += 1
        port, store = self._port(), str(self._folder / f"{self._calls}.store")
        request = {"call": call, "world_size": world_size, "store": store, "port": port, "timeout": timeout}
        for worker, more in zip(self._workers, variables, strict=False):
            worker.read = worker.output.stat().st_size
            worker.connection.send(request | {"variables": dict(more)})

    def _collect(self, outcomes: dict[int, Outcome], world_size: int, timeout: float, grace: float) -> None:
        waiting = {worker.connection: worker for worker in self._workers[:world_size]}
        limit = time.monotonic() + timeout
        while waiting and time.monotonic() < limit:
            ready = {connection for connection in wait(list(waiting), 0.1) if isinstance(connection, Connection)}
            ready |= {connection for connection, worker in waiting.items() if worker.death()}
            for connection in ready:
                worker = waiting.pop(connection)
                outcomes[worker.rank] = outcome = _receive(worker)
                if outcome.kind != "returned":
                    limit = min(limit, time.monotonic() + grace)
        for worker in waiting.values():
            worker.process.send_signal(signal.SIGUSR1)
        for worker in waiting.values():
            outcomes[worker.rank] = Outcome(worker.rank, "hung", None, worker.stack(), worker.new_output(), time.time())

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []


def mpiexec() -> Path:
    """Return the launcher of the MPI that pip brought into this environment, else the system's."""
    own = Path(sys.executable).with_name("mpiexec")
    found = own if own.exists() else shutil.which("mpiexec")
    assert found is not None, "there is no mpiexec; pip install mpich brings one"
    return Path(found)


class MpiPool(Pool):
    """Workers that are the ranks of one ``mpiexec``; all of them take part in every call."""

    def __init__(self) -> None:
        super().__init__()
        self._launcher: subprocess.Popen[bytes] | None = None

    def _start(self, world_size: int) -> None:
        if any(worker.death() for worker in self._workers):
            self._kill()
        if self._workers:
            assert len(self._workers) == world_size, "a pool of mpiexec has one size"
            return
        address, said = str(self._folder / f"{time.monotonic_ns()}.socket"), self._folder / "mpiexec.out"
        script = Path(__file__).with_name("harness_worker.py")
        environment = os.environ | {"PYTHONPATH": module_path()}
        command = [mpiexec(), "-n", str(world_size), sys.executable, "-u", script, "mpi", address, str(os.getpid())]
        with Listener(address, "AF_UNIX") as listener, said.open("wb") as file:
            self._launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            accepting = listener._listener._socket  # type: ignore[attr-defined]
            accepting.settimeout(START_LIMIT)
            for _ in range(world_size):
                try:
                    connection = listener.accept()
                except TimeoutError:
                    self._kill()
                    raise RuntimeError(f"mpiexec did not start {world_size} ranks: {said.read_text()}") from None
                rank, pid, output, stacks = connection.recv()
                process = MpiProcess(pid, self._launcher)
                self._workers.append(Worker(rank, process, connection, Path(output), Path(stacks)))
        self._workers.sort(key=lambda worker: worker.rank)

    def _kill(self) -> None:
        super()._kill()
        if self._launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
            self._launcher = None


def _receive(worker: Worker) -> Outcome:
    """Return the outcome of a worker that has answered or ended."""
    try:
        kind, value, at = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.wait(5)
        return Outcome(
            worker.rank, "died", None, worker.death() or "closed its socket", worker.new_output(), time.time()
        )
    text = value if kind == "raised" else ""
    return Outcome(worker.rank, kind, None if text else value, text, worker.new_output(), at)


@functools.cache
def session_pool() -> Pool:
    """Return the pool that all tests of the session share."""
    return Pool()


@functools.cache
def mpi_pool(world_size: int) -> MpiPool:
    """Return the same for ranks of ``mpiexec``: one pool for each number of them."""
    _mpi_pools.append(pool := MpiPool())
    return pool


_mpi_pools: list[MpiPool] = []


def close_pools() -> None:
    """End all that the session has started."""
    for pool in (session_pool(), *_mpi_pools):
        pool.close()
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        os.kill(pid, signal.SIGKILL)  # it has no own method to end, and would write its coverage while that is read


@contextlib.contextmanager
def pretended_rank(rank: int, size: int) -> Iterator[None]:
    """Be one of so many ranks, whose messages go nowhere; a group that an earlier test has left is ended."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180, **kwargs: Any) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank; what each returned, by rank.

    Raises:
        RankFailure: if a rank raised, died, or did not return within ``timeout`` seconds.
    """
    __tracebackhide__ = True
    return _values(fn, session_pool().run(fn, world_size, args, kwargs, timeout))


class _Body:
    """The test that ``on_ranks`` wraps, pickled as a name: in its module the wrapper has that name."""

    def __init__(self, test: Callable[..., None]) -> None:
        self.test, self.__name__ = test, test.__name__

    def __call__(self, **arguments: Any) -> None:
        self.test(**arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _body_of, (self.test.__module__, self.test.__name__)


def _body_of(module: str, name: str) -> Callable[..., None]:
    body: Callable[..., None] = getattr(importlib.import_module(module), name).__wrapped__
    return body


def on_ranks(world_size: int | str, timeout: float = 180) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test to run, with its asserts, on so many ranks, or as many as its parameter of that name says."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(**arguments: Any) -> None:
            __tracebackhide__ = True
            ranks = arguments[world_size] if isinstance(world_size, str) else world_size
            run_ranks(_Body(test), ranks, timeout=timeout, **arguments)

        return on_all

    return decorate


def run_mpi_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180, **kwargs: Any
) -> list[Any]:
    """As ``run_ranks``, on ranks that ``mpiexec`` started, whose engines send their messages over MPI."""
    __tracebackhide__ = True
    return _values(fn, mpi_pool(world_size).run(fn, world_size, args, kwargs, timeout))


def _values(fn: Callable[..., Any], outcomes: Sequence[Outcome]) -> list[Any]:
    __tracebackhide__ = True
    if any(outcome.kind != "returned" for outcome in outcomes):
        raise RankFailure(fn.__name__, outcomes)
    return [outcome.value for outcome in outcomes]


def spawn_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[Outcome]:
    """Call ``fn(*args, **kwargs)`` on every rank in fresh processes; the outcomes, whatever they are.

    After a failure the other ranks have the whole of ``timeout`` to find out.
    """
    with Pool() as pool:
        return pool.run(fn, world_size, args, kwargs, timeout, grace=timeout)


def run_command(
    command: Sequence[str | Path], timeout: float = 180, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line with ``variables`` added to the environment, stdout and stderr as one text.

    Whatever its exit status is, it is returned. Raises AssertionError with the output so far, having ended the
    command and all that it started, if it takes longer than ``timeout`` seconds.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=os.environ | variables,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} did not end in {timeout} s; its output:\n{output}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")
