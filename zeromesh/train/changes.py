"""Settings that may change when a run is resumed: those that do not change its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from zeromesh.config.settings import Resolved
from zeromesh.config.tables import WITHOUT_EFFECT
from zeromesh.train.folder import RunFolder

FREE = frozenset(
    {
        "run",
        "data.workers",
        "mesh",
        "slots",
        "units",
        "zero_optimization",
        "activation_checkpointing",
        "checkpoint",
        "steps_per_print",
        "wall_clock_breakdown",
        "profile",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "dataloader_drop_last",
        "zero_allow_untested_optimizer",
        *WITHOUT_EFFECT,
    }
)
"""Keys, and sections of keys, that say how long a run is, where its states are and what is shown of it."""

MICRO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that have to change with the number of ranks; the samples of a step stay the same."""

NOT_SET = "not set"


def require_unchanged(folder: RunFolder, settings: Resolved) -> None:
    """Compare settings with those that a run was started with.

    Args:
        folder: of the run. Where it holds no settings there is nothing to compare.
        settings: those that it is to be resumed with.

    Raises:
        ValueError: if they differ in anything that the result depends on.
    """
    if not folder.config.is_file():
        return
    before = folder.settings()
    old, new = dict(_leaves(json.loads(before.to_json()))), dict(_leaves(json.loads(settings.to_json())))
    free = FREE | (set(MICRO) if before.data_size != settings.data_size else set()) | _automatic(settings)
    changes = [
        f"{key}: {_show(old, key)} in the run, {_show(new, key)} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, NOT_SET) != new.get(key, NOT_SET) and not _is_free(key, free)
    ]
    if changes:
        lines = "".join(f"\n  {change}" for change in changes)
        raise ValueError(
            f"the run in {str(folder.path)!r} was started with other settings:{lines}\n"
            "bring back those of the run, or start a new one without --resume and with --set run.output=FOLDER"
        )


def _automatic(settings: Resolved) -> set[str]:
    """Sizes that the settings leave open, and that follow from the text."""
    free = set()
    if settings.model is not None and settings.model.vocab_size is None:
        free.add("model.vocab_size")
    if settings.data is not None and "vocabulary_size" not in settings.data.model_fields_set:
        free.add("data.vocabulary_size")
    return free


def _is_free(key: str, free: set[str] | frozenset[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:count]) in free for count in range(1, len(parts) + 1))


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _show(leaves: dict[str, Any], key: str) -> str:
    return json.dumps(leaves[key]) if key in leaves else NOT_SET
