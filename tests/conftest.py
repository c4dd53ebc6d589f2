"""What pytest runs before and after all tests."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest

from harness import STARTED, close_pools

# Before torch is imported: references in the pytest process and ranks in the workers add up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a wrong folder may look like a name on the Hub

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets by which results of 16-bit computations differ, as ``/proc/cpuinfo`` names them."""
LIMITING = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that keep torch from using some of them."""


@pytest.fixture(autouse=True)
def launcher_variables() -> Iterator[None]:
    """Take back the variables of a launcher that the drop-in sets: later tests are of processes that none started."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """End the group of engines that a module runs in this process: other tests need it gone."""
    from zeromesh.comm.environment import shutdown  # not before the variables are set above

    yield
    shutdown()


@pytest.fixture
def no_group() -> None:
    """End a group that engines of earlier tests have left in this process: with one, a command takes its ranks."""
    from zeromesh.comm.environment import shutdown

    shutdown()


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the secret by which nodes that are launched know each other."""
    monkeypatch.setenv("ZEROMESH_SECRET", "of all nodes of these tests")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of small files of Python, for runs of ``zeromesh train``."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(10):
        lines = [f"def function_{n}(value):\n    return value + {n * number}\n" for n in range(20)]
        (folder / f"{number}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a local model with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    script = str(Path(__file__).parents[1] / "examples" / "tiny_model.py")
    with patch.object(sys, "argv", [script, str(folder), "--hidden-size", "32", "--layers", "2"]):
        runpy.run_path(script, run_name="__main__")
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"top_k": 7}))  # config.json has it not
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the Kth of N parts of the tests, K from 0, cut by their names")
    parser.addoption(
        "--record", metavar="FILE", help="skip tests that FILE has outcomes of, and add those of the others"
    )


def values_of(name: str, value: object) -> set[str]:
    """Return the settings that a parameter of a test consists of, each with its name."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return set().union(*(values_of(f"{name}.{key}", inner) for key, inner in value.items()))
    if isinstance(value, list | tuple):
        return set().union(*(values_of(f"{name}.{number}", inner) for number, inner in enumerate(value)))
    return {f"{name}={value!r}"} if isinstance(value, str | int | float | None) else set()


def chosen(cases: list[set[str]], count: int) -> set[int]:
    """Return the numbers of ``count`` cases that hold as many different settings as a greedy choice finds."""
    order = sorted(range(len(cases)), key=lambda number: number * count % len(cases))  # spread over all of them
    taken: list[int] = []
    seen: set[str] = set()
    while len(taken) < min(count, len(cases)):
        best = max((number for number in order if number not in taken), key=lambda number: len(cases[number] - seen))
        taken.append(best)
        seen |= cases[best]
    return set(taken)


def mark_the_rest_as_full(items: list[pytest.Item]) -> None:
    """Mark as ``full`` the cases of parametrized tests that their mark ``some`` leaves out."""
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("some")
            and not item.get_closest_marker("full")
        ):
            tests.setdefault((str(item.path), item.originalname), []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("some")
        settings = []
        for item in cases:
            found = {f"{name}:{number}" for name, number in item.callspec.indices.items()}
            settings.append(found.union(*(values_of(name, value) for name, value in item.callspec.params.items())))
        taken = chosen(settings, marker.args[0])
        for number, item in enumerate(cases):
            if number not in taken:
                item.add_marker(pytest.mark.full)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the mark ``some``; leave out the tests of other parts, and those that were run already."""
    mark_the_rest_as_full(items)
    part, parts = map(int, (config.getoption("--part") or "0/1").split("/"))
    record = config.getoption("--record")
    done = {row["test"] for row in outcomes(Path(record))} if record else set()
    wanted = [item for item in items if crc32(item.nodeid.encode()) % parts == part and item.nodeid not in done]
    left_out = set(items) - set(wanted)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = wanted


def pytest_collection_finish() -> None:
    """Spare collections of garbage all that has been imported, and programs an import; workers of xdist are none."""
    gc.collect()
    gc.freeze()
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTED, *filter(None, [os.environ.get("PYTHONPATH")])])


def outcomes(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that ``--record`` wrote; the last one may be cut off where a run was killed."""
    lines = record.read_text().splitlines(keepends=True) if record.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Recorder:
    """Plugin that appends each test's outcome to a file, as a line of JSON, once the test has been torn down."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._found.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        row["seconds"] += report.duration
        if report.outcome != "passed" and row["outcome"] != "failed":
            row["outcome"] = report.outcome
        if report.when == "teardown":
            with self._record.open("a") as file:
                file.write(json.dumps(self._found.pop(report.nodeid)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    record = config.getoption("--record")
    if record and not hasattr(config, "workerinput"):  # workers of xdist report to the process that has started them
        config.pluginmanager.register(Recorder(Path(record)))


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
