"""Comparison of what the planner foresees of a run with what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zeromesh.base.placement import Tier
from zeromesh.comm.agreement import catch
from zeromesh.comm.mesh import Mesh
from zeromesh.engine.reports import STATES

if TYPE_CHECKING:
    from zeromesh.apps.plan.cost.cost import CostSource
    from zeromesh.config.settings import Resolved


def prediction(
    example: tuple[Any, Mapping[str, Any], Any],
    report: Mapping[str, Any],
    seconds: float | None,
    mesh: Mesh,
    settings: Resolved,
) -> dict[str, Any]:
    """Return what the planner foresees beside a report of ``memory`` and the seconds of a step, None if not known.

    See ``Engine.prediction_report``; ``example`` is the model, arguments of its forward, and the loss of its output.
    """
    # Imported here: only runs that ask for a prediction pay for the planner.
    from zeromesh.apps.plan.choose.answer import layout_text
    from zeromesh.apps.plan.choose.layout_documents import layout_from
    from zeromesh.apps.plan.machine.here import cost_here, machine_here
    from zeromesh.apps.plan.predict.rank_memory import memory_of
    from zeromesh.apps.plan.predict.time import time_of
    from zeromesh.apps.plan.saved import planned_cost

    result: dict[str, Any] = {"machine": None, "layout": None}
    notes: list[str] = []
    peak = host = step = None
    one_memory = mesh.device.type == "cpu"

    def foresee() -> None:
        nonlocal peak, host, step
        layout, _ = layout_from(settings, mesh.world_size)
        nodes = len({*mesh.node_of})
        machine = machine_here(mesh.world_size // nodes, nodes)
        traced, sequence = cost_here(*example, settings)
        source: CostSource = traced
        if settings.activation_checkpointing.planned:
            source = planned_cost(settings, source, sequence, layout, machine)
        rank = memory_of(source, sequence, layout, machine, sums=mesh.shard.sums)[mesh.group("pipeline").rank]
        result.update(machine=machine.name, layout=layout_text(layout))
        cost = source.at(layout.micro_batch, sequence, layout.context)
        notes.extend([] if cost.exact else [f"the model could not be traced, so that this is rough: {cost.note}"])
        host = rank.on(Tier.HOST.value)
        # The context and the libraries, which the device has beside, are not measured either.
        peak = rank.peak.total + (host if one_memory else 0.0)
        step = time_of(source, sequence, layout, machine).seconds

    _, failure = catch(foresee)
    if failure is not None:
        missing = "nothing" if peak is None else "no time of a step"
        text = (str(failure) or type(failure).__name__).splitlines()[0]
        notes.append(f"{missing} could be predicted: {text}")
    host_bytes = sum(sizes.get(Tier.HOST.value, 0) for state, sizes in report.items() if state in STATES)
    device_peak = report["measured"]["own"]
    if device_peak is None:
        notes.append("the peak of memory is not measured: more was in use before the model was placed")
    elif one_memory:
        notes.append("the processor's memory is the host's; what is measured has the libraries' own in it")
    if seconds is None:
        notes.append("the time of a step is measured from the second update on")
    return result | {
        "device": _beside(peak, device_peak),
        "host": None if one_memory else _beside(host, host_bytes),
        "step": _beside(step, seconds),
        "notes": notes,
    }


def _beside(predicted: float | None, measured: float | None) -> dict[str, float | None]:
    difference = predicted / measured - 1 if measured and predicted is not None else None
    return {"predicted": predicted, "measured": measured, "difference": difference}
