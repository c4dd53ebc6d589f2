"""Types of the sections of the settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    import torch


class Section(BaseModel):
    """A frozen set of keys. Unknown keys are errors, and nothing is converted from one type to another."""

    # Strict, since "32" for 32 or 1 for true is mostly a mistake in a file that a program wrote.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), validate_default=False
    )


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Return a field with its meaning, for the reference; a default of ``...`` makes it required."""
    return Field(default, description=meaning, **limits)


def _integral(value: Any) -> Any:
    # JSON writers use 5e8 for whole numbers.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    # A list becomes a tuple: frozen settings must not change through a list.
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


SHORT_DTYPES = {"fp32": "float32 float", "fp16": "float16 half", "bf16": "bfloat16"}
"""Short name of a dtype, which the settings keep, to its other names."""

DTYPE_NAMES = {name: short for short, others in SHORT_DTYPES.items() for name in (short, *others.split())}


def as_dtype(name: str | None) -> torch.dtype | None:
    """Return torch's dtype for one of the short names."""
    # Imported late, because the command line reads settings before anything needs torch.
    import torch

    return {None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]


Int = Annotated[int, BeforeValidator(_integral)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_integral)]
CountInt = Annotated[int, Field(ge=0), BeforeValidator(_integral)]
# Beyond all machines: larger numbers, as of a slip of the finger, would end in errors of torch that name no key.
SizeInt = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(_integral)]
BatchInt = Annotated[int, Field(ge=1, le=2**40), BeforeValidator(_integral)]
BudgetInt = Annotated[int, Field(ge=2), BeforeValidator(_integral)]
PositiveFloat = Annotated[float, Field(gt=0)]
CountFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# The schema for editors has the forms that users write, and not those that the validators return.
Names = Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(
        # So torch.bfloat16 itself and "BFloat16" are "bf16", too.
        lambda value: DTYPE_NAMES.get(str(value).lower().removeprefix("torch."), value),
        json_schema_input_type=Literal[tuple(DTYPE_NAMES)],
    ),
]
StateDtype = Annotated[
    Literal["fp32", "bf16"],
    BeforeValidator(
        lambda value: DTYPE_NAMES.get(str(value).lower().removeprefix("torch."), value),
        json_schema_input_type=Literal[tuple(name for name, short in DTYPE_NAMES.items() if short != "fp16")],
    ),
]
ReduceOp = Annotated[
    Literal["mean", "sum"],
    BeforeValidator(
        lambda value: value.lower() if isinstance(value, str) else value,
        json_schema_input_type=Literal["mean", "sum", "MEAN", "SUM", "Mean", "Sum"],
    ),
]
# Some write an infinite number of steps for "never".
Interval = Annotated[
    CountInt | None, BeforeValidator(lambda value: None if isinstance(value, float) and math.isinf(value) else value)
]
Table = dict[str, Any]
