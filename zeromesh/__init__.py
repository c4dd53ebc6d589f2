"""ZeroMesh: train PyTorch models that do not fit, or are too slow, on one device.

Importing this does nothing but name what there is; each part is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeromesh.base.version import VERSION

if TYPE_CHECKING:
    from zeromesh import checkpointing, moe, pipe, zero
    from zeromesh.apps.launch.launch import launch
    from zeromesh.apps.verify.verify_run import verify
    from zeromesh.build import initialize, make_mesh
    from zeromesh.checkpoint.weights.convert import convert_checkpoint
    from zeromesh.checkpoint.weights.pretrained import from_pretrained, load_pretrained
    from zeromesh.comm.environment import Environment, init_distributed
    from zeromesh.comm.mesh import Mesh
    from zeromesh.config.settings import Settings
    from zeromesh.engine.engine import Engine
    from zeromesh.engine.joint_batch import gather_with_gradient, sync_batch_norm
    from zeromesh.shard.optim.groups import no_decay_groups
    from zeromesh.zero import clip_grad_norm_

__version__ = VERSION

_NAMES = {
    "build": "initialize make_mesh", "comm.environment": "Environment init_distributed", "comm.mesh": "Mesh",
    "config.settings": "Settings", "checkpoint.weights.convert": "convert_checkpoint", "engine.engine": "Engine",
    "engine.joint_batch": "gather_with_gradient sync_batch_norm", "apps.launch.launch": "launch",
    "shard.optim.groups": "no_decay_groups", "checkpoint.weights.pretrained": "from_pretrained load_pretrained",
    "apps.verify.verify_run": "verify", "zero": "clip_grad_norm_",
}  # fmt: skip
_MODULES = ("checkpointing", "moe", "pipe", "zero")
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Engine", "Environment", "Mesh", "Settings", "checkpointing", "clip_grad_norm_", "convert_checkpoint",
    "from_pretrained", "gather_with_gradient", "init_distributed", "initialize", "launch", "load_pretrained",
    "make_mesh", "moe", "no_decay_groups", "pipe", "sync_batch_norm", "verify", "zero",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"zeromesh.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'zeromesh' has no attribute {name!r}")
    return getattr(import_module(f"zeromesh.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
