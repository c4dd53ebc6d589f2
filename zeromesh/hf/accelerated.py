"""Plugin for Accelerate: ``Accelerator(deepspeed_plugin=zeromesh.hf.plugin("config.json"))``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromesh.config.trainers import for_trainer
from zeromesh.hf.late import activate


def plugin(config: str | Path | Mapping[str, Any], **options: Any) -> Any:
    """Return Accelerate's plugin for a ZeroMesh configuration.

    What the configuration leaves out, Accelerate fills in: micro-batch, accumulation steps, precision.

    Args:
        config: path of a JSON file, or a dict of the same form.
        options: of ``accelerate.DeepSpeedPlugin``.

    Raises:
        ConfigError: the configuration is wrong, or asks for what Accelerate cannot do.
        ValueError: an option says another value than the configuration.
    """
    activate()
    from accelerate import DeepSpeedPlugin

    made = DeepSpeedPlugin(hf_ds_config=for_trainer(config, "accelerate"), **options)
    # Accelerate takes the configuration's value without a word.
    wrong = {name: getattr(made, name) for name, value in options.items() if getattr(made, name) != value}
    if wrong:
        lines = (f"{name}={options[name]!r}, but the configuration has {now!r}" for name, now in wrong.items())
        raise ValueError(f"the plugin contradicts the configuration: {'; '.join(lines)}; say it in one place")
    return made
