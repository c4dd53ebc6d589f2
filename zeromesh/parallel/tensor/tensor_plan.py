"""Plans: which modules are split, and how; and what each rank holds then."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from torch import nn

from zeromesh.base.linear_arithmetic import is_transposed
from zeromesh.base.split import Held, Split
from zeromesh.base.substitution import (
    computes_as,
    has_hooks,
    is_adapted,
    is_known,
    is_linear,
    linear_class,
    own_computation,
)
from zeromesh.parallel.tensor.heads import Heads, heads_of
from zeromesh.parallel.tensor.styles import OTHER_NAMES, STYLES, Style

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
MOST_SHOWN = 20  # problems in one error


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


def parse(rules: Mapping[str, Any]) -> dict[str, PlanRule]:
    """Return the plan that a JSON object describes. Raise ValueError for an unknown style, or values that are none."""
    plan = {}
    for pattern, value in rules.items():
        fields: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"style": value}
        named = str(fields.pop("style", None))
        name, sections, block = OTHER_NAMES.get(named, named), fields.pop("sections", ()), fields.pop("block", 0)
        if name not in STYLES:
            raise ValueError(
                f"the tensor-parallel plan gives {pattern!r} the style {named!r}; styles are {', '.join(STYLES)}"
            )
        if fields or not isinstance(sections, list | tuple) or not all(_is_count(n) for n in (*sections, block + 1)):
            raise ValueError(
                f"the tensor-parallel plan gives {pattern!r} {json.dumps(value)}; beside style it may have sections, a "
                "list of lengths, and block, the number of entries that stay together"
            )
        plan[pattern] = PlanRule(name, tuple(sections), block)
    return plan


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def as_json(plan: Plan) -> str:
    """Return a plan as JSON, to be edited and set in the configuration."""
    return json.dumps({pattern: rule.plain() for pattern, rule in plan.items()}, indent=2)


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


@dataclass(frozen=True)
class Member:
    """A module, or a parameter of its own, that a rule splits."""

    name: str  # in the model
    module: nn.Module  # itself, or the one that has the parameter
    parameter: str | None  # its name in the module; None where the rule is for the module
    rule: PlanRule
    kind: str  # linear, embedding, bag, attention, parameter or module
    container: str  # name of the module whose columns read the same activation

    @property
    def style(self) -> Style:
        """Its row of the table."""
        return STYLES[self.rule.style]


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


def describe_plan(resolved: SplitPlan) -> str:
    """Return a line for each member."""
    return "\n".join(f"{member.name}: {member.rule}" for member in resolved.members)


def kind_of(module: nn.Module) -> str:
    """Return linear, embedding, bag, attention or module; a layer that computes something else is a module."""
    if is_linear(module):
        return "linear"
    kinds = {"attention": nn.MultiheadAttention, "bag": nn.EmbeddingBag, "embedding": nn.Embedding}
    kind = next((kind for kind, layer in kinds.items() if computes_as(module, layer)), "module")
    # Each of its rows is scaled, or normed, by itself, and its own forward computes on this rank's rows.
    by_rows = isinstance(module, nn.Embedding) and _BY_ROWS.search(type(module).__name__) and is_known(module)
    return "embedding" if by_rows and "weight" in module._parameters else kind


_BY_ROWS = re.compile("(ScaledWord|Normed)Embedding$")


def base_of(module: Any) -> Any:
    """Return the layer under adapters that are split with it."""
    return module.base_layer if is_adapted(module) else module


def resolve(
    model: nn.Module, user_rules: Plan, derived_rules: Plan, rank: int, ranks: int, without: Collection[str] = ()
) -> SplitPlan:
    """Find what each rule is for, and cut every parameter once; ``user_rules`` go before ``derived_rules``.

    The latter are not for the modules ``without``.

    Raise ValueError with everything that is wrong.
    """
    # All problems are gathered, so that a user can mend them in one go.
    problems: list[str] = []
    rules: dict[str, tuple[str, PlanRule]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern, rule in user_rules.items():
        names = [name for name in (*modules, *named) if matches(name, pattern)]
        if not names:
            problems.append(f"{pattern!r} matches no module or parameter{_near(pattern, modules)}")
        for name in names:
            other, before = rules.setdefault(name, (pattern, rule))
            if other != pattern and before != rule:
                problems.append(
                    f"{name} is matched by {other!r} ({before.style}) and by {pattern!r} ({rule.style}); make the "
                    "patterns narrower, so that only one is for it"
                )
    for pattern, rule in derived_rules.items():
        for name in (*modules, *named):
            if name not in without and matches(name, pattern):
                rules.setdefault(name, (pattern, rule))
    resolved = SplitPlan()
    cut: dict[int, tuple[str, Held]] = {}
    config = getattr(model, "config", None)
    order = {name: number for number, name in enumerate((*modules, *named))}
    for name in sorted(rules, key=order.__getitem__):  # in an order that is the same on all ranks, as tags follow it
        for member in _members(name, rules[name][1], modules):
            if member.kind not in member.style.kinds:
                problems.append(_why_unfit(member))
                continue
            if member.rule.style in PLAIN_PARTS and has_hooks(member.module):
                problems.append(why_hooked(name, member.rule.style))
                continue
            if member.kind == "linear" and member.style.cut and kind_of(modules[member.container]) == "attention":
                problems.append(
                    f"{name} is not called by {member.container}, which reads its weight; give {member.container} the "
                    "style heads"
                )
                continue
            try:
                heads = heads_of(modules[member.container], config) if member.container else None
                parts = _held(member, rank, ranks, heads)
            except ValueError as error:
                problems.append(f"{member.name} ({member.rule.style}): {error}")
                continue
            resolved.members.append(member)
            if heads is not None and member.style.cut == "outputs" and member.style.after is None:
                resolved.heads[member.container] = heads
            for key, part in parts.items():
                path = f"{member.name}.{key}" if member.parameter is None else member.name
                # Tied parameters are cut once, by their identity: an embedding and a head share the rows.
                first, earlier = cut.setdefault(id(named[path]), (path, part))
                if earlier != part:
                    problems.append(
                        f"{first} and {path} are one parameter, but would be cut in two ways: {_way(earlier)}, and "
                        f"{_way(part)}; give both modules rules that cut the same dim, or untie them"
                    )
    problems += _used_whole(resolved, modules, cut)
    problems += _counted_often(resolved, [name for name, (pattern, _) in rules.items() if pattern in user_rules])
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}
    resolved.of_parameter.update({key: part for key, (_, part) in cut.items()})
    resolved.held.update({names_of[key]: part for key, (_, part) in cut.items()})
    if problems:
        unique = list(dict.fromkeys(problems))
        more = f"\n  and {len(unique) - MOST_SHOWN} more" if len(unique) > MOST_SHOWN else ""
        listed = "".join(f"\n  {problem}" for problem in unique[:MOST_SHOWN])
        raise ValueError(f"the model cannot be split over {ranks} tensor-parallel ranks:{listed}{more}")
    return resolved


PLAIN_PARTS = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")  # between which activations are plain parts


def why_hooked(name: str, style: str) -> str:
    """Return why a layer between plain parts cannot have a user's hooks, and what to do."""
    return (
        f"{name} ({style}) has hooks, which would be given this rank's part of an activation; give it the style "
        "colwise_gather_output or rowwise_split_input, and the layer that follows or comes before the other one of "
        "these, or register the hooks on the module around"
    )


def _why_unfit(member: Member) -> str:
    """Return an error: the style is for layers of another kind, or for those that compute what torch's class does."""
    name, module, style = member.name, member.module, member.rule.style
    others = (nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention)
    base = linear_class(module) or next((base for base in others if isinstance(module, base)), None)
    if base is not None and (reason := own_computation(module, base)):
        return (
            f"{name} ({style}) is to compute what torch's {base.__name__} does, but {reason}; give it the style "
            "replicate, with which it runs its own code on whole weights, and the layers beside it "
            "colwise_gather_output or rowwise_split_input"
        )
    return (
        f"{name} is a {type(module).__name__}, which the style {style} does not fit; it is for "
        f"{' and '.join(_KINDS[kind] for kind in member.style.kinds)}"
    )


def _used_whole(
    resolved: SplitPlan, modules: Mapping[str, nn.Module], cut: Mapping[int, tuple[str, Held]]
) -> Iterator[str]:
    """Yield an error for each parameter that is cut, and that another module reads whole."""
    cutting = {id(inner) for member in resolved.members for inner in member.module.modules()}
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            path, part = cut.get(id(parameter), ("", None))
            reads = parameter is not None and parameter.ndim > 1 and id(module) not in cutting
            if reads and part is not None and part.split is not None:
                yield (
                    f"{path} and {name}.{key} are one parameter, which {name} ({type(module).__name__}) reads whole; "
                    f"give {path.rpartition('.')[0]} the style replicate, or untie them"
                )


def _counted_often(resolved: SplitPlan, names: Sequence[str]) -> Iterator[str]:
    """Yield an error for each rule of a user that sums gradients which all ranks have whole."""
    inside = {m.container for m in resolved.members if m.style.cut and m.style.after in (None, "leave")}
    for member in resolved.members:
        if member.name not in names or member.rule.style != "replicated_with_grad_allreduce":
            continue
        path = member.name
        while path and path not in inside:
            path = path.rpartition(".")[0]
        if path not in inside:
            yield (
                f"{member.name} ({member.rule.style}): no layer beside it is colwise or rowwise, so all ranks have its "
                "whole gradient, and the sum would be too large; leave it out, or give it the style replicate"
            )


_KINDS = {
    "linear": "linear layers", "embedding": "embeddings", "parameter": "single parameters", "module": "other modules",
    "attention": "torch.nn.MultiheadAttention", "bag": "torch.nn.EmbeddingBag",
}  # fmt: skip

# The layers inside of an adapted one (PEFT's LoRA), and which dim of it is cut where they are split; None: any. The
# other factor's inner dim, the rank of the adapter, stays whole.
_ADAPTED = {"base_layer": None, "lora_A": "inputs", "lora_B": "outputs"}


def _members(name: str, rule: PlanRule, modules: Mapping[str, nn.Module]) -> Iterable[Member]:
    container = name.rpartition(".")[0]
    if name not in modules:
        yield Member(name, modules[container], name.rpartition(".")[2], rule, "parameter", container)
        return
    module = modules[name]
    if not is_adapted(module):
        yield Member(name, module, None, rule, kind_of(module), container)
        return
    for path, inner in module.named_modules(prefix=name):
        part = path.removeprefix(f"{name}.").partition(".")[0]
        fits = part in _ADAPTED and _ADAPTED[part] in (None, STYLES[rule.style].cut)
        if fits and kind_of(inner) == "linear":
            yield Member(path, inner, None, rule, "linear", container)


def _held(member: Member, rank: int, ranks: int, heads: Heads | None) -> dict[str, Held]:
    """Return this rank's parts of the member's parameters, by name in the module."""
    style, module = member.style, member.module
    parameters = dict(module.named_parameters(recurse=False))
    if member.parameter is not None:
        parameters = {member.parameter: parameters[member.parameter]}
    if member.kind == "attention" and member.rule.style == "heads":
        return _held_of_attention(module, rank, ranks)
    if style.cut is None:
        pairs = parameters.items() if member.parameter is not None else module.named_parameters()
        shapes = {name: tuple(p.shape) for name, p in pairs} if style.partial else {}
        return {name: Held(shape, None, rank, ranks, True) for name, shape in shapes.items()}
    if member.kind in ("embedding", "bag"):
        _require_plain_rows(module, style)
    parts = {}
    for name, parameter in parameters.items():
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


def _held_of_attention(module: Any, rank: int, ranks: int) -> dict[str, Held]:
    """Return this rank's parts of the parameters of ``nn.MultiheadAttention``."""
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
    if style.cut == "inputs" or style.after == "part":
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
    if list(sections) == [queries + 2 * keys] and not _OF_QUERIES.match(name.rpartition(".")[2]):
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


# Names of layers that make heads of queries, and of keys or of values.
_OF_QUERIES = re.compile(r"^(q|query|to_q|q_b)(_proj|_lin|_linear)?$")
OF_KEYS = re.compile(r"^(k|v|key|value|to_k|to_v)(_proj|_lin|_linear)?$")


def _way(part: Held) -> str:
    if part.split is None:
        return "not at all, with shares of its gradient" if part.partial else "not at all"
    return f"dim {part.split.dim} into {part.split.ranks} parts of {part.split.length}"


def _near(pattern: str, names: Iterable[str]) -> str:
    """Return the end of an error: names that end alike, or the first ones."""
    last = pattern.rpartition(".")[2]
    alike = sorted({pattern_of(name) for name in names if name.rpartition(".")[2] == last})
    if alike:
        return f"; modules called {last} are {', '.join(alike[:3])}"
    kinds = sorted({pattern_of(name) for name in names if name})
    return f"; modules are {', '.join(kinds[:8])}" + (" ..." if len(kinds) > 8 else "")
