"""Which ranks of a group share a node, and the two steps of a collective that follow from it.

Ranks that share a node are joined by a fast link, nodes by a slow one. Over the slow link every number should pass
once: rank ``place`` of each node exchanges with rank ``place`` of the other nodes only, and the ranks of a node share
what they got. With M nodes, P (M-1)/M elements of a unit of P then leave each node in an all-gather or a
reduce-scatter, and not as many times that as a node has ranks, which direct messages between all pairs would send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """The ranks of a group by node, seen from one of them.

    Attributes:
        nodes: group ranks, a list for each node; all of one length.
        node: this rank's.
        place: this rank's position in it.
    """

    nodes: tuple[tuple[int, ...], ...]
    node: int
    place: int

    @classmethod
    def of(cls, node_of: Sequence[int], rank: int, hierarchical: bool | None) -> Places:
        """From the node of every group rank.

        Args:
            node_of: the node of each group rank.
            rank: this one.
            hierarchical: whether to go through the nodes in two steps; None: where every node has as many ranks.

        Raises:
            ValueError: ``hierarchical`` is asked for, and the nodes differ in their numbers of ranks.
        """
        counts = Counter(node_of)
        even = len(set(counts.values())) == 1
        if hierarchical and not even:
            raise ValueError(
                "two steps, or fewer bits between nodes, are asked for (communication.hierarchical, across_nodes_*, or "
                f"DeepSpeed's zero_quantized_*), but a group of {len(node_of)} ranks lies on nodes with "
                f"{', '.join(str(counts[node]) for node in sorted(counts))} of them; it needs as many on every node: "
                "start as many ranks on each, or leave it out"
            )
        if hierarchical is False or not even:
            node_of = [0] * len(node_of)
        names = sorted(set(node_of))
        nodes = tuple(tuple(other for other, of in enumerate(node_of) if of == name) for name in names)
        node = names.index(node_of[rank])
        return cls(nodes, node, nodes[node].index(rank))

    @property
    def across(self) -> list[tuple[int, int]]:
        """(node, the rank there that exchanges with this one) for all other nodes, nearest first."""
        count = len(self.nodes)
        others = [(self.node + distance) % count for distance in range(1, count)]
        return [(node, self.nodes[node][self.place]) for node in others]

    @property
    def mates(self) -> list[tuple[int, int]]:
        """(place, rank) of the others on this node, nearest first."""
        own = self.nodes[self.node]
        others = [(self.place + distance) % len(own) for distance in range(1, len(own))]
        return [(place, own[place]) for place in others]

    def shards_of(self, place: int) -> list[int]:
        """The group ranks at a place, node by node: whose shards that place of each node carries over the slow link."""
        return [node[place] for node in self.nodes]
