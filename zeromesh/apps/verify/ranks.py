"""One rank of a comparison: it trains with the engine, and compares what it holds with the plain process."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch

from zeromesh import zero
from zeromesh.apps.verify import cause
from zeromesh.apps.verify.plain_training import WRITTEN, PlainStep, Trial, distance, largest, loss_of_model
from zeromesh.base.containers import moved
from zeromesh.base.piece import Piece
from zeromesh.build import initialize
from zeromesh.engine.engine import Engine
from zeromesh.shard.optim.bound import PartHook

ORDER = ("loss", "rate", "gradient", "norm", "state", "master", "parameter", "frozen", "buffer")
"""Kinds of values in the order in which an update computes them: the first that is apart is nearest to the cause."""

EXPLAINED = 32  # values of each kind that a rank looks at for causes


@dataclass(frozen=True)
class Finding:
    """Comparison of one value on one rank, after one update."""

    step: int  # counted from 1
    kind: str
    name: str  # of the parameter, buffer or state; of a loss, share.micro-batch
    rank: int
    place: str  # of the rank in the mesh, and of its piece
    difference: float  # largest absolute difference of an element
    bound: float
    size: float  # largest absolute value of the plain process
    cause: str = ""
    position: int = 0  # of the parameter in the model

    @property
    def equal(self) -> bool:
        """True if the difference is finite and within a finite bound."""
        return isfinite(self.difference) and isfinite(self.bound) and self.difference <= self.bound

    @property
    def relative(self) -> float:
        """Difference relative to the value."""
        return self.difference / self.size if self.size else (inf if self.difference else 0.0)

    @property
    def order(self) -> tuple[int, int, int]:
        """Place among findings: by update, by kind, and in the order of forward, or backward for gradients."""
        kind = self.kind.split()[0]
        return self.step, ORDER.index(kind), -self.position if kind == "gradient" else self.position


@dataclass(frozen=True)
class RankResult:
    """Findings of one rank in one trial."""

    rank: int
    coordinates: Mapping[str, int]
    findings: list[Finding]
    skipped: int  # updates that the engine skipped
    stopped: bool  # some rank found a difference, after which nothing more was compared

    @classmethod
    def of(cls, findings: list[dict[str, Any]], **fields: Any) -> RankResult:
        """Return the result that ``asdict`` made these fields of."""
        return cls(findings=[Finding(**finding) for finding in findings], **fields)


def run_trials(work: list[tuple[Trial, Path, Path]], limit: float) -> list[RankResult]:
    """Compare each trial with the reference in its file, on this rank; a rank that hangs ends after ``limit`` s."""
    # A rank that waits in a collective for one that failed never comes back to Python by itself.
    if limit:
        faulthandler.dump_traceback_later(limit, exit=True)
        logging.getLogger("zeromesh").setLevel(logging.ERROR)  # the first process has told it
    results: list[RankResult] = []
    try:
        for trial, model, plain in work:
            results.append(compare(trial, model, torch.load(plain, mmap=True, weights_only=False)))
            if results[-1].stopped:
                break
        return results
    finally:
        if limit:
            faulthandler.cancel_dump_traceback_later()


def compare(trial: Trial, path: Path, plain: list[PlainStep]) -> RankResult:
    """Train with the engine and compare every update. Collective."""
    engine = initialize(model=trial.model(path), config=trial.settings)[0]
    assert engine.optimizer is not None
    comparison = Comparison(engine, trial, plain)
    hook = engine.optimizer.register_step_pre_hook(PartHook(lambda *_: comparison.take_gradients()))
    stopped = False
    for number in range(trial.steps):
        comparison.step(number)
        # All that follows a difference differs as well.
        apart = torch.tensor([float(not all(finding.equal for finding in comparison.findings))], dtype=torch.float64)
        stopped = bool(engine.mesh.group("world").exchange(apart).any())
        if stopped:
            break
    hook.remove()
    result = RankResult(engine.mesh.rank, comparison.coordinates, comparison.findings, engine.skipped_steps, stopped)
    engine.destroy()
    return result


class Comparison:
    """Findings of one rank."""

    def __init__(self, engine: Engine, trial: Trial, plain: list[PlainStep]) -> None:
        self.findings: list[Finding] = []
        self._engine, self._trial, self._plain = engine, trial, plain
        mesh = engine.mesh
        self.coordinates = {axis: mesh.group(axis).rank for axis, size in mesh.sizes.items() if size > 1}
        self._place = ", ".join(f"{axis} {index}" for axis, index in self.coordinates.items())
        self._gradients: dict[str, torch.Tensor] = {}
        self._explained: dict[tuple[int, str], int] = {}
        self._published: dict[str, torch.Tensor] = {}
        self._positions = {name: place for place, (name, _) in enumerate(engine.sharded.model.named_parameters())}

    def take_gradients(self) -> None:
        """Keep the gradients that the optimizer is about to use; those of an update on the host are not seen here."""
        for flat in self._engine.sharded.flats:
            for _, _, piece in flat.pieces:
                if piece.parameter.grad is not None:
                    self._gradients[piece.name] = piece.parameter.grad.detach().clone()
        for table in self._engine.sharded.tables:
            if any(table.gradient.used):
                self._gradients[table.full_name] = table.gradient.values()

    def step(self, number: int) -> None:
        """Make one update, and compare it."""
        engine, expected = self._engine, self._plain[number].values
        self._gradients.clear()
        rates = engine.get_lr()
        losses = self._train(number)
        for name, loss in losses.items():
            self._number(number, "loss", name, loss)
        if not losses:
            mean = [value for key, value in expected.items() if key.startswith("loss/")]
            bound = max(bound for key, bound in self._plain[number].bounds.items() if key.startswith("loss/"))
            got = engine.get_mean_loss()
            value = torch.tensor(inf if got is None else got, dtype=torch.float64)
            self._add(number, "loss", "", value, torch.stack(mean).mean(), bound)
        norm = engine.get_global_grad_norm()
        self._number(number, "norm", "", inf if norm is None else norm)
        for group, rate in enumerate(rates):
            self._number(number, "rate", str(group), rate)
        limit = engine.config.gradient_clipping
        # As the engine says that it has clipped.
        self._states(number, min(1.0, limit / (norm + 1e-6)) if norm is not None and limit > 0 else 1.0)
        self._parameters(number)
        self._buffers(number)

    def _train(self, number: int) -> dict[str, float]:
        """Return the losses of this rank's micro-batches, by name; none where stages compute them."""
        engine, trial = self._engine, self._trial
        share = engine.data_rank
        batches = [trial.inputs(number, share, m) for m in range(trial.micro_batches)]
        if engine.pipelined is not None:
            with trial.widened():
                engine.train_batch(iter(batches))
            return {}
        losses = {}
        for micro_batch, inputs in enumerate(batches):
            with trial.widened():
                loss = loss_of_model(moved(inputs, engine.device), engine.module, engine)
                engine.backward(loss)
            losses[f"{share}.{micro_batch}"] = loss.detach().double().item()
            if trial.written and (number, micro_batch) == (trial.steps - 1, trial.micro_batches - 1):
                parameter = engine.module.get_parameter(trial.written)  # as a script may do
                value = zero.safe_get_full_fp32_param(parameter)
                assert value is not None
                zero.safe_set_full_fp32_param(parameter, value * WRITTEN)
            engine.step()
        return losses

    # Values.

    def _pieces(self) -> Iterator[Piece]:
        for flat in self._engine.sharded.flats:
            if flat.layout.trainable:
                flat.load_states()
                for _, _, piece in flat.pieces:
                    yield piece

    def _states(self, number: int, clip: float) -> None:
        """Compare gradients before clipping, states of the optimizer and masters, each rank its own pieces."""
        optimizer = self._engine.optimizer
        assert optimizer is not None
        step = self._plain[number]
        keys: dict[str, list[str]] = {}
        for key in step.values:
            kind, _, name = key.partition("/")
            if kind.startswith("state "):
                keys.setdefault(name, []).append(kind)
        for piece in self._pieces():
            got = self._gradients.get(piece.name)
            if got is not None:
                self._piece(number, "gradient", piece, got / clip)
            states = optimizer.state.get(piece.parameter, {})
            for kind in keys.get(piece.name, []):
                self._state(number, kind, piece, states.get(kind.removeprefix("state ")))
            self._piece(number, "master", piece, piece.parameter.detach())

    def _state(self, number: int, kind: str, piece: Piece, got: Any) -> None:
        step, key = self._plain[number], f"{kind}/{piece.name}"
        expected = step.values[key]
        if piece.start == piece.stop:
            return
        if expected.ndim == 0:
            value = torch.tensor(inf if got is None else float(got), dtype=torch.float64)
            look = partial(cause.of_count, got, expected)
            self._add(number, kind, piece.name, value, expected, step.bounds.get(key, inf), "", look)
        elif expected.numel() in (elements := torch.Size(piece.shape).numel(), *piece.shape[:1]):
            width = elements // expected.numel()
            if got is None or got.numel() * width == piece.stop - piece.start:
                self._piece(number, kind, piece, got if got is None else got.reshape(-1).repeat_interleave(width))

    def _piece(self, number: int, kind: str, piece: Piece, got: torch.Tensor | None) -> None:
        step, key = self._plain[number], f"{kind}/{piece.name}"
        # The plain process had no gradient: what is here has to be zero.
        value = step.values.get(key, torch.zeros(1)).reshape(-1, 1)
        width = torch.Size(piece.shape).numel() // max(1, len(value))  # above 1: a number for each row
        expected = piece.cut(value.expand(-1, width).reshape(piece.shape))
        have = torch.full_like(expected, inf) if got is None else got.reshape(-1)
        look = None
        if got is not None:
            evidence = cause.Evidence(self._plain, number, piece, self._trial, self._engine.data_rank)
            look = partial(cause.explain, kind, have.cpu(), evidence)
        part = "" if piece.whole else f"elements {piece.start} to {piece.stop} of this rank's part"
        self._add(number, kind, piece.name, have, expected, step.bounds.get(key, 0.0), part, look)

    def _parameters(self, number: int) -> None:
        """Compare the parameters that the next forward computes with to the masters, wherever these are."""
        sharded, step = self._engine.sharded, self._plain[number]
        for part in sharded.parts:
            with sharded.gathered([part]):
                for flat in part.flats:
                    for index, segment in enumerate(flat.layout.segments):
                        got = flat.parameters[index].detach()
                        kind, master = "frozen", step.values.get(f"frozen/{segment.name}")
                        if flat.layout.trainable:
                            kind = "parameter"
                            master = sharded.assemble(flat, index, lambda _, __, piece: piece.parameter.detach())
                        if master is not None and got.numel():
                            self._parameter(
                                number, kind, segment.name, got.cpu(), master.view(got.shape).double().cpu()
                            )

    def _parameter(self, number: int, kind: str, name: str, got: torch.Tensor, master: torch.Tensor) -> None:
        """Compare each element with its master, rounded: at most half a unit in the last place, as rounding does."""
        expected = self._plain[number].dtypes.get(name, got.dtype)
        if expected is not got.dtype:
            why = (
                f"it has {got.dtype} here and {expected} in the plain process: the model's, or the configuration's, "
                "list of tensors that stay in fp32 is not followed"
            )
            self._add(number, kind, name, torch.full_like(master, inf), master, 0.0, "", lambda: why)
            return
        # Ties may go either way, as those of split masters do.
        numbers = torch.finfo(got.dtype)
        half = torch.ldexp(torch.full_like(master, numbers.eps / 4), torch.frexp(master).exponent)
        half = half.clamp_min(numbers.tiny * numbers.eps / 2).flatten()
        far = torch.where(got == master, 0.0, got.double() - master).abs().flatten()
        worst = int((far / half).argmax())
        look = partial(cause.stale, got, self._published.get(name))
        element = got.flatten()[worst].double()
        self._add(number, kind, name, element, master.flatten()[worst], float(half[worst]), "", look)
        self._published[name] = got.clone()

    def _buffers(self, number: int) -> None:
        sharded, step, share = self._engine.sharded, self._plain[number], self._engine.data_rank
        shared = {id(buffer) for buffer in sharded.buffers.state()}
        for name, buffer in sharded.model.named_buffers():
            first = id(buffer) in shared
            expected = step.values.get(f"buffer {0 if first else share}/{name}")
            if name in sharded.idle or expected is None or expected.shape != buffer.shape:
                continue
            bound = step.bounds.get(f"buffer {0 if first else share}/{name}", 0.0)
            here = step.values.get(f"buffer {share}/{name}")
            look = partial(cause.unshared, buffer.detach().cpu(), here, bound) if first and share else None
            self._add(number, "buffer", name, buffer.detach(), expected, bound, "", look)

    # Findings.

    def _number(self, number: int, kind: str, name: str, got: float) -> None:
        step, key = self._plain[number], f"{kind}/{name}"
        expected = step.values.get(key)
        if expected is None:
            return
        # Of single numbers of one kind, the largest bound counts: each may by chance have moved little.
        bound = max((b for k, b in step.bounds.items() if k.startswith(f"{kind}/")), default=inf)
        look = partial(cause.of_number, kind, got, self._plain, number, key, self._trial)
        self._add(number, kind, name, torch.tensor(got, dtype=torch.float64), expected, bound, "", look)

    def _add(
        self,
        number: int,
        kind: str,
        name: str,
        got: torch.Tensor,
        expected: torch.Tensor,
        bound: float,
        part: str = "",
        look: Any = None,
    ) -> None:
        difference, size = distance(got.cpu(), expected.cpu()), largest(expected)
        place = ": ".join(text for text in (self._place, part) if text)
        at = self._positions.get(name, 0)
        finding = Finding(number + 1, kind, name, self._engine.mesh.rank, place, difference, bound, size, "", at)
        if not finding.equal and look is not None:
            tried = self._explained.get((number, kind), 0)
            self._explained[number, kind] = tried + 1
            if tried < EXPLAINED:
                finding = replace(finding, cause=look())
        self.findings.append(finding)
