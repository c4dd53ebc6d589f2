"""Timeline of operations, in the JSON of Chrome's trace viewer (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any


class OperationTimeline:
    """Events of this rank's operations; nothing is kept while ``path`` is empty."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def start(self, path: str) -> None:
        """Begin anew, for a file."""
        self.close()
        self._path = path

    def add(self, name: str, submitted: float, begun: float, ended: float) -> None:
        """Note an operation: seconds at which it was submitted, begun and ended."""
        if not self._path:
            return
        rows = ((f"NEGOTIATE_{name.partition('.')[0].upper()}", submitted, begun), (name, begun, ended))
        with self._lock:
            self._events += [
                {"ph": "X", "pid": name, "tid": 0, "name": row, "ts": start * 1e6, "dur": (end - start) * 1e6}
                for row, start, end in rows
            ]

    def close(self) -> None:
        """Write the file."""
        with self._lock:
            path, events, self._path, self._events = self._path, self._events, "", []
        if path:
            Path(path).write_text(json.dumps(events))
