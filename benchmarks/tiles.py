"""Peak memory and time of a step against the length of one sample, with tiles over tokens and without.

    python benchmarks/tiles.py [--lengths 512 1024 2048 4096] [--markdown FILE]

The model is the small Llama of ``planned_peaks.py`` in fp32, with blocks that are computed again; its states are
subtracted. Tiles have 256 tokens, and the loss comes in chunks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plan_layouts import heap_library
from plan_rows import RECOMPUTE, zero
from planned_peaks import Peak, Setting, measured, planned, tiled

TOKENS = 256  # of a tile


def rows(lengths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield "| tokens | whole, MB (planned) | tiles, MB (planned) | whole, s | tiles, s |"
    yield "| --- | --- | --- | --- | --- |"
    ways = {"whole": {}, "tiles": tiled(TOKENS, loss=True)}
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            cells: list[list[str]] = [[], []]
            for way in ways.values():
                setting = Setting("llama", zero(3) | RECOMPUTE | way, length, bf16=False)
                if not cells[0]:
                    measured(setting, folder)  # what torch keeps from the first use on would count
                found: Peak = measured(setting, folder)
                sizes = [(size - found.rest) / 1e6 for size in (found.bytes, planned(setting, folder))]
                cells[0].append(f"{sizes[0]:.1f} ({sizes[1]:.1f})")
                cells[1].append(f"{found.seconds:.2f}")
            yield f"| {length:,} | " + " | ".join((*cells[0], *cells[1])) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of a sample")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    given = parser.parse_args()
    if "heap_events" not in os.environ.get("LD_PRELOAD", ""):
        # A library can be preloaded when a process begins only.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(heap_library())})
    began, lines = time.perf_counter(), []
    for line in rows(given.lengths):
        lines.append(line)
        print(line, flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if given.markdown:
        given.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
