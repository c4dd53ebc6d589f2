"""Print the defaults of an installed DeepSpeed by dotted path, as JSON, which ``deepspeed_0_19.json`` has."""

import inspect
import json
import logging
import os
from typing import Any

logging.disable(logging.CRITICAL)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad  # noqa: E402
from deepspeed.ops.adam import FusedAdam  # noqa: E402
from deepspeed.ops.lamb import FusedLamb  # noqa: E402
from deepspeed.ops.lion import FusedLion  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from pydantic import BaseModel  # noqa: E402

# Attributes of DeepSpeed's object, to sections and keys of a file.
NAMES = {
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing",
    "flops_profiler_config": "flops_profiler",
    "aio_config": "aio",
    "tensor_parallel_config": "tensor_parallel",
    "checkpoint_config": "checkpoint",
    "compile_config": "compile",
    "autotuning_config": "autotuning",
    "monitor_config": "",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "buffer_dtype": "data_types.buffer_dtype",
    "keep_in_fp32_modules": "data_types.keep_in_fp32_modules",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
}
OPTIMIZERS = {
    "adam": FusedAdam,
    "adamw": FusedAdam,
    "lion": FusedLion,
    "lamb": FusedLamb,
    "adagrad": DeepSpeedCPUAdagrad,
}
STAGE_3 = ("max_", "prefetch_", "param_", "model_", "module_", "gather_16bit")


def defaults() -> dict[str, Any]:
    """Return the default of each key, and the arguments of the optimizers that a file may name."""
    result: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        inner: Any = None
        if isinstance(value, BaseModel):
            inner = {name: getattr(value, name) for name in type(value).model_fields}
        elif isinstance(value, dict):
            inner = value
        elif type(value).__module__.startswith("deepspeed"):
            inner = vars(value)
        if inner is None:
            result[path] = value if isinstance(value, int | float | str | list | None) else str(value)
            return
        for name, item in inner.items():
            stage3 = path == "zero_optimization" and name.startswith(STAGE_3) and name != "parameter_alignment"
            walk(item, f"{path}.{'stage3_' if stage3 else ''}{name}".lstrip("."))

    for name, value in vars(DeepSpeedConfig({"train_batch_size": 1})).items():
        if not name.startswith("_") and name not in ("expert_parallel_config", "comms_config"):
            walk(value, NAMES.get(name, name))
    for name, kind in OPTIMIZERS.items():
        parameters = inspect.signature(kind).parameters
        result[f"optimizer {name}"] = {
            key: parameters[key].default for key in ("lr", "betas", "eps", "weight_decay") if key in parameters
        }
    return dict(sorted(result.items()))


if __name__ == "__main__":
    print(json.dumps(defaults()))
