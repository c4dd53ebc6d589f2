"""Dims in which tensor ranks cut the parameters of a model."""

from __future__ import annotations

from torch import nn

from zeromesh.apps.plan.cost.live import ParameterCut
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.split_plan import SplitPlan
from zeromesh.parallel.tensor.tensor_plan import resolve


def cuts_of(model: nn.Module) -> dict[str, ParameterCut]:
    """Return the dims in which parameters are cut over tensor ranks, by name; none where the model cannot be split."""
    try:
        resolved: SplitPlan = resolve(model, {}, derive(model, 2)[0], 0, 1)  # what two ranks would split
    except ValueError:
        return {}
    cuts: dict[str, ParameterCut] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for member in resolved.members:
        style = member.style
        named = member.module.named_parameters() if member.parameter is None else ()
        single = [(member.parameter, member.module.get_parameter(member.parameter))] if member.parameter else []
        for _, parameter in (*named, *single):
            part = resolved.of_parameter.get(id(parameter))
            if part is None or part.split is None:
                continue
            if style.cut in ("rows", "inputs"):
                cut = ParameterCut(outputs=False, gathered=style.gathers, rows=style.cut == "rows")
            elif style.cut is None:  # torch's attention: of its output layer the inputs
                cut = ParameterCut(outputs=part.split.dim == 0)
            else:
                cut = ParameterCut(outputs=True, gathered=style.gathers)
            cuts.setdefault(names[id(parameter)], cut)
    return cuts
