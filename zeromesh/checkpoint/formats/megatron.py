"""Checkpoints of Megatron-Core in the format torch_dist: a distributed checkpoint of torch with names of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from zeromesh.checkpoint.formats.form import Contents, StoredRange, group_options
from zeromesh.checkpoint.formats.pickles import read_tensors
from zeromesh.checkpoint.formats.torch_distributed import entries

COMMON = "common.pt"

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")

_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")
"""Tensors of all layers at once, along a first dimension of their own."""


def read(folder: Path) -> Contents:
    """Return the contents, with Megatron's names; tensors that hold all layers become one for each layer."""
    contents = Contents("a Megatron-Core checkpoint (torch_dist)")
    other: list[str] = []
    values: dict[str, list[StoredRange]] = {}
    for path, entry in entries(folder).items():
        name = ".".join(map(str, path))
        state = _STATE.fullmatch(name)
        if not isinstance(entry, list) or (state is None and ("optimizer." in name or "_extra_state" in name)):
            other.append(name)
        elif state is None:
            values.setdefault(name, entry)
        elif state[1] == "fp32_param":
            values[state[2]] = entry  # instead of its copy in 16 bits, with which the model computes
        else:
            for part in entry:
                contents.parts += _by_layer(f"optimizer/{state[1]}/", state[2], part)
    for name, parts in values.items():
        for part in parts:
            contents.parts += _by_layer("parameter/", name, part)
    common = read_tensors(folder / COMMON)
    contents.progress = {"global_steps": int(common.get("iteration", 0))}
    optimizer = common.get("optimizer") or {}
    optimizer = optimizer.get("optimizer", optimizer)
    groups = optimizer.get("param_groups") or []
    contents.groups = [group_options(group) for group in groups]
    names = {part.name.removeprefix("parameter/") for part in contents.parts if part.name.startswith("parameter/")}
    if len(groups) == 1:
        contents.members = dict.fromkeys(sorted(names), 0)
    # One number for all parameters, whose groups are not known if there are several.
    steps = (optimizer.get("state") or {}).get("common_step")
    if steps is not None:
        contents.numbers = {name: {"step": steps} for name in sorted(names)}
    if other:
        contents.left.append(f"{len(other)} entries that are neither weights nor states of them, such as {other[0]}")
    if common.get("opt_param_scheduler"):
        contents.left.append("the state of Megatron's own scheduler; set one up that goes on at this update")
    return contents


def _by_layer(kind: str, name: str, part: StoredRange) -> Iterator[StoredRange]:
    """Yield a part under its name, or the parts of single layers that it is made of."""
    stacked = _STACKED.fullmatch(name)
    if stacked is None or part.offsets is None or part.sizes is None:
        yield part.renamed(kind + name)
        return
    (first, *offsets), (count, *sizes) = part.offsets, part.sizes
    for number in range(count):
        yield replace(
            part, name=f"{kind}{stacked[1]}.{first + number}.{stacked[2]}", shape=part.shape[1:], stop=prod(sizes),
            read=partial(_layer, part, number), offsets=tuple(offsets), sizes=tuple(sizes),
        )  # fmt: skip


def _layer(part: StoredRange, number: int) -> torch.Tensor:
    return part.read()[number]
