"""The plan that a model of transformers brings, as far as its modules compute what that plan expects."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zeromesh.base.linear_arithmetic import is_transposed
from zeromesh.base.substitution import KNOWN, is_as_written
from zeromesh.parallel.tensor.split_plan import Plan, PlanRule, base_of, kind_of, pattern_of
from zeromesh.parallel.tensor.styles import STYLES
from zeromesh.parallel.tensor.tensor_plan import parse

GATHERING = ("colwise_gather_output", "rowwise_split_input")
SHARED = PlanRule("replicated_with_grad_allreduce")


def published(model: nn.Module) -> dict[str, PlanRule]:
    """Return the entries of the plan of a model of transformers, by module name."""
    rules = parse(getattr(model, "_tp_plan", None) or {})
    entries: dict[str, PlanRule] = {}
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        rule = rules.get(pattern_of(name)) or rules.get(name)
        if rule is None:
            continue
        # Some plans say of the fused weights of experts that they are cut as one, which their forward then misreads.
        if name.endswith("gate_up_proj") and rule == PlanRule("colwise"):
            experts = model.get_submodule(name.rpartition(".")[0])
            parts = experts.get_parameter("gate_up_proj").ndim == 3 and getattr(experts, "is_concatenated", True)
            rule = PlanRule("packed_colwise") if parts else rule
        entries[name] = rule
    # A plan in a model's own code knows its classes; one of transformers knows those of transformers.
    author = type(getattr(model, "config", None)).__module__
    return _as_far_as_known(entries, dict(model.named_modules())) if author.startswith(KNOWN) else entries


def _as_far_as_known(plan: Plan, modules: Mapping[str, nn.Module]) -> dict[str, PlanRule]:
    """Return the plan without parts of activations in modules that users have changed, or whose layers they watch."""
    rules = {name: rule for name, rule in plan.items() if _fits(rule, modules.get(name))}
    containers: dict[str, set[bool]] = {}  # with rules between which activations are parts: has it columns, or rows
    for name, rule in plan.items():
        if STYLES[rule.style].plain:
            containers.setdefault(name.rpartition(".")[0], set()).add("rowwise" in rule.style)
    for name, sides in containers.items():
        around = name if len(sides) == 2 else name.rpartition(".")[0]
        if not is_as_written(modules[around]):
            inside = {path: rule for path, rule in rules.items() if f"{path}.".startswith(f"{around}.")}
            rules = {path: rule for path, rule in rules.items() if path not in inside} | gathered(inside, modules)
    return rules


def _fits(rule: PlanRule, module: nn.Module | None) -> bool:
    return module is None or kind_of(base_of(module)) in STYLES[rule.style].kinds


def gathered(rules: Plan, modules: Mapping[str, nn.Module]) -> dict[str, PlanRule]:
    """Return rules that split each linear layer by itself, in place of rules between which activations are parts."""
    linear = [name for name in rules if name in modules and kind_of(base_of(modules[name])) == "linear"]
    return {name: PlanRule(GATHERING["rowwise" in rules[name].style]) for name in linear}


def completed(name: str, module: nn.Module, plan: Plan, region: Plan) -> dict[str, PlanRule]:
    """Return a published plan with rules for the parts of one attention or MLP that it leaves out."""
    rules = {child: plan[f"{name}.{child}"] for child, _ in module.named_children() if f"{name}.{child}" in plan}
    widths, rows = set(), 0
    for child, layer in module.named_children():
        if kind_of(base_of(layer)) == "linear" and child in rules and STYLES[rules[child].style].plain:
            by_rows = rules[child].style == "rowwise"
            rows += by_rows
            widths.add(inputs_of(layer) if by_rows else outputs_of(layer))
    left = {child: m for child, m in module.named_children() if child not in rules}
    odd = rows > 1 or any(f"{name}.{key}" not in plan for key, _ in module.named_parameters(recurse=False))
    if not odd and not any(widths & {*p.shape} for m in left.values() for p in m.parameters()):
        return {**plan, **{f"{name}.{child}": SHARED for child, m in left.items() if is_activation(m)}}
    # There are parameters that may be used on all of the split dim, so each layer is split by itself.
    others = {path: rule for path, rule in plan.items() if path.rpartition(".")[0] != name}
    children = {f"{name}.{child}": layer for child, layer in module.named_children()}
    return others | gathered({path: rule for path, rule in region.items() if path in children}, children)


def is_activation(module: nn.Module) -> bool:
    """Return whether its parameters are used on each entry alike."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    return bool(sizes) and set(sizes) == {1} and "activation" in type(module).__module__


def inputs_of(layer: nn.Module) -> int:
    """Return the width that a linear layer reads."""
    base = base_of(layer)
    return int(base.weight.shape[0 if is_transposed(base) else 1])


def outputs_of(layer: nn.Module) -> int:
    """Return the width that a linear layer gives."""
    base = base_of(layer)
    return int(base.weight.shape[1 if is_transposed(base) else 0])
