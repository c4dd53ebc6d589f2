"""``initialize``: read the configuration, plan the layout, prepare optimizer and data, place the model, wrap it.

Each step takes what the ones before have decided, in frozen form. Until ``_place`` the model is as it was, so an error
of an earlier step leaves it usable. A step that can fail on one rank alone tells all ranks (``share``) before the next
collective. Power users may write their own ``initialize`` from the same functions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zeromesh import zero
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.comm.agreement import agree_run, agree_success, catch, describe, require_agreement, world_group
from zeromesh.comm.collectives import Group
from zeromesh.comm.detect import is_launched, may_restart
from zeromesh.comm.environment import Environment, device_of_group, init_distributed
from zeromesh.comm.mesh import Mesh
from zeromesh.config.printing import jsonable, lines_of
from zeromesh.config.unset import tell_unset
from zeromesh.engine import Engine, Parts
from zeromesh.fed import FedBatches
from zeromesh.initialization import messages, prepare
from zeromesh.initialization.checks import check_model
from zeromesh.initialization.layout import Split, make_mesh, plan_stages, split_plan, spread_sequences, take_stage
from zeromesh.initialization.place import (
    Values,
    activation_store,
    checkpoint_activations,
    place_buffers,
    shard,
    while_alive,
)
from zeromesh.observing import make_observer, open_monitors
from zeromesh.offload import Offload, preparation, where_offloaded
from zeromesh.optim.host import states_of
from zeromesh.pipe import PipelineModule, settings_of
from zeromesh.pretrained import describe_sources
from zeromesh.shard.exchange import FlatExchange
from zeromesh.shard.materialise import materialiser
from zeromesh.shard.sharded import ShardedModel
from zeromesh.signatures import refuse, takes_args_first
from zeromesh.tensor.apply import apply, chunk_losses
from zeromesh.tensor.derive import heads_over_vocabulary
from zeromesh.tensor.plan import describe_plan

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.context.applied import SpreadSequences
    from zeromesh.observe.monitors import Monitor
    from zeromesh.pipelined import Pipelined
    from zeromesh.training_data import Loader

__all__ = ["initialize", "make_mesh", "shard"]

Config = str | Path | Mapping[str, Any]

_log = logging.getLogger("zeromesh")


@takes_args_first
def initialize(
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Config | Settings | None = None,
    mesh: Mesh | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    args: Any = None,
    config_params: Config | None = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    mesh_param: Any = None,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Make a model train as the configuration says.

    The process group is started if nobody has. The model is changed in place: its modules stay the same objects, its
    parameters are placed over the ranks. All ranks start from the first rank's weights.

    Positional arguments whose first is no module are taken in DeepSpeed's order, which begins with ``args``.

    Args:
        model: any module; its parameters may be on the meta device if it was built under ``zeromesh.zero.Init``.
        optimizer: one built over the model's parameters, or a function from parameters to one, in place of the
            configuration's.
        model_parameters: what the configuration's optimizer updates: parameters or groups as torch's optimizers take
            them; all trainable ones by default.
        training_data: a data set, for which a loader is made that gives each rank its share. Every pass over it has
            another order, which follows from the seed and the number of the pass; ``loader.sampler.set_epoch`` sets
            the number. A ``PipelineModule`` gets the samples in the data set's order, as in DeepSpeed. After
            ``load_checkpoint`` the next pass goes on where the checkpoint was written. Where ``mesh.pipeline`` is
            greater than 1, the first samples are read once more, to see what the model does.
        lr_scheduler: one built on ``optimizer``, or a function from an optimizer to one.
        collate_fn: for the loader.
        config: path of a JSON file in DeepSpeed's format, a dict of the same form, or settings.
        mesh: the ranks; made from the configuration by default.
        loss_fn: from the model's output and the labels to the loss, for ``train_batch``, if the model returns no loss.
        args: an object whose ``deepspeed_config`` names the file, as DeepSpeed's launcher makes it.
        config_params: DeepSpeed's older name of ``config``.
        dist_init_required: False refuses to start a process group; else it is started when there is none.
        distributed_port: port of the master, where neither MASTER_PORT nor torchrun says it.
        mpu: None; ``mesh`` in the configuration says which ranks share a model.
        mesh_param: None, as ``mpu``.

    Returns:
        The engine, the optimizer, the loader of ``training_data`` or None, the scheduler or None.

    Raises:
        ConfigError: a ValueError that lists everything wrong with the configuration.
        TypeError: positional arguments that mean nothing in this order or in DeepSpeed's.
        ValueError: the model cannot be trained this way, an argument cannot be honoured, or the ranks have different
            configurations or models. Unless a note of the error says otherwise, the model is as it was, and may be
            tried again.
    """
    if not isinstance(model, nn.Module):
        named = "" if model is None else f", not a {type(model).__name__}"
        raise ValueError(f"initialize needs a model: pass model= with a torch.nn.Module{named}")
    sizes = 'set the sizes of the axes in the configuration, as in "mesh": {"tensor": 2, "context": 2}'
    refuse("initialize", "mpu", mpu, sizes)
    refuse("initialize", "mesh_param", mesh_param, sizes)
    if loss_fn is None and isinstance(model, PipelineModule):
        loss_fn = model.loss_fn
    given = _configuration(config, config_params, args)
    messages.show_log()

    def start() -> Environment:
        return init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)

    wishes = Wishes(optimizer, model_parameters, lr_scheduler, training_data, collate_fn, loss_fn)
    settings, environment = _read(model, given, mesh, wishes, start)
    plan = _plan(model, settings, mesh or make_mesh(settings, environment), wishes)
    prepared = _prepare(plan, wishes)
    placed = _place(plan, prepared, wishes)
    return _wrap(plan, prepared, placed, wishes, given, settings)


@dataclass(frozen=True)
class Wishes:
    """Objects that the user passed to ``initialize`` beside the model and the configuration; see there."""

    optimizer: Any
    parameters: Iterable[Any] | None
    scheduler: Any
    data: Any
    collate_fn: Callable[[Any], Any] | None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None


@dataclass(frozen=True)
class Plan:
    """Layout of a model over the ranks, decided before the model is changed.

    Attributes:
        model: the user's.
        settings: the resolved configuration.
        mesh: the ranks.
        tensor: split parameters along the tensor axis; None where that has one rank.
        stages: cut into pipeline stages, and their schedule; None where there is one stage.
        loader: of ``training_data``, whose first samples may have decided where the model is cut; None without data.
    """

    model: nn.Module
    settings: Resolved
    mesh: Mesh
    tensor: Split | None
    stages: Pipelined | None
    loader: Loader | None

    @property
    def world(self) -> Group:
        """Group of all ranks."""
        return self.mesh.group("world")


@dataclass(frozen=True)
class Prepared:
    """Optimizer and observers of a run, made or tried before the model is changed.

    Attributes:
        groups: parameter groups that the optimizer will update.
        optimizer: the user's; None where the configuration's is made after the model is placed.
        scheduler: the user's optimizer's, or the one that was passed.
        monitor: writes metrics.
        offload: tiers of the states.
    """

    groups: list[dict[str, Any]]
    optimizer: Optimizer | None
    scheduler: Any
    monitor: Monitor
    offload: Offload


@dataclass(frozen=True)
class Placed:
    """A model whose states are placed over the ranks, and what updates them.

    Attributes:
        sharded: the states.
        optimizer: updates this rank's pieces; None if there is none.
        scheduler: of its learning rate; None if there is none.
        sequences: spread over ranks; None where the context axis has one rank.
    """

    sharded: ShardedModel
    optimizer: Optimizer | None
    scheduler: Any
    sequences: SpreadSequences | None


def _read(
    model: nn.Module, given: Config | Settings, mesh: Mesh | None, wishes: Wishes, start: Callable[[], Environment]
) -> tuple[Settings, Environment]:
    """Read the configuration, check the model, and compare both over all ranks."""
    from zeromesh.config.settings import Settings

    settings, failure = catch(lambda: settings_of(model, Settings.load(given), mesh))
    if failure is None:
        assert settings is not None
        failure = catch(lambda: check_model(model, wishes.scheduler, settings))[1]
    if failure is not None and not (is_launched() or dist.is_initialized()):
        raise failure
    environment = start()
    world = world_group(device_of_group(environment))
    agree_success(world, "read its configuration and model", failure)
    assert settings is not None
    # Before the mesh, because all ranks or none make its groups.
    require_agreement(world, "the configuration", "\n".join(lines_of(json.loads(settings.to_json()))))
    require_agreement(world, "the model", describe(model))
    return settings, environment


def _plan(model: nn.Module, settings: Settings, mesh: Mesh, wishes: Wishes) -> Plan:
    """Decide where each part of the model will be."""
    resolved = settings.resolve(mesh.data_size, mesh.sizes, elastic=may_restart())
    if resolved.debug.collectives:
        mesh.compare_calls()
    messages.tell_batch(settings, resolved, mesh)
    if mesh.rank == 0:
        messages.warn_of_sparse(model)

    def plan() -> tuple[Split | None, Loader | None]:
        split = split_plan(model, resolved, mesh)
        if resolved.chunked_loss:
            heads_over_vocabulary(model)
        shuffles = not isinstance(model, PipelineModule)
        return split, prepare.build_loader(wishes.data, wishes.collate_fn, resolved, mesh, shuffles)

    split, loader = agree_run(mesh.group("world"), "prepare its layout and data", plan)
    stages = plan_stages(model, resolved, mesh, loader, wishes.loss_fn)
    return Plan(model, resolved, mesh, split, stages, loader)


def _prepare(plan: Plan, wishes: Wishes) -> Prepared:
    """Make or try the optimizer, the schedule and the monitors while the model is as it was."""
    model, settings, mesh = plan.model, plan.settings, plan.mesh

    def made() -> Prepared:
        monitor = open_monitors(settings, mesh)
        owned = list(prepare.parameter_groups(model, wishes.parameters))
        user = prepare.user_optimizer(wishes.optimizer, owned)
        if user is not None:
            prepare.check_users_optimizer(user, model, mesh, settings)
            scheduler = prepare.build_scheduler(settings, wishes.scheduler, user)
            return Prepared(owned, user, scheduler, monitor, where_offloaded(settings, user))
        with messages.silent("zeromesh.optim"):  # it will speak when they are made in earnest
            stand_in = prepare.stand_in(model, mesh, settings, owned)
            if wishes.scheduler is None:
                prepare.build_scheduler(settings, None, stand_in)
        return Prepared(owned, None, wishes.scheduler, monitor, where_offloaded(settings, stand_in))

    return agree_run(plan.world, "prepare its optimizer, schedule and monitors", made)


def _place(plan: Plan, prepared: Prepared, wishes: Wishes) -> Placed:
    """Change the model: spread sequences, take this rank's stages, and place the states; build the optimizer."""
    model, settings, mesh, stages = plan.model, plan.settings, plan.mesh, plan.stages
    spread = agree_run(
        plan.world, "spread its sequences over ranks", lambda: spread_sequences(model, settings, mesh, wishes.loss_fn)
    )
    require_agreement(
        plan.world, "the tensor-parallel plan", "" if plan.tensor is None else describe_plan(plan.tensor[0])
    )
    length = "none" if plan.loader is None else plan.loader.sampler.length
    require_agreement(plan.world, "training_data", f"samples: {length}")
    groups, split, built, scheduler = prepared.groups, plan.tensor, prepared.optimizer, prepared.scheduler
    sharded, everywhere = None, [] if built is None else list(model.parameters())
    try:
        described, unread = catch(lambda: describe_sources(model))  # the whole model, of which stages have parts
        if stages is not None:
            groups, split = take_stage(model, stages, groups, split, settings.precision.compute)
        values, failure = catch(lambda: Values(materialiser(model, settings.seed)))
        agree_success(plan.world, "read its part of the weights", failure or unread)
        assert values is not None
        require_agreement(plan.world, "the checkpoint that is read", described or "")
        place_buffers(model, mesh.device, settings.precision.buffers)
        held = None if split is None else split[0].held
        sharded = shard(model, mesh, settings, values, held, stages, preparation(model, prepared.offload, mesh))
        using = while_alive(sharded.events.using)
        if split is not None:
            apply(model, split[0], mesh.group("tensor"), mesh.device, split[1], using)
            share_random_state(mesh.group("tensor"))
        elif settings.chunked_loss:
            chunk_losses(model, heads_over_vocabulary(model), using)
        agree_success(plan.world, "read its part of the weights", values.failure)
        if built is not None:
            prepare.adopt(built, sharded, settings, everywhere)
        else:
            exchange = FlatExchange(sharded.flats, sharded.row, mesh)
            built = prepare.build_optimizer(model, mesh, settings, groups, sharded.pieces, exchange)
            scheduler = prepare.build_scheduler(settings, wishes.scheduler, built)
        if sharded.swap is not None and built is not None:
            sharded.swap.serve(built, states_of(built))
    except BaseException as error:
        if sharded is not None:
            sharded.close()
        error.add_note("zeromesh.initialize had begun to change the model: build it anew before you try again")
        raise
    return Placed(sharded, built, scheduler, spread)


def _wrap(
    plan: Plan, prepared: Prepared, placed: Placed, wishes: Wishes, given: Config | Settings, settings: Settings
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Make the engine, and say what is not a default."""
    resolved, mesh, sharded = plan.settings, plan.mesh, placed.sharded
    store = activation_store(resolved, mesh)
    checkpoint_activations(plan.model, resolved, store)
    if mesh.rank == 0:
        tell_unset(given, resolved, messages.used_arguments(placed.optimizer))
    fed = FedBatches((settings.says_batch and resolved.train_micro_batch_size_per_gpu) or None, mesh.rank == 0)
    observer = make_observer(plan.model, resolved, mesh, prepared.monitor)
    engine = Engine(
        Parts(
            sharded, resolved, placed.optimizer, placed.scheduler, wishes.loss_fn, plan.loader, observer, fed,
            placed.sequences, store, plan.stages,
        )
    )  # fmt: skip
    zero.register(engine)
    if mesh.rank == 0:
        text = json.dumps(jsonable(resolved.model_dump(exclude_defaults=True)))
        _log.info("%d ranks, %d units; what is not a default: %s", mesh.world_size, len(sharded.units), text)
    return engine, placed.optimizer, plan.loader, placed.scheduler


def _configuration(config: Config | Settings | None, older: Config | None, args: Any) -> Config | Settings:
    """The one that was given: by name, by DeepSpeed's older name, or in the parsed command line."""
    from_args: Config | None = getattr(args, "deepspeed_config", None)
    given = config if config is not None else older
    if given is not None and from_args is not None:
        raise ValueError(
            f"initialize was given two configurations: config= and args.deepspeed_config = {from_args!r}; pass one"
        )
    chosen = given if given is not None else from_args
    if chosen is None:
        raise ValueError("initialize needs a configuration: pass config= with a path or a dict")
    return chosen
