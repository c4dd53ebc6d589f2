"""Intermediate form of all conversions: ranges of tensors as they lie in files, and the rest as numbers and texts.

Tensors have the names that ``checkpoint.contents`` gives them: ``parameter/NAME``, ``buffer/NAME``,
``optimizer/KEY/NAME``. Nothing of them is read before a writer asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter

from zeromesh.base.buffer_memory import is_extra
from zeromesh.base.files import Count, Form, record_type
from zeromesh.base.optimizer_table import names_by_states
from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.contents import plain_numbers
from zeromesh.checkpoint.manifest import ANOTHER, are_all, require_form
from zeromesh.checkpoint.packing import pack

# Options that say how an update is computed, and not which: each library chooses its own.
_IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


@dataclass
class Contents:
    """Contents of a checkpoint of any format."""

    source: str  # the format, for messages: "a DeepSpeed ZeRO-2 checkpoint"
    parts: list[Box] = field(default_factory=list)  # its tensors; those without elements are left out
    frozen: set[str] = field(default_factory=set)  # names of parameters that are not trained
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the computation by parameter, where they are told
    tied: dict[str, str] = field(default_factory=dict)  # other names of parameters, with the one that has the values
    groups: list[dict[str, Any]] = field(default_factory=list)  # options of the optimizer's parameter groups
    members: dict[str, int] = field(default_factory=dict)  # group of each parameter that the optimizer updates
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)  # single numbers among its states, by parameter
    optimizer: str | None = None  # the class, or None where the file does not say
    progress: dict[str, int] = field(default_factory=dict)  # global_steps, global_samples, micro_steps, skipped_steps
    scheduler: tuple[Mapping[str, Any], str | None] | None = None  # its state, and its name where the file tells it
    loss_scale: dict[str, Any] | None = None  # of fp16
    client: dict[str, Any] = field(default_factory=dict)  # values of the user's
    extra: dict[str, Any] = field(default_factory=dict)  # extra state of modules, by its name in a state dict
    left: list[str] = field(default_factory=list)  # contents that are not converted, as sentences

    def require_sound(self, path: Path) -> None:
        """Raise ValueError unless all is of the form that writers expect; other programs may have written anything."""
        places = [(*part.area, part.shape) for part in self.parts]
        require_form(_FORM, {**vars(self), "names": [part.name for part in self.parts], "places": places}, path)
        for part, place in zip(self.parts, places, strict=True):
            fits = len({*map(len, place)}) == 1 and all(at + size <= end for at, size, end in zip(*place, strict=True))
            if not fits or not isinstance(part.dtype, torch.dtype):
                raise ValueError(f"{path} has {part.name} outside of its tensor, or of no dtype of torch; {ANOTHER}")
        for name, numbers in self.numbers.items():
            for key, value in numbers.items():
                if not isinstance(plain_numbers(value), int | float) or abs(plain_numbers(value)) >= 2**63:
                    raise ValueError(
                        f"{path} has {key} = {str(value)[:80]} of {name}, which is not a number; {ANOTHER}"
                    )
        if any(not 0 <= number < len(self.groups) for number in self.members.values()):
            raise ValueError(f"{path} has parameters in a group that it does not have; {ANOTHER}")
        if self.scheduler is not None:
            pack(self.scheduler[0], "the scheduler's state")  # raises for what is not a value

    def take(self, **attributes: Any) -> None:
        """Add to lists, sets and dicts, and set the other attributes."""
        for name, value in attributes.items():
            present = getattr(self, name)
            if isinstance(present, list):
                present.extend(value)
            elif isinstance(present, set | dict):
                present.update(value)
            else:
                setattr(self, name, value)

    def take_extra(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take the extra state of modules out of a state dict, and return what is left of that."""
        self.extra |= {name: value for name, value in state.items() if is_extra(name)}
        return {name: value for name, value in state.items() if not is_extra(name)}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a whole tensor, which may be mapped from a file."""
        if tensor.numel():
            self.parts.append(Box.whole(name, tensor))

    def add_state(self, name: str, key: str, value: Any) -> None:
        """Add one state of the optimizer; single numbers are not tensors of the checkpoint."""
        if isinstance(value, torch.Tensor) and value.ndim:
            self.add(f"optimizer/{key}/{name}", value)
        elif isinstance(value, torch.Tensor | int | float):
            self.numbers.setdefault(name, {})[key] = value

    @property
    def state_keys(self) -> frozenset[str]:
        """Names of the optimizer's states that are tensors."""
        return frozenset(part.name.split("/")[1] for part in self.parts if part.name.startswith("optimizer/"))

    @property
    def optimizers(self) -> list[str]:
        """Classes that have these states, which may go on with them; empty if that is not known."""
        return [self.optimizer] if self.optimizer else names_by_states(self.state_keys)

    def without_states(self) -> None:
        """Drop all but the values of parameters and buffers."""
        self.parts = [part for part in self.parts if not part.name.startswith("optimizer/")]
        self.groups, self.members, self.numbers, self.optimizer, self.scheduler = [], {}, {}, None, None
        self.progress, self.loss_scale, self.client = {}, None, {}

    def rename_tensors(self, names: Mapping[str, str | None]) -> None:
        """Give tensors other names in the checkpoint; None takes one out."""
        new = ((part, names.get(part.name, part.name)) for part in self.parts)
        self.parts = [part.renamed(name) for part, name in new if name is not None]

    def renamed(self, rename: Callable[[str], str]) -> None:
        """Give parameters and buffers other names."""
        parts = []
        for part in self.parts:
            depth = 2 if part.name.startswith("optimizer/") else 1
            *kind, name = part.name.split("/", depth)
            parts.append(part.renamed("/".join([*kind, rename(name)])))
        self.parts = parts
        self.frozen = set(map(rename, self.frozen))
        self.extra = {rename(name): value for name, value in self.extra.items()}
        self.tied = {rename(name): rename(owner) for name, owner in self.tied.items()}
        self.dtypes = {rename(name): dtype for name, dtype in self.dtypes.items()}
        self.members = {rename(name): group for name, group in self.members.items()}
        self.numbers = {rename(name): numbers for name, numbers in self.numbers.items()}


_FORM: Form = TypeAdapter(
    record_type(
        {
            "names": list[Annotated[str, Field(pattern="^(parameter|buffer|optimizer/[^/]+)/")]],
            "places": list[tuple[tuple[Count, ...], ...]],
            "frozen": set[str],
            "tied": dict[str, str],
            "groups": list[dict[str, Any]],
            "members": dict[str, int],
            "numbers": dict[str, dict[str, Any]],
            "progress": dict[str, Count],
            "extra": dict[str, Any],
            "scheduler": tuple[dict[str, Any], str | None] | None,
            "loss_scale": dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None,
        }
    )
)


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that say which update is computed."""
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def whole(parts: Iterable[Box]) -> torch.Tensor:
    """Return a tensor of which all parts are given; raise ValueError if elements are missing."""
    parts = list(parts)
    first = parts[0]
    if len(parts) == 1 and first.stop - first.start == prod(first.shape):
        return first.data().view(first.shape)
    if not are_all(first.shape, ((*part.area, part.start, part.stop) for part in parts)):
        raise ValueError(
            f"{first.name} lacks some of its {prod(first.shape)} elements, or has some twice; copy the checkpoint again"
        )
    out = torch.empty(prod(first.shape), dtype=first.dtype)
    for part in parts:
        data = part.data()
        for place, within, length in part.overlaps(0, out.numel()):
            out[place : place + length] = data[within : within + length]
    return out.view(first.shape)


def tensors(contents: Contents) -> Iterator[tuple[str, str, list[Box]]]:
    """Yield the kind, the name and the parts of each tensor."""
    parts_by_name: dict[str, list[Box]] = {}
    for part in contents.parts:
        parts_by_name.setdefault(part.name, []).append(part)
    for full, parts in parts_by_name.items():
        yield *full.split("/", 1), parts  # type: ignore[misc]
