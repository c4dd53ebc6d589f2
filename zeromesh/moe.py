"""Mixtures of experts: DeepSpeed's layer ``MoE``, and questions about the parameters of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zeromesh.parallel.expert.moe_layer import ExpertLayer, ExpertList, MoE, TopKGate

__all__ = ["ExpertLayer", "ExpertList", "MoE", "TopKGate"]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has ``MoE`` layers, and the experts of the first one, or 0."""
    layer = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return layer is not None, 0 if layer is None else layer.num_experts


def is_moe_param(param: object) -> bool:
    """Return whether a parameter is that of an expert of an ``MoE`` layer."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Return whether a group of parameters is one of those that ``split_params_into...`` makes for experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the parameters that are no expert's, and those of experts."""
    parameters = list(params)
    return [p for p in parameters if not is_moe_param(p)], [p for p in parameters if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Take the parameters of experts out of groups of parameters, into groups of their own behind them.

    The engine updates all groups alike: this is for rates and decays of experts, and for programs that call it.

    Args:
        param_groups: a group or several, as torch's optimizers take them; their ``params`` change.
        max_group_size: elements of a new group, unless a single parameter has more; None for any number.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    of_experts: list[dict[str, Any]] = []
    for group in groups:
        group["params"], members = split_params_into_shared_and_expert_params(group["params"])
        for name in sorted({parameter.group_name for parameter in members}):
            parts: list[list[Any]] = []
            for parameter in (member for member in members if member.group_name == name):
                elements = parameter.numel() + sum(p.numel() for part in parts[-1:] for p in part)
                if not parts or (max_group_size is not None and elements > max_group_size):
                    parts.append([])
                parts[-1].append(parameter)
            of_experts += [{**group, "name": name, "moe": True, "params": part} for part in parts]
    return [*groups, *of_experts]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return groups of parameters, or of a list of them, with those of experts apart, unless some are already."""
    if model_parameters and not isinstance(model_parameters[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
