"""``deepspeed.runtime.data_pipeline.curriculum_scheduler``: the difficulty of each step, by ZeroMesh's formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zeromesh.config.curriculum import Curriculum
from zeromesh.curriculum import length_at

CUSTOM = "custom"
CURRENT = "current_difficulty"


class CurriculumScheduler:
    """A curriculum's difficulty by step; ``state`` has the configuration and the present difficulty.

    Raises:
        AssertionError: the configuration is not complete or contradicts itself, as DeepSpeed raises it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        own = {name: value for name, value in config.items() if name in Curriculum.model_fields}
        self._custom: Callable[[int], int] | None = None
        kind = own.get("schedule_type")
        try:
            # A curriculum by a function has no course, and is none of the engine's.
            self._settings = Curriculum(**(own | ({"schedule_type": "fixed_linear"} if kind == CUSTOM else {})))
            if kind != CUSTOM:
                self._settings = Curriculum(**own, enabled=True)  # complete
        except ValueError as error:
            raise AssertionError(str(error)) from None
        self._is_custom = kind == CUSTOM
        self.state: dict[str, Any] = {**own, CURRENT: self._settings.min_difficulty}

    def get_current_difficulty(self) -> int:
        """Return the present difficulty."""
        return int(self.state[CURRENT])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the present difficulty."""
        self.state[CURRENT] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a custom schedule, from the step to the difficulty."""
        self._custom = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step, counted from 1."""
        if not self._is_custom:
            return length_at(self._settings, global_steps)
        if self._custom is None:
            raise RuntimeError("a custom curriculum has no function yet; call set_custom_get_difficulty(function)")
        return self._custom(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Set the present difficulty to that of a step, unless the last one is reached; return it."""
        if self.get_current_difficulty() < (self._settings.max_difficulty or 0):
            self.set_current_difficulty(self.get_difficulty(global_steps))
        return self.get_current_difficulty()
