"""Every key that the installed DeepSpeed reads is known here too. Skipped where DeepSpeed is not installed."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from zeromesh.config.settings import Settings, entries
from zeromesh.config.tables import GONE, RENAMED

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

FREE = ("data_efficiency.", "optimizer.params.", "scheduler.params.", "activation_checkpointing.", "autotuning.")
"""Where a part of the keys is left to others, or is only read from files."""

OTHER_DEFAULTS = {
    "fp16.auto_cast": "inputs of another dtype would be an error",
    "gradient_clipping": "no clipping unless asked",
    "zero_optimization.leaf_module.classes": "units take their place",
    "tensor_parallel.dtype": "the model keeps its dtype",
    "weight_quantization.enabled": "there is no such section unless it is given",
    "bf16.immediate_grad_update": "it has no effect",
}


class Asked:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __contains__(self, key: str) -> bool:
        return key in self.recorder

    def __iter__(self) -> Iterator[str]:
        return iter(list(dict.keys(self.recorder)))


class Recorder(dict[str, Any]):
    def __init__(self, prefix: str, seen: set[str], items: dict[str, Any]) -> None:
        self.prefix, self.seen = prefix, seen
        super().__init__(
            {
                key: Recorder(f"{prefix}{key}.", seen, item) if isinstance(item, dict) else item
                for key, item in items.items()
            }
        )

    def __contains__(self, key: object) -> bool:
        self.seen.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(f"{self.prefix}{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(f"{self.prefix}{key}")
        return super().get(key, default)

    def keys(self) -> Any:
        return Asked(self)

    def __copy__(self) -> Recorder:
        return self


def read_by_deepspeed() -> set[str]:
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    sections: dict[str, Any] = {path: {} for path, entry in entries().items() if entry.section and "." not in path}
    for name in ("model", "data", "run", "mesh", "slots", "profile"):
        del sections[name]
    sections["optimizer"] = {"type": "Adam", "params": {}}
    sections["scheduler"] = {"type": "WarmupLR", "params": {}}
    sections["checkpoint"] = {"parallel_write": {}, "writer": {}}
    sections["expert_parallel"] = {"enabled": False}
    sections["timers"] = {"throughput": {}}
    sections["autotuning"] = {"model_info": {}}
    recorder = Recorder("", seen, {"train_batch_size": 1, **sections})
    DeepSpeedConfig(recorder)
    return seen


def models_of_deepspeed() -> dict[str, type[BaseModel]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
        "tensor_parallel": TPTrainingConfig,
        "compile": CompileConfig,
        "hybrid_engine": HybridEngineConfig,
        "comms_logger": CommsLoggerConfig,
        "weight_quantization": WeightQuantConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "wandb": monitor.WandbConfig,
        "csv_monitor": monitor.CSVConfig,
        "comet": monitor.CometConfig,
    }


def fields(path: str, model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        names = {name, field.alias or name}
        for each in names:
            yield f"{path}.{each}", field.get_default(call_default_factory=True)
        for inner in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from fields(f"{path}.{field.alias or name}", inner)


def all_fields() -> dict[str, Any]:
    return {path: value for section, model in models_of_deepspeed().items() for path, value in fields(section, model)}


def known(path: str) -> bool:
    for old, new in RENAMED.items():
        if path.startswith(f"{old}."):
            path = new + path.removeprefix(old)
    return path in entries() or path in RENAMED or path in GONE


def test_all_that_deepspeed_looks_for_is_known() -> None:
    seen = read_by_deepspeed()
    assert {"train_batch_size", "aio.block_size", "checkpoint.writer.type", "expert_parallel.autoep_size"} <= seen
    assert {path for path in seen if not known(path) and not path.startswith(FREE)} == set()


def test_every_field_of_deepspeeds_sections_is_known() -> None:
    found = all_fields()
    assert {"zero_optimization.offload_param.max_in_cpu", "zero_optimization.stage3_max_live_parameters"} <= set(found)
    assert {path for path in found if not known(path)} == set()


def test_defaults_are_deepspeeds_unless_said_otherwise() -> None:
    def plain(value: Any) -> Any:
        value = getattr(value, "value", value)
        return () if value in ([], None, "", {}) else value

    different = set()
    for path, default in all_fields().items():
        entry = entries().get(path)
        if entry is None or entry.section or path in OTHER_DEFAULTS or default == "auto":
            continue
        if plain(entry.default) != plain(default):
            different.add(f"{path}: {entry.default!r} here, {default!r} there")
    assert different == set()


def test_a_configuration_with_every_default_of_deepspeed_loads() -> None:
    document: dict[str, Any] = {}
    for path, default in all_fields().items():
        value = getattr(default, "value", default)
        if path in entries() and not entries()[path].section and isinstance(value, bool | int | float | str):
            section = document
            for name in path.split(".")[:-1]:
                section = section.setdefault(name, {})
            section[path.rpartition(".")[2]] = value
    document["weight_quantization"] = None
    document["zero_optimization"].pop("zenflow")
    Settings.load(document)
