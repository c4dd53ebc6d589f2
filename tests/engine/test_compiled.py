"""Blocks that the configuration has compiled compute as before."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import zeromesh
from float8_training import LR, MICRO, STEPS, Net, batch, on_engine, require_same, section
from harness import on_ranks
from zeromesh import Settings
from zeromesh.config.adopt import adopt
from zeromesh.config.errors import ConfigError
from zeromesh.parallel.activation.compiled import require_backend

RECOMPUTED = {"activation_checkpointing": {"enabled": True}}


def compiled(backend: str = "eager", **more: Any) -> dict[str, Any]:
    return {"compile": {"enabled": True, "backend": backend, **more}, "units": ["Block"]}


def build() -> Net:
    return Net(reads=False)


SHARDED = {"zero_optimization": {"stage": 3}, **RECOMPUTED}
CASES = [
    ("eager", SHARDED),
    pytest.param("aot_eager", {}, marks=pytest.mark.full),
    pytest.param("aot_eager", SHARDED, marks=pytest.mark.full),
    # A C++ compiler takes minutes on a busy machine.
    pytest.param("inductor", {}, marks=[pytest.mark.full, pytest.mark.timeout(1200)]),
]


@pytest.mark.parametrize(("backend", "settings"), CASES)
def test_compiled_blocks_train_as_plain_ones(backend: str, settings: dict[str, Any]) -> None:
    require_same(on_engine(build, {**settings, **compiled(backend)}), on_engine(build, {}))


@pytest.mark.full
@on_ranks(2)
def test_on_ranks_too() -> None:
    want = on_engine(build, {})
    for stage in (1, 3):
        require_same(on_engine(build, {"zero_optimization": {"stage": stage}, **compiled()}), want)
    whole = on_engine(build, {"mesh": {"tensor": 2}})
    require_same(on_engine(build, {"mesh": {"tensor": 2}, **compiled()}), whole)


@pytest.mark.full
@on_ranks(2)
def test_pipeline_stages_compile_their_blocks() -> None:
    def losses(more: dict[str, Any]) -> list[float]:
        optimizer = {"type": "SGD", "params": {"lr": LR}}
        batches = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2}
        config = {"optimizer": optimizer, **batches, "mesh": {"pipeline": 2}, **more}
        engine = zeromesh.initialize(model=build().double(), config=config)[0]
        found = [float(engine.train_batch(iter([batch(step, n) for n in range(2)]))) for step in range(STEPS)]
        engine.destroy()
        return found

    assert losses(compiled()) == pytest.approx(losses({}), rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_blocks_are_compiled_anew_while_an_update_has_gradients_of_another_micro_batch(stage: int) -> None:
    def losses(more: dict[str, Any]) -> list[float]:
        optimizer = {"type": "SGD", "params": {"lr": LR}}
        batches = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2}
        zero = {"zero_optimization": {"stage": stage}}
        engine = zeromesh.initialize(model=build().double(), config={"optimizer": optimizer, **batches, **zero, **more})
        parts = [[batch(step, n)[:, : 6 - 2 * n] for n in range(2)] for step in range(STEPS)]
        found = [float(engine[0].train_batch(iter(part))) for part in parts]
        engine[0].destroy()
        return found

    assert losses(compiled()) == pytest.approx(losses({}), rel=1e-9)


@pytest.mark.some(1)
@pytest.mark.parametrize("more", [section(), {}, {"zero_optimization": {"stage": 3}, **section("rowwise")}])
def test_like_blocks_are_compiled_once(more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = build()
    model.blocks.extend([type(model.blocks[0])() for _ in range(10)])  # more than torch compiles one function for
    engine = zeromesh.initialize(model=model, config={"optimizer": {"type": "SGD"}, "units": ["Block"], **more})[0]
    engine.compile(count, fullgraph=True)
    with caplog.at_level(logging.INFO, "zeromesh"):
        for step in range(2):
            engine.backward(engine(batch(step, 0)))
            engine.step()
    assert len(graphs) == 1
    assert caplog.text.count("compiling 1 kind of blocks took") == 1


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start = partial(zeromesh.initialize, model=build())
    sgd = {"optimizer": {"type": "SGD"}}
    with pytest.raises(ValueError, match="compile.backend is 'indctor'; it must be one of .*inductor"):
        start(config={**sgd, **compiled("indctor")})
    with pytest.raises(ConfigError, match="compile.mode is 'default', which only inductor has"):
        start(config={**sgd, **compiled("eager", mode="default")})
    with pytest.raises(ConfigError, match="compile.deepcompile = true: DeepCompile is not in this version yet"):
        start(config={**sgd, **compiled(deepcompile=True)})
    with pytest.raises(ValueError, match="compile is enabled, but the model has no blocks to compile"):
        zeromesh.initialize(model=torch.nn.Linear(2, 2), config={**sgd, "compile": {"enabled": True}})
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler, and there is none in PATH .*apt-get install g"):
        require_backend("inductor")
    monkeypatch.setattr("shutil.which", lambda name: None if name == "g++" else name)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match="there is none in PATH \\(g\\+\\+\\)"):  # inductor takes no other by itself
        require_backend("inductor")
    monkeypatch.setenv("CXX", "clang++")
    require_backend("inductor")
    require_backend("aot_eager")


def test_blocks_that_are_compiled_twice_log_their_times_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    engine = zeromesh.initialize(model=build(), config={"optimizer": {"type": "SGD"}, **compiled()})[0]
    engine.compile("eager")
    with caplog.at_level(logging.INFO, "zeromesh"), torch.no_grad():
        for _ in range(2):
            engine(batch(0, 0))
    assert caplog.text.count("compiling 1 kind of blocks took") == 1


@pytest.mark.parametrize(
    ("theirs", "enabled"),
    [
        ({"enabled": False, "backend": "inductor", "kwargs": {}}, False),
        ({"disable": True, "fullgraph": False, "dynamic": None, "mode": None, "options": {}}, False),
        ({"deepcompile": False, "autoep_non_moe": True}, False),
        (False, False),
        (None, False),
        (True, True),
    ],
)
def test_what_deepspeed_took_in_this_section_loads(theirs: Any, enabled: bool) -> None:
    assert Settings.load({"compile": theirs}).compile.enabled is enabled


def test_arguments_of_the_compiler_are_refused_and_left_out_for_deepspeed() -> None:
    theirs = {"compile": {"enabled": True, "kwargs": {"dynamic": True}}}
    with pytest.raises(ConfigError, match="compile.kwargs = .*engine.compile takes them.*leave the key out"):
        Settings.load(theirs)
    assert Settings.load(adopt(theirs)[0]).compile.enabled


def test_deepspeeds_own_keys_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    theirs = {"deepcompile": False, "offload_activation": True, "double_buffer": True}
    with caplog.at_level(logging.INFO, "zeromesh"):
        engine = zeromesh.initialize(model=build(), config={"optimizer": {"type": "SGD"}, "compile": theirs})[0]
    assert "compile.offload_activation: DeepSpeed's compiler passes do not exist" in caplog.text
    assert not hasattr(engine.module.blocks[0].forward, "_torchdynamo_orig_callable")
