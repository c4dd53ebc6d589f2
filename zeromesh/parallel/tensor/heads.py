"""Numbers of heads in attention modules, found and changed where heads are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeromesh.base import model_names


@dataclass(frozen=True)
class Heads:
    """Numbers of query and key heads of an attention, and their width."""

    queries: int
    keys: int
    width: int


def heads_of(module: nn.Module, config: Any = None) -> Heads | None:
    """Return the heads of a module that computes attention by itself; None if it does not look like one."""
    said = [module, getattr(module, "config", None), config]
    # The module itself must name heads or a width: the configuration does so for every module of the model.
    width = first_number([module], model_names.WIDTHS)
    queries = first_number([module], model_names.QUERIES)
    if width is None and queries is None:
        return None
    queries = queries or first_number(said, model_names.QUERIES)
    if queries is None:
        return None
    total = first_number([module], model_names.TOTALS)
    width = width or (total // queries if total else None) or first_number(said, model_names.WIDTHS)
    if width is None:
        total = first_number(said, model_names.MODEL_WIDTHS)
        width = total // queries if total else None
    keys = 1 if getattr(module, "multi_query", False) is True else first_number(said, model_names.KEYS)
    if getattr(module, "new_decoder_architecture", False):
        keys = first_number(said, model_names.KEYS)
    return None if width is None else Heads(queries, min(keys or queries, queries), width)


def first_number(said: Sequence[Any], names: Sequence[str]) -> int | None:
    """Return the first positive whole number that one of several objects has under one of several names."""
    for who in said:
        for name in names:
            value = getattr(who, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def take_part(module: nn.Module, heads: Heads, ranks: int) -> None:
    """Let a module count the heads of one rank where it counted all; ``ranks`` divide those of queries."""
    queries, keys = heads.queries // ranks, max(1, heads.keys // ranks)
    changes = [
        (model_names.QUERIES, heads.queries, queries),
        (model_names.KEYS, heads.keys, keys),
        (model_names.TOTALS, heads.queries * heads.width, queries * heads.width),
        (model_names.KEY_TOTALS, heads.keys * heads.width, keys * heads.width),
        (model_names.GROUPS, heads.queries // heads.keys, queries // keys),
    ]
    for names, total, part in changes:
        for name in names:
            if vars(module).get(name) == total:
                setattr(module, name, part)
    if hasattr(module, "config"):
        # Its forward may read the numbers of heads there, and other modules share the configuration: this one gets a
        # view of it.
        counts = {name: part for names, total, part in changes[:2] for name in names}
        module.config = _Config(module.config, counts)  # type: ignore[assignment]


def take_part_of_experts(module: nn.Module, ranks: int) -> None:
    """Let experts whose matrices are the rows of one weight (DBRX) count the rows of one rank of each."""
    for inner in module.modules():
        if model_names.EXPERT_WIDTH in vars(inner):
            setattr(inner, model_names.EXPERT_WIDTH, vars(inner)[model_names.EXPERT_WIDTH] // ranks)


class _Config:
    """The configuration of a model as one of its attentions is to see it: with the heads of one rank."""

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        self._config, self._counts = config, counts

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self)
        if "_config" not in attributes:  # it is being copied
            raise AttributeError(name)
        value = getattr(attributes["_config"], name)
        return attributes["_counts"].get(name, value)
