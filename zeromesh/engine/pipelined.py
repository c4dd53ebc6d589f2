"""A model in pipeline stages: the cut, the schedule, and the run of a batch through all stages."""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.buffer_memory import EXTRA
from zeromesh.base.chain import Chain
from zeromesh.base.containers import tensors_of
from zeromesh.base.linear_arithmetic import Kept, keeping
from zeromesh.base.precision import Precision
from zeromesh.comm.agreement import require_agreement
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.config.feature_sections import Pipeline
from zeromesh.engine import batches
from zeromesh.engine.computation import Computation
from zeromesh.parallel.pipeline.runtime.cut import Place, take_away
from zeromesh.parallel.pipeline.runtime.interpreter import Interpreter, Messages
from zeromesh.parallel.pipeline.runtime.record import Recorded, Recorder, gather
from zeromesh.parallel.pipeline.runtime.stage import Stages
from zeromesh.parallel.pipeline.runtime.weight_gradients import postpone, roots_of
from zeromesh.parallel.pipeline.schedule.actions import Schedule
from zeromesh.parallel.pipeline.schedule.chosen import ChosenSchedule
from zeromesh.parallel.pipeline.schedule.lowering import add_messages, forward_only
from zeromesh.parallel.pipeline.schedule.partition import Blocks, inner, starts_of
from zeromesh.shard.sharded import ShardedModel

_log = logging.getLogger("zeromesh")


def agreed(world: Group, blocks: Blocks) -> Blocks:
    """Return the blocks with costs averaged over ranks. Raise ValueError if the ranks have different blocks."""
    lines = [f"block {name}" for name in blocks.names]
    lines += [f"{name} is used by blocks {', '.join(map(str, numbers))}" for name, numbers in blocks.uses.items()]
    lines.append(f"operations are {'not ' * (blocks.operations is None)}counted")
    require_agreement(world, "what a trace of the model's forward with the first samples shows", "\n".join(lines))
    if blocks.operations is None:
        return blocks
    # Samples of ranks may have different shapes, and all ranks must cut alike.
    counted = world.exchange(torch.tensor(blocks.operations, dtype=torch.float64))
    return replace(blocks, operations=tuple(counted.mean(0).tolist()))


class Pipelined:
    """A model in pipeline stages. Raise ValueError if it cannot be cut so, or there is no such schedule.

    ``splits`` lets gradients of activations be sent before those of weights are computed, also in 1f1b.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        chosen: Pipeline,
        microbatches: int,
        blocks: Blocks,
        splits: bool = False,
    ) -> None:
        self._model, self._mesh, self._chosen = model, mesh, chosen
        self._group = mesh.group("pipeline")
        self._evaluations: dict[int, Schedule] = {}
        self._units: dict[int, frozenset[int]] = {}
        self._postpones = False  # linear layers can leave their weight gradients for later
        self._open: set[int] = set()  # stages whose last backward of this update is yet to come
        schedule = chosen.schedule if isinstance(chosen.schedule, str) else Path(chosen.schedule.file)
        size = self._group.size
        self.schedules = ChosenSchedule(
            schedule, size, microbatches, chosen.chunks, chosen.costs, chosen.recompute, splits
        )
        self._placement = self.schedules.placement
        self.cut = blocks.cut(starts_of(chosen.partition, blocks, len(self._placement)))  # the blocks of each stage
        self._interpreter: Interpreter | None = None
        self.recorded: Recorded | None = None  # the update that was recorded last
        self._records = False
        self._updates = 0
        self.taken: list[Place] = []  # parameters of other ranks' stages, where there are zeros now

    @property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self._placement) if rank == self._group.rank]

    @property
    def firsts(self) -> list[str]:
        """Name of the first block of each stage."""
        return [self.cut.blocks[start] for start in self.cut.starts]

    @property
    def blocks_by_stage(self) -> list[list[str]]:
        """The blocks of each stage of this rank."""
        bounds = (*self.cut.starts, len(self.cut.blocks))
        return [list(self.cut.blocks[bounds[stage] : bounds[stage + 1]]) for stage in self.stages]

    @property
    def tied(self) -> dict[str, list[int]]:
        """Parameters on several ranks of the pipeline, and these ranks."""
        ranks = {name: sorted({self._placement[s] for s in needing}) for name, needing in self.cut.stages.items()}
        return {name: holders for name, holders in ranks.items() if len(holders) > 1}

    @property
    def idle(self) -> frozenset[str]:
        """Names of buffers outside of blocks, and of extra states, that only other ranks compute with."""
        buffers = {n for n, stage in self.cut.buffers.items() if self._placement[stage] != self._group.rank}
        paths = (path for path, _ in self._model.named_modules() if not {*self.stages} & self._stages_of(path))
        return frozenset(buffers | {f"{path}.{EXTRA}" for path in paths})

    def _stages_of(self, path: str) -> set[int]:
        """Return the stages that compute with a module."""
        inside = [number for number, block in enumerate(self.cut.blocks) if f"{path}.".startswith(f"{block}.")]
        # Of a block that is cut through, the parameters tell where its modules are.
        if inside and not inner(self.cut.blocks).keys() & {inside[0] + 1}:
            return {bisect_right(self.cut.starts, inside[0]) - 1}
        names = {name: needing for name, needing in self.cut.stages.items() if name.startswith(f"{path}.") or not path}
        return {stage for needing in names.values() for stage in needing} or {0}

    def take_away(self, precision: Precision) -> None:
        """Remove the parameters of other ranks' stages; stand-ins have the dtypes of the run."""
        if isinstance(self._model, Chain):
            self._model.cut(self.cut.starts)
        self.taken = take_away(self._model, self.cut, self.stages, precision, self._mesh.device)

    def units_of(self, stage: int, sharded: ShardedModel) -> frozenset[int] | None:
        """Return the units that have parameters of a stage; None where the rank has one stage only."""
        if len(self.stages) == 1:
            return None
        if stage not in self._units:
            needing = self.cut.stages
            self._units[stage] = frozenset(
                unit.index
                for unit in sharded.units
                for flat in unit.flats
                if any(stage in needing[segment.name] for segment in flat.layout.segments)
            )
        return self._units[stage]

    def units_after(self, stage: int, sharded: ShardedModel) -> frozenset[int]:
        """Note that a stage is done with in this update; return the units of the stages that are not."""
        self._open.discard(stage)
        return frozenset().union(*(self.units_of(other, sharded) or () for other in self._open))

    def work(self, sharded: ShardedModel, computation: Computation) -> StageWork:
        """Return the computation of this rank's stages, which trains from now on."""
        self._work = StageWork(self, sharded, computation)
        return self._work

    def schedule(self, microbatches: int) -> Schedule:
        """Return the schedule of a training step, with its messages; raise ValueError if there is none."""
        schedule = self.schedules.of(microbatches)
        if schedule.splits and not self._postpones:
            self._postpones = True
            postpone(self._model)  # not before: another schedule leaves the layers as they are
        return schedule

    def train(self, micro_batches: Sequence[Any]) -> list[Tensor]:
        """Run forward and backward of all micro-batches; return detached losses, on the last stage's rank only."""
        self._open = set(self.stages)
        self._updates += 1
        chosen, schedule = self._chosen.record, self.schedule(len(micro_batches))
        due = chosen is not None and chosen.step == self._updates
        if not (due or self._records):
            return self._run(schedule, micro_batches)
        self._records = False
        recorder = Recorder(self._mesh.device)
        losses = self._run(schedule, micro_batches, recorder)
        line = next(line for line in self._mesh.lines("pipeline") if self._mesh.rank in line)
        self.recorded = gather(recorder, self._group, [self._mesh.node_of[rank] for rank in line], schedule)
        if due and chosen is not None and self._mesh.rank == 0:
            self._write(self.recorded, Path(chosen.folder))
        return losses

    def record(self) -> None:
        """Record the times of the next update's actions in ``recorded``. All ranks call it."""
        self._records = True

    def _write(self, recorded: Recorded, folder: Path) -> None:
        try:
            files = ", ".join(map(str, recorded.write(folder, f"update_{self._updates}")))
        except OSError as error:  # a full disk is no reason to end a training
            files = f"no files, as they could not be written: {error}"
        bubbles = recorded.measured.bubble, recorded.predicted.bubble
        _log.info("update %d: bubble %.1f%%, predicted %.1f%%; %s", self._updates, *(100 * b for b in bubbles), files)

    def evaluate(self, micro_batches: Sequence[Any]) -> list[Tensor]:
        """Run the forwards of any number of micro-batches; else as ``train``."""
        if len(micro_batches) not in self._evaluations:
            self._evaluations[len(micro_batches)] = add_messages(forward_only(self._placement, len(micro_batches)))
        return self._run(self._evaluations[len(micro_batches)], micro_batches)

    def _run(self, schedule: Schedule, micro_batches: Sequence[Any], recorder: Recorder | None = None) -> list[Tensor]:
        mode = torch.is_grad_enabled(), self._model.training
        trains = [parameter.requires_grad for parameter in self._model.parameters()]
        shapes = [(*mode, tuple((tuple(x.shape), str(x.dtype)) for x in tensors_of(batch))) for batch in micro_batches]
        frozen = self._require_same(micro_batches, shapes, zlib.crc32(bytes(trains)))
        # Which parameters are frozen, on any stage, decides which tensors are sent.
        signatures = [(*shape, frozen) for shape in shapes]
        if self._interpreter is None:
            stages = Stages(self._model, self.cut.blocks, self.cut.starts, self.stages[0])
            messages = Messages(self._group, schedule.placement, self._mesh.device)
            self._interpreter = Interpreter(stages, messages, self._work)
        return self._interpreter.run(schedule, self._group.rank, micro_batches, signatures, recorder, not all(trains))

    def _require_same(
        self, micro_batches: Sequence[Any], signatures: Sequence[Any], checksum: float
    ) -> tuple[float, ...]:
        """Return ``checksum`` of each rank. Raise ValueError, on all ranks, if stages have different micro-batches."""
        # Stages that are given different micro-batches would wait for messages that never come.
        sums = 0.0
        if micro_batches:
            values = torch.stack([batches.checksum(batch, self._mesh.device) for batch in micro_batches])
            # Weighted, as the order counts; read once, as a device is waited for.
            sums = float(
                (values * torch.arange(1, len(micro_batches) + 1, dtype=values.dtype, device=values.device)).sum()
            )
        shapes = zlib.crc32(repr(signatures).encode())
        rows = self._group.exchange(
            torch.tensor([len(micro_batches), shapes, sums, checksum], dtype=torch.float64)
        ).tolist()
        for stage, row in enumerate(rows[1:], 1):
            for name, expected, other in zip(("numbers", "shapes", "values"), rows[0][:3], row[:3], strict=True):
                if expected != other:
                    raise ValueError(
                        f"ranks 0 and {stage} of a pipeline were given different {name} of micro-batches; give all "
                        "ranks of a pipeline the same ones: share engine.data_rank of engine.data_size, and let seeds "
                        "depend on engine.data_rank only"
                    )
        return tuple(row[3] for row in rows)


class StageWork:
    """Computation of this rank's stages, one micro-batch at a time, for the interpreter of a schedule."""

    def __init__(self, pipelined: Pipelined, sharded: ShardedModel, computation: Computation) -> None:
        self._pipelined, self._sharded, self._computation = pipelined, sharded, computation

    @contextmanager
    def _computing(self, stage: int, operands: Kept | None, last: bool = False, trains: bool = True) -> Iterator[None]:
        # Units that another stage of this rank still uses before the update are not done with yet.
        after = self._pipelined.units_after(stage, self._sharded) if last else frozenset()
        part = self._pipelined.units_of(stage, self._sharded)
        with self._sharded.events.order.of_stage(part, after, trains), keeping(operands):
            yield

    def stage_loss(self, stage: int, batch: Any, operands: Kept | None, trains: bool) -> Tensor:
        """Return the loss of a micro-batch, which the stages compute together; see ``Work``."""
        with self._computing(stage, operands, trains=trains), self._computation.hearing_routers(trains):
            return self._computation.loss(batch)

    def stage_backward(
        self,
        stage: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        last: bool,
        operands: Kept | None,
    ) -> None:
        """Run a stage's part of the backward of a micro-batch; see ``Work``."""
        if gradients is None:
            accumulation = self._sharded.accumulation
            losses = [batches.check_loss(root) for root in roots]
            # The last stage has a loss and no gradient of it. Only there losses are scaled, once for all stages.
            roots, gradients = [accumulation.scaled(loss / accumulation.steps) for loss in losses], [None]
        with self._computing(stage, operands, last), self._sharded.accumulation.differentiating(divided=True):
            self._computation.differentiate(roots, gradients, last, reduces=operands is None)

    def stage_weights(self, stage: int, operands: Kept, last: bool) -> None:
        """Run the backward of linear layers' weights, which ``stage_backward`` has left."""
        roots = roots_of(operands)
        phase, events = self._computation.phase("backward"), self._sharded.events
        with self._computing(stage, None, last), phase, events.backward.weights(last):
            if roots:
                # The values of these gradients are not read: the nodes have their operands.
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
