"""Placement of a mixture's experts over the ranks that share them.

``forms.find_experts`` finds them while the model is whole, ``holdings`` says what a rank keeps of their parameters, and
``apply`` lets the modules that compute with them send tokens to the ranks that have their experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.base.in_place import version
from zeromesh.base.split import Held
from zeromesh.comm.mesh import Mesh
from zeromesh.parallel.activation.choices import add_router, keep_choices
from zeromesh.parallel.expert.adapted import take_part
from zeromesh.parallel.expert.contract import Contract
from zeromesh.parallel.expert.dispatch import RowExchange
from zeromesh.parallel.expert.forms import Experts
from zeromesh.parallel.expert.lists import share_listed
from zeromesh.parallel.expert.routed import RoutedExperts
from zeromesh.parallel.expert.stacked import ExpertSharing, share_sorted, share_stacked
from zeromesh.parallel.follow.activation_parts import replace_forward
from zeromesh.parallel.tensor.random_streams import RandomStreams, drops

FIRST_TAG = 1 << 14  # of the messages of experts, behind those of flat buffers


def holdings(mesh: Mesh, experts: Sequence[Experts]) -> dict[str, Held]:
    """Return what this rank holds of the parameters of experts, by name."""
    group, tensor = mesh.group("expert"), mesh.group("tensor")
    parts: dict[str, Held] = {}
    for item in experts:
        for name, parameter in item.module.named_parameters(prefix=item.name):
            shape, split = tuple(parameter.shape), item.splits.get(name)
            if split is not None:
                parts[name] = Held(shape, split, group.rank, group.size, axis="expert")
            elif tensor.size > 1:
                # Used for any expert's rows, of which each rank of the tensor axis has others.
                parts[name] = Held(shape, None, tensor.rank, tensor.size, partial=True)
    return parts


def apply(model: nn.Module, mesh: Mesh, experts: Sequence[Experts]) -> None:
    """Let modules with experts compute over the ranks that share these; their parameters have been cut already."""
    lines = mesh.group("tensor") if mesh.group("tensor").size > 1 else None
    for number, item in enumerate(experts):
        tag = FIRST_TAG + number * (RowExchange.TAGS + RoutedExperts.TAGS)
        exchange = RowExchange(mesh.group("expert"), tag, item.name)
        for (inner, attribute), value in item.sizes.items():
            setattr(item.module.get_submodule(inner), attribute, value)
        take_part(item.module, mesh.group("expert").rank, mesh.group("expert").size)
        for module in item.module.children() if item.contract is Contract.LISTED else [item.module]:
            if _buffers(module):
                replace_forward(module, partial(_keep_buffers, module.forward, module, item.name))
        draws = lines is not None and drops(item.module)
        streams = RandomStreams(mesh.device, mesh.group("tensor").rank) if draws else None
        sharing = ExpertSharing(exchange, item.count, lines, tag + RowExchange.TAGS, streams)
        SHARES[item.contract](model, item, sharing)
        add_router(item.module)
    keep_choices(model)


def _buffers(module: nn.Module) -> dict[tuple[str, str], torch.Tensor | None]:
    """Return the buffers that belong to the state of a module, by the paths of modules and their own names."""
    return {
        (path, name): buffer
        for path, inner in module.named_modules()
        for name, buffer in inner._buffers.items()
        if name not in inner._non_persistent_buffers_set
    }


def _keep_buffers(forward: Callable[..., Any], module: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Forward of experts; RuntimeError if it changes a buffer, of which ranks would have different values."""
    before = {place: (b, version(b)) for place, b in _buffers(module).items() if b is not None}
    output = forward(*args, **kwargs)
    for place, buffer in _buffers(module).items():
        then, count = before.get(place, (None, 0))
        if buffer is not None and (buffer is not then or version(buffer) != count):
            raise RuntimeError(
                f"{name}: experts change their buffer {place[1]}, of which each rank would have other values; let the "
                "module around the experts have it, or set mesh.expert to 1"
            )
    return output


def _share_routed(model: nn.Module, item: Experts, sharing: ExpertSharing) -> None:
    shared = RoutedExperts(
        item.module, sharing.exchange, item.count, item.beyond, sharing.lines, sharing.tag, item.choices
    )
    # A partial function, which a copy of the model copies with all that it has.
    replace_forward(item.module, partial(torch.compiler.disable(_routed), shared, sharing.streams))


def _routed(shared: RoutedExperts, streams: RandomStreams | None, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    with nullcontext() if streams is None else streams.apart():
        return shared(*args, **kwargs)


SHARES: dict[Contract, Callable[[nn.Module, Experts, ExpertSharing], None]] = {
    Contract.ROUTED: _share_routed,
    Contract.SORTED: lambda model, item, sharing: share_sorted(item.module, sharing),
    Contract.STACKED: lambda model, item, sharing: share_stacked(item.module, sharing),
    Contract.LISTED: lambda model, item, sharing: share_listed(
        model.get_submodule(item.caller), item.module, sharing, item.mixes
    ),
}
"""Functions that let experts of each contract compute for all ranks."""
