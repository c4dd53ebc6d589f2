"""Hooks where the sequence becomes spread over the ranks, and whole again; see ``parallel/tensor/sequence.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.comm.collectives import Group
from zeromesh.parallel.follow.token_check import Following, TokenCheck
from zeromesh.parallel.tensor.operators import move
from zeromesh.parallel.tensor.random_streams import RandomStreams
from zeromesh.parallel.tensor.sequence import Stack
from zeromesh.parallel.tensor.split_guard import Apart
from zeromesh.parallel.tensor.split_plan import SplitPlan

Place = int | str  # of an argument: its number, or its name


def refuse(what: str, other: str = "") -> ValueError:
    """Return the error for a model, or an input, whose sequence cannot be spread; ``other`` is another remedy."""
    return ValueError(f"{what}; {other}set tensor_parallel.sequence to false")


def sequence_dim(x: Tensor) -> int:
    """Return the dim of the sequence in (samples, sequence, width), or in tokens of any order, (tokens, width)."""
    return 1 if x.ndim > 2 else 0


def spread(
    modules: dict[str, nn.Module],
    stack: Stack,
    group: Group,
    streams: RandomStreams,
    tag: int,
    eager: Callable[..., Callable[..., Any]],
    check: TokenCheck | None,
) -> None:
    """Spread the sequence over the ranks in a list of blocks; messages take four tags.

    ``eager`` is ``functools.partial`` for functions that torch's compiler cannot see through.
    """
    # The order of registration is that in which hooks run: random numbers are apart before anything of the block runs,
    # and joined after all of it.
    order = _Order(stack.blocks)
    last = modules[stack.blocks[-1]]
    for number, name in enumerate(stack.blocks):
        modules[name].register_forward_pre_hook(lambda module, _: streams.separate() if module.training else None)
        modules[name].register_forward_pre_hook(eager(order.enter, number), with_kwargs=True)
    change = eager(_change_input, name="split", group=group, tag=tag)
    modules[stack.blocks[0]].register_forward_pre_hook(change, with_kwargs=True)
    for name in stack.whole:
        joined_module = modules[name]
        also = set() if check is None else check.also_spread[name]
        gathers = eager(_change_input, name="join", group=group, tag=tag + 1, apart=Apart(name), also=also)
        joined_module.register_forward_pre_hook(gathers, with_kwargs=True)
        joined_module.register_forward_hook(eager(_change_output, name="split", group=group, tag=tag + 2))
    for number, name in enumerate(stack.blocks):
        modules[name].register_forward_hook(lambda *_: streams.join(), always_call=True)
        modules[name].register_forward_hook(eager(order.leave, number), with_kwargs=True)
    last.register_forward_hook(eager(_change_output, name="join", group=group, tag=tag + 3))
    modules[""].register_forward_hook(eager(order.finish), always_call=True)


def activation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the input of a block or an attention, the first tensor of a floating dtype. Raise ValueError otherwise."""
    tensor = kwargs.get("hidden_states")
    tensor = next((arg for arg in args if _is_floating(arg)), tensor)
    if isinstance(tensor, Tensor) and tensor.ndim > 3:
        raise refuse(f"a block was called with an activation of shape {tuple(tensor.shape)}, which is not a sequence")
    if not isinstance(tensor, Tensor) or tensor.ndim < 2:
        raise refuse(
            f"a block was called with {[type(arg).__name__ for arg in args]} and {sorted(kwargs)}, in which there is "
            "no activation whose sequence could be spread"
        )
    return tensor


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor) -> Any:
    """Return the arguments of a module with another tensor in place of one."""
    return tuple(new if arg is old else arg for arg in args), {k: new if v is old else v for k, v in kwargs.items()}


def _has_ids_only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a module inside a block is an embedding: it has the ids of all tokens, as no ids are spread."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return bool(tensors) and not any(map(_is_floating, tensors))


class _Order:
    """Check that blocks are called one after the other."""

    # The list of blocks itself is never called, and the code between blocks is the model's. So each block checks that
    # it is given what the one before it returned. Recomputation in the backward begins anywhere, and is left alone.

    def __init__(self, blocks: tuple[str, ...]) -> None:
        self._blocks = blocks
        self._last: Tensor | None = None
        self._before = -1
        self._apart = [Apart(name) for name in blocks]

    def enter(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook: a block is given what the one before it returned; the first one, anything."""
        if _recomputes():
            return
        name, x = self._blocks[number], activation(args, kwargs)
        if number == 0:
            self._last, self._before = None, -1
        elif self._last is None or number <= self._before:
            since = "before the first" if self._last is None else f"after {self._blocks[self._before]}"
            raise refuse(
                f"{name} was called {since}; the sequence can be spread only over the ranks of blocks that are called "
                "one after the other"
            )
        elif x.data_ptr() != self._last.data_ptr() or x.shape != self._last.shape:
            raise refuse(
                f"{name} was called with something else than what {self._blocks[self._before]} returned, which is a "
                f"part of the sequence: shape {tuple(x.shape)} after {tuple(self._last.shape)}"
            )

    def leave(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Hook: keep what the next block is to be given."""
        if _recomputes():
            return
        x = _first(output)
        self._apart[number].check(x, sequence_dim(x))
        self._last, self._before = (None if number == len(self._blocks) - 1 else x.detach()), number

    def finish(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the model, also where it raised: the sequence is whole again."""
        last, self._last = self._last, None
        if last is None or _recomputes():
            return
        name, raised = self._blocks[self._before], sys.exception()
        if raised is not None:
            raised.add_note(
                f"{name} had returned this rank's part of the sequence, of shape {tuple(last.shape)}; if that is the "
                "reason, set tensor_parallel.sequence to false"
            )
            return
        raise refuse(
            f"{name} was the last block to be called, but {self._blocks[-1]} is where the parts of the sequence are "
            "joined, so what followed had a part of it"
        )


def _recomputes() -> bool:
    return torch._C._current_graph_task_id() != -1  # autograd runs a backward on this thread


def check_of(model: nn.Module, resolved: SplitPlan, stacks: Sequence[Stack], ranks: int) -> TokenCheck:
    """Return a check that code in the blocks, where parts of sequences are, leaves tokens apart."""
    check = TokenCheck(model, ranks, False)
    for stack in stacks:
        for name in (*stack.whole, *filter(stack.spreads, resolved.heads)):
            check.replace(name, partial(_with_whole, check, name) if name in stack.whole else _opened, True)
        for member in resolved.members:
            if member.parameter is None and stack.spreads(member.name):
                if member.rule.style == "heads":
                    check.replace(member.name, partial(_with_whole, check, member.name), True)
                elif member.kind == "linear" and member.style.cut == "outputs":
                    check.replace(member.name, _opened)
                elif member.kind == "linear" and member.style.cut == "inputs":
                    check.replace(member.name, _closed)
        for name in stack.blocks:
            check.replace(name, _entered)
        check.replace(stack.blocks[-1], _last)
    return check


def _split(run: Any, x: Tensor) -> Tensor:
    dim = sequence_dim(x)
    part: Tensor = run.spread(x, dim, x.shape[dim], x.shape[dim] // run.parts)
    return part


def _of_first(output: Any, function: Callable[[Tensor], Any]) -> Any:
    result = function(_first(output))
    return result if isinstance(output, Tensor) else (result, *output[1:])


def _entered(run: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    x = activation(args, kwargs)
    if not run.is_spread(x):  # ``_Order`` tells of a block that is not called after the one before it
        args, kwargs = replaced(args, kwargs, x, _split(run, x))
    return forward(*args, **kwargs)


def _last(run: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _of_first(forward(*args, **kwargs), run.join)


def _with_whole(
    check: TokenCheck, name: str, run: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    also = check.also_spread[name]
    if not _has_ids_only(args, kwargs):
        x = activation(args, kwargs)
        for place, value in _named(args, kwargs).items():
            if isinstance(value, Tensor) and value is not x and run.is_spread(value) and not run.is_plain:
                also.add(place)
        for part in (x, *_at(also, args, kwargs)):
            args, kwargs = replaced(args, kwargs, part, run.join(part))
    with run.with_whole():
        output = forward(*args, **kwargs)
    return _of_first(output, lambda x: _split(run, x))


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    return {**dict(enumerate(args)), **kwargs}


def _at(places: Collection[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [value for place, value in _named(args, kwargs).items() if place in places and isinstance(value, Tensor)]


def _opened(run: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    x = activation(args, kwargs)
    args, kwargs = replaced(args, kwargs, x, run.join(x))
    with run.with_whole():
        return forward(*args, **kwargs)


def _closed(run: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _of_first(forward(*run.join(args), **kwargs), lambda x: _split(run, x))


class Followed:
    """Hooks of a model whose code, where parts of sequences are, is checked in each forward."""

    def __init__(self, check: TokenCheck) -> None:
        self._check, self._forward = check, ExitStack()

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that the code leaves tokens apart. Raise ValueError if not."""
        if not _recomputes():
            self._forward.enter_context(followed(self._check, args, kwargs))
            self._forward.enter_context(Following(self._check))

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Check it again if the forward took another way; the hook is always called."""
        self._forward.__exit__(*sys.exc_info())


def followed(check: TokenCheck, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
    """Return a context of a forward whose code is checked where parts of sequences are. It raises ValueError."""
    meta_args, meta_kwargs = check.without_memory((args, kwargs))
    return check.followed(_named(args, kwargs), lambda copied, _: copied(*meta_args, **meta_kwargs), refuse)


def _change_input(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    group: Group,
    tag: int,
    apart: Apart | None = None,
    also: Collection[Place] = (),
) -> Any:
    if name == "join" and _has_ids_only(args, kwargs):
        return None
    x = activation(args, kwargs)
    if apart is not None:
        apart.check(x, sequence_dim(x))
    length = x.shape[sequence_dim(x)]
    if name == "split" and length % group.size:
        near = [length // group.size * group.size, (length // group.size + 1) * group.size]
        raise refuse(
            f"tensor_parallel.sequence spreads sequences over {group.size} ranks, but one has {length} entries",
            f"pad it to {near[1]}{f' or cut it to {near[0]}' if near[0] else ''}, or ",
        )
    for part in (x, *_at(also, args, kwargs)):
        args, kwargs = replaced(args, kwargs, part, move(part, name, group, tag, sequence_dim(part)))
    return args, kwargs


def _change_output(module: nn.Module, args: Any, output: Any, name: str, group: Group, tag: int) -> Any:
    """Return the activation, the first of several outputs."""
    return _of_first(output, lambda x: move(x, name, group, tag, sequence_dim(x)))


def _first(output: Any) -> Tensor:
    """Return the activation of what a block returned."""
    several = hasattr(output, "to_tuple") or (isinstance(output, tuple | list) and output)
    first = output[0] if several else output
    if not isinstance(first, Tensor):
        raise refuse(
            f"a block returned {type(output).__name__}, where the activation whose sequence is spread must be all, or "
            "the first of a tuple"
        )
    return first
