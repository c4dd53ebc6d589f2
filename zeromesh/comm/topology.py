"""Topology of a group: the node of each rank, and the partners of a rank in two-step collectives."""

# Ranks of one node share a fast link; nodes are connected by a slow one. A two-step collective sends each element over
# the slow link once: rank ``place`` of a node exchanges only with rank ``place`` of the other nodes, and the ranks of a
# node share the result. With M nodes, P (M-1)/M elements of a buffer of P elements leave each node in an all-gather or
# a reduce-scatter. Direct messages between all pairs of ranks would send that amount once for every rank of the node.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The ranks of a group by node, seen from one of them."""

    nodes: tuple[tuple[int, ...], ...]  # the group ranks of each node; as many on each
    node: int  # index of this rank's node in ``nodes``
    place: int  # index of this rank in its node

    @classmethod
    def of(cls, node_of: Sequence[int], rank: int, hierarchical: bool | None) -> Topology:
        """Return the topology of a group, seen from its rank ``rank``; ``node_of`` is the node of each."""
        counts = Counter(node_of)
        even = len(set(counts.values())) == 1
        # True asks for two steps, False for direct messages; None takes two steps where that can be.
        if hierarchical and not even:
            raise ValueError(
                "two steps, or fewer bits, between nodes are asked for, but a group of "
                f"{len(node_of)} ranks lies on nodes with {', '.join(str(counts[node]) for node in sorted(counts))} of "
                "them; it needs as many on every node: start as many ranks on each, or leave it out"
            )
        if hierarchical is False or not even:
            node_of = [0] * len(node_of)  # as on one node, where all exchange with all
        names = sorted(set(node_of))
        nodes = tuple(tuple(other for other, of in enumerate(node_of) if of == name) for name in names)
        node = names.index(node_of[rank])
        return cls(nodes, node, nodes[node].index(rank))

    @cached_property
    def across(self) -> list[tuple[int, int]]:
        """Pairs (node, this rank's partner there) for all other nodes, in the order of their distance."""
        count = len(self.nodes)
        # Each node begins with another one, so that not all of them send to the first at the same time.
        others = [(self.node + distance) % count for distance in range(1, count)]
        return [(node, self.nodes[node][self.place]) for node in others]

    @cached_property
    def mates(self) -> list[tuple[int, int]]:
        """Pairs (place, group rank) of the other ranks of this node, in the order of their distance."""
        node_ranks = self.nodes[self.node]
        others = [(self.place + distance) % len(node_ranks) for distance in range(1, len(node_ranks))]
        return [(place, node_ranks[place]) for place in others]

    def shards_of(self, place: int) -> list[int]:
        """Return the rank at ``place`` of each node; these ranks exchange their shards over the slow link."""
        return [node[place] for node in self.nodes]
