"""DeepSpeed's classes of optimizers that an engine returns, for ``isinstance``: here it is always a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from zeromesh.base.optimizer_table import row_named, row_of
from zeromesh.config.engine_answers import Asked, answer
from zeromesh.deepspeed.utilities import ZeRORuntimeException

Engine = Any  # a DeepSpeedEngine


class Named(type):
    """Class of classes, whose instances include optimizers of an engine that DeepSpeed would make of this class."""

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether it is an instance, or an engine's optimizer counts as one."""
        return type.__instancecheck__(cls, instance) or cls.__name__ in getattr(instance, "stands_for", ())


# Optimizers that ``initialize`` has returned; from the second on under ZeRO, and the last two in 16 bits at stage 0.
DeepSpeedOptimizer = Named("DeepSpeedOptimizer", (), {})
ZeROOptimizer = Named("ZeROOptimizer", (DeepSpeedOptimizer,), {})
DeepSpeedZeroOptimizer = Named("DeepSpeedZeroOptimizer", (ZeROOptimizer,), {})
DeepSpeedZeroOptimizer_Stage3 = Named("DeepSpeedZeroOptimizer_Stage3", (ZeROOptimizer,), {})
BF16_Optimizer = Named("BF16_Optimizer", (ZeROOptimizer,), {})
FP16_Optimizer = Named("FP16_Optimizer", (DeepSpeedOptimizer,), {})
FP16_UnfusedOptimizer = Named("FP16_UnfusedOptimizer", (DeepSpeedOptimizer,), {})


class _Inner:
    """The optimizer in one of the classes above: here it is the same one, without an ``optimizer`` of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        # The optimizer has this one as an attribute, and must not hold itself alive.
        vars(self)["_of"] = ref(optimizer)

    @property  # type: ignore[misc]  # a property of ``object``, which can be written
    def __class__(self) -> Any:
        return type(self._of())

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_of"):  # the second one in a copy that has nothing yet
            raise AttributeError(f"the inner optimizer has no {name} in it")
        return getattr(self._of(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of(), name, value)


_SCALE: dict[str, Callable[[Engine], Any]] = {
    **dict.fromkeys(("cur_scale", "loss_scale"), lambda engine: float(engine.loss_scale)),
    **dict.fromkeys(
        ("dynamic", "dynamic_loss_scale"), lambda engine: engine.fp16_enabled() and engine.dynamic_loss_scale()
    ),
    "use_grad_scaling": lambda engine: engine.loss_scaler is not None,
    "cur_iter": lambda engine: engine.global_steps,
    "scale_factor": lambda engine: 2.0,
    "scale_window": lambda engine: engine.config.fp16.loss_scale_window,
    **dict.fromkeys(("min_scale", "min_loss_scale"), lambda engine: engine.config.fp16.min_loss_scale),
}


class Scale:
    """The loss scale, with the names of DeepSpeed's scalers and of their settings."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)  # its optimizer, which has this one, may outlive it

    def __getattr__(self, name: str) -> Any:
        if name not in _SCALE or (engine := self._engine()) is None:
            raise AttributeError(f"the loss scale has no {name}; while its engine lives, it has {', '.join(_SCALE)}")
        return _SCALE[name](engine)


def _classes(engine: Engine, is_users: bool) -> Iterator[str]:
    """Yield the names of DeepSpeed's classes that the engine's optimizer stands for."""
    stage, host = engine.zero_optimization_stage(), engine.zero_use_cpu_optimizer()
    kind = row_named(engine.optimizer_name() or "").deepspeed_name
    if not is_users and kind and not (engine.optimizer_params() or {}).get("torch_adam"):
        yield f"DeepSpeedCPU{kind}" if host else f"Fused{kind}"
    yield "DeepSpeedOptimizer"
    dtype, accumulated = engine.get_data_types()
    if stage > 0:
        yield "ZeROOptimizer"
        if stage == 1 and (dtype, accumulated) == (torch.bfloat16, torch.float32):
            yield "BF16_Optimizer"
        else:
            yield "DeepSpeedZeroOptimizer_Stage3" if stage > 2 else "DeepSpeedZeroOptimizer"
    elif dtype is not torch.float32:
        fused = type(engine.optimizer).__name__ == "FusedAdam" or (not is_users and kind == "Adam" and not host)
        yield "FP16_Optimizer" if fused else "FP16_UnfusedOptimizer"


def attributes(engine: Engine, is_users: bool) -> dict[str, Any]:
    """Return the attributes of DeepSpeed's classes that the engine's optimizer gets; ``is_users`` if it was passed."""
    optimizer, names = engine.optimizer, (*_classes(engine, is_users),)
    scale = Scale(engine)
    always = {"stands_for": names, "dynamic_loss_scale": scale.dynamic}
    if names[-1] == "DeepSpeedOptimizer":
        return always  # DeepSpeed wraps nothing at stage 0 in fp32
    groups = [group["params"] for group in optimizer.param_groups]
    pieces = [piece for group in groups for piece in group]
    return always | {
        "optimizer": _Inner(optimizer),
        "clip_grad": engine.gradient_clipping(),
        "dtype": engine.get_data_types()[0],
        "gradient_accumulation_dtype": engine.get_data_types()[1],
        "communication_data_type": engine.communication_data_type,
        "cpu_offload": engine.zero_use_cpu_optimizer(),
        "custom_loss_scaler": False,
        **dict.fromkeys(("loss_scaler", "loss_scale_config"), scale),
        # Masters that this rank updates.
        "fp32_groups": groups,
        "fp32_groups_flat": pieces,
        "single_partition_of_fp32_groups": pieces,
        "fp32_partitioned_groups_flat": pieces,
    }


def require_supported(optimizer: Any, asked: Asked, updates: bool) -> None:
    """Raise what DeepSpeed raises of an optimizer and data types that it does not bring together.

    ``updates`` says that the model is to be trained.

    Raises:
        AssertionError: no size of a batch, an optimizer that DeepSpeed does not know under ZeRO, none at stages 1, 2,
            or 16-bit masters where it has none.
        NotImplementedError: gradients are kept in another dtype than parameters, at stage 0.
        ZeRORuntimeException: offloaded states with an optimizer that was not made for the host.
    """
    settings = asked.settings
    stage, precision = settings.zero_optimization.stage, settings.precision
    if not settings.says_batch:
        raise AssertionError("the configuration says no size of batches; set train_micro_batch_size_per_gpu")
    if not (optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise AssertionError(f"optimizer is {optimizer!r}; pass an optimizer of torch's, or a function that makes one")
    if stage in (1, 2) and updates and optimizer is None and settings.optimizer is None:
        raise AssertionError(
            f"ZeRO stage {stage} shards an optimizer's states, and there is none: pass optimizer=, name one in the "
            "configuration, or leave the stage out"
        )
    dtype = precision.compute or torch.float32
    if stage == 0 and precision.accumulate not in (None, dtype):
        raise NotImplementedError(
            f"gradients in {precision.accumulate} of parameters in {dtype} need ZeRO; leave out the dtype in which "
            "they are accumulated"
        )
    masters, states = (answer(name, asked) for name in ("bf16_master_weights_and_gradients", "bf16_optimizer_states"))
    host = settings.zero_optimization.optimizer_device != "none"
    fp16 = stage == 0 and answer("fp16_master_weights_and_gradients", asked)
    if fp16 or (masters and not (stage and (states or host))) or (states and not masters):
        raise AssertionError(
            "DeepSpeed has masters in 16 bits under ZeRO alone, with states in 16 bits, too, or on the host; set "
            "ZeRO's stage and both keys of bf16, or leave these keys out"
        )
    if not isinstance(optimizer, Optimizer) or stage == 0:
        return
    allowed = any(row_of(cls).deepspeed_zero for cls in type(optimizer).__mro__)
    if not allowed and not settings.zero_allow_untested_optimizer:
        raise AssertionError(
            f"{type(optimizer).__name__} is not among the optimizers that DeepSpeed allows under ZeRO: set "
            "zero_allow_untested_optimizer to true if it updates each element by itself"
        )
    forced = host and answer("zero_force_ds_cpu_optimizer", asked)
    if forced and not type(optimizer).__name__.startswith("DeepSpeedCPU"):
        raise ZeRORuntimeException(
            f"{type(optimizer).__name__} with states on the host: DeepSpeed takes its own there, such as "
            "deepspeed.ops.adam.DeepSpeedCPUAdam"
        )
