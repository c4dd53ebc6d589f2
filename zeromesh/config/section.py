"""The types that sections of the settings are made of: strict, frozen, every key described."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    import torch


class Section(BaseModel):
    """A frozen set of keys. Unknown keys are errors, and nothing is converted from one type to another."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), validate_default=False
    )


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Return a field with its meaning, for the reference; a default of ``...`` makes it required."""
    return Field(default, description=meaning, **limits)


def _integral(value: Any) -> Any:
    """Return a float without a fraction as a whole number: JSON writers use ``5e8`` for those."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    """One string stands for a list of one; a list becomes a tuple, which stays as it is."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


DTYPE_NAMES: dict[str, str] = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
"""The names in use for a dtype, to the short one that the settings keep."""


def _short_dtype(value: Any) -> Any:
    """``"torch.bfloat16"``, ``"BFloat16"`` and ``torch.bfloat16`` itself are all ``"bf16"``."""
    name = str(value).lower().removeprefix("torch.")
    return DTYPE_NAMES.get(name, value)


def as_dtype(name: str | None) -> torch.dtype | None:
    """Torch's dtype for one of the short names."""
    import torch

    return {None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]


def _never(value: Any) -> Any:
    """An infinite number of steps, which some write for "never", is no interval at all."""
    return None if isinstance(value, float) and math.isinf(value) else value


def _capitalised(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_integral)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_integral)]
CountInt = Annotated[int, Field(ge=0), BeforeValidator(_integral)]
SizeInt = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(_integral)]
BatchInt = Annotated[int, Field(ge=1, le=2**40), BeforeValidator(_integral)]
BudgetInt = Annotated[int, Field(ge=2), BeforeValidator(_integral)]
PositiveFloat = Annotated[float, Field(gt=0)]
CountFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(_short_dtype, json_schema_input_type=Literal[tuple(DTYPE_NAMES)]),
]
Interval = Annotated[CountInt | None, BeforeValidator(_never)]
Table = dict[str, Any]
TagValidation = Annotated[
    Literal["Ignore", "Warn", "Fail"],
    BeforeValidator(
        _capitalised,
        json_schema_input_type=Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL"],
    ),
]
