"""Interpreter of schedules: it does this rank's actions in order, and the messages between stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from zeromesh.base.buffer_memory import BufferMemory
from zeromesh.base.linear_arithmetic import Kept
from zeromesh.base.randomness import drawing_from, random_state
from zeromesh.comm.collectives import Group, Pending
from zeromesh.parallel.pipeline.runtime.record import Recorder
from zeromesh.parallel.pipeline.runtime.stage import Handed, Header, Stages, TensorForm
from zeromesh.parallel.pipeline.schedule.actions import BACKWARDS, LAST, Action, Kind, Schedule
from zeromesh.parallel.pipeline.schedule.validate import validate

# Tags on the pipeline axis; messages of one tag between two ranks arrive in the order of sending.
HEADER_TAG, ACTIVATION_TAG, GRADIENT_TAG = 8, 9, 10

Place = tuple[int, int]
"""A stage, and a micro-batch in it."""


class Work(Protocol):
    """Computation of one stage's part of a micro-batch."""

    def stage_loss(self, stage: int, batch: Any, operands: Kept | None, trains: bool) -> Tensor:
        """Return the model's loss, a scalar; with ``operands`` its backward is in two parts.

        Unless it ``trains``, no backward follows, although there may be a graph.
        """

    def stage_backward(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None, last: bool, operands: Kept | None
    ) -> None:
        """Run the backward from a stage's outputs and their gradients, or from the loss, which has none.

        ``last`` if it is the stage's last one before the update. With ``operands``, that of weights comes later.
        """

    def stage_weights(self, stage: int, operands: Kept, last: bool) -> None:
        """Run the part of the backward that ``stage_backward`` has postponed."""


class Messages:
    """Tensors between the stages of a pipeline; ``placement`` has the rank of each stage."""

    def __init__(self, group: Group, placement: Sequence[int], device: torch.device) -> None:
        self._group, self._placement, self.device = group, tuple(placement), device
        self._sending: deque[list[Pending]] = deque()
        # Tensors under way stay in memory, so their number must not grow with that of the micro-batches.
        self._most = 2 * len(placement) + 2

    def is_here(self, stage: int) -> bool:
        """Return whether a stage is this rank's."""
        return self._placement[stage] == self._group.rank

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, what: str) -> list[Pending]:
        """Begin to send tensors to a stage. They stay in memory until the messages have been waited for."""
        peer = self._placement[to]
        messages = [tensor.detach().contiguous() for tensor in tensors]
        sending = [self._group.send_and_receive({peer: message}, {}, tag, what) for message in messages]
        self._sending.append(sending)
        # No rank waits for ever here, since schedules get to their end also if every send waits for its receive.
        if len(self._sending) > self._most:
            _wait(self._sending.popleft())
        return sending

    def receive(self, forms: Sequence[TensorForm], of: int, tag: int, what: str) -> tuple[list[Tensor], list[Pending]]:
        """Begin to receive tensors from a stage."""
        peer = self._placement[of]
        tensors = [form.empty(self.device) for form in forms]
        return tensors, [self._group.send_and_receive({}, {peer: tensor}, tag, what) for tensor in tensors]

    def send_header(self, header: Header, to: int) -> None:
        """Send the description of the tensors that a stage is going to receive."""
        text = torch.frombuffer(bytearray(header.to_json().encode()), dtype=torch.uint8).to(self.device)
        length = torch.tensor([text.numel()], device=self.device)
        self.send([length, text], to, HEADER_TAG, "header")

    def receive_header(self, of: int) -> Header:
        """Receive the header that ``send_header`` of a stage sends to this rank."""
        (length,), pending = self.receive([TensorForm((1,), torch.int64, False)], of, HEADER_TAG, "header")
        _wait(pending)
        (text,), pending = self.receive([TensorForm((int(length),), torch.uint8, False)], of, HEADER_TAG, "header")
        _wait(pending)
        return Header.from_json(bytes(text.cpu().tolist()).decode())

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        while self._sending:
            _wait(self._sending.popleft())


class Interpreter:
    """Interpreter of schedules."""

    def __init__(self, stages: Stages, messages: Messages, work: Work) -> None:
        self._stages, self._messages, self._work = stages, messages, work
        # The outputs of a stage by its number and the signature of the inputs; shapes follow from these.
        self._headers: dict[tuple[int, Any], Header] = {}
        self._announced: set[tuple[int, Any]] = set()  # those that the next stage's rank has
        # By ``id``, as hashing a schedule takes as long as reading it; they are kept alive.
        self._valid: dict[int, Schedule] = {}

    def run(
        self,
        schedule: Schedule,
        rank: int,
        batches: Sequence[Any],
        signatures: Sequence[Any],
        recorder: Recorder | None = None,
        sends_all: bool = False,
    ) -> list[Tensor]:
        """Do a rank's actions; return the detached losses in the order of micro-batches, none without the last stage.

        Args:
            schedule: with messages.
            rank: along the pipeline axis.
            batches: the micro-batches; all stages are given the same.
            signatures: one per micro-batch; equal ones mean the same shapes everywhere in the model.
            recorder: notes the times of the actions; None: they are not noted.
            sends_all: see ``Stages.run``.

        Raises:
            ScheduleError: before the first action, if one of them has no use, or lacks what it needs.
        """
        if id(schedule) not in self._valid:
            # A run would leave out what has no use, or wait for what does not come.
            training = any(kind in BACKWARDS or kind in LAST for kind, _, _ in schedule.present)
            validate(schedule, training=training, messages=True)
            self._valid[id(schedule)] = schedule
        run = _Running(self, schedule, rank, batches, signatures, recorder, sends_all)
        for action in schedule.ranks[rank]:
            try:
                with nullcontext() if recorder is None else recorder.doing():
                    run.do(action)
            except Exception as error:
                kind = action.kind.name.lower()
                error.add_note(f"this was in {kind} of stage {action.stage}, micro-batch {action.microbatch}")
                raise
            if recorder is not None:
                recorder.holds(run.held)
        self._messages.finish()
        return [run.losses[number] for number in sorted(run.losses)]


class _Running:
    """One run of a schedule. What it keeps of a micro-batch in a stage has its place, ``(stage, micro-batch)``."""

    def __init__(
        self,
        interpreter: Interpreter,
        schedule: Schedule,
        rank: int,
        batches: Sequence[Any],
        signatures: Sequence[Any],
        recorder: Recorder | None,
        sends_all: bool,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self._stages, self._messages, self._work = interpreter._stages, interpreter._messages, interpreter._work
        self._headers, self._announced = interpreter._headers, interpreter._announced
        self._batches, self._signatures, self._recorder, self._sends_all = batches, signatures, recorder, sends_all
        actions = schedule.ranks[rank]
        self._last = schedule.stages - 1
        self._trains = any(kind in BACKWARDS for kind, _, _ in schedule.present)
        self._split, self._again = (  # places whose backward is in two parts, and whose activations are recomputed
            frozenset((stage, number) for kind, stage, number in actions if kind is wanted)
            for wanted in (Kind.INPUT, Kind.RECOMPUTE)
        )
        self._ends = {action.stage: action for action in actions if action.kind in LAST}  # last backwards of stages
        self._ends_stage = False  # the action under way is one of them
        self._arriving: dict[tuple[Kind, int, int], tuple[list[Tensor], list[Pending]]] = {}
        # From the forward to the backward, and to the send of the gradient.
        self._inputs: dict[Place, tuple[Tensor, ...]] = {}
        self._outputs: dict[Place, tuple[Tensor, ...]] = {}
        self._sent: dict[Place, Sequence[Pending]] = {}
        self._random: dict[Place, Sequence[Tensor]] = {}
        self._buffers: dict[Place, BufferMemory] = {}
        self._choices: dict[Place, Sequence[AbstractContextManager[Any]]] = {}  # of a forward, and of its repetition
        # Operands of weight gradients: those of the forward become due with the backward of the input.
        self._operands: dict[Place, Kept | None] = {}
        self._due: dict[Place, Kept] = {}

    @property
    def held(self) -> int:
        """Number of micro-batches whose activations are in memory, counted for each stage of the rank."""
        graphs = {place for place, outputs in self._outputs.items() if any(x.requires_grad for x in outputs)}
        return len(graphs | self._due.keys())

    def do(self, action: Action) -> None:
        """Do one action."""
        self._ends_stage = action == self._ends.get(action.stage)
        METHODS[action.kind](self, action.stage, action.microbatch)

    def _key(self, boundary: int, microbatch: int) -> tuple[int, Any]:
        return boundary, self._signatures[microbatch]

    def _end(self, stage: int, microbatch: int) -> None:
        """Give up what is kept of a micro-batch in a stage."""
        of_forward = self._inputs, self._outputs, self._sent, self._random, self._buffers, self._choices, self._operands
        for table in of_forward:
            table.pop((stage, microbatch), None)

    def _forward(self, stage: int, microbatch: int) -> None:
        place = stage, microbatch
        again = place in self._again
        if again:
            self._random[place] = random_state(self._messages.device)
            self._buffers[place], self._choices[place] = self._stages.buffers(), self._stages.choices()
        has_header = self._key(stage + 1, microbatch) in self._headers
        # What passes on depends on parameters, which is seen where there are graphs.
        graph = (torch.is_grad_enabled() and not again) or (not has_header and stage < self._last)
        with torch.set_grad_enabled(graph), self._choices[place][0] if again else nullcontext():
            result = self._compute(stage, microbatch, trains=self._trains and not again)
            if stage == self._last:
                self.losses[microbatch] = result.detach()
            else:
                self._hand_over(stage, microbatch, result)
        if again:
            self._buffers[place].note()
            # The graph of a first run was for the header only: the recomputation makes the one that counts.
            self._outputs[place] = tuple(tensor.detach() for tensor in self._outputs[place])
        if not self._trains and (stage == self._last or self._messages.is_here(stage + 1)):
            self._end(stage, microbatch)

    def _compute(self, stage: int, microbatch: int, trains: bool, again: BufferMemory | None = None) -> Any:
        """Return the outputs of a stage for the received inputs; the last one gives the loss."""
        place = stage, microbatch
        # A whole backward has no second part to which anything could be left, also beside others that have one.
        operands: Kept | None = [] if place in self._split else None
        self._operands[place] = operands
        header = self._headers.get(self._key(stage + 1, microbatch))
        result = self._stages.run(
            stage,
            lambda: self._work.stage_loss(stage, self._batches[microbatch], operands, trains),
            self._take(stage, microbatch) if stage > 0 else None,
            None if header is None else header.places,
            self._sends_all,
            again,
        )
        self._outputs[place] = (result,) if stage == self._last else result.tensors
        return result

    def _recompute(self, stage: int, microbatch: int) -> None:
        """Run the forward again, with the same random numbers, buffers and choices, for its graph."""
        place = stage, microbatch
        with drawing_from(self._random[place], self._messages.device), self._choices[place][1]:
            self._compute(stage, microbatch, trains=True, again=self._buffers[place])

    def _take(self, stage: int, microbatch: int) -> Handed:
        """Return the outputs of the stage before."""
        place = stage, microbatch
        if place not in self._inputs:  # a recomputation has them already
            self._inputs[place] = self._arrived(Kind.RECEIVE_ACTIVATION, stage, microbatch)
        inputs, header = self._inputs[place], self._headers[self._key(stage, microbatch)]
        for tensor, form in zip(inputs, header.forms, strict=True):
            tensor.requires_grad_(form.differentiable and torch.is_grad_enabled())
        return Handed(inputs, header)

    def _hand_over(self, stage: int, microbatch: int, handed: Handed) -> None:
        """Give the next stage the description of its inputs and, if it is on this rank, the inputs."""
        key, is_here = self._key(stage + 1, microbatch), self._messages.is_here(stage + 1)
        header = self._headers.get(key)
        if header is None:
            self._headers[key] = handed.header
        elif not header.fits(handed.header, torch.is_grad_enabled()):
            raise RuntimeError(
                f"stage {stage} handed over {header.forms} for inputs of these shapes before, and "
                f"{handed.header.forms} now; what passes between stages may depend on the shapes of the inputs only"
            )
        if is_here:
            # Detached, as a message would be: each stage has a graph, and a backward, of its own.
            self._inputs[stage + 1, microbatch] = tuple(tensor.detach() for tensor in handed.tensors)

    def _send_activation(self, stage: int, microbatch: int) -> None:
        place, key = (stage, microbatch), self._key(stage + 1, microbatch)
        # Right before the first tensors that it describes: receives follow in the order of sends, not of forwards.
        if key not in self._announced:
            self._announced.add(key)
            self._messages.send_header(self._headers[key], stage + 1)
        self._sent[place] = self._messages.send(self._outputs[place], stage + 1, ACTIVATION_TAG, "activations")
        if not self._trains:
            self._end(stage, microbatch)

    def _receive_activation(self, stage: int, microbatch: int) -> None:
        key = self._key(stage, microbatch)
        # Shapes follow from the inputs' shapes, so only the first micro-batch of a signature has to wait for a header.
        if key not in self._headers:
            self._headers[key] = self._messages.receive_header(stage - 1)
        self._arriving[Kind.RECEIVE_ACTIVATION, stage, microbatch] = self._messages.receive(
            self._headers[key].forms, stage - 1, ACTIVATION_TAG, "activations"
        )

    def _send_gradient(self, stage: int, microbatch: int) -> None:
        gradients = _gradients_of(self._inputs[stage, microbatch])
        self._end(stage, microbatch)
        self._messages.send(gradients, stage - 1, GRADIENT_TAG, "gradients of activations")

    def _receive_gradient(self, stage: int, microbatch: int) -> None:
        forms = [form for form in self._headers[self._key(stage + 1, microbatch)].forms if form.differentiable]
        self._arriving[Kind.RECEIVE_GRADIENT, stage, microbatch] = self._messages.receive(
            forms, stage + 1, GRADIENT_TAG, "gradients of activations"
        )

    def _backward(self, stage: int, microbatch: int) -> None:
        place = stage, microbatch
        roots = [tensor for tensor in self._outputs[place] if tensor.requires_grad or stage == self._last]
        gradients: Sequence[Tensor] | None = None
        if stage < self._last and self._messages.is_here(stage + 1):
            gradients = _gradients_of(self._inputs[stage + 1, microbatch])
            self._end(stage + 1, microbatch)
        elif stage < self._last:
            gradients = self._arrived(Kind.RECEIVE_GRADIENT, stage, microbatch)
            # It takes no time: the rank that sends these gradients has received the activations.
            _wait(self._sent[place])
        operands = self._operands[place]
        self._work.stage_backward(stage, roots, gradients, self._ends_stage, operands)
        # The send of the gradient ends the inputs' use, the weight gradient the operands'; either may come first.
        if operands is not None:
            self._due[place] = operands
        self._operands[place], self._outputs[place] = None, ()
        if stage == 0:
            self._end(stage, microbatch)

    def _weight(self, stage: int, microbatch: int) -> None:
        self._work.stage_weights(stage, self._due.pop((stage, microbatch)), self._ends_stage)

    def _arrived(self, kind: Kind, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        tensors, pending = self._arriving.pop((kind, stage, microbatch))
        _wait(pending)
        if self._recorder is not None:
            self._recorder.arrived()
        return tuple(tensors)


def _gradients_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the inputs; zeros for those that the loss does not depend on."""
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad]


def _wait(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()


METHODS: Mapping[Kind, Callable[[_Running, int, int], None]] = {
    Kind.FORWARD: _Running._forward,
    Kind.INPUT: _Running._backward,
    Kind.WEIGHT: _Running._weight,
    Kind.BACKWARD: _Running._backward,
    Kind.SEND_ACTIVATION: _Running._send_activation,
    Kind.RECEIVE_ACTIVATION: _Running._receive_activation,
    Kind.SEND_GRADIENT: _Running._send_gradient,
    Kind.RECEIVE_GRADIENT: _Running._receive_gradient,
    Kind.RECOMPUTE: _Running._recompute,
}
"""Kind of an action -> what carries it out."""
