"""Likely causes of a difference, looked up by its pattern."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zeromesh.apps.verify.plain_training import sample_places
from zeromesh.base.piece import Piece
from zeromesh.base.words import counted

if TYPE_CHECKING:
    from zeromesh.apps.verify.plain_training import PlainStep, Trial

CLOSE = 1e-3  # relative distance within which a number counts as one of the table
CLOSE_16_BIT = 3e-2


@dataclass(frozen=True)
class Evidence:
    """Values of the plain process for a piece of a parameter at one update."""

    plain: Sequence[PlainStep]
    number: int  # of the update, from 0
    piece: Piece
    trial: Trial
    share: int  # of the global batch, that this rank computes

    def cut(self, kind: str, back: int = 0) -> torch.Tensor | None:
        """Return this piece of a value of the plain process, ``back`` updates earlier."""
        key, number = f"{kind}/{self.piece.name}", self.number - back
        value = self.plain[number].values.get(key) if number >= 0 else self.plain[0].start.get(key)
        if value is None or value.shape != torch.Size(self.piece.shape):
            return None
        return self.piece.cut(value).double()


def close_in(trial: Trial) -> float:
    """Return the relative distance that counts as none."""
    return CLOSE if trial.dtype is torch.float64 else CLOSE_16_BIT


def factors(trial: Trial, step: PlainStep) -> Iterator[tuple[float, str]]:
    """Yield factors that mistakes multiply by, and what they mean."""
    named = {f"{axis} ranks": size for axis, size in trial.sizes.items()}
    if trial.sizes["replicate"] > 1:
        named["data-parallel ranks"] = trial.shares
    named["micro-batches"] = trial.micro_batches
    for what, size in named.items():
        if size > 1:
            yield (
                size,
                f"{size} times too large: summed over the {what} instead of averaged, or counted by each of them",
            )
            yield 1 / size, f"{size} times too small: divided by the number of {what} once too often"
    if step.scale != 1:
        yield step.scale, f"{step.scale:g} times too large: not divided by the loss scale"
        yield 1 / step.scale, f"{step.scale:g} times too small: divided by the loss scale twice"
    if step.clip < 1:
        yield 1 / step.clip, "as large as before clipping: not clipped"
        yield step.clip, "clipped twice"
    yield -1.0, "of the opposite sign"
    yield 2.0, "twice as large: counted twice"
    yield 0.5, "half as large: one of two parts is missing"
    yield 0.0, "zero: nothing has arrived"


def named_factor(ratio: float, trial: Trial, step: PlainStep, close: float) -> str:
    """Return what a factor may mean; without a meaning, the factor."""
    texts = [text for factor, text in factors(trial, step) if abs(ratio - factor) <= close * max(abs(factor), close)]
    return "; or ".join(dict.fromkeys(texts)) or f"{ratio:.6g} times what it should be"


def ratio_of(got: torch.Tensor, expected: torch.Tensor, close: float) -> float | None:
    """Return the factor between two tensors; None if they differ by more than a factor."""
    square = float(expected @ expected)
    if not square:
        return None
    ratio = float(got @ expected) / square
    rest = float((got - ratio * expected).norm())
    return ratio if rest <= close * float(got.norm() + expected.norm()) else None


def explain(kind: str, got: torch.Tensor, evidence: Evidence) -> str:
    """Return the likely cause of a difference in a gradient, a state or a master; may be empty."""
    got, expected = got.double(), evidence.cut(kind)
    if expected is None or not bool(got.isfinite().all()):
        return "" if expected is None else "it is not finite, or not there"
    step, trial, close = evidence.plain[evidence.number], evidence.trial, close_in(evidence.trial)
    if kind == "gradient":
        return _of_gradient(got, expected, evidence)
    for key in step.values:
        other, _, name = key.partition("/")
        same = evidence.cut(other) if name == evidence.piece.name and other.startswith("state ") else None
        if other != kind and same is not None and bool(same.any()) and ratio_of(got, same, 1e-6) is not None:
            return f"it holds the value of {other}: two states are exchanged"
    old = evidence.cut(kind, back=1)
    if old is not None and not torch.equal(old, expected) and torch.allclose(got, old, rtol=1e-9, atol=0):
        return "it has its value from before this update: the update has not reached it"
    if kind == "master" and evidence.piece.name == trial.written and evidence.number == trial.steps - 1:
        return "it was written to between the backward and this update, and the update does not know of it"
    if kind != "master" or old is None:
        ratio = ratio_of(got, expected, close)
        return "" if ratio is None else f"it is {named_factor(ratio, trial, step, close)}"
    ratio = ratio_of(got - old, expected - old, close)
    if ratio is not None:
        return f"its change in this update is {named_factor(ratio, trial, step, close)}"
    return "its gradient and states are right where nothing else is reported: the rule of the update differs"


def _of_gradient(got: torch.Tensor, expected: torch.Tensor, evidence: Evidence) -> str:
    """Find which micro-batches a gradient is made of, and how often each is in it."""
    step, trial, close = evidence.plain[evidence.number], evidence.trial, close_in(evidence.trial)
    ratio = ratio_of(got, expected, close)
    if ratio is not None:
        return f"it is {named_factor(ratio, trial, step, close)}"
    parts, here = _parts(evidence)
    if len(here) < 2 * len(parts):
        return ""
    values = got[here]
    solved = torch.linalg.lstsq(parts.T, values[:, None]).solution.flatten()
    if float((parts.T @ solved - values).norm()) > close * float(values.norm()):
        return (
            "it is not a sum of the micro-batches' gradients: something else is added to it, a part of the parameter's "
            "uses is missing, or it is another element's"
        )
    count = 1 if trial.settings.gradient_allreduce_op == "sum" else trial.shares
    times = (solved * count * step.scale).view(trial.shares, trial.micro_batches)
    return _of_parts(times, evidence.share, 10 * close)


def _parts(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the micro-batches' gradients at sampled elements of the piece, and these elements' places in it."""
    piece = evidence.piece
    elements = torch.Size(piece.shape).numel()
    places = piece.cut(torch.arange(elements).view(piece.shape))
    taken = torch.full((elements,), -1)
    chosen = sample_places(elements)
    taken[chosen] = torch.arange(len(chosen))
    columns = taken[places]
    here = (columns >= 0).nonzero().flatten()
    return evidence.plain[evidence.number].samples[piece.name][:, columns[here]], here


def _of_parts(times: torch.Tensor, share: int, close: float) -> str:
    shares, micro_batches = times.shape
    missing = times.abs() < close
    if shares > 1 and not missing[share].any() and int(missing.sum()) == (shares - 1) * micro_batches:
        times_own = f"{float(times[share].mean()):.3g} times"
        return f"it has only this rank's own samples ({times_own}): it is not reduced over the data-parallel ranks"
    for row in missing.all(1).nonzero().flatten().tolist():
        return f"the samples of data rank {row} are missing from it"
    for micro_batch in missing.all(0).nonzero().flatten().tolist():
        return f"micro-batch {micro_batch} is missing from it on all data ranks"
    row, micro_batch = divmod(int((times - 1).abs().argmax()), micro_batches)
    how = (
        "missing from it"
        if missing[row, micro_batch]
        else f"in it {float(times[row, micro_batch]):.4g} times instead of once"
    )
    return f"micro-batch {micro_batch} of data rank {row} is {how}"


def stale(got: torch.Tensor, old: torch.Tensor | None) -> str:
    """Return the likely cause of a parameter that is not what its master says."""
    if old is not None and torch.equal(got, old):
        return "it has its value from before this update: the new one was not published to this rank"
    return "it is not what its master says: the update was not published to this rank, or something else was"


def of_count(got: object, expected: torch.Tensor) -> str:
    """Return the likely cause of a wrong number of updates."""
    if got is None:
        return "the optimizer has no state of it here: this rank did not update its piece"
    return f"the optimizer counts {float(got):g} updates of it here instead of {float(expected):g}"  # type: ignore[arg-type]


def unshared(got: torch.Tensor, here: torch.Tensor | None, near: float) -> str:
    """Return the likely cause of a wrong buffer."""
    if here is not None and float((got.double().cpu() - here.double()).abs().max()) <= near:
        return "it has this rank's own statistics: the first rank's were not shared"
    return ""


def of_number(kind: str, got: float, plain: Sequence[PlainStep], number: int, key: str, trial: Trial) -> str:
    """Return the likely cause of a wrong norm or rate."""
    step = plain[number]
    expected = float(step.values[key])
    if kind == "rate":
        for distance, what in ((-1, "one update late"), (1, "one update early")):
            near = plain[number + distance].values.get(key) if 0 <= number + distance < len(plain) else None
            if near is not None and abs(float(near) - got) <= 1e-9 * abs(got) and float(near) != expected:
                return f"the schedule is {what}"
    if kind == "loss":
        return _of_forward(number, trial)
    if kind == "norm" and expected:
        return f"it is {named_factor(got / expected, trial, step, close_in(trial))}, though the gradients are right"
    return ""


def _of_forward(number: int, trial: Trial) -> str:
    """Return the likely cause of a wrong loss, which weights that are right compute."""
    causes = []
    if trial.rows.length and number == 1:
        causes.append(f"samples have {trial.rows.length} tokens in this update, and code may depend on that")
    if trial.sizes["context"] > 1 or trial.settings.tensor_parallel.sequence:
        causes.append("each rank has a part of a sequence: code computes over tokens, or counts positions of a part")
    elif trial.sizes["tensor"] > 1:
        causes.append("ranks share layers: one computes something else than its class, or a part is taken for a whole")
    return "; ".join(causes)


def where(ranks: Sequence[int], coordinates: Mapping[int, Mapping[str, int]]) -> str:
    """Describe a set of ranks by their places in the mesh."""
    if len(ranks) == len(coordinates):
        return f"all {counted(len(ranks), 'rank')}"
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({', '.join(f'{axis} {index}' for axis, index in coordinates[ranks[0]].items())})"
    for axis in next(iter(coordinates.values()), {}):
        for index in sorted({of[axis] for of in coordinates.values()}):
            if set(ranks) == {rank for rank, of in coordinates.items() if of.get(axis) == index}:
                return f"the ranks at {axis} {index}: {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks))}"
