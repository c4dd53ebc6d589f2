"""Balance of experts, as the configuration wants it: checks, and what is put into a model for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from zeromesh.base.dtypes import SIXTEEN_BIT, dtypes

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved
    from zeromesh.engine.initialize.run_plan import Plan
    from zeromesh.parallel.expert.balance import Balance
    from zeromesh.parallel.expert.router import Router


def counts_experts(plan: Plan) -> bool:
    """Return whether somebody wants to know the load of experts, or to change it."""
    return _is_asked(plan.settings) or _reports(plan.settings)


def _is_asked(settings: Resolved) -> bool:
    chosen = settings.experts
    changes = chosen.bias_update_rate is not None or chosen.z_loss > 0 or chosen.auxiliary_loss == "global"
    return changes or bool(chosen.report_load)


def _reports(settings: Resolved) -> bool:
    watched = settings.tensorboard.enabled or settings.csv_monitor.enabled or settings.wandb.enabled
    return settings.experts.report_load is None and (watched or settings.times_whole_run)


def balance_of(plan: Plan, factor: Callable[[], float], write: Callable[[Tensor, Tensor], None]) -> Balance | None:
    """Return the balance of a model's experts, whose modules are changed in place; None for a model without experts.

    Raises:
        ValueError: the configuration asks for what the model does not have.
    """
    from zeromesh.parallel.expert.balance import Balance
    from zeromesh.parallel.expert.forms import find_experts
    from zeromesh.parallel.expert.router import find_routers

    model, settings, mesh, chosen = plan.model, plan.settings, plan.mesh, plan.settings.experts
    try:
        experts = find_experts(model, chosen.targets, 1)
    except ValueError:
        if _is_asked(settings):
            raise
        return None
    if not experts:
        if _is_asked(settings):
            key = "bias_update_rate" if chosen.bias_update_rate is not None else "z_loss" if chosen.z_loss else ""
            key = key or ("auxiliary_loss" if chosen.auxiliary_loss == "global" else "report_load")
            raise ValueError(f"experts.{key} is set, but no module of {type(model).__name__} has experts; leave it out")
        return None
    routers = find_routers(model, experts)
    if chosen.bias_update_rate is not None:
        _check_biases(plan, routers)
    if chosen.z_loss and (names := [router.name for router in routers if router.module is None]):
        raise ValueError(
            f"experts.z_loss: the module around {names[0]} has no router with a row for each expert, whose logits the "
            "loss is of; set it to 0"
        )
    balance = Balance(routers, mesh, chosen.bias_update_rate, chosen.z_loss, factor, write)
    if chosen.auxiliary_loss == "global":
        if mesh.sizes["pipeline"] > 1:
            raise ValueError(
                'experts.auxiliary_loss is "global", and mesh.pipeline above 1: a stage has the logits of its own '
                "layers only; balance with experts.bias_update_rate, or set mesh.pipeline to 1"
            )
        balance.use_global_loss(model)
    model.register_forward_pre_hook(balance.listener.begin, with_kwargs=True)
    return balance


def _check_biases(plan: Plan, routers: list[Router]) -> None:
    """Raise ValueError unless there is a selection bias that can take small steps."""
    biases = [router.bias for router in routers if router.bias is not None]
    if not biases:
        raise ValueError(
            "experts.bias_update_rate is set, but no router has a selection bias (a buffer or parameter "
            "e_score_correction_bias or expert_bias with one element for each expert); leave it out, and balance with "
            "the model's auxiliary loss"
        )
    chosen = dtypes(plan.model, plan.settings.precision)
    for bias in biases:
        if (dtype := chosen[id(bias.tensor)]) in SIXTEEN_BIT:
            raise ValueError(
                f"experts.bias_update_rate: {bias.name} would have {dtype}, which is too coarse for steps of "
                f"{plan.settings.experts.bias_update_rate}; add {bias.attribute!r} to data_types.keep_in_fp32_modules"
            )
