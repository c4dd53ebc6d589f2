"""Contracts of experts, and the proof that a module keeps one: a few rows, all experts at once against some of them."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from zeromesh.base.in_place import version
from zeromesh.base.split import Split

TOKENS = 6  # of the call that proves ROUTED
LARGE = 1 << 26  # elements of experts above which four of them are computed
PERIOD = 65_537  # random values, which fill large weights many times; a prime, so that rows differ
DIFFERENT = "some of its experts alone, or of their rows, compute something else"
TOLERANCE = 1e-3  # of the largest result; what breaks a contract changes results as such


class Contract(Enum):
    """Call of a module of E experts, and its result. T: tokens, K: experts of each, R: rows, H: width."""

    ROUTED = "hidden (T, H), expert of each choice (T, K), its weight (T, K) -> (T, H)"
    SORTED = "rows sorted by expert (R, H), number of rows of each expert -> (R, H')"
    STACKED = "rows of each expert (E, R, H), or (E*R, H) -> the same shape"
    LISTED = "one module for each expert, called by the loop of the module around them"

    def fits(self, forward: Callable[..., Any]) -> bool:
        """Return whether a forward takes so many arguments."""
        try:
            inspect.signature(forward).bind(*range({"ROUTED": 3, "SORTED": 2}.get(self.name, 1)))
        except TypeError:
            return False
        return self is not Contract.LISTED


@dataclass(frozen=True)
class Experts:
    """Experts of one layer."""

    name: str  # of the module
    module: nn.Module  # that has the parameters of all experts; for LISTED the list
    count: int  # of experts with parameters
    contract: Contract  # what the module is called with
    # Name of a parameter in the model -> its split over the ranks of the axis. Other parameters of ROUTED, SORTED and
    # STACKED, such as a norm's behind the experts, are used for the rows of any of them.
    splits: Mapping[str, Split]
    # Choices from ``count`` on, of experts without parameters. They need no other rank: a rank's part of the module
    # knows them by the numbers from ``count // ranks`` on.
    beyond: int = 0
    # (name of a module inside ``module``, name of its attribute) -> value with a rank's part of the experts.
    sizes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    caller: str = ""  # name of the module whose forward calls the experts: ``name`` itself, but for most LISTED
    # Columns that the index of ROUTED needs: 2 where its forward fails with one choice of each row; the second may be
    # any expert, of weight 0.
    choices: int = 1
    mixes: bool = False  # an expert of LISTED mixes the rows of a call, so that owners compute each call by itself


@dataclass(frozen=True)
class Form:
    """One way of reading a module's parameters as those of experts."""

    contract: Contract  # what the module is called with
    count: int  # of experts with parameters
    beyond: int  # choices from ``count`` on, of experts without parameters
    # Name of a parameter -> its rows for each expert, and its rows behind those of all experts.
    stacked: Mapping[str, tuple[int, int]]
    # (module inside, attribute) -> number of experts, or of experts and choices beyond.
    sizes: Mapping[tuple[str, str], int]
    choices: int = 1  # columns of the index that the forward of ROUTED needs; some fail at one

    def objection(self, module: nn.Module, ranks: int) -> str:
        """Return how results differ where each rank computes with its experts; "" proves the form.

        Args:
            module: its parameters may be deferred: they are replaced by random values, in fp32 on their device.
            ranks: that share the experts.
        """
        try:
            proof = _Proof(self, module, ranks)
        except Exception as error:  # of a copy
            return f"{type(error).__name__}: {error}"
        objections: list[str] = []
        for width in sorted({size for p in module.parameters() for size in p.shape[-2:]}, reverse=True):
            try:
                if not any(proof.differs(width, trains) for trains in (False, True)):
                    return ""
                objections.insert(0, DIFFERENT)
            except _BufferError as error:
                return str(error)
            except Exception as error:  # a width that is not the module's, or a forward that takes something else
                objections.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return next(iter(objections), "it has no parameters")


class _BufferError(Exception):
    """Experts that change their state as they compute."""


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "dropout" not in getattr(func, "__name__", ""):
            return func(*args, **kwargs)
        return args[0] if args else kwargs["input"]


class _Proof:
    """A module without hooks, on random values, that computes with any range of its experts."""

    def __init__(self, form: Form, module: nn.Module, ranks: int) -> None:
        # A contract says the same for any number of experts, so that few stand for many large ones.
        large = sum(p.numel() for p in module.parameters()) > LARGE
        self.form, self.ranks, self.count = form, ranks, min(form.count, 4) if large else form.count
        self.part = self.count // ranks if self.count % ranks == 0 else max(1, self.count // 2)
        self.starts = sorted({0, self.count - self.part})  # the first rank's experts, and the last one's
        tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.module = copy.deepcopy(module, tensors)
        for inner in self.module.modules():
            for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
                setattr(inner, hooks, OrderedDict())
        self.values = {name: self._value(name, p) for name, p in module.named_parameters()}
        self.device = next(iter(self.values.values())).device
        self.values |= {name: self._buffer(b) for name, b in module.named_buffers()}

    def _value(self, name: str, parameter: nn.Parameter) -> Tensor:
        shape: list[int] = [*parameter.shape]
        if name in self.form.stacked:
            rows, behind = self.form.stacked[name]
            shape[0] = self.count * rows + behind
        device = "cpu" if parameter.device.type == "meta" else parameter.device
        drawn = torch.randn(PERIOD, device=device) / math.sqrt(max(shape[-1:], default=1))
        return drawn.repeat(-(-math.prod(shape) // PERIOD))[: math.prod(shape)].view(shape)

    def _buffer(self, buffer: Tensor) -> Tensor:
        """Return a copy that may be written to; random, where it may have a row for each expert."""
        if buffer.is_floating_point() and self.form.count in buffer.shape[:1]:
            return torch.randn(self.count, *buffer.shape[1:], device=self.device)
        return torch.zeros_like(buffer, device=self.device) if buffer.is_meta else buffer.detach().clone()

    def __call__(self, start: int, length: int, *inputs: Any) -> Tensor:
        """Return what the module computes with the experts ``[start, start + length)``."""
        for (path, attribute), size in self.form.sizes.items():
            setattr(self.module.get_submodule(path), attribute, size - self.form.count + length)
        values = dict(self.values)
        for name, (rows, behind) in self.form.stacked.items():
            part = values[name][start * rows : (start + length) * rows]
            values[name] = torch.cat([part, values[name][-behind:]]) if behind else part
        result: Tensor = functional_call(self.module, values, inputs)
        changed = [name for name, _ in self.module.named_buffers() if version(values[name])]
        if changed and self.ranks > 1:
            raise _BufferError(f"it writes to its buffer {changed[0]}, of which each rank would have other values")
        return result

    def differs(self, width: int, trains: bool) -> bool:
        """Return whether results of rows so wide differ, in training, but without dropout, or out of it."""
        self.module.train(trains)
        with _WithoutDropout():
            expected, actual = getattr(self, f"{self.form.contract.name.lower()}_results")(width)
        largest, difference = float(expected.abs().max()), float((expected - actual).abs().max())
        return not (0 < largest < math.inf and difference < TOLERANCE * largest)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def routed_results(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the module's own results, and the sum of weighted results of ranks that have one choice a row."""
        hidden, weights = self._random(TOKENS, width), self._random(TOKENS, 2)
        numbers = [start + i for start in self.starts for i in range(min(self.part, 4))]
        numbers += [self.count] * min(self.form.beyond, 1)
        chosen = [[numbers[(2 * t + k) % len(numbers)] for k in range(2)] for t in range(TOKENS)]
        index, actual = torch.tensor(chosen, device=self.device), torch.zeros_like(hidden)
        half = torch.arange(TOKENS, device=self.device)[:, None] < TOKENS // 2
        for start, tokens in product(self.starts, (half, ~half)):
            here = (index >= start) & (index < start + self.part)
            if start == 0:
                here |= index >= self.count
            token, choice = (here & tokens).nonzero(as_tuple=True)
            local = index[token, choice]
            local = torch.where(local < self.count, local - start, local - self.count + self.part)
            columns = local[:, None].repeat(1, self.form.choices)
            ones = torch.zeros_like(columns, dtype=hidden.dtype)
            ones[:, 0] = 1
            rows = self(start, self.part, hidden[token], columns, ones)
            actual.index_add_(0, token, rows.view(-1, width) * weights[token, choice, None])
        return self(0, self.count, hidden, index, weights).view(TOKENS, width), actual

    def sorted_results(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the module's results for rows of all experts, and those of ranks for rows of theirs."""
        sizes = [1 + expert % 2 for expert in range(self.count)]
        rows, firsts = self._random(sum(sizes), width), [0, *accumulate(sizes)]
        full, expected, actual = self(0, self.count, rows, sizes), [], []
        for start, place in product(self.starts, (0, 1)):  # first rows of experts, then second ones
            told = [int(size > place) for size in sizes[start : start + self.part]]
            if here := [firsts[start + expert] + place for expert, has in enumerate(told) if has]:
                expected.append(full[here])
                actual.append(self(start, self.part, rows[here], told))
        return torch.cat(expected), torch.cat(actual)

    def stacked_results(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the module's results for rows of all experts, and those of ranks for rows of theirs."""
        rows = self._random(self.count, 2, width)
        expected = self(0, self.count, rows).view(rows.shape)
        ranges = [slice(start, start + self.part) for start in self.starts]
        pieces = [
            torch.cat([self(part.start, self.part, row).view(row.shape) for row in rows[part].split(1, 1)], 1)
            for part in ranges
        ]
        return torch.cat([expected[part] for part in ranges]), torch.cat(pieces)

    def listed_results(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the results of an expert for several rows, and for each of them."""
        rows = self._random(TOKENS, width)
        return self(0, 1, rows), torch.cat([self(0, 1, row) for row in rows.split(1)])
