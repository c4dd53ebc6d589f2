"""Safetensors files of a model, one or several with an index, as ``from_pretrained`` of transformers opens them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch

from zeromesh.base.buffer_memory import is_extra
from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.formats.form import Contents, tensors, whole
from zeromesh.checkpoint.manifest import CODES
from zeromesh.checkpoint.weights.weight_files import SINGLE, ExportFiles, checkpoint_tensors


def read(folder: Path) -> Contents:
    """Return the weights of a folder; there is nothing else in it."""
    contents, dtypes = Contents("a folder of safetensors"), {code: dtype for dtype, code in CODES.items()}
    for tensor in checkpoint_tensors(folder):
        if tensor.kind not in dtypes:
            raise ValueError(
                f"{tensor} is of {tensor.kind}, which is not a dtype of torch; convert it with its library"
            )
        size = prod(tensor.shape)
        if is_extra(tensor.key):
            contents.extra[tensor.key] = tensor.whole()
        elif size:
            name = f"parameter/{tensor.key}"
            contents.parts.append(Box(name, tensor.shape, dtypes[tensor.kind], 0, size, tensor.whole))
    return contents


def states(contents: Contents, advance: Callable[[int], None]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield parameters and buffers one by one, in the dtype that the model computes in."""
    for kind, name, parts in tensors(contents):
        if kind != "optimizer":
            yield {name: whole(parts).to(contents.dtypes.get(name, parts[0].dtype))}
            advance(sum(part.stop - part.start for part in parts) * parts[0].dtype.itemsize)


def write(contents: Contents, folder: Path, advance: Callable[[int], None]) -> Path:
    """Write the weights alone, under the names that they have."""
    with ExportFiles(folder, SINGLE) as files:
        for state in states(contents, advance):
            files.add(state)
        files.add({name: value for name, value in contents.extra.items() if isinstance(value, torch.Tensor)})
    return folder
