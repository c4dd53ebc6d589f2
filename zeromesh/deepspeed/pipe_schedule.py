"""``deepspeed.runtime.pipe.schedule``: the instructions of one stage, step by step, for programs that read them.

Engines run ZeroMesh's own schedules (``zeromesh.parallel.pipeline.schedule``); changing a class here changes none of
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One instruction; its arguments are attributes, too."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """An instruction on one of the buffers of activations."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _instructions(base: type[Any], *names: str) -> list[type[Any]]:
    """Return classes without a body: their names are all that a schedule says."""
    return [type(name, (base,), {"__module__": __name__}) for name in names]


OptimizerStep, ReduceGrads, ReduceTiedGrads = _instructions(
    PipeInstruction, "OptimizerStep", "ReduceGrads", "ReduceTiedGrads"
)
LoadMicroBatch, ForwardPass, BackwardPass = _instructions(
    BufferOpInstruction, "LoadMicroBatch", "ForwardPass", "BackwardPass"
)
SendActivation, RecvActivation, SendGrad, RecvGrad = _instructions(
    BufferOpInstruction, "SendActivation", "RecvActivation", "SendGrad", "RecvGrad"
)
Steps = Iterator[list[PipeInstruction]]


class PipeSchedule(ABC):
    """The instructions of one stage."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.num_micro_batches, self.num_stages, self.stage = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1

    @abstractmethod
    def steps(self) -> Steps:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return the buffers that the instructions name."""
        return self.micro_batches

    def __iter__(self) -> Steps:
        return self.steps()

    def _made(self, *rows: tuple[type[Any], int, bool]) -> list[PipeInstruction]:
        """Return instructions on the buffers of micro-batches, of those that there are, where a condition holds."""
        buffers = self.num_pipe_buffers()
        return [kind(batch % buffers) for kind, batch, holds in rows if holds and 0 <= batch < self.micro_batches]


class InferenceSchedule(PipeSchedule):
    """Forwards, one micro-batch a step, with two buffers: one is sent while the other is filled."""

    def num_pipe_buffers(self) -> int:
        """Return 2."""
        return 2

    def steps(self) -> Steps:
        """Yield the instructions of each step."""
        for batch in range(-self.stage, self.micro_batches + self.stages - 1 - self.stage):
            sends = (SendActivation, batch - 1, not self.is_last_stage)
            receives = (RecvActivation, batch, not self.is_first_stage)
            # Neighbours send and receive in opposite orders, or each would wait for the other.
            pair = (sends, receives) if self.stage % 2 == 0 else (receives, sends)
            loads = self.is_first_stage or self.is_last_stage
            yield self._made((LoadMicroBatch, batch, loads), *pair, (ForwardPass, batch, True))


class TrainSchedule(PipeSchedule):
    """1F1B: forwards and backwards alternate, and stages of even and odd numbers do the one while others the other."""

    def num_pipe_buffers(self) -> int:
        """Return as many as micro-batches can be between their forward and backward, 2 at least."""
        return max(2, min(self.stages - self.stage, self.micro_batches))

    def steps(self) -> Steps:
        """Yield the instructions of each step."""
        before, ends = -1, self.is_first_stage or self.is_last_stage
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        for step in range(last + 1):
            # A forward follows a backward, whose gradient goes to the stage before; and the other way round. Forwards
            # arrive a step later at each stage; a backward takes as long from the last stage to this one.
            if (step + self.stage) % 2 == 0:
                batch, other = (step - self.stage) // 2, not self.is_first_stage
                moves = (SendGrad, before, other), (RecvActivation, batch, other), (LoadMicroBatch, batch, ends)
                commands = self._made(*moves, (ForwardPass, batch, True))
            else:
                batch, other = (step + self.stage + 1) // 2 - self.stages, not self.is_last_stage
                both = (RecvGrad, batch, other), (SendActivation, before, other)
                commands = self._made(*both, (BackwardPass, batch, True))
            before = batch
            yield commands + ([ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if step == last else [])


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation without stages."""

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1

    def steps(self) -> Steps:
        """Yield the instructions of each step."""
        for step in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield commands + ([ReduceGrads(), OptimizerStep()] if step == self.micro_batches - 1 else [])
