"""Checks of hardware name what is slow, or computes wrongly, and since when."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from harness import run_ranks
from run import start_engine
from zeromesh.comm import health

FAST = [[100e9, 0.0, 10e9, 1e9] for _ in range(4)]  # product, wrong, memory, link to the rank, of four ranks


class Mesh:
    """Ranks, of which this is the first."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, node_of: list[int]) -> None:
        self.node_of, self.world_size = node_of, len(node_of)

    def group(self, axis: str) -> None:
        """Return none: nothing is sent."""


def changed(rank: int, place: int, value: float) -> list[list[float]]:
    return [[value if (one, at) == (rank, place) else old for at, old in enumerate(row)]
            for one, row in enumerate(FAST)]  # fmt: skip


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PAUSE", 0.0)


def checks(*measured: list[list[float]]) -> Iterator[list[dict[str, Any]]]:
    """Yield what is slow in checks of which each measures one thing, however often."""
    own = health.Health(Mesh([0, 0, 0, 0]))  # type: ignore[arg-type]
    for step, rows in enumerate(measured, 1):
        with patch.object(own, "_measure", lambda rows=rows: [[*row] for row in rows]):
            yield own.check(10 * step)["slow"]


@pytest.mark.parametrize(
    ("place", "value", "name", "unit"),
    [
        (0, 40e9, "rank 2's processor", "FLOP/s"),
        (2, 4e9, "rank 2's memory", "B/s"),
        (3, 0.1e9, "the link from rank 1 to rank 2", "B/s"),
    ],
)
def test_what_is_slow_is_named_since_it_was_first_and_until_it_is_over(
    place: int, value: float, name: str, unit: str, caplog: pytest.LogCaptureFixture
) -> None:
    slow = changed(2, place, value)
    first, second, third, fourth = checks(FAST, slow, slow, FAST)
    assert first == fourth == []
    assert second == third == [
        {"name": name, "since": 20, "value": value, "usual": FAST[0][place], "unit": unit}
    ]  # fmt: skip
    assert f"{name} has {value / 1e9:.3g} G{unit}" in caplog.text
    assert "since update 20" in caplog.text


def test_all_links_that_become_slow_are_seen_beside_their_own_past() -> None:
    slow = [[*row[:3], 0.3e9] for row in FAST]
    *before, last = checks(FAST, FAST, FAST, slow, slow)
    assert before[:3] == [[], [], []]
    assert [one["name"] for one in last] == [f"the link from rank {(rank - 1) % 4} to rank {rank}" for rank in range(4)]
    assert {one["since"] for one in last} == {40}


def test_what_is_slow_for_a_moment_is_measured_again() -> None:
    own, rows = health.Health(Mesh([0, 0, 0, 0])), iter([changed(1, 2, 1e9), FAST])  # type: ignore[arg-type]
    with patch.object(own, "_measure", lambda: [[*row] for row in next(rows)]):
        assert own.check(1)["slow"] == []


def test_two_others_are_too_few_to_be_compared_with() -> None:
    own, rows = health.Health(Mesh([0, 0, 0])), [[50e9, 0.0, 1e9, 1e9], [50e9, 0.0, 1e9, 1e9], [160e9, 0.0, 1e9, 1e9]]  # type: ignore[arg-type]
    with patch.object(own, "_measure", lambda: [[*row] for row in rows]):
        assert own.check(1)["slow"] == []


@pytest.mark.parametrize("node_of", [[0, 0, 0, 0, 1, 1, 1, 1], [0] * 4 + [1, 2, 3, 4]])
def test_links_that_share_a_port_with_others_are_compared_with_like_ones_only(node_of: list[int]) -> None:
    own = health.Health(Mesh(node_of))  # type: ignore[arg-type]
    size, strides, rows = len(node_of), health._strides(node_of), []
    paths = [((rank - stride) % size, rank) for stride in strides for rank in range(size)]
    sent = [node_of[before] for before, after in paths if node_of[before] != node_of[after]]
    for rank in range(size):
        links = [(rank - stride) % size for stride in strides]
        speeds = [10e9 if node_of[one] == node_of[rank] else 8e9 / sent.count(node_of[one]) for one in links]
        rows.append([1e9, 0.0, 1e9, *speeds])
    with patch.object(own, "_measure", lambda: [[*row] for row in rows]):
        assert own.check(1)["slow"] == []


def test_ranks_exchange_messages_with_their_neighbours_and_with_the_next_node() -> None:
    assert health._strides([0]) == []
    assert health._strides([0, 0, 0]) == [1]
    assert health._strides([0, 1, 2]) == [1]
    assert health._strides([0, 0, 1, 1]) == [1, 2]


def check_twice(wrong: int) -> list[dict[str, Any]]:
    engine = start_engine(nn.Linear(4, 1), batch=4, optimizer={"type": "SGD"})
    with torch.device("meta"):
        first = engine.check_health()
    product = torch.mm

    def flipped(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        product(left, right, out=out)
        if engine.mesh.rank == wrong:
            out.view(torch.int32)[7, 7] ^= 1
        return out

    with patch.object(torch, "mm", flipped):
        second = engine.check_health()
    engine.destroy()
    assert all(speed > 0 for key in ("products", "memory") for speed in first[key])
    assert [link[:2] for link in first["links"]] == [[1, 0], [0, 1]]
    return [one for one in second["slow"] if not one["unit"]]


def test_a_rank_whose_product_is_wrong_in_one_bit_is_named_on_all_ranks() -> None:
    one = {"name": "a product on rank 1", "since": 0, "value": 0.0, "usual": 0.0, "unit": ""}
    assert run_ranks(check_twice, 2, 1) == [[one], [one]]
