"""Names of the drop-in that need no ranks: the accelerator, recomputation, monitors, profiler, helpers."""

import csv
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh.deepspeed as ds
from zeromesh.deepspeed import recompute

deepspeed: Any = ds


def test_the_accelerator_answers_for_the_device() -> None:
    device = deepspeed.accelerator.get_accelerator()
    cuda = torch.cuda.is_available()
    assert device.device_name() == device._name == ("cuda" if cuda else "cpu")
    assert device.is_available()
    assert device.device_count() >= 1
    assert device.on_accelerator(torch.zeros(1, device=device.current_device_name()))
    assert device.is_synchronized_device() is device.resolves_data_dependency() is not cuda
    assert device.communication_backend_name() == ("nccl" if cuda else "gloo")
    kept = torch.ones(1 << 20, device=device.current_device_name())
    assert kept.nbytes <= device.memory_allocated() <= device.max_memory_allocated()
    assert device.total_memory() >= device.available_memory() > 0
    assert kept.nbytes <= device.memory_cached() <= device.max_memory_cached()
    for name in ("synchronize", "empty_cache", "reset_max_memory_allocated"):
        getattr(device, name)()
    device.range_push("a step")
    device.range_pop()
    with device.stream(device.current_stream()), device.device(0):
        assert torch.bfloat16 in device.supported_dtypes()
    assert device.FloatTensor([1.0]).dtype is torch.float32
    assert pickle.loads(pickle.dumps(device)).device_name() == device.device_name()
    with pytest.raises(NotImplementedError, match=r"create_op_builder is not available here: nothing is compiled"):
        device.create_op_builder("FusedAdamBuilder")
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no 'nothing'"):
        _ = device.nothing
    with pytest.raises(ValueError, match="'slow' is not a backend"):
        device.set_compile_backend("slow")


def test_random_states_of_the_accelerator_come_back() -> None:
    device = deepspeed.accelerator.get_accelerator()
    device.manual_seed(7)
    state, first = device.get_rng_state(), torch.rand(3, device=device.device_name())
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device.device_name()), first)
    device.manual_seed_all(7)
    assert torch.equal(torch.rand(3, device=device.device_name()), first)
    assert device.initial_seed() == 7


def test_states_of_the_tracker_go_on_where_they_stopped() -> None:
    checkpointing = deepspeed.checkpointing
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(5)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    inner = torch.rand(2, generator=torch.Generator().manual_seed(5 + recompute.TENSOR_SEED))
    with tracker.fork():
        drawn = torch.rand(1)
    outer = torch.rand(4)
    with tracker.fork():
        assert torch.equal(torch.cat([drawn, torch.rand(1)]), inner)
    assert torch.equal(outer, expected)
    with pytest.raises(ValueError, match="there already|there is a random state"):
        tracker.add("model-parallel-rng", 1)
    with pytest.raises(ValueError, match="no random state 'other'"), tracker.fork("other"):
        pass
    tracker.reset()
    assert tracker.get_states() == {}


@pytest.mark.parametrize("host", [False, True])
def test_recomputed_blocks_have_the_gradients_of_plain_ones(host: bool) -> None:
    checkpointing = deepspeed.checkpointing
    checkpointing.configure(None, checkpoint_in_cpu=host)
    assert checkpointing.is_configured()
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x, kept = torch.randn(32, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        found = checkpointing.checkpoint(block, x).sum()
    assert sum(kept) <= x.nbytes
    (mine,) = torch.autograd.grad(found, x)
    (want,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(mine, want)
    stores = list(recompute._stores.values())
    assert [store.pool.peak >= x.nbytes for store in stores if store.pool is not None] == [True] * host
    checkpointing.reset()
    section = {"partition_activations": True, "cpu_checkpointing": True}
    checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": section})
    assert recompute._configured == {"partition": True, "host": True}
    checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=False)


def test_the_monitor_writes_events(tmp_path: Path) -> None:
    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    config = deepspeed.monitor.config.get_monitor_config({**section, "train_batch_size": 4})
    for given in (section, config):
        monitor = deepspeed.monitor.monitor.MonitorMaster(given)
        assert monitor.enabled
        monitor.write_events([("Train/loss", 0.5, 3), ("Train/loss", torch.tensor(0.25), 4)])
    with (tmp_path / "job" / "Train_loss.csv").open() as file:
        assert list(csv.reader(file))[1:] == [["3", "0.5"], ["4", "0.25"]] * 2
    assert not deepspeed.monitor.monitor.MonitorMaster({}).enabled


def test_operations_macs_and_parameters_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiling = deepspeed.profiling.flops_profiler
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    operations = 2 * 3 * (10 * 20 + 20 * 5)
    numbers = profiling.get_model_profile(model, (3, 10), as_string=False, output_file=tmp_path / "profile.txt")
    assert numbers == (operations, operations // 2, 325)
    assert "2 (Linear)" in (tmp_path / "profile.txt").read_text()
    assert model.training
    assert profiling.get_model_profile(model, args=[torch.ones(3, 10)], print_profile=False) == (
        "1.8 KFLOPS", "900 MACs", "325",
    )  # fmt: skip
    profiler = profiling.FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(3, 10)).sum().backward()
    profiler.stop_profile()
    model(torch.ones(3, 10))
    assert profiler.get_total_flops() == operations
    profiler.print_model_profile(module_depth=0)
    assert "parameters: 325; MACs: 900 MACs" in capsys.readouterr().out
    profiler.end_profile()
    assert profiler.get_total_flops() == 0
    with pytest.raises(ValueError, match="needs the model's inputs"):
        profiling.get_model_profile(model)


def test_only_a_parameter_of_a_module_is_registered() -> None:
    layer = nn.Linear(2, 2)
    for register in (deepspeed.zero.register_external_parameter, deepspeed.zero.unregister_external_parameter):
        register(layer, layer.weight)
        for wrong in ((layer, torch.zeros(2)), (torch.zeros(2), layer.weight)):
            with pytest.raises(RuntimeError, match=r"needs a torch\.nn\.(Parameter|Module), not a Tensor"):
                register(*wrong)


def test_a_topology_maps_coordinates_to_ranks() -> None:
    topology = deepspeed.runtime.pipe.topology
    grid = topology.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert grid.get_rank(pipe=1, data=2, model=0) == 10
    assert grid.get_coord(10) == (1, 2, 0)
    assert grid.get_rank_repr(10) == "model_00"
    assert grid.get_axis_comm_lists("pipe")[1] == [1, 7]
    assert grid.get_axis_comm_lists("other") == []
    assert grid.filter_match(pipe=0, model=1) == [1, 3, 5]
    assert grid.get_axis_list("data", 0) == [0, 1, 6, 7]
    assert (grid.get_dim("data"), grid.get_dim("other"), grid.world_size()) == (3, 0, 12)
    with pytest.raises(ValueError, match="give one of each of pipe, data, model"):
        grid.get_rank(pipe=1)
    with pytest.raises(ValueError, match="rank 12 is outside"):
        grid.get_coord(12)


def test_a_loader_repeats_and_parts_are_balanced() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert len(loader) == 3
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))
    utils = deepspeed.runtime.utils
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.partition_balanced([1, 1, 1, 9], 2) == [0, 3, 4]
    assert utils.partition_balanced([1, 2], 4) == [0, 1, 2, 2, 2]


def test_modules_are_made_on_a_device_and_clones_hold_their_own_memory(tmp_path: Path) -> None:
    with deepspeed.utils.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = nn.Linear(3, 4)
    assert (made.weight.device.type, made.weight.dtype) == ("meta", torch.bfloat16)
    assert nn.Linear(3, 4).weight.dtype is torch.float32
    with deepspeed.utils.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert nn.Linear(3, 4).weight.dtype is torch.float32
    large = torch.arange(1000.0)
    state = {"a": [large[:2], 5], "b": (large[3:4],)}
    cloned = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(state)
    assert cloned["a"][0].untyped_storage().nbytes() == 8
    assert torch.equal(cloned["b"][0], large[3:4])
    assert state["a"][0].untyped_storage().nbytes() == 4000


def test_functions_in_a_range_keep_their_names_and_results() -> None:
    @deepspeed.utils.instrument_w_nvtx
    def double(x: int) -> int:
        return 2 * x

    assert (double(3), double.__name__) == (6, "double")


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("moe.sharded_moe", "top2gating", "use deepspeed.moe.layer.MoE"),
        ("runtime.sequence_parallel.ulysses_sp", "UlyssesSPAttentionHF", '"mesh": {"context": 2}'),
        ("checkpointing", "CheckpointFunction", "call deepspeed.checkpointing.checkpoint"),
        ("linear", "OptimizedLinear", "peft or torchao"),
        ("utils.timer", "ThroughputTimer", "engine.tput_timer"),
        ("runtime.data_pipeline.curriculum_scheduler", "CurriculumScheduler", "curriculum_learning"),
    ],
)
def test_names_that_cannot_be_honoured_say_what_to_use(module: str, name: str, remedy: str) -> None:
    refused = getattr(importlib.import_module(f"zeromesh.deepspeed.{module}"), name)
    with pytest.raises(NotImplementedError) as raised:
        refused(1)
    assert remedy in str(raised.value)
