"""``zeromesh.verify``: plan, train beside one plain process, compare, report."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import isclose, lcm
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from zeromesh.apps.launch.launch import launch
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.apps.verify.plain_training import PlainTraining, Trial, is_alike, loss_of_model, reference
from zeromesh.apps.verify.ranks import RankResult, run_trials
from zeromesh.apps.verify.rows import SampleRows, longest_sum
from zeromesh.apps.verify.shrink import Subject, fewest_blocks, subject_of, without_dropout
from zeromesh.apps.verify.small_layout import SmallLayout, scale_powers, skipped_text, small_layout, trial_settings
from zeromesh.apps.verify.verification_report import Report, TrialReport, Verdict
from zeromesh.base.containers import tensors_of
from zeromesh.base.dtypes import MismatchError
from zeromesh.base.machine import memory
from zeromesh.base.words import counted
from zeromesh.checkpoint.random_state import random_state, restore_random_state
from zeromesh.comm.agreement import catch
from zeromesh.comm.detect import is_launched
from zeromesh.comm.environment import device_of_group, init_distributed
from zeromesh.comm.failure import RankFailure
from zeromesh.comm.messages import gather_json
from zeromesh.comm.trust import require_private
from zeromesh.config.printing import refuse_unfilled
from zeromesh.config.settings import Settings
from zeromesh.engine.initialize.optimizer_setup import quiet_optimizers
from zeromesh.engine.initialize.trial import try_out
from zeromesh.shard.find_units import find_units

TIMEOUT = 600.0
REPEATED = 1e-6  # relative difference of losses of one batch on an accelerator; random numbers make a larger one

# The arithmetic is the same on CPUs, which run as many ranks as are needed.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}

MOST_LENGTHS = 4  # shorter ones that are tried, since code may need a multiple of its own

OVERFLOW = "overflow"  # in place of a dtype: a smaller loss scale is tried

Tell = Callable[[str], None]


class NotVerified(Exception):
    """Nothing can be said of the layout; the message says why."""


RAISED = (NotVerified, OSError, ValueError, Exception)
"""Exceptions of the first rank that the others raise, too, as the first of these classes that fits."""


def verify(
    model: nn.Module | str | Path,
    config: str | Path | Mapping[str, Any] | Settings,
    batch: Any = None,
    *,
    steps: int = 3,
    ranks: int | None = None,
    whole: bool = False,
    timeout: float = TIMEOUT,
    tell: Tell = lambda text: None,
) -> Report:
    """Compare a layout's training with that of one plain process.

    A copy of the model trains for a few steps on as many processes of this machine's CPU as the mesh needs, or on the
    ranks at hand under a launcher, beside plain torch in one process on the same samples. It is done in float64, and
    again in the configuration's own precision.

    Args:
        model: a module, which stays as it is; a folder of transformers; or ``package.module:function``, which returns a
            module, or one and a batch. Of transformers' models, a smaller one of the same architecture is compared.
        config: path of a JSON file in DeepSpeed's format, a dict of the same form, or settings. It has an optimizer.
        batch: one micro-batch as the model takes it, with samples along dim 0. Others are made from it.
        steps: number of updates.
        ranks: number of processes; None: as few as the mesh needs, and at least two.
        whole: compare the model as it is, however large.
        timeout: seconds that the ranks have; under a launcher its own limits hold.
        tell: is called with a line on what is done next.

    Returns:
        The report. Under a launcher every rank has it.

    Raises:
        ValueError: the configuration, the model or the batch cannot be used, the mesh needs too many ranks, or a
            launcher has started another number of them.
    """
    began, state = time.monotonic(), random_state()
    if steps < 1:
        raise ValueError(f"steps is {steps}; compare at least one update")
    settings = TrainSettings.load(config)
    refuse_unfilled(config, settings)
    launched = is_launched() or dist.is_initialized()
    world, device = ranks, torch.device("cpu")
    if launched:
        environment = init_distributed()
        world, device = environment.world_size, device_of_group(environment)
    if launched and ranks not in (None, world):
        raise ValueError(f"ranks is {ranks}, but a launcher has started {world}; leave it out there")
    layout = small_layout(settings, world)
    try:
        torch.manual_seed(settings.seed)
        subject = subject_of(model, batch, layout.sizes, fewest_blocks(settings, layout.sizes), whole)
        changes = [*subject.changes, *layout.changes]
        report = Report(Verdict.UNVERIFIED, type(subject.model).__name__, layout.text, steps, changes)
        report.unseen.append(f"what the model does only after {counted(steps, 'update')}")
        if subject.changes:
            report.unseen.append("layers, widths and ids that the smaller model lacks: whole (--whole) compares yours")
        with _shared_folder(launched) as folder:
            verification = Verification(subject, settings, layout, report, folder, timeout, tell, launched, device)
            try:
                verification.run()
            except NotVerified as error:
                report.refuse(str(error))
    finally:
        restore_random_state(state)
    report.seconds = time.monotonic() - began
    return report


@dataclass
class Verification:
    """One comparison; it fills in the report."""

    subject: Subject
    settings: Settings
    layout: SmallLayout
    report: Report
    folder: Path  # of the model and the plain processes' values
    timeout: float
    tell: Tell
    launched: bool
    device: torch.device  # of the plain process
    units: dict[str, torch.dtype] = field(default_factory=dict)  # narrowest dtype of each plain process

    @property
    def model(self) -> Path:
        """File of the model."""
        return self.folder / "model.pt"

    def run(self) -> None:
        """Train on both sides, lowering the loss scale until no update is skipped, and compare."""
        if self._on_first(lambda: _saved(self.subject.model, self.model)):
            self.report.changes.append("dropout 0")
        wide, narrow = self._trials()
        copy = torch.load(self.model, map_location="cpu", weights_only=False)
        try_out(copy, narrow.settings.resolve(1, self.layout.sizes), self.layout.sizes)
        trials = [wide] if self._trained_plain(wide) else []
        skipped = self.report.steps
        for power in scale_powers(self.settings):
            scaled = narrow if power is None else replace(narrow, settings=self._settings(False, power))
            tried = trials
            if narrow.name != wide.name:
                if not self._trained_plain(scaled):
                    continue
                tried = [*trials, scaled]
            if not tried:
                raise NotVerified(self.report.notes.pop())
            self.tell(f"training on {self.layout.ranks} ranks: {self.layout.text}")
            by_rank = self._on_ranks(tried)
            results = [list(of) for of in zip(*by_rank, strict=True)]
            scaled_of = [of for trial, of in zip(tried, results, strict=False) if trial.settings.precision.loss_scale]
            skipped = max((result.skipped for of in scaled_of for result in of), default=0)
            if not skipped:
                self._decide(tried, results)
                return
        raise NotVerified(skipped_text(skipped, self.report.steps))

    def _settings(self, wide: bool, power: int | None = None) -> Settings:
        return trial_settings(self.settings, self.layout, self.folder, wide, power)

    def _trials(self) -> tuple[Trial, Trial]:
        """Return the comparison in float64, and that in the configuration's precision."""
        rows, layout = SampleRows(self.subject.batch, self.layout.rows, self.subject.ids), self.layout
        rows.samples  # noqa: B018  raises for a batch without samples
        multiple = lcm(2 * layout.sizes["context"], layout.sizes["tensor"])
        tried = rows.shorter(multiple)[:MOST_LENGTHS] if self.report.steps > 1 else ()
        length = self._on_first(lambda: next((n for n in tried if self._takes(replace(rows, length=n))), 0))
        if length:
            rows = replace(rows, length=length)
            self.report.changes.append(f"{length} tokens a sample in step 2")
        wide = Trial(
            "float64",
            self._settings(wide=True),
            rows,
            torch.float64,
            layout.sizes,
            layout.micro_batches,
            self.report.steps,
            self.device,
            self._written(),
        )
        precision = self.settings.precision
        dtypes = {p.dtype for p in self.subject.model.parameters() if p.is_floating_point()}
        name = " and ".join(sorted(map(str, {precision.compute} if precision.compute else dtypes)))
        name = f"autocast {precision.autocast}" if precision.autocast and not precision.compute else name
        return wide, replace(wide, name=name.replace("torch.", ""), settings=self._settings(wide=False), dtype=None)

    def _written(self) -> str:
        """Return a parameter to write to before the last update; empty with stages, where no line of a script is."""
        blocks = find_units(self.subject.model, self.settings.units) or [("", self.subject.model)]
        parts = [(f"{path}.{name}".lstrip("."), p) for path, block in blocks for name, p in block.named_parameters()]
        names = [name for name, parameter in parts if parameter.requires_grad]
        # Gradients of the last block arrive first: an update during the backward has begun with them.
        return names[-1] if names and self.layout.sizes["pipeline"] == 1 else ""

    def _takes(self, rows: SampleRows) -> bool:
        """Return whether the model computes a loss of the second update's samples."""
        model: nn.Module = torch.load(self.model, map_location="cpu", weights_only=False)
        try:
            with torch.no_grad():
                loss_of_model(rows.at(1, 0, 0), model.train(), model)
        except Exception:  # whatever the user's model raises
            return False
        return True

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """Return on every rank what the first one's work returns, or raise its exception."""
        if not self.launched:
            return work()
        result, failure = catch(work) if dist.get_rank() == 0 else (None, None)
        kind = next((kind for kind in RAISED if isinstance(failure, kind)), None)
        result, name, text = gather_json((result, kind and kind.__name__, str(failure)))[0]
        for kind in RAISED:
            if name == kind.__name__:
                raise failure or kind(text)
        return result

    def _trained_plain(self, trial: Trial) -> bool:
        """Train the plain process and write its updates; return whether there are any."""
        self.tell(f"training one plain process in {trial.name}")
        outcome = self._on_first(lambda: _train_plain(self.model, trial, self._file(trial)))
        dtype = getattr(torch, outcome, None)
        if isinstance(dtype, torch.dtype):
            self.units[trial.name] = dtype
        elif outcome != OVERFLOW:
            self.report.notes.append(outcome)
        return isinstance(dtype, torch.dtype)

    def _file(self, trial: Trial) -> Path:
        return self.folder / f"plain-{trial.name.replace(' ', '-')}.pt"

    def _on_ranks(self, trials: Sequence[Trial]) -> list[list[RankResult]]:
        """Return the results of each rank."""
        work = [(trial, self.model, self._file(trial)) for trial in trials]
        if self.launched:
            rows = gather_json([asdict(result) for result in run_trials(work, 0.0)])
            return [[RankResult.of(**fields) for fields in row] for row in rows]
        began = time.monotonic()
        try:
            with patch.dict(os.environ, ON_CPU):  # which the processes inherit
                if self.layout.ranks > 1:
                    return launch(run_trials, self.layout.ranks, work, self.timeout)
                return _in_another_process(work, self.timeout)
        except RankFailure as error:
            if time.monotonic() - began >= self.timeout:
                text = f"the ranks did not end within {self.timeout:g} s; allow more with --timeout"
                raise NotVerified(text) from None
            raise NotVerified(f"rank {error.rank} failed: {error.summary}") from None

    def _decide(self, trials: Sequence[Trial], results: Sequence[Sequence[RankResult]]) -> None:
        """Write findings and verdict into the report, after a look for values that no rank has compared."""
        for trial, of in zip(trials, results, strict=False):  # the last ones are left out after a difference
            findings = [finding for result in of for finding in result.findings]
            unit = str(self.units[trial.name]).removeprefix("torch.")
            self.report.trials.append(TrialReport(trial.name, unit, findings))
        self.report.decide(results)
        if self.report.verdict is Verdict.EQUAL:
            for trial, done in zip(trials, self.report.trials, strict=True):
                self._refuse_missing(done.missing(torch.load(self._file(trial), mmap=True, weights_only=False)), trial)

    def _refuse_missing(self, missing: Mapping[str, list[str]], trial: Trial) -> None:
        for kind, names in missing.items():
            text = f"{kind} of {counted(len(names), 'value')} in {trial.name}, the first: {names[0] or kind}"
            # An update on the host takes gradients that are not seen; states may be kept in other shapes.
            if kind not in ("gradient", "buffer") and not kind.startswith("state "):
                raise NotVerified(f"no rank has compared {text}; report this as a mistake of ZeroMesh")
            self.report.notes.append(f"not compared: {text}")


def _saved(model: nn.Module, path: Path) -> bool:
    """Write a copy of the model without dropout; return whether there was any."""
    try:
        torch.save(model, path)
        copy = torch.load(path, map_location="cpu", weights_only=False)
    except OSError:
        raise
    except Exception as error:  # pickle raises many kinds
        raise ValueError(
            f"{type(model).__name__} cannot be copied to other processes ({type(error).__name__}: {error}); define its "
            "classes at the top level of modules, and keep functions without names out of it"
        ) from None
    had = without_dropout(copy)
    torch.save(copy, path)
    return had


def _train_plain(path: Path, trial: Trial, file: Path) -> str:
    """Write the updates of the plain process; return the name of its narrowest dtype, or why there are none."""
    model = trial.model(path)
    elements = sum(p.numel() for p in model.parameters())
    needed = elements * 8 * trial.steps * 6
    available = memory()["available_bytes"]
    free = min(shutil.disk_usage(file.parent).free, needed if available is None else available / 2)
    if needed > free:
        raise ValueError(
            f"the values of {trial.steps} updates of {elements:,} parameters need about {needed / 1e9:.0f} GB, and "
            f"{free / 1e9:.0f} GB of memory and of {file.parent} can be had; pass a smaller model, or fewer steps"
        )
    try:
        with quiet_optimizers():  # training says it once more
            losses = [PlainTraining(path, trial).probe(seed) for seed in (1, 2)]
            terms = longest_sum(trial.rows, trial.shares, trial.micro_batches, model)
            steps, narrow = reference(path, trial, terms)
    except torch.OutOfMemoryError:
        raise NotVerified(
            f"one plain process does not fit into the memory of {trial.device}; verify without a launcher, which "
            "compares on CPU processes, or pass a smaller model"
        ) from None
    except MismatchError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # whatever the user's model raises
        if trial.dtype is torch.float64:
            return f"the model does not compute in float64 ({_first_line(error)})"
        shapes = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}" for t in tensors_of(trial.rows.batch)
        )
        raise ValueError(
            f"the model refuses the batch of {shapes}: {_first_line(error)}; pass a batch that it takes"
        ) from None
    # Kernels of accelerators may add up in another order each time.
    same = losses[0] == losses[1] if trial.device.type == "cpu" else isclose(*losses, rel_tol=REPEATED)
    if not same and losses[0] == losses[0]:
        raise NotVerified(
            "the model draws random numbers in training, so that two forwards differ; switch that off, as layer drop "
            "or masking in its configuration"
        )
    if any(step.skipped for step in steps):
        if trial.settings.precision.loss_scale is not None:
            return OVERFLOW
        raise NotVerified(
            f"the gradient of the plain process is not finite in {trial.name}; lower the learning rate, or look at the "
            "batch"
        )
    if any(map(is_alike, steps)):
        raise NotVerified(
            "two micro-batches have the same gradients, which would hide that one takes the other's place; pass a "
            "batch with more, and more different, samples"
        )
    torch.save(steps, file)
    if trial.device.type != "cpu":
        torch.accelerator.empty_cache()  # ranks may share the device
    return str(narrow).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _in_another_process(work: list[tuple[Trial, Path, Path]], timeout: float) -> list[list[RankResult]]:
    """Return what one rank finds; ``launch`` would train in this process, and leave a process group."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return [pool.submit(run_trials, work, timeout).result()]
        except Exception as error:  # whatever training raises
            raise RankFailure(0, _first_line(error)) from error


@contextmanager
def _shared_folder(launched: bool) -> Iterator[Path]:
    """Make a folder that goes away again; under a launcher the first rank's, which the others are told."""
    with tempfile.TemporaryDirectory(prefix="zeromesh-verify-") as name:
        folder = Path(gather_json(name)[0] if launched else name)
        if not folder.exists():
            raise ValueError(f"folder {folder} of the first rank is not seen here; set TMPDIR to one that all see")
        require_private(folder)  # models in it are unpickled
        yield folder
        if launched:
            dist.barrier()  # before the first rank removes it
