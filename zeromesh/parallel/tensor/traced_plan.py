"""Styles of layers in code that nobody knows, found by following what is made of their outputs in one forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeromesh.base.dry.dry_run import DryRun, OperatorListener
from zeromesh.base.dry.model_copy import dry, dtype_of, imitated, is_odd, limited, seed_all
from zeromesh.base.dry.model_inputs import ModelInput, guesses_of, samples_of
from zeromesh.base.modes import modes_of, set_modes
from zeromesh.parallel.follow.split_activation import Axis, NeedsWhole, SplitActivation, SplitDim, part_of, whole
from zeromesh.parallel.follow.split_rules import as_split
from zeromesh.parallel.tensor.split_plan import PlanRule, pattern_of

# A layer that is given a whole activation is split by columns, and its output stays a part as long as rules allow; one
# that is given a part is split by rows. Only the number of bytes depends on these choices, and never the result, so
# choices are compared by bytes: those of forward and backward of one rank, for one input.

MOST_RUNS = 40
SECONDS = 60  # of all runs
MOST_OPERATORS = 300_000  # of all runs: some models go through texts in a loop of Python

BY_COLUMNS, BY_ROWS, GATHERED = "colwise_parts", "rowwise_parts", "colwise_gather_output"

_log = logging.getLogger(__name__)


class Alike(NamedTuple):
    """Layers for which the same is chosen: those at one place in all blocks."""

    pattern: str  # of their names
    shape: tuple[int, ...]  # of their weights, which differs between the layers of an MLP in one list


@dataclass(frozen=True)
class Choices:
    """Choices for one run."""

    sections: Mapping[Alike, tuple[int, ...]] = field(default_factory=dict)  # of the outputs of fused layers
    gathered: frozenset[Alike] = frozenset()  # layers whose outputs are gathered at once
    by_columns: frozenset[Alike] = frozenset()  # layers whose inputs are gathered, though they are parts
    read: frozenset[str] = frozenset()  # names of layers that stay whole, as other code reads their weights


@dataclass
class Findings:
    """Findings of one run."""

    rules: dict[str, PlanRule] = field(default_factory=dict)  # of layers, by name; others stay whole
    sent: float = 0.0  # bytes of a rank
    gathered: set[Alike] = field(default_factory=set)  # layers whose outputs were needed whole
    wishes: dict[Alike, tuple[int, ...]] = field(default_factory=dict)  # sections that would avoid that
    read: set[str] = field(default_factory=set)  # names of layers whose weights are used by other code
    called: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # style and sections of layers


def traced_plan(
    model: nn.Module,
    layers: Mapping[str, bool],
    ranks: int,
    sample: Callable[[], ModelInput | None] = lambda: None,
    others: Collection[str] = (),
) -> tuple[dict[str, PlanRule] | None, list[str], set[str]]:
    """Return rules for linear layers by name, None if the model cannot be traced, and lines on what is not split well.

    The third value has the names of layers whose weights are read by other code.

    Args:
        model: model, of which a copy without memory is run.
        layers: names of the layers, and whether each is large enough to be split though its output is gathered.
        ranks: number of ranks of the tensor axis.
        sample: returns an input of the run, which is tried before guessed ones.
        others: names of layers that have rules already, and may be read by other code.
    """
    kinds = {name: type(model.get_submodule(name)).__name__ for name in (*layers, *others)}
    odd = next((name for name, module in model.named_modules() if is_odd(module)), None)
    try:
        if odd is not None:
            raise ValueError(f"{odd or 'the model'} has another forward than its class, or hooks of its backward")
        copied, copies = imitated(model)
    except Exception as error:  # a model may have what cannot be copied
        return None, [_UNTRACED.format(_one_line(error))], set()
    weights: dict[int, list[str]] = {}
    for name, p in _weights(model, (*layers, *others)):
        weights.setdefault(id(copies[id(p)]), []).append(name)
    alike = {name: _alike(name, model.get_submodule(name)) for name in layers}
    traced = _Layers(layers, alike, weights)
    runs = _Runs(copied, traced, ranks, others)
    try:
        with dry(model), limited(SECONDS):
            findings = runs.first(chain(filter(None, [sample()]), samples_of(model), guesses_of(model)))
    except Exception as error:
        return None, [_UNTRACED.format(_one_line(error))], set()
    findings = _with_others(findings, traced, _weights(model, layers))
    notes = [_READ.format(pattern_of(name), kinds[name]) for name in findings.read]
    gathers = [name for name, rule in findings.rules.items() if rule.style == GATHERED]
    return findings.rules, notes + [_GATHERS.format(pattern_of(name), kinds[name]) for name in gathers], findings.read


_UNTRACED = "layers in classes that are not known are split by themselves, with what they give gathered, as: {}"
_READ = "{} ({}) stays whole on all ranks, as its weight is read by other code than its own"
_GATHERS = (
    "{} ({}) is split by itself, with what it gives gathered, as the code that follows needs the whole; a plan may say "
    "better"
)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _weights(model: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for name in layers:
        yield from ((name, parameter) for parameter in model.get_submodule(name).parameters())


def _alike(name: str, layer: Any) -> Alike:
    return Alike(pattern_of(name), tuple(getattr(layer, "base_layer", layer).weight.shape))


def _with_others(findings: Findings, layers: _Layers, weights: Iterable[tuple[str, nn.Parameter]]) -> Findings:
    """Return rules also for layers that the run did not call: those of layers that are alike, or of the large.

    Layers that share a weight get one rule, that of those that were called, or none if these have several.
    """
    rules = {layers.alike[name]: rule for name, rule in findings.rules.items()}
    more: dict[str, PlanRule] = {}
    for name in layers.large.keys() - findings.called - findings.read:
        rule = rules.get(layers.alike[name], PlanRule(GATHERED) if layers.large[name] else None)
        if rule is not None:
            more[name] = rule
    merged: dict[str, PlanRule | None] = {**findings.rules, **more}
    sharing: dict[int, list[str]] = {}
    for name, weight in weights:
        sharing.setdefault(id(weight), []).append(name)
    for names in sharing.values():
        if len(chosen := {merged.get(name) for name in names}) > 1:
            chosen = {merged.get(name) for name in names if name in findings.called}
            merged |= dict.fromkeys(names, chosen.pop() if len(chosen) == 1 else None)
    return replace(findings, rules={name: rule for name, rule in merged.items() if rule is not None})


@dataclass(frozen=True)
class _Layers:
    """Layers that are traced, by name; see ``traced_plan``."""

    large: Mapping[str, bool]
    alike: Mapping[str, Alike]
    weights: Mapping[int, Collection[str]]  # names of layers by the ``id`` of their parameters in the copy


class _Runs:
    """Runs of a copy of a model, and the search among choices."""

    def __init__(self, copied: nn.Module, layers: _Layers, ranks: int, others: Collection[str]) -> None:
        self.guessed = False  # true once code has asked for a value
        self._copied, self._layers, self._ranks = copied, layers, ranks
        self._dtype = dtype_of(copied)
        self._left = MOST_OPERATORS
        self._run: _Run | None = None
        for name in (*layers.large, *others):
            layer = copied.get_submodule(name)
            setattr(layer, "forward", partial(self._call, name, layer, layer.forward))  # noqa: B010

    def _call(self, name: str, layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        return self._run.call(name, layer, forward, *args, **kwargs)

    def first(self, samples: Iterable[ModelInput]) -> Findings:
        """Return what a search with the first input shows that the model takes; raise its error if none."""
        failure: Exception | None = None
        for sample in samples:
            best: Findings | None = None
            for guess in (False, True):  # a condition on values is tried both ways
                try:
                    findings = self.search(sample, guess)
                except Exception as error:
                    _log.debug("the model cannot be traced", exc_info=True)
                    failure = failure or error
                else:
                    best = findings if best is None or len(findings.called) > len(best.called) else best
                    if best.called.keys() >= self._layers.large.keys():
                        break
                if not self.guessed:
                    break
            if best is not None:
                return best
        raise failure or ValueError("it is not known what inputs the model takes")

    def search(self, sample: ModelInput, guess: bool) -> Findings:
        """Return what the choices that send the fewest bytes give; ``guess`` stands for every value."""
        self._sample, self._guess = sample, guess
        forced: frozenset[Alike] = frozenset()
        for _ in range(MOST_RUNS):
            choices, findings = self._chosen(forced)
            # Code may need the whole in the other mode only: in evaluation, or in training.
            modes = modes_of(self._copied.modules())
            try:
                set_modes({module: not trains for module, trains in modes.items()})
                self._try(choices)
            except NeedsWhole as error:
                if not (more := {self._layers.alike[name] for name in error.sources} - forced):
                    break
                forced |= more
                continue
            except Exception:  # it need not run so
                _log.debug("the model cannot be traced in its other mode", exc_info=True)
            finally:
                set_modes(modes)
            break
        return findings

    def _chosen(self, forced: frozenset[Alike]) -> tuple[Choices, Findings]:
        choices, best = Choices(gathered=forced), None
        for _ in range(MOST_RUNS):
            try:
                findings = self._try(choices)
            except NeedsWhole as error:
                forced |= {self._layers.alike[name] for name in error.sources}
                choices = replace(choices, gathered=choices.gathered | forced)
                continue
            if findings.read - choices.read:  # what follows them is given wholes
                choices = replace(choices, read=choices.read | findings.read)
                continue
            if wishes := {
                layers: sections for layers, sections in findings.wishes.items() if layers not in choices.sections
            }:
                choices = replace(choices, sections={**choices.sections, **wishes})
                continue
            if best is None or findings.sent <= best[1].sent:
                best = choices, findings
            if findings.gathered <= choices.gathered:
                break
            choices = replace(choices, gathered=choices.gathered | findings.gathered)
        assert best is not None
        choices, findings = best
        by_rows = [self._layers.alike[name] for name, rule in findings.rules.items() if rule.style == BY_ROWS]
        for layers in dict.fromkeys(by_rows):
            try:
                other = replace(choices, by_columns=choices.by_columns | {layers})
                flipped = self._try(other)
            except NeedsWhole:
                continue
            if flipped.sent < findings.sent and not flipped.wishes.keys() - choices.sections.keys():
                choices, findings = other, flipped
        return choices, findings

    def _try(self, choices: Choices) -> Findings:
        self._run = _Run(self._layers, self._ranks, choices)
        run = DryRun(self._run, self._guess, self._left)
        seed_all()
        try:
            with torch.enable_grad():
                self._sample.run_dry(lambda *args, **kwargs: whole(self._copied(*args, **kwargs)), self._dtype, run)
        finally:
            self.guessed = run.values.guessed
            self._left -= run.operators
        return self._run.findings


class _Run(OperatorListener, Axis):
    """One forward, as the axis on which its activations are split."""

    def __init__(self, layers: _Layers, ranks: int, choices: Choices) -> None:
        self.size = ranks
        self.findings = Findings()
        self._layers, self._choices = layers, choices
        self._inside: list[str] = []
        self._entered: dict[tuple[str, int], Tensor] = {}

    def on_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Note who reads weights and parts."""
        for x in tensors:
            names = self._layers.weights.get(id(x), ())  # several if the weight is tied
            if names and not any(name in self._inside for name in names):
                self.findings.read.update(names)
                for name in names:
                    self.findings.rules.pop(name, None)
            if isinstance(x, SplitActivation) and torch._C._is_torch_function_enabled():
                # No rule was asked, so the code computes on a part without knowing.
                raise NeedsWhole("code outside of Python was given a part", x.split_dim.sources)

    def call(self, name: str, layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what a layer gives, and decide how it is split when it is called for the first time."""
        if not args and kwargs:  # the input is given by its name
            key, by_name = next(iter(kwargs)), forward
            forward, args = lambda x, **rest: by_name(**{key: x}, **rest), (kwargs.pop(key),)
        x, *args = args  # type: ignore[assignment]
        self._inside.append(name)
        try:
            if name not in self._layers.large or not isinstance(x, Tensor) or not x.is_floating_point():
                return forward(x, *args, **kwargs)
            if id(getattr(layer, "base_layer", layer).weight) not in self._layers.weights:  # of functional_call
                self.findings.read.add(name)
            style, sections = self.findings.called.setdefault(name, self._style(name, layer, x))
            if style and name not in self.findings.read:
                self.findings.rules[name] = PlanRule(style, sections if len(sections) > 1 else ())
            if style == BY_ROWS:
                return self._by_rows(forward, x, sections, *args, **kwargs)
            x = whole(x)
            if style and x.requires_grad and (name.rpartition(".")[0], id(x)) not in self._entered:
                self._entered[name.rpartition(".")[0], id(x)] = x
                self._send(x, 2)
            y = forward(x, *args, **kwargs)
            if style == GATHERED:
                self._send(y)
            if style != BY_COLUMNS:
                return y
            split_dim = SplitDim(y.ndim - 1, sections, frozenset([name]))
            return as_split(y.narrow(-1, 0, y.shape[-1] // self.size), split_dim, self)
        finally:
            self._inside.pop()

    def _style(self, name: str, layer: Any, x: Tensor) -> tuple[str, tuple[int, ...]]:
        alike, choices = self._layers.alike[name], self._choices
        if name in choices.read:
            return "", ()
        if isinstance(x, SplitActivation) and alike not in choices.by_columns:
            split_dim = x.split_dim
            if split_dim.dim == x.ndim - 1:
                return BY_ROWS, split_dim.sections
        base = getattr(layer, "base_layer", layer)
        outputs = sum(base.weight.shape) - x.shape[-1]
        sections = choices.sections.get(alike, (outputs,))
        if alike in choices.gathered or any(section % self.size for section in sections):
            return (GATHERED, ()) if self._layers.large[name] else ("", ())
        return BY_COLUMNS, sections

    def _by_rows(self, forward: Any, x: Tensor, sections: tuple[int, ...], *args: Any, **kwargs: Any) -> Tensor:
        is_part = isinstance(x, SplitActivation) and x.split_dim.dim == x.ndim - 1
        if isinstance(x, SplitActivation) and is_part and x.split_dim.sections == sections:
            with torch._C.DisableTorchFunctionSubclass():
                x = torch.cat([part_of(x)] * self.size, -1)
        else:
            x = whole(x)
            self._send(x, x.requires_grad)
        y: Tensor = forward(x, *args, **kwargs)
        self._send(y, 2)
        return y

    def _send(self, x: Tensor, times: float = 1) -> None:
        """Count the messages of an all-gather, or twice of an all-reduce, of a whole activation."""
        self.findings.sent += times * x.numel() * x.itemsize * (self.size - 1) / self.size

    def gather(self, part: Tensor, split_dim: SplitDim) -> Tensor:
        """Return a whole of the right shape."""
        self.findings.gathered.update(self._layers.alike[name] for name in split_dim.sources)
        joined = torch.cat([part] * self.size, split_dim.dim)
        self._send(joined)
        return joined

    def take(self, tensor: Tensor, split_dim: SplitDim) -> Tensor:
        """Return a part of the right shape."""
        self._send(tensor, tensor.requires_grad and torch.is_grad_enabled())
        return tensor.narrow(split_dim.dim, 0, split_dim.size // self.size)

    def copy(self, tensor: Tensor) -> Tensor:
        """Count the sum of the gradient."""
        self._send(tensor, 2)
        return tensor

    def sum(self, share: Tensor) -> Tensor:
        """Count the sum."""
        self._send(share, 2)
        return share

    def wish(self, split_dim: SplitDim, lengths: list[int]) -> None:
        """Note sections of the one layer that the part was made by."""
        if len(split_dim.sources) != 1 or not all(lengths):
            return
        (name,) = split_dim.sources
        _, sections = self.findings.called[name]
        scale, rest = divmod(sum(sections), sum(lengths))
        wished = tuple(length * scale for length in lengths)
        if not rest and len(sections) == 1 and not any(length % self.size for length in wished):
            self.findings.wishes.setdefault(self._layers.alike[name], wished)
