"""Seconds, bytes and memory of a checkpoint's manifests over ranks, beside the metadata of torch's DCP.

    python benchmarks/manifest_scale.py --ranks 64 1024 16384

A model of ``--units`` blocks with four matrices and AdamW's two states each is sharded over the ranks as ZeRO-3 does.
The manifests of all ranks are written, one after the other, then the index; no tensors are. Then one rank in the middle
opens what it needs, in a process of its own: one of as many ranks, and one of half as many. ``written`` are the seconds
and bytes of a rank, and of the index; DCP's are those of the one file that it writes for all, and reads in every rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MATRICES = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
STATES = ("parameter", "optimizer/exp_avg", "optimizer/exp_avg_sq")
WIDTH = 64  # elements of a row; a rank has half a matrix and more or less


def ranges(rank: int, ranks: int, units: int) -> Iterator[tuple[str, list[int], int, int]]:
    """Yield what a rank has of each matrix: name, shape, and the range of its elements."""
    # A unit's matrices lie one after the other, and the ranks share them evenly.
    rows = max(1, ranks // 2)
    size = rows * WIDTH
    share = -(-len(MATRICES) * size // ranks)
    for unit in range(units):
        for number, matrix in enumerate(MATRICES):
            low, high = max(rank * share, number * size), min((rank + 1) * share, (number + 1) * size)
            if low < high:
                yield f"layers.{unit}.{matrix}.weight", [rows, WIDTH], low - number * size, high - number * size


def shard_of(rank: int, ranks: int, units: int) -> dict[str, Any]:
    """Return the entry of a rank's file, as ``ShardWriter.finish`` does."""
    boxes, place = [], 1000
    for state in STATES:
        for name, shape, start, stop in ranges(rank, ranks, units):
            end = place + 4 * (stop - start)
            name = f"{state}/{name}"
            boxes.append(
                {
                    "key": f"{name}[{start}:{stop}]",
                    "name": name,
                    "shape": shape,
                    "dtype": "float32",
                    "start": start,
                    "stop": stop,
                    "bytes": [place, end],
                    "sha256": f"{rank:064x}",
                }
            )
            place = end
    return {"file": f"rank_{rank:05d}.safetensors", "header": "0" * 64, "boxes": boxes}


def write(folder: Path, ranks: int, units: int) -> dict[str, float]:
    """Write the manifests of all ranks and the index; return the seconds and bytes of a rank, and of the index."""
    from zeromesh.checkpoint.rank_manifests import part_file, write_index, write_part

    began = time.perf_counter()
    for rank in range(ranks):
        write_part(folder, rank, shard_of(rank, ranks, units), {"scalars": {}, "members": {}}, flush=False)
    parts = time.perf_counter()
    write_index(folder, {"groups": []}, ranks)
    ended = time.perf_counter()
    return {
        "rank_s": (parts - began) / ranks,
        "rank_kB": (folder / part_file(ranks // 2)).stat().st_size / 1e3,
        "index_s": ended - parts,
        "index_MB": (folder / "manifest.json").stat().st_size / 1e6,
    }


def open_as(folder: Path, rank: int, ranks: int, units: int, written: int) -> dict[str, float]:
    """Open as one of ``ranks`` what ``written`` ranks have written; return seconds, memory and the ranks opened."""
    from zeromesh.checkpoint.boxes import Reader

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    reader = Reader(folder)
    for state in STATES:
        for name, shape, start, stop in ranges(rank, ranks, units):
            elements = shape[0] * WIDTH
            scale = reader.shape(f"{state}/{name}")[0] * WIDTH / elements
            reader.require(f"{state}/{name}", int(start * scale), int(stop * scale))
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"s": seconds, "MB": grown / 1024, "opened": len(reader.opened)}


def torch_metadata(folder: Path, ranks: int, units: int) -> dict[str, float]:
    """Write and read the metadata that DCP has of the same ranges; return seconds and bytes."""
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    began = time.perf_counter()
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for rank in range(ranks):
        for state in STATES:
            for name, shape, start, stop in ranges(rank, ranks, units):
                key = f"{state}/{name}"
                size = torch.Size([shape[0] * WIDTH])
                entry = tensors.setdefault(key, TensorStorageMetadata(TensorProperties(), size, []))
                chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start]))
                entry.chunks.append(chunk)
                places[MetadataIndex(key, chunk.offsets)] = _StorageInfo(
                    f"__{rank}_0.distcp", start, 4 * (stop - start)
                )
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(tensors, storage_data=places), file)
    written = time.perf_counter() - began
    del tensors, places
    began = time.perf_counter()
    with (folder / ".metadata").open("rb") as file:
        pickle.load(file)
    return {
        "write_s": written,
        "MB": (folder / ".metadata").stat().st_size / 1e6,
        "open_s": time.perf_counter() - began,
    }


def measured(work: Any, *arguments: Any) -> dict[str, float]:
    """Call a function in a process of its own, so that the memory of one does not hide that of another."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result: dict[str, float] = pool.apply(work, arguments)
    return {key: round(value, 4) for key, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--units", type=int, default=80)
    parser.add_argument("--dcp", type=int, default=1024, help="most ranks for which DCP's metadata are made")
    given = parser.parse_args()
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            line = {"ranks": ranks, "written": measured(write, folder, ranks, given.units)}
            for what, number in (("same", ranks), ("half", ranks // 2)):
                line[what] = measured(open_as, folder, number // 2, number, given.units, ranks)
            if ranks <= given.dcp:
                line["dcp"] = measured(torch_metadata, folder, ranks, given.units)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
