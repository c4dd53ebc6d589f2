"""Splitting a model in place: forwards and hooks where activations enter and leave the parts that are split."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zeromesh.base.in_place import version
from zeromesh.base.linear_arithmetic import Columns, columns_of, input_of, is_transposed, multiply
from zeromesh.base.split import Held
from zeromesh.base.substitution import has_hooks
from zeromesh.comm.collectives import Group
from zeromesh.parallel.follow.activation_parts import LeavingParts, TakingParts, join_parts, replace_forward
from zeromesh.parallel.follow.split_activation import TensorAxis, unseen, whole
from zeromesh.parallel.follow.split_guard import Apart, SplitGuard, summed
from zeromesh.parallel.follow.spread import Followed, activation, replaced, sequence_dim, spread
from zeromesh.parallel.follow.token_check import TokenCheck
from zeromesh.parallel.head.linear_cross_entropy import Vocabulary, require_known
from zeromesh.parallel.head.logits import Logits, Using
from zeromesh.parallel.tensor.heads import first_number, take_part, take_part_of_experts
from zeromesh.parallel.tensor.operators import move
from zeromesh.parallel.tensor.random_streams import RandomStreams, drops
from zeromesh.parallel.tensor.sequence import Stack
from zeromesh.parallel.tensor.split_attention import SplitAttention
from zeromesh.parallel.tensor.split_linear import Layer, enter, leave
from zeromesh.parallel.tensor.tensor_plan import PLAIN_PARTS, Member, SplitPlan, why_hooked

FIRST_TAG = 16  # on the tensor axis; lower ones are for whole parameters and for gradients
BIAS_TAG = 15  # of tensors that are added to the scores of attention

BIASES = ("alibi", "position_bias")  # arguments of attention that are added to its scores, and differ per head
OF_SCORES = re.compile("mask|bias|alibi|relative_pos")  # parts of names of arguments that may differ per head


@dataclass(frozen=True)
class SplitPlace:
    """Arguments of ``apply`` that hooks need, and the random numbers of this rank."""

    group: Group
    streams: RandomStreams
    stacks: tuple[Stack, ...]
    using: Using

    def spreads(self, name: str) -> bool:
        """Return whether a module reads, or gives, a part of the sequence."""
        return any(stack.spreads(name) for stack in self.stacks)


def apply(
    model: nn.Module, resolved: SplitPlan, group: Group, device: torch.device, stacks: Sequence[Stack] = (),
    using: Using = nullcontext, blocks: Collection[str] = (), check: TokenCheck | None = None,
) -> None:  # fmt: skip
    """Make the modules of a plan work on what this rank holds of their parameters; these have been cut already.

    Activations are on ``device``; ``stacks`` are the lists of blocks in which the sequence is spread over the ranks;
    ``using`` returns a context in which parameters are in memory, also after the forward. No parts of activations leave
    the modules called ``blocks``, those of a pipeline. ``check`` is of the code in which the sequence is spread.
    """
    # A module stays the object that it was, as users and the engine hold it: split linear layers get another forward,
    # others get hooks.
    place = SplitPlace(group, RandomStreams(device, group.rank), tuple(stacks), using)
    modules = dict(model.named_modules(remove_duplicate=False))
    entrances: dict[str, Entrance] = {}
    done: set[int] = set()
    tag = FIRST_TAG
    for member in resolved.members:
        if member.style.before == "divide":
            _divide(member, group)
        if member.parameter is not None or id(member.module) in done:
            continue
        done.add(id(member.module))
        tag += 4
        if member.kind == "linear" and (member.style.cut or member.style.after == "sum_rotary"):
            _linear(member, resolved, modules, entrances, place, tag)
        elif member.rule.style == "heads":
            decoder, _, child = member.name.rpartition(".")
            memory = isinstance(modules[decoder], nn.TransformerDecoderLayer) and child == "multihead_attn"
            spreads = place.spreads(member.name)
            attention = SplitAttention(group, place.streams, tag, spreads, member.name, memory)
            replace_forward(member.module, _eager(attention, member.module))
            tag += SplitAttention.TAGS
        else:
            _hooks(member, resolved, place, tag)
    join_parts(resolved, modules, blocks, [name for stack in stacks for name in stack.whole])
    _require_slow_paths(resolved, modules)
    for module in model.modules():
        own_parts = {name: resolved.of_parameter.get(id(p)) for name, p in module.named_parameters(recurse=False)}
        parts = {name: part.whole for name, part in own_parts.items() if part is not None and part.split is not None}
        if parts:
            module.register_state_dict_pre_hook(partial(_require_whole, parts))
    if check is not None:
        hooks = Followed(check)
        check.install(model)
        model.register_forward_pre_hook(torch.compiler.disable(hooks.before), with_kwargs=True)
        model.register_forward_hook(torch.compiler.disable(hooks.after), always_call=True)
    for number, stack in enumerate(stacks):
        spread(modules, stack, group, place.streams, tag + 4 * (number + 1), _eager, check)
    for name, heads in resolved.heads.items():
        take_part(modules[name], heads, group.size)
        if place.spreads(name):
            hook = _eager(_open, entrances[f"{name}/None"])
            modules[name].register_forward_pre_hook(hook, with_kwargs=True)
        parameters = list(inspect.signature(type(modules[name]).forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        hook = _eager(_cut_arguments, names=names, queries=heads.queries, group=group)
        modules[name].register_forward_pre_hook(hook, with_kwargs=True)


def _require_whole(parts: dict[str, tuple[int, ...]], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse a state dict of parts, as a hook: a file of it could be read by nobody, which shows when it is needed."""
    for name, shape in parts.items():
        here = tuple(module.get_parameter(name).shape)
        if here != shape and not keep_vars:  # with keep_vars, the parameters themselves are asked for
            raise RuntimeError(
                f"state_dict() would have a part of {prefix}{name}: shape {here} of {shape}, as tensor-parallel ranks "
                "share it; call engine.save_16bit_model(folder) for what from_pretrained reads, engine.state_dict() "
                "for whole tensors, or gather them on all ranks with zeromesh.zero.GatheredParameters"
            )


class Entrance:
    """Entrance of an activation into the layers of one module that are split by columns."""

    # Which columns read the same activation is seen when they are called: all that are children of one module and are
    # given the very same tensor share one entry, so the gradient of that activation is summed once.

    def __init__(self, place: SplitPlace, tag: int, separates: bool, spread: bool, opens: bool, name: str) -> None:
        self.layers: list[Callable[[], Columns]] = []  # by number, this rank's part of each
        self.spread = spread
        # Random numbers drawn inside are each rank's own if it separates; it opens if the layers gather a spread
        # sequence themselves, and not the module around them.
        self._place, self._tag, self._separates, self._opens = place, tag, separates, opens
        self.ranks = place.group.size
        self._apart = Apart(name)
        self._key: tuple[Any, int] | None = None
        self._entered: Tensor | None = None
        self._columns: list[Columns] = []  # with which the layers of this pass were made
        self._ready: list[Layer] = []
        self._waiting: set[int] = set()

    def admit(self, x: Tensor, index: int, training: bool) -> tuple[Tensor, Layer | None]:
        """Return the activation that layer ``index`` reads, and the layer for this pass if gradients are computed."""
        if self._separates and training:
            self._place.streams.separate()
        # The same object that was written to since is another activation.
        same_activation = self._key is not None and self._key[0]() is x and self._key[1] == version(x)
        if not same_activation or index not in self._waiting:
            self._enter(x, self.spread and self._opens)
            self._key = ref(x), version(x)
        assert self._entered is not None
        # A weight that functional_call gives the layer for this call is another one.
        same = bool(self._ready) and self.layers[index]().weight is self._columns[index].weight
        entered, layer = self._entered, self._ready[index] if same else None
        self._waiting.discard(index)
        if not self._waiting:
            self.forget()
        return entered, layer

    def open(self, x: Tensor) -> Tensor:
        """Gather the activation of which this rank has a part, for the layers inside."""
        self._enter(x, True)
        assert self._entered is not None
        self._key = ref(self._entered), version(self._entered)
        return self._entered

    def _enter(self, x: Tensor, spread: bool) -> None:
        self._columns = columns = [columns() for columns in self.layers]
        dim = sequence_dim(x) if spread else None
        if dim is not None:
            self._apart.check(x, dim)
        self._entered, self._ready = enter(x, columns, self._place.group, self._tag, dim)
        self._waiting = set(range(len(self.layers)))

    def forget(self) -> None:
        """Forget the activation that entered last: no other layer is to read it."""
        self._key, self._entered, self._columns, self._ready, self._waiting = None, None, [], [], set()


def _cut_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], queries: int, group: Group
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return this rank's heads of a mask or a bias that differs per head."""
    # Such are (samples, heads, queries, keys), and ALiBi's slopes times distances, (samples x heads, 1, keys) or
    # without samples (Press et al., "Train Short, Test Long", 2022).

    def part(value: Tensor) -> Tensor:
        heads = value.chunk(group.size, 1)[group.rank]
        return move(value, "split", group, BIAS_TAG, 1) if value.requires_grad else heads

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 4 and value.shape[1] == queries and OF_SCORES.search(name):
            return part(value)
        if name in BIASES and value.ndim == 3 and value.shape[0] % queries == 0:
            return part(value.unflatten(0, (-1, queries))).flatten(0, 1)
        return value

    named = zip([*names, *[""] * len(args)], args, strict=False)
    return tuple(cut(*pair) for pair in named), {name: cut(name, value) for name, value in kwargs.items()}


def _eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return ``partial`` of a function, which torch's compiler leaves alone: it cannot see through messages."""
    # A closure would be copied without its arguments: hooks in a copy of a model must have that copy's modules.
    return partial(torch.compiler.disable(function), *args, **kwargs)


def _linear(
    member: Member, resolved: SplitPlan, modules: dict[str, nn.Module], entrances: dict[str, Entrance],
    place: SplitPlace, tag: int,
) -> None:  # fmt: skip
    module, style = member.module, member.style
    if style.before == "enter":
        key = f"{member.container}/{style.after and 'join'}"
        if key not in entrances:
            around = modules[member.container]
            spread = place.spreads(member.name)
            separates = style.after is None and not spread and drops(around)
            # An attention whose heads are split is opened by a hook: its own code must see the whole sequence, too.
            is_opened = member.container in resolved.heads and place.spreads(member.container)
            opens = style.after is not None or not is_opened
            entrances[key] = Entrance(place, tag, separates, spread, opens, member.container)
            around.register_forward_hook(_eager(_left, place, entrances[key]), always_call=True)
        entrance = entrances[key]
        index = len(entrance.layers)
        entrance.layers.append(partial(columns_of, module))
        split = resolved.held_of(module, "weight").split
        axis = TensorAxis(place.group, place.streams, tag + 2)
        leaves = None if style.after is None or split is None else LeavingParts(member, split, axis)
        forward: Any = _eager(_by_columns, module, name=member.name, entrance=entrance, index=index, leaves=leaves)
    elif style.after == "logits":
        split = resolved.held_of(module, "weight").split
        assert split is not None
        vocabulary = Vocabulary(split.intervals[place.group.rank][0][0], split.size, place.group)
        forward = _eager(_by_vocabulary, module, vocabulary=vocabulary, tag=tag, using=place.using)
    elif style.cut == "inputs":
        split = resolved.held_of(module, "weight").split if style.before else None
        axis = TensorAxis(place.group, place.streams, tag + 1)
        takes = None if split is None else TakingParts(member, split, axis)
        guard = None if style.before else SplitGuard(member, resolved, modules[""])
        spread = place.spreads(member.name)
        forward = _eager(
            _by_rows, module, name=member.name, place=place, tag=tag, takes=takes, spread=spread, guard=guard
        )
    else:
        width = _rotary_width(modules[member.container], modules[""])
        module.register_forward_hook(_eager(_sum_rotary, place=place, tag=tag, width=width))
        return
    replace_forward(module, partial(_with_part, forward, member, resolved.held_of(module, "weight").shape))


def _with_part(
    forward: Callable[..., Tensor], member: Member, shape: tuple[int, ...], /, *args: Tensor, **kwargs: Tensor
) -> Tensor:  # fmt: skip
    module: Any = member.module
    name, style = member.name, member.rule.style
    if style in PLAIN_PARTS and has_hooks(module):  # that were registered since the layer was split
        raise ValueError(why_hooked(name, style))
    weight_shape = tuple(module.weight.shape)
    if weight_shape != shape:
        raise ValueError(
            f"{name} computes with a weight of shape {weight_shape}, as functional_call gives it, but the layer is "
            f"split, and this rank's part has shape {shape}; in tensor_parallel.plan give it the style replicate"
        )
    return forward(*args, **kwargs)


def _require_slow_paths(resolved: SplitPlan, modules: dict[str, nn.Module]) -> None:
    """Disable the fast path of torch's encoders, which reads the weights of their layers without calling them."""
    for member in resolved.members:
        path = member.name
        while path:
            path = path.rpartition(".")[0]
            around: Any = modules[path]
            if isinstance(around, nn.TransformerEncoderLayer):
                around.activation_relu_or_gelu = 0
            elif isinstance(around, nn.TransformerEncoder):
                around.use_nested_tensor = False


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


def chunk_losses(model: nn.Module, heads: Iterable[str], using: Using) -> None:
    """Compute losses of these heads' logits a chunk of tokens at a time; a rank has whole heads, or none of one."""
    for name in heads:
        module: Any = model.get_submodule(name)
        if "weight" not in module._parameters:  # another pipeline stage has it
            continue
        size = int(module.weight.shape[1 if is_transposed(module) else 0])
        forward = _eager(_by_vocabulary, module, vocabulary=Vocabulary(0, size), tag=0, using=using)
        replace_forward(module, forward)


def _by_rows(
    module: Any, *args: Tensor, name: str, place: SplitPlace, tag: int, takes: TakingParts | None, spread: bool,
    guard: SplitGuard | None, **kwargs: Tensor,
) -> Tensor:  # fmt: skip
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


def _open(entrance: Entrance, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = activation(args, kwargs)
    return replaced(args, kwargs, x, entrance.open(x))


def _rotary_width(attention: nn.Module, model: nn.Module) -> int:
    said = [attention, getattr(attention, "config", None), getattr(model, "config", None)]
    if width := first_number(said, ("qk_rope_head_dim",)):
        return width
    raise ValueError(
        f"{type(attention).__name__} has no qk_rope_head_dim, by which the style mla_kv_a_proj finds the part for "
        "rotary embeddings"
    )


def _sum_rotary(module: nn.Module, args: Any, output: Tensor, place: SplitPlace, tag: int, width: int) -> Tensor:
    """Sum, as a hook, the gradient of a latent key's rotary part, which all heads share ("DeepSeek-V2", 2024)."""
    latent, rotary = output.split([output.shape[-1] - width, width], dim=-1)
    return summed(torch.cat([latent, move(rotary, "copy", place.group, tag)], dim=-1))


def _hooks(member: Member, resolved: SplitPlan, place: SplitPlace, tag: int) -> None:
    module, style, group = member.module, member.style, place.group
    if style.before == "mask":
        part = resolved.held_of(module, "weight")
        # Inside of the user's hooks, which get the ids and rows of the whole vocabulary.
        replace_forward(module, partial(_Lookup(module, part, place, tag), module.forward))
        return
    if member.kind == "bag" or style.before == "copy":
        module.register_forward_pre_hook(_eager(_copy_inputs, group=group, tag=tag), with_kwargs=True)
    elif style.before == "split":
        module.register_forward_pre_hook(lambda _, args: (move(args[0], "split", group, tag, -1), *args[1:]))
    elif style.before == "share":
        module.register_forward_pre_hook(lambda _, args: (args[0] / group.size, *args[1:]))
    if member.rule.style == "moe_tp_experts":
        take_part_of_experts(module, group.size)
    if style.after == "sum":
        module.register_forward_hook(lambda _, args, output: move(output, "sum", group, tag + 2))
    elif style.after == "join":
        module.register_forward_hook(lambda _, args, output: move(output, "join", group, tag + 2, -1))


def _divide(member: Member, group: Group) -> None:
    """Divide a parameter, which each rank adds to its part of a sum, by the ranks while the module around it runs."""
    name = str(member.parameter)

    def before(module: nn.Module, args: Any) -> None:
        vars(module)[name] = module._parameters[name] / group.size  # type: ignore[operator]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(name, None)

    member.module.register_forward_pre_hook(before)
    member.module.register_forward_hook(after, always_call=True)


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
