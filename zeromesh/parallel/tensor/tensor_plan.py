"""Plans: which modules are split, and how; and what each rank holds then."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zeromesh.base.split import Held
from zeromesh.base.substitution import (
    has_hooks,
    is_adapted,
    linear_class,
    own_computation,
)
from zeromesh.parallel.tensor.heads import heads_of
from zeromesh.parallel.tensor.split_plan import (
    Member,
    Plan,
    PlanRule,
    SplitPlan,
    kind_of,
    matches,
    pattern_of,
    why_hooked,
)
from zeromesh.parallel.tensor.styles import OTHER_NAMES, STYLES

MOST_SHOWN = 20  # problems in one error


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


def describe_plan(resolved: SplitPlan) -> str:
    """Return a line for each member."""
    return "\n".join(f"{member.name}: {member.rule}" for member in resolved.members)


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
            if member.style.plain and has_hooks(member.module):
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
                parts = member.style.hold(member, rank, ranks, heads)
            except ValueError as error:
                problems.append(f"{member.name} ({member.rule.style}): {error}")
                continue
            resolved.members.append(member)
            if heads is not None and member.style.cut == "outputs" and member.style.plain:
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
    inside = {m.container for m in resolved.members if m.style.plain or m.style.cut == "inputs"}
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
    "linear": "linear layers",
    "embedding": "embeddings",
    "parameter": "single parameters",
    "module": "other modules",
    "attention": "torch.nn.MultiheadAttention",
    "bag": "torch.nn.EmbeddingBag",
}

# The layers inside of an adapted one (PEFT's LoRA), and which dim of it is cut where they are split; None: any. The
# other factor's inner dim, the rank of the adapter, stays whole.
_ADAPTED = {"base_layer": None, "lora_A": "inputs", "lora_B": "outputs"}


def _members(name: str, rule: PlanRule, modules: Mapping[str, nn.Module]) -> Iterable[Member]:
    container, style = name.rpartition(".")[0], STYLES[rule.style]
    if name not in modules:
        yield Member(name, modules[container], name.rpartition(".")[2], rule, "parameter", container, style)
        return
    module = modules[name]
    if not is_adapted(module) or hasattr(module, "parameter_name"):  # the adapter of a stacked weight
        yield Member(name, module, None, rule, kind_of(module), container, style)
        return
    for path, inner in module.named_modules(prefix=name):
        part = path.removeprefix(f"{name}.").partition(".")[0]
        fits = part in _ADAPTED and _ADAPTED[part] in (None, style.cut)
        if fits and kind_of(inner) == "linear":
            yield Member(path, inner, None, rule, "linear", container, style)


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
