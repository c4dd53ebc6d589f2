"""Run a script that imports torchvision beside a torch that its compiled operators are not built for.

    torchrun --nproc-per-node 2 tests/support/with_torchvision.py examples/vision/train.py

The wheel of PyPI belongs to the CUDA build of torch: with the CPU build its library cannot be loaded, and its import
fails where it describes operators for boxes, which no classifier uses. Declared beforehand, they are only missing when
called. The package has a folder of its own, because transformers imports torchvision wherever it is, and fails with it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "torchvision"  # made by tools/setup.py
OPERATORS = ("nms", "qnms")


def allow_torchvision() -> None:
    """Make ``import torchvision`` work in this process."""
    import importlib.util

    import torch

    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    found = importlib.util.find_spec("torchvision")
    assert found is not None, f"{FOLDER} has no torchvision: python3 tools/setup.py test installs it there"
    if not torch.version.cuda and "torchvision" not in sys.modules:
        for name in OPERATORS:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    allow_torchvision()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
