"""``deepspeed.elasticity``: a batch size that many numbers of GPUs divide. Engines take batch sizes directly."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

# Numbers with more divisors than any smaller one.
_MANY_DIVISORS = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip

_FIRST_VERSION = (0, 3, 8)  # of DeepSpeed that has it


class ElasticityError(Exception):
    """Error about a batch size for many numbers of GPUs."""


class ElasticityConfigError(ElasticityError):
    """The section of the configuration is wrong, or missing."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch cannot be divided among so many ranks."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the configuration asks for it."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """Return the batch size that the most numbers of GPUs divide, these numbers, and maybe the micro-batch.

    Args:
        ds_config: its section ``elasticity`` has the limits.
        target_deepspeed_version: at least 0.3.8.
        world_size: number of ranks; 0 takes WORLD_SIZE where it is needed.
        return_microbatch: return the micro-batch also without ``world_size``.

    Raises:
        ElasticityError: the section, the version or the number of ranks is wrong.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('"elasticity" is not enabled in the configuration; set "enabled": true in it')
    section = ds_config["elasticity"]
    _require(section)
    if tuple(map(int, re.findall(r"\d+", target_deepspeed_version)[:3])) < _FIRST_VERSION:
        raise ElasticityError(f"DeepSpeed {target_deepspeed_version} has no elasticity; it must be at least 0.3.8")
    version, shared = float(section.get("version", 0.2)), section.get("model_parallel_size", 1)
    micro, most = section["micro_batch_sizes"], section["max_train_batch_size"]
    least_gpus, most_gpus = section.get("min_gpus", 1), section.get("max_gpus", 10000)
    larger, per_node = section.get("prefer_larger_batch", True), section.get("num_gpus_per_node", 1)
    text = os.environ.get("WORLD_SIZE", "")
    ranks = world_size or (int(text) if text.isdecimal() and (return_microbatch or version > 0.1) else 0)
    if not ranks and (return_microbatch or version > 0.1):
        raise ElasticityConfigError("the number of ranks is not known; pass world_size=, or set WORLD_SIZE")
    if version == 0.1:
        batch, sizes = _best(micro, most, least_gpus, most_gpus, larger)
        if ranks and ranks not in sizes:
            raise ElasticityIncompatibleWorldSize(f"{ranks} ranks cannot share {batch} samples; use one of {sizes}")
        share = ranks
    else:
        if per_node % shared:
            raise ElasticityError(f"num_gpus_per_node is {per_node}; model_parallel_size, {shared}, must divide it")
        copies = per_node // shared  # of the model on a node
        batch, nodes = _best(micro, most // copies, least_gpus // per_node, most_gpus // per_node, larger)
        batch, sizes, share = batch * copies, [copies * number for number in nodes], ranks // shared
        if share not in sizes:
            share = ranks * copies // per_node
            fit = [most // (size * share) * size * share for size in micro]
            batch, sizes = max(fit) if larger else min(fit), [share]
    if not (world_size or return_microbatch):
        return batch, sizes
    parts = [size for size in micro if batch // share % size == 0]
    return batch, sizes, (max(parts) if larger else min(parts)) if parts else None


def _require(section: Mapping[str, Any]) -> None:
    """Raise ElasticityConfigError unless the section is right."""
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if name not in section:
            raise ElasticityConfigError(f"elasticity.{name} is missing; set it")
    sizes = section["micro_batch_sizes"]
    numbers = [section["max_train_batch_size"], *(section.get(name, 1) for name in ("min_gpus", "max_gpus"))]
    if not isinstance(sizes, list) or not sizes or not all(type(n) is int and n > 0 for n in (*sizes, *numbers)):
        raise ElasticityConfigError(
            f"elasticity has micro_batch_sizes {sizes!r}, and max_train_batch_size, min_gpus and max_gpus {numbers}; "
            "these must be a list of whole numbers above 0, and such numbers"
        )
    version = float(section.get("version", 0.2))
    if version > 0.2 or (version < 0.2 and section.get("model_parallel_size", 1) > 1):
        raise ElasticityConfigError(
            f"elasticity.version is {version}; it is at most 0.2, which model_parallel_size above 1 needs"
        )


def _best(micro: Sequence[int], most: int, least_gpus: int, most_gpus: int, larger: bool) -> tuple[int, list[int]]:
    """Return the batch size of at most ``most`` samples with the most numbers of GPUs, and these numbers."""
    bases = [base for base in (*micro, lcm(*micro)) if base <= most]
    if len(bases) < len(micro):
        raise ElasticityConfigError(f"of the micro-batches {list(micro)}, some are larger than {most}; leave them out")
    batches = {base * max(number for number in _MANY_DIVISORS if number <= most // base) for base in bases}

    def gpus(batch: int) -> list[int]:
        quotients = [batch // size for size in micro if batch % size == 0]
        numbers = range(max(least_gpus, 1), min(most_gpus, max(quotients, default=0)) + 1)
        return [number for number in numbers if any(quotient % number == 0 for quotient in quotients)]

    fitting = {batch: gpus(batch) for batch in batches}
    best = max(fitting, key=lambda batch: (len(fitting[batch]), batch if larger else -batch))
    return best, fitting[best]
