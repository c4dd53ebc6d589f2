"""Experts of a model: found by the shapes of their parameters, and proven by what they compute.

No name of a model or of a class decides, so that a user's own experts are found as those of transformers are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zeromesh.base.dry.model_copy import code_of, undisturbed
from zeromesh.base.split import Split
from zeromesh.base.words import counted, some
from zeromesh.parallel.expert.adapted import bare_modules, plain_path, with_adapters
from zeromesh.parallel.expert.contract import DIFFERENT, Contract, Experts, Form

__all__ = ["Contract", "Experts", "find_experts"]

Modules = Mapping[str, nn.Module]


def find_experts(model: nn.Module, targets: Sequence[str], ranks: int) -> list[Experts]:
    """Return the experts of a model, in the order of its modules. The model is left as it is.

    Args:
        model: its parameters may be on any device, meta included.
        targets: class names, or glob patterns of module names, of modules that hold the experts of a layer; empty for
            all that are found by their structure.
        ranks: of the axis.

    Raises:
        ValueError: a target that matches no module, a module that keeps no contract, experts that are unequal or that
            the ranks do not divide, or several ranks for a model without experts.
    """
    modules = bare_modules(model)
    experts: list[Experts] = []
    objections: dict[str, str] = {}
    proofs: dict[Any, tuple[Form | None, str]] = {}  # by ``code_of``: the layers of a model are alike
    for name in _targeted(modules, targets) if targets else _suspected(modules):
        module = modules[name]
        if any(name.startswith(f"{outer.name}.") for outer in experts):
            continue
        members = _members(name, module)
        results = []
        for sample in members.values() or [module]:
            code = code_of(sample)
            results.append(proofs.get(code) or proofs.setdefault(code, _prove(sample, ranks, bool(members))))
        form, objection = results[0]
        if members:
            experts.append(_listed(name, modules, members, ranks, any(why.endswith(DIFFERENT) for _, why in results)))
        elif form is None:
            objections[name] = objection
        else:
            experts.append(_stacked(name, module, form, ranks))
    if objections and (targets or not experts):
        raise ValueError(_no_contract(modules, objections))
    experts = [with_adapters(model, item) for item in experts]
    _check(model, experts, ranks)
    return experts


def objection_to_single(item: Experts) -> str:
    """Return how results of ROUTED differ where a module has some of its experts alone; "" proves it equal."""
    names = {name: (len(p) // item.count, 0) for name, p in item.module.named_parameters()}
    form = Form(item.contract, item.count, item.beyond, names, item.sizes, item.choices)
    with undisturbed(next((p.device for p in item.module.parameters()), None)), torch.no_grad():
        return form.objection(item.module, item.count)


def _targeted(modules: Modules, targets: Sequence[str]) -> list[str]:
    names: set[str] = set()
    for target in targets:
        kinds = {name: {kind.__name__ for kind in type(module).__mro__} for name, module in modules.items()}
        matches = {name for name in modules if fnmatchcase(plain_path(name), target) or target in kinds[name]}
        if not matches:
            raise ValueError(
                f'experts.targets: "{target}" is the name of no module, and of no class of one; {_remedy(modules)}'
            )
        names |= matches
    return [name for name in modules if name in names]


def _suspected(modules: Modules) -> Iterator[str]:
    """Yield names of modules that look like experts, outer ones behind those with parameters of their own."""
    outer: list[str] = []
    for name, module in modules.items():
        last = name.rpartition(".")[2]
        word = f"{last} {type(module).__name__}".lower()
        if "shared" in last:  # by all tokens
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            if "expert" in word:
                yield name
        elif "expert" in word or any("expert" in attribute for attribute in _sizes(module)):
            if any(p.ndim > 2 for p in module.parameters(recurse=False)):
                yield name
            elif "expert" in word and any(p.ndim > 1 for c in module.children() for p in c.parameters(recurse=False)):
                outer.append(name)
    yield from outer


def _sizes(module: nn.Module) -> dict[str, int]:
    """Return the whole numbers that a module has as attributes."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 0}
    return {name: value for name, value in numbers.items() if not name.startswith("_") and "shared" not in name}


def _prove(module: nn.Module, ranks: int, of_list: bool) -> tuple[Form | None, str]:
    """Return the form that a module, or an expert of a list, keeps, or None and what it does instead."""
    objections: dict[str, None] = {}
    with undisturbed(next((p.device for p in module.parameters()), None)), torch.no_grad():
        for form in [Form(Contract.LISTED, 1, 0, {}, {})] if of_list else _forms(module):
            objection = form.objection(module, 1 if of_list else ranks)
            if not objection:
                return form, ""
            objections[f"as {form.contract.name.lower()}: {objection}"] = None
    return None, some(objections, separator="; ", most=3) or "none of its parameters has a row for each expert"


def _forms(module: nn.Module) -> Iterator[Form]:
    """Yield the ways of reading a module's parameters as those of experts, the likely ones first."""
    parameters = {name: p for name, p in module.named_parameters() if p.ndim}
    attributes = {(path, key): size for path, inner in module.named_modules() for key, size in _sizes(inner).items()}
    sizes = {place: size for place, size in attributes.items() if "expert" in place[1] and size > 1}
    lengths = {name: len(p) for name, p in parameters.items()}
    # Attributes name the number of experts; where there are none, weights of the most dims have it.
    dims = max((p.ndim for p in parameters.values()), default=0)
    unnamed = [len(p) for p in parameters.values() if p.ndim == dims > 2 and len(p) > 1]
    for count in sorted({*sizes.values()}) or sorted({*unnamed}):
        # A weight may have the rows of all experts below each other, so many of each as another attribute says.
        rows = {name: length // count for name, length in lengths.items() if length % count == 0}
        stacked = {name: (each, 0) for name, each in rows.items() if each == 1}
        stacked = stacked or {name: (each, 0) for name, each in rows.items() if each in attributes.values()}
        # It may also have rows that no expert uses, where choices beyond them need no parameters.
        total = max([count, *(size for size in sizes.values() if stacked and size in lengths.values())])
        stacked |= {name: (1, total - count) for name, length in lengths.items() if length == total > count}
        numbers = {place: size for place, size in sizes.items() if size in (count, total)}
        # A parameter of as many entries by chance is no expert's.
        matrices = {name: rule for name, rule in stacked.items() if parameters[name].ndim > 1}
        for contract in Contract:
            if stacked and contract.fits(module.forward):
                yield Form(contract, count, total - count, stacked, numbers)
                yield Form(contract, count, total - count, matrices, numbers)
                yield Form(contract, count, total - count, stacked, {})
                yield Form(contract, count, total - count, stacked, numbers, choices=2)


def _stacked(name: str, module: nn.Module, form: Form, ranks: int) -> Experts:
    """Return the experts of a module whose parameters have rows of all of them."""
    splits: dict[str, Split] = {}
    for parameter, (rows, behind) in form.stacked.items() if form.count % ranks == 0 else ():
        size = form.count * rows
        split = Split.even(0, [size], ranks, rows)
        if behind:
            # No expert uses these rows; they are divided so that a checkpoint has them.
            rest = Split.padded(0, behind, ranks)
            moved = [tuple((start + size, stop + size) for start, stop in part) for part in rest.intervals]
            parts = zip(split.intervals, moved, strict=True)
            split = Split(0, size + behind, split.length + rest.length, tuple(used + unused for used, unused in parts))
        splits[f"{name}.{parameter}".lstrip(".")] = split
    sizes = {place: size - form.count + form.count // ranks for place, size in form.sizes.items()}
    return Experts(name, module, form.count, form.contract, splits, form.beyond, sizes, name, form.choices)


def _members(name: str, module: nn.Module) -> Modules:
    """Return the experts of a list of equal ones, by name; empty if a module is no list. Raise ValueError for others.

    Their class may be any; names and shapes of their parameters are the same.
    """
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return {}
    shapes = {key: {n: tuple(p.shape) for n, p in child.named_parameters()} for key, child in module.named_children()}
    shapes = {key: shape for key, shape in shapes.items() if shape}  # a dropout is no expert
    first = next(iter(shapes), "")
    for key, shape in shapes.items():
        for parameter in {**shapes[first], **shape}:
            sizes = [str(each.get(parameter, "missing")) for each in (shapes[first], shape)]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"{name} has unequal experts: {parameter} is {sizes[0]} in {first} and {sizes[1]} in {key}; ranks "
                    "can share equal ones only. Make them equal, leave mesh.expert out, or name others by "
                    "experts.targets"
                )
            if shape[parameter] == ():
                raise ValueError(f"{name}.{key}.{parameter} has no dim along which one rank could have all of it")
    if len(shapes) < 2:
        return {}
    expert = module.get_submodule(first)
    if not _computes(expert):
        raise ValueError(
            f"{name}.{first} is a {type(expert).__name__}, which has no forward that the loop around the experts could "
            f'call; give each expert a forward, or, if these are lists of experts, write "experts": {{"targets": '
            f'["{name}.*"]}}'
        )
    try:
        inspect.signature(expert.forward).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{name}.{first} ({type(expert).__name__}) is not called with one tensor (rows, width): {error}; ranks can "
            "share experts that are: apply what else there is to their input or output, or leave mesh.expert out"
        ) from None
    return {key: module.get_submodule(key) for key in shapes}


def _computes(module: nn.Module) -> bool:
    """Return whether a module has a forward; lists have none."""
    return type(module).forward is not nn.Module.forward


def _listed(name: str, modules: Modules, members: Modules, ranks: int, mixes: bool) -> Experts:
    """Return the experts of a list, of which each is on one rank."""
    each = max(1, len(members) // ranks)
    owners = {key: min(index // each, ranks - 1) for index, key in enumerate(members)}
    splits = {
        f"{name}.{key}.{parameter_name}": Split.on(0, len(p), ranks, owners[key])
        for key, member in members.items()
        for parameter_name, p in member.named_parameters()
    }
    caller = name
    while caller and caller in modules and not _computes(modules[caller]):
        caller = caller.rpartition(".")[0]
    return Experts(name, modules[name], len(members), Contract.LISTED, splits, caller=caller, mixes=mixes)


def _check(model: nn.Module, experts: Sequence[Experts], ranks: int) -> None:
    """Raise ValueError if the ranks cannot share the experts."""
    if ranks == 1:
        return
    if not experts:
        raise ValueError(
            f"mesh.expert is {ranks}, and the model has no experts: no module has parameters with a row for each of "
            f"them, and none is a list of equal experts; leave mesh.expert out. {_remedy(dict(model.named_modules()))}"
        )
    for name, module in model.named_modules():
        capacity = vars(module).get("expert_capacity", 1)
        if isinstance(capacity, int) and capacity < 1:
            raise ValueError(
                f"{name}.expert_capacity is {capacity}, with which every token would be dropped; give it at least 1"
            )
    for item in experts:
        if any(isinstance(inner, nn.modules.batchnorm._BatchNorm) for inner in item.module.modules()):
            raise ValueError(f"{item.name} has a batch norm, whose statistics would differ between ranks; use a norm")
        others = [other.name for other in experts if other.contract is Contract.LISTED and other.caller == item.caller]
        if len(others) > 1:  # an expert without tokens would be called with inputs of the other list's rehearsal
            raise ValueError(
                f"the forward of {item.caller or 'the model'} calls {len(others)} lists of experts, "
                f"{some(others, most=3)}, and inputs of one may depend on another's results; let each list be in a "
                "module of its own, whose forward has the loop over it"
            )
    common = math.gcd(*(item.count for item in experts))
    sizes = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    for item in experts:
        if item.count % ranks:
            raise ValueError(
                f"{item.name} has {counted(item.count, 'expert')}, which {ranks} ranks cannot share: {item.count} / "
                f"{ranks} = {item.count / ranks:.4g}; sizes of mesh.expert that work for this model: {sizes}"
            )
    names: dict[int, str] = {}
    split = {name for item in experts for name in item.splits}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = names.setdefault(id(parameter), name)
        if other != name and split & {name, other}:
            raise ValueError(
                f"{name} is {other}: a parameter of experts that is used elsewhere, too, cannot be on one rank. Leave "
                "mesh.expert out, or untie them"
            )


def _remedy(modules: Modules) -> str:
    """Return the line of the configuration that names what could be experts."""
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList | nn.ModuleDict)]
    alike = [name for name in lists if len({type(child) for child in modules[name].children()}) == 1]
    names = [*_suspected(modules)] or alike
    line = '"experts": {"targets": [' + some((f'"{name}"' for name in names), most=3) + "]}"
    return (
        f"If these are experts, write {line}" if names else 'If it has some, name them: "experts": {"targets": [...]}'
    )


def _no_contract(modules: Modules, objections: Mapping[str, str]) -> str:
    lines = [f"{name or 'the model'} ({type(modules[name]).__name__}): {why}" for name, why in objections.items()]
    contracts = "; ".join(f"{contract.name.lower()}: {contract.value}" for contract in Contract)
    inside = {n: m for n, m in modules.items() if n not in objections}
    return (
        f"no contract of experts is kept by {some(lines, 'modules', '; ', 2)}. Experts are called in one of these "
        f"ways, and compute each row with one expert's parameters: {contracts}. {_remedy(inside)}; or leave "
        "mesh.expert out"
    )
