"""Cost of a model that cannot be traced, from the shapes of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeromesh.apps.plan.cost.cost import (
    ALL_TRAINED,
    NONE,
    Divided,
    Frozen,
    KernelWork,
    ModelCost,
    Recompute,
    TableCost,
    UnitCost,
    WorkKind,
)
from zeromesh.apps.plan.cost.live import ParameterCut, TensorShare, cuts_of, divide
from zeromesh.apps.plan.cost.packed import frozen_of, packed_weights
from zeromesh.apps.plan.cost.passes import TraceOptions, is_block
from zeromesh.base.linear_arithmetic import is_transposed
from zeromesh.parallel.tensor.split_plan import kind_of
from zeromesh.shard.find_units import assign, find_units
from zeromesh.shard.tables.find_tables import find_tables

LOSS_BYTES = 4  # of an element of the logits in the loss, which is computed in fp32


def estimate(
    model: nn.Module, name: str, micro_batch: int, sequence: int, options: TraceOptions, reason: str
) -> ModelCost:
    """Return a cost by formula: each token goes once through every layer, and autograd keeps what layers read.

    Convolutions, and attention's products of activations, are left out. The model may be on any device; ``reason`` says
    why there is no trace, which the cost's note repeats.
    """
    packing = options.packing
    width = (options.dtype or next((p.dtype for p in model.parameters()), torch.float32)).itemsize
    modules, tokens = dict(model.named_modules()), micro_batch * sequence
    spread: Mapping[str, Any] = find_tables(model, options.tables, {})[0]
    names, cuts = [name for name, _ in find_units(model) if name not in spread], cuts_of(model)
    owned = assign(model, names)
    packed = packed_weights(model) if packing is not None else set()
    # The root's tables come before the units, and its layers after them.
    tables = {path for path, _ in owned[""] if isinstance(modules[path.rpartition(".")[0]], nn.Embedding)}
    parts = [(unit, unit, owned[unit]) for unit in names]
    parts.insert(0, ("", f"{name} before its units", [entry for entry in owned[""] if entry[0] in tables]))
    parts.append(("", f"{name} after its units", [entry for entry in owned[""] if entry[0] not in tables]))
    units = []
    for number, (unit, title, parameters) in enumerate(parts):
        layers = _Layers(tokens, width, cuts)
        if not (number or parameters):
            continue
        if number:
            layers.add(modules[unit], unit, [] if unit else names)
        elements, frozen = NONE, ALL_TRAINED
        looked = []
        for path, parameter in parameters:
            if (table := spread.get(path.removesuffix(".weight"))) is not None:
                looked.append(
                    TableCost(path.removesuffix(".weight"), table.num_embeddings, table.embedding_dim, tokens)
                )
                continue
            share = TensorShare.SPLIT if path in cuts else TensorShare.WHOLE
            if parameter.requires_grad:
                elements = elements.plus(divide(parameter.numel(), share))
            else:
                form = packing if id(parameter) in packed else None
                frozen = frozen.plus(frozen_of(parameter, width, divide(1, share), not unit, form))
        cost = layers.unit(title, bool(unit) and is_block(unit, modules), elements, frozen, not unit)
        units.append(replace(cost, tables=tuple(looked)))
    note = f"estimated from the shapes of layers, since the model could not be traced: {reason}"
    return ModelCost(name, micro_batch, sequence, 1, tuple(units), exact=False, note=note)


class _Layers:
    """Layers of one unit."""

    def __init__(self, tokens: int, width: int, cuts: Mapping[str, ParameterCut]) -> None:
        self.tokens, self.width, self.cuts = tokens, width, cuts
        self.saved, self.largest, self.hidden = NONE, NONE, NONE
        self.works: list[KernelWork] = []

    def add(self, module: nn.Module, name: str, without: list[str]) -> None:
        """Add the layers of a module, but those of the units ``without``."""
        for path, parent in module.named_modules(prefix=name):
            if any(path == unit or path.startswith(f"{unit}.") for unit in without):
                continue
            linear = [(child, m) for child, m in parent.named_children() if kind_of(m) == "linear"]
            linear = [("", parent)] if parent is module and kind_of(parent) == "linear" else linear
            self._add_layers(path, [entry for entry in linear if entry[0] not in without])
            tokens, width = self.tokens, self.width
            if "Norm" in type(parent).__name__ and (weight := getattr(parent, "weight", None)) is not None:
                self.saved = self.saved.plus(Divided(tokens=float(tokens * weight.numel() * width)))
            if "activation" in type(parent).__module__ and not list(parent.children()):
                self.saved = self.saved.plus(self.largest)

    def _add_layers(self, path: str, linear: list[tuple[str, nn.Module]]) -> None:
        """Add the linear layers of one module."""
        read: set[int] = set()
        for number, (child, layer) in enumerate(linear):
            weight: torch.Tensor = layer.weight  # type: ignore[assignment]
            inputs, outputs = weight.shape if is_transposed(layer) else reversed(weight.shape)
            name = ".".join(part for part in (path, child, "weight") if part)
            cut, last = self.cuts.get(name), number == len(linear) - 1
            before = TensorShare.SPLIT if cut and not cut.outputs else TensorShare.TOKENS
            after = TensorShare.SPLIT if cut and cut.outputs else TensorShare.TOKENS
            # Layers beside each other read the same; the last one reads what was made of their results.
            if last or inputs not in read:
                self.saved = self.saved.plus(divide(self.tokens * inputs * self.width, before))
            read.add(inputs)
            result = divide(self.tokens * outputs * self.width, after)
            self.saved = self.saved if last else self.saved.plus(result)
            self.largest = max(self.largest, result, key=lambda amount: amount.on())
            self.hidden = result if last else self.hidden
            flops = divide(2 * self.tokens * inputs * outputs, TensorShare.SPLIT if cut else TensorShare.TOKENS)
            moved = divide(self.width * (self.tokens * (inputs + outputs) + inputs * outputs), TensorShare.TOKENS)
            self.works.append(KernelWork(WorkKind.PRODUCT, flops, moved, (self.tokens, outputs, inputs)))

    def unit(self, name: str, block: bool, elements: Divided, frozen: Frozen, root: bool) -> UnitCost:
        """Return the unit's cost."""
        works = tuple(self.works)
        inputs = Divided(tokens=self.hidden.on()) if block else self.saved
        # A gradient beside the largest activation; of logits, the loss computes in fp32.
        loss = self.largest.times(LOSS_BYTES / self.width) if not block else NONE
        return UnitCost(
            name,
            block,
            elements,
            frozen,
            saved=dict.fromkeys(Recompute, self.saved) | {Recompute.BLOCKS: inputs},
            output=self.hidden,
            forward_peak=self.largest.plus(loss),
            backward_peak=self.largest.times(2.0).plus(loss),
            forward=works,
            input=works,
            weight=works,
            gradient_peak=self.largest.times(2.0).plus(loss),
            resident=elements if root else NONE,
        )
