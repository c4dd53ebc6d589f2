"""Flat buffers and slots: every element has one place and one owner, and memory is lent without a copy."""

import random
from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from run import train_step
from zeromesh.shard.layout import ALIGNMENT, Layout, round_up
from zeromesh.shard.parameters import slots
from zeromesh.shard.parameters.slots import Pool, Slot, attach, detach, largest

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex128)


def layouts() -> Iterator[Layout]:
    chance = random.Random(0)
    for trial in range(300):
        shapes = [
            torch.Size(chance.choices((0, 1, 2, 3, 5, 17, 64), (1, 4, 4, 4, 4, 4, 4), k=chance.randint(0, 3)))
            for _ in range(chance.randint(0, 9))
        ]
        named = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
        layout = Layout.build(named, DTYPES[trial % len(DTYPES)], True, chance.choice((1, 2, 3, 4, 7, 8)))
        assert [(s.name, s.shape) for s in layout.segments] == named
        yield layout


def test_segments_hold_their_shapes_in_order_without_overlap() -> None:
    for layout in layouts():
        assert [s.stop - s.start for s in layout.segments] == [s.shape.numel() for s in layout.segments]
        assert all(a.stop <= b.start for a, b in pairwise(layout.segments))
        assert all(s.start >= 0 and s.stop <= layout.size for s in layout.segments)


def test_every_parameter_and_every_shard_starts_at_a_boundary() -> None:
    for layout in layouts():
        itemsize = layout.dtype.itemsize
        assert all(s.start * itemsize % ALIGNMENT == 0 for s in layout.segments)
        assert layout.size == layout.shard_size * layout.shards > 0
        assert layout.shard_size * itemsize % ALIGNMENT == 0


def test_no_more_is_padded_than_the_boundaries_ask_for() -> None:
    for layout in layouts():
        line = ALIGNMENT // layout.dtype.itemsize
        wanted = sum(round_up(s.shape.numel(), line) for s in layout.segments)
        assert layout.size == max(1, -(-wanted // (line * layout.shards))) * line * layout.shards
        assert layout.nbytes == layout.size * layout.dtype.itemsize
        assert layout.elements == sum(s.shape.numel() for s in layout.segments)


def test_segments_and_gaps_cover_the_buffer_once() -> None:
    for layout in layouts():
        covered = torch.zeros(layout.size, dtype=torch.int)
        for start, stop in [*((s.start, s.stop) for s in layout.segments), *layout.gaps]:
            covered[start:stop] += 1
        assert bool((covered == 1).all())
        assert all(start < stop for start, stop in layout.gaps)


def test_the_parts_of_the_ranks_partition_every_parameter() -> None:
    for layout in layouts():
        found: list[list[tuple[int, int]]] = [[] for _ in layout.segments]
        for rank in range(layout.shards):
            low, high = rank * layout.shard_size, (rank + 1) * layout.shard_size
            for index, start, stop in layout.owned(low, high):
                assert low <= start < stop <= high
                found[index].append((start, stop))
        for segment, ranges in zip(layout.segments, found, strict=True):
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
            assert (not ranges) == (segment.shape.numel() == 0)
            assert not ranges or (ranges[0][0], ranges[-1][1]) == (segment.start, segment.stop)


def test_a_rank_with_the_whole_buffer_owns_whole_parameters() -> None:
    for layout in layouts():
        full = [(i, s.start, s.stop) for i, s in enumerate(layout.segments) if s.shape.numel()]
        assert layout.owned(0, layout.size) == full


def test_a_pool_lends_the_smallest_slot_that_fits_and_nothing_smaller() -> None:
    pool = Pool([64, 256, 0, 128], CPU)
    assert pool.nbytes == 448
    taken = [pool.take(100), pool.take(100), pool.take(100), pool.take(10)]
    assert [slot and slot.nbytes for slot in taken] == [128, 256, None, 64]
    assert taken[1] is not None
    pool.give(taken[1])
    assert pool.take(1) is taken[1]
    for slot in (taken[1], taken[0], taken[3]):
        assert slot is not None
        pool.give(slot)
    assert [slot and slot.nbytes for slot in (pool.take(1), pool.take(1), pool.take(1))] == [64, 128, 256]


def test_the_growth_of_a_pool_is_counted_and_used_again() -> None:
    pool = Pool([64], CPU)
    grown = pool.grow(640)
    assert pool.nbytes == 704
    pool.give(grown)
    assert pool.take(65) is grown
    assert pool.take(65) is None
    assert pool.nbytes == 704


def test_any_units_fit_into_slots_of_the_largest_sizes() -> None:
    sizes = [5, 1, 9, 9, 3]
    assert largest(sizes, 2) == [9, 9]
    assert largest(sizes, 9) == [9, 9, 5, 3, 1]
    assert largest([], 2) == []


@pytest.mark.parametrize("swap", [True, False])
def test_views_of_a_storage_see_the_memory_that_is_put_into_it(swap: bool) -> None:
    if swap and not slots.CAN_SWAP:
        pytest.skip("torch before 2.13 cannot swap memory")
    with patch.object(slots, "CAN_SWAP", swap):
        home = torch.UntypedStorage(64)
        view = torch.empty(0, dtype=torch.float64).set_(home, 0, (8,), (1,))
        corner = view.view(2, 4).t()[1:]
        home.resize_(0)
        for value in (1.0, 2.0):
            slot = Slot(64, CPU, lent=True).fill()
            assert slot.storage.nbytes() == (64 if swap else 0)
            attach(home, slot)
            view.fill_(value)
            assert home.nbytes() == 64
            assert corner.sum() == 6 * value
            detach(home, slot)
            assert home.nbytes() == 0
            assert slot.storage.nbytes() == (64 if swap else 0)
            if swap:
                assert slot.tensor(8, torch.float64).tolist() == [value] * 8


def losses(swap: bool) -> list[float]:
    with patch.object(slots, "CAN_SWAP", swap):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(5)), nn.Linear(9, 1))
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
        engine = zeromesh.initialize(model=model, config={**config, "zero_optimization": {"stage": 3}})[0]
        found = []
        for step in range(4):
            batch = torch.randn(4, 9, generator=torch.Generator().manual_seed(7 * step + engine.data_rank))
            found.append(train_step(engine, engine(batch).square().mean()))
        engine.destroy()
        return found


def test_training_is_the_same_where_memory_cannot_be_swapped() -> None:
    assert run_ranks(losses, 2, False) == run_ranks(losses, 2, True)
