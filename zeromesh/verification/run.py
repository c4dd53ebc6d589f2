"""``zeromesh.verify``: plan, train beside one plain process, compare, report."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeromesh.checkpoint.random_state import random_state, restore_random_state
from zeromesh.comm.detect import is_launched
from zeromesh.comm.environment import Environment, init_distributed
from zeromesh.comm.failure import RankFailure
from zeromesh.config.printing import refuse_unfilled
from zeromesh.config.settings import Settings
from zeromesh.initialization.trial import try_out
from zeromesh.launcher.launch import launch
from zeromesh.model.containers import tensors_of
from zeromesh.observe.machine import memory
from zeromesh.verification.layout import SmallLayout, scale_powers, skipped_text, small_layout, trial_settings
from zeromesh.verification.plain import Plain, Trial, reference
from zeromesh.verification.ranks import RankResult, run_trials
from zeromesh.verification.report import Report, TrialReport, Verdict
from zeromesh.verification.rows import SampleRows, longest_sum
from zeromesh.verification.shrink import Subject, fewest_blocks, subject_of, without_dropout

TIMEOUT = 600.0

# The arithmetic is the same on CPUs, which run as many ranks as are needed.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}

OVERFLOW = "overflow"  # in place of a dtype: a smaller loss scale is tried

Tell = Callable[[str], None]


class NotVerified(Exception):
    """Nothing can be said of the layout; the message says why."""


def verify(
    model: nn.Module | str | Path, config: str | Path | Mapping[str, Any] | Settings, batch: Any = None, *,
    steps: int = 3, ranks: int | None = None, whole: bool = False, timeout: float = TIMEOUT,
    tell: Tell = lambda text: None,
) -> Report:  # fmt: skip
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
        timeout: seconds that the ranks have.
        tell: is called with a line on what is done next.

    Returns:
        The report. Under a launcher every rank has it.

    Raises:
        ValueError: the configuration, the model or the batch cannot be used, or the mesh needs too many ranks.
    """
    began, state = time.monotonic(), random_state()
    if steps < 1:
        raise ValueError(f"steps is {steps}; compare at least one update")
    settings = Settings.load(config)
    refuse_unfilled(config, settings)
    launched = is_launched() or dist.is_initialized()
    world = init_distributed().world_size if launched else ranks
    layout = small_layout(settings, world, world or 16)
    try:
        report = _verified(model, settings, batch, layout, steps, whole, timeout, tell, launched)
    finally:
        restore_random_state(state)
    return replace(report, seconds=time.monotonic() - began)


def _verified(
    model: Any, settings: Settings, batch: Any, layout: SmallLayout, steps: int, whole: bool, timeout: float,
    tell: Tell, launched: bool,
) -> Report:  # fmt: skip
    torch.manual_seed(settings.seed)
    subject = subject_of(model, batch, layout.sizes, fewest_blocks(settings, layout.sizes), whole)
    changes = [*subject.changes, *layout.changes]
    report = Report(Verdict.UNVERIFIED, type(subject.model).__name__, layout.text, steps, changes)
    with _shared_folder(launched) as folder:
        path = folder / "model.pt"
        _save(subject, path, report, launched)
        try:
            results = _trials(path, settings, subject, layout, report, timeout, tell, launched)
        except NotVerified as error:
            report.refuse(str(error))
            return report
    report.decide(results)
    return report


def _save(subject: Subject, path: Path, report: Report, launched: bool) -> None:
    """Write a copy of the model without dropout, on the first rank, and wait for it on others."""
    found: list[Any] = [_saved(subject.model, path) if _is_first(launched) else None]
    if launched:
        dist.broadcast_object_list(found, 0)
    if isinstance(found[0], Exception):
        raise found[0]
    if found[0]:
        report.changes.append("dropout 0")


def _saved(model: nn.Module, path: Path) -> bool | ValueError:
    """Return whether there was dropout, or an error for the other ranks to hear of."""
    try:
        torch.save(model, path)
        copy = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # pickle raises many kinds
        return ValueError(
            f"{type(model).__name__} cannot be copied to other processes ({type(error).__name__}: {error}); define its "
            "classes at the top level of modules, and keep functions without names out of it"
        )
    had = without_dropout(copy)
    torch.save(copy, path)
    return had


def _trials(
    path: Path, settings: Settings, subject: Subject, layout: SmallLayout, report: Report, timeout: float, tell: Tell,
    launched: bool,
) -> list[list[RankResult]]:  # fmt: skip
    rows = SampleRows(subject.batch, layout.rows, subject.ids)
    rows.samples  # noqa: B018  raises for a batch without samples
    own = trial_settings(settings, layout, path.parent, wide=False, power=None)
    try_out(torch.load(path, map_location="cpu", weights_only=False), own.resolve(1, layout.sizes), layout.sizes)
    trials = {}
    precision = settings.precision
    name = next((str(one).removeprefix("torch.") for one in (precision.compute,) if one), "")
    name = name or (f"autocast {str(precision.autocast).removeprefix('torch.')}" if precision.autocast else "")
    dtypes = {p.dtype for p in subject.model.parameters() if p.is_floating_point()}
    wide = Trial(
        "float64", trial_settings(settings, layout, path.parent, True, None), rows, torch.float64, layout.sizes,
        layout.micro_batches, report.steps,
    )  # fmt: skip
    name = name or " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    trials["float64"] = wide
    if name != "float64":
        trials[name] = replace(wide, name=name, settings=own, dtype=None)
    said = skipped_text(report.steps, report.steps)
    for power in scale_powers(settings):
        if power is not None:
            scaled = trial_settings(settings, layout, path.parent, False, power)
            trials[name] = replace(trials[name], settings=scaled)
        work, units = [], {}
        for key, trial in trials.items():
            found = _referenced(path, trial, report, tell, launched)
            if isinstance(found, torch.dtype):
                units[key] = found
                work.append((trial, path, _file(path, key)))
        if power is not None and name not in units:
            continue  # the plain process overflows
        if not work:
            break
        tell(f"training on {layout.ranks} ranks: {layout.text}")
        by_rank = _on_ranks(work, layout.ranks, timeout, launched)
        results = [list(of) for of in zip(*by_rank, strict=True)]
        skipped = max(one.skipped for of in results for one in of)
        if skipped:
            said = skipped_text(skipped, report.steps)
            continue
        report.trials.extend(
            TrialReport(trial.name, str(units[trial.name]).removeprefix("torch."), [f for r in of for f in r.findings])
            for (trial, _, _), of in zip(work, results, strict=False)  # the last ones are left out after a difference
        )
        return results
    raise NotVerified(said)


def _file(path: Path, name: str) -> Path:
    return path.with_name(f"plain-{name.replace(' ', '-')}.pt")


def _referenced(path: Path, trial: Trial, report: Report, tell: Tell, launched: bool) -> torch.dtype | str:
    """Train the plain process and write its updates; return the narrowest dtype of it, or why there are none."""
    found: list[Any] = [None]
    if _is_first(launched):
        tell(f"training one plain process in {trial.name}")
        with _quiet():
            found = [_train_plain(path, trial)]
    if launched:
        dist.broadcast_object_list(found, 0)
    if isinstance(found[0], Exception):
        raise found[0]
    if isinstance(found[0], str) and found[0] != OVERFLOW and found[0] not in report.notes:
        report.notes.append(found[0])
    narrow: torch.dtype | str = found[0]
    return narrow


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what optimizers and schedules log of defaults off the screen: training says it once more."""
    logger = logging.getLogger("zeromesh.optim")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _train_plain(path: Path, trial: Trial) -> torch.dtype | str | Exception:
    model = trial.model(path)
    elements = sum(p.numel() for p in model.parameters())
    needed = elements * 8 * trial.steps * 6
    if (free := memory()["available_bytes"]) is not None and needed > free / 2:
        return ValueError(
            f"the values of {trial.steps} updates of {elements:,} parameters need about {needed / 1e9:.0f} GB, and "
            f"{free / 1e9:.0f} GB are free; pass a smaller model, or fewer steps"
        )
    try:
        losses = [Plain(path, trial).probe(seed) for seed in (1, 2)]
        if losses[0] != losses[1] and losses[0] == losses[0]:
            return NotVerified(
                "the model draws random numbers in training, so that two forwards differ; switch that off, as layer "
                "drop or masking in its configuration"
            )
        terms = longest_sum(trial.rows, trial.shares, trial.micro_batches, model)
        steps, narrow = reference(path, trial, terms)
    except Exception as error:  # whatever the user's model raises
        if trial.dtype is torch.float64:
            return f"the model does not compute in float64 ({_first_line(error)})"
        given = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}" for t in tensors_of(trial.rows.batch)
        )
        return ValueError(f"the model refuses the batch of {given}: {_first_line(error)}; pass a batch that it takes")
    if any(step.skipped for step in steps):
        if trial.settings.precision.loss_scale is not None:
            return OVERFLOW
        return NotVerified(
            f"the gradient of the plain process is not finite in {trial.name}; lower the learning rate, or look at the "
            "batch"
        )
    torch.save(steps, _file(path, trial.name))
    return narrow


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _on_ranks(work: Sequence[Any], ranks: int, timeout: float, launched: bool) -> list[list[RankResult]]:
    """Return the results of each rank."""
    if launched:
        own = run_trials(list(work), 0.0)
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, own)
        return every
    began = time.monotonic()
    try:
        with _variables(ON_CPU):
            return launch(run_trials, ranks, list(work), timeout)
    except RankFailure as error:
        if time.monotonic() - began >= timeout:
            raise NotVerified(f"the ranks did not end within {timeout:g} s; allow more with --timeout") from None
        raise NotVerified(f"rank {error.rank} failed: {error.summary}") from None


@contextmanager
def _variables(chosen: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment in this context, which processes that are started inherit."""
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _is_first(launched: bool) -> bool:
    return not launched or Environment.detect().rank == 0


@contextmanager
def _shared_folder(launched: bool) -> Iterator[Path]:
    """Make a folder that goes away again; under a launcher the first rank's, which the others are told."""
    if not _is_first(launched):
        told: list[Any] = [None]
        dist.broadcast_object_list(told, 0)
        yield Path(told[0])
        dist.barrier()
        return
    with tempfile.TemporaryDirectory(prefix="zeromesh-verify-") as name:
        if launched:
            dist.broadcast_object_list([name], 0)
        yield Path(name)
        if launched:
            dist.barrier()
