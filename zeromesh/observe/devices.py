"""Accelerators: names, memory, peak operations and memory bandwidth, from the makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple


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


# The last column's documents. Where a maker prints figures with sparsity, they are halved.
SHEETS = {
    "v100": "Nvidia, V100 data sheet, 2020",
    "a100": "Nvidia, A100 data sheet, 2021",
    "h100": "Nvidia, H100 data sheet, 2024; with sparsity there, halved here",
    "h100-96gb": "TorchTitan (Liang et al., 2024): H100 with 96 GB HBM2e, limited to 500 W; operations of the H100 SXM",
    "h200": "Nvidia, H200 data sheet, 2024; with sparsity there, halved here",
    "h800": "Nvidia, H100 data sheet, 2024; the H800 differs in NVLink: 400 GB/s",
    "b200": "Nvidia, DGX B200 data sheet, 2024; an eighth of the node's",
    "b300": "Nvidia, DGX B300 data sheet, 2025; an eighth of the node's",
    "gb200": "Nvidia, GB200 NVL72 data sheet, 2024; a 72nd of the rack's, with sparsity there, halved here",
    "gb300": "Nvidia, GB300 NVL72 data sheet, 2025; a 72nd of the rack's, with sparsity there, halved here",
    "gh200": "Nvidia, GH200 data sheet, 2023; with sparsity there, halved here",
    "mi300x": "AMD, Instinct MI300X data sheet, 2023",
    "l4": "Nvidia, L4 data sheet, 2023; with sparsity there, halved here",
    "l40s": "Nvidia, L40S data sheet, 2023",
    "ga102": "Nvidia, Ampere GA102 architecture whitepaper, 2021",
    "ad102": "Nvidia, Ada GPU architecture whitepaper, 2023",
    "gb202": "Nvidia, RTX Blackwell GPU architecture whitepaper, 2025",
    "a10": "Nvidia, A10 data sheet, 2021",
    "a10g": "Nvidia, A10G data sheet for AWS, 2021",
    "t4": "Nvidia, T4 data sheet, 2019",
}

# Of rows that a name fits, the first counts. The share that is reached: S. Bekman, Machine Learning Engineering,
# 2026, table of the most operations in products that were measured.
ACCELERATORS = tuple(
    Accelerator(*row)
    for row in (
        ("v100-32gb", "Tesla V100-SXM2-32GB", "sxm sxm3 dgxs ls h", 31.7, 15.7, 0, 125, 0, 0, 900, 0, "v100"),
        ("v100-16gb", "Tesla V100-SXM2-16GB", "sxm", 15.7, 15.7, 0, 125, 0, 0, 900, 0, "v100"),
        ("v100-pcie-32gb", "Tesla V100-PCIE-32GB", "", 31.7, 14, 0, 112, 0, 0, 900, 0, "v100"),
        ("v100-pcie-16gb", "Tesla V100-PCIE-16GB", "", 15.7, 14, 0, 112, 0, 0, 900, 0, "v100"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", "sxm", 79.1, 19.5, 156, 312, 312, 0, 2039, 0.87, "a100"),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", "sxm", 39.3, 19.5, 156, 312, 312, 0, 1555, 0.87, "a100"),
        ("a100-pcie-80gb", "NVIDIA A100 80GB PCIe", "", 79.1, 19.5, 156, 312, 312, 0, 1935, 0.81, "a100"),
        ("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", "", 39.3, 19.5, 156, 312, 312, 0, 1555, 0.81, "a100"),
        ("h100", "NVIDIA H100 80GB HBM3", "sxm sxm5", 79.1, 67, 494.5, 989.5, 989.5, 1979, 3350, 0.80, "h100"),
        ("h100-pcie", "NVIDIA H100 PCIe", "80gb hbm2e", 79.1, 51, 378, 756.5, 756.5, 1513, 2000, 0, "h100"),
        ("h100-nvl", "NVIDIA H100 NVL", "94gb hbm3", 93.0, 60, 417.5, 835.5, 835.5, 1670.5, 3900, 0, "h100"),
        ("h100-96gb", "NVIDIA H100 96GB HBM2e", "sxm", 94.9, 67, 494.5, 989.5, 989.5, 1979, 2400, 0, "h100-96gb"),
        ("h200", "NVIDIA H200", "sxm sxm5 141gb hbm3e", 139.7, 67, 494.5, 989.5, 989.5, 1979, 4800, 0.80, "h200"),
        ("h200-nvl", "NVIDIA H200 NVL", "141gb", 139.7, 60, 417.5, 835.5, 835.5, 1670.5, 4800, 0, "h200"),
        ("h800", "NVIDIA H800", "sxm 80gb hbm3", 79.1, 67, 494.5, 989.5, 989.5, 1979, 3350, 0.80, "h800"),
        ("b200", "NVIDIA B200", "sxm sxm6 180gb 192gb", 178.3, 75, 1125, 2250, 2250, 4500, 8000, 0.78, "b200"),
        ("gb200", "NVIDIA GB200", "186gb", 184.3, 80, 1250, 2500, 2500, 5000, 8000, 0.73, "gb200"),
        ("b300", "NVIDIA B300 SXM6 AC", "sxm 288gb", 267.6, 75, 1125, 2250, 2250, 4500, 8000, 0.79, "b300"),
        ("gb300", "NVIDIA GB300", "288gb", 276.5, 80, 1250, 2500, 2500, 5000, 8000, 0.73, "gb300"),
        ("gh200", "NVIDIA GH200 480GB", "96gb", 94.5, 67, 494.5, 989.5, 989.5, 1979, 4000, 0.84, "gh200"),
        ("gh200-144gb", "NVIDIA GH200 144G HBM3e", "", 139.7, 67, 494.5, 989.5, 989.5, 1979, 4900, 0.84, "gh200"),
        (
            "mi300x",
            "AMD Instinct MI300X",
            "192gb oam",
            191.6,
            163.4,
            653.7,
            1307.4,
            1307.4,
            2614.9,
            5300,
            0.51,
            "mi300x",
        ),
        ("l4", "NVIDIA L4", "24gb", 22.0, 30.3, 60, 121, 121, 242.5, 300, 0, "l4"),
        ("l40s", "NVIDIA L40S", "48gb", 44.3, 91.6, 183, 362, 362, 733, 864, 0, "l40s"),
        ("rtx-3090", "NVIDIA GeForce RTX 3090", "24gb", 23.6, 35.6, 35.6, 71, 71, 0, 936, 0, "ga102"),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", "24gb", 23.5, 82.6, 82.6, 165.2, 165.2, 330.3, 1008, 0, "ad102"),
        ("rtx-5090", "NVIDIA GeForce RTX 5090", "32gb", 31.3, 104.8, 104.8, 209.5, 209.5, 419, 1792, 0, "gb202"),
        ("a10", "NVIDIA A10", "24gb", 22.0, 31.2, 62.5, 125, 125, 0, 600, 0, "a10"),
        ("a10g", "NVIDIA A10G", "24gb", 22.0, 35, 35, 70, 70, 0, 600, 0, "a10g"),
        ("t4", "Tesla T4", "16gb", 14.5, 8.1, 0, 65, 0, 0, 320, 0, "t4"),
    )
)

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
