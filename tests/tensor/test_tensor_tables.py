"""Tables of embeddings, as recommenders have them, split over ranks."""

import pytest
import torch
from torch import nn

from harness import on_ranks
from same_training import require_same_training
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.tensor_plan import parse, resolve

ROWS, WIDTH, BAGS = 30, 8, 4


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleDict({mode: nn.EmbeddingBag(ROWS, WIDTH, mode=mode) for mode in ("sum", "mean", "max")})
        self.weighted = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", include_last_offset=True)
        self.importance = nn.Parameter(torch.randn(ROWS))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.top = nn.Linear(5 * WIDTH, 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, ids.numel() + 1, ids.shape[1])
        found = [table(ids) for table in self.tables.values()]
        found.append(self.weighted(ids.flatten(), offsets, per_sample_weights=self.importance[ids.flatten()]))
        return self.top(torch.cat([self.bottom(numbers), *found], 1)).sigmoid().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BAGS, 5, generator=generator).double(), torch.randint(ROWS, (BAGS, 6), generator=generator)


@on_ranks(2)
def test_bags_that_are_whole_on_all_ranks_train_as_one_process() -> None:
    settings = {"train_micro_batch_size_per_gpu": BAGS, "mesh": {"tensor": 2}}
    require_same_training(
        Recommender, batch, settings | {"tensor_parallel": {"plan": {"weighted": "replicate"}}}, lr=0.5
    )


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_bags_are_split_by_width_and_train_as_one_process(stage: int) -> None:
    settings = {"train_micro_batch_size_per_gpu": BAGS, "mesh": {"tensor": 2}, "zero_optimization": {"stage": stage}}
    shapes = require_same_training(Recommender, batch, settings, lr=0.5)
    if stage == 0:
        tables = {
            shape for name, shape in shapes.items() if len(shape) == 2 and ("tables" in name or "weighted" in name)
        }
        assert tables == {(ROWS, WIDTH // 2)}


@pytest.mark.parametrize(
    ("table", "style", "said"),
    [
        (nn.EmbeddingBag(8, 8, max_norm=1.0), "embedding_colwise", "by the norm of all of a row"),
        (nn.Embedding(8, 8, max_norm=1.0), "embedding_rowwise", "by the norm of all of a row"),
        (nn.Embedding(8, 8, scale_grad_by_freq=True), "embedding_rowwise", "how often each id occurs"),
        (nn.EmbeddingBag(8, 8), "embedding_rowwise", "EmbeddingBag, which the style embedding_rowwise does not fit"),
        (nn.EmbeddingBag(8, 7), "embedding_colwise", "7 entries cannot be split over 2 ranks"),
    ],
)
def test_tables_that_cannot_be_split_are_refused_and_not_split_unasked(table: nn.Module, style: str, said: str) -> None:
    model = nn.Sequential(table, nn.Linear(8, 8))
    with pytest.raises(ValueError, match=said):
        resolve(model, parse({"0": style}), {}, 0, 2)
    found, _ = derive(model, 2)
    assert "0" not in found or found["0"].style != style
    resolve(model, {}, found, 0, 2)
