"""ZeroMesh: train PyTorch models that do not fit, or are too slow, on one device.

Importing this does nothing but name what there is; each part is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh import checkpointing, pipe, zero
    from zeromesh.build import initialize, make_mesh, shard
    from zeromesh.comm.environment import Environment, init_distributed
    from zeromesh.comm.mesh import Mesh
    from zeromesh.config.settings import Settings
    from zeromesh.convert import convert_checkpoint
    from zeromesh.engine import Engine
    from zeromesh.joint_batch import gather_with_gradient, sync_batch_norm
    from zeromesh.launcher.launch import launch
    from zeromesh.optim.groups import no_decay_groups
    from zeromesh.pretrained import from_pretrained, load_pretrained
    from zeromesh.verification.run import verify
    from zeromesh.zero import clip_grad_norm_

__version__ = "0.1.0.dev0"

_HOMES = {
    "initialize": "zeromesh.build",
    "make_mesh": "zeromesh.build",
    "shard": "zeromesh.build",
    "Settings": "zeromesh.config.settings",
    "Environment": "zeromesh.comm.environment",
    "init_distributed": "zeromesh.comm.environment",
    "launch": "zeromesh.launcher.launch",
    "Mesh": "zeromesh.comm.mesh",
    "Engine": "zeromesh.engine",
    "from_pretrained": "zeromesh.pretrained",
    "load_pretrained": "zeromesh.pretrained",
    "no_decay_groups": "zeromesh.optim.groups",
    "clip_grad_norm_": "zeromesh.zero",
    "gather_with_gradient": "zeromesh.joint_batch",
    "sync_batch_norm": "zeromesh.joint_batch",
    "convert_checkpoint": "zeromesh.convert",
    "verify": "zeromesh.verification.run",
    "zero": "",
    "pipe": "",
    "checkpointing": "",
}

__all__ = [
    "Engine", "Environment", "Mesh", "Settings", "checkpointing", "clip_grad_norm_", "convert_checkpoint",
    "from_pretrained", "gather_with_gradient", "init_distributed", "initialize", "launch", "load_pretrained",
    "make_mesh", "no_decay_groups", "pipe", "shard", "sync_batch_norm", "verify", "zero",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zeromesh' has no attribute {name!r}")
    home = _HOMES[name]
    return getattr(import_module(home), name) if home else import_module(f"zeromesh.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
