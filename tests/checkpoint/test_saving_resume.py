"""A run that was saved on two ranks goes on on one, three and four under other rows, with all of its state."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from runs import train_on_the_loader
from zeromesh.checkpoint.boxes import Reader

SAMPLES, GLOBAL_BATCH = 60, 12
BEFORE, AFTER = 3, 6
"""Updates before the checkpoint and after it; a pass over the data has five."""

FP16 = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 3}
"""The first updates overflow; not all of those before the checkpoint do."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(0, 1, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.frozen(x) * self.scale)
        return nn.functional.cross_entropy(logits.double(), (tokens + 1) % 11)


def begin(row: int, mesh: dict[str, int], precision: str) -> zeromesh.Engine:
    torch.manual_seed(1)
    model = Tied().double() if precision == "float64" else Tied()
    ranks = mesh.get("replicate", 1) * mesh["data"]
    settings = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": 3 if ranks == 4 else 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": row},
        "mesh": mesh,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 20}},
        **({"fp16": FP16, "data_types": {"buffer_dtype": "fp16"}} if precision == "fp16" else {}),
    }
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2 and parameter.requires_grad]
    rest = [parameter for parameter in model.parameters() if parameter.ndim >= 2 and parameter.requires_grad]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}]
    data = torch.randint(0, 11, (SAMPLES,), generator=torch.Generator().manual_seed(4))
    return zeromesh.initialize(model=model, config=settings, model_parameters=groups, training_data=data)[0]


def write(folder: str, precision: str) -> list[float]:
    engine = begin(3, {"data": 2}, precision)
    train_on_the_loader(engine, BEFORE)
    engine.save_checkpoint(folder, client_state={"best": 0.5, "names": ["a", ("b", 1)]})
    # Another iterator would begin the next pass.
    return train_on_the_loader(begin(3, {"data": 2}, precision), BEFORE + AFTER)[BEFORE:]


def go_on(folder: str, row: int, mesh: dict[str, int], precision: str) -> list[float]:
    engine = begin(row, mesh, precision)
    _, client = engine.load_checkpoint(folder)
    assert client == {"best": 0.5, "names": ["a", ("b", 1)]}
    engine.save_checkpoint(f"{folder}/again", client_state=client)
    return train_on_the_loader(engine, AFTER)


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1 rank, row 0": (0, {"data": 1}),
    "2 ranks, row 3": (3, {"data": 2}),
    "3 ranks, row 2": (2, {"data": 3}),
    "4 ranks, row 1": (1, {"data": 4}),
    "2 x 2 ranks, row 3": (3, {"replicate": 2, "data": 2}),
}


@pytest.fixture(scope="module", params=["float64", "fp16"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[float]]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, run_ranks(write, 2, str(folder), request.param)[0]


@pytest.mark.some(3)
@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:4], pytest.param("2 x 2 ranks, row 3", marks=pytest.mark.full)])
def test_all_of_the_state_comes_back_and_the_losses_are_those_of_the_undisturbed_run(layout, saved) -> None:
    precision, folder, expected = saved
    row, mesh = LAYOUTS[layout]
    ranks = mesh.get("replicate", 1) * mesh["data"]
    losses = run_ranks(go_on, ranks, str(folder), row, mesh, precision)[0]
    first, second = Reader(folder / "global_step3"), Reader(folder / "again" / "global_step3")
    assert_same_run(first, second)
    if layout == "2 ranks, row 3":
        assert losses == expected, "with the same arithmetic, bit for bit"
    elif precision == "float64":
        assert losses == pytest.approx(expected, rel=1e-9)


def assert_same_run(first: Reader, second: Reader) -> None:
    names = {name for name in first.names if not name.startswith("random/")}
    assert names == {name for name in second.names if not name.startswith("random/")}
    assert {"parameter/frozen.weight", "buffer/calls", "optimizer/exp_avg/embed.weight"} <= names
    assert "parameter/head.weight" not in names
    for name in names:
        assert torch.equal(first.tensor(name), second.tensor(name)), name
        assert first.dtype(name) is second.dtype(name)
    for reader in (first, second):
        reader.open_all()
    layout = {"written", "world_size", "mesh", "placement", "shards", "strides"}
    got, wanted = ({k: v for k, v in reader.manifest.items() if k not in layout} for reader in (second, first))
    assert got == wanted
    assert wanted["data"]["samples"] == BEFORE * GLOBAL_BATCH
    assert (wanted["skipped_steps"] > 0) == (wanted["loss_scaler"] is not None)


def draw_after(folder: str, save: bool) -> list[float]:
    engine = begin(1, {"data": torch.distributed.get_world_size()}, "float64")
    torch.manual_seed(30 + engine.mesh.rank)
    if save:
        engine.save_checkpoint(folder, tag="random")
    else:
        engine.load_checkpoint(folder, tag="random")
    return torch.rand(3).tolist()


def test_each_rank_gets_its_own_random_state_and_those_that_are_new_one_that_follows_from_the_first(tmp_path) -> None:
    saved = run_ranks(draw_after, 2, str(tmp_path), True)
    assert run_ranks(draw_after, 1, str(tmp_path), False) == saved[:1]
    four = run_ranks(draw_after, 4, str(tmp_path), False)
    assert four[:2] == saved
    assert len({tuple(drawn) for drawn in four}) == 4
    assert run_ranks(draw_after, 4, str(tmp_path), False) == four
    assert run_ranks(draw_after, 3, str(tmp_path), False) == four[:3]
