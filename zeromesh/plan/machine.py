"""Description of a cluster: devices, nodes and links. ``machine.json`` has this form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, or the processor of a rank."""

    name: str
    memory: float  # bytes
    flops: Mapping[str, float]  # most operations per second in products, by dtype: "fp32", "tf32", "bf16", "fp8", ...
    bandwidth: float  # bytes per second of its memory
    product_efficiency: float = 0.75  # share of ``flops`` that large products reach
    memory_efficiency: float = 0.85  # share of ``bandwidth`` that large kernels reach
    launch: float = 4e-6  # seconds of the smallest kernel
    reserved: float = 0.6e9  # bytes of its context and libraries
    source: str = ""  # of the figures


@dataclass(frozen=True)
class LinkSpeed:
    """Link of one device to others of a kind."""

    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds of the smallest message
    efficiency: float = 0.8  # share of ``bandwidth`` that large collectives reach
    shared: int = 1  # devices that share the bandwidth


@dataclass(frozen=True)
class Node:
    """One kind of node."""

    device: Device
    devices: int
    inside: LinkSpeed  # between its devices
    host: LinkSpeed  # between a device and the host's memory
    host_memory: float  # bytes
    host_bandwidth: float  # bytes per second read and written by all cores together
    cores: int
    disk_read: float = 0.0  # bytes per second, of all disks of the node together; 0: there is none
    disk_write: float = 0.0
    disk: float = 0.0  # bytes
    name: str = ""
    price: float = 0.0  # per hour; 0: unknown


@dataclass(frozen=True)
class Machine:
    """All nodes of a run, and the links between them."""

    nodes: tuple[tuple[Node, int], ...]  # each kind, and the number of nodes of the kind
    between: LinkSpeed  # of one device to devices of other nodes
    name: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(node.devices * count for node, count in self.nodes)
