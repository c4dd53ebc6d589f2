"""What pytest runs before and after all tests."""

import os

import pytest

from harness import close_pools
from hosts import close_session_hosts

# Before torch is imported: references in the pytest process and ranks in the workers add up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
    close_session_hosts()
