"""Machines by name: links, typical nodes and instances of clouds, from public documents.

What no document says is an estimate, and ``cluster`` writes it into the machine's notes: shares of a link's bandwidth
that collectives reach, latencies, speeds of disks, and sizes of workstations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from zeromesh.apps.plan.machine.cluster import WRITE_ONE, Device, LinkSpeed, Machine, Node
from zeromesh.base.devices import ACCELERATORS, HARDWARE, find_accelerator
from zeromesh.base.words import nearest

GIB = 2.0**30


class LinkRow(NamedTuple):
    """One kind of link."""

    bandwidth: float  # 10^9 bytes per second in each direction
    latency: float  # microseconds of the smallest message between two devices, with NCCL; an estimate
    efficiency: float  # that all-gathers of large buffers reach with NCCL; an estimate where ``source`` has no figure
    source: str


# Without access of one card to another ("-staged"), each byte goes through the host's memory.
LINKS = {name: LinkRow(*row) for name, row in HARDWARE["links"].items()}

# ``Device.product_fill`` of accelerators. With it the formula is within 7 % of products that were measured on H100
# (OpenXLA, 2025, its table for cost models: 256 to 4,096 in each dim), and about 5 % from those on A100 (Triton, 2024,
# tutorial on matrix multiplication), on average.
PRODUCT_FILL = 512.0

# Share of the bandwidth of all memory channels that updates reach, for one rank and for several that share the host.
HOST_REACHED: tuple[float, float] = HARDWARE["host_reached"]["one rank"][0], HARDWARE["host_reached"]["several"][0]

# Reads and writes of one drive, 10^9 bytes per second: typical ones for servers, an estimate.
DRIVES = {"sata": (0.5, 0.5), "nvme3": (3.0, 1.8), "nvme4": (6.5, 3.5)}


class NodeRow(NamedTuple):
    """One kind of node, or instance of a cloud. Links are "NAME", or "N x NAME" for N that its devices share."""

    device: str  # short name; "" for nodes that take any card
    devices: int
    inside: str  # {} stands for the card's PCIe, as ``CARDS`` has it
    host: str
    network: str
    memory: float  # of the host, GiB
    channels: float  # bandwidth of all channels of the host's memory, 10^9 bytes per second
    cores: int
    drives: str  # "N x TB KIND"; "" for none
    source: str


# Devices of a rack that NVLink joins are one node. Workstations, which anyone may put together, have an estimated host.
NODES = {name: NodeRow(*row) for name, row in HARDWARE["nodes"].items()}

# Cards in PCIe slots: the link between two of one node, and the nodes that take them, smallest first.
CARDS: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (link, (*nodes,)) for name, (link, nodes) in HARDWARE["cards"].items()
}

# Kinds whose first node with them is not the usual one, or which no node of the table has.
USUAL: dict[str, tuple[str, ...]] = {name: (*nodes,) for name, nodes in HARDWARE["usual"].items()}


def _meant(name: str, names: Iterable[str]) -> str:
    close = nearest(name, names)
    return f"did you mean {close}? " if close else ""


def find_device(name: str) -> Device:
    """Return the device of a name: as torch.cuda.get_device_name gives it, or short, such as "h100" or "A100-80GB".

    Raises:
        ValueError: no such device; the message has the nearest names.
    """
    row = find_accelerator(name)
    if row is None:
        shorts = [item.short for item in ACCELERATORS]
        meant = _meant(name, [*shorts, *(item.name for item in ACCELERATORS)])
        raise ValueError(f"{name!r} is no known GPU; {meant}Known are {', '.join(shorts)}. For another one {WRITE_ONE}")
    device = Device(
        row.name, row.gib * GIB, row.flops, row.bandwidth * 1e9, source=row.source, product_fill=PRODUCT_FILL
    )
    return replace(device, product_efficiency=row.reached) if row.reached else device


def find_link(text: str, devices: int = 1) -> LinkSpeed:
    """Return a device's part of one or more links of a node: "nvlink4", "8 x ndr", "10 Gbit" or "12.5 GB/s".

    ``devices`` are those of the node, which share "N x"; without it, each has a link of its own.

    Raises:
        ValueError: no such link, or none at all of it.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\S.*?)\s*", text)
    number = int(match[1]) if match and match[1] else None
    name = match[2] if match else text
    row = LINKS.get(re.sub(r"^(infiniband|ib)[- ]", "", name.lower())) or _speed(name)
    if row is None:
        raise ValueError(
            f"{name!r} is no known link; {_meant(name, LINKS)}Give one of {', '.join(LINKS)}, or a speed such as "
            '"25 Gbit" or "12.5 GB/s"; "8 x ndr" is for eight of a node'
        )
    if number == 0 or row.bandwidth == 0:
        raise ValueError(f"{text!r} is no link at all; give a speed above 0")
    links = devices if number is None else number
    # A device has several links, or several devices have one, or all have all.
    bandwidth, shared = row.bandwidth * links / devices, 1
    if links < devices:
        divisible = devices % links == 0
        bandwidth, shared = (row.bandwidth, devices // links) if divisible else (row.bandwidth * links, devices)
    return LinkSpeed(bandwidth * 1e9, row.latency / 1e6, row.efficiency, shared)


def _speed(text: str) -> LinkRow | None:
    """Return a link of a speed that is given as a number with its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMgm])\s*(bit|bps|b/s|bit/s|B/s|Bps)", text)
    if not match:
        return None
    scale = (1.0 if match[2] in "Gg" else 1e-3) / (1 if "B" in match[3] else 8)
    speed = float(match[1]) * scale
    # Slow networks are TCP's; a fast one reaches less of what it has.
    tcp = [row for name, row in LINKS.items() if name.startswith("ethernet-")]
    like = min(tcp, key=lambda row: abs(row.bandwidth - speed))
    return like._replace(bandwidth=speed, source=text)


def cluster(
    gpu: str = "",
    gpus: int | None = None,
    nodes: int = 1,
    node: str = "",
    inside: str = "",
    between: str = "",
    host_memory: float | None = None,
    price: float = 0.0,
) -> Machine:
    """Return the machine of a command line: ``nodes`` equal nodes with ``gpus`` devices of a kind each.

    Args:
        gpu: the device; that of ``node`` if left out.
        gpus: devices of a node; all that the node has if left out.
        nodes: number of nodes.
        node: a key of ``NODES``; the usual node of the device if left out.
        inside: link between devices of a node, as ``find_link`` takes it; the node's if left out.
        between: links of a node to others, likewise. Without "N x", InfiniBand and the like have as many adapters as
            the node has, and Ethernet has one that all devices share.
        host_memory: bytes of a node; the node's, or its devices' part of it, if left out.
        price: of a node per hour, 0 for unknown.

    Raises:
        ValueError: unknown names, more devices than a node has, or impossible sizes.
    """
    for name, value in (("gpus", gpus), ("nodes", nodes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}, but must be a whole number from 1 on")
    if not 0 <= price < math.inf:
        raise ValueError(f"price is {price!r}, but must be 0 (unknown) or the price of a node per hour")
    if host_memory is not None and not 0 < host_memory < math.inf:
        raise ValueError(f"host_memory is {host_memory!r}, but must be the bytes of a node's memory, above 0")
    if host_memory is not None and not 1e9 <= host_memory < 1e15:
        raise ValueError(
            f"host_memory is {host_memory:.3g} bytes, but a node has at least 10^9 and less than 10^15; give bytes "
            "here, and GB to --host-memory: 512 for half a terabyte"
        )
    if not gpu and not node:
        raise ValueError("give a GPU, such as h100, or a node, such as dgx-h100")
    name, row = _node_row(gpu, gpus, node)
    device = find_device(gpu or row.device)
    short = _short(device)
    count = gpus or row.devices
    notes = [f"{device.name}: {device.source}; its memory is what torch reports"]
    if gpu and gpu.lower() != short and device.name.lower() != gpu.lower():
        notes.append(f"{gpu!r} is taken as {device.name}")
    notes.append(f"node {name}: {row.source}" + ("" if node else "; the usual one, name another with node="))
    card = CARDS.get(short, ("pcie4", ()))[0]
    inner = find_link(inside or row.inside.format(card), row.devices)
    host = find_link(row.host.format(card.removesuffix("-staged")), row.devices)
    network = _network(between, row.network)
    outer = find_link(network, row.devices)
    share = count / row.devices
    if share < 1:
        notes.append(f"{count} of the {row.devices} devices of {name}, with as large a part of its host and its disks")
    if nodes > 1:
        notes.append(f"between nodes: {network}")
    notes.append("estimates: latencies, and the shares of bandwidth that collectives, disks and host memory reach")
    read, write, size = _drives(row.drives)
    # With fewer devices than the node has, fewer share its links.
    inner, host, outer = (replace(link, shared=min(link.shared, count)) for link in (inner, host, outer))
    built = Node(
        device,
        count,
        inner,
        host,
        host_memory=row.memory * GIB * share if host_memory is None else host_memory,
        host_bandwidth=row.channels * 1e9 * HOST_REACHED[count > 1] * share,
        cores=max(1, round(row.cores * share)),
        disk_read=read * share,
        disk_write=write * share,
        disk=size * share,
        name=name,
        price=price,
    )
    return Machine(((built, nodes),), outer, f"{nodes} x {name}, {count} x {short} each", tuple(notes))


def _network(between: str, usual: str) -> str:
    """Return the links of a node to others, with their number."""
    if not between or re.match(r"\s*\d+\s*x", between):
        return between or usual
    tcp = _speed(between) or between.lower().startswith("ethernet")
    return f"1 x {between}" if tcp else f"{usual.split()[0]} x {between}"


def _node_row(gpu: str, gpus: int | None, node: str) -> tuple[str, NodeRow]:
    """Return name and row of the node that is named, or of the smallest usual one with enough devices."""
    if node:
        row = NODES.get(node.lower())
        if row is None:
            meant = _meant(node, NODES)
            raise ValueError(f"{node!r} is no known node; {meant}Known are {', '.join(NODES)}. For another {WRITE_ONE}")
        if not gpu and not row.device:
            raise ValueError(f"{node} takes any card; name the GPU too, such as rtx-4090")
        names: tuple[str, ...] = (node.lower(),)
    else:
        short = _short(find_device(gpu))
        first = next((name for name, row in NODES.items() if row.device == short), "pcie-server-8")
        names = USUAL.get(short) or CARDS.get(short, ("", (first,)))[1]
    rows = [(name, NODES[name]) for name in names]
    for name, row in rows:
        if (gpus or 1) <= row.devices:
            return name, row
    name, row = rows[-1]
    raise ValueError(
        f"{gpus} devices in a node are more than the {row.devices} of {name}; take more nodes, or {WRITE_ONE}"
    )


def _short(device: Device) -> str:
    return next(row.short for row in ACCELERATORS if row.name == device.name)


def _drives(text: str) -> tuple[float, float, float]:
    """Return bytes per second read and written, and bytes, of "N x TB KIND"."""
    if not text:
        return 0.0, 0.0, 0.0
    number, _, size, kind = text.split()
    read, write = DRIVES[kind]
    return int(number) * read * 1e9, int(number) * write * 1e9, int(number) * float(size) * 1e12
