"""Buffers that are part of a model's state, such as running statistics: the same on all ranks after every update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn

from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.flat import rebind

# All dtypes, in an order that is the same on all ranks.
DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
MOST_DIMENSIONS = 64

Form = tuple[torch.dtype, torch.Size] | None  # shape and dtype of a buffer; None where there is none


class ModelBuffers:
    """Notices which buffers changed and gives every rank the first rank's values, as DistributedDataParallel does."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        # Settled here: what is in these places may become another tensor, or None. Buffers that are registered later
        # stay each rank's own.
        self._places = [_Place(module, name) for module in model.modules() for name in _persistent(module)]
        for place in self._places:
            if place.buffer is not None:
                _own_memory(place.buffer)
        self._shared: list[_Seen] = []
        count = len(self._places)
        self.share([True] * count + [False] * count)

    def state(self) -> list[torch.Tensor]:
        """The buffers that ``state_dict`` holds, in order of registration."""
        return [
            buffer
            for module in self._model.modules()
            for name in _persistent(module)
            if (buffer := module._buffers[name]) is not None
        ]

    def changed(self) -> list[bool]:
        """Return notes for ``share``: which buffers may have changed since the last one, then which changed in form."""
        seen = list(zip(self._look(), self._shared, strict=True))
        return [not now.same(then) for now, then in seen] + [now.form != then.form for now, then in seen]

    def share(self, changed: Sequence[bool]) -> None:
        """Give every rank the first rank's values of these; all ranks pass the same notes, as from ``changed``."""
        count = len(self._places)
        ranks = self._mesh.group("stage")
        if ranks.size > 1:
            for place, other_values, other_form in zip(self._places, changed[:count], changed[count:], strict=True):
                if other_form:
                    self._share_form(place)
                if other_values and place.buffer is not None:
                    self._share_values(place.buffer)
        self._shared = self._look()

    def _share_form(self, place: _Place) -> None:
        """Give every rank a buffer like the first rank's, if it has another one or none."""
        row = torch.zeros(3 + MOST_DIMENSIONS, dtype=torch.int64, device=self._mesh.device)
        if (form := place.form) is not None:
            row[:3] = torch.tensor([1, DTYPES.index(form[0]), len(form[1])])
            row[3 : 3 + len(form[1])] = torch.tensor(form[1])
        self._mesh.group("stage").broadcast(row)
        present, dtype, dimensions, *sizes = row.tolist()
        wanted = (DTYPES[dtype], torch.Size(sizes[:dimensions])) if present else None
        if wanted is None:
            place.module._buffers[place.name] = None
        elif wanted != place.form:
            place.module._buffers[place.name] = torch.empty(wanted[1], dtype=wanted[0], device=self._mesh.device)

    def _share_values(self, buffer: torch.Tensor) -> None:
        _own_memory(buffer)
        # As bytes, because the backends do not know every dtype; contiguous, because they take nothing else.
        contiguous = buffer.detach().clone(memory_format=torch.contiguous_format)
        self._mesh.group("stage").broadcast(contiguous.view(-1).view(torch.uint8))
        if self._mesh.group("stage").rank != 0:
            # Through ``data``, which leaves the version as it is: what the ranks may do next is the same on all.
            with torch.inference_mode(buffer.is_inference()):
                buffer.data.copy_(contiguous)

    def _look(self) -> list[_Seen]:
        return [_Seen.of(place) for place in self._places]


@dataclass(frozen=True)
class _Place:
    module: nn.Module
    name: str

    @property
    def buffer(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)

    @property
    def form(self) -> Form:
        buffer = self.buffer
        return None if buffer is None else (buffer.dtype, buffer.shape)


@dataclass(frozen=True)
class _Seen:
    # Which tensor it was. Its `id` would not do: that may be another one's once it is gone.
    buffer: ref[torch.Tensor] | None
    # Of all the module's buffers. They go together: torch's batch normalisation counts batches in one, but its kernels
    # do not always mark the averages as changed. None for a tensor made in inference mode.
    versions: tuple[int | None, ...]
    form: Form  # dtype and shape

    @classmethod
    def of(cls, place: _Place) -> _Seen:
        present = [buffer for buffer in place.module._buffers.values() if buffer is not None]
        versions = tuple(None if buffer.is_inference() else buffer._version for buffer in present)
        return cls(None if place.buffer is None else ref(place.buffer), versions, place.form)

    def same(self, other: _Seen) -> bool:
        """Return whether it surely was the same tensor with the same values, or none both times."""
        if (self.versions, self.form) != (other.versions, other.form) or None in self.versions:
            return False
        if self.buffer is None or other.buffer is None:
            return self.buffer is other.buffer
        return self.buffer() is other.buffer()


def _persistent(module: nn.Module) -> Iterator[str]:
    return (name for name in module._buffers if name not in module._non_persistent_buffers_set)


def _own_memory(buffer: torch.Tensor) -> None:
    """Give an expanded tensor memory for each of its elements; otherwise nothing could be written to it."""
    if any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
        rebind(buffer, buffer.data.clone(memory_format=torch.contiguous_format))
