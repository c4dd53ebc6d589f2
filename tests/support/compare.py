"""Comparisons of named tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, equal, nn


def assert_same(result: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare names, dtypes, and values bit for bit."""
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].dtype == value.dtype, name
        assert equal(result[name], value), name


def assert_close(
    result: Mapping[str, Tensor],
    expected: Mapping[str, Tensor] | nn.Module,
    tolerance: float = 1e-9,
    atol: float | None = None,
) -> None:
    """Compare names, shapes, and values: a difference is at most ``atol + tolerance * |expected|``.

    Of a module the parameters count. ``atol`` is the tolerance where it is not given.
    """
    if isinstance(expected, nn.Module):
        expected = dict(expected.named_parameters())
        result = {name: result[name] for name in expected}
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].shape == value.shape, name
        limit = (tolerance if atol is None else atol) + tolerance * value.abs()
        error = (result[name] - value).abs()
        assert bool((error <= limit).all()), f"{name} is off by up to {float(error.detach().max())}"
