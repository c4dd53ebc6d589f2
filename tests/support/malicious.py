"""Objects of an attacker."""

import os
from pathlib import Path
from typing import Any


class Malicious:
    """Object whose pickle runs a command when it is loaded without care."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)
