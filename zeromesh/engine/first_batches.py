"""Warn where ranks that should have samples of their own train on the same ones: no DistributedSampler, one seed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

import torch

from zeromesh.base.containers import tensors_of
from zeromesh.base.words import counted
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.peers import named

COMPARED = 2  # micro-batches, at least, that are compared, once
MOST = 8  # micro-batches that are compared of one update
SAMPLED = 4096  # entries of a tensor whose places count, at most

_log = logging.getLogger("zeromesh")


class FirstBatches:
    """Fingerprints of this rank's first micro-batches, which the first updates' agreement carries to the others.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._fingerprints: list[torch.Tensor] = []
        self._open = mesh.data_size > 1
        self._turns = mesh.group("world").ranks_per_slot  # of so many ranks, which share a slot, the first tells

    def note(self, inputs: Any) -> None:
        """Take in a micro-batch, the model's arguments in any containers."""
        if self._open and len(self._fingerprints) < MOST:
            self._fingerprints.append(fingerprint(inputs, self._mesh.device))

    def tell(self) -> float:
        """Return a number that ranks with the same micro-batches have in common, once; else 0.

        0, too, if the micro-batches do not differ from each other: a loader's do, and where one batch is repeated, as
        in a benchmark, all ranks may well have it.
        """
        if not self._open or len(self._fingerprints) < COMPARED:
            return 0.0
        self._open = False
        numbers: list[float] = torch.stack(self._fingerprints).tolist()
        self._fingerprints.clear()
        if self._mesh.rank % self._turns:
            return 0.0
        joined = sum(number * (place + 1) for place, number in enumerate(numbers))
        return joined if len(set(numbers)) > 1 and isfinite(joined) else 0.0

    def hear(self, told: Sequence[float]) -> None:
        """Take what ranks have told in this update, by slot, and warn on the first rank of those that are alike."""
        if self._mesh.rank or not any(told):
            return
        alike: dict[float, list[int]] = {}
        for ranks in self._mesh.shares():
            number = next((told[rank // self._turns] for rank in ranks if rank % self._turns == 0), 0.0)
            if number:
                alike.setdefault(number, []).extend(ranks)
        per_share = self._mesh.world_size // self._mesh.data_size
        groups = [sorted(ranks) for ranks in alike.values() if len(ranks) > per_share]
        if groups:
            count = len(groups[0]) // per_share
            _log.warning(
                "%s train on the same samples: their first micro-batches are equal, so that the update counts each "
                "sample %s; give each rank its own share with training_data= of initialize, "
                "DistributedSampler(dataset, num_replicas=engine.data_size, rank=engine.data_rank), or a seed that "
                "depends on engine.data_rank",
                " and ".join(map(named, groups)),
                counted(count, "time"),
            )


def fingerprint(value: Any, device: torch.device) -> torch.Tensor:
    """Return one float64 that depends on the numbers in nested tensors and, of a part of them, on their places."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for place, tensor in enumerate(map(torch.Tensor.detach, tensors_of(value))):
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        with suppress(RuntimeError, TypeError):  # types of 4 and 8 bits have no sums, nested tensors no places
            numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            sample = numbers.reshape(-1)[:: max(1, numbers.numel() // SAMPLED)].double()
            weights = torch.arange(1, len(sample) + 1, dtype=torch.float64, device=tensor.device)
            number = numbers.sum(dtype=torch.float64) + (sample * weights).sum()
            total = total + (number * (place % 97 + 1)).to(device)
    return total
