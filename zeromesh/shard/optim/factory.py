"""Construction of optimizers over the pieces that this rank updates, from a name or from a user's optimizer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.kernels.update_rules import rule_of, update_class
from zeromesh.base.optimizer_table import UNKNOWN, Scope, row_named, row_of
from zeromesh.base.piece import Piece, PieceExchange
from zeromesh.base.words import public_classes, some
from zeromesh.shard.optim.arguments import checked, unknown_parameter, without_auto

_log = logging.getLogger(__name__)

_IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Options that change how an optimizer computes, and no state."""

USUAL_BYTES = {"exp_avg": 4.0, "exp_avg_sq": 4.0}  # of states of an element: Adam's

_ONE_BIT = "it belongs to the 1-bit optimizers, which are not offered"

_REFUSED_PARAMS: dict[str, str] = {
    "max_grad_norm": "set `gradient_clipping` at the top level of the config",
    **dict.fromkeys(("freeze_step", "cuda_aware", "comm_backend_name"), _ONE_BIT),
}


@dataclass(frozen=True)
class ParameterGroup:
    """Parameter group as this rank sees it; all ranks have the same groups in the same order."""

    pieces: tuple[Piece, ...]  # this rank's; may be empty
    options: Mapping[str, Any] = field(default_factory=dict)  # they override those of the optimizer


def build(
    type: str,
    params: Mapping[str, Any],
    groups: Sequence[ParameterGroup],
    exchange: PieceExchange,
    sharded: bool,
    allow_untested: bool = False,
    matrices: Callable[[], frozenset[str] | Mapping[str, bool]] = frozenset,
) -> Optimizer:
    """Make the optimizer that a config names, over pieces.

    Args:
        type: ``adam`` (decoupled weight decay unless ``adam_w_mode`` is false), ``adamw``, ``lamb``, ``lion``,
            ``adagrad``, ``sgd``, ``muon`` or a class of ``torch.optim``, in upper or lower case.
        params: its arguments; ``"auto"`` means not given. What is not given has torch's default.
        groups: as on every rank; an optimizer's ``param_groups`` follow their order (Muon makes two of each).
        exchange: used by optimizers that work by it, as Lamb and Muon do.
        sharded: whether pieces may be less than whole parameters.
        allow_untested: take classes not known to be right on pieces.
        matrices: returns the names of the parameters that are to be updated as matrices, for a class that asks so.
    """
    cls, defaults = _class(type, params)
    _check_class(cls, sharded, allow_untested)
    context: dict[str, Any] = {}
    if row_of(cls).scope is Scope.EXCHANGING:
        # What the configuration does not say: these optimizers get it beside their parameters.
        context = {"exchange": exchange, "pieces": [piece for group in groups for piece in group.pieces]}
        if "matrices" in inspect.signature(cls).parameters:
            context["matrices"] = matrices()
    arguments = defaults | _accept(type, without_auto(params), _accepted(cls))
    # It may look at shapes, and whole parameters can have theirs.
    if not sharded and not row_of(cls).takes_pieces:
        _give_shapes(piece for group in groups for piece in group.pieces)
    param_groups = [
        {"params": [piece.parameter for piece in group.pieces]}
        | {key: _plain(value) for key, value in without_auto(group.options).items()}
        for group in groups
    ]
    try:
        optimizer: Optimizer = cls(param_groups, **context, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {type} with optimizer.params = {without_auto(params)}: {error}") from error
    _finish(optimizer)
    return optimizer


def _class(type: str, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class that a config names, and defaults that it has here."""
    # DeepSpeed's Adam has decoupled weight decay unless it is told otherwise, and none by default.
    if type.lower() == "adam" and params.get("adam_w_mode", True):
        return torch.optim.AdamW, {"weight_decay": 0.0}
    row = row_named(type)
    return (public_classes(torch.optim, Optimizer)[type.lower()] if row is UNKNOWN else row.load()), {}


def _accepted(cls: type[Optimizer]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class that a config may give."""
    reserved = {"params", "groups", "exchange", "pieces", "matrices"}
    return {key: value for key, value in inspect.signature(cls).parameters.items() if key not in reserved}


def state_bytes(type: str, params: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of each state that the named optimizer keeps for an element of an fp32 parameter, by its name.

    One update of a small matrix tells: names of states differ, and options such as ``momentum`` add some.
    """
    cls, _ = _class(type, params)
    row = row_of(cls)
    if row.scope in (Scope.EXCHANGING, Scope.NEVER):
        return dict.fromkeys(row.states, float(torch.float32.itemsize))
    weight = nn.Parameter(torch.zeros(8, 8, device="cpu", dtype=torch.float32))
    weight.grad = torch.zeros_like(weight)
    arguments = {key: value for key, value in without_auto(params).items() if key not in _IMPLEMENTATION}
    try:
        optimizer = cls([weight], **_accept(type, arguments, _accepted(cls)))
        optimizer.step()
    except (ValueError, TypeError, RuntimeError, AssertionError):  # which the start of a run tells
        return USUAL_BYTES
    states = optimizer.state[weight].items()
    return {key: value.nbytes / weight.numel() for key, value in states if torch.is_tensor(value) and value.ndim}


def is_elementwise(type: str, params: Mapping[str, Any]) -> bool:
    """Return whether the named optimizer can take its step in parts; see ``bound.steps_in_parts``."""
    return rule_of(_class(type, params)[0], params) is not None


def adopt(
    optimizer: Optimizer,
    pieces_by_parameter: Mapping[nn.Parameter, Piece | None],
    sharded: bool,
    allow_untested: bool = False,
    exchange: PieceExchange | None = None,
) -> None:
    """Make an optimizer that was built over a model's parameters update this rank's pieces of them, in place.

    ``exchange`` reaches the other pieces for a class that has a ``spread``, such as Lamb.

    Raises:
        ValueError: if the optimizer would be wrong on pieces, has been stepped, or holds foreign parameters.
    """
    check_users(optimizer, pieces_by_parameter, sharded, allow_untested)
    if not sharded and not row_of(update_class(optimizer)).takes_pieces:
        _give_shapes(piece for piece in pieces_by_parameter.values() if piece is not None)
    # The same group objects, since a scheduler may already hold them.
    for group in optimizer.param_groups:
        group_pieces = [(p, piece) for p in group["params"] if (piece := pieces_by_parameter.get(p)) is not None]
        for parameter in group["params"]:
            state, piece = optimizer.state.pop(parameter, None), pieces_by_parameter.get(parameter)
            if piece is None:
                continue
            vars(piece.parameter).update(vars(parameter))  # a step may read attributes, such as a rate of its own
            if not state:
                continue
            # Cut what an optimizer such as Adagrad makes at construction.
            optimizer.state[piece.parameter] = {
                key: piece.cut(value).to(piece.parameter, copy=True).view_as(piece.parameter)
                if torch.is_tensor(value) and key != "step" and value.shape == piece.shape
                else value
                for key, value in state.items()
            }
        # Parameters of which this rank has no piece, and frozen ones, leave their group.
        group["params"] = [piece.parameter for _, piece in group_pieces]
        if "param_names" in group:
            group["param_names"] = [piece.name for _, piece in group_pieces]
    exchanges = any(row_of(base).scope is Scope.EXCHANGING for base in type(optimizer).__mro__)
    if exchanges and exchange is not None and hasattr(optimizer, "spread"):
        optimizer.spread([piece for piece in pieces_by_parameter.values() if piece is not None], exchange)
    _finish(optimizer)


def _accept(name: str, params: Mapping[str, Any], accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the arguments for the class, after every parameter has been checked."""
    arguments: dict[str, Any] = {}
    row = row_named(name)
    for key, value in params.items():
        other = row.other_params.get(key)
        if key in accepted:
            arguments[key] = _plain(checked(f"optimizer.params.{key}", value, accepted[key]))
        elif key in _REFUSED_PARAMS:
            raise ValueError(f"optimizer.params.{key} of {name} is not taken: {_REFUSED_PARAMS[key]}")
        elif other is None:
            raise unknown_parameter("optimizer.params", key, name, accepted)
        elif other.harmless is not None and value not in other.harmless:
            raise ValueError(f"optimizer.params.{key} of {name} cannot be {value!r}: {other.remedy}")
        else:
            _log.info("%s.%s of %s has no further effect", "optimizer.params", key, name)
    return arguments


def _plain(value: Any) -> Any:
    """Return a list of numbers as the tuple of floats that optimizers expect."""
    if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
        return value
    return tuple(float(item) for item in value)


def check_users(
    optimizer: Optimizer, parameters: Container[nn.Parameter], sharded: bool, allow_untested: bool = False
) -> None:
    """Raise what ``adopt`` raises, of a model with these trainable ``parameters``."""
    kind = type(optimizer).__name__
    _check_class(update_class(optimizer), sharded, allow_untested or is_tested(optimizer), kind)
    # Its state is of whole parameters. Some optimizers make theirs, with a step of 0, when they are built.
    if any(state and float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        raise ValueError(
            f"{kind} has been stepped or loaded before; give a new one, and load its state with the engine's "
            "`load_checkpoint`"
        )
    foreign = [
        f"group {number}, parameter {place}"
        + (f" ({group['param_names'][place]})" if "param_names" in group else "")
        + f" of shape {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter.requires_grad and parameter not in parameters
    ]
    if foreign:
        raise ValueError(
            f"the optimizer holds parameters that are not the model's: {some(foreign, separator='; ', most=3)}; build "
            "it over the parameters of the model that you pass, after every change that replaces parameters (a copy, "
            "adapters, new layers), or pass a function, as optimizer=lambda parameters: torch.optim.AdamW(parameters)"
        )


def is_tested(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is right on pieces of parameters: its class is known, or says so itself."""
    return row_of(update_class(optimizer)).takes_pieces or hasattr(optimizer, "updates_pieces")


def _check_class(cls: type[Optimizer], sharded: bool, allow_untested: bool, name: str = "") -> None:
    row = row_of(cls)
    if row.scope is Scope.NEVER:
        raise ValueError(f"{cls.__name__} cannot be used: {row.remedy}")
    if sharded and row.scope is Scope.WHOLE:
        raise ValueError(f"{cls.__name__} would be wrong on sharded parameters: {row.remedy}")
    if sharded and not (allow_untested or row.takes_pieces):
        raise ValueError(
            f"{name or cls.__name__} is not known to update each element by itself, as it must where parameters are "
            "sharded; use ZeRO-0 (zero_optimization.stage = 0) without mesh.tensor and mesh.expert, or set "
            "`zero_allow_untested_optimizer` to true if it does"
        )


def _give_shapes(pieces: Iterable[Piece]) -> None:
    """Give whole parameters their shape back for an optimizer that may look at it."""
    for piece in pieces:
        assert piece.whole, f"{piece.name} is not whole"
        # A view, because the storage is a part of the flat master.
        piece.parameter.data = piece.parameter.data.view(piece.shape)


class NoPieces(list[nn.Parameter]):
    """Parameters of a group of which this rank updates nothing."""

    def __getitem__(self, index: Any) -> Any:
        """Raise IndexError, which says why there is none."""
        if isinstance(index, slice):
            return NoPieces()
        raise IndexError(
            "this rank updates no piece of this parameter group, which is sharded over the ranks: test "
            'group["params"] before an index, loop over it, or take the parameters of the model itself; with '
            "ZeRO-0 (zero_optimization.stage = 0) without mesh.tensor and mesh.expert every rank has all"
        )


def _finish(optimizer: Optimizer) -> None:
    """Explain empty groups; switch on the fused update where the user did not choose, and device and dtype have one."""
    devices = row_of(update_class(optimizer)).fused
    for group in optimizer.param_groups:
        group["params"] = group["params"] or NoPieces()
        undecided = group.get("fused", False) is None and group["foreach"] is None and not group["differentiable"]
        if undecided and all(p.device.type in devices and p.is_floating_point() for p in group["params"]):
            group["fused"] = True
