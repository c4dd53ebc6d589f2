"""Names of the drop-in that need ranks: collectives, groups, leaf modules, single states, attention, weights."""

import logging
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeromesh.deepspeed as ds
from compare import assert_same
from harness import on_ranks
from run import train_step
from same_training import require_same_training
from zeromesh.shard.find_units import find_units, unit_modules

deepspeed: Any = ds


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.steps[1](torch.tanh(self.steps[0](x))))


class Routed(nn.Module):
    """Each batch takes one of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.routed, self.last = nn.Linear(8, 8), Routed(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.last(self.routed(self.first(x), chosen)).square().mean()


def make_model() -> Model:
    torch.manual_seed(1)
    return Model()


def leaf_model() -> Model:
    model = make_model()
    deepspeed.utils.set_z3_leaf_modules(model, [Routed])
    return model


def units(model: nn.Module) -> list[str]:
    return [name for name, _ in find_units(model)]


def test_a_leaf_is_one_unit_with_nothing_inside() -> None:
    model, utils = make_model(), deepspeed.utils
    found = units(model)
    assert any(name.startswith("routed.experts.") for name in found)
    assert utils.set_z3_leaf_modules(model, ["Routed"]) == [model.routed]
    assert utils.z3_leaf_module(model.routed)
    assert utils.get_z3_leaf_modules(model) == [model.routed]
    assert [name for name in units(model) if "routed" in name] == ["routed"]
    assert [name for name, _ in find_units(model, ["Expert", "first"])] == ["first", "routed"]
    assert utils.unset_z3_leaf_modules(model, [Routed]) == [model.routed]
    assert units(model) == found
    assert utils.set_z3_leaf_modules_by_suffix(model, [".1", ".9"], raise_if_not_found=False)[1] == [".9"]
    assert "routed.experts.1" in units(model)
    utils.set_z3_leaf_module(model, True)
    assert unit_modules(model) == []
    with pytest.raises(ValueError, match="match no module of the model; its classes are Expert, Linear, Model"):
        utils.set_z3_leaf_modules(model, ["Nothing"])
    assert utils.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="'second'.* match no module"):
        utils.set_z3_leaf_modules_by_name(model, ["first", "second"])
    with pytest.raises(AssertionError, match="by their class or its name"):
        utils.set_z3_leaf_modules(model, [3])


def give(step: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64), step % 3


@on_ranks(2)
def test_a_model_with_a_leaf_trains_as_plain_torch() -> None:
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    require_same_training(leaf_model, give, settings)
    engine = deepspeed.initialize(model=leaf_model(), config=settings)[0]
    assert [unit.name for unit in engine.sharded.units if "routed" in unit.name] == ["routed"]
    leaf = deepspeed.utils.z3_leaf_parameter
    assert leaf(engine.module.routed.experts[0].steps[0].weight)
    assert not leaf(engine.module.first.weight)
    with pytest.raises(ValueError, match="call this before initialize"):
        deepspeed.utils.unset_z3_leaf_modules(engine.module, [Routed])


def train_in_parts(again: bool) -> dict[str, torch.Tensor]:
    """Make two updates without states at ZeRO-3, the second one by an engine of its own if ``again``."""
    model, zero = make_model().double(), {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    for step in range(2):
        if step == 0 or again:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            config = {"train_micro_batch_size_per_gpu": 4, **zero}
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        train_step(engine, engine(*give(step)))
    return dict(engine.module_state_dict())


@on_ranks(2)
def test_a_model_in_parts_is_initialised_again_as_it_is() -> None:
    torch.testing.assert_close(train_in_parts(again=True), train_in_parts(again=False), rtol=0.0, atol=0.0)


@on_ranks(2)
def test_local_states_are_the_ranks_parts_of_the_whole() -> None:
    utils = deepspeed.utils
    for stage in (0, 3):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage},
            # So that sums of gradients are kept, and not means.
            "gradient_predivide_factor": 1.0,
        }
        engine = deepspeed.initialize(model=make_model().double(), config=config)[0]
        parameter = engine.module.routed.experts[0].steps[0].weight
        assert utils.safe_get_local_grad(parameter) is None
        assert utils.safe_get_local_optimizer_state(parameter, "exp_avg") is None or stage == 3
        with pytest.raises(RuntimeError, match="between backward and step"):
            utils.safe_set_local_grad(parameter, torch.zeros(1))

        def require(name: str, local: torch.Tensor | None, whole: torch.Tensor) -> torch.Tensor:
            assert local is not None
            parts: list[Any] = [None, None]
            dist.all_gather_object(parts, local)
            joined = parts[0] if stage == 0 else torch.cat(parts)  # noqa: B023
            torch.testing.assert_close(joined, whole.flatten(), rtol=0, atol=0, msg=name)
            return local

        engine.backward(engine(*give(0)))
        gradient = require("grad", utils.safe_get_local_grad(parameter), utils.safe_get_full_grad(parameter))
        whole = utils.safe_get_full_grad(parameter)
        utils.safe_set_local_grad(parameter, 2 * gradient)
        torch.testing.assert_close(utils.safe_get_full_grad(parameter), 2 * whole, rtol=1e-15, atol=0)
        utils.safe_update_full_grad_vectorized([parameter], lambda value, _: value / 2)
        torch.testing.assert_close(utils.safe_get_full_grad(parameter), whole, rtol=1e-15, atol=0)
        engine.step()
        moment = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
        require("exp_avg", moment, utils.safe_get_full_optimizer_state(parameter, "exp_avg"))
        utils.safe_set_local_optimizer_state(parameter, moment + 1, "exp_avg")
        require("changed", moment + 1, utils.safe_get_full_optimizer_state(parameter, "exp_avg"))
        master = require(
            "master", utils.safe_get_local_fp32_param(parameter), utils.safe_get_full_fp32_param(parameter)
        )
        utils.safe_set_local_fp32_param(parameter, master * 3)
        with deepspeed.zero.GatheredParameters(parameter):
            require("parameter", master * 3, parameter.detach())
        with pytest.raises(ValueError, match=f"has {master.numel()} elements .*, the value given 3"):
            utils.safe_set_local_fp32_param(parameter, torch.zeros(3))
        engine.destroy()


@pytest.mark.full  # the only run of four ranks here, whose start takes longer than all of the others
@on_ranks(4)
def test_groups_are_those_of_the_mesh() -> None:
    groups = deepspeed.utils.groups
    assert groups.get_data_parallel_group() is dist.group.WORLD
    assert groups.get_model_parallel_world_size() == 1
    config = {"train_micro_batch_size_per_gpu": 4, "mesh": {"data": 2, "tensor": 2}}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = {"0": "colwise", "1": "rowwise"}
    engine = deepspeed.initialize(model=model, config=config | {"tensor_parallel": {"plan": plan}})[0]
    rank = dist.get_rank()
    assert groups._get_data_parallel_rank() == groups.get_data_parallel_rank() == engine.data_rank == rank // 2
    assert groups.get_tensor_model_parallel_rank() == rank % 2
    assert groups.get_data_parallel_group_ranks() == [rank % 2, rank % 2 + 2]
    assert groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert groups._get_sequence_parallel_world_size() == 1
    assert groups._get_sequence_data_parallel_group() is groups.get_data_parallel_group()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=groups.get_model_parallel_group())
    assert float(total) == {0: 1.0, 1: 5.0}[rank // 2]
    with pytest.raises(ValueError, match="no groups 'ep_size_2' of experts, but 'ep_size_1'"):
        groups._get_expert_parallel_group("ep_size_2")
    assert groups._get_expert_data_parallel_group_ranks("ep_size_1") == groups.get_data_parallel_group_ranks()
    with pytest.raises(AttributeError, match="groups has no 'get_nothing'"):
        _ = groups.get_nothing


@on_ranks(2)
def test_collectives_are_torchs() -> None:
    comm, rank = deepspeed.comm, deepspeed.comm.get_rank()
    assert comm.is_initialized()
    assert (comm.get_world_size(), comm.get_local_rank()) == (2, rank)
    assert comm.has_all_gather_into_tensor()
    value = torch.tensor([rank + 1.0])
    comm.all_reduce(value, op=comm.ReduceOp.SUM, log_name="mine", prof=True)
    assert float(value) == 3.0
    comm.inference_all_reduce(value, comm.ReduceOp.MAX)
    gathered = torch.zeros(2)
    comm.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    assert gathered.tolist() == [0.0, 1.0]
    part = torch.zeros(1)
    comm.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]))
    assert float(part) == 2.0 * (rank + 1)
    found: list[Any] = [rank, None]
    comm.comm.broadcast_object_list(found, src=0)
    assert found == [0, None]
    comm.monitored_barrier()
    assert comm.get_global_rank(comm.new_group([0, 1]), 1) == 1
    assert comm.initialize_mesh_device((2, 1), ("data_parallel", "sequence_parallel")).size() == 2
    with pytest.raises(ValueError, match="show_straggler"):
        comm.log_summary(show_straggler=True)
    engine = deepspeed.initialize(model=make_model(), config={"train_micro_batch_size_per_gpu": 4})[0]
    assert comm.log_summary(return_dict=True) == engine.traffic_report()


@on_ranks(2)
def test_distributed_attention_is_attention_of_the_whole_sequence() -> None:
    rank = dist.get_rank()
    inner = nn.Module()
    inner.forward = lambda q, k, v: F.scaled_dot_product_attention(  # type: ignore[method-assign]
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    attention = deepspeed.sequence.layer.DistributedAttention(inner, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    torch.manual_seed(0)
    whole = [torch.randn(2, 6, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weights = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    mine = [x.detach().chunk(2, 1)[rank].clone().requires_grad_() for x in whole]
    found, expected = attention(*mine, 0), inner(*whole)
    torch.testing.assert_close(found, expected.chunk(2, 1)[rank], rtol=1e-12, atol=1e-12)
    (found * weights.chunk(2, 1)[rank]).sum().backward()
    (expected * weights).sum().backward()
    for part, want in zip(mine, whole, strict=True):
        assert want.grad is not None
        torch.testing.assert_close(part.grad, want.grad.chunk(2, 1)[rank], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="2 ranks cannot share equally"):
        attention(*(x[:, :, :3] for x in mine), 0)


@on_ranks(2)
def test_grids_have_the_groups_of_their_topology() -> None:
    topology = deepspeed.runtime.pipe.topology
    grid, rank = topology.PipelineParallelGrid(topology.PipeDataParallelTopology(2, 1)), dist.get_rank()
    assert (grid.get_stage_id(), grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()) == (
        rank,
        2,
        1,
    )
    assert dist.get_world_size(grid.get_pipe_parallel_group()) == 2
    assert dist.get_world_size(grid.get_data_parallel_group()) == 1
    assert (grid.get_model_parallel_rank(), grid.get_slice_parallel_world_size()) == (rank, 1)
    assert (grid.dp_groups, grid.pipe_groups, grid.p2p_groups) == ([[0], [1]], [[0, 1]], [[0, 1], [1, 0]])
    assert grid.stage_to_global(1) == 1
    with pytest.raises(AssertionError, match="has 6 ranks, but 2 are running"):
        topology.PipelineParallelGrid(topology.PipeDataParallelTopology(2, 3))


def write_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    model = make_model()
    model.last.weight.requires_grad_(False)
    model.register_buffer("count", torch.ones(3))
    engine = deepspeed.initialize(model=model, config=config)[0]
    train_step(engine, engine(torch.ones(4, 8), 1))
    engine.save_checkpoint(folder)
    named = engine.module.named_parameters()
    return {name: deepspeed.utils.safe_get_full_fp32_param(one) for name, one in named if one.requires_grad}


@on_ranks(2)
def _write_and_compare(folder: Path) -> None:
    masters = write_checkpoint(folder)
    functions = deepspeed.utils.zero_to_fp32
    found = functions.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert found.keys() == {*make_model().state_dict(), "count"}
    assert_same({name: found[name] for name in masters}, masters)
    trained = functions.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert found.keys() - trained.keys() == {"last.weight"}
    _require_gathered_load(folder)


def _require_gathered_load(folder: Path) -> None:
    functions, gather = deepspeed.utils.zero_to_fp32, deepspeed.zero.GatheredParameters
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    config["checkpoint"] = {"tag_validation": "Fail"}
    model = make_model()
    model.register_buffer("count", torch.ones(3))
    model.last.weight.requires_grad_(False)
    engine = deepspeed.initialize(model=model, config=config)[0]
    parameters = [*model.parameters()]
    with pytest.raises(RuntimeError, match="pass modifier_rank"), gather(parameters):
        functions.load_state_dict_from_zero_checkpoint(engine.module, folder)
    with gather(parameters, modifier_rank=0):
        functions.load_state_dict_from_zero_checkpoint(engine.module, folder)
    # A program that compares them gathers without a modifier_rank, and loads what the model has already.
    with gather(parameters):
        state = functions.load_state_dict_from_zero_checkpoint(engine.module, folder).state_dict()
        state = {name: value.clone() for name, value in state.items()}
    want = functions.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert all(torch.equal(state[name], value) for name, value in want.items())

    with pytest.raises(AssertionError, match="with the tags of-0, of-1"):
        engine.save_checkpoint(folder.parent / "tags", f"of-{dist.get_rank()}")
    with pytest.raises(AssertionError, match="is not a complete checkpoint"):
        engine.load_checkpoint(folder, "none")
    engine.save_checkpoint(folder.parent / "tags", exclude_frozen_parameters=True)
    left = functions.get_fp32_state_dict_from_zero_checkpoint(folder.parent / "tags")
    assert want.keys() - left.keys() == {"last.weight"}


@on_ranks(2)
def test_unused_and_frozen_parameters_have_the_states_that_deepspeed_gives_them() -> None:
    utils = deepspeed.utils
    for stage, error in ((1, ValueError), (3, KeyError)):
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        model = make_model().double()
        model.last.weight.requires_grad_(False)
        document = {**config, "zero_optimization": {"stage": stage}}
        engine = deepspeed.initialize(model=model, config=document)[0]
        unused = model.routed.experts[2].steps[0].weight
        before = utils.safe_get_full_fp32_param(unused)
        train_step(engine, engine(*give(0)))
        # As in plain torch, without weight decay, though its states are said to be those of a gradient of zeros.
        assert torch.equal(utils.safe_get_full_fp32_param(unused), before)
        assert not utils.safe_get_full_optimizer_state(unused, "exp_avg").any()
        assert not utils.safe_get_local_optimizer_state(unused, "exp_avg").any()
        with pytest.raises(error, match="no state 'moment'; it has exp_avg"):
            utils.safe_get_full_optimizer_state(unused, "moment")
        frozen = model.last.weight
        for change in (utils.safe_set_full_fp32_param, utils.safe_set_full_grad, utils.safe_set_local_fp32_param):
            change(frozen, torch.zeros(1, 8))
        with deepspeed.zero.GatheredParameters(frozen):
            assert frozen.any()
        engine.destroy()


def test_fp32_weights_of_a_checkpoint_are_the_masters(tmp_path: Path) -> None:
    _write_and_compare(folder=tmp_path / "saved")
    functions = deepspeed.utils.zero_to_fp32
    state = functions.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    model = functions.load_state_dict_from_zero_checkpoint(Model(), tmp_path / "saved")
    assert torch.equal(model.first.weight, state["first.weight"])
    convert = functions.convert_zero_checkpoint_to_fp32_state_dict
    script = runpy.run_path(str(tmp_path / "saved" / "zero_to_fp32.py"))
    script["main"]([str(tmp_path / "saved"), str(tmp_path / "bin")])
    read = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(read[name], value) for name, value in state.items())
    convert(tmp_path / "saved", tmp_path / "safe", max_shard_size="1KB", safe_serialization=True)
    assert (tmp_path / "safe" / "model.safetensors.index.json").is_file()
    with pytest.raises(ValueError, match="max_shard_size is 'large'"):
        convert(tmp_path / "saved", tmp_path / "no", max_shard_size="large")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        functions.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nothing")


@on_ranks(2)
def test_gradients_of_an_engine_are_clipped_over_its_ranks() -> None:
    clip = deepspeed.runtime.utils.clip_grad_norm_
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    engine = deepspeed.initialize(model=make_model().double(), config={**config, "optimizer": {"type": "SGD"}})[0]
    plain = make_model().double()
    engine.backward(engine(*give(0)))
    plain(*give(0)).backward()
    assert float(clip(engine.module.parameters(), 0.1)) == pytest.approx(
        float(clip(plain.parameters(), 0.1)), rel=1e-12
    )
    grad = deepspeed.utils.safe_get_full_grad(engine.module.first.weight)
    torch.testing.assert_close(grad, plain.first.weight.grad, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_lines_are_logged_on_the_ranks_that_are_named() -> None:
    rank, seen = dist.get_rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = deepspeed.utils.logger
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        for ranks in (None, [1], [-1]):
            deepspeed.utils.log_dist(str(ranks), ranks)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    wanted = {0: ["None", "[-1]"], 1: ["[1]", "[-1]"]}[rank]
    assert seen == [f"[Rank {rank}] {text}" for text in wanted]
