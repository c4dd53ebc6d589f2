"""Record small checkpoints of real libraries for tests that have to run without them.

``record_checkpoints.py FILE DEEPSPEED MEGATRON`` writes the zip FILE; the others are pythons that have DeepSpeed 0.19.8
and Megatron-Core 0.16.1. Each folder in it has ``held.pt``, with what the library itself held, or reads from its files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from harness import FOLDERS

DEEPSPEED = ((0, "bf16"), (2, "fp16"), (3, "bf16"))


def main(target: Path, deepspeed: str, megatron: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for stage, precision in DEEPSPEED:
            run(deepspeed, "deepspeed_writer.py", str(stage), precision, str(root / f"deepspeed-{stage}-{precision}"))
        for precision in ("fp32", "bf16"):
            run(megatron, "megatron_writer.py", str(root / f"megatron-{precision}"), precision)
        pack(root, target)


def run(python: str, script: str, *arguments: str) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([python, *ranks, str(Path(__file__).parent / script), *arguments], env=variables, check=True)


def pack(root: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        for path in sorted(root.rglob("*")):
            # DeepSpeed copies its scripts beside each checkpoint; the last file is for tests of resuming.
            if path.is_file() and path.suffix != ".py" and path.name != "end.pt":
                archive.write(path, path.relative_to(root))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
