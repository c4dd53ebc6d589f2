"""Preparation of the optimizer, the schedule, the data and the monitors, while the model is as it was."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.piece import Piece, PieceExchange
from zeromesh.base.split import Held
from zeromesh.comm.mesh import Mesh
from zeromesh.engine.initialize.place_tables import check_rules
from zeromesh.engine.initialize.run_plan import Arguments
from zeromesh.shard.tables.row_rules import RULE_KEY

if TYPE_CHECKING:
    from zeromesh.base.loader import Loader
    from zeromesh.config.settings import Resolved


def parameter_groups(
    model: nn.Module, model_parameters: Iterable[Any] | None, updates: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the groups that an optimizer will update, as lists of the model's parameters; none of a frozen model.

    ``updates`` says that there is an optimizer.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    members = list(model_parameters) if model_parameters is not None else trained
    if updates and trained and not members:
        raise ValueError(
            "model_parameters is empty; leave it out to train all trainable parameters, or name no optimizer, for an "
            "engine that only evaluates"
        )
    if not (trained and members):
        return
    groups: list[Any] = members if isinstance(members[0], Mapping) else [{"params": members}]
    ids = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(groups):
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Torch's optimizers take pairs of name and parameter, too, as model.named_parameters() gives them.
        parameters = [p[1] if isinstance(p, tuple) else p for p in parameters]
        if any(id(parameter) not in ids for parameter in parameters):
            raise ValueError(f"model_parameters, group {number}: holds a parameter that is not the model's")
        yield {**group, "params": parameters}


def refuse_unused(chosen: Arguments) -> None:
    """Raise ValueError if an optimizer or a schedule was passed that would have nothing to update."""
    for name, passed in (("optimizer", chosen.optimizer), ("lr_scheduler", chosen.scheduler)):
        if passed is not None:
            raise ValueError(
                f"initialize was given {name}=, and there are no trainable parameters to update "
                f"({len(list(chosen.model.parameters()))} in all): set requires_grad on those to be trained before "
                "initialize, or leave it out, for an engine that only evaluates"
            )


def user_optimizer(
    chosen: Arguments, settings: Resolved, owned: Sequence[dict[str, Any]], cuts: bool
) -> Optimizer | None:
    """Return the user's optimizer, made by the user's function if one was passed; None if there is none."""
    from zeromesh.shard.optim import factory
    from zeromesh.shard.optim.pieces import require_groups, require_pieces

    user = chosen.optimizer
    if user is None:
        return None
    if not isinstance(user, Optimizer):
        # A module is callable, too, and would be called with parameters as its inputs.
        if not callable(user) or isinstance(user, nn.Module):
            kind = type(user).__name__
            raise ValueError(f"optimizer is a {kind}; pass a torch optimizer, or a function that makes one")
        # One group is passed as a plain list, which is what functions written for one group expect.
        user = user([dict(group) for group in owned] if len(owned) > 1 else list(owned[0]["params"]))
        if not isinstance(user, Optimizer):
            kind = type(user).__name__
            raise ValueError(f"the function passed as optimizer returned a {kind}, not a torch optimizer")
    trained = {parameter for parameter in chosen.model.parameters() if parameter.requires_grad}
    factory.check_users(user, trained, cuts, settings.zero_allow_untested_optimizer)
    # The key is no proof: trainers of other libraries set it for every optimizer.
    if not factory.is_tested(user):
        if cuts:
            require_pieces(user)
        elif settings.precision.compute is not None:
            require_groups(user)
    return user


def build_optimizer(
    model: nn.Module,
    settings: Resolved,
    owned: Sequence[dict[str, Any]],
    cuts: bool,
    pieces: Mapping[int, Piece | None],
    exchange: PieceExchange,
) -> Optimizer | None:
    """Build the configuration's optimizer over this rank's ``pieces``, by ``id`` of the parameter; None without one."""
    from zeromesh.shard.optim import factory
    from zeromesh.shard.optim.groups import expert_matrices

    chosen = settings.optimizer
    if chosen is None:
        return None
    groups = []
    for group in owned:
        mine = [pieces.get(id(parameter)) for parameter in group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "name", "param_names")}
        # A group of which this rank has nothing stays: schedules and checkpoints number groups alike on all ranks.
        groups.append(factory.ParameterGroup(tuple(piece for piece in mine if piece is not None), options))
    matrices = partial(expert_matrices, model)
    allow = settings.zero_allow_untested_optimizer
    return factory.build(chosen.type, dict(chosen.params), groups, exchange, cuts, allow, matrices)


def try_optimizer(
    model: nn.Module,
    settings: Resolved,
    owned: Sequence[dict[str, Any]],
    cuts: bool,
    schedule: bool = True,
    tables: Mapping[str, nn.Module] | None = None,
) -> Optimizer | None:
    """Build the configuration's optimizer and schedule without memory: they raise what the real ones would."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    pieces: dict[int, Piece | None] = {}
    for name, like in trained:
        empty = nn.Parameter(torch.empty(like.numel(), dtype=like.dtype, device="meta"))
        pieces[id(like)] = Piece(name, Held(tuple(like.shape)), 0, like.numel(), empty)
    # It takes no step, so it asks for nothing but the names.
    of_tables = {f"{name}.weight" for name in tables or ()}
    exchange: Any = SimpleNamespace(buckets=[[name for name, _ in trained if name not in of_tables]])
    with quiet_optimizers():  # the real ones log the same messages again
        optimizer = build_optimizer(model, settings, owned, cuts, pieces, exchange)
        stands_for = {id(piece.parameter): piece.name for piece in pieces.values() if piece}
        check_rules(optimizer, {k: v for k, v in stands_for.items() if v in of_tables}, settings, users=False)
        if schedule:
            build_scheduler(settings, None, optimizer)
    return optimizer


@contextmanager
def quiet_optimizers() -> Iterator[None]:
    """Keep what optimizers and schedules log as they are built out of the log."""
    logger = logging.getLogger("zeromesh.shard.optim")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def build_scheduler(settings: Resolved, scheduler: Any, optimizer: Optimizer | None) -> Any:
    """Return the user's scheduler, or build the configuration's; None if there is neither."""
    if scheduler is not None and makes_scheduler(scheduler):
        built = scheduler(optimizer)
        check_scheduler(built)
        return built
    if scheduler is not None or settings.scheduler is None:
        return scheduler
    if optimizer is None:
        raise ValueError("the configuration has a scheduler but there is no optimizer; add one, or pass optimizer=")
    from zeromesh.shard.optim import schedules

    kind = settings.scheduler.type
    # Tables with an update of their own have a rate of their own, too.
    params = schedules.in_proportion(kind, settings.scheduler.params, optimizer.param_groups, RULE_KEY)
    return schedules.build(kind, params, optimizer)


def makes_scheduler(scheduler: Any) -> bool:
    """Return whether ``scheduler`` makes a scheduler (a function or a class) and is none itself."""
    return isinstance(scheduler, type) or not hasattr(scheduler, "step")


def check_scheduler(scheduler: Any) -> None:
    """Raise ValueError if the scheduler's ``step`` needs arguments, such as a metric: the engine has none."""
    arguments = inspect.signature(scheduler.step).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    if needed:
        raise ValueError(
            f"{type(scheduler).__name__}.step needs {', '.join(needed)}, which the engine does not have; pass no "
            "lr_scheduler, and call its step yourself"
        )


def build_loader(
    data: Any,
    collate_fn: Any,
    settings: Resolved,
    mesh: Mesh,
    shuffles: bool,
    seed: int | None = None,
    micro_batch: int | None = None,
) -> Loader | None:
    """Return a loader of this rank's share of ``data``; None without data.

    Args:
        data: has a length.
        collate_fn: as in torch's loader.
        settings: of the run.
        mesh: says which share this rank has.
        shuffles: False keeps the order of the data.
        seed: of DeepSpeed's order; None: another order in each pass, which follows from the settings' seed.
        micro_batch: samples of a batch; None: those of the settings.
    """
    if data is None:
        return None
    from torch.utils.data import IterableDataset

    from zeromesh.base.loader import Loader, Sampler

    if isinstance(data, IterableDataset):
        raise ValueError(
            "training_data is an IterableDataset, which initialize cannot divide among the ranks; make the loader "
            "yourself and give each rank share engine.data_rank of engine.data_size"
        )
    drop = settings.dataloader_drop_last
    micro_batch = micro_batch or settings.train_micro_batch_size_per_gpu
    if seed is not None:
        # There it is the batches that are left out which are not full, and not the samples.
        same = Sampler(data, mesh.data_size, mesh.data_rank, seed, False, shuffle=shuffles, repeats=True)
        return Loader(data, same, micro_batch, collate_fn, drop, mesh.device)
    # A data set that is smaller than an update still gives micro-batches, of several passes.
    batch = settings.train_batch_size
    update_size = batch if len(data) >= batch else micro_batch * mesh.data_size
    sampler = Sampler(data, mesh.data_size, mesh.data_rank, settings.seed, drop, update_size, shuffles)
    return Loader(data, sampler, micro_batch, collate_fn, drop, mesh.device)
