"""How fast states come and go between host memory and a disk: ``make bench-nvme``, or

    python benchmarks/nvme.py --folder /mnt/nvme --megabytes 1024

Ways to move the same bytes take turns, round by round, on one file: ZeroMesh's store, threads with and without direct
I/O, a mapped file, and ``dd`` processes, which show what the disk does for programs in C. Read, written, and half of
each at once. Then the store with requests of several sizes, several at a time, and what checksums cost. The figures go
to a JSON file and a page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import ROOT, commit, free_name, machine, positive
from page import lines_of, link
from zeromesh.shard.store import nvme
from zeromesh.shard.store.memory import Buffer
from zeromesh.shard.store.nvme import MIB, FileStore
from zeromesh.shard.store.swap_file import SwapFile

MODES = ("read", "write", "both")
REQUEST = tuple[bool, int]
"""Whether it writes, and where."""

CHECKSUMS: dict[str, Callable[[memoryview], Any]] = {
    "CRC-32 (zlib)": zlib.crc32,
    "Adler-32 (zlib)": zlib.adler32,
    "SHA-1": lambda memory: hashlib.sha1(memory).digest(),
    "SHA-256": lambda memory: hashlib.sha256(memory).digest(),
    "BLAKE2b": lambda memory: hashlib.blake2b(memory).digest(),
}


def requests_of(mode: str, nbytes: int, block: int) -> list[REQUEST]:
    """All blocks read, all written, or by turns one of the first half read and one of the second half written."""
    if mode != "both":
        return [(mode == "write", offset) for offset in range(0, nbytes, block)]
    half = nbytes // 2
    return [(writes, offset + half * writes) for offset in range(0, half, block) for writes in (False, True)]


class Ways:
    """Ways to move the bytes of one file, all of the form ``way(mode)``.

    Args:
        folder: on the disk.
        nbytes: of the file.
        block, depth: bytes of a request, and how many there are at a time.
    """

    def __init__(self, folder: Path, nbytes: int, block: int, depth: int) -> None:
        self.nbytes, self.block, self.depth = nbytes, block, depth
        self.buffer = noise(nbytes)
        self.file = SwapFile(folder, 0)
        self.file.reserve(nbytes)
        self.plain = os.open(self.file.path, os.O_RDWR)
        self.noise = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115  # in memory, for dd
        self.noise.write(self.buffer.view)
        self.noise.flush()
        self.table: dict[str, Callable[[str], None]] = {
            "dd, one process": lambda mode: self.dd(mode, 1),
            f"dd, {depth} processes": lambda mode: self.dd(mode, depth),
            "threads, direct": self.direct,
            "threads, buffered": self.buffered,
            "mapped (from_file)": self.mapped,
        }
        self.direct("write")

    def direct(self, mode: str) -> None:
        """What the store does, without checksums and bookkeeping."""
        self.threads(mode, self.file._descriptor)

    def threads(self, mode: str, descriptor: int) -> None:
        """Requests that threads take from one list."""
        view, waiting = self.buffer.view, iter(requests_of(mode, self.nbytes, self.block))

        def work() -> None:
            for writes, offset in waiting:
                part = [view[offset : offset + self.block]]
                done = os.pwritev(descriptor, part, offset) if writes else os.preadv(descriptor, part, offset)
                assert done == len(part[0])

        threads = [Thread(target=work) for _ in range(self.depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def buffered(self, mode: str) -> None:
        """Through the page cache; done when it is on the disk."""
        self.threads(mode, self.plain)
        os.fdatasync(self.plain)

    def mapped(self, mode: str) -> None:
        """``UntypedStorage.from_file``, and copies; done when it is on the disk."""
        storage = torch.UntypedStorage.from_file(str(self.file.path), shared=True, nbytes=self.nbytes)
        mapped = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self.nbytes,), (1,))
        for writes, offset in requests_of(mode, self.nbytes, self.block):
            ours, theirs = (part[offset : offset + self.block] for part in (self.buffer.memory, mapped))
            (theirs if writes else ours).copy_(ours if writes else theirs)
        os.fdatasync(self.plain)

    def dd(self, mode: str, count: int) -> None:
        """Processes in C, each with a part of its own; half of them write where both is asked for."""
        parts = max(count // 2, 1) if mode == "both" else count
        share = self.nbytes // MIB // parts // (2 if mode == "both" else 1)
        commands = []
        for number, kind in enumerate({"read": "r", "write": "w", "both": "rw"}[mode]):
            for place in range(number * parts * share, (number + 1) * parts * share, share):
                ends = f"if={self.file.path} of=/dev/null iflag=direct skip={place}"
                if kind == "w":
                    ends = (
                        f"if={self.noise.name} of={self.file.path} oflag=direct conv=notrunc seek={place} skip={place}"
                    )
                commands.append(f'dd status=none bs={MIB} count={share} {ends} & all="$all $!"')
        subprocess.run(
            ["sh", "-c", "\n".join([*commands, "for one in $all; do wait $one || exit 1; done"])], check=True
        )

    def forget(self) -> None:
        """Let the page cache forget the file."""
        os.fdatasync(self.plain)
        os.posix_fadvise(self.plain, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Delete it."""
        os.close(self.plain)
        self.noise.close()
        self.file.delete()


def noise(nbytes: int) -> Buffer:
    """Bytes that cannot be made shorter."""
    buffer = Buffer(nbytes)
    part = buffer.memory[:MIB].random_()
    for offset in range(MIB, nbytes, MIB):
        buffer.memory[offset : offset + MIB] = part
    return buffer


class Stored:
    """A store with two regions; ``run(mode)`` moves both, or reads one and writes the other."""

    def __init__(self, folder: Path, nbytes: int, block: int, depth: int) -> None:
        self.store = FileStore(folder, block_size=block, queue_depth=depth)
        self.regions = [self.store.allocate(nbytes // 2) for _ in range(2)]
        self.store.reserve()
        self.buffers = [noise(nbytes // 2) for _ in range(2)]
        self.run("write")

    def run(self, mode: str) -> None:
        """Begin all, then wait."""
        actions = {"read": ("read", "read"), "write": ("write", "write"), "both": ("read", "write")}[mode]
        begun = [
            getattr(self.store, action)(region, buffer)
            for action, region, buffer in zip(actions, self.regions, self.buffers, strict=True)
        ]
        for pending in begun:
            pending.wait()


@contextmanager
def no_checksums() -> Iterator[None]:
    """The store, without looking at what it moves."""
    kept, nvme.checksum = nvme.checksum, lambda memory: 0  # type: ignore[assignment]
    try:
        yield
    finally:
        nvme.checksum = kept


def processor() -> float:
    """Seconds of this process and its children so far."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def timed(run: Callable[[str], None], mode: str, nbytes: int) -> dict[str, float]:
    """GB/s, and seconds of the processor per GB."""
    busy, start = processor(), time.perf_counter()
    run(mode)
    seconds = time.perf_counter() - start
    return {"rate": nbytes / 1e9 / seconds, "cpu": (processor() - busy) / (nbytes / 1e9)}


def compare(folder: Path, nbytes: int, block: int, depth: int, rounds: int) -> list[dict[str, Any]]:
    """A row per way: in each mode a figure per round."""
    ways, stored = Ways(folder, nbytes, block, depth), Stored(folder, nbytes, block, depth)
    with no_checksums():
        bare = Stored(folder, nbytes, block, depth)

    def run_bare(mode: str) -> None:
        with no_checksums():
            bare.run(mode)

    table = {**ways.table, "store, checksums off": run_bare, "store": stored.run}
    rows: dict[str, dict[str, list[dict[str, float]]]] = {name: {mode: [] for mode in MODES} for name in table}
    names = list(table)
    try:
        for number in range(rounds):
            first = number % len(names)
            for mode in MODES:
                for name in names[first:] + names[:first]:
                    ways.forget()
                    rows[name][mode].append(timed(table[name], mode, nbytes))
            print(f"round {number + 1} of {rounds}", flush=True)
    finally:
        ways.close()
        stored.store.close()
        bare.store.close()
    return [{"name": name, **modes} for name, modes in rows.items()]


def sweep(folder: Path, nbytes: int, blocks: Sequence[int], depths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The store with requests of several sizes, several at a time."""
    rows = [{"block": block, "depth": depth, **{mode: [] for mode in MODES}} for block in blocks for depth in depths]
    for number in range(rounds):
        for row in rows:
            stored = Stored(folder, nbytes, row["block"], row["depth"])
            for mode in MODES:
                row[mode].append(timed(stored.run, mode, nbytes)["rate"])
            stored.store.close()
        print(f"sweep {number + 1} of {rounds}", flush=True)
    return rows


def checksum_rates(rounds: int) -> dict[str, list[float]]:
    """GB/s of one core, over blocks of 1 MiB."""
    memory = noise(16 * MIB).view
    found: dict[str, list[float]] = {name: [] for name in CHECKSUMS}
    for _ in range(rounds):
        for name, function in CHECKSUMS.items():
            start = time.perf_counter()
            for begin in range(0, len(memory), MIB):
                function(memory[begin : begin + MIB])
            found[name].append(len(memory) / 1e9 / (time.perf_counter() - start))
    return found


def told(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    head = ["", *(f"{name}, GB/s" for name in ("read", "write", "half of each")), "CPU s per GB, read", "write"]
    table = [head]
    for row in result["ways"]:
        rates = [told([one["rate"] for one in row[mode]]) for mode in MODES]
        busy = [f"{median(one['cpu'] for one in row[mode]):.2f}" for mode in ("read", "write")]
        table.append([row["name"], *rates, *busy])
    depths = sorted({row["depth"] for row in result["sweep"]})
    grid = [["requests of", *(f"{depth} at a time" for depth in depths)]]
    for block in sorted({row["block"] for row in result["sweep"]}):
        cells = [row for row in result["sweep"] if row["block"] == block]
        cells.sort(key=lambda row: row["depth"])
        found = [" / ".join(f"{median(row[mode]):.2f}" for mode in MODES) for row in cells]
        grid.append([f"{block >> 10} KiB", *found])
    sums = [["", "GB/s per core"], *([name, told(values)] for name, values in result["checksums"].items())]
    return "\n\n".join([
        f"# NVMe files, {result['date']}",
        f"""Commit {result["commit"]}; {result["machine"]}; {result["system"]}; torch {result["torch"]}. Made by
`make bench-nvme`; the figures are in [{result["name"]}.json]({result["name"]}.json).""",
        f"""Each way reads and writes {result["megabytes"]} MiB in one file that has been written before, by requests of
{result["block"] >> 10} KiB, {result["depth"]} at a time unless a row says otherwise. All ways take turns for
{result["rounds"]} round(s). The table has the median of the rounds, and the least and the most. *half of each* reads
one half of the file while it writes the other half, and counts both. Before each turn the page cache drops the file. A
turn ends when the data is on the disk.""",
        """- *dd* shows what the disk can do: processes in C with direct I/O in requests of 1 MiB, each on its part of
  the file. They write from a file in memory.
- *threads* are Python threads that call `preadv` and `pwritev`.
- *mapped* copies from and to `UntypedStorage.from_file`.
- *store* is ZeroMesh's: `zeromesh.shard.store.nvme.FileStore`. It also compares checksums of all that it reads.""",
        lines_of(table),
        f"""## The store, by size and number of requests

GB/s of read / write / half of each; medians of {result["sweep_rounds"]} round(s), {result["sweep_megabytes"]} MiB.""",
        lines_of(grid),
        """## Checksums

For blocks of 1 MiB in the cache. The threads of the store compute them, at the same time as other requests.""",
        lines_of(sums),
    ]) + "\n"  # fmt: skip


def main() -> None:
    """Measure, and write figures and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--megabytes", type=positive, default=512, help="MiB that are moved at a time")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--block", type=positive, default=1024, help="KiB of a request")
    parser.add_argument("--depth", type=positive, default=8, help="requests at a time")
    parser.add_argument("--blocks", type=positive, nargs="+", default=[128, 512, 1024, 4096, 16384], help="KiB, swept")
    parser.add_argument("--depths", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="swept")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    given = parser.parse_args()
    nbytes, block, rounds = given.megabytes * MIB, given.block << 10, given.rounds
    if nbytes % (2 * given.depth * max(block, MIB)):
        parser.error(f"--megabytes {given.megabytes} cannot be cut into two halves of {given.depth} times --block")
    date, uname = time.strftime("%Y-%m-%d"), os.uname()
    path = free_name(given.out, f"{date}-nvme")
    swept = max(nbytes // 2, 2 * MIB)
    result: dict[str, Any] = {
        "date": date, "name": path.stem, "commit": commit(), "machine": machine(), "torch": torch.__version__,
        "system": f"{uname.sysname} {uname.release.split('-')[0]}", "megabytes": given.megabytes, "rounds": rounds,
        "block": block, "depth": given.depth, "ways": compare(given.folder, nbytes, block, given.depth, rounds),
        "sweep_rounds": min(rounds, 3), "sweep_megabytes": swept // MIB,
        "sweep": sweep(given.folder, swept, [size << 10 for size in given.blocks], given.depths, min(rounds, 3)),
        "checksums": checksum_rates(rounds),
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    target = path.with_suffix(".md")
    target.write_text(page(result))
    link(target, f"NVMe files, compared with other ways to access a disk; {machine()}.")
    print(page(result))


if __name__ == "__main__":
    main()
