"""Preparation of the optimizer, the schedule, the data and the monitors, while the model is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.comm.mesh import Mesh
from zeromesh.initialization.checks import check_scheduler, makes_scheduler
from zeromesh.initialization.plan import Plan
from zeromesh.model.piece import Piece
from zeromesh.model.split import Held
from zeromesh.observe.monitors import Monitor, open_monitor
from zeromesh.observe.observer import Observer
from zeromesh.observe.profile import FlopsPlan
from zeromesh.observe.spans import collective
from zeromesh.observe.trace import Window
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved
    from zeromesh.model.piece import PieceExchange
    from zeromesh.training_data import Loader


BREAKDOWN_EVERY = 10
"""Updates between breakdowns where ``steps_per_print`` does not say."""

ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "tensorboard": lambda chosen: (Path(chosen.output_path) / chosen.job_name,),
    "csv_monitor": lambda chosen: (Path(chosen.output_path) / chosen.job_name,),
    "wandb": lambda chosen: (chosen.group, chosen.team, chosen.project),
}
"""Arguments of each monitor's writer, by the name of its section."""


def parameter_groups(model: nn.Module, given: Iterable[Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the groups that the configuration's optimizer will update, as lists of the model's parameters."""
    members = list(given) if given is not None else [p for p in model.parameters() if p.requires_grad]
    if not members:
        raise ValueError("model_parameters is empty; leave it out to train all trainable parameters")
    groups: list[Any] = members if isinstance(members[0], Mapping) else [{"params": members}]
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(groups):
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        parameters = [p[1] if isinstance(p, tuple) else p for p in parameters]
        if any(id(parameter) not in known for parameter in parameters):
            raise ValueError(f"model_parameters, group {number}: holds a parameter that is not the model's")
        yield {**group, "params": parameters}


def user_optimizer(plan: Plan, owned: Sequence[dict[str, Any]]) -> Optimizer | None:
    """Return the user's optimizer, made by the user's function if one was passed; None if there is none.

    Raises:
        ValueError: it is no optimizer, or cannot update pieces of the model's parameters.
    """
    from zeromesh.optim import factory

    user = plan.arguments.optimizer
    if user is None:
        return None
    if not isinstance(user, Optimizer):
        if not callable(user) or isinstance(user, nn.Module):
            kind = type(user).__name__
            raise ValueError(f"optimizer is a {kind}; pass a torch optimizer, or a function that makes one")
        user = user([dict(group) for group in owned] if len(owned) > 1 else list(owned[0]["params"]))
        if not isinstance(user, Optimizer):
            kind = type(user).__name__
            raise ValueError(f"the function passed as optimizer returned a {kind}, not a torch optimizer")
    trained = {parameter for parameter in plan.model.parameters() if parameter.requires_grad}
    factory.check_users(user, trained, plan.cuts_parameters, plan.settings.zero_allow_untested_optimizer)
    return user


def build_optimizer(
    plan: Plan, owned: Sequence[dict[str, Any]], pieces: Mapping[int, Piece | None], exchange: PieceExchange
) -> Optimizer | None:
    """Build the configuration's optimizer; ``pieces`` are by ``id`` of the parameter."""
    from zeromesh.optim import factory
    from zeromesh.optim.groups import hidden_matrices

    chosen, allow = plan.settings.optimizer, plan.settings.zero_allow_untested_optimizer
    if chosen is None:
        return None
    groups = []
    for group in owned:
        mine = [pieces.get(id(parameter)) for parameter in group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "name", "param_names")}
        groups.append(factory.ParameterGroup(tuple(piece for piece in mine if piece is not None), options))
    matrices = hidden_matrices(plan.model) if chosen.type.lower() == "muon" else frozenset()
    return factory.build(chosen.type, dict(chosen.params), groups, exchange, plan.cuts_parameters, allow, matrices)


def stand_in(plan: Plan, owned: Sequence[dict[str, Any]]) -> Optimizer | None:
    """Build the configuration's optimizer over pieces without memory, which raises the errors of the real one."""
    trained = [(name, parameter) for name, parameter in plan.model.named_parameters() if parameter.requires_grad]
    pieces: dict[int, Piece | None] = {}
    for name, like in trained:
        empty = nn.Parameter(torch.empty(like.numel(), dtype=like.dtype, device="meta"))
        pieces[id(like)] = Piece(name, Held(tuple(like.shape)), 0, like.numel(), empty)
    exchange: Any = SimpleNamespace(buckets=[[name for name, _ in trained]])
    return build_optimizer(plan, owned, pieces, exchange)


def adopt(plan: Plan, user: Optimizer, sharded: ShardedModel, everywhere: Sequence[nn.Parameter]) -> None:
    """Let the user's optimizer update this rank's pieces; ``everywhere`` are the parameters of all stages."""
    from zeromesh.optim import factory

    pieces = sharded.pieces
    by_parameter: dict[nn.Parameter, Piece | None] = dict.fromkeys(everywhere)
    by_parameter |= {p: pieces[id(p)] for flat in sharded.flats if flat.gradient for p in flat.parameters}
    factory.adopt(user, by_parameter, plan.cuts_parameters, plan.settings.zero_allow_untested_optimizer)


def build_scheduler(settings: Resolved, given: Any, optimizer: Optimizer | None) -> Any:
    """Return the user's scheduler, or build the configuration's; None if there is neither."""
    if given is not None and makes_scheduler(given):
        made = given(optimizer)
        check_scheduler(made)
        return made
    if given is not None or settings.scheduler is None:
        return given
    if optimizer is None:
        raise ValueError("the configuration has a scheduler but there is no optimizer; add one, or pass optimizer=")
    from zeromesh.optim import schedules

    return schedules.build(settings.scheduler.type, dict(settings.scheduler.params), optimizer)


def build_loader(data: Any, collate_fn: Any, settings: Resolved, mesh: Mesh, shuffles: bool) -> Loader | None:
    """Return a loader of this rank's share of ``data``; None without data."""
    if data is None:
        return None
    from torch.utils.data import IterableDataset

    from zeromesh.training_data import Loader, Sampler

    if isinstance(data, IterableDataset):
        raise ValueError(
            "training_data is an IterableDataset, which initialize cannot divide among the ranks; make the loader "
            "yourself and give each rank share engine.data_rank of engine.data_size"
        )
    drop = settings.dataloader_drop_last
    # A data set that is smaller than an update still gives micro-batches, of several passes.
    batch = settings.train_batch_size
    whole = batch if len(data) >= batch else settings.train_micro_batch_size_per_gpu * mesh.data_size
    sampler = Sampler(data, mesh.data_size, mesh.data_rank, settings.seed, drop, whole, shuffles)
    return Loader(data, sampler, settings.train_micro_batch_size_per_gpu, collate_fn, drop)


def open_monitors(plan: Plan) -> Monitor:
    """Open the monitors that are switched on; only the first rank has any.

    Raises:
        ImportError: one needs a package that is not installed.
        OSError: a folder cannot be made.
    """
    chosen = {name: getattr(plan.settings, name) for name in ARGUMENTS} if plan.mesh.rank == 0 else {}
    sections = {name: section for name, section in chosen.items() if section.enabled}
    return Monitor({name: open_monitor(name, *ARGUMENTS[name](section)) for name, section in sections.items()})


def make_observer(plan: Plan, monitor: Monitor) -> Observer:
    """Return the observer of the engine on this rank."""
    settings, mesh = plan.settings, plan.mesh
    every = (settings.steps_per_print or BREAKDOWN_EVERY) if settings.wall_clock_breakdown else 0
    trace, flops, window, counts = settings.profile, settings.flops_profiler, None, None
    if trace.enabled:
        window = Window(trace.start_step, trace.steps, Path(trace.output).absolute(), trace.memory)
    if flops.enabled:
        counts = FlopsPlan(
            after=flops.profile_step,
            depth=flops.module_depth,
            top=flops.top_modules,
            detailed=flops.detailed,
            output=Path(flops.output_file).absolute() if flops.output_file else None,
            dtype=settings.precision.compute or settings.precision.autocast or torch.float32,
        )
    mesh.traffic.listen(collective)  # of no engine, as engines may share a mesh
    # A run of ``zeromesh train`` ends with a report of what bounded it.
    return Observer(plan.model, mesh.device, mesh.rank, monitor, every, window, counts, whole=settings.run is not None)
