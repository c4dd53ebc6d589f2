"""DeepSpeed's estimators of the memory of model states, by their names and arguments, with this engine's arithmetic.

Activations, temporaries and libraries are left out; ``zeromesh plan`` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.base.placement import ROWS, PlacementRow, Tier
from zeromesh.base.words import counted
from zeromesh.shard.sizes import UnitElements, state_sizes

if TYPE_CHECKING:
    from torch import nn

GIB = 2.0**30


def _states(row: PlacementRow, total: float, largest: float, ranks: int) -> tuple[float, float]:
    """Return bytes of one rank on its device and on the host, for units as large as the largest."""
    count = max(1, round(total / largest)) if largest else 1
    units = [UnitElements(0.0, 1), UnitElements(total / count, count)]
    layout = ParallelLayout(data=ranks, row=row)
    states = state_sizes(units, layout, layout.sharing())
    device = sum(size for (_, tier), size in states.resting.items() if tier == Tier.DEVICE.value)
    host = sum(size for (_, tier), size in states.resting.items() if tier == Tier.HOST.value)
    return device + states.gathered, host


def _row(number: int, optimizer: bool, parameters: bool = False) -> PlacementRow:
    row = ROWS[number]
    if optimizer:
        row = replace(row, gradient_tier=Tier.HOST, optimizer_tier=Tier.HOST)
    return replace(row, parameter_tier=Tier.HOST) if parameters else row


def _require(total: int, gpus: int, nodes: int, factor: float) -> None:
    for name, value in (("total_params", total), ("num_gpus_per_node", gpus), ("num_nodes", nodes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if factor < 1:
        raise ValueError(f"additional_buffer_factor is {factor}; it multiplies host memory, so it must be at least 1")


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes that ZeRO-2 needs for states in bf16 with Adam: of a node's host memory, and of each device.

    For arguments and errors see ``estimate_zero3_model_states_mem_needs``.
    """
    _require(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    device, host = _states(_row(2, cpu_offload), total_params, 0, num_gpus_per_node * num_nodes)
    # Before it is placed, the model is in host memory once for each device, in fp32.
    initial = 4.0 * total_params * num_gpus_per_node
    return round(max(initial, host * num_gpus_per_node) * additional_buffer_factor), round(device)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes that ZeRO-3 needs for states: of a node's host memory, of each device, and of the largest layer.

    Args:
        total_params: number of parameters.
        largest_layer_params: those of the largest unit; two are gathered on a device at a time.
        num_gpus_per_node: devices of a node.
        num_nodes: number of nodes.
        cpu_offload: gradients and optimizer states rest on the host.
        cpu_offload_params: with it, parameters, too.
        zero_init: the model is built under ``zeromesh.zero.Init``, and never whole on a host.
        additional_buffer_factor: multiplies host memory, for buffers of other programs.

    Raises:
        ValueError: a number below 1, or a layer larger than the model.
    """
    _require(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    if not 1 <= largest_layer_params <= total_params:
        raise ValueError(f"largest_layer_params is {largest_layer_params}; it must be from 1 to {total_params}")
    row = _row(3, cpu_offload, cpu_offload and cpu_offload_params)
    device, host = _states(row, total_params, largest_layer_params, num_gpus_per_node * num_nodes)
    initial = 4.0 * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
    return (
        round(max(initial, host * num_gpus_per_node) * additional_buffer_factor),
        round(device),
        2 * largest_layer_params,
    )


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Return the parameters of a model, and those of its module with most of its own."""
    sizes = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum({id(p): p.numel() for p in model.parameters()}.values()), max(sizes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of ZeRO-2 for all options; see ``estimate_zero2_model_states_mem_needs``."""
    sizes = (num_gpus_per_node, num_nodes)
    _show_heading(f"{total_params / 1e6:.0f} M parameters", *sizes)
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(total_params, *sizes, offload, additional_buffer_factor)
        _show(*needs, {"offload_optimizer.device": offload})


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of ZeRO-2 for a model."""
    total = _sizes(model)[0]
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of ZeRO-3 for all options; see ``estimate_zero3_model_states_mem_needs``."""
    sizes = (num_gpus_per_node, num_nodes)
    largest = f"{largest_layer_params / 1e6:.0f} M in the largest layer"
    _show_heading(f"{total_params / 1e6:.0f} M parameters, {largest}", *sizes)
    for parameters, optimizer in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, *sizes, optimizer, parameters, zero_init, additional_buffer_factor
            )
            _show(
                cpu,
                gpu,
                {"offload_param.device": parameters, "offload_optimizer.device": optimizer},
                f", zero_init={zero_init:d}",
            )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of ZeRO-3 for a model."""
    total, largest = _sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _show_heading(model: str, gpus: int, nodes: int) -> None:
    print(
        f"Memory of parameters, gradients and optimizer states: {model}, {counted(nodes, 'node')} with "
        f"{counted(gpus, 'device')} each"
    )
    print("  host of a node |   each device | options")


def _show(cpu: int, gpu: int, on_host: Mapping[str, bool], more: str = "") -> None:
    options = ", ".join(f"{name}={'cpu' if on else 'none'}" for name, on in on_host.items()) + more
    print(f"{cpu / GIB:12.2f} GiB | {gpu / GIB:9.2f} GiB | {options}")
