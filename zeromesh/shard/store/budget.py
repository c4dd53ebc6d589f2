"""Memory budget of states off the device, from the layout alone, compared with the machine before the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from zeromesh.base.placement import PlacementRow, Tier
from zeromesh.base.words import bytes_text
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.store.early import next_bytes
from zeromesh.shard.store.stores import StorePlace
from zeromesh.shard.store.swap import Rows, StateForm, loaded_bytes
from zeromesh.shard.store.tiers import Tiers

NEXT = "next copies of optimizer states"
PARTS = ("parameters", "gradients", "optimizer states", "buffers", NEXT)  # uses of host memory


@dataclass(frozen=True)
class MemoryBudget:
    """Memory budget of one rank off the device."""

    # Flat buffers whose masters and optimizer states rest in blocks, with the dtypes of the masters.
    blocks: dict[Flat, torch.dtype] = field(default_factory=dict)
    parameter: int = 0  # bytes in host memory, as the next two
    gradient: int = 0
    master: int = 0
    # Elements that have states in host memory, by the dtype of their masters; those of tables apart, as all their
    # states are like the master.
    updated: Counter[tuple[torch.dtype, bool]] = field(default_factory=Counter)
    # Those whose update may begin during the backward. Whose gradients come first is first: its update hides best.
    early: dict[Flat, torch.dtype] = field(default_factory=dict)
    stored: Sequence[Flat] = ()  # those whose parameters rest in blocks

    @classmethod
    def of(
        cls,
        flats: Sequence[Flat],
        tables: Sequence[Flat],
        row: PlacementRow,
        mixed: bool,
        gradient: int,
        early: Sequence[Flat] = (),
    ) -> MemoryBudget:
        """Return the budget of flat buffers that are laid out, and of tables in memory, which are in no blocks."""
        blocks, parameter, master, updated = {}, 0, 0, Counter[tuple[torch.dtype, bool]]()
        form = StateForm(split=row.split)
        for flat in (*flats, *tables):
            layout, elements = flat.layout, flat.own.stop - flat.own.start
            dtype = flat.master_dtype(mixed)
            # The tiers of a table are its own, whatever those of the row.
            if flat.sharded and flat.parameter_tier is Tier.HOST:
                parameter += layout.shard_size * layout.dtype.itemsize
            if not layout.trainable:
                continue
            is_split = flat not in tables and form.of(flat, dtype).split  # rows of tables are changed in place
            if flat.optimizer_tier.in_blocks or (flat.optimizer_tier is Tier.HOST and is_split):
                blocks[flat] = dtype
            elif flat.optimizer_tier is Tier.HOST:
                master += elements * dtype.itemsize if flat.apart or dtype != layout.dtype else 0
                pieces = layout.owned(flat.own.start, flat.own.stop)  # states have no padding
                updated[dtype, flat.wide_states] += sum(stop - start for _, start, stop in pieces)
        first = {flat: flat.master_dtype(mixed) for flat in reversed(early)}
        stored = [flat for flat in flats if flat.parameter_tier.in_blocks]
        return cls(blocks, parameter, gradient, master, updated, first, stored)

    def rows(self, form: StateForm) -> list[Rows]:
        """Return the rows of all blocks."""
        return [Rows(flat, dtype, form) for flat, dtype in self.blocks.items()]

    def first_early(self, share: float) -> list[Flat]:
        """Return the first of ``early``, as many as are no more than this share of all their elements."""
        sizes = {flat: flat.own.stop - flat.own.start for flat in self.early}
        left, flats = share * sum(sizes.values()), []
        for flat, size in sizes.items():
            if size > left:
                break
            left -= size
            flats.append(flat)
        return flats

    def host(
        self, form: StateForm, in_blocks: StorePlace | None, stored: StorePlace | None, early: Sequence[Flat] = ()
    ) -> dict[str, int]:
        """Return bytes in host memory by what they are for, with these states of a parameter, stores and updates."""
        copies = sum(sum(next_bytes(flat, self.early[flat], form)) for flat in early)
        rows, rest, buffers = self.rows(form), self.master, 0
        for (dtype, is_wide), elements in self.updated.items():
            rest += elements * (replace(form, narrow=frozenset()) if is_wide else form).state_bytes(dtype)
        if in_blocks is not None:
            rest += sum(of.nbytes for of in rows) if in_blocks.in_memory else 0
            buffers += in_blocks.buffer_bytes(of.block_bytes(window) for of in rows for window in of.windows)
        if stored is not None:
            buffers += stored.buffer_bytes(flat.layout.shard_bytes for flat in self.stored)
        sizes = (self.parameter, self.gradient, rest, buffers + loaded_bytes(rows), copies)
        return {name: size for name, size in zip(PARTS, sizes, strict=True) if size}


# Called by all ranks before anything is placed: checks the budget and opens the files, if any are needed.
Prepare = Callable[[MemoryBudget], Tiers]


def require_host_memory(parts: dict[str, int], available: int, limit: int | None) -> None:
    """Raise ValueError if the ``parts`` of all ranks of a node are more bytes than there are, or than ``limit``."""
    total, most = sum(parts.values()), available if limit is None else min(limit, available)
    if total <= most:
        return
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    allowed = f"{bytes_text(available)} are available"
    if limit is not None and limit <= available:
        allowed = f"host_memory_limit is {bytes_text(limit)}"
    raise ValueError(
        f"what is to rest in the host memory of this node takes {bytes_text(total)} ({listed}), but {allowed}; "
        f"{_what_fits(parts, most)}"
    )


def _what_fits(parts: dict[str, int], most: int) -> str:
    moved = parts.get("gradients", 0) + parts.get("optimizer states", 0)
    rest = sum(parts.values()) - moved
    ways = []
    if NEXT in parts and (without := sum(parts.values()) - parts[NEXT]) <= most:
        ways.append(f"offload_optimizer.update_during_backward = 0 takes {bytes_text(without)}")
    if 0 < (share := int(100 * (most - rest) / moved) / 100 if moved else 0.0) < 1:
        ways.append(f"offload_optimizer.ratio = {share:g} fits, and leaves the other states on the device")
    in_files = [("offload_optimizer.device", "optimizer states"), ("offload_param.device", "parameters")]
    movable = [entry for entry in in_files if entry[1] in parts]
    for chosen in [[entry] for entry in movable] + [movable] * (len(movable) > 1):
        remaining = sum(parts.values()) - sum(parts[part] for _, part in chosen)
        if remaining < most:
            verb, also = "take" if len(chosen) > 1 else "takes", f"{bytes_text(remaining)} and " if remaining else ""
            ways.append(f"{' and '.join(key for key, _ in chosen)} = nvme {verb} {also}some buffers")
            break
    ways.append("spread the states over more nodes" if ways else "take a machine with more memory, or more nodes")
    return "; or ".join(ways)
