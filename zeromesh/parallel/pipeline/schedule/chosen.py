"""The schedule that a configuration chooses: a named one, or one from a file."""

from __future__ import annotations

from pathlib import Path

from zeromesh.parallel.pipeline.schedule.actions import Kind, Schedule
from zeromesh.parallel.pipeline.schedule.generators import generate
from zeromesh.parallel.pipeline.schedule.lowering import add_messages, add_recompute, split_backwards
from zeromesh.parallel.pipeline.schedule.schedule_files import read_costs, read_schedule
from zeromesh.parallel.pipeline.schedule.validate import validate

EARLY = ("1f1b", "interleaved-1f1b")
"""Schedules of whole backwards in which a rank waits for the gradient of each micro-batch, which can be sent early."""


class ChosenSchedule:
    """The schedule of a configuration, by name or path, with its messages, for any number of micro-batches.

    With ``splits``, the backwards of those in ``EARLY`` give the input's gradient before the weights'.

    Raises:
        ValueError: there is no such schedule, or it does not fit the ranks and the micro-batches.
    """

    def __init__(
        self,
        schedule: str | Path,
        ranks: int,
        microbatches: int,
        chunks: int | None = None,
        costs: str | None = None,
        recompute: bool = False,
        splits: bool = False,
    ) -> None:
        self._splits = splits and schedule in EARLY
        self._ranks, self._chunks, self._costs_file, self._recompute = ranks, chunks, costs, recompute
        self.name = str(schedule)  # or the path of its file
        self._read = self._from_file(schedule) if isinstance(schedule, Path) else None
        if self._read is not None and costs is not None:
            raise ValueError(
                f"pipeline.schedule is the file {self.name}, which has the order of all actions, and "
                f"pipeline.costs = {costs} "
                "would choose one; leave one of them out"
            )
        self._costs = None if costs is None else read_costs(Path(costs))
        # Its actions, or the costs that they are placed by, are in a file, which ranks read for themselves.
        self.from_file = self._read is not None or self._costs is not None
        self._known = {microbatches: self._make(microbatches)}
        self.placement = self._known[microbatches].placement  # rank of each stage, for which the model is cut

    def of(self, microbatches: int) -> Schedule:
        """Return the schedule of a step. Raise ValueError if there is none, or it would move stages to other ranks."""
        if microbatches not in self._known:
            schedule = self._make(microbatches)
            # The search may choose another placement for another number; parameters stay where they are.
            if schedule.placement != self.placement:
                raise ValueError(
                    f"pipeline.schedule = {self.name} has other stages on the ranks for {microbatches} "
                    f"micro-batches, {schedule.placement}, than those that the model was cut for, {self.placement}; "
                    "keep the number of micro-batches, or name a schedule whose stages stay"
                )
            self._known[microbatches] = schedule
        return self._known[microbatches]

    def _make(self, microbatches: int) -> Schedule:
        if self._read is None:
            computed = self._named(microbatches)
        elif self._read.microbatches == microbatches:
            computed = self._read
        else:
            raise ValueError(
                f"pipeline.schedule: {self.name} is for {self._read.microbatches} micro-batches, and a step has "
                f"{microbatches}; set gradient_accumulation_steps to {self._read.microbatches}, or write a "
                "schedule for "
                f"{microbatches}"
            )
        if self._splits:
            computed = split_backwards(computed)
        if self._recompute:
            # Of the last stage the backward follows at once: there is nothing to be saved.
            computed = add_recompute(computed, range(computed.stages - 1))
        return computed if computed.has_messages else add_messages(computed, self._costs)

    def _named(self, microbatches: int) -> Schedule:
        try:
            return generate(self.name, self._ranks, microbatches, self._chunks, costs=self._costs)
        except ValueError as error:
            if self._costs is None:
                raise
            raise ValueError(f"pipeline.schedule = {self.name}, pipeline.costs = {self._costs_file}: {error}") from None

    def _from_file(self, path: Path) -> Schedule:
        """Return the schedule of a file. Raise ValueError, with the path, for one that these ranks cannot run."""
        try:
            schedule = read_schedule(path)
            ranks, chunks = len(schedule.ranks), self._chunks
            if ranks != self._ranks:
                raise ValueError(
                    f"it has the orders of {ranks} ranks, and mesh.pipeline is {self._ranks}; set that to {ranks}, "
                    f"or write a schedule for {self._ranks}"
                )
            # With messages of its own, it must get to its end also where a backend lets sends wait for receives.
            validate(schedule, rendezvous=True)
            if idle := [rank for rank in range(ranks) if not schedule.of_rank(rank)]:
                raise ValueError(f"rank {idle[0]} has no stage; give it one, or take fewer ranks")
            if chunks is not None and chunks * ranks != schedule.stages:
                raise ValueError(
                    f"it has {schedule.stages} stages on {ranks} ranks, and pipeline.chunks is {chunks}; "
                    "leave pipeline.chunks out"
                )
            if self._recompute and any(kind is Kind.RECOMPUTE for kind, _, _ in schedule.present):
                raise ValueError("it has RECOMPUTE actions of its own; set pipeline.recompute to false")
        except ValueError as error:
            raise ValueError(f"pipeline.schedule, {path}: {error}") from error
        return schedule
