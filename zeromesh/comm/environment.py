"""Environment of a process, and the start of the process group."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from zeromesh.base.words import counted
from zeromesh.comm import interface, local, nodes, peers, trust
from zeromesh.comm.detect import VARIABLES, Environment, is_launched
from zeromesh.comm.failure import StartError
from zeromesh.comm.launchers import FILE, MPI, TORCHRUN, names_of
from zeromesh.comm.messages import backends
from zeromesh.comm.mpi import backend as mpi
from zeromesh.comm.rendezvous import join_rendezvous, leave, start_limit

__all__ = [
    "VARIABLES", "Environment", "StartError", "backends", "default_backend", "device_for", "device_of_group",
    "init_distributed", "is_launched", "shutdown",
]  # fmt: skip

LEAVING = 1.0  # seconds after which a process that waits for gloo's threads ends all the same

# Consecutive times that no thread may be busy: one that waits for the lock looks idle between two tries.
QUIET = 3

_GLOO = "pt_gloo_runloop"  # torch's name of the threads that run gloo's collectives

_farewells: list[weakref.finalize[..., Any]] = []  # of the process group of all ranks

_log = logging.getLogger("zeromesh")


def default_backend(environment: Environment | None = None) -> str:
    """Return the communication backend that ``"auto"`` stands for; see ``init_distributed``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return dist.get_default_backend_for_device(accelerator)
    if environment is None or environment.launcher not in MPI:
        return "gloo"
    missing = "" if dist.is_mpi_available() else mpi.missing() or _other_mpi(environment)
    if missing and environment.rank == 0:
        _log.info("the backend is gloo, not mpi, as %s", missing)
    return "gloo" if missing else "mpi"


def device_for(environment: Environment, backend: str) -> torch.device:
    """Return the device of this rank's tensors; raise ValueError if the backend needs more devices than there are."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # gloo carries CUDA tensors too (through the host), also of several ranks that share one device.
    if accelerator is None or (backend == "gloo" and accelerator.type != "cuda") or backend == "mpi":
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    # A rank that Slurm or MPI started may see no device but its own.
    started_apart = environment.launcher not in ("torchrun", "single") and "CUDA_VISIBLE_DEVICES" in os.environ
    # All ranks of the node raise, not only those that get no device: the others would wait for them.
    if environment.local_world_size > devices and backend != "gloo" and not (devices == 1 and started_apart):
        row = names_of(environment.launcher)
        local_size = row.tasks_per_node[0] if row.tasks_per_node else row.name_of("local_world_size")
        raise ValueError(
            f"{row.name_of('local_rank')} is {environment.local_rank}, but this node has "
            f"{counted(devices, f'{accelerator.type} device')} for {local_size} = "
            f"{environment.local_world_size}, and {backend} needs one for each rank; "
            f"start at most {counted(devices, 'rank')} per node, or use the backend gloo"
        )
    return torch.device(accelerator.type, environment.local_rank % devices)


def device_of_group(environment: Environment) -> torch.device:
    """Return the device of this rank's tensors in the process group that has been started."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backend = None if accelerator is None or mpi.carries() else backends().get(accelerator.type)
    return torch.device("cpu") if backend is None else device_for(environment, backend)


def init_distributed(
    dist_backend: str | None = "auto",
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = False,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    start_timeout: timedelta | None = None,
    environment: Environment | None = None,
) -> Environment:
    """Start the process group, unless somebody has, and make this rank's device the current one.

    The arguments up to ``world_size`` are those of DeepSpeed's function of this name, in its order.

    Args:
        dist_backend: nccl, gloo, mpi, or another that torch was built with; "auto" or None chooses nccl on CUDA, mpi
            for CPU ranks that MPI started, where it can be used, else gloo.
        auto_mpi_discovery: False refuses to be started by MPI alone.
        distributed_port: port of the master, where neither MASTER_PORT nor torchrun says it.
        verbose: say in the log how many ranks there are, and on which backend.
        timeout: how long a collective may take before it fails; None is torch's default for the backend.
        init_method: ``tcp://address:port`` of the master in place of MASTER_ADDR and MASTER_PORT, or ``file://path`` of
            a new file that all ranks see, where they meet instead; ``env://`` changes nothing. The first two may end
            in ``?rank=0&world_size=2``, as torch takes them.
        dist_init_required: False refuses to start a group.
        config: nothing of it is needed here; pass it to ``initialize``.
        rank: global number of this process, where no launcher tells it; with ``world_size``.
        world_size: number of processes.
        start_timeout: how long to wait for the other ranks; None is the seconds in ZEROMESH_START_TIMEOUT, or 300.
        environment: who this process is; None reads the launcher's variables.

    Returns:
        The environment of this process, with the place on its node as it is.

    Raises:
        ValueError: if the variables or arguments are wrong, there are too few devices, or the backend is unknown.
        StartError: a RuntimeError: this machine's torch lacks the backend, ranks do not find each other in time, one
            of them cannot start, or their versions differ.
    """
    atexit.unregister(_await_gloo)  # this may be called again
    atexit.register(_await_gloo)
    if dist.is_initialized():
        return environment or _environment_of_group()
    if dist_init_required is False:
        raise StartError(
            "dist_init_required is False, but no process group has been started; call "
            "torch.distributed.init_process_group before, or leave the argument out"
        )
    limit = start_limit(start_timeout)
    variables = _variables(os.environ, init_method, rank, world_size)
    process = environment or Environment.detect(variables)
    if not auto_mpi_discovery and process.launcher in MPI:
        raise ValueError(
            f"auto_mpi_discovery is False, but {names_of(process.launcher).command} started this process, and nothing "
            "else says which rank it is; leave it True, or set torchrun's variables"
        )
    backend = default_backend(process) if dist_backend in (None, "auto") else str(dist_backend)
    if backend not in dist.Backend.backend_list:
        raise ValueError(
            f"dist_backend is {backend!r}, but torch knows {', '.join(available_backends())}; use one of them, or auto"
        )
    process = _with_master(process, backend, distributed_port)
    problem, device = None, torch.device("cpu")
    try:  # what is wrong here is raised only after the others know of it: they would wait for this rank
        require_backend(backend)
        if backend == "mpi" and not dist.is_mpi_available() and (stranger := _other_mpi(process)):
            raise StartError(stranger)
        if process.placed:
            device = _take_device(process, backend)
    except (ValueError, RuntimeError) as error:
        problem = error
    process, device = _start(process, backend, device, timeout, limit, problem)
    process = _checked(process, backend, device)
    # Not what arguments say: others may follow in the same process.
    if environment is None and process.world_size > 1 and variables.get("RANK") == os.environ.get("RANK"):
        _publish(process)
    if verbose and process.rank == 0:
        _log.info(
            "%s on %s, started by %s, backend %s",
            counted(process.world_size, "rank"),
            counted(process.node_count, "node"),
            process.launcher,
            backend,
        )
    return process


def shutdown() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        local.close()
        for farewell in _farewells:
            farewell()
        dist.destroy_process_group()


def _leave_at_exit(environment: Environment, store: trust.SealedStore) -> None:
    """Leave the store when this process ends, or the group is shut down."""
    for farewell in _farewells:  # of a group that somebody else has ended
        farewell.detach()
    # The class lives as long as the process, whose end runs finalizers from the newest to the oldest: the watchdog's
    # come before.
    _farewells[:] = [weakref.finalize(Environment, leave, environment, store, os.getpid())]


def _take_device(environment: Environment, backend: str) -> torch.device:
    """Return the device of this rank, which becomes the current one."""
    device = device_for(environment, backend)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def _publish(environment: Environment) -> None:
    """Set the variables of this rank's place that are not there, for programs that read them, and for ``detect``."""
    numbers = {name: getattr(environment, name) for name in ("rank", "world_size", "local_rank")}
    if os.environ.get("LOCAL_WORLD_SIZE") is None and environment.launcher == TORCHRUN.name:
        # All that ``detect`` needs: a node more, or one with another number of ranks, cannot be guessed.
        numbers |= {name: getattr(environment, name) for name in ("local_world_size", "node_rank", "node_count")}
    for attribute, number in numbers.items():
        os.environ.setdefault(TORCHRUN.name_of(attribute), str(number))


def _start(
    environment: Environment,
    backend: str,
    device: torch.device,
    timeout: timedelta | None,
    limit: timedelta,
    problem: Exception | None,
) -> tuple[Environment, torch.device]:
    """Start the process group; return the environment with this rank's place on its node, and its device."""
    several, carried = environment.world_size > 1, backend == "mpi"
    if problem is not None and not several:
        raise problem  # nobody waits for this rank
    if carried and dist.is_mpi_available():  # torch was built with it, and MPI ends the others
        if problem is not None:
            raise problem
        dist.init_process_group("mpi", timeout=timeout)
        return environment, device
    backend = "gloo" if carried else backend
    began = time.monotonic()
    store: Any = join_rendezvous(environment, limit, problem) if several else dist.HashStore()  # type: ignore[attr-defined]
    if not environment.placed:
        environment = nodes.place(environment, store)
        try:
            device = _take_device(environment, "mpi" if carried else backend)
        except (ValueError, RuntimeError) as error:
            problem = error
        nodes.start_together(environment, store, problem)
    if environment.one_node:
        interface.stay_on_loopback()
    elif (name := interface.interface_to(environment.master_address, environment.master_port)) is not None:
        # Left alone gloo looks up the machine's own name, which may be that of loopback or of another network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    # gloo connects all ranks now, which must not take as long as a collective may. The store has that limit, too.
    connects = backend == "gloo" and several
    left = max(timedelta(seconds=1), limit - timedelta(seconds=time.monotonic() - began))
    try:
        dist.init_process_group(
            backend,
            # nccl's threads ask the store until the process ends, when none may call Python any more.
            store=store if connects or not several else store.raw,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=left if connects else timeout,
            device_id=device if backend == "nccl" else None,
        )
        if several:
            trust.adopt(store)
            trust.prove(dist.group.WORLD)
            _leave_at_exit(environment, store)
    except StartError:
        shutdown()
        raise
    except RuntimeError as error:
        name = os.environ.get("GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME", "not set")
        raise StartError(
            f"rank {environment.rank} has reached the master, but {backend} could not connect the ranks: {error}\n"
            f"{backend.upper()}_SOCKET_IFNAME is {name}; set it to the interface that the nodes share, and see that no "
            "firewall is between them"
        ) from error
    if several:
        for connection in (store, store.raw):  # torch has one or the other
            connection.set_timeout(timeout or dist.default_pg_timeout)
    if connects:
        dist.distributed_c10d._set_pg_timeout(timeout or dist.default_pg_timeout)
    if carried:
        mpi.carry(timeout)
    return environment, device


def _checked(environment: Environment, backend: str, device: torch.device) -> Environment:
    """Return the environment with its real nodes; raise StartError if the ranks' versions differ."""
    if environment.world_size == 1 and dist.get_world_size() == 1:
        return environment
    try:
        # Ranks of another MPI than mpi4py's each find themselves alone in its world.
        if (dist.get_rank(), dist.get_world_size()) != (environment.rank, environment.world_size):
            raise StartError(_other_mpi(environment))
        facts = peers.gather(torch.device("cpu") if backend in ("gloo", "mpi") else device)
        peers.require_same_versions(facts)
    except BaseException:
        dist.destroy_process_group()
        raise
    return peers.with_topology(environment, facts) if environment.launcher in MPI else environment


def _variables(env: Mapping[str, str], init_method: str | None, rank: int, world_size: int) -> dict[str, str]:
    """Return the variables, with those that the arguments set."""
    passed: dict[str, str] = {}
    parts = urlsplit(init_method or "env://")
    if (rank < 0) != (world_size < 0):
        raise ValueError(f"rank is {rank} and world_size is {world_size}; give both, or none to let a launcher tell")
    numbers = {"rank": str(rank), "world_size": str(world_size)} if rank >= 0 else dict(parse_qsl(parts.query))
    passed |= {name: numbers[name.lower()] for name in ("RANK", "WORLD_SIZE") if name.lower() in numbers}
    if parts.scheme == "file" and parts.path and not parts.hostname:
        passed |= {"MASTER_ADDR": f"{FILE}{parts.path}", "MASTER_PORT": "0"}
    elif parts.scheme != "env":
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise ValueError(f"init_method is {init_method!r}, but must be tcp://address:port, file://path or env://")
        passed |= {"MASTER_ADDR": parts.hostname, "MASTER_PORT": str(parts.port)}
    for name in ("RANK", "WORLD_SIZE"):
        if name in passed and env.get(name, passed[name]) != passed[name]:
            raise ValueError(f"{name} is {env[name]}, but the argument {name.lower()} is {passed[name]}; leave it out")
    return {**env, **passed}


def _with_master(environment: Environment, backend: str, port: int | None) -> Environment:
    """Return the environment with the address and the port of the rendezvous."""
    has_own_mpi = backend == "mpi" and dist.is_mpi_available()  # which needs no address
    if environment.world_size == 1 or has_own_mpi or environment.launcher == TORCHRUN.name:
        return environment
    if port is not None and not os.environ.get("MASTER_PORT"):
        environment = replace(environment, master_port=port)
    if environment.master_address:
        return environment
    # Only MPI's launchers name no host: its ranks agree on one over MPI, also where the backend is gloo.
    missing = mpi.missing()
    if missing:
        raise ValueError(
            f"{names_of(environment.launcher).command} started {environment.world_size} ranks on several nodes, and "
            f"nothing says where they meet: {missing}; or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a "
            "free port of it, on all ranks"
        )
    address, free_port = mpi.agree_on_master()
    return replace(environment, master_address=address, master_port=environment.master_port or free_port)


def _other_mpi(environment: Environment) -> str:
    """Return why MPI does not know the ranks that its launcher started; empty if it does."""
    rank, world_size = mpi.rank_and_size()
    if (rank, world_size) == (environment.rank, environment.world_size):
        return ""
    return (
        f"MPI says that this is rank {rank} of {world_size}, and {environment.launcher} that it is rank "
        f"{environment.rank} of {environment.world_size}: the ranks were not started by the mpiexec of the MPI that "
        "mpi4py uses; start them with that one, which is the one beside python where both came with pip, or use gloo"
    )


def require_backend(backend: str) -> None:
    """Raise StartError unless this machine can use the backend."""
    if backend == "mpi" and not dist.is_mpi_available():
        missing = mpi.missing()
        if missing:
            raise StartError(f"dist_backend is 'mpi', but {missing}; or use {' or '.join(available_backends())}")
        return
    if backend not in available_backends():
        how = "install a CUDA build of torch" if backend == "nccl" else "install a torch that has it"
        raise StartError(
            f"dist_backend is {backend!r}, which this torch ({torch.__version__}) was built without; {how}, or use "
            f"{' or '.join(available_backends())}"
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise StartError(
            "dist_backend is 'nccl', which connects CUDA devices, and this machine shows none; check the driver and "
            "CUDA_VISIBLE_DEVICES with nvidia-smi, or use gloo"
        )


def available_backends() -> list[str]:
    """Return the backends that this torch was built with."""
    backend_names = dist.Backend.backend_list
    return [name for name in backend_names if name not in ("undefined", "fake") and dist.is_backend_available(name)]


def _environment_of_group() -> Environment:
    """Return the environment in a group that was started elsewhere, perhaps without a launcher's variables."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if "cpu" in backends() or accelerator is None else accelerator
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        launcher = Environment.detect().launcher
    except ValueError:  # the group is what counts: variables that contradict each other did not prevent it
        launcher = TORCHRUN.name
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    node = Environment(rank, rank, 0, world_size, world_size, address, launcher=launcher)  # as if on one node
    return peers.with_topology(node, peers.gather(device))


def _await_gloo() -> None:
    """Wait until torch's threads of gloo have released the tensors of the last collectives."""
    # They do so after a collective is reported as done, and need Python's lock for it. A thread that wants the lock
    # when the interpreter is gone is ended amid C++ code, which aborts the process.
    end, quiet = time.monotonic() + LEAVING, 0
    while quiet < QUIET and time.monotonic() < end:
        # Gives the lock away, which is all that helps where threads cannot be listed.
        time.sleep(0.01)
        quiet = 0 if _gloo_is_busy() else quiet + 1


def _gloo_is_busy() -> bool:
    """Return whether such a thread runs or wants to; one that waits for a message may go on doing so."""
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if name == _GLOO and rest.split()[0] == "R":
            return True
    return False
