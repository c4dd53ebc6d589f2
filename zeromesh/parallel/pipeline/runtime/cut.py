"""Blocks of a model, the parameters that each stage needs, and removal of the others."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

import torch
from torch import nn

from zeromesh.base.chain import Chain
from zeromesh.base.dry.model_inputs import ModelInput
from zeromesh.base.dtypes import dtypes
from zeromesh.base.precision import Precision
from zeromesh.parallel.pipeline.runtime.elsewhere import Elsewhere
from zeromesh.parallel.pipeline.runtime.parameter_uses import ModelTrace, trace
from zeromesh.parallel.pipeline.schedule.partition import Blocks, Cut, inner

LISTS = (nn.ModuleList, nn.Sequential)

Place = tuple[nn.Module, str]  # of a parameter: the module, and its name there

REMEDY = "name others in pipeline.blocks, in the order in which they are called, or set mesh.pipeline to 1"


def examine(
    model: nn.Module, patterns: Sequence[str] = (), sample: ModelInput | None = None, parts: bool = False
) -> Blocks:
    """Find the blocks of a model by a trace of its forward; by the order of registration if it cannot be traced.

    Operations are counted for ``sample``; without one, inputs are guessed. With ``parts``, modules inside of blocks
    before which the trace shows that a forward can be left and entered are blocks, too. The model is not changed.
    """
    names = find_blocks(model, patterns)
    if isinstance(model, Chain):
        return _blocks(model, names, model.kinds, *_of_chain(model), None, ())
    # Where no stage may begin inside of blocks, those that are inside of others are parts of them.
    nested = inner(names)
    names = [name for number, name in enumerate(names) if number not in nested]
    if parts and (inside := _parts(model, names)) != names:
        with suppress(ValueError):  # raised again below, for the blocks alone
            if traced := trace(model, inside, sample):
                return _examined(model, inside, traced)
    return _examined(model, names, trace(model, names, sample))


def _parts(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return blocks, each with the modules in it, before which a model might be cut."""
    names = []
    for block in blocks:
        names.append(block)
        module = model.get_submodule(block)
        # The values of a buffer that is state are taken from the one stage that has the block. Blocks of transformers
        # that are recomputed run again as a whole.
        recomputes = getattr(module, "gradient_checkpointing", False)
        has_buffers = any(child._buffers for child in module.modules())
        if not (isinstance(module, LISTS) or has_buffers or recomputes):
            names += [f"{block}.{name}" for name, child in module.named_children() if _has_parameters(child)]
    return names


def _examined(model: nn.Module, names: Sequence[str], traced: ModelTrace | None) -> Blocks:
    calls = list(range(len(names))) if traced is None else _separable(model, names, traced)
    block_names = [names[call if traced is None else traced.calls[call]] for call in calls]
    position = _positions(model, block_names)
    placed = _by_registration(model, position)
    operations = [0.0] * len(calls)
    if traced is not None:
        # A section belongs to the last block before it at which the forward can be left; the first one, to the first.
        owners = [max(sum(call < section for call in calls) - 1, 0) for section in range(len(traced.calls) + 1)]
        for section, count in enumerate(traced.operations):
            operations[owners[section]] += count
        # Parameters that the trace did not see used stay where they are registered.
        placed |= {name: {owners[section] for section in sections} for name, sections in traced.uses.items()}
    # A buffer that several blocks have is the first one's: a checkpoint has its values from there.
    firsts: dict[int, int] = {}
    named = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in named.items():
        block = position[name.rpartition(".")[0]]
        firsts[id(buffer)] = min(block, firsts.get(id(buffer), block))
    buffers = {name: firsts[id(buffer)] for name, buffer in named.items()}
    types = [type(model.get_submodule(name)).__name__ for name in block_names]
    return _blocks(model, block_names, types, placed, buffers, operations, _finer(model, block_names))


def _blocks(
    model: nn.Module,
    names: Sequence[str],
    types: Sequence[str],
    placed: Mapping[str, Collection[int]],
    buffers: Mapping[str, int],
    operations: Sequence[float] | None,
    finer: tuple[str, ...],
) -> Blocks:
    sizes = [0.0] * len(names)
    for name, parameter in model.named_parameters():
        for block in placed[name]:
            sizes[block] += parameter.numel()
    ordered = {name: tuple(sorted(blocks)) for name, blocks in placed.items()}
    counted = tuple(operations) if operations and any(operations) else None
    return Blocks(tuple(names), tuple(types), ordered, tuple(sizes), counted, buffers, finer)


def _finer(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of the modules in the outermost lists inside of blocks."""
    outer = [name for block in blocks for name in _outer_lists(model.get_submodule(block), block)]
    return tuple(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) + ".*" for name in outer))


def _outer_lists(model: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of the outermost lists of modules, of those that have parameters."""
    named = model.named_modules(prefix=prefix)
    lists = [name for name, module in named if isinstance(module, LISTS) and _has_parameters(module)]
    return [name for name in lists if not any(_is_in(name, other) for other in lists if other != name)]


def describe_stages(model: nn.Module, blocks: Blocks, cut: Cut) -> list[str]:
    """Return a line for each stage: its blocks and parameters, and its shares of the known costs."""
    stages = range(len(cut.starts))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts = [sum(sizes[name] for name, needing in cut.stages.items() if stage in needing) for stage in stages]
    costs: dict[str, list[float]] = {"parameters": [float(size) for size in counts]}
    bounds = (*cut.starts, len(cut.blocks))
    if blocks.operations is not None:
        first = [*(blocks.names.index(cut.blocks[start]) for start in cut.starts), len(blocks.names)]
        costs["operations"] = [sum(blocks.operations[first[stage] : first[stage + 1]]) for stage in stages]
    return [
        f"stage {stage}: {cut.blocks[bounds[stage]]} to {cut.blocks[bounds[stage + 1] - 1]}, {counts[stage]:,} "
        "parameters, " + ", ".join(f"{cost[stage] / (sum(cost) or 1):.1%} of {what}" for what, cost in costs.items())
        for stage in stages
    ]


def _of_chain(model: Chain) -> tuple[dict[str, frozenset[int]], dict[str, int]]:
    """Return the layers that need each parameter, and the first one of each buffer."""
    # Modules outside of layers are used after the last one, as the loss function is.
    last, users = frozenset([len(model.layers) - 1]), model.users()
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    uses: dict[str, frozenset[int]] = dict.fromkeys(first.values(), frozenset())
    buffers = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            uses[first[id(parameter)]] |= users.get(id(module), frozenset())
        for name, _ in module.named_buffers(path, recurse=False):
            buffers[name] = min(users.get(id(module), last))
    return {name: layers or last for name, layers in uses.items()}, buffers


def _separable(model: nn.Module, names: Sequence[str], traced: ModelTrace) -> list[int]:
    """Return the numbers of the calls at which the forward can be left and entered again, and of the first."""
    repeated = {block for block in traced.calls if traced.calls.count(block) > 1}
    parts = inner(names)
    for block in repeated - parts.keys():
        if _has_parameters(model.get_submodule(names[block])):
            raise ValueError(
                f"{names[block]} is called {traced.calls.count(block)} times in a forward of {type(model).__name__}; "
                f"blocks of a pipeline are called once, one after the other: {REMEDY}"
            )
    # What is called often and has no parameters, as a shared activation, belongs to the blocks around it.
    once = [number for number, block in enumerate(traced.calls) if block not in repeated and block not in parts]
    crossed = {number for source, read in traced.crossings for number in range(source, read)}
    numbers = [number for position, number in enumerate(once) if position == 0 or number not in crossed]
    if len(numbers) < 2 <= len(once):
        source, read = min(traced.crossings)
        raise ValueError(
            f"{type(model).__name__} reads, after its call of {names[traced.calls[read - 1]]} and outside of what that "
            f"is called with, what it computed before its call of {names[traced.calls[source]]}; between blocks of a "
            f"pipeline nothing passes but what blocks are called with: {REMEDY}"
        )
    if not numbers:
        raise ValueError(f"a forward of {type(model).__name__} calls none of {', '.join(names[:3])}: {REMEDY}")
    if not parts:
        return numbers
    outer = {traced.calls[number] for number in numbers}
    # Before the first call inside of a block the model is cut as before the block.
    inside = {
        number
        for number, block in enumerate(traced.calls)
        if block in parts
        and parts[block] in outer
        and block not in repeated
        and number not in traced.closed
        and traced.calls[number - 1] != parts[block]
    }
    return sorted({*numbers, *inside})


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """Return the candidates for blocks: children of the outermost lists of modules, in order of registration.

    ``patterns`` name others, in the order of their calls; ``*`` is anything without a dot.
    """
    if isinstance(model, Chain):
        if patterns:
            raise ValueError(
                f"pipeline.blocks is {list(patterns)}, and the layers of a {type(model).__name__} are its blocks: "
                "leave it out"
            )
        return list(model.layers)
    names = [name for name, _ in model.named_modules() if name]
    if patterns:
        chosen: list[str] = []
        for pattern in patterns:
            depth = pattern.count(".")
            matching = [n for n in names if n.count(".") == depth and fnmatchcase(n, pattern) and n not in chosen]
            if not matching:
                raise ValueError(
                    f"pipeline.blocks: {pattern!r} matches no module; its names are like {', '.join(names[:5])}"
                )
            chosen += matching
        return chosen
    children = (
        (name, child) for name in _outer_lists(model) for child, _ in model.get_submodule(name).named_children()
    )
    blocks = [f"{name}.{child}".lstrip(".") for name, child in children]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks (nn.ModuleList or nn.Sequential) to be cut into stages: "
            "name them in pipeline.blocks, in the order in which they are called, or set mesh.pipeline to 1"
        )
    return blocks


def _positions(model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Return the block of each module, if all is used in the order of registration."""
    position: dict[str, int] = {}
    latest = 0
    for name, _ in model.named_modules(remove_duplicate=False):
        block = next((number for number, block in enumerate(blocks) if _is_in(name, block)), None)
        latest = max(latest, block) if block is not None else latest
        position[name] = latest if block is None else block
    return position  # a module around blocks holds parameters that are used before them


def _by_registration(model: nn.Module, position: Mapping[str, int]) -> dict[str, set[int]]:
    """Return the blocks that need each parameter, if all is used in the order of registration."""
    uses: dict[str, set[int]] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        uses.setdefault(first_name, set()).add(position[name.rpartition(".")[0]])
    return uses


def take_away(
    model: nn.Module,
    cut: Cut,
    stages: Sequence[int],
    precision: Precision | None = None,
    device: torch.device | None = None,
) -> list[Place]:
    """Remove the parameters, and the buffers that are state, of all but some stages; return the parameters' places.

    Stand-ins have the dtypes of the run; without a ``precision``, the parameters' own.
    """
    chosen = dtypes(model, precision or Precision())
    # Zeros that take no memory are in the places of the others. The code before a stage's blocks can be computed with
    # these; blocks of other stages are not called.
    taken = []
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    local_names = {name for name, needing in cut.stages.items() if any(stage in needing for stage in stages)}
    idle = _idle(model, cut, stages)
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and by_id[id(parameter)] not in local_names:
                del module._parameters[name]
                taken.append((module, name))
                full = f"{path}.{name}".lstrip(".")
                vars(module)[name] = Elsewhere.make(full, parameter, device, chosen[id(parameter)])
        # Buffers stay as plain attributes: a checkpoint must not have their values from here.
        for name in [n for n in module._buffers if n not in module._non_persistent_buffers_set]:
            if id(module._buffers[name]) in idle:
                vars(module)[name] = module._buffers.pop(name)
    return taken


def _idle(model: nn.Module, cut: Cut, stages: Sequence[int]) -> set[int]:
    """Return the ``id`` of the buffers that only blocks of other stages have; one may be in several modules."""
    here: set[int] = set()
    elsewhere: set[int] = set()
    users = model.users() if isinstance(model, Chain) else None
    for path, module in model.named_modules(remove_duplicate=False):
        if users is None:
            blocks = frozenset(number for number, block in enumerate(cut.blocks) if _is_in(path, block))
        else:
            blocks = users.get(id(module), frozenset())
        is_here = not blocks or any(cut.stage_of(block) in stages for block in blocks)
        (here if is_here else elsewhere).update(map(id, module.buffers(recurse=False)))
    return elsewhere - here


def _is_in(name: str, around: str) -> bool:
    return name == around or not around or name.startswith(f"{around}.")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
