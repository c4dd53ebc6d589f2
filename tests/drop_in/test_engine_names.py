"""Each name of DeepSpeed's engine gives what it says, at every stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks
from zeromesh import deepspeed
from zeromesh.config.engine_answers import ANSWERS
from zeromesh.deepspeed.questions import ATTRIBUTES, QUESTIONS

STAGES = (0, 1, 2, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.bias.requires_grad_(False)
        self.config = {"hidden": 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(x))) ** 2).mean()

    def doubled(self) -> torch.Tensor:
        return 2 * self.first.bias


def written(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1234, **more},
    }


def make(stage: int, **more: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(5)
    model = Model()
    engine, optimizer, loader, scheduler = deepspeed.initialize(None, model, config=written(stage, **more))
    assert optimizer is engine.optimizer
    assert loader is None
    assert scheduler is engine.lr_scheduler
    return engine, model


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + torch.distributed.get_rank())
    return torch.randn(2, 4, generator=generator)


def train(engine: Any, steps: int) -> None:
    for number in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(batch(number)))
        engine.step()


EXPECTED: dict[str, Any] = {
    "world_size": 2,
    "dp_world_size": 2,
    "mp_world_size": 1,
    "seq_dp_world_size": 2,
    "sequence_parallel_size": 1,
    "mpu": None,
    "pipeline_parallelism": False,
    "inside_no_sync_ctxt": False,
    "communication_data_type": torch.float32,
    "micro_batches": 2,
    "micro_batch_size": 2,
    "is_compiled": False,
    "training": True,
    "fp16_enabled()": False,
    "bfloat16_enabled()": False,
    "gradient_clipping()": 0.5,
    "steps_per_print()": None,
    "wall_clock_breakdown()": False,
    "zero_reduce_bucket_size()": 1234,
    "zero_allgather_bucket_size()": 500000000,
    "zero_gather_16bit_weights_on_model_save()": False,
    "zero_offload_optimizer()": None,
    "optimizer_name()": "adamw",
    "scheduler_name()": "WarmupLR",
    "scheduler_params()": {"warmup_num_steps": 4},
    "checkpoint_tag_validation_enabled()": True,
    "checkpoint_tag_validation_fail()": False,
    "dynamic_loss_scale()": True,
    "loss_scale()": 0.0,
    "loss_scale": 1.0,
    "get_loss_scale()": 1.0,
    "get_batch_info()": (8, 2, 2),
    "get_mom()": [(0.8, 0.9)],
    "get_type()": [0.0],
    "get_data_types()": (torch.float32, torch.float32),
    "is_first_stage()": True,
    "is_last_stage()": True,
    "get_wall_clock_timers()": {},
    "allreduce_gradients()": None,
    "empty_partition_cache()": None,
    "get_tensor_parallel_rank()": 0,
}


def asked(engine: Any, name: str) -> Any:
    value = getattr(engine, name.removesuffix("()"))
    return value() if name.endswith("()") else value


@on_ranks(2)
def test_every_name_answers_at_every_stage() -> None:
    rank = torch.distributed.get_rank()
    for stage in STAGES:
        engine, model = make(stage)
        for name, expected in EXPECTED.items():
            value = asked(engine, name)
            assert (list(map(tuple, value)) if name == "get_mom()" else value) == expected, (name, value)
        assert (engine.local_rank, engine.global_rank, engine.get_data_parallel_rank()) == (rank, rank, rank)
        assert engine.zero_optimization() == (stage > 0)
        assert engine.zero_optimization_stage() == stage
        assert engine.zero_optimization_partition_gradients() == (stage >= 2)
        assert engine.zero_overlap_comm() == (stage == 3)
        assert torch.distributed.get_world_size(engine.data_parallel_group) == 2
        # None of the table is there in vain.
        for name in (*ATTRIBUTES, *QUESTIONS, *ANSWERS):
            asked(engine, name if name in ATTRIBUTES else f"{name}()")
        assert (
            engine.config["zero_optimization"]["stage"] == engine.config.get("zero_optimization", {})["stage"] == stage
        )
        assert engine.config.train_batch_size == 8  # the settings'
        assert isinstance(engine, nn.Module)
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        assert isinstance(engine.optimizer, deepspeed.DeepSpeedOptimizer)
        assert not isinstance(torch.optim.SGD([torch.ones(1)]), deepspeed.DeepSpeedOptimizer)
        assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == 1.0
        assert not engine.optimizer.overflow
        assert isinstance(engine.optimizer, deepspeed.ops.adam.FusedAdam)
        assert not isinstance(engine.optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam)
        shards = deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
        assert isinstance(engine.optimizer, shards) == (stage == 3)
        inner = getattr(engine.optimizer, "optimizer", None)
        assert isinstance(inner, torch.optim.AdamW) == isinstance(inner, deepspeed.ops.adam.FusedAdam) == (stage > 0)
        assert inner is None or inner.param_groups is engine.optimizer.param_groups
        assert not hasattr(inner, "optimizer")
        assert hasattr(engine.optimizer, "parameter_offload") == (stage == 3)
        assert [name for name, _ in engine.named_parameters()] == [f"module.{n}" for n, _ in model.named_parameters()]
        assert list(map(id, engine.parameters())) == list(map(id, model.parameters()))
        assert [module for module in engine.modules()][:2] == [engine, model]
        assert engine.doubled().shape == (4,)  # a method of the model's
        engine.own = nn.Identity()
        assert isinstance(engine.own, nn.Identity)
        del engine.own
        seen: list[Any] = []
        engine.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        engine.eval()
        assert not model.training
        assert not engine.training
        assert not model.first.training
        engine.train()
        assert model.first.training
        assert engine.training
        assert not engine.was_step_applied()
        train(engine, 1)
        assert engine.was_step_applied()
        assert len(seen) == 2
        engine.backward(engine(batch(3)))
        engine.step()
        assert not engine.was_step_applied()
        engine.zero_grad()
        assert engine.tput_timer.avg_samples_per_sec() == float("-inf")
        assert engine.tput_timer.global_step_count == 1
        assert engine.to(engine.device) is engine
        assert engine.float() is engine
        with pytest.raises(ValueError, match="initialize has placed them"):
            engine.double()
        nowhere = "'DeepSpeedEngine' has no attribute 'nothing', nor has its module Model"
        for name, words in (("nothing", nowhere), ("allreduce_bucket", "torch.distributed")):
            with pytest.raises(AttributeError, match=words):
                getattr(engine, name)
        engine.destroy()


@on_ranks(2)
def test_states_are_shown_moved_saved_and_loaded(tmp_path: Path) -> None:
    folder = str(tmp_path)
    reference = None
    for stage in STAGES:
        engine, _model = make(stage)
        torch.manual_seed(5)
        before = Model().state_dict()
        state = engine.state_dict()
        assert set(state) == {f"module.{name}" for name in before}
        assert all(torch.equal(state[f"module.{name}"], value) for name, value in before.items())
        own = engine.module_state_dict(exclude_frozen_parameters=True)
        assert set(own) == set(before) - {"second.bias"}
        assert all(torch.equal(own[name], before[name]) for name in own)
        whole = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert bool(whole) == (engine.global_rank == 0)
        if whole:
            assert set(whole) == set(own)
            assert all(torch.equal(whole[name], own[name]) for name in own)
        engine.load_state_dict({name: value + 1 for name, value in state.items()})
        engine.load_module_state_dict({"module": before})
        engine.load_module_state_dict(
            {"module": before}, custom_load_fn=lambda src, dst: dst.first.weight.copy_(src["first.weight"] * 3)
        )
        assert torch.equal(engine.module_state_dict()["first.weight"], before["first.weight"] * 3)
        engine.load_module_state_dict({"module": before})
        engine.save_fp16_model(folder)
        file = torch.load(f"{folder}/pytorch_model.bin")
        assert all(torch.equal(file[name], value) for name, value in before.items())

        train(engine, 1)
        engine.offload_states()
        engine.reload_states()
        engine.offload_states([deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum.optim_states])
        train(engine, 1)  # whatever is needed comes back by itself
        value = next(iter(engine.optimizer.state.values()))["exp_avg"]
        before_address = value.data_ptr()
        engine.offload_states(pin_memory=False)
        assert value.data_ptr() != before_address
        with pytest.raises(ValueError, match="go to the host"):
            engine.offload_states(device="nvme")
        engine.backward(engine(batch(0)))
        with pytest.raises(RuntimeError, match="call it after the step"):
            engine.offload_states()
        engine.zero_grad()
        result = {name: value.clone() for name, value in engine.module_state_dict().items()}
        if reference is None:
            reference = {name: value.clone() for name, value in result.items()}
        for name, value in result.items():
            torch.testing.assert_close(value, reference[name], rtol=1e-6, atol=1e-7)

        engine.save_checkpoint(f"{folder}/{stage}", exclude_frozen_parameters=True)
        engine.load_state_dict({f"module.{name}": torch.zeros_like(value) for name, value in result.items()})
        engine.load_checkpoint(f"{folder}/{stage}")
        loaded = engine.module_state_dict()
        assert torch.equal(loaded["first.weight"], result["first.weight"])
        assert not loaded["second.bias"].any()  # it was left out, and is as it was

        def halve(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
            dst.first.weight.copy_(src["first.weight"] / 2)

        engine.load_checkpoint(f"{folder}/{stage}", load_module_only=True, custom_load_fn=halve)
        assert torch.equal(engine.module_state_dict()["first.weight"], result["first.weight"] / 2)


def parameters() -> None:
    with deepspeed.zero.Init():
        early = nn.Linear(4, 4)
    assert hasattr(early.weight, "ds_id")
    assert early.weight.ds_shape == (4, 4)
    rank, status = torch.distributed.get_rank(), deepspeed.zero.ZeroParamStatus
    torch.manual_seed(rank)
    with deepspeed.zero.Init():
        early = nn.Linear(100, 4)
        large = nn.Linear(100, 100)
    with deepspeed.zero.GatheredParameters([early.weight, large.weight], modifier_rank=1):
        assert early.weight.ds_status is large.weight.ds_status is status.AVAILABLE
        with torch.no_grad():
            early.weight.fill_(rank)
            large.weight.fill_(rank)
    with deepspeed.zero.GatheredParameters([large.weight, large.bias]):
        large.weight.data.fill_(5.0)  # which nobody takes
        biases = [torch.empty(100) for _ in range(2)]
        torch.distributed.all_gather(biases, large.bias.detach())
    assert torch.equal(*biases)  # although the ranks drew others
    assert early.weight.ds_status is large.weight.ds_status is status.NOT_AVAILABLE
    large.weight.all_gather()
    assert bool((large.weight == 1.0).all())
    large.weight.partition()
    model = nn.Sequential(large, early)
    whole = deepspeed.initialize(model=model, config=written(3))[0].module_state_dict()
    assert bool((whole["0.weight"] == 1.0).all())
    assert bool((whole["1.weight"] == 1.0).all())
    assert torch.equal(whole["0.bias"], biases[0])
    group = torch.distributed.group.WORLD
    with deepspeed.zero.Init(None, group, dtype=torch.bfloat16), deepspeed.zero.Init(data_parallel_group=group):
        assert nn.Linear(200, 200).weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(ValueError, match="mpu = "):
        deepspeed.zero.Init(mpu=3)
    plain = nn.Linear(4, 4)
    assert not hasattr(plain.weight, "ds_id")
    deepspeed.zero.Init(plain)
    assert hasattr(plain.weight, "ds_id")
    for stage in STAGES:
        engine, model = make(stage)
        weight: Any = model.first.weight
        assert hasattr(weight, "ds_id") == deepspeed.runtime.zero.utils.is_zero_param(weight) == (stage == 3)
        assert not hasattr(nn.Parameter(torch.ones(2)), "ds_id")
        if stage < 3:
            continue
        assert len({parameter.ds_id for _ in range(2) for parameter in model.parameters()}) == 4
        assert (weight.ds_status, weight.ds_shape, weight.ds_numel) == (status.NOT_AVAILABLE, (4, 4), 16)
        assert all(parameter.ds_status is status.NOT_AVAILABLE for parameter in model.parameters())
        parts = [torch.empty(0)] * 2
        torch.distributed.all_gather_object(parts, weight.ds_tensor.clone())
        with deepspeed.zero.GatheredParameters([weight]):
            assert weight.ds_status is status.AVAILABLE
            assert torch.equal(torch.cat(parts), weight.detach().flatten())
        assert weight.ds_status is status.NOT_AVAILABLE
        seen: list[Any] = []

        def look(module: Any, inputs: Any, seen: list[Any] = seen) -> None:
            seen.extend([module.weight.ds_status, hasattr(inputs[0], "ds_id")])

        model.first.register_forward_pre_hook(look)
        engine(batch(0))
        assert seen == [status.AVAILABLE, False]
        with deepspeed.zero.unwrap_model_for_generation(engine) as whole:
            assert whole is engine
            assert all(p.ds_status is status.AVAILABLE for p in model.parameters())
        offload = engine.optimizer.parameter_offload
        for _, parameter in (*offload.module.named_parameters(), *offload.module.ds_external_parameters()):
            parameter.ds_active_sub_modules.clear()
        assert offload.forward_hooks == offload.backward_hooks == []
        offload._register_deepspeed_module(offload.module)


def test_parameters_tell_where_they_are() -> None:
    run_ranks(parameters, 2)


def feeding() -> list[float]:
    torch.manual_seed(5)
    data = [torch.full((4,), float(number)) for number in range(16)]
    engine, _, loader, _ = deepspeed.initialize(model=Model(), config=written(1), training_data=data)
    assert loader is engine.training_dataloader
    with pytest.raises(ValueError, match="deepspeed_io"):
        engine.set_train_micro_batch_size(1)
    made = engine.deepspeed_io(data, route="eval")
    assert [len(samples) for samples in made] == [2] * 4
    engine.set_batch_fn(lambda samples: samples * 0)
    engine.set_dataloader(made)
    losses = [float(engine.train_batch())]
    engine.set_batch_fn(lambda samples: samples)
    engine.set_dataiterator(iter([samples * 0 for samples in made]))
    losses.append(float(engine.eval_batch(iter([torch.zeros(2, 4)] * 2))))
    engine.train_batch()
    engine.step_values = []
    engine.lr_scheduler.step = lambda **kwargs: engine.step_values.append(kwargs)
    for _ in range(2):
        with engine.coalesce_grad_reduction():
            engine.backward(engine(batch(0)))
        engine.step(lr_kwargs={"epoch": 3})
    assert engine.step_values == [{"epoch": 3}]
    return losses


def test_batches_come_from_where_they_are_said_to() -> None:
    first, second = run_ranks(feeding, 2)

    assert first == second


def test_an_engine_of_zeromesh_names_itself_in_errors(one_rank: None) -> None:
    engine, *_ = zeromesh.initialize(model=Model(), config=written(0))

    with pytest.raises(AttributeError, match="'Engine' has no attribute 'nothing', nor has its module Model"):
        engine.nothing  # noqa: B018
