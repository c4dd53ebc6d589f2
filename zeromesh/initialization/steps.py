"""The five steps of ``initialize``: read the configuration, plan, prepare, place, wrap.

Each step takes the frozen results of those before (``plan.py``). Until ``place_model`` the model is as it was, so an
error of an earlier step leaves it usable. A step that can fail on one rank alone tells all ranks (``agree_run``) before
the next collective. Power users may write their own ``initialize`` from the same functions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from zeromesh import reports, zero
from zeromesh.batches import MicroBatchSizes
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.comm.agreement import agree_run, agree_success, catch, describe, require_agreement, world_group
from zeromesh.comm.detect import is_launched, may_restart
from zeromesh.comm.environment import Environment, device_of_group
from zeromesh.comm.mesh import Mesh
from zeromesh.computation import Computation
from zeromesh.config.printing import jsonable, lines_of, tell_unset
from zeromesh.engine import Engine
from zeromesh.engine_state import Parts
from zeromesh.initialization import layout, messages, place, prepare
from zeromesh.initialization.checks import check_model
from zeromesh.initialization.plan import Arguments, Placed, Plan, Prepared
from zeromesh.offload import preparation, where_offloaded
from zeromesh.optim.host import states_of
from zeromesh.pipe import PipelineModule, settings_of
from zeromesh.pretrained import describe_sources
from zeromesh.shard.exchange import FlatExchange
from zeromesh.shard.materialise import materialiser
from zeromesh.tensor.apply import apply, chunk_losses
from zeromesh.tensor.derive import heads_over_vocabulary
from zeromesh.tensor.plan import describe_plan

if TYPE_CHECKING:
    from zeromesh.config.settings import Settings
    from zeromesh.context.applied import SpreadSequences
    from zeromesh.training_data import Loader

_log = logging.getLogger("zeromesh")


def read_configuration(
    chosen: Arguments, mesh: Mesh | None, start: Callable[[], Environment]
) -> tuple[Settings, Environment]:
    """Read the configuration, check the model, and compare both over all ranks."""
    from zeromesh.config.settings import Settings

    model = chosen.model

    def read() -> Settings:
        settings = settings_of(model, Settings.load(chosen.config), mesh)
        check_model(model, chosen.scheduler, settings)
        return settings

    settings, failure = catch(read)
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


def plan_layout(chosen: Arguments, settings: Settings, mesh: Mesh) -> Plan:
    """Decide where each part of the model will be."""
    model, resolved = chosen.model, settings.resolve(mesh.data_size, mesh.sizes, elastic=may_restart())
    if resolved.debug.collectives:
        mesh.compare_calls()
    if mesh.rank == 0:
        messages.tell_batch(settings, resolved, mesh.data_size)
        messages.warn_of_sparse(model)

    def lay_out() -> tuple[layout.Split | None, Loader | None]:
        split = layout.split_plan(model, resolved, mesh)
        if resolved.chunked_loss:
            heads_over_vocabulary(model)
        shuffles = not isinstance(model, PipelineModule)
        return split, prepare.build_loader(chosen.data, chosen.collate_fn, resolved, mesh, shuffles)

    split, loader = agree_run(mesh.group("world"), "prepare its layout and data", lay_out)
    stages = layout.plan_stages(model, resolved, mesh, loader, chosen.loss_fn)
    return Plan(chosen, resolved, settings.says_batch, mesh, split, stages, loader)


def prepare_run(plan: Plan) -> Prepared:
    """Make or try the optimizer, the schedule and the monitors while the model is as it was."""
    chosen, settings = plan.arguments, plan.settings

    def made() -> Prepared:
        monitor = prepare.open_monitors(plan)
        owned = list(prepare.parameter_groups(plan.model, chosen.parameters))
        user = prepare.user_optimizer(plan, owned)
        if user is not None:
            scheduler = prepare.build_scheduler(settings, chosen.scheduler, user)
            return Prepared(owned, user, scheduler, monitor, where_offloaded(settings, user))
        with messages.silent("zeromesh.optim"):  # its messages come when the real one is built
            stand_in = prepare.stand_in(plan, owned)
            if chosen.scheduler is None:
                prepare.build_scheduler(settings, None, stand_in)
        return Prepared(owned, None, chosen.scheduler, monitor, where_offloaded(settings, stand_in))

    return agree_run(plan.world, "prepare its optimizer, schedule and monitors", made)


def place_model(plan: Plan, prepared: Prepared) -> Placed:
    """Change the model: spread sequences, take this rank's stages, and place the states; build the optimizer."""
    chosen, model, settings, mesh, world = plan.arguments, plan.model, plan.settings, plan.mesh, plan.world

    def spread() -> SpreadSequences | None:
        return layout.spread_sequences(model, settings, mesh, chosen.loss_fn)

    sequences = agree_run(world, "spread its sequences over ranks", spread)
    require_agreement(world, "the tensor-parallel plan", "" if plan.split is None else describe_plan(plan.split[0]))
    length = "none" if plan.loader is None else plan.loader.sampler.length
    require_agreement(world, "training_data", f"samples: {length}")
    groups, split, built, scheduler = prepared.groups, plan.split, prepared.optimizer, prepared.scheduler
    sharded, everywhere = None, [] if built is None else list(model.parameters())
    try:
        described, unread = catch(lambda: describe_sources(model))  # the whole model, of which stages have parts
        if plan.stages is not None:
            groups, split = layout.take_stage(model, plan.stages, groups, split, settings.precision.compute)
        values, failure = catch(lambda: place.Values(materialiser(model, settings.seed)))
        agree_success(world, "read its part of the weights", failure or unread)
        require_agreement(world, "the checkpoint that is read", described or "")
        place.place_buffers(model, mesh.device, settings.precision.buffers)
        held = None if split is None else split[0].held
        files = preparation(model, prepared.offload, mesh)
        sharded = place.shard(model, mesh, settings, values, held, plan.stages, files)
        using = place.while_alive(sharded.events.using)
        if split is not None:
            apply(model, split[0], mesh.group("tensor"), mesh.device, split[1], using)
            share_random_state(mesh.group("tensor"))
        elif settings.chunked_loss:
            chunk_losses(model, heads_over_vocabulary(model), using)
        assert values is not None
        agree_success(world, "read its part of the weights", values.failure)
        if built is not None:
            prepare.adopt(plan, built, sharded, everywhere)
        else:
            exchange = FlatExchange(sharded.flats, sharded.row, mesh)
            built = prepare.build_optimizer(plan, groups, sharded.pieces, exchange)
            scheduler = prepare.build_scheduler(settings, chosen.scheduler, built)
        if sharded.swap is not None and built is not None:
            sharded.swap.serve(built, states_of(built))
    except BaseException as error:
        if sharded is not None:
            sharded.close()
        error.add_note("zeromesh.initialize had begun to change the model: build it anew before you try again")
        raise
    return Placed(sharded, built, scheduler, sequences)


def make_engine(plan: Plan, prepared: Prepared, placed: Placed) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Make the engine, and say what is not a default."""
    chosen, settings, mesh, sharded = plan.arguments, plan.settings, plan.mesh, placed.sharded
    store = place.activation_store(settings, mesh)
    place.checkpoint_activations(plan.model, settings, store)
    first = mesh.rank == 0
    if first:
        used = {} if placed.optimizer is None else {**placed.optimizer.param_groups[0]}
        used["lr"] = used.get("initial_lr", used.get("lr"))  # a schedule has moved it already
        tell_unset(chosen.config, settings, {f"optimizer.params.{k}": v for k, v in used.items() if k != "params"})
    sizes = MicroBatchSizes(settings.train_micro_batch_size_per_gpu if plan.says_batch and first else None)
    observer = prepare.make_observer(plan, prepared.monitor)

    def explain() -> str:
        return reports.explain(reports.memory(sharded, placed.optimizer, store), sharded, settings)

    engine = Engine(
        Parts(
            sharded=sharded,
            config=settings,
            computation=Computation(sharded, settings.precision, observer, chosen.loss_fn, sizes, explain),
            optimizer=placed.optimizer,
            scheduler=placed.scheduler,
            loader=plan.loader,
            observer=observer,
            context_parallel=placed.sequences,
            activations=store,
            pipelined=plan.stages,
        )
    )
    zero.register(engine)
    if first:
        text = json.dumps(jsonable(settings.model_dump(exclude_defaults=True)))
        _log.info("%d ranks, %d units; what is not a default: %s", mesh.world_size, len(sharded.units), text)
    return engine, placed.optimizer, plan.loader, placed.scheduler
