"""Leaf modules of ``deepspeed.utils``: modules that are fetched whole, with nothing inside fetched by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from zeromesh.engine.owners import engine_of
from zeromesh.shard.find_units import is_leaf, mark_leaf

Match = Callable[[str, nn.Module, object], bool]


def _by_class(name: str, module: nn.Module, wanted: object) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    if not isinstance(wanted, str):
        raise AssertionError(f"leaf modules are given by their class or its name, not by {wanted!r}")
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _mark(
    model: nn.Module, wanted: Iterable[object], leaf: bool, raises: bool, match: Match, all_have_to_match: bool = False
) -> tuple[list[nn.Module], list[object]]:
    """Mark modules that match, or take the mark away; return them, and what matched none."""
    named, wanted = list(model.named_modules()), list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    matching = [module for name, module in named if any(match(name, module, pattern) for pattern in wanted)]
    missing = [pattern for pattern in wanted if not any(match(name, module, pattern) for name, module in named)]
    if raises and (missing if all_have_to_match else not matching):
        kinds = sorted({type(module).__name__ for _, module in named})
        raise ValueError(f"{missing or wanted} match no module of the model; its classes are {', '.join(kinds)}")
    late = next(
        (m for m in matching if is_leaf(m) != leaf and any(engine_of(p) is not None for p in m.parameters())), None
    )
    if late is not None:
        raise ValueError(
            f"a {type(late).__name__} belongs to an engine, which has found its units already; call this before "
            "initialize"
        )
    for module in matching:
        mark_leaf(module, leaf)
    return matching, missing


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules of these classes, or of classes of these names, as leaves, before ``initialize``; return them.

    Raises:
        ValueError: no module matches, or the model belongs to an engine.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found, _by_class)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take back what ``set_z3_leaf_modules`` did."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found, _by_class)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[object]]:
    """Mark modules by their names in the model; return them, and the names of none."""
    return _mark(model, module_names, flag, raise_if_not_found, lambda name, module, pattern: name == pattern, True)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[object]]:
    """Mark modules by the ends of their names in the model; return them, and the ends that match none."""
    return _mark(
        model, module_name_suffixes, flag, raise_if_not_found, lambda name, module, end: name.endswith(str(end)), True
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module as a leaf, or take the mark away."""
    _mark(model, [""], flag, True, lambda name, module, pattern: name == pattern)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are marked as leaves."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module is marked as a leaf."""
    return is_leaf(model)


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return whether a parameter of an engine's model is inside of a leaf."""
    engine = engine_of(model)
    leaves = [] if engine is None else get_z3_leaf_modules(engine.module)
    return any(model is parameter for leaf in leaves for parameter in leaf.parameters())
