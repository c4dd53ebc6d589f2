"""Activation of the drop-in in programs that have imported Accelerate or transformers already."""

from __future__ import annotations

import importlib
import sys

from zeromesh import deepspeed

# They take names of DeepSpeed's wrappers from Accelerate where they find the package when they are imported.
_TAKE_WRAPPERS = ("accelerate.utils", "accelerate.accelerator", "transformers.trainer")
_CONFIGURATION = "transformers.integrations.deepspeed"


def activate() -> None:
    """Let Accelerate, transformers and TRL find ZeroMesh as ``deepspeed``, also after they were imported.

    Raises:
        ImportError: the real deepspeed has been imported.
    """
    deepspeed.install()
    utilities = sys.modules.get("accelerate.utils")
    if utilities is None or hasattr(utilities, "DeepSpeedEngineWrapper"):
        return
    wrappers = importlib.import_module("accelerate.utils.deepspeed")
    public = {
        name: value
        for name, value in vars(wrappers).items()
        if getattr(value, "__module__", None) == wrappers.__name__ and not name.startswith("_")
    }
    for name in _TAKE_WRAPPERS:
        if name in sys.modules:
            vars(sys.modules[name]).update(public)
    # Its classes have a base that depends on the package. Functions that others have taken from it stay valid: they
    # look names up in the module, which remains the same object.
    if _CONFIGURATION in sys.modules:
        importlib.reload(sys.modules[_CONFIGURATION])
