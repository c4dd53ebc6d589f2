"""The loader that ``initialize(training_data=...)`` makes: passes over a data set, resumable in the middle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from zeromesh.base.containers import moved
from zeromesh.base.words import counted

_log = logging.getLogger(__name__)


class Position(NamedTuple):
    """Position of a run in its data: the pass, from 0, and the samples of its order that all ranks have taken."""

    number: int
    samples: int


class Sampler(DistributedSampler[Any]):
    """Distributed sampler that counts its passes, each with an order of its own, and may begin in the middle of one.

    With ``repeats`` all passes have torch's order of one epoch, the one of ``set_epoch``, as in DeepSpeed's loaders.
    """

    def __init__(
        self,
        data: Any,
        ranks: int,
        rank: int,
        seed: int,
        drop_last: bool,
        multiple: int = 1,
        shuffle: bool = True,
        *,
        repeats: bool = False,
    ) -> None:
        super().__init__(data, ranks, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.length = len(data)
        # Whole updates, so that which samples an update takes at the end of a pass does not depend
        # on the number of ranks either.
        self.used = self.length // multiple * multiple if drop_last else self.length
        if drop_last:
            self.num_samples = self.used // ranks
            self.total_size = self.num_samples * ranks
        self.repeated = 0 if repeats else None  # epoch whose order all passes have
        self.start = 0  # samples of the next pass that are left out, over all ranks
        self.begun = Position(0, 0)  # where the pass that was begun last began

    def __iter__(self) -> Iterator[Any]:
        self.begun = Position(self.epoch, self.start)
        self.epoch, self.start = self.epoch + 1, 0
        # The order follows from the seed and the number of the pass alone, and the ranks take its
        # samples in turn: so a position holds for any number of ranks.
        generator = torch.Generator()
        generator.manual_seed(self.seed + (self.begun.number if self.repeated is None else self.repeated))
        order = torch.randperm(self.length, generator=generator).tolist() if self.shuffle else [*range(self.length)]
        rest = order[self.begun.samples : self.used]
        if self.drop_last:
            rest = rest[: len(rest) // self.num_replicas * self.num_replicas]
        else:  # the ranks need the same number; as torch does, the first ones are taken again
            rest += islice(cycle(order), -len(rest) % self.num_replicas)
        return iter(rest[self.rank :: self.num_replicas])

    def set_epoch(self, epoch: int) -> None:
        """Choose the next pass; it begins at its beginning, unless it is the one that would have come anyway."""
        if self.repeated is not None:
            self.repeated = epoch
            return
        # Loops call it before every pass, also before the one that a checkpoint left in its middle.
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def begin_at(self, position: Position) -> None:
        """Begin the next pass there."""
        self.epoch, self.start = position


class Loader(DataLoader[Any]):
    """Batches of this rank's share of the data set, on ``device``; ``position`` is up to where they were handed out.

    Raises:
        ValueError: there is no batch in the data.
    """

    sampler: Sampler

    def __init__(
        self,
        data: Any,
        sampler: Sampler,
        batch_size: int,
        collate_fn: Any,
        drop_last: bool,
        device: torch.device | None = None,
    ) -> None:
        # torch draws a number for every pass; from the model's generator, it would draw it again for a resumed one.
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.rank)
        options: Any = {"collate_fn": collate_fn, "drop_last": drop_last, "generator": generator}
        super().__init__(data, batch_size, sampler=sampler, **options)
        self.position = Position(0, 0)
        self._device = device or torch.device("cpu")
        each = sampler.num_samples
        if not (each // batch_size if drop_last else sampler.length):
            left_out = ", and dataloader_drop_last leaves out what fills none" if drop_last else ""
            raise ValueError(
                f"training_data has {counted(sampler.length, 'sample')}, which gives no batch of {batch_size} for "
                f"each of {counted(sampler.num_replicas, 'rank')}{left_out}; add samples"
                + (", lower train_micro_batch_size_per_gpu, or set dataloader_drop_last to false" if drop_last else "")
            )

    def example(self) -> Any:
        """Return a micro-batch of the first samples, the same on every rank, without moving the loader."""
        assert self.batch_size is not None
        numbers = list(range(min(self.batch_size, self.sampler.length)))
        several = getattr(self.dataset, "__getitems__", None)  # as torch's loaders read, where there is that
        return self.collate_fn(several(numbers) if callable(several) else [self.dataset[n] for n in numbers])

    def __iter__(self) -> Any:
        return self._counted(super().__iter__())

    def passes(self) -> Iterator[Any]:
        """Yield batches of one pass after the other, without end."""
        while True:
            yield from self

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Worker processes read ahead: what the sampler has given out says nothing of what the user was handed.
        begun = None
        for count, batch in enumerate(batches, 1):
            # Only after the first batch: the sampler begins its pass when it is asked for it.
            begun = begun or self.sampler.begun
            assert self.batch_size is not None
            taken = begun.samples + count * self.batch_size * self.sampler.num_replicas
            self.position = Position(begun.number, min(taken, self.sampler.length))
            # Most models do not move their inputs.
            yield moved(batch, self._device)

    def state(self, position: Position) -> dict[str, Any]:
        """Return the state of a position for a checkpoint, with the data that it refers to."""
        return {**position._asdict(), "length": self.sampler.length, "seed": self._seed}

    @property
    def _seed(self) -> int | None:
        return self.sampler.seed if self.sampler.shuffle else None  # None: the order is the data set's own

    def require_same_data(self, saved: dict[str, Any] | None) -> None:
        """Raise ValueError if a saved position refers to another data set, or to another order of it."""
        for key, wanted in {"length": self.sampler.length, "seed": self._seed}.items():
            if saved is not None and saved[key] != wanted:
                before, now = (_about(key, value) for value in (saved[key], wanted))
                raise ValueError(
                    f"the checkpoint was trained on {before}, but this run has {now}; pass load_data_position=False to "
                    "begin with the first pass over it"
                )

    def go_to(self, saved: dict[str, Any] | None) -> Position:
        """Begin the next iterator at a saved position; None is the first pass."""
        number, samples = (0, 0) if saved is None else (saved["number"], saved["samples"])
        left = (self.sampler.total_size - samples) // self.sampler.num_replicas
        assert self.batch_size is not None
        # After a whole pass, at the beginning of the next one.
        over = left < self.batch_size if self.drop_last else samples >= self.sampler.length
        self.position = Position(number + 1, 0) if over and samples else Position(number, samples)
        self.sampler.begin_at(self.position)
        return self.position


def _about(key: str, value: int | None) -> str:
    """Describe one entry of a saved position."""
    if key == "length":
        return f"training_data of length {value}"
    return "the data set's own order" if value is None else f"the order of seed {value}"
