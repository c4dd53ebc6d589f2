"""Description of a cluster: devices, nodes and links, and the file ``machine.json`` that has it.

The file is one JSON object: ``{"format": 1, "name", "notes", "between", "nodes"}``. Each entry of ``nodes`` has the
fields of ``Node`` and ``count``, the number of nodes of the kind; ``device``, ``inside``, ``host`` and ``between`` are
objects with the fields of ``Device`` and ``LinkSpeed``. Fields with a default may be left out. Sizes are in bytes,
times in seconds, speeds in bytes or operations per second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.base.files import write_text
from zeromesh.base.words import nearest, show
from zeromesh.config.document import read_object
from zeromesh.config.errors import ConfigError

FORMAT = 1  # of machine.json; it grows when a key goes or changes its meaning

WIDTHS = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Dtypes of products, and the bytes of an element in memory."""

WRITE_ONE = "measure a machine with 'zeromesh doctor --save machine.json', or write the file by hand: docs/machine.md"


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, or the processor of a rank.

    A product of matrices takes ``launch`` + 2 ((rows + p) (columns + p) + f^2) (sums + p) / (flops x
    product_efficiency), p being ``product_padding`` and f ``product_fill``, or the time of its memory traffic where
    that is longer. Other kernels take ``launch`` and the time of their traffic: its first ``cache`` bytes at
    ``cache_bandwidth``, the others at ``bandwidth`` x memory_efficiency.
    """

    name: str
    memory: float  # bytes
    flops: Mapping[str, float]  # most operations per second in products, by dtype: "fp32", "tf32", "bf16", "fp8", ...
    bandwidth: float  # bytes per second of its memory
    product_efficiency: float = 0.75  # share of ``flops`` that large products reach
    memory_efficiency: float = 0.85  # share of ``bandwidth`` that large kernels reach
    launch: float = 4e-6  # seconds of the smallest kernel
    reserved: float = 0.6e9  # bytes of its context and libraries
    source: str = ""  # of the figures
    product_padding: float = 64.0  # elements by which each dim of a product counts longer than it is
    cache: float = 0.0  # bytes that a kernel reads and writes at ``cache_bandwidth``; 0: all are the memory's
    cache_bandwidth: float = 0.0  # bytes per second
    product_fill: float = 0.0  # edge of the square of results with which a product is half as fast as large ones
    # Fused attention takes its operations at these shares of the speed of large products, and its traffic besides.
    attention_forward: float = 0.80
    attention_backward: float = 0.60
    attention_bandwidth: float = 0.0  # bytes per second of that traffic in the forward; 0: it takes no time of its own
    attention_bandwidth_back: float = 0.0
    loss_bandwidth: float = 0.0  # bytes per second of the kernels of a cross entropy; 0: the memory's
    processor: bool = False  # it is the host's: its memory is the host's, and ranks add up gradients themselves

    @property
    def half(self) -> str:
        """The 16-bit dtype of its products: "bf16" where it has it, then "fp16", then "fp32"."""
        return next(name for name in ("bf16", "fp16", *self.flops) if name in self.flops)

    def peak(self, dtype: str) -> float:
        """Return the most operations per second in products of a dtype.

        Raises:
            ValueError: the device has no products of this dtype.
        """
        if dtype not in self.flops:
            raise ValueError(
                f"{self.name} has no products in {dtype}, only in {', '.join(self.flops)}; choose one of them"
            )
        return self.flops[dtype]

    def product_seconds(self, rows: float, columns: float, sums: float, dtype: str) -> float:
        """Return the time of a product of a rows x sums and a sums x columns matrix."""
        # A library computes whole tiles, and fills and drains its pipelines: a thin product costs as much as one that
        # is longer in every dim. Few results do not fill all units of the device.
        pad = self.product_padding
        operations = 2.0 * ((rows + pad) * (columns + pad) + self.product_fill**2) * (sums + pad)
        computing = operations / (self.peak(dtype) * self.product_efficiency)
        moved = (rows * sums + sums * columns + rows * columns) * WIDTHS[dtype]
        return self.launch + max(computing, self._moving(moved))

    def memory_seconds(self, size: float) -> float:
        """Return the time of a kernel that reads and writes ``size`` bytes together."""
        return self.launch + self._moving(size)

    def streaming_seconds(self, size: float) -> float:
        """Return the time of a kernel that reads and writes ``size`` bytes of which no cache has any."""
        return self.launch + size / (self.bandwidth * self.memory_efficiency)

    def _moving(self, size: float) -> float:
        # The first bytes, as many as a cache holds, are there from the kernel before.
        cached = min(size, self.cache) if self.cache_bandwidth else 0.0
        fast = cached / self.cache_bandwidth if cached else 0.0
        return fast + (size - cached) / (self.bandwidth * self.memory_efficiency)


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

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a ``machine.json``.

        Raises:
            ConfigError: a ValueError that lists all problems of the file: path, value, rule and remedy of each.
        """
        if Path(path).is_dir():
            raise ConfigError([f"is a folder; give the path of a file. {WRITE_ONE}"], str(path))
        return cls.from_dict(read_object(Path(path)), str(path))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], source: str = "the machine") -> Machine:
        """Return the machine of a document that has the form of the file; errors as of ``load``."""
        version = document.get("format")
        if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT:
            problem = f"format is {version}, and this version reads formats up to {FORMAT}; upgrade zeromesh"
            raise ConfigError([f"{problem}, or measure the machine again with 'zeromesh doctor --save'"], source)
        problems = list(_problems(document, DOCUMENT))
        if problems:
            raise ConfigError(problems, source)
        kinds = tuple((_node(entry), entry["count"]) for entry in document["nodes"])
        notes = tuple(document.get("notes", ()))
        return cls(kinds, LinkSpeed(**document["between"]), document.get("name", ""), notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the form of the file, for ``json.dumps``."""
        return {
            "format": FORMAT,
            "name": self.name,
            "notes": list(self.notes),
            "between": asdict(self.between),
            "nodes": [{"count": count} | _plain(node) for node, count in self.nodes],
        }

    def save(self, path: str | Path) -> None:
        """Write a ``machine.json``; a file that is there is replaced as a whole.

        Raises:
            ValueError: the machine has impossible values, or the path is a folder.
        """
        document, path = self.as_dict(), Path(path)
        if path.is_dir():
            raise ConfigError(["is a folder; give the path of the file to write"], str(path))
        Machine.from_dict(document)  # a file that cannot be read again is not written
        write_text(path, json.dumps(document, indent=2) + "\n")


class FieldRule(NamedTuple):
    """Rule of a field of the file."""

    text: str  # stands after "must be" in an error
    holds: Callable[[Any], bool]
    remedy: str = "write the one that was measured, or of a data sheet"


def _number(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    # Whole numbers of JSON may be larger than any float.
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value < 1e300 and holds(value)
    )


def _filled(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and bool(value)


POSITIVE = FieldRule("a number above 0", _number(lambda value: value > 0))
NOT_NEGATIVE = FieldRule("0 or a number above it", _number(lambda value: value >= 0), "take 0 if there is none")
BYTES = FieldRule(
    "a number above 0: bytes, from 10^6 on",
    _number(lambda value: value >= 1e6),
    "write the one that was measured, or of a data sheet, in bytes: 80e9 for 80 GB",
)
SHARE = FieldRule("above 0 and at most 1", _number(lambda value: 0 < value <= 1))
COUNT = FieldRule("a whole number from 1 on", _number(lambda value: isinstance(value, int) and value >= 1))
TEXT = FieldRule("text", lambda value: isinstance(value, str), "put it in quotes")
FLAG = FieldRule(
    "true or false", lambda value: isinstance(value, bool), "it is true for ranks that compute on the host's own cores"
)
OBJECT = FieldRule("an object", lambda value: isinstance(value, Mapping))

RULES: dict[str, FieldRule] = {  # of fields that are not numbers above 0
    **dict.fromkeys(("efficiency", "product_efficiency", "memory_efficiency"), SHARE),
    **dict.fromkeys(("attention_forward", "attention_backward"), SHARE),
    **dict.fromkeys(("devices", "cores", "shared", "count"), COUNT),
    **dict.fromkeys(("latency", "launch", "reserved", "product_padding", "product_fill", "cache"), NOT_NEGATIVE),
    **dict.fromkeys(("cache_bandwidth", "loss_bandwidth", "disk_read", "disk_write", "disk", "price"), NOT_NEGATIVE),
    **dict.fromkeys(("attention_bandwidth", "attention_bandwidth_back"), NOT_NEGATIVE),
    **dict.fromkeys(("name", "source"), TEXT),
    **dict.fromkeys(("memory", "host_memory"), BYTES),
    **dict.fromkeys(("device", "inside", "host", "between"), OBJECT),
    "processor": FLAG,
    "flops": FieldRule("an object of operations per second by dtype", _filled(Mapping), "such as 1e14 for bf16"),
    "nodes": FieldRule("a list with an object for each kind of node", _filled(list), WRITE_ONE),
    "format": FieldRule(str(FORMAT), lambda value: value is not True and value == FORMAT, WRITE_ONE),
    "notes": FieldRule(
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(note, str) for note in value),
        "leave it out if there are none",
    ),
}

OBJECTS: dict[str, type] = {"device": Device, "inside": LinkSpeed, "host": LinkSpeed, "between": LinkSpeed}
DOCUMENT = {"format": True, "nodes": True, "between": True, "name": False, "notes": False}  # keys, and which must be


def _keys_of(kind: type) -> dict[str, bool]:
    """Return the keys of an object of the file, and of each whether it must be there."""
    return {item.name: item.default is MISSING for item in fields(kind)}


def _problems(value: Any, keys: Mapping[str, bool], path: str = "") -> Iterator[str]:
    """Yield the problems of one object of the file, and of what is in it."""
    if not isinstance(value, Mapping):
        wanted = ", ".join(name for name, must in keys.items() if must)
        yield f"{path} is {show(value)}, but must be an object with at least {wanted}; {WRITE_ONE}"
        return
    dot = f"{path}." if path else ""
    for key in value:
        if key not in keys:
            close = nearest(str(key), keys)
            remedy = f"did you mean {close}?" if close else f"the keys here are {', '.join(keys)}"
            yield f"{dot}{key} is {show(value[key])}, but there is no such key; {remedy}"
    for key, must in keys.items():
        rule, where = RULES.get(key, POSITIVE), f"{dot}{key}"
        if key not in value:
            if must:
                yield f"{where} is missing, and must be {rule.text}; {WRITE_ONE}"
        elif key in OBJECTS:
            yield from _problems(value[key], _keys_of(OBJECTS[key]), where)
        elif not rule.holds(value[key]):
            yield f"{where} is {show(value[key])}, but must be {rule.text}; {rule.remedy}"
        elif key == "nodes":
            for index, entry in enumerate(value[key]):
                yield from _problems(entry, _keys_of(Node) | {"count": True}, f"{where}[{index}]")
        elif key == "flops":
            for dtype, speed in value[key].items():
                rest = f"must be {POSITIVE.text}; {POSITIVE.remedy}"
                rest = rest if dtype in WIDTHS else f"there is no such dtype; known are {', '.join(WIDTHS)}"
                if dtype not in WIDTHS or not POSITIVE.holds(speed):
                    yield f"{where}.{dtype} is {show(speed)}, but {rest}"


def _node(entry: Mapping[str, Any]) -> Node:
    return Node(
        **{key: OBJECTS[key](**value) if key in OBJECTS else value for key, value in entry.items() if key != "count"}
    )


def _plain(node: Node) -> dict[str, Any]:
    # ``asdict`` copies a mapping of another class than dict as that class, which JSON cannot write.
    values = asdict(node)
    return values | {"device": values["device"] | {"flops": dict(node.device.flops)}}
