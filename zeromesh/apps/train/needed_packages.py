"""Packages that a configuration of ``zeromesh train`` needs, checked together before any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zeromesh.apps.train.data.hub_datasets import is_dataset_id
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.requirements import pip_install
from zeromesh.config.errors import ConfigError


def require_packages(settings: TrainSettings, source: Path | Mapping[str, Any]) -> None:
    """Raise ConfigError with each package that the configuration in ``source`` needs and that is missing."""
    missing = {package: reason for package, reason in _needed(settings) if not _is_installed(package)}
    problems = [
        f"{reason} needs the package {package}, which is not installed: {pip_install(package)}"
        for package, reason in missing.items()
    ]
    if len(missing) > 1:
        problems.append(f"all at once: {pip_install(*missing)}")
    if problems:
        raise ConfigError(problems, str(source) if isinstance(source, Path) else "the configuration")


def _is_installed(package: str) -> bool:
    """Return whether a package can be found; it is not imported, which may take seconds."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or it was switched off in sys.modules
        return False


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
