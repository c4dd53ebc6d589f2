"""A mixture whose states are four times the memory that its process may use trains from files."""

from pathlib import Path

import pytest
import torch

from experts_at_rest import Experts, Run, Sizes, batch, prove, train


@pytest.mark.full
def test_states_may_be_four_times_the_memory(tmp_path: Path) -> None:
    """Beyond what libraries take: there all experts in memory fail, and without a limit they give the same bits."""
    sizes = Sizes(layers=8, experts=64, width=128, inner=256, steps=6)
    found = prove(sizes, str(tmp_path), beside=True)
    assert "can't allocate memory" in found["limited"]["error"]
    assert found["resting"].get("digest") == found["memory"]["digest"], found


def test_a_step_touches_the_share_of_experts_that_is_asked_for() -> None:
    sizes = Sizes(layers=2, experts=20, width=8, inner=4)
    index = batch(sizes, 0, 0.25)[1]
    assert [len(layer.unique()) for layer in index] == [5, 5]
    assert not torch.equal(index, batch(sizes, 1, 0.25)[1])
    experts = Experts(sizes)
    hidden, weights = torch.randn(3, 8), torch.rand(3, 2)
    places = torch.tensor([[0, 1], [2, 0], [1, 1]])
    single = [
        experts(hidden[r : r + 1], places[r : r + 1, c : c + 1], torch.ones(1, 1)) for r in range(3) for c in (0, 1)
    ]
    expected = (torch.cat(single).view(3, 2, 8) * weights[:, :, None]).sum(1)
    assert torch.allclose(experts(hidden, places, weights), expected, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("case", ["resting", "zero3"])
def test_cases_train_to_the_same_bits(case: str, tmp_path: Path) -> None:
    sizes = Sizes(layers=1, experts=4, width=8, inner=4, steps=3)
    found, expected = (train(Run(name, sizes, 0.5, str(tmp_path))) for name in (case, "memory"))
    assert found["digest"] == expected["digest"]
    assert len(found["seconds"]) == 3
