"""Who this process is among the others, and the start of the process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = ("127.0.0.1", "localhost", "::1")

VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process."""

_REMEDY = "start the ranks with torchrun, which sets {}; for a single process unset them all".format(
    ", ".join(VARIABLES)
)


@dataclass(frozen=True)
class Environment:
    """The place of one process in the run, in torchrun's words.

    Attributes:
        rank: global number of the process.
        local_rank: its number on its node.
        node_rank: number of the node.
        world_size: number of processes.
        local_world_size: number of processes on this node.
        master_address: host of the rendezvous.
        master_port: its TCP port; 0 where none is used.

    Raises:
        ValueError: if the numbers contradict each other.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0

    def __post_init__(self) -> None:
        _require(self.world_size >= 1, f"WORLD_SIZE is {self.world_size}, but there is at least one process")
        _require(
            1 <= self.local_world_size <= self.world_size,
            f"LOCAL_WORLD_SIZE is {self.local_world_size}, but must be between 1 and WORLD_SIZE, {self.world_size}",
        )
        _require(
            0 <= self.rank < self.world_size,
            f"RANK is {self.rank}, but must be at least 0 and below WORLD_SIZE, {self.world_size}",
        )
        _require(
            0 <= self.local_rank < self.local_world_size,
            f"LOCAL_RANK is {self.local_rank}, but must be at least 0 and below LOCAL_WORLD_SIZE, "
            f"{self.local_world_size}",
        )
        _require(
            not self.one_node or self.local_rank == self.rank,
            f"LOCAL_RANK is {self.local_rank} and RANK is {self.rank}, but LOCAL_WORLD_SIZE says that all "
            f"{self.world_size} ranks are on one node, where the two are the same",
        )
        _require(
            self.node_rank == 0 if self.one_node else 0 <= self.node_rank < self.world_size,
            f"GROUP_RANK is {self.node_rank}, but must be at least 0 and below the number of nodes",
        )
        _require(0 <= self.master_port < 65536, f"MASTER_PORT is {self.master_port}, but must be below 65536")

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Environment:
        """The environment that torchrun's variables describe; a single process where there are none.

        LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK may be left out where MASTER_ADDR is this machine itself, as all
        ranks are then on one node.

        Raises:
            ValueError: if some variables are missing, are not numbers, or contradict each other.
        """
        if not is_launched(env):
            return cls()
        values = dict(env)
        if env.get("MASTER_ADDR") in LOOPBACK:
            same = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}
            values = {name: env[of] for name, of in same.items() if of in env} | values
            if "RANK" in env:
                values.setdefault("GROUP_RANK", "0")
        return cls(
            rank=_integer(values, "RANK"),
            local_rank=_integer(values, "LOCAL_RANK"),
            node_rank=_integer(values, "GROUP_RANK"),
            world_size=_integer(values, "WORLD_SIZE"),
            local_world_size=_integer(values, "LOCAL_WORLD_SIZE"),
            master_address=_text(values, "MASTER_ADDR"),
            master_port=_integer(values, "MASTER_PORT"),
        )

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world_size == self.world_size


def is_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has set any of torchrun's variables."""
    return any(name in env for name in VARIABLES)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"{problem}; {_REMEDY}")


def _text(env: Mapping[str, str], name: str) -> str:
    there = [other for other in VARIABLES if other in env]
    _require(bool(env.get(name)), f"{name} is not set, but {', '.join(there)} are")
    return env[name]


def _integer(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    _require(text.strip().lstrip("-").isdecimal(), f"{name} is {text!r}, but must be a whole number")
    return int(text)


def default_backend() -> str:
    """The communication backend that goes with this machine's accelerator: nccl for CUDA, gloo without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "gloo" if accelerator is None else dist.get_default_backend_for_device(accelerator)


def device_for(environment: Environment, backend: str) -> torch.device:
    """The device of this rank's tensors; the CPU where there is no accelerator that the backend can serve.

    gloo carries CUDA tensors too (through the host), also of several ranks that share one device.

    Raises:
        ValueError: if there are more ranks on this node than devices, and the backend needs one for each.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (backend == "gloo" and accelerator.type != "cuda") or backend == "mpi":
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    if environment.local_rank >= devices and backend != "gloo":
        raise ValueError(
            f"LOCAL_RANK is {environment.local_rank}, but this node has {devices} {accelerator.type} device(s), and "
            f"{backend} needs one for each rank; start at most {devices} ranks per node, or use the backend gloo"
        )
    return torch.device(accelerator.type, environment.local_rank % devices)


def backends(group: Any = None) -> dict[str, str]:
    """The backend of a process group, by default of the whole one, for each type of device that it serves."""
    # Not ``get_backend``: it gives what the group was started with, which may be a list, or "undefined" for none.
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def device_of_group(environment: Environment) -> torch.device:
    """The device of this rank's tensors in the process group that has been started; see ``device_for``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backend = None if accelerator is None else backends().get(accelerator.type)
    return torch.device("cpu") if backend is None else device_for(environment, backend)


def init_distributed(
    dist_backend: str | None = None, timeout: timedelta | None = None, environment: Environment | None = None
) -> Environment:
    """Start the process group, unless somebody has, and make this rank's device the current one.

    Args:
        dist_backend: nccl, gloo, or another that torch was built with; None chooses by the accelerator.
        timeout: how long a collective may take before it fails; None is torch's default for the backend.
        environment: who this process is; None reads torchrun's variables.

    Returns:
        The environment of this process.

    Raises:
        ValueError: if the variables are wrong, there are too few devices, or the backend is unknown.
        RuntimeError: if this machine's torch lacks the backend.
    """
    if dist.is_initialized():
        return environment or _environment_of_group()
    environment = environment or Environment.detect()
    backend = dist_backend or default_backend()
    _require_backend(backend)
    device = device_for(environment, backend)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if environment.one_node:
        _stay_on_loopback()
    dist.init_process_group(
        backend,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
        **_rendezvous(environment),
    )
    return environment


def shutdown() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _rendezvous(environment: Environment) -> dict[str, Any]:
    if environment.world_size == 1:
        return {"store": dist.HashStore()}  # type: ignore[attr-defined]
    address = environment.master_address
    host = f"[{address}]" if ":" in address else address
    return {"init_method": f"tcp://{host}:{environment.master_port}"}


def _stay_on_loopback() -> None:
    """Keep sockets inside the machine; without this, gloo and nccl ask the name service for an interface."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", names[0])


def _require_backend(backend: str) -> None:
    known = dist.Backend.backend_list
    available = [name for name in known if name not in ("undefined", "fake") and dist.is_backend_available(name)]
    if backend not in known:
        raise ValueError(f"dist_backend is {backend!r}, but torch knows {', '.join(available)}; use one of them")
    if backend not in available:
        how = {"nccl": "install a CUDA build of torch", "mpi": "build torch from source where MPI is installed"}
        raise RuntimeError(
            f"dist_backend is {backend!r}, which this torch ({torch.__version__}) was built without; "
            f"{how.get(backend, 'install a torch that has it')}, or use {' or '.join(available)}"
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeError(
            "dist_backend is 'nccl', which connects CUDA devices, and this machine shows none; check the driver and "
            "CUDA_VISIBLE_DEVICES with nvidia-smi, or use gloo"
        )


def _environment_of_group() -> Environment:
    """The environment in a group that somebody else started, perhaps without torchrun's variables."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    nodes: list[Any] = [None] * world_size
    # Machines may share a host name, as containers do; torchrun's node number tells those apart.
    dist.all_gather_object(nodes, (socket.gethostname(), os.environ.get("GROUP_RANK")))
    own = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    return Environment(
        rank=rank,
        local_rank=own.index(rank),
        node_rank=list(dict.fromkeys(nodes)).index(nodes[rank]),
        world_size=world_size,
        local_world_size=len(own),
        master_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
    )
