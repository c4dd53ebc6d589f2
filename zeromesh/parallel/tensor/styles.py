"""Ways in which a module can be split over the tensor axis: one table, whose rows say all that a style does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.linear_arithmetic import columns_of, input_of, is_transposed, multiply
from zeromesh.base.model_names import ROTARY_WIDTH
from zeromesh.base.split import Held, Split
from zeromesh.base.substitution import has_hooks
from zeromesh.comm.collectives import Group
from zeromesh.parallel.follow.activation_parts import LeavingParts, TakingParts, replace_forward
from zeromesh.parallel.follow.split_activation import TensorAxis, unseen, whole
from zeromesh.parallel.head.linear_cross_entropy import Vocabulary, require_known
from zeromesh.parallel.head.logits import Logits, Using
from zeromesh.parallel.tensor.heads import first_number, take_part_of_experts
from zeromesh.parallel.tensor.operators import move
from zeromesh.parallel.tensor.random_streams import drops
from zeromesh.parallel.tensor.split_attention import SplitAttention
from zeromesh.parallel.tensor.split_guard import SplitGuard, summed
from zeromesh.parallel.tensor.split_linear import Entrance, SplitPlace, leave
from zeromesh.parallel.tensor.split_plan import (
    Member,
    SplitPlan,
    Step,
    Style,
    hold_cut,
    hold_heads,
    hold_shares,
    why_hooked,
)
from zeromesh.parallel.tensor.spread_sequence import sequence_dim

FIRST_TAG = 16  # on the tensor axis; lower ones are for whole parameters and for gradients


@dataclass
class Splitting:
    """A model that is being split: what the steps of styles need beside the member."""

    place: SplitPlace
    resolved: SplitPlan
    modules: dict[str, nn.Module]  # by name; several names may be of one module
    # By name of the module around, and whether the layers give plain parts.
    entrances: dict[tuple[str, bool], Entrance] = field(default_factory=dict)
    tag: int = FIRST_TAG  # of the member's messages, and the three after it

    def split_of(self, member: Member) -> Split | None:
        """Return how a member's weight is cut."""
        return self.resolved.held_of(member.module, "weight").split

    def run(self, member: Member, forward: Any) -> None:
        """Replace the forward of a layer, of whose weight this rank has a part."""
        shape = self.resolved.held_of(member.module, "weight").shape
        replace_forward(member.module, partial(_with_part, forward, member, shape))


def eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return ``partial`` of a function, which torch's compiler leaves alone: it cannot see through messages."""
    # A closure would be copied without its arguments: hooks in a copy of a model must have that copy's modules.
    return partial(torch.compiler.disable(function), *args, **kwargs)


def split_columns(member: Member, splitting: Splitting) -> None:
    """Let a linear layer compute this rank's part of its outputs."""
    if member.kind != "linear":
        return
    module, style, place, tag = member.module, member.style, splitting.place, splitting.tag
    key = member.container, style.plain
    if key not in splitting.entrances:
        around = splitting.modules[member.container]
        spread = place.spreads(member.name)
        separates = style.plain and not spread and drops(around)
        # An attention whose heads are split is opened by a hook: its own code must see the whole sequence, too.
        is_opened = member.container in splitting.resolved.heads and place.spreads(member.container)
        opens = not style.plain or not is_opened
        splitting.entrances[key] = Entrance(place, tag, separates, spread, opens, member.container)
        around.register_forward_hook(eager(_left, place, splitting.entrances[key]), always_call=True)
    entrance = splitting.entrances[key]
    index = len(entrance.layers)
    entrance.layers.append(partial(columns_of, module))
    split = splitting.split_of(member)
    axis = TensorAxis(place.group, tag + 2, place.streams)
    leaves = None if style.plain or split is None else LeavingParts(member, split, axis)
    splitting.run(member, eager(_by_columns, module, name=member.name, entrance=entrance, index=index, leaves=leaves))


def split_rows(member: Member, splitting: Splitting) -> None:
    """Let a linear layer sum the products of the parts of its inputs, which each rank has or takes."""
    if member.kind != "linear":
        return
    module, place, tag = member.module, splitting.place, splitting.tag
    split = None if member.style.plain else splitting.split_of(member)
    takes = None if split is None else TakingParts(member, split, TensorAxis(place.group, tag + 1, place.streams))
    guard = SplitGuard(member, splitting.resolved, splitting.modules[""]) if member.style.plain else None
    forward = eager(
        _by_rows,
        module,
        name=member.name,
        place=place,
        tag=tag,
        takes=takes,
        spread=place.spreads(member.name),
        guard=guard,
    )
    splitting.run(member, forward)


def split_vocabulary(member: Member, splitting: Splitting) -> None:
    """Let a head return logits that a loss computes in parts."""
    split, place = splitting.split_of(member), splitting.place
    assert split is not None
    vocabulary = Vocabulary(split.intervals[place.group.rank][0][0], split.size, place.group)
    splitting.run(member, by_vocabulary(member.module, vocabulary, splitting.tag, place.using))


def by_vocabulary(module: nn.Module, vocabulary: Vocabulary, tag: int, using: Using) -> Callable[..., Any]:
    """Return the forward of a head whose logits a loss computes in parts."""
    return eager(_by_vocabulary, module, vocabulary=vocabulary, tag=tag, using=using)


def split_heads(member: Member, splitting: Splitting) -> None:
    """Let torch's attention compute this rank's heads."""
    decoder, _, child = member.name.rpartition(".")
    memory = isinstance(splitting.modules[decoder], nn.TransformerDecoderLayer) and child == "multihead_attn"
    place, spreads = splitting.place, splitting.place.spreads(member.name)
    attention = SplitAttention(place.group, place.streams, splitting.tag, spreads, member.name, memory)
    replace_forward(member.module, eager(attention, member.module))
    splitting.tag += SplitAttention.TAGS


def sum_rotary(member: Member, splitting: Splitting) -> None:
    """Sum the gradient of the part of a latent key that all heads share."""
    width = _rotary_width(splitting.modules[member.container], splitting.modules[""])
    hook = eager(_sum_rotary, place=splitting.place, tag=splitting.tag, width=width)
    member.module.register_forward_hook(hook)


def look_up(member: Member, splitting: Splitting) -> None:
    """Let an embedding look up this rank's rows."""
    module, part = member.module, splitting.resolved.held_of(member.module, "weight")
    # Inside of the user's hooks, which get the ids and rows of the whole vocabulary.
    lookup = _Lookup(module, part, splitting.place, splitting.tag)
    replace_forward(module, eager(lookup.__call__, module.forward))


def copy_inputs(member: Member, splitting: Splitting) -> None:
    """Sum the gradients of the inputs and result weights of experts, or of the weights of a bag's samples."""
    if member.kind != "embedding":
        hook = eager(_copy_inputs, group=splitting.place.group, tag=splitting.tag)
        member.module.register_forward_pre_hook(hook, with_kwargs=True)


def split_input(member: Member, splitting: Splitting) -> None:
    """Give the module this rank's part of the last dim of its first input."""
    group, tag = splitting.place.group, splitting.tag
    member.module.register_forward_pre_hook(lambda _, args: (move(args[0], "split", group, tag, -1), *args[1:]))


def share_input(member: Member, splitting: Splitting) -> None:
    """Divide the first input by the number of ranks."""
    size = splitting.place.group.size
    member.module.register_forward_pre_hook(lambda _, args: (args[0] / size, *args[1:]))


def count_experts(member: Member, splitting: Splitting) -> None:
    """Let experts count the rows that this rank has of each."""
    take_part_of_experts(member.module, splitting.place.group.size)


def output(operator: str, dim: int = 0) -> Step:
    """Return a step that applies an operator of ``CONJUGATES`` to the outputs."""

    def change_output(member: Member, splitting: Splitting) -> None:
        group, tag = splitting.place.group, splitting.tag + 2
        member.module.register_forward_hook(lambda _, args, output: move(output, operator, group, tag, dim))

    return change_output


def divide_parameter(member: Member, splitting: Splitting) -> None:
    """Divide a parameter, which each rank adds to its part of a sum, by the ranks while the module around it runs."""
    name, size = str(member.parameter), splitting.place.group.size

    def before(module: nn.Module, args: Any) -> None:
        vars(module)[name] = module._parameters[name] / size  # type: ignore[operator]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(name, None)

    member.module.register_forward_pre_hook(before)
    member.module.register_forward_hook(after, always_call=True)


def _with_part(
    forward: Callable[..., Tensor], member: Member, shape: tuple[int, ...], /, *args: Tensor, **kwargs: Tensor
) -> Tensor:
    module: Any = member.module
    name, style = member.name, member.rule.style
    if member.style.plain and has_hooks(module):  # that were registered since the layer was split
        raise ValueError(why_hooked(name, style))
    weight_shape = tuple(module.weight.shape)
    if weight_shape != shape:
        raise ValueError(
            f"{name} computes with a weight of shape {weight_shape}, as functional_call gives it, but the layer is "
            f"split, and this rank's part has shape {shape}; in tensor_parallel.plan give it the style replicate"
        )
    return forward(*args, **kwargs)


def _require_width(name: str, module: Any, x: Tensor, ranks_of_sequence: int = 1) -> None:
    width = module.weight.shape[0 if is_transposed(module) else 1]
    if x.shape[-1] * ranks_of_sequence == width and ranks_of_sequence > 1:
        raise ValueError(
            f"{name} reads {width} entries and was given {x.shape[-1]}, as if they were tokens, of which a rank has a "
            "part there; set tensor_parallel.sequence to false"
        )
    if x.shape[-1] != width:
        raise ValueError(
            f"{name} ({type(module).__name__}), which tensor_parallel.plan splits, has {width} entries of its input on "
            f"this rank, but was given {x.shape[-1]}; after colwise comes rowwise, with nothing between that needs all "
            "entries; else give the layer before the style colwise_gather_output, or one of both replicate"
        )


def _by_columns(
    module: Any, *args: Tensor, name: str, entrance: Entrance, index: int, leaves: LeavingParts | None, **kwargs: Tensor
) -> Tensor:
    x = whole(input_of(args, kwargs))
    with unseen():
        _require_width(name, module, x, entrance.ranks if entrance.spread else 1)
        x, layer = entrance.admit(x, index, module.training)
        y = multiply(x, columns_of(module)) if layer is None else layer(x)
    # A hook of the user's may look at the output on some ranks only, and so must find it whole.
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return y if leaves is None else leaves(y, at_once=bool(hooks))


def _by_vocabulary(
    module: Any, *args: Tensor, vocabulary: Vocabulary, tag: int, using: Using, **kwargs: Tensor
) -> Tensor:
    x = whole(input_of(args, kwargs))
    return Logits(x, module.weight, module.bias, vocabulary, tag, using)


def _by_rows(
    module: Any,
    *args: Tensor,
    name: str,
    place: SplitPlace,
    tag: int,
    takes: TakingParts | None,
    spread: bool,
    guard: SplitGuard | None,
    **kwargs: Tensor,
) -> Tensor:
    x = input_of(args, kwargs)
    if guard is not None:
        guard.check(x)
    if takes is not None:
        x = takes(x)
    with unseen():
        _require_width(name, module, x)
        y = multiply(x, replace(columns_of(module), bias=None))
        if not spread:
            place.streams.join()
        return leave(y, module.bias, place.group, tag, sequence_dim(y) if spread else None)


def _left(place: SplitPlace, entrance: Entrance, module: nn.Module, args: Any, output: Any) -> None:
    """Forget the activation, as a hook of the module that has the columns; it has returned or raised."""
    entrance.forget()
    if not entrance.spread:
        place.streams.join()


def _rotary_width(attention: nn.Module, model: nn.Module) -> int:
    said = [attention, getattr(attention, "config", None), getattr(model, "config", None)]
    if width := first_number(said, (ROTARY_WIDTH,)):
        return width
    raise ValueError(
        f"{type(attention).__name__} has no qk_rope_head_dim, by which the style mla_kv_a_proj finds the part for "
        "rotary embeddings"
    )


def _sum_rotary(module: nn.Module, args: Any, output: Tensor, place: SplitPlace, tag: int, width: int) -> Tensor:
    """Sum, as a hook, the gradient of a latent key's rotary part, which all heads share ("DeepSeek-V2", 2024)."""
    latent, rotary = output.split([output.shape[-1] - width, width], dim=-1)
    return summed(torch.cat([latent, move(rotary, "copy", place.group, tag)], dim=-1))


def _copy_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], group: Group, tag: int) -> Any:
    """Sum the gradients of the experts' inputs and result weights, of which each rank has a share."""

    def copy(number: int, value: Any) -> Any:
        shared = isinstance(value, Tensor) and value.requires_grad
        return move(value, "copy", group, tag + number % 2) if shared else value

    copied = [copy(number, value) for number, value in enumerate((*args, *kwargs.values()))]
    return tuple(copied[: len(args)]), dict(zip(kwargs, copied[len(args) :], strict=True))


class _Lookup:
    """Embedding of which each rank has some rows: it looks up its own, and the sum with others' zeros is whole."""

    def __init__(self, module: nn.Module, part: Held, place: SplitPlace, tag: int) -> None:
        assert part.split is not None
        self._place, self._tag = place, tag
        self._size = part.split.size
        (self._start, self._stop) = part.split.intervals[place.group.rank][0]
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            inside = self._start <= padding < self._stop
            module.padding_idx = padding - self._start if inside else None  # type: ignore[assignment]

    def __call__(self, forward: Callable[..., Tensor], /, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the rows of all ranks, from ids of the whole vocabulary."""
        ids = input_of(args, kwargs)
        require_known(ids, (ids < 0) | (ids >= self._size), self._size, "id")
        missing = (ids < self._start) | (ids >= self._stop)
        rows = forward((ids - self._start).masked_fill(missing, 0))
        return move(rows.masked_fill(missing[..., None], 0), "sum", self._place.group, self._tag)


LINEAR = ("linear", "parameter")
ANY = ("linear", "embedding", "bag", "attention", "parameter", "module")
_columns = partial(Style, hold_cut, (split_columns,), "outputs")
_rows = partial(Style, hold_cut, (split_rows,), "inputs")
_experts = partial(Style, kinds=("module",), whole_sequence=True)

# Names are those of transformers' base_model_tp_plan, and mean the same, so that published plans can be read. Ours are
# colwise_parts and rowwise_parts, right whatever is between them; vocabulary, of a head; heads, of torch's own
# attention; shared_experts, for what calls experts that the ranks of the expert axis share; moe_shared_bias, for what
# experts add after the layer split by rows; and moe_colwise to moe_rowwise_split_input, of modules that hold one layer
# of all experts.
STYLES: Mapping[str, Style] = {
    "colwise": _columns(plain=True, kinds=("linear", "embedding", "parameter")),
    "rowwise": _rows(plain=True, kinds=LINEAR),
    "packed_colwise": _columns(sections=2, plain=True, kinds=LINEAR),
    "packed_rowwise": _rows(sections=2, plain=True, kinds=LINEAR),
    "colwise_gather_output": _columns(padded=True, gathers=True, whole_sequence=True),
    "rowwise_split_input": _rows(padded=True, gathers=True, whole_sequence=True),
    "colwise_parts": _columns(padded=True, follows=True, whole_sequence=True),
    "rowwise_parts": _rows(padded=True, follows=True, whole_sequence=True),
    "embedding_rowwise": Style(hold_cut, (look_up,), "rows", padded=True, whole_sequence=True, kinds=("embedding",)),
    "embedding_colwise": Style(
        hold_cut,
        (copy_inputs, output("join", -1)),
        "width",
        gathers=True,
        whole_sequence=True,
        kinds=("embedding", "bag"),
    ),
    "heads": Style(hold_heads, (split_heads,), kinds=("attention",)),
    "vocabulary": Style(hold_cut, (split_vocabulary,), "outputs", padded=True, defers=True, whole_sequence=True),
    "replicated_with_grad_allreduce": Style(hold_shares, kinds=ANY),
    "mla_kv_a_proj": Style(steps=(sum_rotary,), whole_sequence=True),
    "moe_tp_experts": _experts(steps=(copy_inputs, count_experts, output("sum"))),
    "moe_colwise": _experts(steps=(copy_inputs,)),
    "moe_rowwise": _experts(steps=(output("sum"),)),
    "moe_colwise_gather_output": _experts(steps=(copy_inputs, output("join", -1))),
    "moe_rowwise_split_input": _experts(steps=(split_input, output("sum"))),
    "moe_identity_expert": _experts(steps=(share_input,)),
    "moe_shared_bias": Style(hold_shares, (divide_parameter,), kinds=("parameter",)),
    "shared_experts": _experts(),
    "all_reduce": _experts(steps=(copy_inputs, output("sum"))),
    "local_params": Style(kinds=ANY),
    "replicate": Style(kinds=ANY),
}

# Names of styles in older versions of transformers.
OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
