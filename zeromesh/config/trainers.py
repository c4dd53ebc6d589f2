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
from zeromesh.config.special_keys import MEANT, UNSET, look_up

_DEFAULTS: dict[str, Any] = {
    # Libraries look these up, and save whole weights if the second says so.
    "zero_optimization": {"stage": 0, "stage3_gather_16bit_weights_on_model_save": True},
    "zero_allow_untested_optimizer": False,
    # States on the host need no optimizer of their own.
    "zero_force_ds_cpu_optimizer": False,
}
_OFF = ("none", False, 0)  # of options
_FORMATS = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}  # of Lightning
_SIZES: dict[str, Any] = {"train_micro_batch_size_per_gpu": UNSET, "gradient_accumulation_steps": UNSET}
_PRECISION: dict[str, Any] = {"bf16": {"enabled": UNSET}, "fp16": {"enabled": UNSET}}

FILLED: dict[str, dict[str, Any]] = {
    "transformers": {**_SIZES, **_PRECISION, "gradient_clipping": UNSET},
    # Its own clipping would be 1, whatever the loop asks for, and so would the drop-in's.
    "accelerate": {**_SIZES, **_PRECISION, "gradient_clipping": 0.0},
    # The strategy allows what the engine does; the drop-in would know DeepSpeed's optimizers alone.
    "lightning": {"zero_allow_untested_optimizer": True},
}
"""Keys that a library fills in where a configuration says "auto"; Lightning does so where it leaves them out."""

PLUGIN_OPTIONS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    **{
        f"offload_{states}_{option}": f"zero_optimization.offload_{states}.{option}"
        for states in ("optimizer", "param")
        for option in ("device", "nvme_path")
    },
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Options of Accelerate's plugin, which a configuration has too -> their keys."""


def require_agreement(document: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError if options of Accelerate's plugin, None where they are left out, contradict a configuration.

    Accelerate takes the configuration's value without a word, and with an option whose key is absent does nothing.
    """
    values = {name: look_up(document, PLUGIN_OPTIONS[name])[1] for name in options}
    # An absent key switches nothing on, and neither does such a value.
    agrees = {name: now == options[name] or (now is None and options[name] in _OFF) for name, now in values.items()}
    lines = [
        f"{name}={options[name]!r}, but the configuration has "
        + (f"no {PLUGIN_OPTIONS[name]}" if values[name] is None else repr(values[name]))
        for name in options
        if options[name] is not None and not agrees[name]
    ]
    if lines:
        raise ValueError(
            f'the plugin contradicts the configuration: {"; ".join(lines)}; say it in one place, or "auto" in the '
            "configuration"
        )


def require_lightning(document: Mapping[str, Any], clipping: float | None, precision: str) -> None:
    """Raise ValueError if arguments of Lightning's trainer contradict a configuration.

    Lightning takes the configuration's value without a word. ``clipping`` is None where it is left out.
    """
    wrong = []
    there, value = look_up(document, "gradient_clipping")
    if there and clipping is not None and value != clipping:
        wrong.append(f"gradient_clip_val={clipping}, but the configuration has gradient_clipping {value}")
    asked = _FORMATS.get(precision)
    for name in ("bf16", "fp16"):
        there, on = look_up(document, f"{name}.enabled")
        if there and on is not (name == asked):
            wrong.append(f"precision={precision!r}, but the configuration has {name}.enabled {str(on).lower()}")
    if wrong:
        raise ValueError(f"lightning.Trainer contradicts the configuration: {'; '.join(wrong)}; say it in one place")


def for_trainer(source: str | Path | Mapping[str, Any], library: str) -> dict[str, Any]:
    """Return a configuration in which a trainer fills in what its own arguments say.

    Ranks of one tensor, context or pipeline group feed the same batch. Libraries know such ranks by ``autotp_size``
    alone, which becomes the size of these axes together; ``adopt`` takes it back.

    Args:
        source: path of a JSON or YAML file, or a dict of the same form.
        library: a row of ``FILLED``.

    Raises:
        ConfigError: it is wrong, or asks for what a trainer cannot do.
    """
    document, _ = adopt(source)
    settings = Settings.load(document)
    sizes = settings.model_sizes
    if sizes["pipeline"] > 1 and library != "transformers":
        raise ConfigError(
            [
                f"mesh.pipeline is {sizes['pipeline']}, but a loop of {library} calls forward and backward one after "
                "the other, and stages compute in train_batch only; set it to 1, or train with zeromesh.hf.Trainer or "
                "with engine.train_batch (docs/pipeline.md)"
            ]
        )
    filled = _with_defaults(document, _DEFAULTS | FILLED[library])
    if library == "lightning":
        filled = _without_auto(filled)
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
        filled["mesh"] = {**filled.get("mesh", {}), **sizes}
        filled["tensor_parallel"] = {"autotp_size": copies}
    return filled


def allows_untested(source: str | Path | Mapping[str, Any]) -> bool:
    """Return whether a configuration allows optimizers that are not known to update each element by itself."""
    return bool(adopt(source)[0].get("zero_allow_untested_optimizer"))


def _with_defaults(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **document}
    both = [name for name in defaults if isinstance(defaults[name], dict) and isinstance(document.get(name), dict)]
    return merged | {name: _with_defaults(document[name], defaults[name]) for name in both}


def _without_auto(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a document without "auto" that fills nothing in, and without the sections that had nothing else."""
    stripped = {
        name: _without_auto(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in document.items()
        if not is_unset(value) or f"{prefix}{name}" in MEANT
    }
    return {name: value for name, value in stripped.items() if value or not document[name]}


def ranks_in(document: Mapping[str, Any], axis: str) -> int:
    """Return the number of ranks along an axis of the mesh, of a document that ``for_trainer`` made."""
    return int(document.get("mesh", {}).get(axis, 1))


def copies_in(document: Mapping[str, Any]) -> int:
    """Return the number of ranks that feed the same batch, of a document that ``for_trainer`` made."""
    return int(document.get("tensor_parallel", {}).get("autotp_size", 1))
