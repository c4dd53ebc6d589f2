"""Distributed checkpoints of torch (DCP), of plain models, FSDP2 and scripts around them, and of Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from zeromesh.base.buffer_memory import is_extra
from zeromesh.base.files import inside, open_regular
from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.contents import plain_numbers
from zeromesh.checkpoint.formats.form import Contents, group_options, tensors, whole
from zeromesh.checkpoint.formats.lightning_checkpoints import IsTrained, names_by_number
from zeromesh.checkpoint.formats.pickles import read_metadata, read_tensors

INDEX = ".metadata"

# Names under which scripts keep the model, and the number of updates.
_MODELS, _STEPS = ("model", "state_dict", "module"), ("step", "steps", "global_step", "global_steps", "iteration")

_POSITIONS = frozenset({"last_epoch", "last_batch_iteration"})
"""Keys of schedules' states, of torch and of DeepSpeed."""

# Torch loads only groups that have all options of its optimizers, and other libraries lack these.
_DEFAULTS = {
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "maximize": False,
    "amsgrad": False,
    "decoupled_weight_decay": True,
}

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")

_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")
"""Tensors of all layers at once, along a first dimension of their own."""

Keys = tuple[Any, ...]
"""Keys from the root of a nested state dict to a value."""


def entries(folder: Path) -> dict[Keys, list[Box] | Callable[[], Any]]:
    """Return the parts of each tensor, and a reader of each other value, by their path."""
    index = read_metadata(folder / INDEX)
    stored = {(key.fqn, tuple(key.offset or ())): info for key, info in index.storage_data.items()}
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    by_path: dict[Keys, list[Box] | Callable[[], Any]] = {}
    for name, entry in index.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        try:
            if isinstance(entry, TensorStorageMetadata):
                by_path[path] = [
                    _part(folder, entry, chunk, stored[name, tuple(chunk.offsets)]) for chunk in entry.chunks
                ]
            else:
                by_path[path] = partial(_load, folder, stored[name, ()])
        except KeyError:
            raise ValueError(f"{folder / INDEX} names no place of {name}; copy the checkpoint again") from None
    return by_path


def _part(folder: Path, entry: Any, chunk: Any, info: Any) -> Box:
    place = tuple(chunk.offsets), tuple(chunk.sizes)
    count = torch.Size(chunk.sizes).numel()
    return Box("", tuple(entry.size), entry.properties.dtype, 0, count, partial(_load, folder, info), *place)


def _load(folder: Path, info: Any) -> Any:
    """Return what lies in a range of a file."""
    # An index could name any file of the machine.
    path = inside(folder, info.relative_path, f"a file in {folder / INDEX}")
    if not path.is_file():
        raise ValueError(f"{folder / INDEX} needs {info.relative_path}, which is not in {folder}; copy it again")
    if info.transform_descriptors:
        transforms = ", ".join(info.transform_descriptors)
        raise ValueError(f"{path} is transformed ({transforms}); load it with torch, and save it without")
    with open_regular(path) as file:
        file.seek(info.offset)
        data = file.read(info.length)
    if len(data) < info.length:
        raise ValueError(f"{path} is cut off after {info.offset + len(data):,} bytes; copy it again")
    return read_tensors(path, data)


def read(folder: Path, is_trained: IsTrained = bool) -> Contents:
    """Return the contents of a distributed checkpoint."""
    contents = Contents("a distributed checkpoint of torch")
    states: dict[Any, dict[str, Any]] = {}  # by parameter, then by key
    groups: dict[Any, dict[str, Any]] = {}  # by number; where states are flattened, by parameter
    models: dict[Keys, dict[str, list[Box]]] = {}  # by the path of the state dict, then by name
    tree: dict[Any, Any] = {}
    for path, value in entries(folder).items():
        kind, *place = _place(path)
        if (at := next((at for at, key in enumerate(path) if is_extra(str(key))), None)) is not None:
            set_element(contents.extra, path[at:], whole(value) if isinstance(value, list) else value())
        elif kind == "state":
            states.setdefault(place[0], {})[place[1]] = value
        elif kind == "param_groups":
            groups.setdefault(place[0], {})[place[1]] = _value(value)
        elif isinstance(value, list) and value[0].shape:
            models.setdefault(path[:-1], {})[str(path[-1])] = value
        else:
            inner = tree
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = _value(value)
    model = _choose_model(contents, models)
    for name, parts in model.items():
        contents.parts += [part.renamed(f"parameter/{name}") for part in parts if part.stop]
    shapes = {name: parts[0].shape for name, parts in model.items() if is_trained(name) is not None}
    _add_optimizer(contents, shapes, states, groups, is_trained)
    _add_values(contents, tree)
    return contents


def _place(path: Keys) -> tuple[Any, ...]:
    """Return what a path leads to: a state by parameter and key, an option of a group, or another value."""
    for kind in ("state", "param_groups"):
        if kind in path[:-2]:
            at = path.index(kind) + 1
            # An option may itself be a container, whose items are values of their own.
            return kind, path[at], str(path[at + 1]) if kind == "state" else ".".join(map(str, path[at + 1 :]))
        # With flatten_optimizer_state_dict all keys are in one: state.NAME.KEY.
        if str(path[-1]).startswith(f"{kind}."):
            name, _, key = str(path[-1]).removeprefix(f"{kind}.").rpartition(".")
            return kind, name, key
    return ("",)


def _value(value: Any) -> Any:
    """Return a value that is not a tensor of the checkpoint."""
    return value[0].read() if isinstance(value, list) else value()


def _choose_model(contents: Contents, models: Mapping[Keys, dict[str, list[Box]]]) -> dict[str, list[Box]]:
    """Return the model's state dict; others, as of averaged weights, are noted."""
    named = [path for path in models if path and path[-1] in _MODELS]
    chosen = named[0] if named else max(models, key=lambda path: len(models[path]), default=())
    for path in models:
        if path != chosen:
            contents.left.append(f"{len(models[path])} tensors under {'.'.join(map(str, path)) or 'no name'!r}")
    return models.get(chosen, {})


def _add_optimizer(
    contents: Contents,
    shapes: Mapping[str, tuple[int, ...]],
    states: Mapping[Any, dict[str, Any]],
    groups: Mapping[Any, dict[str, Any]],
    is_trained: IsTrained,
) -> None:
    group_list = [groups[number] for number in sorted(groups, key=str)]
    if group_list and not any("params" in group for group in group_list):  # flattened: the options of each parameter
        alike: dict[str, dict[str, Any]] = {}
        for name, group in groups.items():
            alike.setdefault(repr(group), {**group, "params": []})["params"].append(name)
        group_list = list(alike.values())
    members = [group.get("params", []) for group in group_list]
    names = {name: name for group_members in members for name in group_members}
    if any(isinstance(name, int) for name in names):
        like = {
            n: v[0].shape for n, state in states.items() for v in state.values() if isinstance(v, list) and v[0].shape
        }
        names = names_by_number(shapes, group_list, like, is_trained)
    contents.take(groups=[group_options(group) for group in group_list])
    for number, group_members in enumerate(members):
        contents.members.update({names[name]: number for name in group_members})
    for name, state in states.items():
        full_name = names.get(name, name)
        for key, value in state.items():
            if isinstance(value, list) and value[0].shape:
                contents.parts.extend(part.renamed(f"optimizer/{key}/{full_name}") for part in value if part.stop)
            else:
                contents.add_state(full_name, key, _value(value))


def _add_values(contents: Contents, tree: dict[Any, Any]) -> None:
    """Take the number of updates, the scheduler, and the user's values."""
    for key, value in list(tree.items()):
        if contents.scheduler is None and isinstance(value, dict) and _POSITIONS & value.keys():
            contents.take(scheduler=(tree.pop(key), None))
    steps = [number for key in _STEPS if isinstance(number := plain_numbers(tree.get(key)), int)]
    done = [int(plain_numbers(numbers["step"])) for numbers in contents.numbers.values() if "step" in numbers]
    contents.take(
        progress={"global_steps": steps[0] if steps else max(done, default=0)},
        client={str(key): value for key, value in tree.items() if key not in _STEPS},
    )


def read_megatron(folder: Path) -> Contents:
    """Return the contents of a checkpoint of Megatron-Core (torch_dist), with its names.

    Tensors that hold all layers become one for each layer.
    """
    contents = Contents("a Megatron-Core checkpoint (torch_dist)")
    other: list[str] = []
    values: dict[str, list[Box]] = {}
    for path, entry in entries(folder).items():
        name = ".".join(map(str, path))
        state = _STATE.fullmatch(name)
        if not isinstance(entry, list) or (state is None and ("optimizer." in name or "_extra_state" in name)):
            other.append(name)
        elif state is None:
            values.setdefault(name, entry)
        elif state[1] == "fp32_param":
            values[state[2]] = entry  # instead of its copy in 16 bits, with which the model computes
        else:
            for part in entry:
                contents.parts += _by_layer(f"optimizer/{state[1]}/", state[2], part)
    for name, parts in values.items():
        for part in parts:
            contents.parts += _by_layer("parameter/", name, part)
    common = read_tensors(folder / "common.pt")
    contents.progress = {"global_steps": int(common.get("iteration", 0))}
    optimizer = common.get("optimizer") or {}
    optimizer = optimizer.get("optimizer", optimizer)
    groups = optimizer.get("param_groups") or []
    contents.groups = [group_options(group) for group in groups]
    names = {part.name.removeprefix("parameter/") for part in contents.parts if part.name.startswith("parameter/")}
    if len(groups) == 1:
        contents.members = dict.fromkeys(sorted(names), 0)
    # One number for all parameters, whose groups are not known if there are several.
    steps = (optimizer.get("state") or {}).get("common_step")
    if steps is not None:
        contents.numbers = {name: {"step": steps} for name in sorted(names)}
    if other:
        contents.left.append(f"{len(other)} entries that are neither weights nor states of them, such as {other[0]}")
    if common.get("opt_param_scheduler"):
        contents.left.append("the state of Megatron's own scheduler; set one up that goes on at this update")
    return contents


def _by_layer(kind: str, name: str, part: Box) -> Iterator[Box]:
    """Yield a part under its name, or the parts of single layers that it is made of."""
    stacked = _STACKED.fullmatch(name)
    if stacked is None or part.offsets is None or part.sizes is None:
        yield part.renamed(kind + name)
        return
    (first, *offsets), (count, *sizes) = part.offsets, part.sizes
    for number in range(count):
        yield replace(
            part,
            name=f"{kind}{stacked[1]}.{first + number}.{stacked[2]}",
            shape=part.shape[1:],
            stop=prod(sizes),
            read=partial(_layer, part, number),
            offsets=tuple(offsets),
            sizes=tuple(sizes),
        )


def _layer(part: Box, number: int) -> torch.Tensor:
    return part.data().view(part.area[1])[number]


class _Lazy(DefaultSavePlanner):
    """Plan over tensors without memory, each of which is read when it is written."""

    def __init__(self, reads: Mapping[str, Callable[[], torch.Tensor]], advance: Callable[[int], None]) -> None:
        super().__init__()
        self._reads, self._advance, self._last = reads, advance, torch.empty(0)

    def lookup_object(self, index: Any) -> Any:
        """Return the values of a tensor, or another object."""
        value = super().lookup_object(index)
        if isinstance(value, torch.Tensor) and value.is_meta:
            # Torch keeps all tensors of a file until it is complete, but the one before is written by now.
            self._last.untyped_storage().resize_(0)
            value = self._last = self._reads[index.fqn]().clone()
            self._advance(value.nbytes)
        return value


def write(contents: Contents, folder: Path, advance: Callable[[int], None]) -> Path:
    """Write a checkpoint as ``torch.distributed.checkpoint`` loads it into a plain model and its optimizer.

    It holds ``model``, ``optimizer`` (as ``get_optimizer_state_dict`` names it), ``step``, and ``lr_scheduler``.
    """
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    reads: dict[str, Callable[[], torch.Tensor]] = {}
    for kind, name, parts in tensors(contents):
        like = torch.empty(parts[0].shape, dtype=parts[0].dtype, device="meta")
        if kind == "optimizer":
            key, name = name.split("/", 1)
            states.setdefault(name, {})[key] = like
            reads[f"optimizer.state.{name}.{key}"] = partial(whole, parts)
        else:
            model[name], reads[f"model.{name}"] = like, partial(whole, parts)
    model |= contents.extra
    for name, owner in contents.tied.items():
        if owner in model:
            model[name], reads[f"model.{name}"] = model[owner], reads[f"model.{owner}"]
    for name, numbers in contents.numbers.items():
        states.setdefault(name, {}).update(numbers)
    state_dict: dict[str, Any] = {"model": model, "step": contents.progress.get("global_steps", 0)}
    if contents.groups:
        state_dict["optimizer"] = {
            "state": states,
            "param_groups": [_DEFAULTS | group for group in named_groups(contents)],
        }
    if contents.scheduler is not None:
        state_dict["lr_scheduler"] = dict(contents.scheduler[0])
    writer = FileSystemWriter(folder, thread_count=1)
    try:
        save(state_dict, storage_writer=writer, planner=_Lazy(reads, advance), no_dist=True)
    except CheckpointException as error:  # torch's, around the reason
        raise next(iter(error.failures.values()))[0] from None
    return folder


def named_groups(contents: Contents) -> list[dict[str, Any]]:
    """Return the parameter groups with the names of their parameters; raise ValueError if those are not known."""
    if len(contents.groups) > 1 and not contents.members:
        raise ValueError(
            f"{contents.source} does not say which of its {len(contents.groups)} parameter groups a parameter is in; "
            "save it anew with this version, or pass --weights-only"
        )
    return [
        {**group, "params": [name for name, place in contents.members.items() if place == number]}
        for number, group in enumerate(contents.groups)
    ]
