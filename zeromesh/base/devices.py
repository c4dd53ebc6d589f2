"""Accelerators: names, memory, peak operations and memory bandwidth, from the makers' data sheets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple


class Accelerator(NamedTuple):
    """One kind of accelerator. Operations are those of products without sparsity, sums in fp32; 0: not supported."""

    short: str  # name for a command line
    name: str  # as torch.cuda.get_device_name gives it
    words: str  # further words that a name of it may have
    gib: float  # memory that torch reports, which is less than the data sheet's: some is kept for ECC and the driver
    fp32: float  # 10^12 operations per second, as the following
    tf32: float
    fp16: float
    bf16: float
    fp8: float
    bandwidth: float  # of its memory, 10^9 bytes per second
    reached: float  # share of the peak that the best large products in 16 bits reach; 0: not measured
    sheet: str  # row of ``SHEETS``

    @property
    def flops(self) -> dict[str, float]:
        """Operations per second by dtype, of the dtypes that it supports."""
        names = ("fp32", "tf32", "fp16", "bf16", "fp8")
        return {name: value * 1e12 for name in names if (value := getattr(self, name))}

    @property
    def source(self) -> str:
        """The document that the figures are from."""
        return SHEETS[self.sheet]


HARDWARE: dict[str, Any] = json.loads(Path(__file__).with_name("hardware.json").read_text(encoding="utf-8"))
"""Tables of devices, links and nodes, whose columns are the fields of ``Accelerator``, ``LinkRow`` and ``NodeRow``."""

# Where a maker prints figures with sparsity, they are halved. The share that is reached: S. Bekman, Machine Learning
# Engineering, 2026, table of the most operations in products that were measured.
SHEETS: dict[str, str] = HARDWARE["sheets"]
ACCELERATORS = tuple(Accelerator(*row) for row in HARDWARE["accelerators"])

# Words of names that tell nothing about the kind.
COMMON = {"nvidia", "amd", "tesla", "geforce", "instinct", "rtx", "gpu", "dgx", "hgx"}


def find_accelerator(name: str) -> Accelerator | None:
    """Return the first kind with all words of a name, such as "NVIDIA H100 PCIe", "A100-80GB" or "4090"; else None."""
    wanted = _words(name)
    for row in ACCELERATORS:
        words = _words(f"{row.short} {row.name} {row.words}")
        # Size or form alone would fit several kinds.
        model = next(word for word in _ordered(row.short) if any(map(str.isdigit, word)))
        if model in wanted and wanted <= words:
            return row
    return None


def _words(name: str) -> set[str]:
    return set(_ordered(name)) - COMMON


def _ordered(name: str) -> list[str]:
    text = re.sub(r"(?<=rtx)(?=\d)", " ", name.lower())  # "RTX4090"
    text = re.sub(r"(\d)[ _-]?gi?b?\b", r"\1gb", text)  # "80 GB", "80G", "80GiB"
    return re.findall(r"[a-z0-9]+", text)
