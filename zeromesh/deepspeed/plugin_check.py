"""Check of Accelerate's own plugin under the alias: its options must not contradict its file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from zeromesh.config.trainers import PLUGIN_OPTIONS, require_agreement

HOME = "accelerate.utils.dataclasses"
"""Module of the plugin."""


class _CheckedModule(SourceFileLoader):
    """Loads the module with a plugin that checks itself."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and put the plugin's checked class in its place."""
        super().exec_module(module)
        vars(module)["DeepSpeedPlugin"] = _checked(vars(module)["DeepSpeedPlugin"])


def _checked(plugin: Any) -> Any:
    def checks(self: Any) -> None:
        # Before Accelerate writes the configuration's values over them.
        options = {name: getattr(self, name, None) for name in PLUGIN_OPTIONS}
        plugin.__post_init__(self)
        require_agreement(self.deepspeed_config, options)

    return type(plugin.__name__, (plugin,), {"__post_init__": checks, "__module__": HOME, "__doc__": plugin.__doc__})


def find(path: Sequence[str] | None) -> ModuleSpec | None:
    """Return how to import the module of the plugin."""
    spec = PathFinder.find_spec(HOME, path)
    if spec is None or spec.origin is None:
        return spec
    return spec_from_file_location(HOME, spec.origin, loader=_CheckedModule(HOME, spec.origin))
