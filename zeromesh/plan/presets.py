"""Machines by name: links, typical nodes and instances of clouds, from public documents.

What no document says is an estimate, and ``cluster`` writes it into the machine's notes: shares of a link's bandwidth
that collectives reach, latencies, speeds of disks, and sizes of workstations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from zeromesh.observe.devices import ACCELERATORS, find_accelerator
from zeromesh.observe.units import nearest
from zeromesh.plan.machine import WRITE_ONE, Device, LinkSpeed, Machine, Node

GIB = 2.0**30


class LinkRow(NamedTuple):
    """One kind of link."""

    bandwidth: float  # 10^9 bytes per second in each direction
    latency: float  # microseconds of the smallest message between two devices, with NCCL; an estimate
    efficiency: float  # that all-gathers of large buffers reach with NCCL; an estimate where ``source`` has no figure
    source: str


LINKS: dict[str, LinkRow] = {
    "nvlink2": LinkRow(150, 2.5, 0.85, "Nvidia, V100 data sheet, 2020: 300 GB/s of both directions"),
    "nvlink3": LinkRow(300, 2.0, 0.78, "Nvidia, A100 data sheet, 2021: 600 GB/s of both directions"),
    "nvlink4": LinkRow(450, 2.0, 0.80, "Nvidia, H100 data sheet, 2024: 900 GB/s of both directions"),
    "nvlink4-h800": LinkRow(200, 2.0, 0.80, "DeepSeek-AI, DeepSeek-V3, 2024: 160 GB/s are reached"),
    "nvlink5": LinkRow(900, 2.0, 0.75, "Nvidia, DGX B200 data sheet, 2024: 1.8 TB/s of both directions"),
    "nvlink-bridge": LinkRow(
        56.2, 3.0, 0.85, "Nvidia, GA102 whitepaper, 2021: 112.5 GB/s of both directions, two cards"
    ),
    "nvlink-c2c": LinkRow(450, 2.0, 0.75, "Nvidia, GH200 data sheet, 2023: 900 GB/s of both directions"),
    "infinity-fabric": LinkRow(448, 3.0, 0.70, "AMD, MI300X data sheet, 2023: 7 links of 128 GB/s of both directions"),
    "pcie3": LinkRow(15.75, 5.0, 0.78, "PCI-SIG, PCI Express 3.0, 2010: 16 lanes"),
    "pcie4": LinkRow(31.5, 5.0, 0.80, "PCI-SIG, PCI Express 4.0, 2017: 16 lanes"),
    "pcie5": LinkRow(63.0, 5.0, 0.82, "PCI-SIG, PCI Express 5.0, 2019: 16 lanes"),
    # Without access of one card to another, each byte goes to the host's memory and from there to the other card.
    "pcie3-staged": LinkRow(15.75, 12.0, 0.50, "PCI-SIG, PCI Express 3.0, 2010: 16 lanes; through the host's memory"),
    "pcie4-staged": LinkRow(31.5, 12.0, 0.50, "PCI-SIG, PCI Express 4.0, 2017: 16 lanes; through the host's memory"),
    "pcie5-staged": LinkRow(63.0, 12.0, 0.50, "PCI-SIG, PCI Express 5.0, 2019: 16 lanes; through the host's memory"),
    **{
        name: LinkRow(gbit / 8, 5.0, 0.90, f"InfiniBand {name.upper()}, {gbit} Gbit/s")
        for name, gbit in (("edr", 100), ("hdr", 200), ("ndr", 400), ("xdr", 800))
    },
    "efa-100": LinkRow(12.5, 20.0, 0.80, "AWS, Elastic Fabric Adapter, 100 Gbit/s"),
    "efa-400": LinkRow(50, 20.0, 0.80, "AWS, Elastic Fabric Adapter, 400 Gbit/s"),
    "roce-400": LinkRow(50, 8.0, 0.85, "RDMA over Ethernet, 400 Gbit/s"),
    **{
        f"ethernet-{gbit}": LinkRow(gbit / 8, 30.0, reached, f"Ethernet, {gbit} Gbit/s, TCP")
        for gbit, reached in ((10, 0.9), (25, 0.9), (40, 0.85), (50, 0.85), (100, 0.8), (200, 0.75), (400, 0.7))
    },
}

# ``Device.product_fill`` of accelerators. With it the formula is within 7 % of products that were measured on H100
# (OpenXLA, 2025, its table for cost models: 256 to 4,096 in each dim), and about 5 % from those on A100 (Triton, 2024,
# tutorial on matrix multiplication), on average.
PRODUCT_FILL = 512.0

# Share of the bandwidth of all memory channels that copies reach; two sockets with STREAM reach 0.75 to 0.85.
HOST_REACHED = 0.8

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


AWS = "AWS, EC2 instance types, 2025"
AZURE = "Microsoft, Azure ND series, 2025"
GCP = "Google Cloud, GPU machine types, 2025"

# fmt: off
_NODES: dict[str, tuple[Any, ...]] = {
    "dgx-1": ("v100-32gb", 8, "nvlink2", "4 x pcie3", "4 x edr", 512, 153.6, 40, "4 x 1.92 sata",
              "Nvidia, DGX-1 data sheet, 2019"),
    "dgx-2": ("v100-32gb", 16, "nvlink2", "8 x pcie3", "8 x edr", 1536, 256, 48, "8 x 3.84 nvme3",
              "Nvidia, DGX-2 data sheet, 2019"),
    "dgx-a100-40gb": ("a100-40gb", 8, "nvlink3", "4 x pcie4", "8 x hdr", 1024, 409.6, 128, "4 x 3.84 nvme4",
                      "Nvidia, DGX A100 data sheet, 2020"),
    "dgx-a100": ("a100-80gb", 8, "nvlink3", "4 x pcie4", "8 x hdr", 2048, 409.6, 128, "8 x 3.84 nvme4",
                 "Nvidia, DGX A100 data sheet, 2021"),
    "dgx-h100": ("h100", 8, "nvlink4", "8 x pcie5", "8 x ndr", 2048, 614.4, 112, "8 x 3.84 nvme4",
                 "Nvidia, DGX H100 data sheet, 2023"),
    "hgx-h800": ("h800", 8, "nvlink4-h800", "8 x pcie5", "8 x ndr", 2048, 614.4, 112, "8 x 3.84 nvme4",
                 "DeepSeek-AI, DeepSeek-V3, 2024; the host as in DGX H100"),
    "dgx-h200": ("h200", 8, "nvlink4", "8 x pcie5", "8 x ndr", 2048, 614.4, 112, "8 x 3.84 nvme4",
                 "Nvidia, DGX H200 data sheet, 2024"),
    "dgx-b200": ("b200", 8, "nvlink5", "8 x pcie5", "8 x ndr", 2048, 716.8, 112, "8 x 3.84 nvme4",
                 "Nvidia, DGX B200 data sheet, 2024"),
    "dgx-b300": ("b300", 8, "nvlink5", "8 x pcie5", "8 x xdr", 2048, 819.2, 128, "8 x 3.84 nvme4",
                 "Nvidia, DGX B300 data sheet, 2025"),
    # All devices of a rack are one node: NVLink joins them.
    "gb200-nvl72": ("gb200", 72, "nvlink5", "36 x nvlink-c2c", "72 x ndr", 16093, 18432, 2592, "72 x 3.84 nvme4",
                    "Nvidia, GB200 NVL72 data sheet, 2024"),
    "gb300-nvl72": ("gb300", 72, "nvlink5", "36 x nvlink-c2c", "72 x xdr", 16093, 14300, 2592, "72 x 3.84 nvme4",
                    "Nvidia, GB300 NVL72 data sheet, 2025"),
    "gh200": ("gh200", 1, "nvlink-c2c", "1 x nvlink-c2c", "1 x ndr", 447, 512, 72, "1 x 3.84 nvme4",
              "Nvidia, GH200 data sheet, 2023"),
    "mi300x-8": ("mi300x", 8, "infinity-fabric", "8 x pcie5", "8 x ndr", 2048, 614.4, 112, "8 x 3.84 nvme4",
                 "AMD, MI300X platform data sheet, 2023; the host as in DGX H100"),
    # Cards that anyone may put together: an estimate of a usual host.
    "workstation-1": ("", 1, "{}", "1 x {}", "1 x ethernet-10", 64, 89.6, 16, "1 x 2 nvme4", "a desktop"),
    "workstation-2": ("", 2, "1 x {}", "1 x {}", "1 x ethernet-10", 128, 89.6, 16, "1 x 2 nvme4",
                      "a desktop whose two slots have 8 lanes each"),
    "workstation-4": ("", 4, "4 x {}", "4 x {}", "1 x ethernet-10", 256, 307.2, 32, "2 x 2 nvme4",
                      "a workstation with 8 channels of DDR5-4800"),
    "pcie-server-8": ("", 8, "8 x {}", "4 x {}", "1 x ethernet-100", 1024, 409.6, 64, "4 x 3.84 nvme4",
                      "a server with two sockets of 8 channels of DDR4-3200 and four PCIe switches"),
    "p3.2xlarge": ("v100-16gb", 1, "pcie3", "1 x pcie3", "1 x ethernet-10", 61, 19.2, 4, "", AWS),
    "p3.8xlarge": ("v100-16gb", 4, "nvlink2", "2 x pcie3", "1 x ethernet-10", 244, 76.8, 16, "", AWS),
    "p3.16xlarge": ("v100-16gb", 8, "nvlink2", "4 x pcie3", "1 x ethernet-25", 488, 153.6, 32, "", AWS),
    "p3dn.24xlarge": ("v100-32gb", 8, "nvlink2", "4 x pcie3", "1 x efa-100", 768, 256, 48, "2 x 0.9 nvme3", AWS),
    "p4d.24xlarge": ("a100-40gb", 8, "nvlink3", "4 x pcie4", "4 x efa-100", 1152, 281.6, 48, "8 x 1 nvme3", AWS),
    "p4de.24xlarge": ("a100-80gb", 8, "nvlink3", "4 x pcie4", "4 x efa-100", 1152, 281.6, 48, "8 x 1 nvme3", AWS),
    "p5.48xlarge": ("h100", 8, "nvlink4", "8 x pcie5", "32 x efa-100", 2048, 409.6, 96, "8 x 3.84 nvme4", AWS),
    "p5en.48xlarge": ("h200", 8, "nvlink4", "8 x pcie5", "32 x efa-100", 2048, 614.4, 96, "8 x 3.84 nvme4", AWS),
    "p6-b200.48xlarge": ("b200", 8, "nvlink5", "8 x pcie5", "8 x efa-400", 2048, 716.8, 96, "8 x 3.84 nvme4", AWS),
    "g4dn.12xlarge": ("t4", 4, "4 x pcie3-staged", "4 x pcie3", "1 x ethernet-50", 192, 140.8, 24, "1 x 0.9 nvme3",
                      AWS),
    "g5.xlarge": ("a10g", 1, "pcie4", "1 x pcie4", "1 x ethernet-10", 16, 8.5, 2, "1 x 0.25 nvme3", AWS),
    "g5.12xlarge": ("a10g", 4, "4 x pcie4-staged", "4 x pcie4", "1 x ethernet-40", 192, 102.4, 24, "1 x 3.8 nvme3",
                    AWS),
    "g5.48xlarge": ("a10g", 8, "8 x pcie4-staged", "8 x pcie4", "1 x ethernet-100", 768, 409.6, 96, "2 x 3.8 nvme3",
                    AWS),
    "g6.xlarge": ("l4", 1, "pcie4", "1 x pcie4", "1 x ethernet-10", 16, 8.5, 2, "1 x 0.25 nvme3", AWS),
    "g6.12xlarge": ("l4", 4, "4 x pcie4-staged", "4 x pcie4", "1 x ethernet-40", 192, 102.4, 24, "4 x 0.94 nvme3", AWS),
    "g6.48xlarge": ("l4", 8, "8 x pcie4-staged", "8 x pcie4", "1 x ethernet-100", 768, 409.6, 96, "8 x 0.94 nvme3",
                    AWS),
    "g6e.48xlarge": ("l40s", 8, "8 x pcie4-staged", "8 x pcie4", "4 x efa-100", 1536, 409.6, 96, "4 x 1.9 nvme3", AWS),
    "nd40rs-v2": ("v100-32gb", 8, "nvlink2", "4 x pcie3", "1 x edr", 672, 213.3, 40, "1 x 2.9 nvme3", AZURE),
    "nd96asr-v4": ("a100-40gb", 8, "nvlink3", "4 x pcie4", "8 x hdr", 900, 409.6, 96, "8 x 0.9 nvme3", AZURE),
    "nd96amsr-a100-v4": ("a100-80gb", 8, "nvlink3", "4 x pcie4", "8 x hdr", 1900, 409.6, 96, "8 x 0.9 nvme3", AZURE),
    "nd96isr-h100-v5": ("h100", 8, "nvlink4", "8 x pcie5", "8 x ndr", 1900, 614.4, 96, "8 x 3.5 nvme4", AZURE),
    "nd96isr-h200-v5": ("h200", 8, "nvlink4", "8 x pcie5", "8 x ndr", 1850, 614.4, 96, "8 x 3.5 nvme4", AZURE),
    "nd96isr-mi300x-v5": ("mi300x", 8, "infinity-fabric", "8 x pcie5", "8 x ndr", 1850, 614.4, 96, "8 x 3.5 nvme4",
                          AZURE),
    "a2-highgpu-8g": ("a100-40gb", 8, "nvlink3", "4 x pcie4", "1 x ethernet-100", 633, 281.6, 48, "", GCP),
    "a2-ultragpu-8g": ("a100-80gb", 8, "nvlink3", "4 x pcie4", "1 x ethernet-100", 1267, 281.6, 48, "8 x 0.375 nvme3",
                       GCP),
    "a3-highgpu-8g": ("h100", 8, "nvlink4", "8 x pcie5", "4 x ethernet-200", 1743, 614.4, 104, "16 x 0.375 nvme3", GCP),
    "a3-megagpu-8g": ("h100", 8, "nvlink4", "8 x pcie5", "8 x ethernet-200", 1743, 614.4, 104, "16 x 0.375 nvme3", GCP),
    "a3-ultragpu-8g": ("h200", 8, "nvlink4", "8 x pcie5", "8 x roce-400", 2750, 716.8, 112, "32 x 0.375 nvme3", GCP),
    "g2-standard-96": ("l4", 8, "8 x pcie4-staged", "8 x pcie4", "1 x ethernet-100", 358, 281.6, 48, "8 x 0.375 nvme3",
                       GCP),
}
# fmt: on
NODES = {name: NodeRow(*row) for name, row in _NODES.items()}

# Cards in PCIe slots: the link between two of one node, and the nodes that take them, smallest first.
SERVER = ("pcie-server-8",)
DESKTOP = ("workstation-1", "workstation-2", "workstation-4", *SERVER)
CARDS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("v100-pcie-32gb", "v100-pcie-16gb", "t4"), ("pcie3", SERVER)),
    **dict.fromkeys(("a100-pcie-80gb", "a100-pcie-40gb", "l4", "l40s", "a10"), ("pcie4", SERVER)),
    **dict.fromkeys(("h100-pcie", "h100-nvl", "h200-nvl"), ("pcie5", SERVER)),
    **dict.fromkeys(("rtx-3090", "rtx-4090"), ("pcie4-staged", DESKTOP)),
    "rtx-5090": ("pcie5-staged", DESKTOP),
    "a10g": ("pcie4", ("g5.xlarge", "g5.12xlarge", "g5.48xlarge")),
}

# Kinds whose first node with them is not the usual one, or which no node of the table has.
USUAL = {"v100-32gb": ("dgx-1", "dgx-2"), "v100-16gb": ("p3.16xlarge",), "a100-40gb": ("dgx-a100-40gb",)}
USUAL |= {"h100-96gb": ("dgx-h100",), "gh200-144gb": ("gh200",)}


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
    gpu: str = "", gpus: int | None = None, nodes: int = 1, node: str = "", inside: str = "", between: str = "",
    host_memory: float | None = None, price: float = 0.0,
) -> Machine:  # fmt: skip
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
        device, count, inner, host, host_memory=row.memory * GIB * share if host_memory is None else host_memory,
        host_bandwidth=row.channels * 1e9 * HOST_REACHED * share, cores=max(1, round(row.cores * share)),
        disk_read=read * share, disk_write=write * share, disk=size * share, name=name, price=price,
    )  # fmt: skip
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
