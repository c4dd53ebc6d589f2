"""Loss scale of fp16 as it changes from step to step."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from zeromesh.base.precision import LossScale

_log = logging.getLogger("zeromesh")


class LossScaler:
    """Follows a loss-scale policy (Micikevicius et al., "Mixed Precision Training", 2018)."""

    def __init__(self, policy: LossScale) -> None:
        # No exchange: every rank sees the same sequence of overflows, and then has the same scale.
        self._policy = policy
        self._scale = 2.0**policy.initial_power if policy.static is None else float(policy.static)
        self._hysteresis = policy.hysteresis
        self._good_steps = 0
        self._stays = False  # at the minimum, whatever overflows

    def follow_at_once(self) -> None:
        """Halve the scale at each overflow down to the minimum, and stay there: DeepSpeed's way without ZeRO."""
        self._policy = replace(self._policy, hysteresis=1)
        self._hysteresis, self._stays = 1, True

    @property
    def scale(self) -> float:
        """Factor of the loss; gradients are divided by it."""
        return self._scale

    @property
    def is_dynamic(self) -> bool:
        """True if it follows the overflows."""
        return self._policy.static is None

    def update(self, overflow: bool) -> None:
        """Take note of whether the step that just ended had a gradient that is not finite.

        Raises:
            FloatingPointError: on an overflow that cannot be answered with a smaller scale.
        """
        if not self.is_dynamic:
            return
        if not overflow:
            full_window = self._good_steps > 0 and self._good_steps % self._policy.window == 0
            if full_window:
                self._scale *= 2
            if full_window or self._policy.consecutive_hysteresis:
                self._hysteresis = self._policy.hysteresis
            self._good_steps += 1
            return
        self._good_steps = 0
        # The first few are forgiven: a single bad batch should not halve the scale for a whole window.
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self._scale <= self._policy.minimum:
            problem = (
                f"the gradient is not finite at the minimum loss scale {self._policy.minimum:g}: the model diverges, "
                "or fp16's range is too small for it; lower the learning rate, warm it up for longer, set "
                "`gradient_clipping`, use bf16 instead of fp16, or allow a smaller `fp16.min_loss_scale`"
            )
            if not self._stays:
                raise FloatingPointError(problem)
            _log.warning("an update was skipped: %s", problem)
        self._scale = max(self._scale / 2, self._policy.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run starts from."""
        # The last two are settings, for libraries that keep them with the state.
        window, minimum = self._policy.window, self._policy.minimum
        state = {"scale": self._scale, "hysteresis": self._hysteresis, "good_steps": self._good_steps}
        return state | {"window": window, "minimum": minimum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        # A static scale stays as configured.
        if self._policy.static is None:
            self._scale = float(state["scale"])
            self._hysteresis = min(int(state["hysteresis"]), self._policy.hysteresis)
            self._good_steps = int(state["good_steps"])
