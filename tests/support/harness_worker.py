"""One rank of the worker pool of ``harness.py``: takes calls from a socket and answers with their outcomes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import reprlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist

import throttle

imported = 0
"""Modules that the collector does not go through any more."""


def leave_when(gone: Callable[[], bool]) -> None:
    """End this process when the pytest process is gone, whatever it is doing."""

    def watch() -> None:
        while not gone():
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def is_gone(process: int) -> bool:
    """Return whether a process has ended and was waited for."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
    return False


def freeze_imports() -> None:
    """Spare further collections what the last call has imported: with transformers each would take 0.1 seconds."""
    global imported
    if len(sys.modules) > imported:
        gc.collect()
        gc.freeze()
        imported = len(sys.modules)


def reset(environment: dict[str, str]) -> None:
    """Take away what the last call may have left: its groups, settings, variables and memory.

    It is done before a call and not after it, when all ranks have answered and none needs another's group any more.
    """
    if throttle.VARIABLE in environment:
        throttle.this_rank().drain()
    gc.collect()  # what holds a group goes before the group
    if dist.is_initialized():
        dist.destroy_process_group()
    freeze_imports()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)  # more of them add up in another order
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)


def answer(request: dict[str, Any], rank: int, backend: str) -> Any:
    """Call the function in a process group of its own."""
    function, args, kwargs = pickle.loads(request["call"])
    world_size = request["world_size"]
    os.environ.update(WORLD_SIZE=str(world_size), MASTER_PORT=str(request["port"]))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(world_size))
    os.environ.update(request["variables"])
    one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    timeout = timedelta(seconds=request["timeout"] + 30)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{request['store']}" if one_host else "env://",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    if backend == "mpi":
        from zeromesh.comm.mpi import backend as mpi

        mpi.carry(timeout)
    return function(*args, **kwargs)


def operands() -> str:
    """Return the variables beside a failed assertion; pytest shows operands only in its own process."""
    kind, _, trace = sys.exc_info()
    if kind is not AssertionError or trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    lines = [f"{name} = {reprlib.repr(value)}" for name, value in trace.tb_frame.f_locals.items()]
    return "\n".join(["where", *lines, ""])


def serve(connection: Connection, rank: int, backend: str) -> None:
    """Answer calls until the parent closes the socket."""
    environment = dict(os.environ)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            reset(environment)
            reply = pickle.dumps(("returned", answer(request, rank, backend), time.time()))
        except BaseException:
            reply = pickle.dumps(("raised", traceback.format_exc() + operands(), time.time()))
        if coverage := sys.modules.get("coverage"):
            coverage.Coverage.current().save()  # the pool ends its workers with SIGKILL
        connection.send_bytes(reply)


def start(stacks: str) -> None:
    """Set what holds for a rank."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    if throttle.VARIABLE in os.environ:
        throttle.this_rank().install()
    torch.set_num_threads(1)
    freeze_imports()


def write_to(output: str) -> None:
    """Send what this process prints to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def forked(connection: Connection, output: str, stacks: str, environment: dict[str, str]) -> None:
    """Serve as a rank in a process that was forked from the nursery."""
    os.setsid()
    write_to(output)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):  # as with python -u
        setattr(sys, name, io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), write_through=True))
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    pytest = multiprocessing.parent_process()
    assert pytest is not None
    leave_when(lambda: not pytest.is_alive())
    start(stacks)
    connection.send_bytes(pickle.dumps(("ready", None, time.time())))
    serve(connection, int(environment["RANK"]), "gloo")


def main() -> None:
    """Arguments: the socket's descriptor, the file for stacks; or mpi, the socket's path, pytest's number."""
    if sys.argv[1] == "mpi":
        from zeromesh.comm.mpi import backend as mpi

        address, pytest = sys.argv[2], int(sys.argv[3])
        parent = os.getppid()
        leave_when(lambda: os.getppid() != parent or is_gone(pytest))
        rank, _ = mpi.rank_and_size()
        output, stacks = f"{address}.{rank}.out", f"{address}.{rank}.stacks"
        write_to(output)
        variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(value) for name, value in variables.items()})
        start(stacks)
        connection = Client(address, "AF_UNIX")
        connection.send((rank, os.getpid(), output, stacks))
        serve(connection, rank, "mpi")
        return
    descriptor, rank = int(sys.argv[1]), int(os.environ["RANK"])
    parent = os.getppid()
    leave_when(lambda: os.getppid() != parent)
    os.set_inheritable(descriptor, False)
    start(sys.argv[2])
    connection = Connection(descriptor)
    connection.send_bytes(pickle.dumps(("ready", None, time.time())))
    serve(connection, rank, "gloo")


if __name__ == "__main__":
    main()
