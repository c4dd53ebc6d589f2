"""Run the tests that failed in the last run once more, each alone: ``python tools/test_again.py``.

Prints each test with both results. Fails if a test fails again, or if more than ``MOST`` failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST = 3


def main() -> int:
    """Return 0 if all of a few failed tests pass alone."""
    failed = list(json.loads(FAILED.read_text())) if FAILED.is_file() else []
    if not failed or len(failed) > MOST:
        print(f"{len(failed)} tests failed; 1 to {MOST} would be run once more")
        return 1
    # Without the cache: the record of the whole run stays.
    command = [sys.executable, "-m", "pytest", "-m", "full or not full", "-p", "no:cacheprovider"]
    results = {test: subprocess.run([*command, test], cwd=ROOT).returncode for test in failed}
    for test, status in results.items():
        print(f"FAILED TWICE: {test}" if status else f"FLAKY: {test} failed in the run and passed alone")
    return 1 if any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
