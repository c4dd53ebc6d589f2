"""Modes of modules: training or evaluation, of each by itself."""

from collections.abc import Iterable, Mapping

from torch import nn


def modes_of(modules: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    """Return whether each module is in training mode."""
    return {module: module.training for module in modules}


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Set the mode of each module, and of nothing below it."""
    for module, mode in modes.items():
        if module.training != mode:
            module.training = mode  # not train(), which a model may override and which goes down to children
