"""Arguments of models whose sequences are spread reach the model's forward, whatever their names are."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeromesh.parallel.context import torch_attention as plain


class Model(nn.Module):
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, kind: str = "", applied: int = 0, **more: Any
    ) -> tuple[Any, ...]:
        return tokens, positions, kind, applied, more


def test_a_models_own_argument_may_have_any_name() -> None:
    model, tokens, positions = Model(), torch.zeros(1, 4), torch.arange(4)
    inactive: Any = SimpleNamespace(replaces=False, group=SimpleNamespace(size=2))
    plain.install(model, inactive)
    given = model(tokens, positions=positions, kind="a", applied=2, forward=3, self_=4)
    assert given == (tokens, positions, "a", 2, {"forward": 3, "self_": 4})
