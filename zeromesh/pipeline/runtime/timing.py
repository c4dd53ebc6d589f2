"""Measured times of a model's blocks: each runs alone, as a stage, with meaningless values."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.model.containers import tensors_of
from zeromesh.pipeline.runtime.elsewhere import Elsewhere
from zeromesh.pipeline.runtime.samples import ModelInput, undisturbed
from zeromesh.pipeline.runtime.stage import Handed, Stages, TensorForm
from zeromesh.pipeline.runtime.trace import copy_of
from zeromesh.pipeline.schedule.partition import Blocks

Prepare = Callable[[nn.Module], Callable[..., Any]]
"""Prepare a copy of the model as for training; return the function to call in its place."""

REPETITIONS, MOST_REPETITIONS = 3, 20
ENOUGH = 0.2
"""Seconds after which a block is not run again."""


def measured(
    model: nn.Module, blocks: Blocks, device: torch.device, dtype: torch.dtype | None, prepare: Prepare
) -> Blocks:
    """Return the blocks with the seconds of the forward and backward of each; unchanged if there is no sample.

    What is computed between a block and the next one counts for it. What comes before the blocks, which every stage
    computes again, counts for the first. Only one block's parameters are there at a time, and blocks that are alike are
    measured once.

    Args:
        model: its parameters may be on any device, meta included; it is not changed.
        blocks: the model's.
        device: on which it is to run.
        dtype: of parameters, but for those of batch norms; None where it is their own.
        prepare: of a copy of the model, with buffers.
    """
    if blocks.sample is None:
        return blocks
    with undisturbed(device), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        timing = _Timing(model, blocks, blocks.sample, device, dtype, prepare)
        return replace(blocks, seconds=timing.run())


class _Timing:
    def __init__(
        self, model: nn.Module, blocks: Blocks, sample: ModelInput, device: torch.device, dtype: torch.dtype | None,
        prepare: Prepare,
    ) -> None:  # fmt: skip
        self._blocks, self._device = blocks, device
        self._model = copy_of(model, values=True)[0].train()
        self._stages = Stages(self._model, blocks.names, range(len(blocks.names)))
        self._frozen = any(not parameter.requires_grad for parameter in self._model.parameters())
        forward, moved = prepare(self._model), sample.map(lambda x: x.to(device))
        self._call = lambda: moved.call(moved.batch, forward)
        self._parameters = _Parameters(self._model, device, dtype)

    def run(self) -> tuple[float, ...]:
        known: dict[Hashable, float] = {}
        seconds: list[float] = []
        received: Handed | None = None
        for number, name in enumerate(self._blocks.names):
            needed = [name for name, users in self._blocks.uses.items() if number in users]
            with self._parameters.of(needed) as forms:
                result, _ = self._forward(number, received)
                last = number == len(self._blocks.names) - 1
                kind = (
                    str(self._model.get_submodule(name)),
                    tuple(sorted(map(str, forms))),
                    self._blocks.operations and self._blocks.operations[number],
                    received and (received.header.forms, received.header.places),
                    last or (result.header.forms, result.header.places),
                )
                if kind not in known:
                    known[kind] = self._least(number, received)
                seconds.append(known[kind])
                # Here, as it may be a parameter that is handed over.
                received = None if last else _as_received(result)
        return tuple(seconds)

    def _least(self, number: int, received: Handed | None) -> float:
        times: list[float] = []
        while len(times) < REPETITIONS or (sum(times) < ENOUGH and len(times) < MOST_REPETITIONS):
            result, begun = self._forward(number, received and _as_received(received))
            outputs = result.tensors if isinstance(result, Handed) else tensors_of(result)
            roots = [x for x in outputs if x.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            times.append(self._now() - begun)
            self._model.zero_grad()
        return min(times)

    def _forward(self, number: int, received: Handed | None) -> tuple[Any, float]:
        """Return the stage's outputs, and when its block was called; the first one's, when the model was."""
        begun = [self._now()] if number == 0 else []

        def enter(*_: Any) -> None:
            if not begun:  # it may be called again in the backward
                begun.append(self._now())

        handle = self._model.get_submodule(self._blocks.names[number]).register_forward_pre_hook(enter)
        try:
            return self._stages.run(number, self._call, received, sends_all=self._frozen), begun[0]
        finally:
            handle.remove()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()


def _as_received(handed: Handed) -> Handed:
    pairs = zip(handed.tensors, handed.header.forms, strict=True)
    return Handed(tuple(x.detach().requires_grad_(form.differentiable) for x, form in pairs), handed.header)


class _Parameters:
    """Parameters of a copy of a model. They have no memory but inside of ``of``."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        self._device = device
        self._places: dict[str, list[tuple[nn.Module, str, Tensor]]] = defaultdict(list)
        self._own: dict[str, tuple[nn.Parameter, torch.dtype]] = {}
        self._spare: dict[Hashable, list[Tensor]] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            keeps = dtype is None or isinstance(module, nn.modules.batchnorm._BatchNorm)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full = names[id(parameter)]
                    wanted = parameter.dtype if keeps or not parameter.is_floating_point() else dtype
                    assert wanted is not None
                    self._own[full] = parameter, wanted
                    self._places[full].append((module, name, Elsewhere.make(full, parameter, device, wanted)))
        for full in self._own:
            self._take(full)

    def _take(self, full: str) -> None:
        for module, name, stand_in in self._places[full]:
            del module._parameters[name]
            vars(module)[name] = stand_in

    @contextmanager
    def of(self, needed: list[str]) -> Iterator[list[TensorForm]]:
        """Give some parameters memory in this context, and yield their forms."""
        taken: dict[Hashable, list[Tensor]] = defaultdict(list)
        forms = []
        for full in needed:
            parameter, dtype = self._own[full]
            forms.append(TensorForm(tuple(parameter.shape), dtype, parameter.requires_grad))
            key = full.rpartition(".")[2], forms[-1]
            # The values of the block before serve again, as filling memory for each of many blocks takes time.
            spare = self._spare.get(key)
            value = spare.pop() if spare else _value(key[0], forms[-1].empty(self._device))
            taken[key].append(value)
            _swap(parameter, value)
            for module, name, _ in self._places[full]:
                del vars(module)[name]
                module._parameters[name] = parameter
        self._spare = {}
        try:
            yield forms
        finally:
            for full in needed:
                parameter, _ = self._own[full]
                parameter.grad = None
                _swap(parameter, parameter.detach().to("meta"))
                self._take(full)
            self._spare = taken


def _swap(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter another value, on any device. References to it, as in an LSTM's list, stay valid."""
    torch._C._swap_tensor_impl(parameter, nn.Parameter(value, parameter.requires_grad))


def _value(name: str, tensor: Tensor) -> Tensor:
    """Fill with values as initialisers do: computing with denormals or infinities takes longer."""
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor.fill_(name == "weight")
    return tensor.normal_(0, 1 / math.sqrt(max(tensor[0].numel(), 1)))
