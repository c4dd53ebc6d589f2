"""The whole model on one rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeromesh
from compare import assert_same
from harness import run_ranks
from runs import Noisy, config, seed_everything, start, train


def gather_between(row: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = start(1, config(row))
    before = engine.gathered_state_dict()
    seed_everything(engine.mesh.rank)
    history = train(engine, 2)
    engine.gathered_state_dict()
    engine.eval()
    with torch.no_grad():
        engine(torch.arange(6))
    engine.train()
    after = engine.gathered_state_dict()
    history += train(engine, 1)
    other = start(1, config(row))
    seed_everything(engine.mesh.rank)
    assert train(other, 2) == history[:2], "looking at the model changes nothing"
    assert_same(other.gathered_state_dict(), after)
    return before, engine.gathered_state_dict()


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 2, 3])
def test_the_gathered_state_is_the_models_own(row: int) -> None:
    (before, after), (other_before, other_after) = run_ranks(gather_between, 2, row)
    assert not other_before
    assert not other_after
    torch.manual_seed(1)
    model = Noisy().double()
    expected = model.state_dict()
    assert before.keys() == expected.keys()
    assert_same(before, expected)
    assert torch.equal(after["head.weight"], after["embed.weight"])
    assert not torch.equal(after["embed.weight"], before["embed.weight"])
    assert after["norm.num_batches_tracked"].item() == 3
    model.load_state_dict(after)


def save_whole(folder: str) -> dict[str, torch.Tensor]:
    engine = start(1, config(3, "bf16"))
    seed_everything(engine.mesh.rank)
    train(engine, 2)
    assert engine.save_16bit_model(folder) is True
    assert engine.save_16bit_model(folder, "again.safetensors") is True
    return engine.gathered_state_dict()


def test_the_whole_model_is_written_as_one_file_in_the_dtype_it_computes_in(tmp_path: Path) -> None:
    expected = run_ranks(save_whole, 2, str(tmp_path / "new" / "folder"))[0]
    for name in ("model.safetensors", "again.safetensors"):
        saved = load_file(tmp_path / "new" / "folder" / name)
        assert set(expected) - set(saved) == {"head.weight"}, "a tied weight is written once"
        assert_same(saved, {key: expected[key] for key in saved})
        assert saved["blocks.0.weight"].dtype == torch.bfloat16
        assert saved["norm.running_mean"].dtype == torch.float32


def test_a_parameter_that_was_replaced_is_not_left_out_of_an_export(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = zeromesh.initialize(model=model, config=settings)[0]
    model[1].weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match="1.weight was replaced after initialize"):
        engine.save_16bit_model(str(tmp_path))
