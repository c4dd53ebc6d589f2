"""Timeline of operations, in the JSON of Chrome's trace viewer (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from pathlib import Path


class OperationTimeline:
    """Events of this rank's operations; nothing is kept while ``path`` is empty."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._rows: list[tuple[str, str, float, float]] = []

    def start(self, path: str) -> None:
        """Begin anew, for a file."""
        self.close()
        self._path = path

    def add(self, name: str, submitted: float, begun: float, ended: float) -> None:
        """Note an operation: seconds at which it was submitted, begun and ended."""
        if self._path:
            self._rows.append((name, f"NEGOTIATE_{name.partition('.')[0].upper()}", submitted, begun))
            self._rows.append((name, name, begun, ended))

    def close(self) -> None:
        """Write the file."""
        path, rows, self._path, self._rows = self._path, self._rows, "", []
        keys = ("pid", "name", "ts", "dur", "ph", "tid")
        events = [dict(zip(keys, (p, n, a * 1e6, (b - a) * 1e6, "X", 0), strict=True)) for p, n, a, b in rows]
        if path:
            Path(path).write_text(json.dumps(events))
