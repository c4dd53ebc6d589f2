"""Which units stay on the device where a share of the model is offloaded."""

from dataclasses import replace

import pytest

from zeromesh.base.placement import ROWS, offloaded_units

ROOT, BLOCK = 100, 40


def kept(share: float, accumulates: bool, sizes: list[int]) -> str:
    away = offloaded_units(sizes, replace(ROWS[2], offloaded=share), accumulates)
    return "".join("h" if one else "d" for one in away)


@pytest.mark.parametrize(
    ("share", "first", "spread"),
    [
        (1.0, "hhhhhhhhhhh", "hhhhhhhhhhh"),
        (0.6, "dddhhhhhhhh", "dhhhdhhhdhh"),
        (0.8, "dhhhhhhhhhh", "dhhhhhhhhhh"),
        (0.1, "dddddddddhh", "dhdddddddhd"),
        (0.0, "ddddddddddd", "ddddddddddd"),
    ],
)
def test_the_root_and_then_the_first_or_evenly_spread_units_stay(share: float, first: str, spread: str) -> None:
    sizes = [ROOT, *[BLOCK] * 10]
    assert (kept(share, False, sizes), kept(share, True, sizes)) == (first, spread)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.75, 0.95])
def test_no_more_stays_than_the_share(share: float, accumulates: bool) -> None:
    for sizes in ([7, 3, 90, 0, 5, 5, 20], [0, 1, 1, 1], [50], [0, 0]):
        found = kept(share, accumulates, sizes)
        on_device = sum(size for size, place in zip(sizes, found, strict=True) if place == "d")
        assert on_device <= (1 - share) * sum(sizes) * (1 + 1e-6)
        assert [place for size, place in zip(sizes, found, strict=True) if not size] == ["d"] * sizes.count(0)
