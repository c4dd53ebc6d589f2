"""The user's layout on few ranks: mesh, batch, and the configurations of the trials."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from zeromesh.apps.train.train_settings import KEYS_BY_USE
from zeromesh.base.axes import FOLDED, data_size, folded_problem, world_size
from zeromesh.base.words import counted
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import Settings

MOST_RANKS = 16  # that are started without being asked for
MOST_MICRO_BATCHES = 4
MOST_ROWS = 2

PRECISION = (
    *("fp16", "bf16", "torch_autocast", "communication_data_type", "data_types", "float8", "optimizer_state_dtype"),
)


@dataclass(frozen=True)
class SmallLayout:
    """Mesh and batch of the trials."""

    sizes: Mapping[str, int]
    micro_batches: int
    rows: int
    changes: list[str]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return world_size(self.sizes)

    @property
    def text(self) -> str:
        """Axes with their sizes."""
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one rank"


def small_layout(settings: Settings, ranks: int | None) -> SmallLayout:
    """Return the layout of a comparison.

    Args:
        settings: of the run.
        ranks: how many to use; None takes as few as the mesh needs, and at least two that have different samples.

    Raises:
        ValueError: there is no optimizer, the mesh does not fit so many ranks, or needs too many.
    """
    if settings.optimizer is None:
        raise ValueError(
            'the configuration has no optimizer, and updates are what is compared; add "optimizer": {"type": '
            '"AdamW", "params": {"lr": ...}}'
        )
    changes: list[str] = []
    asked = settings.mesh.model_dump()
    needed = world_size(asked | settings.model_sizes | {"data": max(asked["data"], 1)})
    most = ranks or MOST_RANKS
    if ranks is None and needed > most:
        shared = _shared(settings)
        raise ValueError(
            f"the mesh needs {needed} ranks, more than {most}, which are started here without being asked; "
            f"--ranks N compares on N ranks with fewer data-parallel ones: a multiple of {shared}, as --ranks "
            f"{max(2, shared * 2) if shared <= most // 2 else shared}"
        )
    sizes = _fitted(settings, ranks, needed, most)
    if needed > 1 and world_size(sizes) != needed and asked["data"] != -1:
        changes.append(f"ranks {needed} -> {world_size(sizes)}")
    stages = sizes["pipeline"]
    data = data_size(sizes)
    micro, rows = _batch(settings, data)
    fewer = min(micro, max(MOST_MICRO_BATCHES, 2 * stages) // stages * stages)
    if fewer != micro:
        changes.append(f"gradient_accumulation_steps {micro} -> {fewer}")
    if rows > MOST_ROWS:
        changes.append(f"train_micro_batch_size_per_gpu {rows} -> {MOST_ROWS}")
    return SmallLayout(sizes, fewer, min(rows, MOST_ROWS), changes)


def _fitted(settings: Settings, ranks: int | None, needed: int, most: int) -> dict[str, int]:
    """Return the sizes of all axes."""
    if ranks is not None and settings.mesh.data != -1 and ranks != needed:
        return _with_data(settings, -1).resolve_mesh(ranks)
    if ranks is not None:
        return settings.resolve_mesh(ranks)
    if settings.mesh.data == 1 and needed == 1:
        return _with_data(settings, 2).resolve_mesh(2)
    meshes = []
    for world in range(max(2, needed), most + 1):
        with suppress(ConfigError):
            meshes.append(settings.resolve_mesh(world))
    if not meshes:
        return settings.resolve_mesh(needed)  # raises what is wrong with it
    # Ranks with different samples, and some with the same experts, if there may be any: else nothing is reduced over
    # them.
    reduced = [sizes for sizes in meshes if data_size(sizes) > 1]
    alike = [sizes for sizes in reduced if sizes["expert"] < prod(sizes[axis] for axis in FOLDED)]
    return [*alike, *reduced, *meshes][0]


def _shared(settings: Settings) -> int:
    """Return the fewest ranks that share one copy of the model, and its experts."""
    sizes = settings.mesh.model_dump() | settings.model_sizes | {"replicate": 1}
    return next(
        world_size(sizes | {"data": data})
        for data in range(1, sizes["expert"] + 1)
        if not folded_problem(sizes | {"data": data})
    )


def _with_data(settings: Settings, size: int) -> Settings:
    mesh = settings.mesh.model_copy(update={"data": size, "replicate": 1 if size == -1 else settings.mesh.replicate})
    return settings.model_copy(update={"mesh": mesh})


def _batch(settings: Settings, data: int) -> tuple[int, int]:
    """Return micro-batches of an update and samples of each."""
    try:
        resolved = settings.resolve(data)
        return resolved.gradient_accumulation_steps, resolved.train_micro_batch_size_per_gpu
    except ConfigError:  # sizes that are written for another number of ranks
        return settings.gradient_accumulation_steps or 2, settings.train_micro_batch_size_per_gpu or 1


def trial_settings(settings: Settings, layout: SmallLayout, folder: Path, wide: bool, power: int | None) -> Settings:
    """Return the configuration of a trial.

    Args:
        settings: of the run.
        layout: mesh and batch.
        folder: for files of states on NVMe.
        wide: compute in the model's dtype, float64, instead of what the configuration says.
        power: the loss scale in fp16 begins with 2 to this power; None leaves it.
    """
    values = settings.model_dump(exclude_unset=True)
    document: dict[str, Any] = {key: value for key, value in values.items() if key not in KEYS_BY_USE["trials"]}
    document |= {
        "train_micro_batch_size_per_gpu": layout.rows,
        "gradient_accumulation_steps": layout.micro_batches,
        "mesh": dict(layout.sizes),
    }
    zero = dict(document.get("zero_optimization", {}))
    for name in ("mics_shard_size", "zero_hpz_partition_size"):  # which the mesh says by now
        zero.pop(name, None)
    for name in ("offload_param", "offload_optimizer"):
        if isinstance(zero.get(name), dict):
            zero[name] = dict(zero[name])
            if zero[name].get("device") == "nvme":
                zero[name]["nvme_path"] = str(folder)
            if wide:
                zero[name].pop("split_master", None)
    document["zero_optimization"] = zero
    if isinstance(tables := document.get("embedding_tables"), dict) and tables.get("device") == "nvme":
        document["embedding_tables"] = {**tables, "nvme_path": str(folder)}
    if isinstance(experts := document.get("experts"), dict) and experts.get("rest") == "nvme":
        document["experts"] = {**experts, "nvme_path": str(folder)}
    # Axes are said by the mesh alone.
    for name in ("tensor_parallel", "pipeline"):
        if isinstance(section := document.get(name), dict):
            gone = ("autotp_size", "tensor_parallel", "stages")
            document[name] = {key: value for key, value in section.items() if key not in gone}
    if wide:
        document = {key: value for key, value in document.items() if key not in PRECISION}
    elif power is not None and settings.precision.loss_scale is not None:
        scale = {"initial_scale_power": power} if settings.fp16.loss_scale == 0 else {"loss_scale": 2.0**power}
        document["fp16"] = {**document.get("fp16", {}), **scale}
    return Settings.load(document)


def scale_powers(settings: Settings) -> list[int | None]:
    """Return loss scales to try, as powers of two, the configuration's first; None where losses are not scaled."""
    policy = settings.precision.loss_scale
    if policy is None:
        return [None]
    first = policy.initial_power if policy.static is None else max(0, round(policy.static).bit_length() - 1)
    return [power for power in (first, first - 4, first - 8, first - 12, 0) if power >= 0]


def skipped_text(skipped: int, steps: int) -> str:
    """Return why skipped updates prove nothing."""
    return (
        f"{skipped} of {counted(steps, 'update')} overflowed at every loss scale that was tried, and a skipped update "
        'shows nothing; lower the learning rate, or use bf16 instead of "fp16": {"enabled": true}'
    )
