"""Rules of a tensor-parallel plan, the modules and parameters that they split, and the parts that a rank holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from torch import nn

from zeromesh.base.linear_arithmetic import is_transposed
from zeromesh.base.model_names import BY_ROWS, OF_KEYS, OF_QUERIES
from zeromesh.base.split import Held, Split
from zeromesh.base.substitution import computes_as, is_adapted, is_known, is_linear
from zeromesh.parallel.tensor.heads import Heads

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class PlanRule:
    """A style, and how the dim that it cuts is made up."""

    style: str  # of ``STYLES``
    # Lengths of the parts of the dim that are each cut on their own; empty: as many equal ones as the style says.
    sections: tuple[int, ...] = ()
    block: int = 0  # entries that stay together; 0: found from the heads of the attention that the module is of, else 1

    def plain(self) -> Any:
        """Return the rule as JSON."""
        more: dict[str, Any] = {"sections": list(self.sections)} if self.sections else {}
        more |= {"block": self.block} if self.block else {}
        return {"style": self.style, **more} if more else self.style


Plan = Mapping[str, PlanRule]  # glob pattern of names of modules, or of parameters -> rule; see ``matches``


def matches(name: str, pattern: str) -> bool:
    """Return whether a name fits a glob pattern; ``*`` stands for anything without a dot, ``**`` for anything."""
    return _compiled(pattern).fullmatch(name) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts))


def pattern_of(name: str) -> str:
    """Return a name with ``*`` for numbers: the same for all blocks."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def kind_of(module: nn.Module) -> str:
    """Return linear, embedding, bag, attention or module; a layer that computes something else is a module."""
    if is_linear(module):
        return "linear"
    kinds = {"attention": nn.MultiheadAttention, "bag": nn.EmbeddingBag, "embedding": nn.Embedding}
    kind = next((kind for kind, layer in kinds.items() if computes_as(module, layer)), "module")
    # Each of its rows is scaled, or normed, by itself, and its own forward computes on this rank's rows.
    by_rows = isinstance(module, nn.Embedding) and BY_ROWS.search(type(module).__name__) and is_known(module)
    return "embedding" if by_rows and "weight" in module._parameters else kind


def base_of(module: Any) -> Any:
    """Return the layer under adapters that are split with it."""
    return module.base_layer if is_adapted(module) else module


def hold_nothing(member: Member, rank: int, ranks: int, heads: Heads | None) -> dict[str, Held]:
    """Return no parts: all ranks have the parameters, and their gradients."""
    return {}


def hold_shares(member: Member, rank: int, ranks: int, heads: Heads | None) -> dict[str, Held]:
    """Return whole parameters, of whose gradients each rank has a share."""
    named = member.module.named_parameters()
    shapes = {name: tuple(p.shape) for name, p in named if member.parameter in (None, name)}
    return {name: Held(shape, None, rank, ranks, True) for name, shape in shapes.items()}


def hold_cut(member: Member, rank: int, ranks: int, heads: Heads | None) -> dict[str, Held]:
    """Return this rank's part of each parameter along the dim that the style cuts."""
    style, module = member.style, member.module
    if member.kind in ("embedding", "bag"):
        _require_plain_rows(module, style)
    parts = {}
    for name, parameter in module.named_parameters(recurse=False):
        if member.parameter not in (None, name):
            continue
        dim = _dim(style, tuple(parameter.shape), member)
        if dim is None:
            continue
        split = _split(member, dim, parameter.shape[dim], ranks, heads)
        parts[name] = Held(tuple(parameter.shape), split, rank, ranks)
    return parts


def _require_plain_rows(module: Any, style: Style) -> None:
    """Refuse tables whose values or gradients depend on more than the entries that a rank has of them."""
    if module.max_norm is not None:
        raise ValueError("with max_norm, looking rows up changes them, by the norm of all of a row; give it replicate")
    if style.cut == "rows" and module.scale_grad_by_freq:
        raise ValueError(
            "with scale_grad_by_freq, gradients depend on how often each id occurs, which ranks do not see of others' "
            "rows; give it the style embedding_colwise or replicate"
        )


def hold_heads(member: Member, rank: int, ranks: int, heads: Heads | None) -> dict[str, Held]:
    """Return this rank's parts of the parameters of ``nn.MultiheadAttention``."""
    module: Any = member.module
    width = module.embed_dim
    parts = {}
    for name, parameter in module.named_parameters():
        if name == "out_proj.bias":  # added after the sum over the ranks
            continue
        dim = {"out_proj.weight": 1, "bias_k": 2, "bias_v": 2}.get(name, 0)
        sections = [width] * (parameter.shape[dim] // width)
        _require_parts(sections, module.head_dim, ranks)
        parts[name] = Held(tuple(parameter.shape), Split.even(dim, sections, ranks, module.head_dim), rank, ranks)
    return parts


def _dim(style: Style, shape: Sequence[int], member: Member) -> int | None:
    """Return the dim of a parameter that the style cuts; None if it stays whole."""
    if member.kind in ("embedding", "bag"):
        return 0 if style.cut == "rows" else 1
    if len(shape) == 1:
        return 0 if style.cut == "outputs" else None  # a bias of a layer that is cut by inputs is added after the sum
    if is_transposed(member.module):
        return 1 if style.cut == "outputs" else 0
    return len(shape) - 2 if style.cut == "outputs" else len(shape) - 1


def _split(member: Member, dim: int, size: int, ranks: int, heads: Heads | None) -> Split:
    style, rule = member.style, member.rule
    sections = list(rule.sections) or [size // style.sections] * style.sections
    if sum(sections) != size:
        raise ValueError(f"the sections {sections} make {sum(sections)} entries, and there are {size}")
    # Any size will do, as the last rank's part is padded.
    if style.padded and not rule.sections and not rule.block and size % ranks:
        return Split.padded(dim, size, ranks)
    block = rule.block or (1 if style.padded or heads is None else _block(sections, heads, member.name))
    if style.cut == "inputs" or style.follows:
        _require_parts(sections, block, ranks)
    return Split.even(dim, sections, ranks, block)


def _require_parts(sections: Sequence[int], block: int, ranks: int) -> None:
    """Raise ValueError unless ``ranks`` divide the blocks of each section."""
    if any(section // block % ranks for section in sections):
        count = sections[0] // block
        near = sorted({n for n in range(1, count + 1) if count % n == 0}, key=lambda n: (abs(n - ranks), n))[:2]
        what = f"{count} heads of width {block}" if block > 1 else f"a width of {sections[0]}"
        raise ValueError(
            f"{what} cannot be split over {ranks} ranks: {count} / {ranks} = {count / ranks:.4g}; tensor sizes near it "
            f"that work are {' and '.join(map(str, sorted(near)))}"
        )


def _block(sections: Sequence[int], heads: Heads, name: str) -> int:
    """Return the entries of a head; of a fused weight with interleaved heads, those of a group of heads."""
    queries, keys = heads.queries * heads.width, heads.keys * heads.width
    if list(sections) == [queries + 2 * keys] and not OF_QUERIES.match(name.rpartition(".")[2]):
        return sections[0] // heads.keys
    if all(section in (queries, keys) for section in sections):
        return heads.width
    # Heads of another width: of keys or values, or of queries with gates.
    count = heads.keys if OF_KEYS.match(name.rpartition(".")[2]) else heads.queries
    if len(sections) == 1 and sections[0] % count == 0:
        return sections[0] // count
    if all(section % heads.width == 0 for section in sections):
        return heads.width
    return prod(sections[:1]) // heads.queries if all(section % heads.queries == 0 for section in sections) else 1


Hold = Callable[["Member", int, int, "Heads | None"], dict[str, Held]]
"""From a member, rank, ranks and heads around: this rank's parts of the parameters, by name in the module."""

Step = Callable[["Member", Any], None]
"""Change of a split module, given a ``Splitting``; it returns at once for a kind of module that needs none."""


@dataclass(frozen=True)
class Style:
    """Treatment of a module's parameters, and of activations that enter and leave it."""

    hold: Hold = hold_nothing
    # What is done before, in and after the module's forward.
    steps: tuple[Step, ...] = ()
    # Dim of the weight that is cut: ``outputs`` or ``inputs`` of a product, ``rows`` or ``width`` of an embedding;
    # None: none.
    cut: str | None = None
    sections: int = 1  # parts of that dim that are each cut on their own, as gate and up of a fused weight
    padded: bool = False  # true if any size will do, the last rank having less
    plain: bool = False  # true if the activation between two such layers is a part that nothing tells of
    follows: bool = False  # true if that part is followed (``parallel/follow/split_activation.py``)
    gathers: bool = False  # true if the layer itself gathers its outputs, or takes its part of the inputs
    defers: bool = False  # true if a loss computes the outputs, without gathering them
    whole_sequence: bool = False  # true if it is given, or gives, no part of a spread sequence
    kinds: tuple[str, ...] = ("linear",)  # kinds of modules that it fits


@dataclass(frozen=True)
class Member:
    """A module, or a parameter of its own, that a rule splits."""

    name: str  # in the model
    module: nn.Module  # itself, or the one that has the parameter
    parameter: str | None  # its name in the module; None where the rule is for the module
    rule: PlanRule
    kind: str  # linear, embedding, bag, attention, parameter or module
    container: str  # name of the module whose columns read the same activation
    style: Style  # the row of the rule's style


@dataclass
class SplitPlan:
    """Plan of a model, resolved for this rank."""

    members: list[Member] = field(default_factory=list)  # what is split, in the order of the model
    # By name of the parameter, what this rank holds of those that are split or used in different ways.
    held: dict[str, Held] = field(default_factory=dict)
    of_parameter: dict[int, Held] = field(default_factory=dict)  # the same by the parameter's ``id``
    heads: dict[str, Heads] = field(default_factory=dict)  # by name, the modules whose heads are split, and their heads

    def held_of(self, module: nn.Module, name: str) -> Held:
        """Return this rank's part of a module's parameter."""
        parameter = module.get_parameter(name)
        return self.of_parameter[id(parameter)]


def why_hooked(name: str, style: str) -> str:
    """Return why a layer between plain parts cannot have a user's hooks, and what to do."""
    return (
        f"{name} ({style}) has hooks, which would be given this rank's part of an activation; give it the style "
        "colwise_gather_output or rowwise_split_input, and the layer that follows or comes before the other one of "
        "these, or register the hooks on the module around"
    )
