"""Training by one plain process: the reference, and how far round-off may move its values.

It uses nothing of the engine but the classes of optimizers, schedules and the loss scale, which have tests of their
own. Every share of the global batch is computed on its own, as its rank does, and gradients are summed afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from math import inf, isfinite, isnan, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from zeromesh.apps.verify.plain_tables import PlainTables
from zeromesh.apps.verify.rows import SampleRows
from zeromesh.base.axes import data_size
from zeromesh.base.chain import Chain
from zeromesh.base.containers import map_tensors, moved
from zeromesh.base.dtypes import dtypes, explaining, kept_layers
from zeromesh.base.piece import Piece
from zeromesh.base.quantized_layers import change
from zeromesh.base.split import Held
from zeromesh.config.settings import Settings
from zeromesh.engine.batches import loss_of
from zeromesh.engine.computation import cast_inputs
from zeromesh.parallel.follow.split_activation import RULES
from zeromesh.parallel.tensor.float8_layers import use_alone
from zeromesh.shard.optim import factory, schedules
from zeromesh.shard.optim.groups import expert_matrices
from zeromesh.shard.optim.scaler import LossScaler

SAMPLED = 512  # elements of each parameter whose share of every micro-batch's gradient is kept, to find causes
SAFETY = 16.0  # times what round-off did in trials; two of them see a scalar's whole range only so far
TRIALS = 2
WRITTEN = 1.01  # times its value: what scripts write between a backward and its update
EXACT = 2.0**-22  # relative round-off of a few operations in fp32


@dataclass(frozen=True)
class Trial:
    """One comparison: steps of training in one precision."""

    name: str  # the precision
    settings: Settings  # of the engine
    rows: SampleRows  # gives micro-batches
    dtype: torch.dtype | None  # of the model's floating-point values before training; None leaves them as they are
    sizes: Mapping[str, int]  # ranks by axis
    micro_batches: int  # of an update, on each rank
    steps: int  # number of updates
    device: torch.device  # of the plain process. Devices have kernels of their own, so it is the ranks'
    # Parameter that both sides multiply by ``WRITTEN`` between the last backward and its update; empty: none.
    written: str = ""

    @property
    def shares(self) -> int:
        """Parts of the global batch."""
        return data_size(self.sizes)

    def model(self, path: Path) -> nn.Module:
        """Return a new copy of the model, in training mode and the dtype of this trial."""
        model: nn.Module = torch.load(path, map_location="cpu", weights_only=False)
        # transformers notes what models of a class give beside their results, such as the logits of routers, as it
        # builds one, which nobody has done in this process.
        library = sys.modules.get("transformers.utils.output_capturing")
        for module in model.modules():
            if library is not None and hasattr(module, "_can_record_outputs"):
                library._CAN_RECORD_REGISTRY[module] = module._can_record_outputs
        return (model if self.dtype is None else model.to(self.dtype)).train()

    def inputs(self, step: int, share: int, micro_batch: int) -> Any:
        """Return a micro-batch as the model gets it."""
        return self.rows.at(step, share, micro_batch, self.dtype)

    def widened(self) -> AbstractContextManager[Any]:
        """Return the context of forward and backward: in float64, casts to float32 do nothing."""
        return wide() if self.dtype is torch.float64 else nullcontext()


@dataclass(frozen=True)
class PlainStep:
    """One update: what was computed, by name.

    ``values`` has ``gradient/NAME`` (before clipping), ``state KEY/NAME``, ``master/NAME``,
    ``buffer SHARE/NAME`` and ``loss/SHARE.MICRO_BATCH``, ``norm/``, ``rate/GROUP``.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    samples: dict[str, torch.Tensor] = field(default_factory=dict)  # of each gradient: (shares x micro-batches, n)
    bounds: dict[str, float] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # ``master/NAME`` before the first update
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of parameters as the forward computes with them
    clip: float = 1.0
    scale: float = 1.0
    skipped: bool = False


class PlainTraining:
    """One process that trains a model; ``noise`` is the relative size of random errors of weights and activations."""

    def __init__(self, path: Path, trial: Trial, noise: float = 0.0, seed: int = 0) -> None:
        self._trial, self._noise = trial, noise
        self._generator = torch.Generator().manual_seed(seed)
        self.model = trial.model(path).to(trial.device)
        precision = trial.settings.precision
        self._precision = precision
        named = dict(self.model.named_parameters())
        self.masters = {
            name: nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True))
            for name, p in named.items()
            if p.requires_grad
        }
        self.frozen = {name: p.detach().clone() for name, p in named.items() if not p.requires_grad}
        self._cast(self.model)
        chosen = trial.settings.float8
        if chosen.enabled:
            skip = [*chosen.skip, *kept_layers(self.model, precision)]
            use_alone(self.model, chosen.recipe == "rowwise", skip, trial.device)
        self._computed = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if noise:
            # Ranks that share a layer round the sums of its output in another order than those of one process.
            for module in self.model.modules():
                if next(module.children(), None) is None:
                    module.register_forward_hook(lambda _, __, output: map_tensors(output, self._with_errors))
        self._tables = PlainTables(self.model, trial.settings, [*self.masters])
        self.optimizer = self._optimizer()
        schedule = trial.settings.scheduler
        self.scheduler = (
            None if schedule is None else schedules.build(schedule.type, dict(schedule.params), self.optimizer)
        )
        self.scaler = LossScaler(precision.loss_scale) if precision.loss_scale else None
        self._buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        state = self.model.state_dict(keep_vars=True)
        self._persistent = {name for name in self._buffers if name in state}
        self._own: list[dict[str, torch.Tensor]] = [{} for _ in range(trial.shares)]

    def _cast(self, model: nn.Module) -> None:
        """Give parameters and buffers the dtypes of the run."""
        chosen = dtypes(model, self._precision)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                change(parameter, data=parameter.data.to(chosen[id(parameter)]))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(chosen[id(buffer)])

    def _optimizer(self) -> torch.optim.Optimizer:
        chosen = self._trial.settings.optimizer
        assert chosen is not None
        pieces = {n: Piece(n, Held(tuple(p.shape)), 0, p.numel(), p) for n, p in self.masters.items()}
        shapes = {name: p.shape for name, p in self.masters.items()}
        # Every piece is whole, and there is no other rank.
        alone: Any = SimpleNamespace(
            buckets=[[*shapes]],
            sum=lambda vector: vector,
            gather=lambda bucket, values, parts: {name: value.view(shapes[name]) for name, value in values.items()},
        )
        matrices = partial(expert_matrices, self.model)
        groups = []
        for group in self._tables.groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(factory.ParameterGroup(tuple(pieces[name] for name in group["params"]), options))
        return factory.build(chosen.type, dict(chosen.params), groups, alone, False, matrices=matrices)

    def steps(self) -> list[PlainStep]:
        """Train, and return the updates, up to the first one that overflows."""
        steps: list[PlainStep] = []
        while len(steps) < self._trial.steps and not (steps and steps[-1].skipped):
            steps.append(self._step(len(steps)))
        return steps

    def probe(self, seed: int) -> float:
        """Return the loss of the first micro-batch with generators seeded so."""
        torch.manual_seed(seed)
        return float(self._gradients(0, 0, 0, 1.0).double())

    def _step(self, number: int) -> PlainStep:
        trial = self._trial
        values = {f"frozen/{name}": value for name, value in self.frozen.items()}
        first = self.masters if number == 0 else {}
        start = {f"master/{name}": master.detach().clone() for name, master in first.items()}
        scale = self.scaler.scale if self.scaler else 1.0
        sums: dict[str, torch.Tensor] = {}
        count = trial.shares * trial.micro_batches
        lengths = {name: len(sample_places(master.numel())) for name, master in self.masters.items()}
        samples = {name: torch.zeros(count, length, dtype=torch.float64) for name, length in lengths.items()}
        buffers: dict[str, torch.Tensor] = {}
        for share in range(trial.shares):
            self._restore(share)
            for micro_batch in range(trial.micro_batches):
                loss = self._gradients(number, share, micro_batch, scale)
                values[f"loss/{share}.{micro_batch}"] = loss.double()
                for name, computed in self._computed.items():
                    if (gradient := computed.grad) is not None:
                        samples[name][share * trial.micro_batches + micro_batch] = sampled(dense(gradient))
                        wide = gradient.to(self.masters[name].dtype)
                        sums[name] = sums[name] + wide if name in sums else wide.clone()
                self.model.zero_grad()
            self._own[share] = {n: b.detach().clone() for n, b in self.model.named_buffers()}
            buffers |= {f"buffer {share}/{name}": value for name, value in self._own[share].items()}
        # Sums of parameters, not means, where the configuration says so; each share's own mean over micro-batches.
        factor = 1.0 / (scale * (1 if trial.settings.gradient_allreduce_op == "sum" else trial.shares))
        norm = sqrt(sum(float(dense(total).double().square().sum()) for total in sums.values())) * factor
        skipped = not isfinite(norm)
        if self.scaler and not skipped:
            self.scaler.update(False)
        limit = trial.settings.gradient_clipping
        clip = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        values["norm/"] = torch.tensor(norm, dtype=torch.float64)
        for group, options in enumerate(self.optimizer.param_groups):
            values[f"rate/{group}"] = torch.tensor(float(options["lr"]), dtype=torch.float64)
        for name, master in self.masters.items():
            is_dense = name in sums and name not in self._tables.names
            change(master, grad=sums[name].mul(factor * clip) if is_dense else None)
            if name in sums:
                values[f"gradient/{name}"] = dense(sums[name]).mul(factor)
        if trial.written and number == trial.steps - 1:
            self.masters[trial.written].data.mul_(WRITTEN)
        if not skipped:
            self.optimizer.step()
            of_tables = {name: sums[name].mul(factor * clip) for name in self._tables.names & sums.keys()}
            self._tables.update(self.optimizer, self.masters, of_tables)
            if self.scheduler is not None:
                self.scheduler.step()
        # Every rank takes the first one's running statistics at an update; what is no part of the state stays its own.
        self._buffers |= {name: self._own[0][name] for name in self._persistent}
        values |= buffers | {f"master/{name}": master.detach().clone() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, state in (self._tables.states.get(name) or self.optimizer.state.get(master, {})).items():
                if isinstance(state, torch.Tensor):
                    values[f"state {key}/{name}"] = state.detach().clone()
        values, start = ({key: value.cpu() for key, value in by_name.items()} for by_name in (values, start))
        # Rows of tables rest in their masters, and are cast on their way to a forward.
        chosen = {n: p.dtype for n, p in self.model.named_parameters() if n not in self._tables.names}
        return PlainStep(values, samples, {}, start, chosen, clip, scale, skipped)

    def _restore(self, share: int) -> None:
        """Begin a share with the buffers that its rank has."""
        buffers = self._own[share]
        for name, buffer in self.model.named_buffers():
            value = self._buffers[name] if name in self._persistent else buffers.get(name, self._buffers[name])
            buffer.detach().copy_(value)

    def _with_errors(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with random errors of its elements, if the process has them."""
        if not self._noise or not tensor.is_floating_point():
            return tensor
        errors = torch.randn(tensor.shape, generator=self._generator, dtype=torch.float64)
        return (tensor.double() * (1 + self._noise * errors.to(tensor.device))).to(tensor.dtype)

    def _gradients(self, number: int, share: int, micro_batch: int, scale: float) -> torch.Tensor:
        trial = self._trial
        with torch.no_grad():
            for name, computed in self._computed.items():
                computed.data.copy_(self._with_errors(self.masters[name].detach()))
        inputs = cast_inputs(moved(trial.inputs(number, share, micro_batch), trial.device), self._precision)
        kind = self._precision.autocast
        with (
            trial.widened(),
            explaining(self.model, self._precision.compute, trial.device, "data_types.keep_in_fp32_modules"),
        ):
            with torch.autocast(trial.device.type, dtype=kind, cache_enabled=False) if kind else nullcontext():
                loss = loss_of_model(inputs, self.model, self.model)
            (loss * (scale / trial.micro_batches)).backward()
        return loss.detach()


def loss_of_model(inputs: Any, model: nn.Module, call: Callable[..., Any]) -> torch.Tensor:
    """Return the loss of a micro-batch; ``call`` is the model, or its engine."""
    chain = isinstance(model, Chain)
    return loss_of(inputs, call, getattr(model, "loss_fn", None) if chain else None, chain)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or the dense form of a sparse one."""
    return tensor.to_dense() if tensor.layout is torch.sparse_coo else tensor


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements of a tensor, spread evenly: 1-D."""
    return tensor.detach().reshape(-1)[sample_places(tensor.numel())].clone()


def sample_places(elements: int) -> torch.Tensor:
    """Return the places of the elements that ``sampled`` takes."""
    return torch.linspace(0, max(elements - 1, 0), min(elements, SAMPLED), dtype=torch.float64).long()


CASTS: tuple[tuple[Any, str], ...] = (
    *((torch.Tensor, name) for name in ("to", "float", "type", "softmax", "log_softmax", "sum", "mean", "cumsum")),
    *((torch, name) for name in ("softmax", "log_softmax", "sum", "mean", "cumsum")),
    *((nn.functional, name) for name in ("softmax", "log_softmax")),
)
"""Functions with which models compute in float32 whatever they are given."""


@contextmanager
def wide() -> Iterator[None]:
    """Keep float64 where a model casts to float32, as losses, norms and rotary embeddings of transformers do."""
    # Their round-off would be that of float32, and bounds so wide that small mistakes go unseen. Functions are
    # replaced, because a mode of torch does not reach what is recomputed in the backward.
    functions = [getattr(owner, name) for owner, name in CASTS]
    replacements = {old: _kept_wide(old, name) for old, (_, name) in zip(functions, CASTS, strict=True)}
    with ExitStack() as stack:
        for old, (owner, name) in zip(functions, CASTS, strict=True):
            stack.enter_context(patch.object(owner, name, replacements[old]))
        # Of activations that are split over ranks: what replaces a function has its rule.
        stack.enter_context(patch.dict(RULES, {new: RULES[old] for old, new in replacements.items() if old in RULES}))
        yield


def _kept_wide(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if name == "float":
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*args, **kwargs)

    return call


class Narrowest(torch.overrides.TorchFunctionMode):
    """Notes the narrowest floating-point dtype of results that depend on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and look at its result."""
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad and x.numel() > 1:
                self.dtype = max(self.dtype, x.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result


def reference(path: Path, trial: Trial, terms: int) -> tuple[list[PlainStep], torch.dtype]:
    """Return the updates of the plain process with their bounds, and the narrowest dtype that it computes in.

    Bounds come from trials: the process is run again with weights and outputs of modules that have random errors of the
    size of the unit round-off, times the root of the longest sum's terms where sums are computed in that precision.
    What that moves, round-off in another order of sums may move as well. docs/adr/0027-verification.md has the reasons.
    """
    with Narrowest() as seen:
        steps = PlainTraining(path, trial).steps()
    asked = trial.settings.precision
    used = [seen.dtype, *filter(None, (asked.compute, asked.communicate, asked.accumulate))]
    used += [torch.bfloat16] if trial.settings.has_narrow_states else []  # whose rounding the plain process lacks
    narrow = max(used, key=lambda dtype: torch.finfo(dtype).eps)
    unit = torch.finfo(narrow).eps / 2
    # The rounding errors of a sum grow with the root of its terms, at the worst with their number. Products of matrices
    # of 16 bits are summed in fp32, and rounded once.
    noise = unit * {64: float(terms), 32: sqrt(terms)}.get(torch.finfo(narrow).bits, 1.0)
    trials = [PlainTraining(path, trial, noise, seed).steps() for seed in range(1, TRIALS + 1)]
    if any(run[-1].skipped for run in (steps, *trials)):
        return [replace(steps[-1], skipped=True)], narrow
    start = steps[0].start
    bounded = [
        replace(step, bounds=_bounds(step, [other[number] for other in trials], noise, start))
        for number, step in enumerate(steps)
    ]
    return bounded, narrow


def _bounds(
    step: PlainStep, trials: Sequence[PlainStep], floor: float, start: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    sizes, moved, scales = {}, {}, {}
    for key, value in step.values.items():
        # Masks among buffers may hold infinities; elsewhere these make the bound infinite, which never counts as equal.
        sizes[key] = largest(value[value.isfinite()] if key.startswith("buffer") else value)
        if all(key in other.values for other in trials):
            moved[key] = max(distance(other.values[key], value) for other in trials)
            # Of a weight, only what training has added to it depends on what was computed.
            scales[key] = distance(value, start[key]) if key in start else sizes[key]
    # A single number may by chance not move at all: values of one kind share the median of how far they moved.
    usual: dict[str, list[float]] = {}
    for key, far in moved.items():
        if scales[key] > 0:
            usual.setdefault(key.split("/")[0], []).append(far / scales[key])
    medians = {kind: sorted(ratios)[len(ratios) // 2] for kind, ratios in usual.items()}
    bounds = {}
    for key, far in moved.items():
        kind = key.split("/")[0]
        # Masters, rates and what is not computed are kept in at least fp32. Others may be rounded to a neighbour twice.
        exact = 4 * floor if kind not in ("master", "rate", "frozen") else min(floor, EXACT)
        bounds[key] = SAFETY * max(far, medians.get(kind, 0.0) * scales[key]) + exact * sizes[key]
    return bounds


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; infinity where an element is not a number."""
    size = float(tensor.double().abs().max()) if tensor.numel() else 0.0
    return inf if isnan(size) else size


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference of an element; equal infinities do not differ."""
    got, expected = got.double(), expected.double()
    return largest(torch.where(got == expected, 0.0, got - expected))


def is_alike(step: PlainStep) -> bool:
    """Return whether two micro-batches have the same gradients; that hides when one takes the other's place."""
    rows = zip(*step.samples.values(), strict=True)  # of each micro-batch, its elements of every gradient
    return any(all(map(torch.equal, first, second)) for first, second in combinations(rows, 2))
