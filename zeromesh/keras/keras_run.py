"""State of a distributed Keras model: the rows of its ranks, and what they exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from zeromesh.base.randomness import drawing_from, random_state
from zeromesh.comm.agreement import agree_success, catch, require_agreement
from zeromesh.comm.collectives import Group
from zeromesh.engine.engine import Engine
from zeromesh.keras.checks import check_callbacks, is_keras_own, names_of_all_ranks, of_rank
from zeromesh.keras.data import BatchRows, checksum_of, rows_in
from zeromesh.keras.statistics import JointBatch
from zeromesh.shard.parameters.absent_guard import change_class


@contextmanager
def kept(variables: Iterable[Any]) -> Iterator[list[torch.Tensor]]:
    """Restore the values of Keras variables at the end of this context."""
    every = list(variables)
    values = [variable.value.detach().clone() for variable in every]
    try:
        yield values
    finally:
        for variable, value in zip(every, values, strict=True):
            variable.assign(value)


def _masks(y_pred: Any) -> list[Any]:
    """Return the mask of each output, or None."""
    return [getattr(output, "_keras_mask", None) for output in keras.tree.flatten(y_pred)]


@dataclass
class DistributedRun:
    """State of a distributed model beside what Keras has."""

    engine: Engine
    joint: JointBatch  # the ranks whose rows make the joint batch
    splits: bool  # each rank gets the joint batches, and takes its rows; False: it gets its own batches
    # (Layer, its own class, its class here) of the model and of layers that are changed.
    classes: list[tuple[Any, type, type]] = field(default_factory=list)
    symbolic: bool = False  # Keras is finding out shapes, without values
    compares: bool = True  # the next batch is compared over the ranks
    agrees: bool = False  # callbacks of the user's may stop the training on one rank
    # Kinds of steps whose first batch has not shown that parts make it up.
    probes: set[str] = field(default_factory=set)

    def compare_next(self) -> None:
        """Compare the next batch over the ranks."""
        self.compares = True

    def agreed_callbacks(self, callbacks: Any) -> list[Any]:
        """Return the callbacks of this rank, and note whether some rank's may stop the training alone. Collective."""
        every, failure = catch(lambda: check_callbacks(callbacks))
        agree_success(self.world, "check its callbacks", failure)
        assert every is not None
        # They save, restore weights or stop on all ranks, or the others would wait.
        require_agreement(self.world, "the list of Keras callbacks", ", ".join(names_of_all_ranks(every)))
        flag = torch.tensor([float(any(not is_keras_own(callback) for callback in every))])
        self.agrees = bool(self.world.exchange(flag).any())
        return of_rank(every, self.engine.mesh.rank)

    def share(self, y_pred: Any, rows: int) -> float:
        """Return the weight of a loss of some rows in a mean: their number, or that of elements without a mask."""
        masks = [mask for mask in _masks(y_pred) if mask is not None]
        return float(sum(mask.sum() for mask in masks)) if masks else float(rows)

    @contextmanager
    def finding_shapes(self) -> Iterator[None]:
        """Exchange nothing in this context: Keras computes without values."""
        self.symbolic = True
        try:
            yield
        finally:
            self.symbolic = False

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """Draw numbers of torch in this context that no other rank draws, and no other batch.

        Ranks share the state from which samples are shuffled, and Dropout would draw from it the same elements of the
        rows of each. The numbers follow from it and from the engine's counters, which checkpoints have.
        """
        engine, device = self.engine, self.engine.device
        if engine.data_size == 1:
            yield
            return
        shared = random_state(device)
        counters = f"{engine.global_steps} {engine.micro_steps} {engine.data_rank}"
        digest = hashlib.sha256(shared[0].numpy().tobytes() + counters.encode()).digest()
        with drawing_from(shared, device):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            yield

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.joint.group

    def rows(self, batch: Any) -> BatchRows:
        """Return the rows of this rank. Collective where ranks have batches of their own."""
        if self.splits:
            if self.compares:
                self._require_same(batch)
            rows = BatchRows.of(batch, self.engine.data_rank, self.engine.data_size)
        else:
            count = rows_in(batch)
            total = int(self.world.exchange(torch.tensor([count])).sum())
            rows = BatchRows(0, count, total, self.world.size)
        self.joint.take(rows.count > 0)
        return rows

    def _require_same(self, batch: Any) -> None:
        self.compares = False
        checksums = self.world.exchange(torch.tensor([checksum_of(batch)], dtype=torch.float64)).flatten().tolist()
        if len(set(checksums)) > 1:
            raise ValueError(
                f"ranks 0 to {self.world.size - 1} got different first batches, and each would take its rows of "
                "another one: give all ranks the same data in the same order (a seed for every shuffle), or give each "
                "rank its own batches and pass distribute(..., own_batches=True)"
            )

    def factor(self, y_pred: Any, rows: BatchRows) -> float:
        """Return the factor of this rank's loss that makes its mean over ranks the joint loss."""
        masks = _masks(y_pred)
        if all(mask is None for mask in masks):
            return rows.weight
        if len(masks) > 1:
            raise ValueError(
                "the model has several outputs with masks, whose losses are means over different numbers of elements: "
                "leave out mask_zero, and pass sample_weight with zeros where elements do not count"
            )
        # Keras takes the mean over elements that are not masked, so that these are counted over the ranks.
        valid = float(masks[0].sum()) if rows.count else 0.0
        every = self.world.exchange(torch.tensor([valid], dtype=torch.float64))
        return valid * every.numel() / max(float(every.sum()), 1.0)

    def joined_rows(self, output: torch.Tensor, rows: BatchRows) -> torch.Tensor:
        """Return the rows of all ranks; a rank without any computed one for nothing."""
        if not self.splits or rows.ranks == 1:
            return output
        most = -(-rows.total // rows.ranks)
        padded = output.new_zeros(most, *output.shape[1:])
        padded[: rows.count] = output[: rows.count]
        # As bytes, because the backends do not know every dtype.
        every = self.world.exchange(padded.contiguous().reshape(-1).view(torch.uint8))
        each, more = divmod(rows.total, rows.ranks)
        parts = [row.view(output.dtype).reshape(padded.shape)[: each + (n < more)] for n, row in enumerate(every)]
        return torch.cat(parts).to(output.device)

    @contextmanager
    def joined(self, variables: list[Any]) -> Iterator[None]:
        """Let metric variables have their sums over ranks in this context. Collective."""
        if self.world.size == 1 or self.symbolic or not variables:
            yield
            return
        for variable in variables:
            if variable.aggregation != "sum":
                raise ValueError(
                    f"variable {variable.path} of a metric has aggregation={variable.aggregation!r}, so that the "
                    'metric over all ranks is not known: make it with add_variable(..., aggregation="sum"), the default'
                )
        with kept(variables) as values:
            rows = self.world.exchange(torch.cat([value.reshape(-1).double() for value in values])).sum(0)
            for variable, value, part in zip(variables, values, rows.split([v.numel() for v in values]), strict=True):
                variable.assign(part.reshape(value.shape).to(value))
            yield

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Give the model and its layers the classes in this context that files name."""
        for layer, original, _ in self.classes:
            change_class(layer, original)
        try:
            yield
        finally:
            for layer, _, changed in self.classes:
                change_class(layer, changed)
