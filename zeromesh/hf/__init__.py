"""ZeroMesh under the trainers of other libraries, by one configuration: transformers, TRL, Accelerate, Lightning.

``Trainer`` and ``TrainerMixin`` (transformers, TRL), ``plugin`` (Accelerate), ``zeromesh.hf.lightning.Strategy``.
See docs/coming-from.md. Nothing is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh.hf.accelerated import plugin
    from zeromesh.hf.mixin import TrainerMixin
    from zeromesh.hf.trainer import Trainer

_HOMES = {"Trainer": "trainer", "TrainerMixin": "mixin", "plugin": "accelerated"}

__all__ = ["Trainer", "TrainerMixin", "plugin"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zeromesh.hf' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"zeromesh.hf.{_HOMES[name]}"), name)
