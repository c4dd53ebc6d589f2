"""Keras 3 models on the torch backend: ``distribute`` for ``fit``, ``evaluate`` and ``predict``; see docs/keras.md.

``zeromesh.initialize`` takes a Keras model as it is, for a loop of the user's. Nothing is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh.keras.data import batches
    from zeromesh.keras.distributed import distribute
    from zeromesh.keras.keras_optimizer import KerasOptimizer

_HOMES = {"batches": "data", "distribute": "distributed", "KerasOptimizer": "keras_optimizer"}

__all__ = ["KerasOptimizer", "batches", "distribute"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zeromesh.keras' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"zeromesh.keras.{_HOMES[name]}"), name)
