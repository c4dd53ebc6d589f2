"""``DistributedOptimizer``: an optimizer whose gradients are reduced over the ranks during backward."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from zeromesh.horovod.functions import broadcast_value
from zeromesh.horovod.negotiation import ReduceOp
from zeromesh.horovod.operations import (
    Adasum,
    Average,
    Compression,
    Sum,
    allreduce,
    grouped_allreduce_async_,
    operation,
    sparse_allreduce_async,
)
from zeromesh.horovod.sets import ProcessSet, global_process_set, members_of

Parameter = torch.Tensor


@dataclass(frozen=True)
class Options:
    """Arguments of ``DistributedOptimizer`` about the reduction."""

    compression: Any
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together, under one name."""

    name: str
    parameters: list[Parameter]
    ready: set[int] = field(default_factory=set)  # ids of those whose gradients are complete
    finish: Callable[[], None] | None = None  # waits for the reduction in progress, and writes its results

    def begin(self, finish: Callable[[], None]) -> None:
        """Note a reduction in progress."""
        self.finish = finish

    def end(self) -> RuntimeError | None:
        """Wait for the reduction, if there is one, and be ready for the next; return its failure."""
        finish, self.finish = self.finish, None
        self.ready.clear()
        try:
            if finish is not None:
                finish()
        except RuntimeError as error:
            return error
        return None


class Reduction:
    """Reduces gradients as backward completes them, and counts its passes.

    Args:
        names: name of each parameter.
        buckets: all parameters, each in one bucket.
        passes: number of backward passes of an update.
        options: how to reduce.
    """

    def __init__(self, names: dict[Parameter, str], buckets: list[Bucket], passes: int, options: Options) -> None:
        self.passes = passes
        self.options = options
        self.buckets = buckets
        self._names = names
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._seen: dict[Parameter, int] = {}  # passes since the last update
        self._filling = False
        members = members_of(options.process_set, "DistributedOptimizer")
        several = members.rank >= 0 and members.size > 1
        self.adasum = several and options.op is Adasum  # combines changes of parameters, not gradients
        self.active = several and not self.adasum
        # The hooks must not keep this alive: a script may make another optimizer for the same parameters.
        notice = weakref.WeakMethod(self._after_gradient)
        for parameter in self._trained(self._bucket_of) if self.active else ():
            parameter.register_post_accumulate_grad_hook(lambda leaf: (notice() or _ignore)(leaf))

    @property
    def under_way(self) -> bool:
        """True if gradients have been computed that no update has used."""
        return bool(self._seen)

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes of an update."""
        self.passes = _passes(passes)

    def reset(self) -> list[RuntimeError]:
        """Wait for what is in progress, and forget the passes so far; return failures."""
        self._seen = {}
        return [error for bucket in self.buckets if (error := bucket.end()) is not None]

    def finish(self) -> None:
        """Reduce what has not been, and wait until all gradients are those of all ranks."""
        for bucket in self.buckets if self.active else ():
            # Those that were frozen when the optimizer was made may be trained now, without a hook.
            if bucket.finish is None and self._trained(bucket.parameters):
                self._start(bucket)
        # All have ended before one raises, so that a script may go on after the error.
        for error in self.reset():
            raise error

    @staticmethod
    def _trained(parameters: Iterable[Parameter]) -> list[Parameter]:
        return [parameter for parameter in parameters if parameter.requires_grad]

    def joint_loss(self, loss: Any) -> Any:
        """Return the ranks' joint loss: L-BFGS decides by it, and ranks must decide alike."""
        if not isinstance(loss, torch.Tensor | float) or self.options.op not in (Average, Sum):
            return loss
        value = torch.as_tensor(loss).detach()
        return allreduce(value, op=self.options.op, process_set=self.options.process_set)

    def _after_gradient(self, parameter: Parameter) -> None:
        if self._filling:
            return
        seen = self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if seen > self.passes:
            raise AssertionError(
                f"the gradient of {self._names[parameter]} was computed {seen} times since the last step(), but "
                f"backward_passes_per_step is {self.passes}; call step() or synchronize() before, or raise "
                "backward_passes_per_step to add up gradients locally"
            )
        bucket = self._bucket_of[parameter]
        if seen == self.passes:
            bucket.ready.add(id(parameter))
        if len(bucket.ready) == len(self._trained(bucket.parameters)):
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        """Start to reduce the gradients of a bucket; those that this rank has not computed are zeros."""
        parameters = self._trained(bucket.parameters)
        self._fill(parameters)
        gradients = [_gradient(parameter) for parameter in parameters]
        options = self.options
        if len(gradients) == 1 and gradients[0].is_sparse and not options.sparse_as_dense:
            handle = sparse_allreduce_async(gradients[0], bucket.name, options.op, options.process_set)
            bucket.begin(lambda: _replace(gradients[0], handle()))
            return
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        bucket.begin(_reduce(bucket.name, dense, options, lambda place, result: _replace(gradients[place], result)))

    def _fill(self, parameters: Sequence[Parameter]) -> None:
        missing = [parameter for parameter in parameters if parameter.grad is None]
        if missing:
            self._filling = True
            try:
                # Autograd makes the gradients: other ranks may have computed them, and wait for these.
                torch.autograd.backward(missing, [torch.zeros_like(parameter) for parameter in missing])
            finally:
                self._filling = False


def _reduce(
    name: str, tensors: list[torch.Tensor], options: Options, take: Callable[[int, torch.Tensor], Any]
) -> Callable[[], None]:
    """Start to reduce tensors, compressed; return the function that waits, and gives ``take`` each place and result."""
    pairs = [options.compression.compress(tensor) for tensor in tensors]
    split = options.predivide if options.op is Average else 1.0
    sent = [tensor for tensor, _ in pairs]
    handle = grouped_allreduce_async_(
        sent,
        name=name,
        op=options.op,
        prescale_factor=1.0 / split,
        postscale_factor=split,
        process_set=options.process_set,
    )

    def finish() -> None:
        for place, (result, (_, ctx)) in enumerate(zip(handle(), pairs, strict=True)):
            take(place, options.compression.decompress(result, ctx))

    return finish


def _ignore(parameter: Parameter) -> None:
    """Do nothing with a gradient whose optimizer is gone."""


def _gradient(parameter: Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def _replace(gradient: torch.Tensor, result: torch.Tensor) -> None:
    if gradient is result:
        return
    if gradient.is_sparse:
        gradient.zero_().add_(result if result.is_sparse else result.to_sparse(gradient.sparse_dim()))
    else:
        gradient.copy_(result)


class _Distributed(torch.optim.Optimizer):
    """Methods that ``DistributedOptimizer`` puts before those of the optimizer's own class."""

    _reduction: Reduction
    _synchronized: bool
    _synchronizes: bool

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes of an update."""
        return self._reduction.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes of an update."""
        self._reduction.set_passes(passes)

    def synchronize(self) -> None:
        """Wait until all gradients are those of all ranks; to clip them before ``step``, for example."""
        self._reduction.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` take the gradients as they are, since ``synchronize`` was called before."""
        if self._reduction.adasum:
            raise AssertionError(
                "skip_synchronize() has no meaning with op=hvd.Adasum, which combines changes in step()"
            )
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the gradients of all ranks, and update the parameters."""
        if self._reduction.adasum:
            return self._adasum_step(closure)
        if self._synchronizes and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                "it reduces the gradients again; write `with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        self._synchronized = False
        if closure is not None and self._reduction.active:
            # Optimizers call a closure that runs backward: its gradients are complete at its end.
            def reduced() -> Any:
                loss = closure()
                self._reduction.finish()
                return self._reduction.joint_loss(loss)

            return super().step(reduced)
        if self._synchronizes:
            self._reduction.finish()
        return super().step(closure)

    def _adasum_step(self, closure: Any) -> Any:
        """Update by this rank's gradients alone, and combine the ranks' changes of the parameters."""
        parameters = [parameter for bucket in self._reduction.buckets for parameter in bucket.parameters]
        before = [parameter.detach().clone() for parameter in parameters]
        loss = super().step(closure)
        with torch.no_grad():
            changes = [parameter - old for parameter, old in zip(parameters, before, strict=True)]
            _reduce(
                "adasum.changes",
                changes,
                self._reduction.options,
                lambda place, change: parameters[place].copy_(before[place] + change),
            )()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; AssertionError between backward and ``step``, when they are being reduced."""
        if self._reduction.under_way:
            raise AssertionError(
                "zero_grad() was called after backward and before step() or synchronize(), while gradients are being "
                "reduced; call it after step()"
            )
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: Any) -> None:
        """Raise ValueError: the gradients of the new group would be those of one rank."""
        raise ValueError("add groups of parameters to the optimizer before hvd.DistributedOptimizer takes it")

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the optimizer's states, and forget backward passes so far."""
        self._reduction.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of a class derived from the given one's, whose gradients are reduced over the ranks.

    Args:
        optimizer: is used up: its groups and states are those of the result.
        named_parameters: ``model.named_parameters()``; the names are those of the reductions, unique in the run.
        compression: dtype of gradients on the way.
        backward_passes_per_step: passes whose gradients are added up on each rank before they are reduced.
        op: Average, Sum or another; Adasum combines the ranks' changes of the parameters.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and multiplied after.
        num_groups: deprecated name of ``groups``.
        groups: number of messages, or lists of parameters to reduce in one message; the others go alone.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: ranks that take part; on others the optimizer is as before.

    Raises:
        ValueError: names that are not unique or lack a parameter, or arguments that contradict each other.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already; pass the one that it was made of")
    reduction_op = operation(None, op)
    if gradient_predivide_factor != 1.0 and reduction_op is not Average:
        raise ValueError(f"gradient_predivide_factor needs op Average, not {reduction_op.name}; leave it out")
    groups = num_groups if groups is None and num_groups else groups
    names = _names(optimizer, named_parameters)
    options = Options(compression, reduction_op, gradient_predivide_factor, sparse_as_dense, process_set)
    members = members_of(process_set, "DistributedOptimizer")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if groups is not None and members.rank >= 0:
        # In the order of one rank: ranks may have other orders of parameters.
        order = broadcast_value([names[p] for p in parameters], members.ranks[0], "groups", process_set)
        places = {name: place for place, name in enumerate(order)}
        parameters.sort(key=lambda parameter: places.get(names[parameter], len(places)))
    buckets = [Bucket(names[part[0]], part) for part in _split(parameters, groups) if part]
    reduction = Reduction(names, buckets, _passes(backward_passes_per_step), options)
    kind = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    distributed: Any = object.__new__(kind)
    # A schedule made before has put a ``step`` there that is the other object's.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    vars(distributed).update(_reduction=reduction, _synchronized=False, _synchronizes=True)
    return distributed


def _passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}, but must be at least 1")
    return passes


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    """Return the name of each parameter."""
    pairs = (
        list(named)
        if named is not None
        else [
            (f"allreduce.noname.{number}.{place}", parameter)
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        ]
    )
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters must be pairs of a name and a parameter, as model.named_parameters() gives")
    seen = [name for name, _ in pairs]
    if twice := sorted({name for name in seen if seen.count(name) > 1}):
        raise ValueError(f"named_parameters has several parameters of the name {', '.join(twice)}; make names unique")
    names = {parameter: name for name, parameter in pairs}
    unnamed = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, the first of shape "
            f"{tuple(unnamed[0].shape)}; give the names of all models whose parameters the optimizer has"
        )
    return names


def _split(parameters: list[Parameter], groups: Any) -> list[list[Parameter]]:
    """Return the parameters of each message."""
    if groups is None or groups == 0:
        return [[parameter] for parameter in parameters]
    if isinstance(groups, int) and groups > 0:
        size, more = divmod(len(parameters), groups)
        ends = [number * size + min(number, more) for number in range(groups + 1)]
        return [parameters[start:end] for start, end in pairwise(ends)]
    if not isinstance(groups, list) or any(not isinstance(p, torch.Tensor) for part in groups for p in part):
        raise ValueError(f"groups is {groups!r}, but must be a number that is not negative, or lists of parameters")
    grouped = [parameter for part in groups for parameter in part]
    if len(set(grouped)) < len(grouped):
        raise ValueError("groups has a parameter twice; name each at most once")
    parameter_set = set(parameters)
    parts = [[parameter for parameter in part if parameter in parameter_set] for part in groups]
    return parts + [[parameter] for parameter in parameters if parameter not in set(grouped)]


__all__ = ["DistributedOptimizer"]
