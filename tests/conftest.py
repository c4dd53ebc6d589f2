"""What pytest runs before and after all tests."""

from __future__ import annotations

import os
import sys

import pytest

from harness import close_pools

# Before torch is imported: references in the pytest process and ranks in the workers add up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
    if "hosts" in sys.modules:  # else no test has used any
        sys.modules["hosts"].close_session_hosts()
