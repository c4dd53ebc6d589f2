"""Names of the numbers of heads in attention modules, found and changed where heads are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "attention_heads", "heads")
KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_heads", "num_k_heads", "num_kv")
WIDTHS = (
    "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_per_head", "attn_head_size", "dim_head",
    "width",
)  # fmt: skip
# The width of all heads together.
TOTALS = ("all_head_size", "embed_dim", "inner_dim", "hidden_size", "split_size", "dim", "attn_dim", "q_size")
KEY_TOTALS = ("kv_dim", "kv_size", "num_key_value_size")
GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv", "num_groups")  # query heads for each key head
EXPERT_WIDTH = "ffn_hidden_size"  # rows of one expert in the weight of all experts


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
    width = first_number([module], WIDTHS)
    queries = first_number([module], QUERIES)
    if width is None and queries is None:
        return None
    queries = queries or first_number(said, QUERIES)
    if queries is None:
        return None
    total = first_number([module], TOTALS)
    width = width or (total // queries if total else None) or first_number(said, WIDTHS)
    if width is None:
        total = first_number(said, ("hidden_size", "d_model", "n_embd"))
        width = total // queries if total else None
    keys = 1 if getattr(module, "multi_query", False) is True else first_number(said, KEYS)
    if getattr(module, "new_decoder_architecture", False):
        keys = first_number(said, KEYS)
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
        (QUERIES, heads.queries, queries),
        (KEYS, heads.keys, keys),
        (TOTALS, heads.queries * heads.width, queries * heads.width),
        (KEY_TOTALS, heads.keys * heads.width, keys * heads.width),
        (GROUPS, heads.queries // heads.keys, queries // keys),
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
        if EXPERT_WIDTH in vars(inner):
            setattr(inner, EXPERT_WIDTH, vars(inner)[EXPERT_WIDTH] // ranks)


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
