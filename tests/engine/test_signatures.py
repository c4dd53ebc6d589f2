"""Calls by position mean what they mean in DeepSpeed 0.19, whose parameter orders are written down here, or fail."""

import ast
import inspect
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import zeromesh
from zeromesh import Engine, zero

pytestmark = pytest.mark.usefixtures("one_rank")


THEIRS: dict[str, tuple[Callable[..., Any], str]] = {
    "init_distributed": (
        zeromesh.init_distributed,
        "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method dist_init_required config rank "
        "world_size",
    ),
    "engine.backward": (Engine.backward, "loss retain_graph scale_wrt_gas"),
    "engine.step": (Engine.step, "lr_kwargs"),
    "engine.zero_grad": (Engine.zero_grad, "set_to_none"),  # torch.nn.Module's
    "engine.train": (Engine.train, "mode"),
    "engine.eval": (Engine.eval, ""),
    "engine.no_sync": (Engine.no_sync, ""),
    "engine.compile": (Engine.compile, "backend compile_kwargs schedule compiled_autograd_enabled"),
    "engine.is_gradient_accumulation_boundary": (Engine.is_gradient_accumulation_boundary, ""),
    "engine.set_gradient_accumulation_boundary": (Engine.set_gradient_accumulation_boundary, "is_boundary"),
    "engine.get_global_grad_norm": (Engine.get_global_grad_norm, ""),
    "engine.get_lr": (Engine.get_lr, ""),
    "engine.set_train_batch_size": (Engine.set_train_batch_size, "train_batch_size"),
    "engine.train_batch_size": (Engine.train_batch_size, ""),
    "engine.train_micro_batch_size_per_gpu": (Engine.train_micro_batch_size_per_gpu, ""),
    "engine.gradient_accumulation_steps": (Engine.gradient_accumulation_steps, ""),
    "engine.train_batch": (Engine.train_batch, "data_iter"),
    "engine.eval_batch": (
        Engine.eval_batch,
        "data_iter return_logits compute_loss reduce_output bcast_loss num_micro_batches",
    ),
    "engine.save_checkpoint": (
        Engine.save_checkpoint,
        "save_dir tag client_state save_latest exclude_frozen_parameters",
    ),
    "engine.load_checkpoint": (
        Engine.load_checkpoint,
        "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only "
        "custom_load_fn",
    ),
    "engine.save_16bit_model": (Engine.save_16bit_model, "save_dir save_filename exclude_frozen_parameters"),
    "engine.offload_states": (Engine.offload_states, "include device pin_memory non_blocking"),
    "engine.reload_states": (Engine.reload_states, "non_blocking"),
    "engine.load_state_dict": (Engine.load_state_dict, "state_dict strict assign"),  # torch.nn.Module's
    "engine.destroy": (Engine.destroy, ""),
    "zero.Init": (
        zero.Init,
        "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config enabled "
        "dtype mpu zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
        "sequence_data_parallel_group param_swapper tensor_overrides",
    ),
    "zero.GatheredParameters": (zero.GatheredParameters, "params modifier_rank fwd_module enabled"),
    "zero.TiledLinear": (
        zero.TiledLinear,
        "in_features out_features bias in_splits out_splits input_is_already_split combine_out_splits linear_cls "
        "init_linear",
    ),
    "safe_get_full_fp32_param": (zero.safe_get_full_fp32_param, "param"),
    "safe_get_full_grad": (zero.safe_get_full_grad, "param"),
    "safe_get_full_optimizer_state": (zero.safe_get_full_optimizer_state, "param optim_state_key"),
    "safe_update_full_grad_vectorized": (zero.safe_update_full_grad_vectorized, "param_list update_func"),
    "safe_set_full_fp32_param": (zero.safe_set_full_fp32_param, "param value"),
    "safe_set_full_grad": (zero.safe_set_full_grad, "param value"),
    "safe_set_full_optimizer_state": (zero.safe_set_full_optimizer_state, "param value optim_state_key"),
    "pipe.PipelineModule": (
        zeromesh.pipe.PipelineModule,
        "layers num_stages topology loss_fn seed_layers seed_fn base_seed partition_method "
        "activation_checkpoint_interval activation_checkpoint_func checkpointable_layers dynamic_shape",
    ),
    "pipe.LayerSpec": (zeromesh.pipe.LayerSpec, "typename"),
    "pipe.TiedLayerSpec": (zeromesh.pipe.TiedLayerSpec, "key typename"),
    "checkpointing.checkpoint": (zeromesh.checkpointing.checkpoint, "function"),
}
"""Public functions that DeepSpeed has too, and the order of its positional parameters."""

OF_ENGINE = {name.partition(".")[2] for name in THEIRS if name.startswith("engine.")}


@pytest.mark.parametrize("name", THEIRS)
def test_positional_parameters_have_the_order_that_deepspeed_gives_them(name: str) -> None:
    function, order = THEIRS[name]
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    assert positional == order.split()[: len(positional)]  # Python refuses those that are missing


def test_every_public_method_with_arguments_that_may_be_positional_is_in_the_table() -> None:
    ours = {"bound_report", "memory_report", "traffic_report", "forward", "state_dict"}  # the last two pass all on
    ours |= {"ask", "scale", "full_weights", "prediction_report", "save_to_memory"}
    takes = {
        name
        for name, value in vars(Engine).items()
        if not name.startswith("_") and inspect.isfunction(value) and len(inspect.signature(value).parameters) > 1
    }
    assert takes - ours <= OF_ENGINE
    assert {name for name in vars(zero) if name.startswith("safe_")} <= set(THEIRS)


def stated_names() -> dict[str, Any]:
    """Return what type checkers read in ``zeromesh/__init__.py``: names, and the objects that they import them as."""
    tree = ast.parse(Path(zeromesh.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names: dict[str, Any] = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.module
        for alias in statement.names:
            place = f"zeromesh.{alias.name}"
            is_module = statement.module == "zeromesh"
            names[alias.name] = (
                import_module(place) if is_module else getattr(import_module(statement.module), alias.name)
            )
    return names


def test_public_names_are_what_type_checkers_take_them_for_after_an_engine_was_made() -> None:
    stated = stated_names()
    assert sorted(stated) == sorted(zeromesh.__all__)
    zeromesh.initialize(model=nn.Linear(2, 1), config=config())[0].destroy()
    assert {name: getattr(zeromesh, name) for name in zeromesh.__all__} == stated
    # Importing a package or a module makes it an attribute, in place of a function of its name.
    modules = {name for name, value in stated.items() if inspect.ismodule(value)}
    assert {name for name in zeromesh.__all__ if find_spec(f"zeromesh.{name}")} == modules


def config(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, **keys}


def test_initialize_takes_deepspeed_positional_arguments(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    data = [torch.ones(2)]
    file = tmp_path / "config.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 3}')
    arguments = Namespace(deepspeed_config=str(file))
    engine, used, loader, _ = zeromesh.initialize(arguments, model, optimizer, list(model.parameters()), data)
    assert engine.module is model
    assert used is optimizer
    assert engine.train_micro_batch_size_per_gpu() == 3
    assert loader is not None
    engine.destroy()
    for first in (None, Namespace()):
        collate: Callable[[Any], Any] = torch.stack
        given = (None, None, data, None, None, None, None, collate, config(), None, None)
        engine, _, loader, _ = zeromesh.initialize(first, nn.Linear(2, 1), *given)
        assert engine.get_lr() == [0.5]
        assert loader.collate_fn is collate
        engine.destroy()


CALLS: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "a configuration first": (lambda m: zeromesh.initialize(config(), m), TypeError, "is a dict; it must be the model"),
    "a model twice": (lambda m: zeromesh.initialize(None, m, model=m), TypeError, "model twice: by name, and as"),
    "a module as optimizer": (
        lambda m: zeromesh.initialize(m, m, config=config()),
        ValueError,
        "optimizer is a Linear",
    ),
    "no module": (lambda m: zeromesh.initialize(model="m", config=config()), ValueError, "not a str"),
    "no model": (lambda m: zeromesh.initialize(Namespace(), config=config()), ValueError, "initialize needs a model"),
    "too many": (lambda m: zeromesh.initialize(None, m, *[None] * 12), TypeError, "at most 13 positional arguments"),
    "mpu": (lambda m: zeromesh.initialize(m, config=config(), mpu=object()), ValueError, '"mesh": {"data": 4'),
    "mesh_param": (lambda m: zeromesh.initialize(m, config=config(), mesh_param=(1, 1)), ValueError, "mesh_param = "),
    "two configurations": (
        lambda m: zeromesh.initialize(Namespace(deepspeed_config="a.json"), m, config=config()),
        ValueError,
        "two configurations: config= and args.deepspeed_config = 'a.json'; pass one",
    ),
    "a group of ranks": (lambda m: zero.Init(None, object()), ValueError, "zero.Init: data_parallel_group = "),
    "mpu of Init": (lambda m: zero.Init(mpu=object()), ValueError, "zero.Init: mpu = "),
    "a dtype": (lambda m: zero.Init(dtype=torch.bfloat16), ValueError, "switch bf16 or fp16 on"),
    "quantised weights": (
        lambda m: zero.Init(zero_quantized_weights=True),
        ValueError,
        "zero_quantized_weights in the",
    ),
    "frozen weights": (lambda m: zero.Init(zero_quantized_nontrainable_weights=True), ValueError, "leave it out"),
    "a swapper": (lambda m: zero.Init(param_swapper=object()), ValueError, '{"offload_param": {"device": "cpu"}}'),
    "a misspelt argument": (lambda m: zero.GatheredParameters([], modifer_rank=0), TypeError, "modifer_rank"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("case", CALLS)
def test_arguments_without_a_meaning_here_are_refused(case: str) -> None:
    call, error, message = CALLS[case]
    with pytest.raises(error, match=message.replace("(", "\\(").replace("{", "\\{")):
        call(nn.Linear(2, 1))


def test_arguments_that_ask_for_nothing_are_accepted() -> None:
    with zero.Init(None, None, True, "cpu", False, config(), None, True, torch.float32):
        assert torch.isfinite(nn.Linear(2, 1).weight).all()
    with zero.GatheredParameters([nn.Parameter(torch.ones(1))], None, nn.Linear(1, 1), False):
        pass


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.trained = nn.Linear(2, 1, bias=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.trained(self.frozen(x)).sum()


def start() -> Any:
    torch.manual_seed(0)
    stage = {"zero_optimization": {"stage": 3}}
    return zeromesh.initialize(
        model=Partly(), config=config(**stage, optimizer={"type": "Adam", "params": {"lr": 0.1}})
    )[0]


def update(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 2)))
    engine.step()


def states(engine: Any) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in engine.optimizer.state.values()]


def test_checkpoints_are_loaded_by_position_as_in_deepspeed(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = start()
    update(saved)
    update(saved)
    saved.save_checkpoint(folder, "two", {"note": 1}, True, False)
    weights, moments = saved.gathered_state_dict(), states(saved)

    strict = start()
    assert strict.load_checkpoint(folder, "two", False) == (f"{folder}/two", {"note": 1})
    assert all(map(torch.equal, states(strict), moments)), "the third argument is about the model alone"
    assert strict.global_steps == 2

    without = start()
    without.load_checkpoint(folder, "two", True, False)
    assert states(without) == []
    assert without.global_steps == 2

    module = start()
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    module.load_checkpoint(folder, None, True, True, True, True)
    assert (module.global_steps, states(module)) == (0, [])
    assert torch.equal(torch.get_rng_state(), expected)
    found = module.gathered_state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    update(module)

    for call, message in (
        (lambda: saved.eval_batch(iter([torch.ones(1, 2)]), True), "return_logits = True cannot be honoured"),
        (lambda: saved.eval_batch(iter([torch.ones(1, 2)]), reduce_output="sum"), "reduce_output = 'sum'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.isfinite(saved.eval_batch(iter([torch.ones(1, 2)]), False, True, "avg", True, 1))

    saved.save_16bit_model(f"{folder}/whole")
    saved.save_16bit_model(f"{folder}/trained", "model.safetensors", True)

    for folder, expected in (
        ("whole", {"frozen.weight", "trained.weight", "seen"}),
        ("trained", {"trained.weight", "seen"}),
    ):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            assert set(file.keys()) == expected
