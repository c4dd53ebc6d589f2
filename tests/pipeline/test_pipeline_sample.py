"""Models of ``initialize`` are cut for the user's own data, on all ranks alike, and the data stay as they were."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zeromesh
from harness import on_ranks, run_ranks
from run import configuration, sgd

WIDTH = 4


class Squares(nn.Linear):  # its operations grow with the length squared
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(1, 2) @ x + super().forward(x)


class Model(nn.Module):  # nothing tells what it takes. Its last block is as dear as two others where texts are short
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)), Squares()])

    def forward(self, numbers: Tensor, labels: Tensor) -> Tensor:
        x = numbers
        for block in self.blocks:
            x = block(x)
        return (x - labels).square().mean()


class Adding(Model):  # what passes by the blocks would be lost
    def forward(self, numbers: Tensor, labels: Tensor) -> Tensor:
        x = numbers
        for block in self.blocks:
            x = x + block(x)
        return (x - labels).square().mean()


class Noise(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length, self.read = length, []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Tensor:
        self.read.append(number)
        return torch.rand(self.length, WIDTH) + random.random() + numpy.random.rand()


class Broken(Noise):
    def __getitem__(self, number: int) -> Tensor:
        raise OSError("not yet")


def collate(samples: list[Tensor]) -> Any:
    return torch.stack(samples), torch.zeros(len(samples), 1, 1)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]


def cut(kind: str, lengths: list[int], data: str = "Noise") -> Any:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, given = globals()[kind](), globals()[data](lengths[rank])
    config = configuration(batch=12, micro=3, optimizer=sgd(0.1), mesh={"pipeline": 2})
    before = states()
    try:
        engine, _, loader, _ = zeromesh.initialize(model=model, config=config, training_data=given, collate_fn=collate)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    assert states() == before
    assert (loader.position, loader.sampler.epoch) == ((0, 0), 0)
    assert given.read == ([0, 1, 2] if data == "Noise" else [])
    if lengths[0] == lengths[1] and data == "Noise":
        engine.train_batch(iter(loader))
    return engine.pipelined.cut.starts


@pytest.mark.some(1)
@pytest.mark.parametrize(("lengths", "starts"), [([2, 2], (0, 4)), ([64, 64], (0, 5)), ([2, 64], (0, 5))])
def test_operations_are_those_of_the_users_lengths_over_all_ranks(lengths: list[int], starts: tuple[int, ...]) -> None:
    assert run_ranks(cut, 2, "Model", lengths) == [starts, starts]


def test_values_that_would_be_lost_between_stages_are_seen_with_the_users_data() -> None:
    for said in run_ranks(cut, 2, "Adding", [2, 2]):
        assert "Adding reads, after its call of blocks.1" in said


def test_data_that_cannot_be_read_yet_is_no_hindrance() -> None:
    """Where a trace shows something else on one rank than on the other, all ranks hear of it."""
    assert run_ranks(cut, 2, "Model", [2, 2], "Broken") == [(0, 3), (0, 3)]


@on_ranks(2)
def test_ranks_that_see_different_models_are_told() -> None:
    said = cut("Model", [2, 2], ["Noise", "Broken"][torch.distributed.get_rank()])
    assert "a trace of the model's forward with the first samples" in said
    assert "-operations are counted" in said
    assert "+operations are not counted" in said
