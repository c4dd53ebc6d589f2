"""``deepspeed.runtime.config.DeepSpeedConfig``: a configuration that is read without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.comm.detect import Environment
from zeromesh.config.adopt import adopt, fill_defaults
from zeromesh.config.document import read_object
from zeromesh.config.engine_answers import ANSWERS, Asked, answer


class DeepSpeedConfig:
    """A configuration for the ranks of this run; its attributes are the settings and the engine's answers about them.

    Args:
        config: a dict, or the path of a JSON file.
        mpu: has ``get_data_parallel_world_size``; None: all ranks feed different data.
        mesh_device: no effect.

    Raises:
        AssertionError: the sizes of batches do not fit together, or a value cannot be.
        ValueError: the file is not JSON, or has a key twice.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        environment = Environment.detect()
        self.global_rank, self.world_size = environment.rank, environment.world_size
        if mpu is not None:
            self.world_size = mpu.get_data_parallel_world_size()
        self._param_dict = dict(config) if isinstance(config, Mapping) else read_object(Path(config))
        document, _ = adopt(self._param_dict, TrainSettings)
        fill_defaults(document, autos=True)
        try:
            settings = TrainSettings.load(document, tells=False)
            if not settings.says_batch:
                raise ValueError("the configuration says no size of batches; set train_micro_batch_size_per_gpu")
            resolved = settings.resolve(self.world_size)
        except ValueError as error:
            # DeepSpeed asserts what sizes and values have to satisfy.
            raise AssertionError(error) from None
        self._asked = Asked(self._param_dict, resolved)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return answer(name, self._asked) if name in ANSWERS else getattr(self._asked.settings, name)
