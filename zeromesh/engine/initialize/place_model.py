"""Placement of a model: values, buffers, sharded states, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import nn

from zeromesh.base import quantized_layers as quantized
from zeromesh.base.dtypes import dtypes
from zeromesh.base.precision import Precision
from zeromesh.base.split import Held
from zeromesh.comm.agreement import catch
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.find_units import find_units
from zeromesh.shard.gradients.accumulation import Accumulation
from zeromesh.shard.optim.scaler import LossScaler
from zeromesh.shard.parameters.deferred import Source
from zeromesh.shard.parameters.materialise import replace
from zeromesh.shard.place_units import ModelPart, Sharding, Slots
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.store.budget import Prepare
from zeromesh.shard.tables.tables import TableSettings

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved
    from zeromesh.engine.pipelined import Pipelined
    from zeromesh.parallel.activation.activation_store import ActivationStore


class Values:
    """Values of parameters from a materialiser. After a failure they are zeros until all ranks have heard of it."""

    def __init__(self, materialise: Callable[[str, nn.Parameter], Source | None]) -> None:
        self.failure: Exception | None = None  # the first one
        self._materialise = materialise

    def __call__(self, name: str, parameter: nn.Parameter) -> Source | None:
        """Give a parameter its value, or return where to read it from; see ``materialiser``."""
        source, failure = catch(lambda: self._materialise(name, parameter))
        if failure is not None:
            # Raising here would leave the other ranks waiting in the collectives of the next unit.
            replace(parameter, self._stand_in(failure, parameter.shape).to(parameter.dtype))
        return None if source is None else Reading(source, self._stand_in)

    def _stand_in(self, failure: Exception | None, size: torch.Size) -> torch.Tensor:
        self.failure = self.failure or failure
        return torch.zeros(size)


@dataclass(frozen=True)
class Reading:
    """Source of a parameter's elements whose failures ``Values`` notes."""

    source: Source
    stand_in: Callable[[Exception | None, torch.Size], torch.Tensor]

    def __str__(self) -> str:
        return str(self.source)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop``, 1-D; zeros if they cannot be read."""
        value, failure = catch(lambda: self.source.read(start, stop))
        return value if value is not None else self.stand_in(failure, torch.Size([stop - start]))


def shard(
    model: nn.Module, mesh: Mesh, settings: Resolved, materialise: Any = None, split: Mapping[str, Held] | None = None,
    cut: Pipelined | None = None, prepare: Prepare | None = None, tables: TableSettings | None = None,
    narrow: Collection[str] = (),
) -> ShardedModel:  # fmt: skip
    """Place the model's states over the mesh as the configuration says; see ``ShardedModel`` for the arguments."""
    scaler = LossScaler(settings.precision.loss_scale) if settings.precision.loss_scale else None
    slots = Slots(settings.slots.parameter, settings.slots.gradient)
    summed = settings.gradient_allreduce_op == "sum"
    sharding = Sharding(
        settings.row, settings.precision, slots, settings.units, settings.gradient_predivide, summed,
        tables or TableSettings(), narrow,
    )  # fmt: skip
    part = ModelPart(split or {}) if cut is None else ModelPart(split or {}, cut.tied, cut.idle)
    accumulation = Accumulation(settings.gradient_accumulation_steps, scaler, settings.managed_gradient_accumulation)
    return ShardedModel(model, mesh, sharding, part, accumulation, materialise, prepare)


def place_buffers(model: nn.Module, device: torch.device, precision: Precision) -> None:
    """Move buffers to the device, and convert them to the dtype that each has in the run."""
    chosen = dtypes(model, precision)
    # By ``id``, so that what is in two places stays one; with the old one, so that it keeps its ``id``.
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in placed:
                placed[id(buffer)] = buffer, buffer.to(device=device, dtype=chosen[id(buffer)])
            module._buffers[name] = placed[id(buffer)][1]


def place_quantized(model: nn.Module, mesh: Mesh) -> None:
    """Let layers of bitsandbytes compute with their placed weights, and with the first rank's scales. Collective."""
    for _, layer in quantized.layers(model):
        quantized.settle(layer, mesh.device)
        for state in quantized.states(layer):
            # The weights are the first rank's: scales that another kernel had computed would not fit them.
            mesh.group("stage").broadcast(state)


def activation_store(settings: Resolved, mesh: Mesh) -> ActivationStore | None:
    """Return the storage of checkpointed inputs until the backward; None where they stay in place."""
    chosen, group = settings.activation_checkpointing, mesh.group("tensor")
    # Where the sequence is split over these ranks, each has a part of the inputs anyway.
    partitions = chosen.partition_activations and group.size > 1 and not settings.tensor_parallel.sequence
    if not (chosen.enabled and (chosen.cpu_checkpointing or partitions)):
        return None
    from zeromesh.parallel.activation.activation_store import ActivationStore

    return ActivationStore(mesh.device, chosen.cpu_checkpointing, group if partitions else None)


def checkpoint_activations(model: nn.Module, settings: Resolved, store: ActivationStore | None = None) -> None:
    """Recompute activations of the configured modules in the backward."""
    chosen = settings.activation_checkpointing
    if chosen.enabled:
        from zeromesh.parallel.activation.checkpoint import checkpoint_modules

        units = find_units(model, chosen.targets or settings.units)
        # A leaf has nothing inside that would be kept; recomputing it only costs time.
        inner = (module for _, module in units if chosen.targets or next(module.children(), None) is not None)
        checkpoint_modules(inner, store, chosen.granularity == "selective")


def while_alive(using: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Return ``using`` without a reference to its engine."""
    # The replaced layers hold it: the model, and copies of it, may outlive the engine.
    method = WeakMethod(using)

    def use() -> AbstractContextManager[None]:
        alive = method()
        return nullcontext() if alive is None else alive()

    return use
