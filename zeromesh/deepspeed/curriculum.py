"""``deepspeed.runtime.data_pipeline.curriculum_scheduler``: the difficulty of each step, by ZeroMesh's formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zeromesh.config.curriculum import Curriculum
from zeromesh.curriculum import length_at

KIND, CUSTOM = "schedule_type", "custom"
CURRENT = "current_difficulty"


class CurriculumScheduler:
    """A curriculum's difficulty by step; ``state`` has the configuration and the present difficulty.

    Raises:
        AssertionError: the configuration is not complete or contradicts itself, as DeepSpeed raises it.
        RuntimeError: there is no such schedule.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        own = {name: value for name, value in config.items() if name in Curriculum.model_fields}
        self._get: Callable[[int], int] | None = None
        self.state: dict[str, Any] = own
        try:
            if own.get(KIND) == CUSTOM:
                settings = Curriculum(**{name: value for name, value in own.items() if name != KIND})
            else:
                settings = Curriculum(**{**own, "enabled": True})  # has to be complete
                self._get = partial(length_at, settings)
        except ValueError as error:
            known = own.get(KIND) is None or str(own[KIND]).startswith("fixed_")
            raise (AssertionError if known else RuntimeError)(str(error)) from None
        self._most = settings.max_difficulty or 0
        self.state[CURRENT] = settings.min_difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a custom schedule, from the step to the difficulty."""
        self._get = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step, counted from 1."""
        if self._get is None:
            raise RuntimeError("a custom curriculum has no function yet; call set_custom_get_difficulty(function)")
        return self._get(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Set the present difficulty to that of a step, unless the last one is reached; return it."""
        if self.state[CURRENT] < self._most:
            self.state[CURRENT] = self.get_difficulty(global_steps)
        return int(self.state[CURRENT])
