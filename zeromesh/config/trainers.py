"""A configuration as trainers of other libraries take it: "auto" where their arguments decide, one size of copies."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from zeromesh.config.adopt import adopt
from zeromesh.config.document import is_unset
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import Settings
from zeromesh.config.tables import UNSET

_DEFAULTS: dict[str, Any] = {
    # Libraries look these up, and save whole weights if the second says so.
    "zero_optimization": {"stage": 0, "stage3_gather_16bit_weights_on_model_save": True},
    "zero_allow_untested_optimizer": False,
}
_SIZES: dict[str, Any] = {"train_micro_batch_size_per_gpu": UNSET, "gradient_accumulation_steps": UNSET}
_PRECISION: dict[str, Any] = {"bf16": {"enabled": UNSET}, "fp16": {"enabled": UNSET}}

FILLED: dict[str, dict[str, Any]] = {
    "transformers": {**_SIZES, **_PRECISION, "gradient_clipping": UNSET},
    # Its own clipping would be 1, whatever the loop asks for.
    "accelerate": {**_SIZES, **_PRECISION},
    # It writes what is absent, and refuses what is there.
    "lightning": {},
}
"""Keys that a library fills in where a configuration leaves them out."""


def for_trainer(source: str | Path | Mapping[str, Any], library: str) -> dict[str, Any]:
    """Return a configuration in which a trainer fills in what its own arguments say.

    Ranks of one tensor or context group feed the same batch. Libraries know such ranks by ``autotp_size`` alone, which
    becomes the size of both axes together; ``adopt`` takes it back.

    Args:
        source: path of a JSON file, or a dict of the same form.
        library: a row of ``FILLED``.

    Raises:
        ConfigError: it is wrong, or asks for what a trainer cannot do.
    """
    document, _ = adopt(source)
    settings = Settings.load(document)
    sizes = settings.model_sizes
    if sizes["pipeline"] > 1:
        raise ConfigError(
            [
                f"mesh.pipeline is {sizes['pipeline']}, but a trainer calls forward and backward one after the other, "
                "and stages compute in train_batch only; set it to 1, or train with zeromesh.initialize and "
                "engine.train_batch (docs/pipeline.md)"
            ]
        )
    filled = _with_defaults(document, _DEFAULTS | FILLED[library])
    copies = prod(sizes.values())
    if copies > 1:
        total = filled.pop("train_batch_size", None)
        if total is not None and not is_unset(total):
            raise ConfigError(
                [
                    f"train_batch_size is {total}, which trainers compare with all ranks, but {copies} ranks of mesh "
                    "share each batch; leave it out: it follows from the trainer's arguments"
                ]
            )
        filled["mesh"] = {**filled.get("mesh", {}), "tensor": sizes["tensor"], "context": sizes["context"]}
        filled["tensor_parallel"] = {"autotp_size": copies}
    return filled


def _with_defaults(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **document}
    both = [name for name in defaults if isinstance(defaults[name], dict) and isinstance(document.get(name), dict)]
    return merged | {name: _with_defaults(document[name], defaults[name]) for name in both}


def context_in(document: Mapping[str, Any]) -> int:
    """Return the number of ranks that share each sequence, of a document that ``for_trainer`` made."""
    return int(document.get("mesh", {}).get("context", 1))


def copies_in(document: Mapping[str, Any]) -> int:
    """Return the number of ranks that feed the same batch, of a document that ``for_trainer`` made."""
    return int(document.get("tensor_parallel", {}).get("autotp_size", 1))
