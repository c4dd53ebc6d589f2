"""Forward and backward of an engine's model on one rank: phases, dtypes, and checks of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zeromesh.base.axes import AXES
from zeromesh.base.chain import Chain
from zeromesh.base.containers import map_tensors, moved
from zeromesh.base.dtypes import explaining
from zeromesh.base.precision import Precision
from zeromesh.comm.course import EVALUATES, this_rank
from zeromesh.engine import batches
from zeromesh.engine.curriculum import LengthCurriculum
from zeromesh.engine.first_batches import FirstBatches
from zeromesh.engine.observe.observer import Observer
from zeromesh.engine.reports import explained
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.parallel.expert.balance import Balance


def cast_inputs(inputs: Any, precision: Precision) -> Any:
    """Cast floating-point tensors in nested containers to the dtype that a run computes in, if it casts inputs."""
    if precision.compute is None or not precision.cast_inputs:
        return inputs
    return map_tensors(inputs, partial(batches.cast, dtype=precision.compute))


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Return the context of a forward under ``torch.autocast``, if the run has it."""
    if precision.autocast is None:
        return nullcontext()
    # Without a cache: it would keep a second copy of every weight until the end of the forward.
    return torch.autocast(device.type, dtype=precision.autocast, cache_enabled=False)


class Computation:
    """Forward and backward of one model; ``explain`` returns a note for errors that say that memory is used up."""

    def __init__(
        self,
        sharded: ShardedModel,
        precision: Precision,
        observer: Observer,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        sizes: batches.MicroBatchSizes,
        explain: Callable[[], str],
        curriculum: LengthCurriculum | None = None,
        balance: Balance | None = None,
    ) -> None:
        # No reference to the engine: hooks of the model lead here, and the engine goes away with its last user.
        self._sharded, self._model, self._mesh = sharded, sharded.model, sharded.mesh
        self._precision, self._observer, self._loss_fn = precision, observer, loss_fn
        self._sizes, self._explain = sizes, explain
        self.curriculum = curriculum  # None: samples are used as they are
        self._balance = balance  # of experts; None where nobody counts their tokens
        self._sharing = [axis for axis, role in AXES.items() if role.same_loss and self._mesh.sizes[axis] > 1]
        self._has_stages = self._mesh.sizes["pipeline"] > 1
        self._has_compared = False
        self.first_batches = FirstBatches(self._mesh)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of the run in this context, and explain a shortage of memory."""
        mismatch = explaining(
            self._model, self._precision.compute, self._mesh.device, "data_types.keep_in_fp32_modules"
        )
        with this_rank.within(self._described(name)), self._observer.phase(name), explained(self._explain), mismatch:
            yield

    def _described(self, phase: str) -> str:
        """Return what a phase is called by those who wait in it."""
        accumulation = self._sharded.accumulation
        place = f"micro-batch {accumulation.backwards + 1} of {accumulation.steps}"
        which = f" of {place}" if accumulation.steps > 1 else ""
        return {
            "forward": f"the forward{which}",
            "backward": f"the backward{which}",
            "evaluation": EVALUATES,
            "step": "the step",
        }[phase]

    def _computing(self) -> AbstractContextManager[None]:
        return self.phase("forward" if torch.is_grad_enabled() else "evaluation")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on this rank's share of a micro-batch, with its inputs cast."""
        if torch.is_grad_enabled():
            # Losses do not show that ranks of one batch got different inputs: parts of activations
            # are summed over them.
            if self._sharing:
                self._note_inputs((args, kwargs))
            if self._model.training and not self._has_stages:
                self.note_size((args, kwargs))
        if self.curriculum is not None and self._model.training:
            args, kwargs = self.curriculum.for_model(args, kwargs)
        args, kwargs = cast_inputs((args, kwargs), self._precision)
        # ``unwinding`` resets the model's hooks where an error leaves its forward in the middle.
        with self._computing(), self._sharded.events.unwinding(), autocast(self._mesh.device, self._precision):
            return self._model(*args, **kwargs)

    def hearing_routers(self, hears: bool) -> AbstractContextManager[None]:
        """Count the choices of routers in this context, unless another forward makes the graph of this one."""
        return nullcontext() if self._balance is None else self._balance.listener.hearing(hears)

    def method(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return another method of the model as one that may use its parameters."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with (
                this_rank.within(f"{getattr(function, '__name__', 'a method of the model')}()"),
                self._computing(),
                self._sharded.events.computing(),
                autocast(self._mesh.device, self._precision),
            ):
                return function(*args, **kwargs)

        return call

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch, which is moved to the device; see ``batches.loss_of``."""
        batch = moved(batch, self._mesh.device)
        if self.curriculum is not None and self._model.training:
            batch = self.curriculum.cut(batch)  # with the labels of ``loss_fn``, which the model does not see
        return batches.loss_of(batch, self.forward, self._loss_fn, isinstance(self._model, Chain))

    def differentiate(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        last: bool,
        retain_graph: bool = False,
        reduces: bool = True,
    ) -> None:
        """Let autograd compute gradients, and reduce those of finished units.

        ``last`` says that an update follows, ``reduces`` that units are reduced here.
        """
        with self.phase("backward"), self._sharded.events.backward.running(roots, last, reduces):
            if roots:  # none on a rank that only takes part in what others reduce
                torch.autograd.backward(roots, gradients, retain_graph=retain_graph)

    def note_size(self, inputs: Any) -> None:
        """Compare a micro-batch with the configured size, and keep its samples for a comparison of the ranks."""
        self.first_batches.note(inputs)
        size = self._sizes.compare(inputs)
        self._sharded.accumulation.samples.append(float("nan") if size is None else float(size))

    def _note_inputs(self, inputs: Any) -> None:
        """Keep a checksum of the whole numbers among the inputs, which ranks that share a batch compare."""
        noted = self._sharded.accumulation.inputs
        noted.append(batches.checksum(inputs, self._mesh.device))
        # The first inputs at once, because tensors of different shapes cannot be summed; later ones with the update.
        if not self._has_compared:
            self._has_compared = True
            for axis in self._sharing:
                checksums = self._mesh.group(axis).exchange(noted[-1].reshape(1)).flatten().tolist()
                ranks = next(line for line in self._mesh.lines(axis) if self._mesh.rank in line)
                batches.require_same_inputs(ranks, checksums)
