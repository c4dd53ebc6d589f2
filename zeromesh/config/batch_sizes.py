"""Arithmetic of sizes: the global batch, and the mesh of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod
from typing import NamedTuple

from zeromesh.base.axes import GRID, folded_problem
from zeromesh.base.words import counted
from zeromesh.config.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"

LISTED = 20  # numbers of ranks in an error, at most


class BatchSizes(NamedTuple):
    """Sizes of the batches of a run."""

    train: int  # samples per update, of all ranks
    micro: int  # samples per micro-batch, of one rank
    accumulation: int  # micro-batches per update


def solve_batch(
    train: int | None, micro: int | None, accumulation: int | None, data_size: int, elastic: bool = False
) -> BatchSizes:
    """Return the three sizes from any consistent subset: ``train = micro x accumulation x data_size``.

    Args:
        train: samples per update over all ranks, if given.
        micro: samples per rank and micro-batch, if given.
        accumulation: micro-batches per update, if given.
        data_size: data-parallel ranks.
        elastic: keep ``train`` on another number of ranks than the sizes were written for, and ``micro`` if it divides.

    Raises:
        ConfigError: the sizes contradict each other, do not divide, or only the accumulation is given.
    """
    if train is None and micro is None and accumulation is not None:
        raise ConfigError(
            [
                f"{ACCUMULATION} = {accumulation} alone does not say how large a batch is; give {MICRO} "
                f"(samples per rank and micro-batch) or {TRAIN} (samples per update) too"
            ]
        )
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return BatchSizes(micro * accumulation * data_size, micro, accumulation)
    if elastic and micro is not None:
        return _refit(train, micro, data_size)
    if micro is not None and accumulation is not None:
        _check_product(train, micro, accumulation, data_size)
        return BatchSizes(train, micro, accumulation)
    if micro is not None:
        return BatchSizes(train, micro, _divide(train, {MICRO: micro}, data_size))
    accumulation = accumulation or 1
    return BatchSizes(train, _divide(train, {ACCUMULATION: accumulation}, data_size), accumulation)


def _refit(train: int, micro: int, data_size: int) -> BatchSizes:
    """Return the sizes for the same global batch on another number of ranks."""
    if train % data_size:
        divisors = divisors_of(train)
        work = ", ".join(map(str, divisors[:LISTED])) + (", ..." if len(divisors) > LISTED else "")
        raise ConfigError(
            [
                f"{TRAIN} = {train} cannot be shared out evenly to {data_size} data-parallel ranks; numbers of them "
                f"that work: {work}; or set {TRAIN} to a multiple of every number of ranks that the run may have"
            ]
        )
    share = train // data_size
    # A micro-batch never grows, since memory may not hold more.
    fitting = max(size for size in divisors_of(share) if size <= micro)
    return BatchSizes(train, fitting, share // fitting)


def divisors_of(number: int) -> list[int]:
    """Return all divisors, in order."""
    # Up to the root, since batches may have a million million samples.
    low = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return low + [number // size for size in reversed(low) if size * size != number]


def _check_product(train: int, micro: int, accumulation: int, data_size: int) -> None:
    product = micro * accumulation * data_size
    if product == train:
        return
    remedies = [f"set {TRAIN} to {product}"]
    if train % (micro * data_size) == 0:
        remedies.append(f"{ACCUMULATION} to {train // (micro * data_size)}")
    if train % (accumulation * data_size) == 0:
        remedies.append(f"{MICRO} to {train // (accumulation * data_size)}")
    raise ConfigError(
        [
            f"{TRAIN} = {train}, but {MICRO} x {ACCUMULATION} x data-parallel ranks = "
            f"{micro} x {accumulation} x {data_size} = {product}; {', or '.join(remedies)}"
        ]
    )


def _divide(train: int, sizes: Mapping[str, int], data_size: int) -> int:
    """Return ``train / (sizes x data_size)``, which must be a whole number."""
    factor = prod(sizes.values()) * data_size
    if train % factor == 0:
        return train // factor
    factors = " x ".join([*sizes, "data-parallel ranks"])
    numbers = " x ".join(str(number) for number in [*sizes.values(), data_size])
    below, above = train // factor * factor, (train // factor + 1) * factor
    nearest = f"{below} or {above}" if below else str(above)
    raise ConfigError(
        [
            f"{TRAIN} = {train} is not a multiple of {factors} = {numbers} = {factor}; the nearest {TRAIN} that "
            f"work: {nearest}"
        ]
    )


def solve_mesh(sizes: Mapping[str, int], shard_group: tuple[str, int] | None, world_size: int) -> dict[str, int]:
    """Return the size of every axis; the product of those that are not folded is ``world_size``.

    Args:
        sizes: size by axis; ``data`` may be -1, for what is left.
        shard_group: name and value of the DeepSpeed key that sets the size of a shard group, if one does.
        world_size: number of ranks.

    Raises:
        ConfigError: the sizes do not fit the number of ranks, or the key contradicts the mesh.
    """
    filled, fixed = "data", dict(sizes)
    if shard_group is not None:
        key, size = shard_group
        # The groups then replicate each other as often as is left, unless the mesh says how often.
        if sizes["data"] not in (-1, size):
            raise ConfigError([f"{key} = {size}, but mesh.data = {sizes['data']}; they are the same, keep one of them"])
        filled, fixed["data"] = "" if sizes["replicate"] > 1 else "replicate", size
    elif sizes["data"] != -1:
        filled = ""
    product = prod(fixed[axis] for axis in GRID if axis != filled)
    if world_size % product or (not filled and world_size != product):
        raise ConfigError([_mesh_problem(fixed, filled, product, world_size)])
    solved = {axis: world_size // product if axis == filled else size for axis, size in fixed.items()}
    if problem := folded_problem(solved):
        raise ConfigError([problem])
    return solved


def _mesh_problem(sizes: Mapping[str, int], filled: str, product: int, world_size: int) -> str:
    named = [axis for axis in GRID if axis != filled and sizes[axis] != 1] or ["data"]
    arithmetic = " x ".join(named) + " = " + " x ".join(str(sizes[axis]) for axis in named)
    arithmetic += f" = {product}" if len(named) > 1 else ""
    if not filled:
        running = counted(world_size, "rank")
        return f"mesh: {arithmetic}, but the run has {running}; start {product}, or set mesh.data to -1"
    below, above = world_size // product * product, (world_size // product + 1) * product
    nearest = f"{below} or {above}" if below else str(above)
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return (
        f"mesh: {arithmetic}, which does not divide the {counted(world_size, 'rank')} of the run; "
        f"its product must be one of {', '.join(map(str, divisors))}; or start {nearest} ranks"
    )
