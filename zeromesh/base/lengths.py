"""Sizes in the configurations of models."""

from __future__ import annotations

from typing import Any

_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")


def option(config: Any, *names: str) -> Any:
    """Return an option of a configuration, or of one inside it; 0 where there is none."""
    inner = [value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "to_dict")]
    for section in (config, *inner):
        for name in names:
            value = getattr(section, name, None)
            # With negative numbers models such as XLNet say that there is no limit.
            if value and not (isinstance(value, int | float) and value < 0):
                return value
    return 0


def positions(config: Any) -> int | None:
    """Return the number of tokens of the longest text that a model takes; None without a limit, or an unknown one."""
    return int(option(config, *_POSITIONS)) or None
