"""Training with float8 products on ranks, against one plain process with the same layers."""

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeromesh
from compare import assert_same
from float8_training import LR, MICRO, STEPS, Net, batch, on_engine, plain, require_same, section
from harness import on_ranks
from run import train_step, whole_state
from zeromesh.config.errors import ConfigError

HOST = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
RECOMPUTED = {"units": ["Block"], "activation_checkpointing": {"enabled": True}}
SELECTIVE = {"units": ["Block"], "activation_checkpointing": {"enabled": True, "granularity": "selective"}}
CASES: list[dict[str, Any]] = [
    {},
    {"zero_optimization": {"stage": 1}},
    {"zero_optimization": {"stage": 2}},
    {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"stage": 3}, **RECOMPUTED},
    {"zero_optimization": HOST, **SELECTIVE},
]


@pytest.mark.some(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_rank_trains_as_one_plain_process(recipe: str, accumulation: int) -> None:
    want = plain(Net, recipe == "rowwise", accumulation)
    for settings in CASES[2:]:
        require_same(on_engine(Net, {**settings, **section(recipe)}, accumulation), want)


@pytest.mark.some(1)
@pytest.mark.parametrize("accumulation", [2, 1])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_two_ranks_train_as_one_plain_process(accumulation: int, recipe: str) -> None:
    want = plain(Net, recipe == "rowwise", 2 * accumulation)
    for settings in CASES:
        require_same(on_engine(Net, {**settings, **section(recipe)}, accumulation), want)


@on_ranks(2)
def test_tensor_parallel_ranks_share_the_scales_of_what_they_split() -> None:
    for recipe in ("tensorwise", "rowwise"):
        want = plain(partial(Net, reads=False), recipe == "rowwise", 1)
        for settings in (CASES[1], {**CASES[3], "tensor_parallel": {"sequence": True}}, {**CASES[2], **RECOMPUTED}):
            settings = {**settings, "mesh": {"tensor": 2}, **section(recipe)}
            require_same(on_engine(partial(Net, reads=False), settings), want)


@on_ranks(2)
def test_pipeline_stages_refuse_a_pattern_that_matches_no_layer_of_any() -> None:
    settings = {"optimizer": {"type": "SGD"}, "mesh": {"pipeline": 2}, "train_batch_size": 2}
    with pytest.raises(ValueError, match="float8.skip has 'block.*', which matches no linear layer"):
        zeromesh.initialize(model=Net(reads=False), config={**settings, **section(skip=["block.*"])})


def test_a_layer_whose_forward_was_replaced_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    layer = model.blocks[0].up_proj
    layer.forward = partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)
    with caplog.at_level(logging.INFO, "zeromesh"):
        zeromesh.initialize(model=model, config={"optimizer": {"type": "SGD"}, **section()})
    assert "blocks.0.up_proj stays as it is: its forward was replaced" in caplog.text
    assert "float8: layers that compute in it: 5\n" in caplog.text


@on_ranks(2)
def test_pipeline_stages_train_as_one_plain_process() -> None:
    build = partial(Net, reads=False)
    want = plain(build, False, 2)
    for schedule in ("1f1b", "zb-h1"):
        optimizer = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}
        settings = {"mesh": {"pipeline": 2}, "pipeline": {"schedule": schedule}}
        settings |= {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2}
        engine = zeromesh.initialize(model=build().double(), config={"optimizer": optimizer, **settings, **section()})[
            0
        ]
        losses = [float(engine.train_batch(iter([batch(step, n) for n in range(2)]))) for step in range(STEPS)]
        assert losses == pytest.approx(want[0], rel=1e-9), schedule
        engine.destroy()


def gathering(gather: bool, bf16: bool) -> tuple[list[float], dict[str, Tensor], set[int]]:
    """Return losses, masters, and bytes of the gathers of a forward; weights change between steps, also by the user."""
    settings = {"zero_optimization": {"stage": 3}, "units": ["Block"], "bf16": {"enabled": bf16}}
    optimizer = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}
    config = {"optimizer": optimizer, **settings, **section(gather=gather)}
    engine = zeromesh.initialize(model=Net(reads=False), config=config)[0]
    weight = engine.module.blocks[1].down_proj.weight
    sent: list[int] = []
    engine.mesh.traffic.listen(lambda collective, axis, count: collective == "all_gather" and sent.append(count))
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            with zeromesh.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.mul_(3000.0)  # beyond what its last scale could hold
        if step == STEPS + 1:
            with torch.no_grad(), zeromesh.zero.GatheredParameters([weight], modifier_rank=0):
                weight.div_(3000.0)
        sent.clear()
        loss = engine(batch(step, engine.mesh.data_rank))
        sizes = set(sent)
        losses.append(train_step(engine, loss))
    state = whole_state(engine.module)
    engine.destroy()
    return losses, state, sizes


@on_ranks(2)
def test_gathers_in_float8_send_half_and_change_no_bit() -> None:
    for bf16 in (True, False):
        want, found = gathering(False, bf16), gathering(True, bf16)
        assert found[0] == want[0]
        assert_same(found[1], want[1])
        weights = 3 * 32 * 64  # of a block; its norm and biases travel apart
        assert weights // 2 in found[2]
        assert weights // 2 not in want[2]
        assert sum(found[2]) < sum(want[2])


def gathering_engine(ranks_lr: float = 0.0) -> Any:
    settings = {"zero_optimization": {"stage": 3}, "units": ["Block"], "bf16": {"enabled": True}}
    optimizer = {"type": "SGD", "params": {"lr": ranks_lr}}
    return zeromesh.initialize(
        model=Net(reads=False), config={"optimizer": optimizer, **settings, **section(gather=True)}
    )[0]


def masters(engine: Any) -> list[Tensor]:
    return [zeromesh.zero.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


def step_once(engine: Any, step: int = 0) -> None:
    train_step(engine, engine(batch(step, engine.mesh.data_rank)))


@on_ranks(2)
def test_reading_a_weight_that_was_gathered_in_float8_changes_no_master() -> None:
    engine = gathering_engine()
    layer, read = engine.module.blocks[0].up_proj, []
    layer.register_forward_hook(lambda module, *_: read.append(module.weight.data.norm()))
    before = masters(engine)
    for step in range(2):
        step_once(engine, step)
    assert len(read) == 2
    assert all(map(torch.equal, masters(engine), before))
    engine.destroy()


@pytest.mark.parametrize("through_data", [False, True])
def test_writing_to_a_weight_that_was_gathered_in_float8_is_refused(through_data: bool) -> None:
    engine = gathering_engine()

    def write(module: Any, *_: Any) -> None:
        with torch.no_grad():
            (module.weight.data if through_data else module.weight)[3, 5] += 1.0

    engine.module.blocks[1].up_proj.register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match="blocks.1.up_proj.weight was changed in a forward .*GatheredParameters"):
        step_once(engine)


@on_ranks(2)
def test_what_one_rank_reads_between_steps_leaves_the_others_alone() -> None:
    engine = gathering_engine(LR)
    weight = engine.module.blocks[0].up_proj.weight
    for step in range(2):
        with zeromesh.zero.GatheredParameters([weight]):
            if engine.mesh.rank == 0:
                weight.data.norm()
        step_once(engine, step)
    engine.destroy()


def test_tied_and_frozen_weights() -> None:
    def frozen() -> Net:  # as the base of adapters
        model = Net()
        model.blocks[0].requires_grad_(False)
        return model

    for build, more in ((frozen, {}), (partial(Net, tied=True), {"skip": []})):
        kept = ("odd", "back") if more else ("lm_head", "odd", "back")
        want = plain(build, False, 1, kept=kept)
        require_same(on_engine(build, {"zero_optimization": {"stage": 3}, **section(**more)}), want)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_compute_the_same(backend: str) -> None:
    def losses(compiled: bool) -> list[float]:
        settings = {"zero_optimization": {"stage": 3}, "units": ["Block"], **section()}
        optimizer = {"type": "SGD", "params": {"lr": LR}}
        engine = zeromesh.initialize(model=Net(), config={"optimizer": optimizer, **settings})[0]
        if compiled:
            engine.compile(backend=backend, fullgraph=True)
        return [train_step(engine, engine(batch(step, 0))) for step in range(2)]

    assert losses(True) == pytest.approx(losses(False), rel=1e-6)


@pytest.mark.full
def test_a_small_decoder_learns_nearly_as_in_bf16() -> None:
    from zeromesh.apps.train.architectures.decoder import Decoder
    from zeromesh.apps.train.train_settings import ModelShape

    shape = {"vocab_size": 64, "hidden_size": 64, "layers": 2, "heads": 4, "sequence_length": 16}

    def losses(more: dict[str, Any]) -> list[float]:
        torch.manual_seed(0)
        optimizer = {"type": "AdamW", "params": {"lr": 3e-3}}
        config = {"bf16": {"enabled": True}, "optimizer": optimizer, **more}
        engine = zeromesh.initialize(model=Decoder(ModelShape(architecture="llama", **shape)), config=config)[0]
        ids = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(1))
        return [train_step(engine, engine(ids[:, :-1], ids[:, 1:])) for _ in range(20)]

    want = losses({})
    assert want[-1] < 0.6 * want[0]
    for recipe in ("tensorwise", "rowwise"):
        found = losses(section(recipe))
        assert found != want
        assert found[-1] == pytest.approx(want[-1], rel=0.1)
        assert max(abs(a - b) for a, b in zip(found, want, strict=True)) < 0.05 * want[0]


@on_ranks(2)
def test_tensor_parallel_ranks_share_scales_of_parts_of_different_magnitude() -> None:
    def build() -> Net:
        model = Net(reads=False)
        with torch.no_grad():
            for block in model.blocks:
                # The second rank's outputs, inputs of the next product and their weights are far smaller.
                block.up_proj.weight[32:].mul_(2.0**-16)
                block.up_proj.bias[32:].mul_(2.0**-16)
                block.down_proj.weight[:, 32:].mul_(2.0**-16)
        return model

    want = plain(build, False, 1)
    require_same(on_engine(build, {"mesh": {"tensor": 2}, **section()}), want)


def test_a_loss_of_numbers_that_are_not_finite_is_not_finite() -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[0].up_proj.weight[3, 4] = torch.inf
    engine = zeromesh.initialize(model=by_engine(model), config={"optimizer": {"type": "SGD"}, **section()})[0]
    assert not engine(batch(0, 0)).isfinite()


def by_engine(model: Net) -> Net:
    model.reads = False  # which would show it by itself
    return model


def test_layers_that_stay_as_they_are_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zeromesh"):
        engine = zeromesh.initialize(
            model=Net(), config={"optimizer": {"type": "SGD"}, **section(skip=["*lm_head", "blocks.1.*"])}
        )[0]
    text = caplog.text
    assert text.count("odd stays as it is: 24 x 32 does not divide by 16") == 1
    skipped = "float8.skip or data_types.keep_in_fp32_modules has 'blocks.1.*'"
    assert text.count(f"blocks.1.up_proj stays as it is: {skipped}") == 1
    assert "float8: layers that compute in it: 3\n" in text
    assert text.count("are emulated by products in fp32") == 1
    layer, x = engine.module.blocks[0].up_proj, torch.randn(3, 32)
    assert torch.equal(layer(input=x), layer(x))
    copied = copy.deepcopy(engine.module)
    assert torch.equal(copied(batch(0, 0)), engine(batch(0, 0)))  # a copy computes as its original


def test_what_cannot_be_is_refused() -> None:
    sgd = {"optimizer": {"type": "SGD"}}
    with pytest.raises(ConfigError, match="float8.enabled is true, and products in float8 give bf16 or fp32, not fp16"):
        zeromesh.initialize(model=Net(), config={**sgd, **section(), "fp16": {"enabled": True}})
    apart = {"recipe": "rowwise", "gather": True}
    with pytest.raises(ConfigError) as told:
        zeromesh.initialize(model=Net(), config={**sgd, **section(**apart), "mesh": {"tensor": 2}})
    for part in ("at stage 0 no weights", "set float8.recipe to tensorwise", "set mesh.tensor to 1"):
        assert part in str(told.value)
    with pytest.raises(ConfigError, match="under autocast weights are rounded to another dtype first"):
        zeromesh.initialize(model=Net(), config={**sgd, **section(gather=True), "torch_autocast": {"enabled": True}})
    with pytest.raises(ConfigError, match="weights that rest off the device are not sent in float8"):
        zeromesh.initialize(model=Net(), config={**sgd, **section(gather=True), "zero_optimization": HOST})
    with pytest.raises(ValueError, match="float8.skip has 'block.*', which matches no linear layer; there are blocks"):
        zeromesh.initialize(model=Net(), config={**sgd, **section(skip=["block.*"])})
    with pytest.raises(ValueError, match="the weight of blocks.0.up_proj is in fp16, .*set .bf16.: "):
        zeromesh.initialize(model=Net().half(), config={**sgd, **section()})
    many = nn.Sequential(*(nn.Linear(16, 16) for _ in range(30)))
    with pytest.raises(ValueError, match="there are 0, 1, 2, 3, 4, 5, 6, 7, and 22 more"):
        zeromesh.initialize(model=many, config={**sgd, **section(skip=["block.*"])})
    with pytest.raises(ValueError, match="no layer of the model can compute in it .*0: 3 x 3 does not divide by 16"):
        zeromesh.initialize(model=nn.Sequential(nn.Linear(3, 3)), config={**sgd, **section()})
