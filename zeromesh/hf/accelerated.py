"""Plugin for Accelerate: ``Accelerator(deepspeed_plugin=zeromesh.hf.plugin("config.json"))``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromesh.config.trainers import PLUGIN_OPTIONS, for_trainer, require_agreement
from zeromesh.hf.late import activate


def plugin(config: str | Path | Mapping[str, Any], **options: Any) -> Any:
    """Return Accelerate's plugin for a ZeroMesh configuration.

    What the configuration leaves out, Accelerate fills in: micro-batch, accumulation steps, precision.

    Args:
        config: path of a JSON or YAML file, or a dict of the same form.
        options: of ``accelerate.DeepSpeedPlugin``.

    Raises:
        ConfigError: the configuration is wrong, or asks for what Accelerate cannot do.
        ValueError: an option says another value than the configuration.
    """
    activate()
    from accelerate import DeepSpeedPlugin

    document = for_trainer(config, "accelerate")
    accelerate_plugin = DeepSpeedPlugin(hf_ds_config=document, **options)
    require_agreement(accelerate_plugin.deepspeed_config, {name: options.get(name) for name in PLUGIN_OPTIONS})
    return accelerate_plugin
