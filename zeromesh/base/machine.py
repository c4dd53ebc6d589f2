"""The machine: versions, devices, processor, memory and disk, their measured speeds, and the memory of this process."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zeromesh.base.devices import find_accelerator
from zeromesh.base.kernels.measure import copy_speed, product_speed
from zeromesh.base.kernels.native import examine
from zeromesh.base.requirements import LEAST_TORCH, OPTIONAL, pip_install, torch_release
from zeromesh.base.version import VERSION
from zeromesh.base.words import counted

MACHINE = "ZEROMESH_MACHINE"
"""Variable with the path of a machine.json, in place of presets and of what is measured."""

# Flags of processors that say how fast matrix products are, as Linux names them.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm")

DISK_BYTES = 64 << 20
DISK_SECONDS = 2.0
MEMORY_BYTES = 256 << 20  # larger than most caches


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> list[dict[str, Any]]:
    """Return the accelerators that torch can use, ``{type, index, name, memory_bytes, free_bytes}``; None: unknown."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    accelerators = []
    for index in range(torch.accelerator.device_count()):
        device = {"type": accelerator.type, "index": index, "name": None, "memory_bytes": None, "free_bytes": None}
        if accelerator.type == "cuda":
            free, total = torch.cuda.mem_get_info(index)
            device |= {"name": torch.cuda.get_device_name(index), "memory_bytes": total, "free_bytes": free}
        accelerators.append(device)
    return accelerators


def processor() -> dict[str, Any]:
    """Return ``{model, cores, instructions}``: cores that this process may use, which of ``INSTRUCTIONS`` they have."""
    lines = read_lines("/proc/cpuinfo")
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((values.get("flags") or values.get("Features") or "").split())  # of x86, of ARM
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "model": values.get("model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "instructions": [name for name in INSTRUCTIONS if name in flags],
    }


def memory() -> dict[str, Any]:
    """Return the host's memory in bytes; ``shared`` is /dev/shm, and None stands for what is unknown."""
    values = {
        key: int(rest.split()[0]) * 1024 for key, _, rest in (x.partition(":") for x in read_lines("/proc/meminfo"))
    }
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "total_bytes": values.get("MemTotal"),
        "available_bytes": values.get("MemAvailable"),
        "limit_bytes": memory_limit(),
        "shared_bytes": shared and shared.total,
        "shared_free_bytes": shared and shared.free,
    }


def memory_limit(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes of host memory that the control groups of this process allow it; None for no limit."""
    limits = []  # each group above sets one too, and the lowest counts
    for line in read_lines(groups):
        _, kinds, name = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        # The first version of control groups has a folder per kind of resource, the second one for all.
        top, file = (Path(root, "memory"), "memory.limit_in_bytes") if kinds else (Path(root), "memory.max")
        folder = Path(f"{top}{name}")
        for place in (folder, *folder.parents):
            text = "".join(read_lines(str(place / file))).strip()
            if text.isdecimal() and int(text) < 1 << 60:  # the first version's word for none is a huge number
                limits.append(int(text))
            if place == top:
                break
    return min(limits, default=None)


def memory_bandwidth(threads: int) -> float:
    """Return the bytes per second that all cores together read and write in copies of large memory."""
    available = memory()["available_bytes"] or 8 * MEMORY_BYTES
    count = max(1 << 20, min(MEMORY_BYTES, available // 8))
    with cpu_threads(threads):
        return copy_speed(torch.device("cpu"), count)


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads in this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def disk(folder: Path) -> dict[str, Any]:
    """Return ``{folder, free_bytes, write_bytes_per_second, read_bytes_per_second, error}``; None: unknown."""
    unknown = ("free_bytes", "write_bytes_per_second", "read_bytes_per_second", "error")
    facts: dict[str, Any] = {"folder": str(folder.absolute()), **dict.fromkeys(unknown)}
    try:
        facts["free_bytes"] = shutil.disk_usage(folder).free
        if facts["free_bytes"] < 2 * DISK_BYTES:
            return facts | {"error": f"less than {2 * DISK_BYTES} bytes are free, too few to measure its speed"}
        with tempfile.TemporaryFile(dir=folder, prefix=".zeromesh-", buffering=0) as file:
            block = os.urandom(4 << 20)  # a disk may compress
            written, start = 0, time.perf_counter()
            while written < DISK_BYTES and time.perf_counter() - start < DISK_SECONDS:
                written += file.write(block)
                os.fsync(file)
            facts["write_bytes_per_second"] = written / (time.perf_counter() - start)
            if hasattr(os, "posix_fadvise"):
                # The system's own copy in memory must not be read. What a disk keeps in a memory of its own counts.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                count, start = 0, time.perf_counter()
                while time.perf_counter() - start < DISK_SECONDS and (read := len(file.read(len(block)))):
                    count += read
                facts["read_bytes_per_second"] = count / (time.perf_counter() - start)
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def inventory(folder: Path) -> dict[str, Any]:
    """Return all about this machine: ``{host, versions, devices, unused_gpus, processor, kernels, memory, disk}``."""
    cores, (instructions, missing) = processor(), examine()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # on purpose
    return {
        "host": socket.gethostname(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "zeromesh": VERSION,
            "packages": {name: {"version": installed(name), "install": pip_install(name)} for name in OPTIONAL},
        },
        "devices": devices(),
        "unused_gpus": 0 if torch.cuda.is_available() or hidden else len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "processor": cores,
        "kernels": {"instructions": instructions or None, "missing": missing},
        "memory": memory() | {"bandwidth_bytes_per_second": memory_bandwidth(cores["cores"])},
        "disk": disk(folder),
    }


def problems(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the obstacles to training in an inventory, each as ``{problem, remedy}``."""
    torch_version, gpus = facts["versions"]["torch"], facts["unused_gpus"]
    folder, free, error = (facts["disk"][name] for name in ("folder", "free_bytes", "error"))
    shared, available = facts["memory"]["shared_bytes"], facts["memory"]["available_bytes"]
    checks = [
        (
            torch_release(torch_version) < LEAST_TORCH,
            f"torch is {torch_version}, and ZeroMesh needs {'.'.join(map(str, LEAST_TORCH))} or later",
            "pip install --upgrade torch",
        ),
        (
            gpus > 0,
            f"the machine has {counted(gpus, 'Nvidia device')}, and torch {torch_version} cannot use them",
            "install a torch built for CUDA, and a driver that is as new; nvidia-smi shows the driver",
        ),
        (
            shared is not None and shared < 256 << 20,
            f"/dev/shm has {(shared or 0) >> 20} MiB, and processes that load data pass their tensors through it",
            "give a container more: docker run --shm-size=8g, or --ipc=host",
        ),
        (
            available is not None and available < 1 << 30,
            f"{(available or 0) >> 20} MiB of host memory are available",
            "end what uses the memory, or take a machine with more",
        ),
        (
            error is not None and free is None,
            f"the folder {folder} cannot be used: {error}",
            "name another one with --folder",
        ),
        (
            # With less, the error says that there was too little to measure, which the next line tells better.
            error is not None and free is not None and free >= 2 * DISK_BYTES,
            f"the folder {folder} cannot be written: {error}",
            "name another one with --folder, where checkpoints are to be written",
        ),
        (
            free is not None and free < 5 << 30,
            f"{(free or 0) >> 20} MiB are free in {folder}",
            "make room before training, or write checkpoints elsewhere: a model's states take 16 bytes per parameter",
        ),
    ]
    return [{"problem": problem, "remedy": remedy} for wrong, problem, remedy in checks if wrong]


def read_lines(file: str | Path) -> list[str]:
    """Return the lines of a file of the system; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(file).read_text(errors="replace").splitlines()
    return []


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second that this process can at best do in matrix products."""
    if device.type == "cuda" and dtype.itemsize == 2:
        accelerator = find_accelerator(torch.cuda.get_device_name(device))
        flops = accelerator.flops.get("bf16" if dtype is torch.bfloat16 else "fp16") if accelerator else None
        if flops is not None:
            return flops
    return product_speed(device, dtype)


def live_bytes(device: torch.device) -> int:
    """Return the bytes in use now: tensors on an accelerator; on a CPU the resident memory of the process."""
    if device.type != "cpu":
        return int(torch.accelerator.memory_allocated(device))
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that have been in use, in the same sense, since the process started; 0 if unknown."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    # That of this program: a process that was started begins with its parent's ``ru_maxrss``.
    peak_line = next((line for line in read_lines("/proc/self/status") if line.startswith("VmHWM:")), None)
    if peak_line is not None:
        return int(peak_line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
