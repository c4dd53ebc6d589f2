"""DeepSpeedEngine: ZeroMesh's engine with the names of DeepSpeed's, as a ``torch.nn.Module``."""

from __future__ import annotations

from typing import Any

from torch import nn

from zeromesh.deepspeed import parameters as parameters  # gives parameters their attributes
from zeromesh.engine import Engine
from zeromesh.engine_state import Parts


class DeepSpeedEngine(Engine, nn.Module):  # type: ignore[misc]  # the engine's own methods count
    """An engine that is a module around the user's, as DeepSpeed's is: parameters are called ``module.NAME``."""

    def __init__(self, parts: Parts) -> None:
        nn.Module.__init__(self)
        # Also a plain attribute: the engine looks for missing ones in the model, which it must not look for there.
        vars(self)["module"] = parts.sharded.model
        Engine.__init__(self, parts)

    # With the hooks that a user registers on the engine.
    __call__ = nn.Module.__call__
    forward = Engine.__call__

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            self._modules[name] = vars(self)[name] = value
        else:
            super().__setattr__(name, value)


class PipelineEngine(DeepSpeedEngine):
    """The engine of a ``PipelineModule``."""
