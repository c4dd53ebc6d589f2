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
    settings = plan.settings
    watched = settings.tensorboard.enabled or settings.csv_monitor.enabled or settings.wandb.enabled
    reports = settings.experts.report_load is None and (watched or settings.times_whole_run)
    return reports or bool(_asked(settings))


def _asked(settings: Resolved) -> list[str]:
    """Return the keys by which the configuration asks for experts."""
    chosen = settings.experts
    keys = {
        "bias_update_rate": chosen.bias_update_rate is not None,
        "z_loss": chosen.z_loss > 0,
        "auxiliary_loss": chosen.auxiliary_loss == "global",
        "report_load": chosen.report_load,
    }
    return [key for key, is_set in keys.items() if is_set]


def balance_of(plan: Plan, factor: Callable[[], float], write: Callable[[Tensor, Tensor], None]) -> Balance | None:
    """Return the balance of a model's experts, whose modules are changed in place; None for a model without experts.

    Raises:
        ValueError: the configuration asks for what the model does not have.
    """
    from zeromesh.parallel.expert.balance import Balance
    from zeromesh.parallel.expert.forms import find_experts
    from zeromesh.parallel.expert.router import find_routers

    model, chosen, asked = plan.model, plan.settings.experts, _asked(plan.settings)
    try:
        experts = find_experts(model, chosen.targets, 1)
    except ValueError:
        if asked:
            raise
        return None
    if not experts:
        if not asked:
            return None
        text = f"experts.{asked[0]} is set, but no module of {type(model).__name__} has experts; leave it out"
        raise ValueError(text)
    routers = find_routers(model, experts)
    if chosen.bias_update_rate is not None:
        _check_biases(plan, routers)
    if chosen.z_loss and (names := [router.experts.name for router in routers if router.module is None]):
        raise ValueError(
            f"experts.z_loss: no router beside {names[0]} has a row for each expert, whose logits it is of; set it to 0"
        )
    balance = Balance(routers, plan.mesh, chosen.bias_update_rate, chosen.z_loss, factor, write)
    if chosen.auxiliary_loss == "global":
        balance.use_global_loss(model)
    balance.listener.attach(model)
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
