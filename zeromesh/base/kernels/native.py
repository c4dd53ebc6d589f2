"""The library of native kernels: found beside this file, checked and loaded; and what it and Python tell each other."""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
_INTERFACE = 8  # `INTERFACE` in native.h, to be counted up in both when one would misread the other
TYPES: dict[torch.dtype, int] = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # codes; 0 is not a tensor
CPU = torch.device("cpu")
SUMMED: dict[torch.dtype, int] = TYPES | {torch.float64: 4}  # of what messages add up to


class RuleRow(ctypes.Structure):
    """A rule with the hyperparameters of a group at a step: ``struct row`` in native.h, which says what each is."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rule", "first", "nesterov", "momentous")),
        *((name, ctypes.c_float) for name in ("scale", "weight_decay", "decay", "step", "weight1")),
        *((name, ctypes.c_float) for name in ("beta2", "weight2", "root", "eps")),
        ("salt", ctypes.c_int32),
    ]


# `struct piece`: gradient, parameter, three read, three written, two remainders, elements; dtypes, row, narrow.
PIECE = "@11q4i"
PIECE_BYTES = 104


@dataclass(frozen=True)
class Library:
    """The loaded library."""

    handle: ctypes.CDLL  # its functions run without Python's lock
    sets: dict[str, int]  # instruction sets that this processor has, by name, the best one first

    @property
    def has_links(self) -> bool:
        """True where it carries messages between processes: on Linux."""
        return hasattr(self.handle, "zeromesh_link_open")

    def choose(self, name: str | None) -> int:
        """The number of an instruction set; of the best one for None."""
        if name is None:
            return next(iter(self.sets.values()))
        if name not in self.sets:
            raise ValueError(
                f"instructions is {name!r}, and this processor has {', '.join(self.sets)}; choose of those"
            )
        return self.sets[name]


@functools.cache
def library() -> Library | None:
    """Return the native kernels, or None where there are none: then that is logged, once."""
    try:
        return _load()
    except OSError as error:
        _log.warning(
            "%s. Torch's updates and sums are used on the host instead, which take at least twice as long.", error
        )
        return None


def examine() -> tuple[str, str]:
    """The instruction set that the native kernels take here, or "" and why there are none."""
    try:
        return next(iter(_load().sets)), ""
    except OSError as error:
        return "", str(error)


def _load() -> Library:
    # The last suffix that fits is that of all Pythons; a file for one Python is left from an older version.
    path = next(
        (path for suffix in reversed(EXTENSION_SUFFIXES) if (path := FOLDER / f"_native{suffix}").exists()), None
    )
    if path is None:
        raise OSError(
            "ZeroMesh's native kernels were not built when it was installed, for which it needs a C compiler. "
            "Install one, such as gcc, and install ZeroMesh again"
        )
    handle = ctypes.CDLL(str(path))
    # A library of another version would read other fields, and spoil memory rather than fail.
    expected = _INTERFACE << 16 | ctypes.sizeof(RuleRow) << 8 | PIECE_BYTES
    if not hasattr(handle, "zeromesh_interface") or handle.zeromesh_interface() != expected:
        raise OSError(f"{path.name} was compiled from another version of ZeroMesh; install ZeroMesh again")
    _declare(handle)
    sets, number = {}, 0
    while (name := handle.zeromesh_instructions(number)) is not None:
        if name:
            sets[name.decode()] = number
        number += 1
    if not sets:
        raise OSError("ZeroMesh's native kernels are for AVX-512, AVX2 and NEON, none of which this processor has")
    return Library(handle, sets)


def _declare(handle: ctypes.CDLL) -> None:
    pointer, number, size, word = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    functions: list[tuple[str, Any, list[Any]]] = [
        ("instructions", ctypes.c_char_p, [number]),
        ("update", None, [number, pointer, pointer, size, number, number]),
        ("checksum", None, [pointer, size, pointer, number]),
        ("add", None, [number, pointer, number, pointer, number, size, number]),
        ("squares", None, [number, pointer, number, size, pointer, number]),
    ]
    if hasattr(handle, "zeromesh_link_open"):  # on Linux
        functions += [
            ("link_open", pointer, [number, number, pointer, pointer]),
            ("link_join", number, [pointer, number, number, number, word]),
            ("link_start", number, [pointer]),
            ("link_post", number, [pointer, number, number, word, pointer, word, pointer]),
            (
                "link_sum",
                number,
                [pointer, number, pointer, number, number, word, pointer, pointer, size, *[number] * 3, pointer],
            ),
            ("link_wait", number, [pointer, pointer, size]),
            ("link_sent", word, [pointer]),
            ("link_close", None, [pointer, number]),
            ("link_free", None, [pointer]),
        ]
    for name, result, arguments in functions:
        function = getattr(handle, f"zeromesh_{name}")
        function.restype, function.argtypes = result, arguments


def threads_of(threads: int | None) -> int:
    """Return the number of threads to use: as given, else as many as torch uses."""
    if threads is None:
        return torch.get_num_threads()
    if threads < 1:
        raise ValueError(f"threads is {threads}; at least 1 must work")
    return threads


def check(
    name: str, tensor: torch.Tensor, elements: int, dtypes: tuple[torch.dtype, ...], device: torch.device = CPU
) -> None:
    """Refuse a tensor that is not 1-D, contiguous, of so many elements, of these dtypes and on the device."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"the {name} is {tensor.dtype}, and the kernel takes {wanted}; use torch's own update")
    if tensor.device != device:
        raise ValueError(f"the {name} is on {tensor.device}, and the update works on {device}; move it there")
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != elements:
        raise ValueError(
            f"the {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, and must have shape "
            f"({elements},) and be contiguous, as all tensors of a piece"
        )
