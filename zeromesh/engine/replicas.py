"""Compare copies of states on several ranks, bit by bit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import torch

from zeromesh.base.kernels.sums import checksum
from zeromesh.comm.agreement import texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.peers import named
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.unit import State
from zeromesh.shard.sharded import ShardedModel

FROZEN = "frozen parameter "

_log = logging.getLogger("zeromesh")

SHOWN = 5  # tensors that are named


class ReplicaMismatch(Exception):
    """Copies of a tensor, which updates keep equal, are not equal."""


def require_equal_replicas(sharded: ShardedModel, when: str) -> None:
    """Compare parameters and masters between the ranks that hold copies of them; ``when`` is for messages. Collective.

    Raises:
        ReplicaMismatch: the message names tensors and ranks; every rank raises it.
    """
    mesh = sharded.mesh
    # What is gathered after each update is compared where it is whole, which finds a faulty gather, too.
    differences = []
    for axis in sorted({flat.layout.axis for flat in sharded.flats}):
        differences += _differences(mesh.shards_of(axis), _whole(sharded, axis))
    for copies in mesh.copies:
        differences += _differences(copies, _kept(sharded))
    world = mesh.group("world")
    # One number first: that all is well costs no texts.
    if not bool(world.exchange(torch.tensor([float(bool(differences))], dtype=torch.float64)).any()):
        return
    said = [line for text in texts(world, "\n".join(differences)) for line in text.splitlines()]
    every = list(dict.fromkeys(said))
    # Updates do not keep frozen parameters equal: a program may have set them per rank, which is no fault of a machine.
    lines = [line for line in every if not line.startswith(FROZEN)]
    if not lines:
        if mesh.rank == 0:
            _log.warning("ranks have changed frozen parameters differently, %s: %s", when, "; ".join(every[:SHOWN]))
        return
    more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    raise ReplicaMismatch(
        f"copies that updates keep equal differ {when}:\n  "
        + "\n  ".join(lines[:SHOWN])
        + more
        + "\nA fault of the memory, or a program that wrote to the parameters of some ranks only, changed them; go on "
        "from the last checkpoint with engine.load_checkpoint, and have the memory tested if no program does so"
    )


def _differences(group: Group, tensors: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Return a line for each tensor that is not the same on all ranks of the group."""
    if group.size == 1:
        return []
    # Hashes are exchanged and not values, so that a check costs no memory.
    hashes = {name: checksum(tensor.detach().cpu().contiguous()) for name, tensor in tensors}
    if not hashes:
        return []
    # As signed numbers of the same bits, which int64 can hold.
    signed = [value - (value >> 63 << 64) for value in hashes.values()]
    rows = group.exchange(torch.tensor(signed, dtype=torch.int64))
    members = torch.distributed.get_process_group_ranks(group.process_group)
    lines = []
    for name, column in zip(hashes, rows.T.tolist(), strict=True):
        (usual, count), *others = Counter(column).most_common()
        if not others:
            continue
        # The majority is taken to be right; two ranks that differ have none.
        odd = [rank for rank, value in zip(members, column, strict=True) if value != usual]
        rest = [rank for rank in members if rank not in odd]
        differ = f"{named(odd)} differ{'s' if len(odd) == 1 else ''} from {named(rest)}"
        lines.append(f"{name}: {differ if count > 1 else f'{named(sorted(members))} have different values'}")
    return lines


def _whole(sharded: ShardedModel, axis: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, of those split along an axis, that every rank of the shard group holds whole."""
    for unit in sharded.units:
        for flat in (flat for flat in unit.flats if flat.layout.axis == axis):
            if not unit.sharded and unit.state is State.FETCHED:
                for segment in flat.layout.segments:
                    yield _kind(flat) + segment.name, flat.full[segment.start : segment.stop]
            if (
                flat.own.stop - flat.own.start == flat.layout.size
                # A master that is the parameter itself was compared above; one on NVMe has
                # checksums of its own.
                and flat.master is not flat.shard
                and not flat.keeps_states
            ):
                for _, local, piece in flat.pieces:
                    yield f"the master of {piece.name}", flat.master[local]


def _kind(flat: Flat) -> str:
    return "parameter " if flat.layout.trainable else FROZEN


def _kept(sharded: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the shards of a rank, of which replicas of the group have copies."""
    for flat in sharded.flats:
        if flat in sharded.tables.flats:
            flat.load_states()  # replicas may have other rows in their caches
        for index, start, stop in flat.layout.owned(flat.own.start, flat.own.stop):
            name, local = flat.layout.segments[index].name, slice(start - flat.own.start, stop - flat.own.start)
            # Files have checksums of their own; a split parameter is a half of its master.
            if not flat.parameter_tier.in_blocks and not flat.splits:
                yield _kind(flat) + name, flat.shard[local]
            if flat.layout.trainable and flat.master is not flat.shard and not flat.keeps_states:
                yield f"the master of {name}", flat.master[local]
