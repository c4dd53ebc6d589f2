"""What pytest runs before and after all tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from harness import close_pools

# Before torch is imported: references in the pytest process and ranks in the workers add up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small files of Python, for runs of ``zeromesh train``."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(10):
        lines = [f"def function_{n}(value):\n    return value + {n * number}\n" for n in range(20)]
        (folder / f"{number}.py").write_text("\n".join(lines))
    return folder


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
    if "hosts" in sys.modules:  # else no test has used any
        sys.modules["hosts"].close_session_hosts()
