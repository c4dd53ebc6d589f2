"""How parameters are cut: arithmetic."""

import pytest
import torch

from zeromesh.base.split import Held, Split

WHOLE = torch.arange(12 * 5).view(12, 5)


def join(split: Split, whole: torch.Tensor) -> torch.Tensor:
    joined = torch.full_like(whole, -1)
    for rank in range(split.ranks):
        Held(tuple(whole.shape), split, rank, split.ranks).place(split.take(whole, rank), joined)
    return joined


@pytest.mark.parametrize(
    ("split", "intervals"),
    [
        (Split.even(0, [12], 3), [[(0, 4)], [(4, 8)], [(8, 12)]]),
        (Split.even(0, [4, 8], 2), [[(0, 2), (4, 8)], [(2, 4), (8, 12)]]),
        # q with 4 heads, k and v with one each that both ranks have
        (Split.even(0, [8, 2, 2], 2, block=2), [[(0, 4), (8, 10), (10, 12)], [(4, 8), (8, 10), (10, 12)]]),
        # 2 heads of keys on 4 ranks
        (Split.even(0, [12], 4, block=6), [[(0, 6)], [(0, 6)], [(6, 12)], [(6, 12)]]),
        (Split.padded(0, 12, 5), [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)], [(12, 12)]]),
        (Split.padded(0, 12, 8), [[(start, min(start + 2, 12))] for start in (0, 2, 4, 6, 8, 10, 12, 12)]),
    ],
)
def test_parts_are_cut_and_joined(split: Split, intervals: list[list[tuple[int, int]]]) -> None:
    assert [list(part) for part in split.intervals] == intervals
    parts = [split.take(WHOLE, rank) for rank in range(split.ranks)]
    assert {tuple(part.shape) for part in parts} == {split.shape(WHOLE.shape, 0)}
    assert torch.equal(join(split, WHOLE), WHOLE)
    for rank, part in enumerate(parts):
        filled = sum(count for _, _, count in split.boxes(rank))
        assert not part[filled:].any()
        for at, start, count in split.boxes(rank):
            assert torch.equal(part[at : at + count], WHOLE[start : start + count])


def test_the_dim_may_be_any() -> None:
    split = Split.even(1, [2, 4], 2)
    whole = torch.arange(4 * 6 * 3).view(4, 6, 3)
    assert torch.equal(split.take(whole, 1), whole[:, [1, 4, 5]])
    assert torch.equal(join(split, whole), whole)


def test_ranks_with_the_same_part_hold_copies_and_one_of_them_owns_it() -> None:
    split = Split.even(0, [12], 4, block=6)
    assert [split.holders(*split.intervals[rank][0]) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    fused = [Held((8 + 2, 3), Split.even(0, [8, 2], 4, block=2), rank, 4) for rank in range(4)]
    boxes = [list(held.boxes(0, 12)) for held in fused]
    assert [[(box.offsets[0], box.owned, box.sharers) for box in found] for found in boxes] == [
        [(0, True, 1), (8, True, 4)],
        [(2, True, 1), (8, False, 4)],
        [(4, True, 1), (8, False, 4)],
        [(6, True, 1), (8, False, 4)],
    ]


HELD = [
    (WHOLE.shape, None, 1),
    (WHOLE.shape, Split.even(0, [4, 8], 2), 2),
    (WHOLE.shape, Split.even(0, [8, 2, 2], 2, block=2), 2),
    (WHOLE.shape, Split.padded(0, 12, 5), 5),
    (WHOLE.shape, Split.padded(0, 12, 8), 8),
    ((5, 12), Split.even(1, [4, 8], 2), 2),
    ((5, 12), Split.even(1, [12], 3), 3),
    ((2, 3, 4), Split.even(1, [2, 1], 1), 1),
    ((3, 8, 2), Split.even(1, [4, 4], 2), 2),
    ((3, 2, 6), Split.padded(2, 6, 4), 4),
]


@pytest.mark.parametrize(("shape", "split", "ranks"), HELD)
def test_any_range_of_what_a_rank_holds_is_read_and_written(shape, split, ranks, monkeypatch) -> None:
    whole = torch.arange(1, 1 + torch.Size(shape).numel())
    monkeypatch.setattr("zeromesh.base.split.READ", 7)
    written = torch.zeros(shape, dtype=torch.long)
    for rank in range(ranks):
        held = Held(tuple(shape), split, rank, ranks)
        part = held.cut(whole.view(shape)).reshape(-1)
        for start in range(part.numel()):
            for stop in range(start + 1, part.numel() + 1):
                assert torch.equal(held.read(lambda a, b: whole[a:b], start, stop), part[start:stop])
                for box in held.boxes(start, stop):
                    inside = whole.view(shape)
                    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                        inside = inside.narrow(dim, offset, size)
                    mine = torch.cat([part[low:high] for low, high in box.runs])
                    assert all(start <= low < high <= stop for low, high in box.runs)
                    assert torch.equal(inside.reshape(-1)[box.start : box.stop], mine)
                    assert box.owned or box.sharers > 1
        held.place(held.cut(whole.view(shape)), written)
        assert sum(box.stop - box.start for box in held.boxes(0, part.numel())) == int((part > 0).sum())
    assert torch.equal(written.reshape(-1), whole)


@pytest.mark.parametrize(
    ("sections", "ranks", "block", "message"),
    [
        ([10], 4, 1, "10 entries cannot be split over 4 ranks: 10 / 4 = 2.5; .* work are 2 or 5; .* counts 8 or 12"),
        ([48], 4, 8, "48 = 6 blocks of 8 entries cannot be split over 4 ranks: 6 / 4 = 1.5; .* are 3 or 6; .* 4 or 8"),
        (
            [24],
            4,
            8,
            "24 = 3 blocks of 8 entries cannot be split over 4 ranks: 3 / 4 = 0.75; .* are 3 or 6; .* counts 4$",
        ),
        ([10], 2, 4, "10 entries are not a whole number of blocks of 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_arithmetic(sections, ranks, block, message) -> None:
    with pytest.raises(ValueError, match=message):
        Split.even(0, sections, ranks, block)
