"""Sequence parallelism: between the split parts of blocks, each rank has a part of the sequence.

It is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from zeromesh.base.split import Held
from zeromesh.parallel.tensor.split_plan import SplitPlan

# Norms, dropout and residuals of a block then take 1/ranks of the memory, and the all-reduces before and after split
# parts become gathers and scatters, which move the same bytes. The sequence is spread where the first block of a list
# begins, and whole again after the last.

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Stack:
    """Blocks that are called one after the other, and the modules inside that are given the whole sequence."""

    name: str
    blocks: tuple[str, ...]
    whole: tuple[str, ...]

    def part(self, blocks: Collection[str]) -> Stack:
        """Return the stack of some blocks: each stage of a pipeline spreads and joins the sequence by itself."""
        whole_names = [name for name in self.whole if any(_is_in(name, block) for block in blocks)]
        return Stack(self.name, tuple(block for block in self.blocks if block in blocks), tuple(whole_names))

    def spreads(self, name: str) -> bool:
        """Return whether a module inside works on parts of the sequence, or reads one."""
        return any(_is_in(name, block) for block in self.blocks) and not any(
            _is_in(name, other) for other in self.whole
        )


def find_stacks(model: nn.Module, resolved: SplitPlan) -> list[Stack]:
    """Return the lists of blocks whose sequence is spread; ``resolved`` then says whose gradients have shares."""
    names = {member.name for member in resolved.members}
    stacks: list[Stack] = []
    for name, module in model.named_modules():
        if not isinstance(module, LISTS) or any(_is_in(name, stack.name) for stack in stacks):
            continue
        blocks = {f"{name}.{child}": block for child, block in module.named_children()}
        split = all(path not in names and _has_members(path, resolved) for path in blocks)
        if blocks and split:
            whole_names = [other for path, block in blocks.items() for other in _whole(path, block, resolved, True)]
            stacks.append(Stack(name, tuple(blocks), tuple(whole_names)))
    if not stacks:
        raise ValueError(
            "tensor_parallel.sequence is true, but the model has no list of blocks that are all split; leave it out, "
            "or give a plan that splits them"
        )
    _share_gradients(model, stacks, resolved)
    return stacks


def _is_in(name: str, around: str) -> bool:
    return name == around or name.startswith(f"{around}.")


def _has_members(name: str, resolved: SplitPlan) -> bool:
    return any(_is_in(member.name, name) for member in resolved.members)


def _whole(name: str, module: nn.Module, resolved: SplitPlan, is_block: bool) -> Iterator[str]:
    """Yield the modules inside, or this one, that are given the whole sequence."""
    if name in resolved.heads:
        if not all(_is_local(parameter, resolved) for parameter in module.parameters()):
            yield name
        return
    direct = [member for member in resolved.members if member.name.rpartition(".")[0] == name]
    children = {f"{name}.{child}": m for child, m in module.named_children()}
    unsplit = {path: m for path, m in children.items() if not _has_members(path, resolved)}
    # Norms are of each token alone, and so can be of a part of the sequence.
    norms = {path for path, m in unsplit.items() if any("norm" in kind.__name__.lower() for kind in type(m).__mro__)}
    odd = [path for path, m in unsplit.items() if next(m.parameters(), None) is not None and path not in norms]
    apart = any(m.kind == "module" or m.style.whole_sequence for m in direct)
    mixes = not is_block and (odd or next(module.parameters(recurse=False), None) is not None)
    # An adapter has a factor that is not split, and reads what its layer reads.
    adapted = any(member.container == name and member not in direct for member in resolved.members)
    # A module that is neither an attention nor an MLP that is all split, as experts with their router, latent
    # attention, or one with adapters, computes as it does without sequence parallelism.
    if apart or mixes or adapted:
        yield name
        return
    yield from odd
    members = {member.name for member in direct}
    for path, child in children.items():
        if path not in members and path not in odd and _has_members(path, resolved):
            yield from _whole(path, child, resolved, False)


def _is_local(parameter: nn.Parameter, resolved: SplitPlan) -> bool:
    """Return whether each rank uses it for its own heads only, or it is added after the sum."""
    part = resolved.of_parameter.get(id(parameter))
    added = any(parameter is getattr(m.module, "bias", None) and m.style.cut == "inputs" for m in resolved.members)
    return added or (part is not None and (part.split is not None or part.partial))


def _share_gradients(model: nn.Module, stacks: Sequence[Stack], resolved: SplitPlan) -> None:
    """Mark unsplit parameters that are used on parts of the sequence: each rank has a share of their gradients."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside: dict[int, str] = {}
    outside: dict[int, str] = {}
    for path, module in model.named_modules():
        paths = inside if any(stack.spreads(path) for stack in stacks) else outside
        paths |= {id(parameter): path for parameter in module.parameters(recurse=False)}
    first = next(iter(resolved.held.values()))
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    for key in inside:
        part = resolved.of_parameter.get(key) or Held(tuple(parameters[key].shape), None, first.rank, first.ranks)
        if part.split is not None:
            continue
        if key in outside:
            raise ValueError(
                f"{names[key]} is used by {inside[key]} on parts of the sequence and by {outside[key]} on all of it; "
                + "set tensor_parallel.sequence to false"
            )
        resolved.of_parameter[key] = resolved.held[names[key]] = replace(part, partial=True)
