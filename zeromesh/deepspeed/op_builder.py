"""``deepspeed.ops.op_builder``: names of operators, which programs ask for before they use them."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any


class OpBuilder:
    """Stands for what compiles an operator in DeepSpeed; here all come with the package, and nothing is compiled."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the operator can be used."""
        return bool(compatible_ops[self.NAME])

    def load(self, verbose: bool = True) -> Any:
        """Raise NotImplementedError: operators have no functions beside the optimizers that use them."""
        raise NotImplementedError(
            f"{type(self).__name__}().load() is not available: nothing is compiled at run time; use the classes of "
            "deepspeed.ops, such as FusedAdam"
        )


_THERE = {
    "FusedAdam": "fused_adam",
    "CPUAdam": "cpu_adam",
    "CPUAdagrad": "cpu_adagrad",
    "CPULion": "cpu_lion",
    "FusedLamb": "fused_lamb",
    "FusedLion": "fused_lion",
}
"""Operators that there are, by their names in DeepSpeed's classes."""

compatible_ops = defaultdict(bool, dict.fromkeys(_THERE.values(), True))
"""Names of operators to whether they can be used: False for all others."""


@cache
def __getattr__(name: str) -> Any:
    operator = name.removesuffix("Builder")
    if not operator or operator == name:
        raise AttributeError(f"deepspeed.ops.op_builder has no {name}; it has OpBuilder and the builders of operators")
    return type(name, (OpBuilder,), {"NAME": _THERE.get(operator, operator)})
