"""Packages that a configuration of ``zeromesh train`` needs, checked together before any work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zeromesh.apps.train.data.hub_datasets import is_dataset_id
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.extras import install_line, is_installed, missing_packages
from zeromesh.config.errors import ConfigError


def require_packages(settings: TrainSettings, source: Path) -> None:
    """Raise ConfigError with every package that the configuration in ``source`` needs and that is not installed."""
    needed = dict(_needed(settings))
    problems = missing_packages(needed)
    if len(problems) > 1:
        missing = [package for package in needed if not is_installed(package)]
        problems.append(f"all at once: {install_line(missing)}")
    if problems:
        raise ConfigError(problems, str(source))


def _needed(settings: TrainSettings) -> Iterator[tuple[str, str]]:
    """Yield each package, and the key that needs it."""
    for monitor in ("tensorboard", "wandb"):
        if getattr(settings, monitor).enabled:
            yield monitor, f"{monitor}.enabled"
    if settings.huggingface is not None:
        yield "transformers", "huggingface"
        if (quantization := settings.huggingface.quantization) is not None:
            yield quantization.library, "huggingface.quantization"
    if settings.lora is not None:
        yield "peft", "lora"
    if (data := settings.data) is None:
        return
    if data.tokenizer is not None and Path(data.tokenizer).expanduser().is_dir():
        yield "transformers", f"data.tokenizer = {data.tokenizer!r}, a folder,"
    for name in data.names:
        if is_dataset_id(name):
            yield "datasets", f"{name!r} on the Hub"
        elif name.endswith(".parquet"):
            yield "pyarrow", repr(name)
