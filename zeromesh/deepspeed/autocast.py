"""``deepspeed.runtime.torch_autocast``: dtypes of a run under ``torch.autocast``."""

from __future__ import annotations

import torch
from torch import nn

from zeromesh.engine import owners

_SAFE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def get_autocast_dtype() -> torch.dtype | None:
    """Return the dtype of the newest engine's autocast; None without."""
    return _dtype(owners.newest_engine())


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Return whether a parameter is that of a layer whose products autocast computes in fewer bits."""
    engine = owners.engine_of(param)
    if engine is None or _dtype(engine) is None:
        return False
    layers = (module for module in engine.module.modules() if isinstance(module, _SAFE))
    return any(param is cast for layer in layers for cast in layer.parameters(recurse=False))


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the dtype of autocast for such a parameter, and its own for others."""
    dtype = _dtype(owners.engine_of(param)) if has_comm_dtype(param) else None
    return dtype or param.dtype


def _dtype(engine: object) -> torch.dtype | None:
    dtype: torch.dtype | None = None if engine is None else engine.config.precision.autocast  # type: ignore[attr-defined]
    return dtype
