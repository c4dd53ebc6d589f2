"""What pytest runs before and after all tests."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from harness import close_pools

# Before torch is imported: references in the pytest process and ranks in the workers add up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
    if "hosts" in sys.modules:  # else no test has used any
        sys.modules["hosts"].close_session_hosts()
