"""Buffers for forwards that run again: each run sees them as the first one did, and they change once.

Running statistics of batch norms, estimates of spectral norms and counters change in every forward in training. Where a
forward runs again for its graph, they must not change a second time, nor be what other forwards made of them meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn

Buffers = dict[str, Tensor | None]

EXTRA = "_extra_state"  # last part of the names of what ``get_extra_state`` of a module returns

# Modules that torch and Lightning put around others, whose names stand in the names of tensors.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module|_forward_module)\."
)


def is_extra(name: str) -> bool:
    """Return whether a name in a state dict is that of the extra state of a module."""
    return name.rpartition(".")[2] == EXTRA


# Modules that left all their buffers as they were when they first ran in training mode, as with masks.
_constant: WeakSet[nn.Module] = WeakSet()


def plain_name(name: str) -> str:
    """Return the name that a tensor has in the model without wrappers."""
    return _WRAPPERS.sub("", name)


@dataclass(frozen=True)
class _Before:
    """The buffers of a module before a forward."""

    module: nn.Module
    buffers: Buffers
    versions: list[int | None]
    copies: Buffers | None  # None of a module that does not change its buffers


class BufferMemory:
    """The buffers of modules before a forward that may run again; call ``note`` after it."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [_look(module) for module in modules if module._buffers]
        self._changed: list[tuple[nn.Module, Buffers]] = []

    def note(self) -> None:
        """Keep copies of the buffers that the forward has changed, and forget the others."""
        for before in self._before:
            if _is_as_before(before):
                if before.module.training:
                    _constant.add(before.module)
                continue
            _constant.discard(before.module)
            # Without copies, a module changed what it never changed before: its present values are the best there are.
            self._changed.append((before.module, before.copies or _copied(before.module._buffers)))
        self._before.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the modules have the buffers from before the forward, and afterwards those that they have now."""
        now = [(module, dict(module._buffers)) for module, _ in self._changed]
        try:
            for module, buffers in self._changed:
                _replace(module, _copied(buffers))  # copies, since a forward may run again several times
            yield
        finally:
            for module, buffers in now:
                _replace(module, buffers)


def _look(module: nn.Module) -> _Before:
    copies = None if module in _constant else _copied(module._buffers)
    return _Before(module, dict(module._buffers), _versions(module), copies)


def _is_as_before(before: _Before) -> bool:
    now = before.module._buffers
    if now.keys() != before.buffers.keys() or any(now[name] is not before.buffers[name] for name in now):
        return False
    if _versions(before.module) != before.versions:
        return False
    # By value, too: kernels of batch norms do not always mark the averages as changed.
    return before.copies is None or all(_same_bits(before.copies[name], now[name]) for name in now)


def _replace(module: nn.Module, buffers: Buffers) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)


def _versions(module: nn.Module) -> list[int | None]:
    return [None if b is None or b.is_inference() else b._version for b in module._buffers.values()]


@torch.no_grad()
def _copied(buffers: Buffers) -> Buffers:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def _same_bits(copy: Tensor | None, buffer: Tensor | None) -> bool:
    if copy is None or buffer is None or buffer.layout is not torch.strided or buffer.device.type == "meta":
        return True  # nothing to compare beyond the identity and the version
    # As bytes, in which NaN equals NaN.
    copy_bytes, buffer_bytes = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (copy, buffer))
    return torch.equal(copy_bytes, buffer_bytes)
