"""Comparisons of named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def require_equal(result: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare each of the expected tensors bit for bit."""
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


def require_close(
    result: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], rtol: float = 1e-5, atol: float = 1e-8
) -> None:
    """Compare each of the expected tensors, with the tolerances of ``torch.allclose``."""
    for name, value in expected.items():
        assert torch.allclose(result[name], value, rtol=rtol, atol=atol), name
