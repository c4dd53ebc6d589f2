"""Facts that ranks exchange right after their group has started: versions and hosts."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from zeromesh.base.version import VERSION
from zeromesh.comm.detect import Environment
from zeromesh.comm.failure import StartError

# Bytes of each field. It must stay as it is, with the order of the fields, for versions that differ to be told.
_WIDTH = 32

VERSIONS = ("zeromesh", "torch", "python")


@dataclass(frozen=True)
class Peer:
    """Facts of one rank."""

    versions: tuple[str, ...]  # of ``VERSIONS``
    host: str  # a hash

    @classmethod
    def own(cls) -> Peer:
        """Return the facts of this rank."""
        python = ".".join(platform.python_version_tuple()[:2])  # patch releases fit together
        # With torchrun's number of the node, as containers may share a name.
        host = hashlib.sha256(f"{socket.gethostname()} {os.environ.get('GROUP_RANK')}".encode()).hexdigest()
        return cls((VERSION, torch.__version__, python), host[:_WIDTH])


def gather(device: torch.device) -> list[Peer]:
    """Return the facts of every rank; ``device`` is one that the group serves. Collective."""
    peer = Peer.own()
    fields = [text.encode()[:_WIDTH].ljust(_WIDTH, b"\0") for text in (*peer.versions, peer.host)]
    row = torch.frombuffer(bytearray(b"".join(fields)), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    peers = []
    for peer_row in rows:
        *versions, host = [
            bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in peer_row.split(_WIDTH)
        ]
        peers.append(Peer(tuple(versions), host))
    return peers


def require_same_versions(peers: Sequence[Peer]) -> None:
    """Raise StartError, with a table of the ranks' versions, unless all have the same."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, peer in enumerate(peers):
        ranks_of.setdefault(peer.versions, []).append(rank)
    if len(ranks_of) == 1:
        return
    rows = [("ranks", *VERSIONS), *((ranges(ranks), *versions) for versions, ranks in ranks_of.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    raise StartError(
        "the ranks have different versions; install the same ones on all nodes, or give all ranks the same "
        "environment:\n" + "\n".join(table)
    )


def ranges(ranks: Sequence[int]) -> str:
    """Shorten ascending numbers: "0-3, 6"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def named(ranks: Sequence[int]) -> str:
    """Name ascending ranks: "rank 2", "ranks 0-3, 6"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def with_topology(environment: Environment, peers: Sequence[Peer]) -> Environment:
    """Return the environment with the node and the local rank that follow from the ranks' hosts."""
    hosts = [peer.host for peer in peers]
    local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[environment.rank]]
    nodes = list(dict.fromkeys(hosts))
    return replace(
        environment,
        local_rank=local_ranks.index(environment.rank),
        node_rank=nodes.index(hosts[environment.rank]),
        local_world_size=len(local_ranks),
        node_count=len(nodes),
        placed=True,
    )
