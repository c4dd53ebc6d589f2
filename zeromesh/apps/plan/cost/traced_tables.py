"""Lookups of embedding tables in a trace: their rows come from other ranks, and no table is in memory whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.apps.plan.cost.cost import TableCost
from zeromesh.shard.tables.find_tables import find_tables


class TracedTables:
    """Tables of a model that is traced, and their lookups."""

    def __init__(self, model: nn.Module, patterns: Sequence[str] | None) -> None:
        self.modules: Mapping[str, Any] = find_tables(model, patterns, {})[0]
        self.weights = frozenset(f"{name}.weight" for name in self.modules)
        self._looked: dict[str, list[tuple[int, int]]] = {}  # by table, the slot and the row numbers of each lookup

    def replace_lookups(self, slot: Callable[[], int]) -> None:
        """Let the modules compute from rows alone; ``slot`` numbers the present unit."""
        for name, module in self.modules.items():
            vars(module)["forward"] = partial(self._look, name, slot)

    def _look(self, name: str, slot: Callable[[], int], input: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.modules[name]
        self._looked.setdefault(name, []).append((slot(), input.numel()))
        # As many rows as are looked up at the most; they are a leaf, as in a run.
        count = min(input.numel(), module.num_embeddings)
        rows = torch.empty(count, module.embedding_dim, dtype=module.weight.dtype, requires_grad=True)
        options = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        plain = {"weight": rows, "padding_idx": None, "max_norm": None, "sparse": False}
        return type(module).forward(SimpleNamespace(**options | plain), torch.empty_like(input), *args, **kwargs)

    def costs(self) -> Iterator[tuple[int, TableCost]]:
        """Yield each table with the slot that looks it up first."""
        for name, module in self.modules.items():
            looked = self._looked.get(name, [(0, 0)])
            count = float(sum(number for _, number in looked))
            yield looked[0][0], TableCost(name, module.num_embeddings, module.embedding_dim, count)
