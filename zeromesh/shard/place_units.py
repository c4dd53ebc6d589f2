"""Cutting a model into units and laying its parameters out over the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zeromesh.base.dtypes import dtypes
from zeromesh.base.placement import PlacementRow, offloaded_units
from zeromesh.base.precision import Precision
from zeromesh.base.split import Held
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.find_units import assign, prefixes, unit_modules
from zeromesh.shard.gradients.gradient import Gradient
from zeromesh.shard.layout import Layout
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.narrow import NarrowGather
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.tables.tables import TableSettings

# Contents of the messages with the tags of a flat buffer, for error texts.
PURPOSES = ("parameters", "gradients", "summed gradients", "a whole tensor")

Named = Sequence[tuple[str, nn.Parameter]]
Kind = tuple[torch.dtype, bool, tuple[int, ...], bool, str]


@dataclass(frozen=True)
class Slots:
    """Number of units whose full parameters and full gradients exist at once; None: the row's default."""

    parameter: int | None = None
    gradient: int | None = None


@dataclass(frozen=True)
class Sharding:
    """Placement of a model's states over the ranks."""

    row: PlacementRow
    precision: Precision = field(default_factory=Precision)
    slots: Slots = field(default_factory=Slots)
    targets: Sequence[str] = ()  # modules that become units, see `find_units`
    predivide: float | None = None  # see `GradientPolicy`
    summed: bool = False  # see `GradientPolicy`
    tables: TableSettings = field(default_factory=TableSettings)
    narrow: Collection[str] = ()  # names of weights that are gathered in float8


@dataclass(frozen=True)
class ModelPart:
    """This rank's part of a model that is split along the tensor or expert axis, or cut along the pipeline."""

    # By name, what this rank holds of parameters that are split, or used in different ways, along one of these axes.
    split: Mapping[str, Held] = field(default_factory=dict)
    tied: Mapping[str, Sequence[int]] = field(default_factory=dict)  # pipeline stages that have a parameter, if several
    idle: Collection[str] = ()  # names of buffers that are here, and that another stage computes with
    experts: Collection[str] = ()  # names of modules whose parameters are split along the expert axis: units


def make_units(
    model: nn.Module, targets: Sequence[str], tables: Collection[str] = (), experts: Collection[str] = ()
) -> list[Unit]:
    """The units of a model, the root first, without parameters yet; see ``unit_modules``. Tables are not units."""
    units = [Unit(0, "", model, None)]
    named_modules = [(name, module) for name, module in unit_modules(model, targets, experts) if name not in tables]
    by_name = {"": units[0]}
    for index, (name, module) in enumerate(named_modules, start=1):
        parent = by_name[next((outer for outer in prefixes(name) if outer in by_name), "")]
        by_name[name] = Unit(index, name, module, parent)
        units.append(by_name[name])
    return units


def lay_out(
    units: Sequence[Unit], mesh: Mesh, sharding: Sharding, part: ModelPart, accumulates: bool
) -> list[tuple[Unit, list[Flat], PlacementRow]]:
    """Settle where each parameter of every unit will lie, in flat buffers that have no memory yet.

    ``accumulates`` as for ``offloaded_units``.
    """
    tensor = mesh.group("tensor")
    owned = assign(units[0].module, [*(unit.name for unit in units[1:]), *sharding.tables.paths])
    sizes = [sum(p.numel() for _, p in owned[unit.name] if p.requires_grad) for unit in units]
    away = offloaded_units(sizes, sharding.row, accumulates)
    placements: list[tuple[Unit, list[Flat], PlacementRow]] = []
    number, chosen = 0, dtypes(units[0].module, sharding.precision)
    for unit, is_away in zip(units, away, strict=True):
        row, flats = sharding.row if is_away else sharding.row.on_device, []
        kinds = _kinds(owned[unit.name], chosen, sharding, part)
        for (dtype, trainable, tied_stages, narrow, axis), members in kinds.items():
            shapes = [(name, parameter.shape) for name, parameter in members]
            unsplit = {name: Held(tuple(shape), rank=tensor.rank, ranks=tensor.size) for name, shape in shapes}
            held_parts = {name: part.split.get(name) or unsplit[name] for name in unsplit}
            group = mesh.shards_of(axis)
            layout = Layout.build(shapes, dtype, trainable, group.size, held_parts)
            # What is frozen has no master that it could rest in.
            its_row = row if trainable else sharding.row
            flat = Flat(layout, [parameter for _, parameter in members], number, its_row, mesh, tied_stages)
            if narrow:
                flat.narrow = NarrowGather(layout, flat.shard_range)
            if trainable:
                place = unit.name or "(root)"
                flat.gradient = Gradient(
                    layout, flat.own, flat.shard_range, flat.tag, place, tied_stages, flat.is_first, row.gradient_tier
                )
            flats.append(flat)
            for offset, purpose in enumerate(PURPOSES):
                group.purposes[flat.tag + offset] = f"{purpose} of {unit}"
            number += 1
        placements.append((unit, flats, row))
    return placements


def _kinds(
    named: Named, chosen: Mapping[int, torch.dtype], sharding: Sharding, part: ModelPart
) -> dict[Kind, list[tuple[str, nn.Parameter]]]:
    """The parameters by (dtype to compute in, trainable, stages that have it if several do, narrow, axis)."""
    kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        # Of one kind are parameters that can travel in one message, and be updated or left alone together.
        # What is frozen rests rounded nowhere, and is written back from where it was gathered.
        narrow = parameter.requires_grad and name in sharding.narrow
        axis = part.split[name].axis if name in part.split else "tensor"
        kind = chosen[id(parameter)], parameter.requires_grad, tuple(part.tied.get(name, ())), narrow, axis
        kinds.setdefault(kind, []).append((name, parameter))
    return kinds
