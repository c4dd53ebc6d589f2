"""Optimizers: one row each, which is read wherever one is treated in its own way.

A row names its class by a text, so that settings are read without torch, and no room has to know the class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple


class Scope(Enum):
    """Part of a parameter that an optimizer has to see to be right."""

    ELEMENTWISE = "each element by itself"  # so that it is right on any piece
    EXCHANGING = "pieces, and the other ranks by an exchange"
    WHOLE = "whole parameters"
    NEVER = "more than a step gives"
    UNKNOWN = ""


class OtherParam(NamedTuple):
    """A parameter that configurations made for DeepSpeed hold but that the class here does not take."""

    remedy: str = ""
    harmless: tuple[Any, ...] | None = None  # the values that change nothing here; None: any


class Counterpart(NamedTuple):
    """The optimizer here that makes the same update as one of DeepSpeed, without its approximations."""

    name: str
    why: str
    without: tuple[str, ...] = ()  # arguments that it has no use for
    params: Mapping[str, Any] = MappingProxyType({})  # arguments that it needs


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer; a configuration may write the name of its class in any letter case."""

    module: str  # that has the class
    name: str
    scope: Scope = Scope.ELEMENTWISE
    remedy: str = ""  # where it is refused
    # Of each element. Files that do not name the class are recognized by them; messages offer what has some.
    states: tuple[str, ...] = ()
    more_states: tuple[str, ...] = ()  # which some options add
    reduces_states: bool = False  # whether they have fewer elements than the parameter
    rule: str = ""  # of the update on the host, in ``kernels.update_rules``
    row_rule: str = ""  # of the update of a table's rows, in ``shard.tables.row_rules``
    fused: tuple[str, ...] = ()  # devices on which torch has an update in one kernel that is used
    other_params: Mapping[str, OtherParam] = field(default_factory=dict)
    replaces: tuple[tuple[str, Counterpart], ...] = ()  # by names of DeepSpeed's optimizers, in lower case
    deepspeed_name: str = ""  # what follows "Fused" and "DeepSpeedCPU" in the names of DeepSpeed's classes
    deepspeed_zero: bool = False  # whether DeepSpeed takes it under ZeRO without being told to

    @property
    def takes_pieces(self) -> bool:
        """True if it is right on pieces of parameters."""
        return self.scope in (Scope.ELEMENTWISE, Scope.EXCHANGING)

    def load(self) -> Any:
        """Return the class."""
        return getattr(import_module(self.module), self.name)


_FUSED = "torch's fused update is used if it exists"
_WIRE = "gradients are exact, and sent in 16 bits with fp16 or bf16"
_BIAS = "torch's Adam always corrects the bias of its moments"
_MUP = "pass parameter groups with muP's learning rates to initialize"
_COMPRESSION = (
    *("freeze_step", "cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler"),
    *("local_step_scaler", "local_step_clipper", "pipeline_enable_split"),
)
_LAMB = ("coeff_beta", "factor_max", "factor_min", "factor_threshold")
_FP32_STATES = {"fp32_optimizer_states": OtherParam("it is true or false", (True, False))}
_GRAD_NONE = {"set_grad_none": OtherParam()}
_AMSGRAD = {"amsgrad": OtherParam("only Adam and AdamW have it", (False,))}
_ADAM_PARAMS = {
    "adam_w_mode": OtherParam(),
    "torch_adam": OtherParam(),
    "bias_correction": OtherParam("torch's Adam always corrects the bias; leave it out", (True,)),
    **_GRAD_NONE,
    **_FP32_STATES,
}
_MOMENTS = ("exp_avg", "exp_avg_sq")

_ADAM = OptimizerRow(
    "torch.optim",
    "Adam",
    states=_MOMENTS,
    more_states=("max_exp_avg_sq",),
    rule="adam",
    row_rule="adam",
    fused=("cpu", "cuda"),
    other_params=_ADAM_PARAMS,
    replaces=(
        ("fusedadam cpuadam deepspeedcpuadam", Counterpart("adam", _FUSED)),
        ("onebitadam zerooneadam", Counterpart("adam", f"{_WIRE}; {_BIAS}", (*_COMPRESSION, "bias_correction"))),
        # Adam of the package mup is torch's, whose weight decay is part of the gradient.
        ("muadam", Counterpart("adam", _MUP, params={"adam_w_mode": False})),
    ),
    deepspeed_name="Adam",
    deepspeed_zero=True,
)

OPTIMIZERS = [
    _ADAM,
    replace(_ADAM, name="AdamW", rule="adamw", replaces=(("muadamw", Counterpart("adamw", _MUP)),)),
    OptimizerRow(
        "zeromesh.shard.optim.lamb",
        "Lamb",
        Scope.EXCHANGING,
        states=_MOMENTS,
        other_params={**_AMSGRAD, "eps_inside_sqrt": OtherParam("eps is added to the root", (False,))},
        replaces=(
            ("fusedlamb", Counterpart("lamb", _FUSED)),
            ("onebitlamb", Counterpart("lamb", _WIRE, _COMPRESSION + _LAMB)),
        ),
        deepspeed_name="Lamb",
    ),
    OptimizerRow(
        "zeromesh.shard.optim.lion",
        "Lion",
        states=("exp_avg",),
        rule="lion",
        other_params=_GRAD_NONE | _FP32_STATES,
        replaces=(("fusedlion cpulion deepspeedcpulion", Counterpart("lion", _FUSED)),),
        deepspeed_name="Lion",
        deepspeed_zero=True,
    ),
    OptimizerRow(
        "torch.optim",
        "Adagrad",
        states=("sum",),
        rule="adagrad",
        row_rule="adagrad",
        fused=("cpu",),
        other_params=_AMSGRAD | _FP32_STATES,
        replaces=(("cpuadagrad deepspeedcpuadagrad", Counterpart("adagrad", _FUSED)),),
        deepspeed_name="Adagrad",
        deepspeed_zero=True,
    ),
    OptimizerRow(
        "torch.optim",
        "SGD",
        states=("momentum_buffer",),
        rule="sgd",
        row_rule="sgd",
        # Not fused: with momentum, torch's fails when a parameter's first gradient comes late.
        replaces=(("musgd", Counterpart("sgd", _MUP)),),
    ),
    OptimizerRow(
        "zeromesh.shard.optim.muon",
        "Muon",
        Scope.EXCHANGING,
        states=("momentum_buffer",),  # of its matrices
        fused=("cpu", "cuda"),
        other_params={"ns_method": OtherParam("both compute the same", ("standard", "gram"))},
        deepspeed_zero=True,
    ),
    *(
        OptimizerRow("torch.optim", name)
        for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    ),
    OptimizerRow(
        "torch.optim",
        "Adafactor",
        Scope.WHOLE,
        "it averages over rows and columns; use ZeRO-0 (zero_optimization.stage = 0) without mesh.tensor and "
        "mesh.expert, or another optimizer such as Lion",
        reduces_states=True,
    ),
    OptimizerRow(
        "torch.optim",
        "Muon",
        Scope.WHOLE,
        'it orthogonalizes whole matrices; name {"type": "Muon"} in the config, or use ZeRO-0 '
        "(zero_optimization.stage = 0) without mesh.tensor and mesh.expert",
    ),
    OptimizerRow(
        "torch.optim", "LBFGS", Scope.NEVER, "it evaluates the loss several times per step; use it without an engine"
    ),
    OptimizerRow(
        "torch.optim",
        "SparseAdam",
        Scope.NEVER,
        "it takes sparse gradients alone; use Adam, under which embeddings with sparse=True are updated as by "
        "SparseAdam",
        row_rule="adam",
    ),
]
"""All rows; of two with one name, a configuration means the first."""

UNKNOWN = OptimizerRow("", "", Scope.UNKNOWN)


def row_of(cls: type) -> OptimizerRow:
    """Return the row of a class, ``UNKNOWN`` if it has none."""
    rows = (row for row in OPTIMIZERS if row.name == cls.__name__)
    return next((row for row in rows if getattr(sys.modules.get(row.module), row.name, None) is cls), UNKNOWN)


def row_named(name: str) -> OptimizerRow:
    """Return the row that a configuration means by a name, in any letter case; ``UNKNOWN`` if there is none."""
    return next((row for row in OPTIMIZERS if row.name.lower() == name.lower()), UNKNOWN)


def states_of(cls: type) -> frozenset[str]:
    """Return the names of the states that a class makes, by its name or its bases'; empty if that is not known.

    Other libraries have optimizers of the same names, which make the same states.
    """
    names = {base.__name__ for base in cls.__mro__}
    return frozenset(next((row.states for row in OPTIMIZERS if row.states and row.name in names), ()))


def names_by_states(states: frozenset[str]) -> list[str]:
    """Return the names of the classes that make these states."""
    rows = (row for row in OPTIMIZERS if row.states)
    return [row.name for row in rows if {*row.states} <= states <= {*row.states, *row.more_states}]
