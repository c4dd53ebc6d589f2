"""What pytest runs before and after all tests."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from harness import close_pools

# Before torch is imported: references in the pytest process and ranks in the workers add up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets by which results of 16-bit computations differ, as ``/proc/cpuinfo`` names them."""
LIMITING = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that keep torch from using some of them."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small files of Python, for runs of ``zeromesh train``."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(10):
        lines = [f"def function_{n}(value):\n    return value + {n * number}\n" for n in range(20)]
        (folder / f"{number}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    script = str(Path(__file__).parents[1] / "examples" / "tiny_model.py")
    with patch.object(sys, "argv", [script, str(folder), "--hidden-size", "32", "--layers", "2"]):
        runpy.run_path(script, run_name="__main__")
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"top_k": 7}))  # config.json has it not
    return folder


def pytest_report_header() -> str:
    """Name the processor's instruction sets, which decide how 16-bit products are rounded."""
    import torch  # not before its variables are set above

    parts = [f"torch {torch.backends.cpu.get_cpu_capability()}"]
    described = Path("/proc/cpuinfo")
    if described.is_file():
        words = set(described.read_text().split())
        parts.append(" ".join(flag for flag in FLAGS if flag in words) or f"none of {', '.join(FLAGS)}")
    parts += [f"{name}={os.environ[name]}" for name in LIMITING if name in os.environ]
    return f"instruction sets: {'; '.join(parts)}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
    if "hosts" in sys.modules:  # else no test has used any
        sys.modules["hosts"].close_session_hosts()
