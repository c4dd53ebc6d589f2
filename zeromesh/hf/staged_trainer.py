"""Steps of transformers' Trainer for a model in pipeline stages, and outputs that ranks have in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.checkpoint.packing import broadcast_value
from zeromesh.comm.agreement import texts
from zeromesh.engine.batches import WithLoss
from zeromesh.parallel.context.applied import SpreadSequences
from zeromesh.parallel.context.sequence_order import joined, reordered


@dataclass(frozen=True)
class _MicroBatch(WithLoss):
    """A micro-batch whose loss the trainer computes of the model's output, times a factor."""

    inputs: Mapping[str, Any]
    loss_of: Callable[[Any, dict[str, Any]], torch.Tensor]
    factor: float

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        # A copy, because trainers take labels out of it.
        return self.loss_of(model, dict(self.inputs)) * self.factor


@dataclass(frozen=True)
class _Asked(WithLoss):
    """A micro-batch whose outputs are kept on the rank that has the last stage."""

    inputs: Mapping[str, Any]
    keep: Callable[[Any], None]

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        output = model(**self.inputs)
        self.keep(output)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        return torch.zeros(()) if loss is None else loss


class StagedSteps:
    """Collects an update's micro-batches, which go through the stages together."""

    def __init__(self) -> None:
        self._waiting: list[_MicroBatch] = []

    def step(self, trainer: Any, engine: Any, inputs: Mapping[str, Any], items: Any) -> torch.Tensor:
        """Return the loss of the update with its last micro-batch, and zero with those before it.

        Args:
            trainer: computes losses, and says which micro-batch is the last.
            engine: has the stages.
            inputs: a micro-batch.
            items: number of labels in the update, or None where losses are means over micro-batches.
        """
        steps = engine.gradient_accumulation_steps()
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (items is not None and trainer.model_accepts_loss_kwargs) or trainer.compute_loss_func is not None
        # The engine takes the mean over its accumulation steps; the last update of an epoch may have fewer.
        factor = steps if scaled else steps / trainer.current_gradient_accumulation_steps

        def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
            loss: torch.Tensor = trainer.compute_loss(model, batch, num_items_in_batch=items)
            return loss

        self._waiting.append(_MicroBatch(inputs, loss_of, factor))
        if not trainer.accelerator.sync_gradients:
            return torch.zeros((), device=engine.device)
        missing = steps - len(self._waiting)
        micro_batches = [*self._waiting, *[replace(self._waiting[-1], factor=0.0)] * missing]
        self._waiting = []
        mean: torch.Tensor = engine.train_batch(iter(micro_batches))
        return mean


def outputs_of(engine: Any, names: tuple[str, ...] | None, **inputs: Any) -> Any:
    """Return tensors of the model's output, as one of transformers, on every rank of the pipeline. Collective.

    Args:
        engine: has the stages.
        names: of the output's entries; None: all tensors.
        inputs: of the model.
    """
    from transformers.utils.generic import ModelOutput

    outputs: list[dict[str, Any]] = []

    def keep(output: Any) -> None:
        # Caches of keys and values are each stage's own.
        outputs.append({k: v.cpu() for k, v in output.items() if torch.is_tensor(v) and (names is None or k in names)})

    engine.eval_batch(iter([_Asked(inputs, keep)]), num_micro_batches=1)
    group = engine.mesh.group("pipeline")
    (source,) = (rank for rank, has in enumerate(texts(group, "x" * len(outputs))) if has)
    output = broadcast_value(outputs[0] if outputs else None, source, group)
    moved = {name: value.to(engine.device) for name, value in output.items()}
    return ModelOutput(moved)  # type: ignore[no-untyped-call]


def whole_sequences(part: torch.Tensor, spread: SpreadSequences) -> torch.Tensor:
    """Return an output of one entry per token for all tokens, of the ranks that share sequences. Collective."""
    if part.shape in spread.whole_outputs:
        return part
    parts = [torch.empty_like(part) for _ in range(spread.group.size)]
    dist.all_gather(parts, part.contiguous(), group=spread.group.process_group)
    if spread.consecutive:
        return torch.cat(parts, 1)
    values = joined(parts, 1)
    return values if spread.order is None else reordered(values, spread.order.argsort(1))
