"""``deepspeed.accelerator``: one object for the device of this process, on a CPU and on accelerators of torch."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, wraps
from inspect import isfunction
from typing import Any

import torch

from zeromesh.base.machine import live_bytes, memory, peak_bytes
from zeromesh.comm.environment import default_backend

Function = Callable[..., Any]


class DeviceInterface:
    """The device of this process.

    Names that are not methods here are in the tables below, or those of torch's module for the device, such as
    ``torch.cuda.Event``.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module: Any = torch.get_device_module(kind)
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copies and pickles ask before there is anything
            raise AttributeError(name)
        rows = _ON_CPU if self._name == "cpu" else _ON_DEVICE
        # Before torch's: its functions for the CPU count NUMA nodes, and have no memory figures.
        if name in rows:
            return rows[name]
        if name.endswith("Tensor") and hasattr(torch, name):
            return getattr(torch if self._name == "cpu" else self._module, name)
        if hasattr(self._module, name):
            attribute = getattr(self._module, name)
            return _renamed(attribute) if isfunction(attribute) else attribute
        if name in _BUILDERS:
            raise NotImplementedError(
                f"get_accelerator().{name} is not available here: nothing is compiled at run time"
            )
        raise AttributeError(
            f"get_accelerator() has no {name!r}, nor has torch.{self._name}; call torch's own function"
        )

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        # A module cannot be pickled, and the process that reads it may have another device.
        return get_accelerator, ()

    def device_name(self, device_index: int | None = None) -> str:
        """Return the type of device, with an index if one is given: ``cuda``, ``cuda:1``, ``cpu``."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return the current device as torch takes it."""
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this type of device."""
        return tensor.device.type == self._name

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point dtypes that models can be trained in."""
        candidates = [(torch.half, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported())]
        return [torch.float, *(dtype for dtype, here in candidates if here)]

    def get_compile_backend(self) -> str:
        """Return the backend of ``torch.compile``."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the backend that ``get_compile_backend`` returns."""
        backends = torch.compiler.list_backends(exclude_tags=())
        if backend not in backends:
            raise ValueError(f"{backend!r} is not a backend of torch.compile; it must be one of {', '.join(backends)}")
        self._compile_backend = backend


def _renamed(function: Function) -> Function:
    """Return a function of torch's that takes its device as ``device_index``, too."""

    @wraps(function)
    def call(*args: Any, device_index: int | None = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if device_index is None else function(*args, device=device_index, **kwargs)

    return call


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as on a CPU nothing waits and no allocator keeps memory."""


_CPU = torch.device("cpu")


def _resident(device_index: int | None = None) -> int:
    return live_bytes(_CPU)


def _largest(device_index: int | None = None) -> int:
    return max(live_bytes(_CPU), peak_bytes(_CPU))  # the system updates the two at different times


_BUILDERS = ("op_builder_dir", "create_op_builder", "get_op_builder", "build_extension")

# On a CPU all is so, and on accelerators streams order what is computed.
_IN_ORDER = ("is_synchronized_device", "use_host_timers", "resolves_data_dependency", "handles_memory_backpressure")

_BOTH: dict[str, Any] = {
    "communication_backend_name": default_backend,
    "random": lambda: torch.random,
    "amp": lambda: torch.amp,
    "is_fp64_supported": lambda: True,
    "is_triton_supported": lambda: torch.cuda.is_available(),
}

_ON_CPU: dict[str, Any] = {
    **_BOTH,
    # Devices are the ranks of this machine.
    "current_device": lambda: int(os.environ.get("LOCAL_RANK", 0)),
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1),
    "device": lambda device_index=None: nullcontext(),
    **dict.fromkeys(("is_available", "is_bf16_supported", *_IN_ORDER), lambda: True),
    "is_fp16_supported": lambda: False,  # it is slow, although ``fp16`` trains here, too
    "pin_memory": lambda tensor, make_copy=True, match_shape=True: tensor,
    "is_pinned": lambda tensor: True,
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "range_push", "range_pop"), _ignore),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), _ignore),
    # There are no streams: all is in order.
    **dict.fromkeys(("Stream", "Event"), None),
    **dict.fromkeys(("current_stream", "default_stream"), _ignore),
    "stream": lambda stream: nullcontext(),
    "is_current_stream_capturing": lambda: False,
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), _resident),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _largest),
    "memory_stats": lambda device_index=None: {
        "allocated_bytes.all.current": _resident(),
        "allocated_bytes.all.peak": _largest(),
    },
    "total_memory": lambda device_index=None: memory()["total_bytes"],
    "available_memory": lambda device_index=None: memory()["available_bytes"],
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
    "initial_seed": torch.initial_seed,
    "default_generator": lambda device_index=0: torch.default_generator,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
}
"""Functions of the accelerator where the device is a CPU."""

_ON_DEVICE: dict[str, Any] = {
    **_BOTH,
    "current_device": lambda: torch.accelerator.current_device_index(),
    "device_count": lambda: torch.accelerator.device_count(),
    "set_device": lambda device_index: torch.accelerator.set_device_index(torch.device(device_index)),
    "device": lambda device_index=None: (
        nullcontext() if device_index is None else torch.get_device_module().device(device_index)
    ),
    "is_available": lambda: torch.accelerator.is_available(),
    **dict.fromkeys(_IN_ORDER, lambda: False),
    "is_fp16_supported": lambda: True,
    "pin_memory": lambda tensor, make_copy=True, match_shape=True: tensor.pin_memory(),
    "is_pinned": lambda tensor: tensor.is_pinned(),
    "total_memory": lambda device_index=None: torch.accelerator.get_memory_info(device_index)[1],
    "available_memory": lambda device_index=None: torch.accelerator.get_memory_info(device_index)[0],
    "default_generator": lambda device_index: torch.cuda.default_generators[device_index],
    # Names of older versions of torch.
    "memory_cached": lambda device_index=None: torch.cuda.memory_reserved(device_index),
    "max_memory_cached": lambda device_index=None: torch.cuda.max_memory_reserved(device_index),
    **dict.fromkeys(
        ("reset_max_memory_allocated", "reset_max_memory_cached"),
        lambda device_index=None: torch.cuda.reset_peak_memory_stats(device_index),
    ),
    "range_push": lambda msg, domain=None, category=None: torch.cuda.nvtx.range_push(msg),
    "range_pop": lambda domain=None: torch.cuda.nvtx.range_pop(),
}
"""Functions of the accelerator that torch's module for the device has not, or under another name."""


@cache
def get_accelerator() -> DeviceInterface:
    """Return the accelerator of this process: torch's where there is one, else the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    wanted = os.environ.get("DS_ACCELERATOR")
    if wanted not in (None, "cpu", None if device is None else device.type):
        raise ValueError(
            f"DS_ACCELERATOR is {wanted!r}, but this machine has {device}; set it to 'cpu', or leave it out"
        )
    return DeviceInterface("cpu" if device is None or wanted == "cpu" else device.type)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch on every device."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def instrument_w_nvtx(func: Function) -> Function:
    """Return the function within a range of its name, for profilers of the device."""

    @wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return ranged
