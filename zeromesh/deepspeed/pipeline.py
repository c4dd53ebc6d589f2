"""``deepspeed.pipe`` and its engine: a ``PipelineModule`` that knows its stage, and batches given to the ends only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.base.containers import map_tensors
from zeromesh.base.files import require_regular
from zeromesh.base.signatures import refuse
from zeromesh.checkpoint.packing import broadcast_value
from zeromesh.comm.collectives import Group
from zeromesh.deepspeed.deepspeed_engine import DeepSpeedEngine
from zeromesh.deepspeed.pipe_topology import PipelineParallelGrid, ProcessTopology
from zeromesh.engine import batches
from zeromesh.engine.engine import BY_BATCH
from zeromesh.engine.pipeline_module import PipelineModule
from zeromesh.engine.state import EngineState
from zeromesh.parallel.pipeline.runtime.cut import examine
from zeromesh.parallel.pipeline.schedule.partition import starts_of
from zeromesh.shard.parameters.deferred import is_deferred, replayed
from zeromesh.shard.parameters.materialise import replace


class PipelineError(Exception):
    """Wrong use of a pipeline."""


class StagedModule(PipelineModule):
    """A ``PipelineModule`` that answers questions about stages before ``initialize``, too."""

    @cached_property
    def _grid(self) -> PipelineParallelGrid:
        return PipelineParallelGrid(self.topology())

    def topology(self) -> ProcessTopology:
        """Return the layout of the ranks: along a pipeline they are neighbours, unlike in DeepSpeed."""
        stages, split = self.num_stages or len(self.starts), self.tensor_ranks
        replicas = dist.get_world_size() // (stages * split)
        axes = {"data": replicas, "pipe": stages} | ({"model": split} if split > 1 else {})
        return ProcessTopology(list(axes), list(axes.values()))

    def mpu(self) -> PipelineParallelGrid:
        """Return the groups of the stages. Collective, the first time."""
        return self._grid

    @property
    def stage_id(self) -> int:
        """Stage of this rank."""
        return dist.get_rank() // self.tensor_ranks % (self.num_stages or len(self.starts))

    @property
    def parts(self) -> list[int]:
        """First layer of each stage, and the number of layers."""
        stages = self.num_stages or len(self.starts)
        starts = self.starts if len(self.starts) == stages else starts_of(self.partition_method, examine(self), stages)
        return [*starts, len(self.layers)]

    @property
    def forward_funcs(self) -> list[Any]:
        """Layers of this rank's stage. The call gives them memory and values; others get theirs in ``initialize``."""
        first, stop = self.parts[self.stage_id : self.stage_id + 2]
        layers = [self.computes_with(number) for number in range(first, stop)]
        for parameter in (candidate for layer in layers for candidate in layer.parameters() if is_deferred(candidate)):
            replace(parameter, replayed(parameter))
        return layers

    def get_additional_losses(self) -> None:
        """Return None; losses that a subclass returns are not reported."""

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the name of a layer's file in DeepSpeed's checkpoints."""
        return f"{ckpt_dir}/layer_{self.parts[self.stage_id] + local_layer_idx:02d}-model_states.pt"

    def save_state_dict(
        self, save_dir: str, checkpoint_engine: Any = None, exclude_frozen_params: bool = False
    ) -> None:
        """Write the layers of this rank's stage, a file each, before ``initialize``."""
        refuse("save_state_dict", "exclude_frozen_params", exclude_frozen_params, "all parameters are written", False)
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        for number, layer in enumerate(self.forward_funcs):
            if self._grid.get_data_parallel_rank() == 0 and (state := layer.state_dict()):
                (checkpoint_engine or LayerFiles()).save(state, self.ckpt_layer_path(save_dir, number))

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any = None, strict: bool = True) -> None:
        """Read the layers of this rank's stage, whatever stages wrote them, before ``initialize``."""
        for number, layer in enumerate(self.forward_funcs):
            if layer.state_dict():
                state = (checkpoint_engine or LayerFiles()).load(self.ckpt_layer_path(load_dir, number))
                layer.load_state_dict(state, strict)


class LayerFiles:
    """DeepSpeed's ``TorchCheckpointEngine``: files of torch, of which only tensors and plain containers are read."""

    def __init__(self, config_params: Any = None) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = "cpu") -> Any:
        """Read a file."""
        require_regular(Path(path))
        return torch.load(path, map_location, weights_only=True)

    def commit(self, tag: Any) -> bool:
        """Return True: files are complete when they are written."""
        return True


@dataclass
class _Evaluated(batches.WithLoss):
    """A micro-batch whose results are kept, and which may have a loss of any shape, or none."""

    batch: Any
    loss_fn: Callable[[Any, Any], Any] | None
    keep: Callable[[tuple[Any, Any]], None]  # not the list itself, whose tensors would be moved as those of the batch

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Keep the loss and the outputs; return zero."""
        inputs, labels = (tuple(part) if isinstance(part, list) else part for part in self.batch)
        outputs = model(inputs)
        self.keep((outputs if self.loss_fn is None else self.loss_fn(outputs, labels), outputs))
        return torch.zeros(())


def _mean_over(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean over the group's ranks of a tensor of any shape. Collective."""
    if group.size == 1:
        return value
    return group.exchange(value.flatten()).mean(0).view(value.shape).to(value.device)


class PipelineEngine(DeepSpeedEngine):
    """The engine of a ``PipelineModule``, which is trained by ``train_batch`` alone."""

    def __init__(self, state: EngineState, document: Mapping[str, Any], mpu: Any = None, **options: Any) -> None:
        super().__init__(state, document, mpu, **options)
        if isinstance(self.module, StagedModule) and self.mesh.sizes["context"] > 1:
            raise ValueError(
                f"mesh.context is {self.mesh.sizes['context']}, but grids of DeepSpeed have no such axis; set it to "
                "1, or use zeromesh.pipe.PipelineModule with zeromesh.initialize"
            )
        self.grid = self.module.mpu() if isinstance(self.module, StagedModule) else None
        self.mpu = self.grid if mpu is None else mpu
        self.total_loss: torch.Tensor | None = None  # of the micro-batches of the last update, on the last stage
        self.agg_train_loss: torch.Tensor | None = None  # the mean of it over all ranks
        self._in_batch = False
        self._keep: Callable[[Any], Any] | None = None  # in ``eval_batch``, what a micro-batch becomes

    def _require_batch(self, name: str) -> None:
        if not self._in_batch:
            raise PipelineError(f"a pipeline has no {name}() of its own: {BY_BATCH}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PipelineError: only whole batches pass through a pipeline."""
        self._require_batch("forward")

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Raise PipelineError, except inside of ``train_batch``."""
        self._require_batch("backward")
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Raise PipelineError, except inside of ``train_batch``."""
        self._require_batch("step")
        super().step(lr_kwargs)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Make one update; see ``Engine.train_batch``. Middle stages need no iterator where the first one has it."""
        self._in_batch = True
        try:
            loss = super().train_batch(data_iter)
        finally:
            self._in_batch = False
        self.agg_train_loss = loss.clone()
        self.total_loss = loss * self.micro_batches if self.is_last_stage() else None
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of micro-batches, without gradients; without ``loss_fn``, the mean of the outputs.

        Args:
            data_iter: as for ``train_batch``.
            return_logits: return a pair: the loss, and the outputs of the last micro-batch, None on other stages than
                the last.
            compute_loss: False: as without a ``loss_fn``.
            reduce_output: ``"avg"``: the mean over micro-batches and replicas; None: a list by micro-batch.
            bcast_loss: False: only the last stage has the result, others None.
            num_micro_batches: how many to take; None: as many as ``train_batch`` takes.
        """
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"eval_batch: reduce_output is {reduce_output!r}; use 'avg' or None")
        results: list[tuple[Any, Any]] = []
        loss_fn: Any = self.module.loss_fn if compute_loss else None
        self._keep = lambda batch: _Evaluated(batch, loss_fn, results.append)
        try:
            super().eval_batch(data_iter, num_micro_batches=num_micro_batches)  # type: ignore[arg-type]
        finally:
            self._keep = None
        outputs: Any = [value for value, _ in results] or None
        if outputs is not None and reduce_output == "avg":
            outputs = torch.stack(outputs).mean(0)
            outputs = _mean_over(_mean_over(outputs, self.mesh.group("data")), self.mesh.replicate)
        pipeline = self.mesh.group("pipeline")
        if bcast_loss and reduce_output == "avg" and pipeline.size > 1:
            outputs = self._shared(outputs, pipeline.size - 1)
        if not return_logits:
            return outputs
        return outputs, results[-1][1] if results else None

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        lacks = data_iter is None and self._passes is None and self.training_dataloader is None
        pipeline = self.mesh.group("pipeline")
        lacking = pipeline.exchange(torch.tensor([float(lacks)])).flatten().tolist() if pipeline.size > 1 else [lacks]
        micro_batches = iter(()) if lacks and not all(lacking) else super()._batches(data_iter)
        if any(lacking) and not all(lacking):
            micro_batches = self._received(micro_batches, lacking.index(0))
        return micro_batches if self._keep is None else map(self._keep, micro_batches)

    def _received(self, micro_batches: Iterator[Any], source: int) -> Iterator[Any]:
        """Yield the micro-batches of one stage on all; DeepSpeed's programs give them to the first and the last."""
        while True:
            batch = self._shared(next(micro_batches, None), source)
            if batch is None:
                return
            yield batch

    def _shared(self, value: Any, source: int) -> Any:
        shared = broadcast_value(value, source, self.mesh.group("pipeline"))
        return map_tensors(shared, lambda tensor: tensor.to(self.device))  # small ones come on the host

    def set_has_attention_mask(self, value: bool) -> None:
        """Accept the call: stages exchange tensors of any dtype."""


for _name, _read in {
    "is_pipe_parallel": lambda engine: engine.mesh.sizes["pipeline"] > 1,
    "is_data_parallel": lambda engine: engine.mesh.data_size > 1,
    "is_model_parallel": lambda engine: engine.mesh.sizes["tensor"] > 1,
    "pipeline_parallelism": lambda engine: True,
    "prev_stage": lambda engine: engine.stage_id - 1,
    "next_stage": lambda engine: engine.stage_id + 1,
}.items():
    setattr(PipelineEngine, _name, property(_read))
