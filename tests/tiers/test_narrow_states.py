"""States in bf16 beside fp32 masters: what is refused, resumed in another width or tier, converted, read and set."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from run import configuration, train_step
from zeromesh import zero
from zeromesh.base.kernels import update_pass
from zeromesh.checkpoint.weights.convert import convert_checkpoint
from zeromesh.shard.optim import host

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2}}
HOST = {"offload_optimizer": {"device": "cpu"}}
MOMENTS = ("exp_avg", "exp_avg_sq")

pytestmark = pytest.mark.usefixtures("one_rank")


def start(states: Any = "bf16", zero: dict[str, Any] | None = None, **more: Any) -> zeromesh.Engine:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 7))
    config = configuration(micro=4, zero={"stage": 2, **(zero or {})}) | {"optimizer": ADAMW, **more}
    return zeromesh.initialize(model=model, config=config | {"optimizer_state_dtype": states})[0]


def update(engine: zeromesh.Engine, steps: int = 3) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        x = torch.randn(4, 12, generator=generator)
        train_step(engine, engine(x).square().mean())


def values(engine: zeromesh.Engine, *names: str) -> dict[str, torch.Tensor]:
    """Return masters and states as everybody reads them, in fp32."""
    found = {}
    for path, parameter in engine.module.named_parameters():
        found[path] = zero.safe_get_full_fp32_param(parameter)
        found |= {f"{path} {name}": zero.safe_get_full_optimizer_state(parameter, name) for name in names or MOMENTS}
    assert all(value is not None and value.dtype is torch.float32 for value in found.values())
    return {name: value for name, value in found.items() if value is not None}


def dtypes(engine: zeromesh.Engine) -> set[tuple[str, torch.dtype]]:
    assert engine.optimizer is not None
    states = engine.optimizer.state.values()
    return {(name, value.dtype) for state in states for name, value in state.items() if value.ndim}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("later", [{"device": "none"}, {"device": "cpu"}, {"device": "nvme"}], ids=str)
def test_a_run_goes_on_in_another_tier_and_width(later: dict[str, Any], tmp_path: Path) -> None:
    later = {"offload_optimizer": later | ({"nvme_path": str(tmp_path)} if later["device"] == "nvme" else {})}
    engine = start(zero=HOST)
    update(engine)
    engine.save_checkpoint(tmp_path / "narrow")
    saved = values(engine)
    update(engine)
    expected = values(engine)
    engine.destroy()
    again = start(zero=later)
    again.load_checkpoint(tmp_path / "narrow")
    assert same(values(again), saved)
    update(again)
    assert same(values(again), expected)
    assert dtypes(again) == {(name, torch.bfloat16) for name in MOMENTS}
    again.destroy()
    wide = start("fp32", later)
    wide.load_checkpoint(tmp_path / "narrow")
    assert same(values(wide), saved)  # exactly: every bf16 number is one of fp32
    update(wide)
    wide.save_checkpoint(tmp_path / "wide")
    written = values(wide)
    wide.destroy()
    narrow = start({"exp_avg_sq": "bf16"}, later)
    narrow.load_checkpoint(tmp_path / "wide")
    nearest = {name: v.bfloat16().float() if "exp_avg_sq" in name else v for name, v in written.items()}
    assert same(values(narrow), nearest)
    update(narrow)
    assert dtypes(narrow) == {("exp_avg", torch.float32), ("exp_avg_sq", torch.bfloat16)}
    narrow.destroy()


def test_states_stay_within_the_bound_of_fp32_states() -> None:
    found = []
    for states in ("fp32", "bf16"):
        engine = start(states)
        update(engine, 1)
        found.append(values(engine))
        engine.destroy()
    for name, wide in found[0].items():
        if name.endswith(MOMENTS):
            # The first step has the same gradients: a state moves by less than one last place, 2**-7 at the most.
            assert bool(((found[1][name] - wide).abs() <= 2**-7 * wide.abs()).all()), name
            assert not torch.equal(found[1][name], wide)
            assert torch.equal(found[1][name], found[1][name].bfloat16().float())
        else:
            assert torch.equal(found[1][name], wide)  # the update itself is computed in fp32


def test_other_devices_update_them_by_torch_with_the_same_bits_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for taken in (update_pass.update, update_pass.update_on_device):
        monkeypatch.setattr(host, "update", taken)
        engine = start(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
        update(engine)
        found.append(values(engine, "momentum_buffer"))
        engine.destroy()
    assert same(*found)


def test_deepspeeds_key_is_the_same() -> None:
    engine = start()
    update(engine)
    theirs = start(None, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "fp32_optimizer_states": False}})
    update(theirs)
    assert same(values(engine), values(theirs))


@pytest.mark.parametrize("kind", ["Adagrad", "Lion", "SGD"])
def test_every_optimizer_of_elements_keeps_them(kind: str) -> None:
    name = {"Adagrad": "sum", "Lion": "exp_avg", "SGD": "momentum_buffer"}[kind]
    params = {"lr": 1e-3} | ({"momentum": 0.9} if kind == "SGD" else {})
    results = []
    for place in ({}, HOST):
        engine = start(zero=place, optimizer={"type": kind, "params": params})
        update(engine)
        assert dtypes(engine) == {(name, torch.bfloat16)}
        results.append(values(engine, name))
        engine.destroy()
    assert same(*results)


def test_states_are_set_and_converted(tmp_path: Path) -> None:
    engine = start()
    update(engine)
    first = next(engine.module.parameters())
    zero.safe_set_full_optimizer_state(first, torch.full(first.shape, 1.001), "exp_avg")
    state = zero.safe_get_full_optimizer_state(first, "exp_avg")
    assert state is not None
    assert torch.equal(state, torch.ones(first.shape))  # the nearest bf16 number
    # Torch's own function gives states the dtype of their parameters.
    assert engine.optimizer is not None
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    update(engine)
    assert dtypes(engine) == {(name, torch.bfloat16) for name in MOMENTS}
    engine.save_checkpoint(tmp_path / "ours", tag="last")
    expected = values(engine)
    convert_checkpoint(tmp_path / "ours", tmp_path / "theirs", "deepspeed-universal")
    saved = {path.parent.name + " " + path.stem: path for path in (tmp_path / "theirs").rglob("exp_avg*.pt")}
    assert len(saved) == 8
    for name, path in saved.items():
        value = torch.load(path, weights_only=False)["param"]
        assert value.dtype is torch.float32
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("states", "optimizer", "text"),
    [
        (
            {"momentum": "bf16"},
            ADAMW,
            "names momentum, but AdamW, with its options, has the states exp_avg",
        ),
        ("fp16", ADAMW, "optimizer_state_dtype"),
        ({"exp_avg": "int8"}, ADAMW, "optimizer_state_dtype"),
        ("bf16", {"type": "Lamb", "params": {"lr": 1e-3}}, "not one that is updated so: adam, adamw, sgd, lion, adag"),
        ("bf16", {"type": "Adafactor", "params": {"lr": 1e-3}}, "leave it and fp32_optimizer_states out"),
        ("bf16", {"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}}, "without amsgrad"),
    ],
)
def test_what_cannot_be_kept_is_refused(states: Any, optimizer: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        start(states, optimizer=optimizer)


def test_masters_in_bf16_have_no_narrower_states() -> None:
    both = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    with pytest.raises(ValueError, match="keeps none; leave one of them out"):
        start(bf16=both)
