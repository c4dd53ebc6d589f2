"""State beside parameters and buffers is saved, under the names of the model without wrappers."""

import io
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zeromesh
from harness import on_ranks, run_ranks
from run import adamw, start_engine, train_step
from zeromesh.checkpoint import contents, save

STATES: dict[str, Any] = {
    "tensor": lambda count: torch.full((3,), count),
    "bytes": lambda count: io.BytesIO(bytes([int(count)])),
    "values": lambda count: {"count": count, "history": [count, (1, 2)], "amax": torch.arange(3.0) * count},
}
COUNTS: dict[str, Any] = {
    "tensor": lambda state: float(state[0]),
    "bytes": lambda state: float(state.getvalue()[0]),
    "values": lambda state: float(state["amax"][1]) if state["history"][1] == (1, 2) else None,
}


class Counting(nn.Linear):
    def __init__(self, kind: str = "tensor") -> None:
        super().__init__(8, 8)
        self.kind, self.count = kind, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += float(self.training)
        return super().forward(x).tanh()

    def get_extra_state(self) -> Any:
        return STATES[self.kind](self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = COUNTS[self.kind](state)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) + self.shift).tanh()


def engine_of(model: nn.Module, stage: int) -> Any:
    return start_engine(model, micro=2, stage=stage, optimizer=adamw(1e-2))


def step(engine: Any) -> float:
    return train_step(engine, engine(torch.ones(2, 8)).square().mean())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_extra_state_is_in_checkpoints_state_dicts_and_files(stage: int, tmp_path: Path) -> None:
    for kind in STATES:
        torch.manual_seed(0)
        engine = engine_of(nn.Sequential(Counting(kind), Counting(kind)), stage)
        for _ in range(3):
            step(engine)
        folder = tmp_path / kind
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder / "files")
        state, gathered = engine.state_dict(), engine.gathered_state_dict()
        again = engine_of(nn.Sequential(Counting(kind), Counting(kind)), stage)
        again.load_checkpoint(folder)
        assert [module.count for module in again.module] == [3.0, 3.0]
        plain = nn.Sequential(Counting(kind), Counting(kind))
        assert list(state) == list(plain.state_dict())
        plain.load_state_dict(state)
        assert plain[1].count == 3.0
        if engine.mesh.rank == 0:
            assert gathered.keys() == state.keys()
            files = load_file(folder / "files" / "model.safetensors")
            assert ("1._extra_state" in files) == (kind == "tensor")


@pytest.mark.parametrize("target", ["zeromesh", "dcp", "deepspeed-universal", "hf"])
@on_ranks(1)
def test_extra_state_goes_through_conversions(target: str, tmp_path: Path) -> None:
    for kind in ("tensor", "values") if target != "hf" else ("tensor",):
        engine = engine_of(nn.Sequential(Counting(kind), Counting(kind)), 1)
        for _ in range(3):
            step(engine)
        engine.save_checkpoint(tmp_path / kind / "first")
        zeromesh.convert_checkpoint(tmp_path / kind / "first", tmp_path / kind / "theirs", target)
        zeromesh.convert_checkpoint(tmp_path / kind / "theirs", tmp_path / kind / "back")
        again = engine_of(nn.Sequential(Counting(kind), Counting(kind)), 1)
        again.load_checkpoint(tmp_path / kind / "back", load_module_only=target == "hf")
        assert [module.count for module in again.module] == [3.0, 3.0]


class Odd(Counting):
    def get_extra_state(self) -> Any:
        return {"clock": object()}


@on_ranks(1)
def test_extra_state_that_cannot_be_kept_is_refused_by_its_module(tmp_path: Path) -> None:
    engine = engine_of(nn.Sequential(Odd()), 0)
    with pytest.raises(TypeError, match=r"the extra state of 0\. .*Odd.*\['clock'\] is a object.*convert it"):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def wrapped(how: str) -> nn.Module:
    torch.manual_seed(0)
    around: dict[str, Any] = {
        "plain": lambda block: block,
        "recomputed": checkpoint_wrapper,
        "compiled": lambda block: torch.compile(block, backend="eager"),
        "parallel": nn.DataParallel,
    }
    return nn.Sequential(*(around[how](Block()) for _ in range(2)))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(1)
def test_checkpoints_and_files_have_the_names_of_the_model_without_wrappers(stage: int, tmp_path: Path) -> None:
    names = set(wrapped("plain").state_dict())
    for how in ("recomputed", "compiled", "parallel"):
        for saves, loads in ((how, "plain"), ("plain", how)):
            engine = engine_of(wrapped(saves), stage if how != "compiled" else 0)
            step(engine)
            folder = tmp_path / f"{saves} {loads}"
            engine.save_checkpoint(folder)
            engine.save_16bit_model(folder / "files")
            assert set(load_file(folder / "files" / "model.safetensors")) == names
            again = engine_of(wrapped(loads), stage if how != "compiled" else 0)
            again.load_checkpoint(folder)
            assert step(again) == pytest.approx(step(engine))


def unchanged(model: nn.Module) -> Any:
    return str


@on_ranks(1)
def test_older_checkpoints_with_the_names_of_wrappers_load(tmp_path: Path) -> None:
    engine = engine_of(wrapped("recomputed"), 3)
    step(engine)
    with patch.object(contents, "plain_names", unchanged), patch.object(save, "plain_names", unchanged):
        engine.save_checkpoint(tmp_path)
    expected = step(engine)
    for how in ("plain", "recomputed"):
        again = engine_of(wrapped(how), 3)
        again.load_checkpoint(tmp_path)
        assert step(again) == pytest.approx(expected)


@on_ranks(1)
def test_hooks_that_rename_and_leave_out_count_in_files_and_state_dicts(tmp_path: Path) -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, meta: object) -> None:
        state[f"{prefix}renamed"] = state.pop(f"{prefix}inner.weight")
        del state[f"{prefix}inner.bias"]

    model = wrapped("plain")
    for block in model:
        block._register_state_dict_hook(rename)
    engine = engine_of(model, 3)
    engine.save_16bit_model(tmp_path)
    names = {"0.renamed", "1.renamed", "0.shift", "1.shift"}
    assert set(load_file(tmp_path / "model.safetensors")) == names == set(engine.gathered_state_dict())


@on_ranks(1)
def test_a_load_that_is_not_strict_and_finds_nothing_is_an_error(tmp_path: Path) -> None:
    engine, other = engine_of(wrapped("plain"), 3), engine_of(nn.Sequential(nn.Sequential(nn.Linear(8, 8))), 3)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no tensor is in both, so that nothing would be loaded"):
        other.load_checkpoint(tmp_path, load_module_strict=False)
    with pytest.raises(RuntimeError, match=r"nothing was loaded: the state has .*inner.*, and the model 0.0.weight"):
        other.load_state_dict(engine.state_dict(), strict=False)


def staged(folder: str) -> list[Any]:
    torch.manual_seed(0)
    model = zeromesh.pipe.PipelineModule([Counting("values") for _ in range(2)], loss_fn=nn.functional.mse_loss)
    engine = start_engine(model, batch=2, mesh={"pipeline": 2}, optimizer=adamw(1e-2))
    engine.train_batch(iter([(torch.ones(2, 8), torch.zeros(2, 8))]))
    engine.save_checkpoint(folder)
    states = [value for name, value in engine.state_dict().items() if name.endswith("_extra_state")]
    for module in engine.module.modules():
        if isinstance(module, Counting):
            module.count = 9.0
    engine.load_checkpoint(folder)
    return [
        len(states),
        [float(state["amax"][1]) for state in states],
        [module.count for module in engine.module.modules() if isinstance(module, Counting)],
    ]


def test_extra_state_of_all_stages_is_saved(tmp_path: Path) -> None:
    for place, (count, state, loaded) in enumerate(run_ranks(staged, 2, str(tmp_path))):
        assert (count, state) == (2, [1.0, 1.0]), place
        assert loaded[place] == 1.0, "not the 9 of after the save"
