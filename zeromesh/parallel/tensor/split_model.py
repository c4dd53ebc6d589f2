"""Splitting a model in place: forwards and hooks where activations enter and leave the parts that are split."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.linear_arithmetic import is_transposed
from zeromesh.base.model_names import BIASES, OF_SCORES
from zeromesh.base.substitution import code_inside, computes_as, is_known, reads_weights
from zeromesh.comm.collectives import Group
from zeromesh.parallel.follow.activation_parts import join_parts, replace_forward
from zeromesh.parallel.follow.token_check import TokenCheck
from zeromesh.parallel.head.linear_cross_entropy import Vocabulary
from zeromesh.parallel.head.logits import Using
from zeromesh.parallel.tensor.heads import take_part
from zeromesh.parallel.tensor.operators import move
from zeromesh.parallel.tensor.random_streams import RandomStreams
from zeromesh.parallel.tensor.sequence import Stack
from zeromesh.parallel.tensor.split_linear import Entrance, SplitPlace
from zeromesh.parallel.tensor.split_plan import SplitPlan
from zeromesh.parallel.tensor.spread_sequence import Followed, activation, replaced, spread
from zeromesh.parallel.tensor.styles import Splitting, by_vocabulary, eager

BIAS_TAG = 15  # of tensors that are added to the scores of attention


def apply(
    model: nn.Module,
    resolved: SplitPlan,
    group: Group,
    device: torch.device,
    stacks: Sequence[Stack] = (),
    using: Using = nullcontext,
    blocks: Collection[str] = (),
    check: TokenCheck | None = None,
) -> None:
    """Make the modules of a plan work on what this rank holds of their parameters; these have been cut already.

    Activations are on ``device``; ``stacks`` are the lists of blocks in which the sequence is spread over the ranks;
    ``using`` returns a context in which parameters are in memory, also after the forward. No parts of activations leave
    the modules called ``blocks``, those of a pipeline. ``check`` is of the code in which the sequence is spread.
    """
    # A module stays the object that it was, as users and the engine hold it: split linear layers get another forward,
    # others get hooks.
    place = SplitPlace(group, RandomStreams(device, group.rank), tuple(stacks), using)
    modules = dict(model.named_modules(remove_duplicate=False))
    splitting = Splitting(place, resolved, modules)
    done: set[int] = set()
    for member in resolved.members:
        if member.parameter is None:
            if id(member.module) in done:
                continue
            done.add(id(member.module))
            splitting.tag += 4
        for step in member.style.steps:
            step(member, splitting)
    split = {member.name: member.module for member in resolved.members if member.style.plain}
    for name in {name.rpartition(".")[0] for name in split}:
        around = modules[name]
        known = is_known(around) or computes_as(around, nn.Sequential)  # others' code is followed
        code = code_inside(around, {*split.values()}) if known else None
        around.register_forward_pre_hook(partial(_require_same_code, name, split, code))
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
        spread(modules, stack, group, place.streams, splitting.tag + 4 * (number + 1), eager, check)
    for name, heads in resolved.heads.items():
        take_part(modules[name], heads, group.size)
        if place.spreads(name):
            hook = eager(_open, splitting.entrances[name, True])
            modules[name].register_forward_pre_hook(hook, with_kwargs=True)
        parameters = list(inspect.signature(type(modules[name]).forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        hook = eager(_cut_arguments, names=names, queries=heads.queries, group=group)
        modules[name].register_forward_pre_hook(hook, with_kwargs=True)


def _require_same_code(
    name: str, split: Mapping[str, nn.Module], code: list[Any] | None, module: nn.Module, args: Any
) -> None:
    """Refuse parts of activations in a user's code that is newer than the plan, and parts of weights in hooks."""
    where = f"{name or 'the model'} ({type(module).__name__})"
    if reads_weights(module, [layer.rpartition(".")[2] for layer in split]):
        raise ValueError(
            f"a hook of {where} reads weights of its layers, of which this rank has a part; read them in "
            "zeromesh.zero.GatheredParameters between steps, or give the layers the style replicate in "
            "tensor_parallel.plan"
        )
    now = None if code is None else code_inside(module, {*split.values()})
    if code and now and (len(now) != len(code) or any(map(is_not, now, code))):
        raise ValueError(
            f"modules, functions or hooks inside of {where} have changed since its layers were split, and would be "
            "given this rank's part of an activation; change them before zeromesh.initialize, or register hooks on the "
            "module itself"
        )


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


def chunk_losses(model: nn.Module, heads: Iterable[str], using: Using) -> None:
    """Compute losses of these heads' logits a chunk of tokens at a time; a rank has whole heads, or none of one."""
    for name in heads:
        module: Any = model.get_submodule(name)
        if "weight" not in module._parameters:  # another pipeline stage has it
            continue
        size = int(module.weight.shape[1 if is_transposed(module) else 0])
        replace_forward(module, by_vocabulary(module, Vocabulary(0, size), 0, using))


def _open(entrance: Entrance, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = activation(args, kwargs)
    return replaced(args, kwargs, x, entrance.open(x))
