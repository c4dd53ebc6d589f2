"""Modules that become units: found from the model's structure, or named by the user."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

import torch
from torch import nn

from zeromesh.base.chain import Chain
from zeromesh.base.quantized_layers import require_frozen, stored
from zeromesh.base.tiled import Tile
from zeromesh.shard.parameters.deferred import is_deferred

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, Chain)
PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)  # their parameters are those of the module that has the list
# Modules that together hold less than the largest one by this factor cost more in messages than they save in memory.
# Together, because they stay in memory with the root: each of a model's blocks may be small beside its embedding.
SMALLEST_SHARE = 8
# A unit that holds more than one in so many of the model's elements is cut further where it has blocks inside.
LARGEST_SHARE = 4

_LEAF = "_zeromesh_leaf"  # attribute of modules that ``mark_leaf`` has marked

_PASS_PLAIN = "pass the plain one, and call engine.compile(), which compiles the forward of each unit"


def find_units(model: nn.Module, targets: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """The units of ``model`` but the root, in order of registration; none encloses another unless ``targets`` say so.

    A module that ``mark_leaf`` has marked is always a unit, and nothing inside of it is.

    Args:
        model: its parameters may be on any device, meta included.
        targets: class names, or glob patterns of module names; if given, these modules and marked ones become units.

    Raises:
        ValueError: a target that matches no module with parameters.
    """
    if targets:
        leaves = [(name, module) for name, module in model.named_modules() if is_leaf(module)]
        units = dict([*_matching(model, targets), *((name, leaf) for name, leaf in leaves if name and _elements(leaf))])
        return [(name, module) for name, module in units.items() if not _inside(name, leaves)]
    # The elements of lists of blocks (`ModuleList` and the like, at any depth, so the model may hold a Hugging Face
    # model as a submodule), then the large modules that are left, such as an embedding or a head.
    total = _elements(model)
    candidates = [] if is_leaf(model) else list(_candidates(model, "", total))
    floor = _largest_that_stays([_elements(module) for _, module in candidates])
    shared = _shared(model)  # belong to a common ancestor, so that a module with nothing else is not a unit
    large = [(name, module) for name, module in candidates if _elements(module) > floor or is_leaf(module)]
    return [(name, module) for name, module in large if any(id(p) not in shared for p in module.parameters())]


def unit_modules(
    model: nn.Module, targets: Sequence[str] = (), experts: Collection[str] = ()
) -> list[tuple[str, nn.Module]]:
    """Return the modules that are fetched by themselves: ``find_units``, and tiles of linear layers inside them.

    So are those with the names ``experts``, whose parameters are sharded over other ranks than those around them, and
    with them nothing inside of them.
    """
    units = {
        name: module
        for name, module in find_units(model, targets)
        if not any(not outer or name.startswith(f"{outer}.") for outer in experts)
    }
    units |= {name: model.get_submodule(name) for name in experts if name}  # the model itself is one anyway
    leaves = [(name, module) for name, module in model.named_modules() if is_leaf(module)]
    tiles = [(name, module) for name, module in model.named_modules() if isinstance(module, Tile)]
    units |= {name: module for name, module in tiles if not _inside(name, leaves)}
    order = {name: number for number, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return sorted(units.items(), key=lambda item: order[item[0]])


def mark_leaf(module: nn.Module, leaf: bool = True) -> None:
    """Mark a module that is to be one unit, whatever it has inside; or take the mark away."""
    # On the module, so that copies and pickles of a model keep it.
    if leaf:
        vars(module)[_LEAF] = True
    else:
        vars(module).pop(_LEAF, None)


def is_leaf(module: nn.Module) -> bool:
    """Return whether ``mark_leaf`` has marked this module."""
    return _LEAF in vars(module)


def _inside(name: str, leaves: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return whether a module is inside of a marked one."""
    return any(not leaf or name.startswith(f"{leaf}.") for leaf, _ in leaves if leaf != name)


def _largest_that_stays(sizes: Sequence[int]) -> int:
    """The elements up to which modules stay with the root; those of one size stay or go together."""
    limit, together, floor = max(sizes, default=0) // SMALLEST_SHARE, 0, 0
    for size, count in sorted(Counter(sizes).items()):
        together += size * count
        if together > limit:
            break
        floor = size
    return floor


def _candidates(module: nn.Module, name: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if _elements(child) == 0:
            continue
        block = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS)
        if isinstance(child, PARAMETER_LISTS):  # Keras has its layers inside of one
            yield from _candidates(child, path, total)
            continue
        # A module whose parameters are its own, as an attention's are, is not cut further.
        lists = [grandchild for grandchild in child.children() if isinstance(grandchild, PARAMETER_LISTS)]
        own_elements = sum(
            parameter.numel() for holder in (child, *lists) for parameter in holder.parameters(recurse=False)
        )
        if is_leaf(child) or 2 * own_elements >= _elements(child) or (block and not _too_large(child, total)):
            yield path, child
        else:
            yield from _candidates(child, path, total)


def _too_large(block: nn.Module, total: int) -> bool:
    """Return whether to cut a block: it is a large part of the model and mostly consists of blocks of one kind."""
    if _elements(block) * LARGEST_SHARE <= total:
        return False
    inside = sum(
        _elements(container)
        for container in block.modules()
        if isinstance(container, CONTAINERS) and _repeats(container)
    )
    return inside * 2 > _elements(block)


def _repeats(container: nn.Module) -> bool:
    kinds = Counter(type(child) for child in container.children() if next(child.children(), None) is not None)
    return any(count > 1 for count in kinds.values())


def _matching(model: nn.Module, targets: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    unused = dict.fromkeys(targets)
    for name, module in model.named_modules():
        if not name or _elements(module) == 0:
            continue
        hits = [t for t in targets if t in {kind.__name__ for kind in type(module).__mro__} or fnmatchcase(name, t)]
        for hit in hits:
            unused.pop(hit, None)
        if hits:
            yield name, module
    if unused:
        kinds = sorted({type(module).__name__ for name, module in model.named_modules() if name and _elements(module)})
        raise ValueError(
            f"units: {next(iter(unused))!r} matches no module with parameters; give a class name or a pattern of "
            f"module names. The classes in this model are {', '.join(kinds)}"
        )


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shared(model: nn.Module) -> set[int]:
    """Parameters that stand at several places: they belong to the nearest common ancestor."""
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {key for key, count in places.items() if count > 1}


def assign(model: nn.Module, units: Sequence[str]) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return the (fully qualified name, parameter) pairs of each unit by its name, the root's being empty.

    The innermost unit that encloses all uses of a parameter owns it.
    """
    places: dict[int, list[str]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in stored(model, remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
        first.setdefault(id(parameter), (name, parameter))
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("", *units)}
    for key, names in places.items():
        enclosing = (outer for outer in prefixes(names[0]) if outer in owned)
        owner = next((outer for outer in enclosing if all(name.startswith(f"{outer}.") for name in names)), "")
        owned[owner].append(first[key])
    return owned


def prefixes(name: str) -> Iterator[str]:
    """Yield the names of the modules that enclose what has this name, from the innermost on, without the root's."""
    while (name := name.rpartition(".")[0]) != "":
        yield name


def check_parameters(model: nn.Module) -> None:
    """Raise ValueError if the parameters cannot be laid out flat, or the model not be listened to."""
    if model._compiled_call_impl is not None or "_orig_mod" in model._modules:
        raise ValueError(f"the model is compiled as a whole; {_PASS_PLAIN}")
    devices: dict[torch.device, str] = {}
    # Its module is slow to import; where nobody has, there is none.
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, spread):
            raise ValueError(
                f"parameter {name} is a DTensor, which somebody has spread over ranks; pass the model with plain "
                "parameters, and say in the configuration how it is to be spread"
            )
    for name, parameter in stored(model):
        if not is_deferred(parameter):
            devices.setdefault(parameter.device, name)
        if parameter.layout is not torch.strided:
            raise ValueError(f"parameter {name} has layout {parameter.layout}; only dense parameters can be sharded")
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"parameter {name} is lazy and has no shape yet; run one batch through the model first")
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            persistent = name.rpartition(".")[2] not in module._non_persistent_buffers_set
            if persistent and buffer.layout is not torch.strided:
                raise ValueError(
                    f"buffer {name} has layout {buffer.layout}, and only dense ones can be kept the same on all ranks; "
                    "register it with persistent=False, or as a dense tensor"
                )
    require_frozen(model)
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        there = "move the model to one device first"
        if torch.device("meta") in devices:
            there = "those on meta have no values: build the whole model under zeromesh.zero.Init() instead"
        raise ValueError(f"the model's parameters are on several devices ({listed}); {there}")
    _check_memory(model)


def check_compiled(model: nn.Module, targets: Sequence[str] = ()) -> None:
    """Raise ValueError if a unit would be fetched inside of what is compiled."""
    # Modules that are compiled inside a unit are fine, and so are units whose forward is compiled.
    names = [name for name, _ in unit_modules(model, targets)]
    for path, module in model.named_modules():
        # The wrapper that torch.compile gives and a compiled forward leave the hooks of the module itself outside.
        is_compiled_unit = module._compiled_call_impl is not None and path in names
        forward = module.__dict__.get("forward")
        if module._compiled_call_impl is None and not hasattr(forward, "_torchdynamo_orig_callable"):
            continue
        inside = [name for name in names if name.startswith(f"{path}.") or not path]
        if is_compiled_unit or inside:
            raise ValueError(
                f"{path or 'the model'} is compiled and holds the unit {(inside or [path])[0]}; {_PASS_PLAIN}"
            )


def _check_aliases(model: nn.Module, ranges: Mapping[int, Sequence[tuple[int, int, str]]]) -> None:
    """Refuse buffers in the memory of a trainable parameter, which they would no longer follow."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or buffer.is_meta or not buffer.numel():
            continue
        start = int(buffer.storage_offset()) * buffer.itemsize
        for first, stop, parameter in ranges.get(buffer.untyped_storage()._cdata, ()):
            if parameter in trained and start < stop and first < start + buffer.nbytes:
                raise ValueError(
                    f"buffer {name} lies in the memory of parameter {parameter}, which moves, so that the buffer would "
                    "no longer follow it; take the parameter itself in each forward, or register a copy (.clone())"
                )


def _check_memory(model: nn.Module) -> None:
    """Refuse two parameters in the same memory: in a layout of their own they would no longer change together."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in stored(model):
        span = 1 + sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        if span == parameter.numel():
            start = int(parameter.storage_offset()) * parameter.itemsize
            place = (start, start + parameter.nbytes, name)
            ranges.setdefault(parameter.untyped_storage()._cdata, []).append(place)
    _check_aliases(model, ranges)
    for places in ranges.values():
        for (_, stop, first), (start, _, second) in pairwise(sorted(places)):
            if start < stop:
                raise ValueError(
                    f"parameters {first} and {second} share memory but are two parameters; tie them by giving both "
                    "modules the same one: `second.weight = first.weight`"
                )
