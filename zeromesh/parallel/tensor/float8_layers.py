"""Choice of the linear layers whose products are in float8."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zeromesh.base.float8_products import Float8Products, Largest, has_products, reason_to_skip
from zeromesh.base.linear_arithmetic import ARITHMETIC, columns_of, input_of, multiply
from zeromesh.base.quantized_layers import change, is_quantized
from zeromesh.base.substitution import linear_class, own_computation
from zeromesh.base.words import HEADS
from zeromesh.comm.mesh import Mesh

if TYPE_CHECKING:
    from zeromesh.comm.collectives import Group
    from zeromesh.parallel.tensor.split_plan import SplitPlan

_log = logging.getLogger("zeromesh")

LARGEST_TAG = 14  # on the tensor axis, of the largest magnitudes of operands of which each rank has a part


def use_float8(
    model: nn.Module,
    rowwise: bool,
    skip: Sequence[str],
    mesh: Mesh,
    split: SplitPlan | None = None,
    heads: Collection[str] = (),
) -> list[str]:
    """Let linear layers compute in float8, and log those that stay as they are. Collective over the tensor axis.

    Args:
        model: as it is placed on this rank.
        rowwise: see ``Float8Products``.
        skip: patterns of names of layers that stay as they are.
        mesh: of the run.
        split: how tensor parallelism splits the model.
        heads: names of layers that the loss reads, without calling them.

    Returns:
        The names of the layers that compute in float8.

    Raises:
        ValueError: none can, on a single pipeline stage.
    """
    group, native = mesh.group("tensor"), has_products(mesh.device)
    cuts = {} if split is None else {id(m.module): m.style.cut for m in split.members if m.parameter is None}
    unread = set(heads) | _unread(model, split)
    layers = {name: module for name, module in model.named_modules() if _is_linear(module)}
    reasons = {name: _reason(name, module, skip, unread) for name, module in layers.items()}
    # Ranks may have parts of different sizes, and all of a group compute in the same arithmetic.
    keep_flags = torch.tensor([float(bool(reason)) for reason in reasons.values()])
    agreed = group.exchange(keep_flags).amax(0) if len(keep_flags) else keep_flags
    chosen, arithmetics = [], _arithmetics(rowwise, native, group)
    for (name, module), keeps in zip(layers.items(), agreed, strict=True):
        if keeps:
            reasons[name] = reasons[name] or "another tensor-parallel rank cannot"
            continue
        chosen.append(name)
        _change(module, arithmetics.get(cuts.get(id(module)), arithmetics[None]))
    if not chosen and mesh.sizes["pipeline"] == 1:
        _refuse(reasons)
    _tell(chosen, {name: reason for name, reason in reasons.items() if reason}, native, mesh)
    return chosen


def use_alone(model: nn.Module, rowwise: bool, skip: Sequence[str], device: torch.device) -> None:
    """Let the linear layers of a model that one process trains compute in float8; see ``use_float8``."""
    unread, arithmetic = _unread(model, None), Float8Products(rowwise, has_products(device))
    for name, module in model.named_modules():
        if _is_linear(module) and not _reason(name, module, skip, unread):
            _change(module, arithmetic)


def check_layers(model: nn.Module, skip: Sequence[str], dtype: torch.dtype | None) -> None:
    """Check the layers of the whole model, before it is split.

    Args:
        model: on each rank the same.
        skip: see ``use_float8``.
        dtype: to which the model will be cast; None: parameters keep theirs.

    Raises:
        ValueError: a pattern of ``skip`` that is no default matches no layer, no layer can compute in float8, or one
            that could has its weight in fp16.
    """
    layers = {name: module for name, module in model.named_modules() if _is_linear(module)}
    _require_matches(skip, layers)
    unread = _unread(model, None)
    reasons = {name: _reason(name, module, skip, unread) for name, module in layers.items()}
    if all(reasons.values()):
        _refuse(reasons)
    for name, reason in reasons.items():
        if not reason and (dtype or layers[name].weight.dtype) is torch.float16:
            raise ValueError(
                f"float8 is enabled, and the weight of {name} is in fp16, but products in float8 give bf16 or fp32; "
                'set "bf16": {"enabled": true}, or give the model in bf16 or fp32'
            )


def _refuse(reasons: Mapping[str, str]) -> NoReturn:
    listing = _few([f"{name}: {reason}" for name, reason in reasons.items()], "; ") or "it has no linear layers"
    raise ValueError(f"float8 is enabled, but no layer of the model can compute in it ({listing}); leave it out")


def _few(texts: Sequence[str], between: str = ", ", most: int = 8) -> str:
    """Return the first texts, and how many more there are."""
    more = f"{between}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def gathered_weights(model: nn.Module, skip: Sequence[str], heads: Collection[str] = ()) -> set[str]:
    """Return the names of weights that only layers that will compute in float8 read; see ``use_float8``."""
    unread = set(heads) | _unread(model, None)
    readers: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            readers.setdefault(id(parameter), []).append(name)
    layers = {name: module for name, module in model.named_modules() if _is_linear(module)}
    chosen = {name: module for name, module in layers.items() if not _reason(name, module, skip, unread)}
    return {f"{name}.weight" for name, module in chosen.items() if readers[id(module.weight)] == [name]}


def _require_matches(skip: Sequence[str], layers: Collection[str]) -> None:
    for pattern in skip:
        if pattern not in HEADS and not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(
                f"float8.skip has {pattern!r}, which matches no linear layer; there are {_few([*layers]) or 'none'}"
            )


def _is_linear(module: Any) -> bool:
    weight = module._parameters.get("weight")
    return linear_class(module) is not None and weight is not None and not is_quantized(weight)


def _unread(model: nn.Module, split: SplitPlan | None) -> set[str]:
    """Return the names of layers whose weights are read by others that do not call them."""
    attentions = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    names = {f"{name}.out_proj" for name in attentions}
    if split is not None:
        names |= {member.name for member in split.members if member.style.defers}
    return names


def _reason(name: str, module: Any, skip: Sequence[str], unread: Collection[str]) -> str:
    """Return why a layer keeps its products; "" if it does not."""
    pattern = next((pattern for pattern in skip if fnmatchcase(name, pattern)), None)
    if pattern is not None:
        return f"float8.skip or data_types.keep_in_fp32_modules has {pattern!r}"
    kind = linear_class(module)
    if kind is not None and (reason := own_computation(module, kind)):
        return reason
    return "its weight is read without a call" if name in unread else reason_to_skip(module.weight)


def _arithmetics(rowwise: bool, native: bool, group: Group) -> dict[str | None, Float8Products]:
    """Return the arithmetic of layers by the dim that ranks share."""
    over: Largest | None = partial(largest_over, group) if group.size > 1 else None
    return {
        None: Float8Products(rowwise, native),
        "outputs": Float8Products(rowwise, native, over_outputs=over),
        "inputs": Float8Products(rowwise, native, over_inputs=over),
    }


def _change(module: nn.Module, arithmetic: Float8Products) -> None:
    # One arithmetic and one function for all layers: torch's compiler would compile each block anew, and give up
    # after eight, if each had its own. Split layers have a forward that reads the attribute.
    change(module, **{ARITHMETIC: arithmetic})
    if "forward" not in vars(module):
        change(module, forward=MethodType(_forward, module))


def _forward(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    return multiply(input_of(args, kwargs), columns_of(module))


def largest_over(group: Group, vector: Tensor) -> Tensor:
    """Return the elementwise maximum of a 1-D tensor over the ranks of a group."""
    rows = vector.new_empty(group.size, len(vector))
    group.all_gather(rows.view(-1), vector, LARGEST_TAG).wait()
    return rows.amax(0)


def _tell(chosen: Sequence[str], reasons: Mapping[str, str], native: bool, mesh: Mesh) -> None:
    if mesh.rank != 0:
        return
    lines = "".join(f"\n  {name} stays as it is: {reason}" for name, reason in reasons.items())
    _log.info("%s: layers that compute in it: %d%s", "float8", len(chosen), lines)
    if not native:
        _log.warning(
            "%s: this device (%s) has no such products; they are emulated by products in fp32 of the same rounded "
            "numbers, which is slower than without",
            "float8",
            mesh.device,
        )
