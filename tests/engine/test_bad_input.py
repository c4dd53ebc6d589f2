"""What cannot work is refused on every rank, at once, with value, rule and remedy; training can go on after it."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from compare import assert_same
from harness import on_ranks, run_ranks
from numerics import Net, batch, build_net
from run import train_step

LIMIT = 30
"""Seconds in which every rank must know."""
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def config(row: int = 0, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": row}, "train_micro_batch_size_per_gpu": 6, "optimizer": ADAMW, **more}


def start(row: int = 0, **more: Any) -> zeromesh.Engine:
    dtype = torch.float32 if {"fp16", "bf16"} & set(more) else torch.float64
    return zeromesh.initialize(model=build_net(dtype), config=config(row, **more))[0]


def message(action: Callable[[], Any], kind: type[BaseException] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def loss_of(engine: zeromesh.Engine, step: int = 0) -> torch.Tensor:
    rows = slice(6 * engine.data_rank, 6 * engine.data_rank + 6)
    return engine(*batch(step, torch.float64, rows))


def train(engine: zeromesh.Engine, steps: range) -> None:
    for step in steps:
        for _ in range(engine.gradient_accumulation_steps()):
            train_step(engine, loss_of(engine, step))


def state(engine: zeromesh.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for piece in engine.sharded.pieces.values():
        if piece is not None:
            found[piece.name] = piece.parameter.detach().clone()
            for key, value in engine.optimizer.state.get(piece.parameter, {}).items():
                found[f"{piece.name} {key}"] = value.clone()
    return found


BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown key", {"gradient_cliping": 1.0}, "gradient_cliping.*gradient_clipping"),
    ("an unknown key below", {"zero_optimization": {"stag": 2}}, "zero_optimization.stag.*stage"),
    ("a wrong type", {"train_batch_size": "many"}, "train_batch_size.*many"),
    ("two precisions", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.*bf16"),
    ("stage 4", {"zero_optimization": {"stage": 4}}, "zero_optimization.stage.*4"),
    ("a negative clip", {"gradient_clipping": -1.0}, "gradient_clipping.*-1"),
    ("an unknown optimizer", {"optimizer": {"type": "adamx"}}, "adamx.*adam"),
]


@pytest.mark.parametrize(("bad", "text"), [case[1:] for case in BAD_CONFIGS], ids=[case[0] for case in BAD_CONFIGS])
def test_a_bad_configuration_is_refused_before_anything_is_touched(bad: dict[str, Any], text: str) -> None:
    model = build_net(torch.float32)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=f"(?s){text}"):
        zeromesh.initialize(model=model, config={"optimizer": ADAMW, **bad})
    assert not dist.is_initialized()
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 4,\n "train_batch_size": 8}')
    with pytest.raises(ValueError, match=r"config.json(?s:.*)train_batch_size"):
        zeromesh.initialize(model=build_net(torch.float32), config=path)
    assert not dist.is_initialized()


def test_a_configuration_or_a_model_is_needed() -> None:
    with pytest.raises(ValueError, match="pass config="):
        zeromesh.initialize(model=build_net(torch.float32))
    with pytest.raises(ValueError, match="pass model="):
        zeromesh.initialize(config=config())


def on_two_devices() -> nn.Module:
    model = build_net(torch.float32)
    model.head.to("meta")
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


def compiled() -> nn.Module:
    return torch.compile(build_net(torch.float32), backend="eager")


def compiled_in_place() -> nn.Module:
    model = build_net(torch.float32)
    model.compile(backend="eager")
    return model


BAD_MODELS = [
    (compiled, r"compiled as a whole; pass the plain one, and call engine.compile\(\)"),
    (compiled_in_place, r"compiled as a whole; pass the plain one, and call engine.compile\(\)"),
    (on_two_devices, "scale on cpu, head.weight on meta"),
    (lazy, "1.weight is lazy"),
]


@pytest.mark.parametrize(("make", "text"), BAD_MODELS, ids=[make.__name__ for make, _ in BAD_MODELS])
def test_a_model_that_cannot_be_trained_is_refused(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zeromesh.initialize(model=make(), config=config())
    assert not dist.is_initialized()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))) for _ in range(3)]
        self.body = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)).square().mean()


def compile_parts(model: Deep, kind: str) -> list[str]:
    options = {"backend": "eager"}
    match kind:
        case "the body":
            model.body = torch.compile(model.body, **options)
        case "the body in place":
            model.body.compile(**options)
        case "the model's forward":
            model.forward = torch.compile(model.forward, **options)
        case "the units in place":
            for block in model.body:
                block.compile(**options)
        case "the units":
            for index, block in enumerate(model.body):
                model.body[index] = torch.compile(block, **options)
        case "the units' forward":
            for block in model.body:
                block.forward = torch.compile(block.forward, **options)
        case "parts of the units":
            for block in model.body:
                block[1] = torch.compile(block[1], **options)
        case "parts of the units in place":
            for block in model.body:
                block[1].compile(**options)
        case "what stays with the root":
            model.norm.compile(**options)
    prefix = "body._orig_mod" if kind == "the body" else "body"
    return [f"{prefix}.{index}" for index in range(3)]


def train_compiled(kind: str, row: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Deep()
    settings = config(row, units=compile_parts(model, kind), optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine, *_ = zeromesh.initialize(model=model, config=settings)
    for step in range(3):
        train_step(engine, engine(torch.ones(2, 4) * (step + engine.data_rank)))
    return {name.replace("_orig_mod.", ""): value for name, value in engine.gathered_state_dict().items()}


REFUSED_PARTS = {
    "the body": "body is compiled and holds the unit body._orig_mod.0",
    "the body in place": "body is compiled and holds the unit body.0",
    "the model's forward": "the model is compiled and holds the unit body.0",
    "the units in place": "body.0 is compiled and holds the unit body.0",
}


@pytest.mark.parametrize("kind", REFUSED_PARTS)
def test_modules_compiled_around_sharded_units_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{REFUSED_PARTS[kind]}; .*engine.compile"):
        train_compiled(kind, 3)
    assert not dist.is_initialized()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("the units", 3),
        ("the units' forward", 3),
        ("parts of the units", 3),
        ("parts of the units in place", 3),
        ("what stays with the root", 3),
        ("the body", 2),
        ("the body in place", 2),
        ("the model's forward", 2),
    ],
)
def test_modules_compiled_elsewhere_train_as_if_they_were_not(kind: str, row: int) -> None:
    found, expected = (run_ranks(train_compiled, 2, name, row)[0] for name in (kind, "nothing"))
    assert_same(found, expected)


def of_an_engine(row: int) -> dict[str, str]:
    model = build_net(torch.float64)
    engine, *_ = zeromesh.initialize(model=model, config=config(row))
    other = start(row)
    train(engine, range(1))
    train(other, range(1))
    part = nn.Sequential(nn.Linear(3, 13).double(), nn.Linear(10, 13).double())
    part[1].weight = model.head.weight
    found = {
        "whole": message(lambda: zeromesh.initialize(model=model, config=config(row))),
        "around": message(lambda: zeromesh.initialize(model=nn.Sequential(model), config=config(row))),
        "tied": message(lambda: zeromesh.initialize(model=part, config=config(row))),
    }
    train(engine, range(1, 3))
    train(other, range(1, 3))
    assert_same(state(engine), state(other))
    engine.destroy()
    if row == 3:
        found["sharded"] = message(lambda: zeromesh.initialize(model=model, config=config(row)))
        return found
    engine, *_ = zeromesh.initialize(model=model, config=config(row))
    train(engine, range(3, 4))
    del engine
    engine, *_ = zeromesh.initialize(model=model, config=config(row))  # nobody can train with the one before
    train(engine, range(3, 4))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_model_that_belongs_to_an_engine_is_refused_and_the_engine_trains_on(row: int) -> None:
    for found in run_ranks(of_an_engine, 2, row, timeout=LIMIT):
        assert len(found) == (4 if row == 3 else 3)
        assert all("already belongs to an engine; train with that one" in text for text in found.values())
        assert found["tied"].startswith("1.weight already")


def test_a_scheduler_that_needs_a_metric_is_refused_before_anything_is_touched() -> None:
    model = build_net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau.step needs metrics, .*call its step yourself"):
        zeromesh.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(optimizer="auto"))
    with pytest.raises(ValueError, match="(?s)scheduler.type.*ReduceLROnPlateau.*needs a metric.*yourself"):
        zeromesh.initialize(model=model, config=config(scheduler={"type": "ReduceLROnPlateau"}))
    assert not dist.is_initialized()
    assert not any(module._forward_pre_hooks for module in model.modules())


@on_ranks(2, timeout=LIMIT)
def test_a_function_that_makes_such_a_scheduler_is_refused() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    found = message(lambda: zeromesh.initialize(model=build_net(torch.float32), config=config(), lr_scheduler=plateau))
    assert "ReduceLROnPlateau.step needs metrics" in found


@on_ranks(2, timeout=LIMIT)
def test_arguments_that_do_not_fit_together_are_refused_on_every_rank() -> None:
    def with_arguments(make: Callable[[Net], dict[str, Any]], **changes: Any) -> Callable[[], Any]:
        model = build_net(torch.float32)
        settings = {key: value for key, value in config(1, **changes).items() if value is not None}
        return lambda: zeromesh.initialize(model=model, config=settings, **make(model))

    other = nn.Linear(3, 4)
    found = {
        "batch": message(with_arguments(lambda m: {}, train_batch_size=13)),
        "mesh": message(with_arguments(lambda m: {}, mesh={"data": 3})),
        "units": message(with_arguments(lambda m: {}, units=["Bloc"])),
        "optimizer": message(with_arguments(lambda m: {"optimizer": torch.optim.SGD(other.parameters(), lr=0.1)})),
        "no optimizer": message(with_arguments(lambda m: {"optimizer": "adamw"})),
        "function": message(with_arguments(lambda m: {"optimizer": lambda parameters: None})),
        "parameters": message(with_arguments(lambda m: {"model_parameters": other.parameters()})),
        "no parameters": message(with_arguments(lambda m: {"model_parameters": []})),
        "scheduler": message(
            with_arguments(lambda m: {}, optimizer=None, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1}})
        ),
        "whole matrices": message(
            with_arguments(lambda m: {"optimizer": torch.optim.Adafactor(m.parameters())})
        ),
    }  # fmt: skip
    assert "13 is not a multiple of" in found["batch"]
    assert "12 or 24" in found["batch"]
    assert "mesh: data = 3" in found["mesh"]
    assert "2 ranks" in found["mesh"]
    assert "'Bloc' matches no module" in found["units"]
    assert "Block" in found["units"]
    assert "group 0, parameter 0 of shape (4, 3)" in found["optimizer"]
    assert "str" in found["no optimizer"]
    assert "NoneType" in found["function"]
    assert "model_parameters, group 0" in found["parameters"]
    assert "model_parameters is empty" in found["no parameters"]
    assert "there is no optimizer" in found["scheduler"]
    assert "Adafactor would be wrong on sharded parameters" in found["whole matrices"]


def differing(kind: str) -> str:
    last = dist.get_rank() == dist.get_world_size() - 1
    model, settings, samples = build_net(torch.float32), config(3), 48
    if last:
        match kind:
            case "value":
                settings["optimizer"] = {"type": "AdamW", "params": {"lr": 2e-2}}
            case "mesh":
                settings["mesh"] = {"replicate": 2, "data": 2}
            case "batch":
                settings["train_batch_size"] = 13
            case "key":
                settings["stage"] = 3
            case "layer":
                model.blocks.append(nn.Linear(10, 10))
            case "shape":
                model.head = nn.Linear(10, 14)
            case "frozen":
                model.head.requires_grad_(False)
            case "lazy":
                model.head = nn.LazyLinear(14)
            case "dtype":
                model.mix.bfloat16()
            case "samples":
                samples = 47
    with pytest.raises((ValueError, RuntimeError)) as caught:
        zeromesh.initialize(model=model, config=settings, training_data=range(samples))
    return f"{type(caught.value).__name__}: {caught.value}"


DIFFERENCES = {
    "value": (
        2,
        "the configuration differs between rank 0",
        ["-optimizer.params.lr = 0.01", "+optimizer.params.lr = 0.02"],
    ),
    "mesh": (
        4,
        "the configuration differs between ranks 0-2 (-) and rank 3 (+)",
        ["-mesh.data = -1", "+mesh.data = 2"],
    ),
    "batch": (2, "the configuration differs between rank 0", ["+train_batch_size = 13"]),
    "layer": (2, "the model differs between rank 0 (-) and rank 1 (+)", ["+blocks.4.weight: torch.float32 (10, 10)"]),
    "shape": (3, "the model differs between ranks 0-1 (-) and rank 2 (+)", ["-head.bias: torch.float32 (13,)"]),
    "frozen": (2, "the model differs", ["+head.bias: torch.float32 (13,) trainable=False"]),
    "dtype": (2, "the model differs", ["+mix.weight: torch.bfloat16"]),
    "samples": (2, "training_data differs", ["-samples: 48", "+samples: 47"]),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_ranks_with_different_configurations_or_models_all_see_the_difference(kind: str) -> None:
    ranks, text, lines = DIFFERENCES[kind]
    for found in run_ranks(differing, ranks, kind, timeout=LIMIT):
        assert found.startswith("ValueError")
        assert text in found
        assert all(line in found for line in lines), found


@pytest.mark.parametrize(("kind", "text"), [("key", "stage is not a known key"), ("lazy", "head.weight is lazy")])
def test_an_error_of_one_rank_reaches_the_others(kind: str, text: str) -> None:
    first, last = run_ranks(differing, 2, kind, timeout=LIMIT)
    assert text in last
    assert "rank 1 could not" in first


@pytest.mark.parametrize("row", [0, 3])
@on_ranks(2, timeout=LIMIT)
def test_a_loss_that_cannot_be_differentiated_is_refused_and_harms_nothing(row: int) -> None:
    engine = start(row)
    other = start(row)
    train(engine, range(1))
    train(other, range(1))
    found = {
        "shape": message(lambda: engine.backward(torch.stack([loss_of(engine)] * 3))),
        "type": message(lambda: engine.backward(loss_of(engine).item())),  # type: ignore[arg-type]
        "detached": message(lambda: engine.backward(loss_of(engine).detach())),
        "step": message(lambda: engine.step(), RuntimeError),
    }
    with torch.no_grad():
        found["no grad"] = message(lambda: engine.backward(loss_of(engine)))
    train(engine, range(1, 3))
    train(other, range(1, 3))
    assert_same(state(engine), state(other))
    assert "shape (3,)" in found["shape"]
    assert "scalar" in found["shape"]
    assert "float, not a tensor" in found["type"]
    assert "no graph" in found["detached"]
    assert "no graph" in found["no grad"]
    assert "step() without backward()" in found["step"]


@on_ranks(2, timeout=LIMIT)
def test_a_step_without_a_backward_is_refused() -> None:
    engine = start(2, gradient_accumulation_steps=3)
    assert "without backward" in message(engine.step, RuntimeError)
    train_step(engine, loss_of(engine))
    assert "without backward" in message(engine.step, RuntimeError), "one micro-batch is one step"
    assert engine.micro_steps == 1
    for _ in range(2):
        train_step(engine, loss_of(engine))
    assert engine.global_steps == 1
    assert "without backward" in message(engine.step, RuntimeError)
    without, *_ = zeromesh.initialize(model=build_net(torch.float64), config=config(optimizer="auto"))
    without.backward(loss_of(without))
    assert "needs an optimizer" in message(without.step, RuntimeError)


def poison(engine: zeromesh.Engine, loss: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "loss":
        return loss * float("nan")
    weight = engine.module.temperature
    return loss + torch.sqrt(weight - weight.detach())


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"bf16": {"enabled": True}}], ids=["float64", "bf16"])
@on_ranks(3, timeout=LIMIT)
def test_a_loss_that_is_nan_on_one_rank_stops_all_and_training_can_go_on(row: int, options: dict[str, Any]) -> None:
    options = {**options, "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.9}}}
    engine, other = (start(row, gradient_accumulation_steps=2, **options) for _ in range(2))
    train(engine, range(2))
    train(other, range(2))
    train_step(engine, loss_of(engine))
    loss = loss_of(engine)
    engine.backward(poison(engine, loss, "loss") if engine.mesh.rank == 1 else loss)
    found = message(engine.step, FloatingPointError)
    assert_same(state(engine), state(other))
    assert (engine.skipped_steps, engine.get_lr()) == (1, other.get_lr())
    train(engine, range(2, 4))
    train(other, range(2, 4))
    assert_same(state(engine), state(other))
    assert engine.global_steps == 5
    assert "the loss of micro-batch 1 of update 3 is not finite on rank 1" in found


@contextmanager
def warnings() -> Iterator[list[str]]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    logger, handler = logging.getLogger("zeromesh"), Keep()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def train_over_infinity(row: int, options: dict[str, Any]) -> tuple[list[str], str]:
    engine, other = start(row, **options), start(row, **options)
    train(engine, range(2))
    train(other, range(2))

    def bad_update() -> None:
        loss = loss_of(engine)
        assert bool(loss.isfinite())
        train_step(engine, poison(engine, loss, "gradient") if engine.mesh.rank == 1 else loss)

    with warnings() as first:
        bad_update()
    assert_same(state(engine), state(other))
    assert engine.skipped_steps == 1
    train(engine, range(2, 3))
    train(other, range(2, 3))
    assert_same(state(engine), state(other))
    for _ in range(9):
        bad_update()
    found = message(bad_update, FloatingPointError)
    train(engine, range(3, 4))
    train(other, range(3, 4))
    assert_same(state(engine), state(other))
    return first, found


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("options", [{}, {"bf16": {"enabled": True}}], ids=["float64", "bf16"])
def test_an_infinite_gradient_is_skipped_and_ten_in_a_row_stop_all(row: int, options: dict[str, Any]) -> None:
    ranks = run_ranks(train_over_infinity, 2, row, options, timeout=LIMIT)
    assert len(ranks[0][0]) == 1
    for first, last in ranks:
        assert all("update 3 skipped: the gradient's norm is inf" in line for line in first)
        assert "not finite in 10 updates in a row, the last is 14" in last
    named = [bool(first) and "temperature" in first[0] and "temperature" in last for first, last in ranks]
    assert any(named), "the parameter is named, by the ranks that have it"


def load_what_cannot_be(folder: str) -> dict[str, str]:
    engine, other = start(3), start(3)
    train(engine, range(2))
    train(other, range(2))
    engine.save_checkpoint(folder, tag="good")
    if engine.mesh.rank == 0:
        for tag in ("truncated", "missing", "manifest"):
            shutil.copytree(Path(folder) / "good", Path(folder) / tag)
        # The second file: what is in the first must not be taken either.
        shard = Path(folder) / "truncated" / "rank_00001.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        (Path(folder) / "missing" / "rank_00001.safetensors").unlink()
        manifest = Path(folder) / "manifest" / "manifest.json"
        manifest.write_text(manifest.read_text()[:-100])
    train(engine, range(2, 3))
    train(other, range(2, 3))
    dist.barrier()
    deeper = build_net(torch.float64)
    deeper.blocks.append(nn.Linear(10, 10))
    deeper.head = nn.Linear(10, 14).double()
    misfit, *_ = zeromesh.initialize(model=deeper.double(), config=config(3))
    sgd = start(3, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    errors = (ValueError, OSError, RuntimeError)
    found = {
        "model": message(lambda: misfit.load_checkpoint(folder, "good"), ValueError),
        "optimizer": message(lambda: sgd.load_checkpoint(folder, "good"), ValueError),
        "tag": message(lambda: engine.load_checkpoint(folder, "goods"), FileNotFoundError),
        **{
            tag: message(lambda tag=tag: engine.load_checkpoint(folder, tag), errors)
            for tag in ("truncated", "missing", "manifest")
        },
    }
    assert_same(state(engine), state(other))
    train(engine, range(3, 4))
    train(other, range(3, 4))
    assert_same(state(engine), state(other))
    return found


def test_a_checkpoint_that_is_not_this_runs_or_is_damaged_is_refused_and_nothing_of_it_taken(tmp_path: Path) -> None:
    ranks = run_ranks(load_what_cannot_be, 2, str(tmp_path), timeout=LIMIT)
    for found in ranks:
        assert "head.weight: saved (13, 10), wanted (14, 10)" in found["model"]
        assert "blocks.4.weight: not in the checkpoint" in found["model"]
        assert "AdamW" in found["optimizer"]
        assert "SGD" in found["optimizer"]
        assert "goods is not a complete checkpoint" in found["tag"]
        assert "is an incomplete save: manifest.json is not a complete JSON" in found["manifest"]
    for tag, text in (("truncated", "is cut off"), ("missing", "is missing")):
        told = [found[tag] for found in ranks]
        assert any("rank_00001.safetensors" in words and text in words for words in told)
        assert all(text in words or "could not read the checkpoint" in words for words in told)


def save_where_it_cannot_be(folder: str, file: str) -> dict[str, str]:
    engine, other = start(1), start(1)
    train(engine, range(2))
    train(other, range(2))
    found = {
        "folder": message(lambda: engine.save_checkpoint(f"{file}/below"), (OSError, RuntimeError)),
        "model": message(lambda: engine.save_16bit_model(f"{file}/below"), (OSError, RuntimeError)),
        "client": message(lambda: engine.save_checkpoint(folder, client_state={"model": engine}), TypeError),
        "one rank": message(
            lambda: engine.save_checkpoint(folder, client_state={"rank": engine if engine.mesh.rank else 0}),
            (TypeError, RuntimeError),
        ),
    }
    train(engine, range(2, 3))
    train(other, range(2, 3))
    assert_same(state(engine), state(other))
    return found


def test_a_folder_or_a_state_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(save_where_it_cannot_be, 2, str(tmp_path), str(tmp_path / "file"), timeout=LIMIT)
    assert "Not a directory" in first["folder"]
    assert "Not a directory" in first["model"]
    assert second["folder"] == f"rank 0 could not save the checkpoint: {first['folder']}"
    assert "rank 0 could not write the model" in second["model"]
    assert "rank 1 could not save the checkpoint" in first["one rank"]
    assert "client_state['rank'] is a Engine" in second["one rank"]
    for found in (first, second):
        assert "client_state['model'] is a Engine" in found["client"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"
