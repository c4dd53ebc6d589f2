"""Widths of states, and the places of tables, that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace

from zeromesh.base.placement import Tier
from zeromesh.config.settings import TIERS, Settings
from zeromesh.shard.optim.factory import state_bytes
from zeromesh.shard.sizes import TableLayout, Widths
from zeromesh.shard.tables.row_rules import RULES

USUAL_STATES = 2  # of Adam

PRECISIONS = {
    "bf16": Widths(),
    "fp16": Widths(),
    # Parameters in fp32 are their own masters.
    "fp32": Widths(parameter=4, gradient=4, wire=4, master=0),
}
"""Widths of states by the precision of parameters."""


def precision_of(settings: Settings) -> str:
    """Return the precision of parameters."""
    return "bf16" if settings.bf16.enabled else "fp16" if settings.fp16.enabled else "fp32"


def widths_of(settings: Settings) -> Widths:
    """Return the widths of a configuration; the states of an optimizer that it does not name are those of Adam."""
    widths, dtypes, optimizer = PRECISIONS[precision_of(settings)], settings.precision, settings.optimizer
    return replace(
        widths,
        gradient=dtypes.accumulate.itemsize if dtypes.accumulate is not None else widths.gradient,
        wire=dtypes.communicate.itemsize if dtypes.communicate is not None else widths.wire,
        states=widths.states if optimizer is None else _state_bytes(settings),
        gathered=1 if settings.float8.gather else 0,
    )


def _state_bytes(settings: Settings) -> int:
    """Return the bytes of the states of an element."""
    assert settings.optimizer is not None
    wide = state_bytes(settings.optimizer.type, settings.optimizer.params)
    named, rest = settings.state_dtypes
    narrow = {name for name in wide if named.get(name, rest) == "bf16"}
    return round(sum(size / 2 if name in narrow else size for name, size in wide.items()))


def tables_of(settings: Settings) -> TableLayout:
    """Return the place and the states of embedding tables; of an unknown optimizer, those of Adam."""
    chosen = settings.embedding_tables
    kind = settings.optimizer.type.lower() if settings.optimizer is not None else ""
    name = chosen.optimizer.type if chosen.optimizer is not None else kind
    states = RULES.get(name, RULES["adam"]).states
    cached = None if chosen.device == "none" else chosen.cache_rows
    rows = sum(state.per_row for state in states)
    return TableLayout(TIERS[chosen.device], len(states) - rows, rows, cached)


def resting_of(settings: Settings) -> TableLayout | None:
    """Return the place and the states of experts that rest; None where they do not."""
    chosen, optimizer = settings.experts, settings.optimizer
    if chosen.rest == "none":
        return None
    states = USUAL_STATES if optimizer is None else _state_bytes(settings) / 4
    return TableLayout(TIERS[chosen.rest], states, 0, chosen.slots if chosen.rest == "nvme" else None, Tier.HOST)
