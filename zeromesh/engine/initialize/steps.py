"""The five steps of ``initialize``: read the configuration, plan, prepare, place, wrap.

Each step takes the frozen results of those before (``step_results.py``). Until ``place_model`` the model is as it was,
so an error of an earlier step leaves it usable. Power users may write their own ``initialize`` from the same functions.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.dtypes import kept_layers, require_names, tell_narrowed
from zeromesh.base.keras_layers import expose_layers, follow_buffers, require_policy, separate_seeds
from zeromesh.base.piece import Piece
from zeromesh.base.placement import Placement
from zeromesh.base.quantized_layers import layers, require_dtype, stored, unpack
from zeromesh.base.words import counted
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.checkpoint.weights.pretrained import describe_sources
from zeromesh.comm.agreement import agree_run, agree_success, catch, describe, require_agreement, world_group
from zeromesh.comm.detect import is_launched, may_restart
from zeromesh.comm.environment import Environment, device_of_group
from zeromesh.comm.mesh import Mesh
from zeromesh.config.printing import jsonable, lines_of, refuse_unfilled, tell_unset
from zeromesh.config.written import row_name
from zeromesh.engine import owners, reports
from zeromesh.engine.batches import MicroBatchSizes
from zeromesh.engine.computation import Computation
from zeromesh.engine.curriculum import LengthCurriculum
from zeromesh.engine.engine import Engine
from zeromesh.engine.initialize import model_layout as layout
from zeromesh.engine.initialize import optimizer_setup as prepare
from zeromesh.engine.initialize import place_model as place
from zeromesh.engine.initialize import place_tables as tables
from zeromesh.engine.initialize.offload import preparation, where_offloaded
from zeromesh.engine.initialize.step_results import Arguments, Plan, Prepared
from zeromesh.engine.pipeline_module import PipelineModule, settings_of
from zeromesh.engine.state import Parts
from zeromesh.parallel.activation.compiled import require_backend
from zeromesh.parallel.follow.spread import check_of
from zeromesh.parallel.tensor.derive import heads_over_vocabulary
from zeromesh.parallel.tensor.float8_layers import check_layers, gathered_weights, use_float8
from zeromesh.parallel.tensor.split_model import apply, chunk_losses
from zeromesh.parallel.tensor.tensor_plan import describe_plan
from zeromesh.shard.find_units import check_compiled, check_parameters, find_units
from zeromesh.shard.optim import factory
from zeromesh.shard.optim.host import states_of
from zeromesh.shard.parameters import absent_guard as guard
from zeromesh.shard.parameters import hooks
from zeromesh.shard.parameters.flat_exchange import FlatExchange
from zeromesh.shard.parameters.materialise import materialiser
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.base.loader import Loader
    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.parallel.context.applied import SpreadSequences

_log = logging.getLogger("zeromesh")


def read_configuration(
    chosen: Arguments, mesh: Mesh | None, start: Callable[[], Environment], load: Callable[[Any], Settings]
) -> tuple[Settings, Environment]:
    """Read the configuration by ``load``, check the model, and compare both over all ranks."""
    model = chosen.model

    def read() -> Settings:
        loaded = load(chosen.config)
        objects = {"optimizer": chosen.optimizer, "scheduler": chosen.scheduler}
        refuse_unfilled(
            chosen.config, loaded, replaced_sections={name for name, value in objects.items() if value is not None}
        )
        settings = settings_of(model, loaded, mesh)
        expose_layers(model)
        _check_model(model, chosen.scheduler, settings)
        return settings

    settings, failure = catch(read)
    # On one process there is nobody to tell, and a wrong configuration should not first start a process group.
    if failure is not None and not (is_launched() or dist.is_initialized()):
        raise failure
    environment = start()
    world = world_group(device_of_group(environment))
    # A step that can fail on one rank alone tells all ranks before the next collective, in which they would wait.
    agree_success(world, "read its configuration and model", failure)
    assert settings is not None
    # Before the mesh, because all ranks or none make its groups.
    require_agreement(world, "the configuration", "\n".join(lines_of(json.loads(settings.to_json()))))
    require_agreement(world, "the model", describe(model))
    return settings, environment


def _check_model(model: nn.Module, lr_scheduler: Any, settings: Settings) -> None:
    """Raise ValueError for a model or a scheduler that cannot be trained."""
    # Two engines would move the same memory.
    taken = _taken(model)
    if taken:
        gc.collect()  # an engine that nobody has any more may be a part of a cycle
        _let_go(model)
        taken = _taken(model)
    if taken:
        raise ValueError(
            f"{taken[0] or 'the model'} already belongs to an engine; train with that one, or pass another model, "
            "which may load the weights that the engine's gathered_state_dict() gives; where parameters are not "
            "sharded, the model is free again after engine.destroy(), or when nothing refers to the engine any more"
        )
    check_parameters(model)
    require_dtype(model, settings.precision.compute)
    require_names(model, settings.precision.keep_fp32 or (), "data_types.keep_in_fp32_modules")
    require_policy(model, settings.precision.compute)
    units = find_units(model, settings.units)
    if settings.float8.enabled:
        # The whole model: a stage does not know the names of others.
        check_layers(model, _unquantized(model, settings), settings.precision.compute)
    if settings.compile.enabled:
        require_backend(settings.compile.backend)
        if not units:
            raise ValueError("compile is enabled, but the model has no blocks to compile; name some with units")
    if settings.activation_checkpointing.enabled:
        find_units(model, settings.activation_checkpointing.targets)
    if settings.row.parameter is Placement.SHARDED:
        check_compiled(model, settings.units)
    if lr_scheduler is not None and not prepare.makes_scheduler(lr_scheduler):
        prepare.check_scheduler(lr_scheduler)


def _unquantized(model: nn.Module, settings: Settings | Resolved) -> list[str]:
    """Return patterns of names of layers that do not compute in float8: named as such, or kept in fp32."""
    return [*settings.float8.skip, *kept_layers(model, settings.precision)]


def _taken(model: nn.Module) -> list[str]:
    """Return the names of modules and parameters that an engine has."""
    taken = [name for name, module in model.named_modules() if _is_driven(module)]
    for name, parameter in stored(model):
        owner = owners.engine_of(parameter)
        is_left_sharded = type(parameter).__module__ == guard.__name__  # by an engine that was destroyed
        if is_left_sharded or (owner is not None and _is_driven(owner.module)):
            taken.append(name)
    return taken


def _let_go(model: nn.Module) -> None:
    """Take the hooks of an engine that is gone off a model whose parameters are whole."""
    for parameter in model.parameters():
        sharded = owners.sharded_of(parameter)
        if sharded is not None and not sharded.sharded and owners.engine_of(parameter) is None:
            sharded.close()


def _is_driven(module: nn.Module) -> bool:
    """Return whether a living engine has hooks on the module's forward."""
    return any(isinstance(hook, hooks.Hook) for hook in module._forward_pre_hooks.values())


def plan_layout(chosen: Arguments, settings: Settings, mesh: Mesh) -> Plan:
    """Decide where each part of the model will be."""
    model, resolved = chosen.model, settings.resolve(mesh.data_size, mesh.sizes, elastic=may_restart())
    if resolved.debug.collectives:
        mesh.compare_calls()
    if mesh.rank == 0:
        _tell_batch(settings, resolved, mesh.data_size)
        tell_narrowed(model, resolved.precision, "data_types.keep_in_fp32_modules")

    def lay_out() -> tuple[layout.Split | None, Loader | None]:
        layout.refuse_axes(model, mesh)
        # DeepSpeed's PipelineModule takes the samples in the data set's order.
        shuffles = not isinstance(model, PipelineModule)
        loader = prepare.build_loader(chosen.data, chosen.collate_fn, resolved, mesh, shuffles, chosen.data_seed)
        split = layout.split_plan(model, resolved, mesh, loader, chosen.loss_fn)
        if resolved.chunked_loss:
            heads_over_vocabulary(model)  # raises where the model has none that could be chunked
        return split, loader

    split, loader = agree_run(mesh.group("world"), "prepare its layout and data", lay_out)
    stages = layout.plan_stages(model, resolved, mesh, loader, chosen.loss_fn)

    def choose_tables() -> dict[str, nn.Module]:
        return tables.choose_tables(model, resolved, None if split is None else split[0], stages, mesh.rank == 0)

    chosen_tables = agree_run(mesh.group("world"), "choose its tables", choose_tables)
    before = reports.memory_before(model, mesh.device)
    return Plan(chosen, resolved, settings.says_batch, mesh, split, stages, loader, before, chosen_tables)


def _tell_batch(settings: Settings, resolved: Resolved, ranks: int) -> None:
    """Log batch settings that the number of data-parallel ranks has changed."""
    changes = [
        f"{key} is {getattr(resolved, key)} instead of {getattr(settings, key)}"
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if getattr(settings, key) not in (None, getattr(resolved, key))
    ]
    if changes:
        said, batch = " and ".join(changes), resolved.train_batch_size
        where = counted(ranks, "data-parallel rank")
        _log.info("%s: train_batch_size = %d is kept on %s", said, batch, where)


def prepare_run(plan: Plan) -> Prepared:
    """Make or try the optimizer, the schedule and the monitors while the model is as it was."""
    chosen, settings = plan.arguments, plan.settings

    def made() -> Prepared:
        monitor = prepare.open_monitors(settings, plan.mesh.rank)
        updates = chosen.optimizer is not None or settings.optimizer is not None
        groups = list(prepare.parameter_groups(plan.model, chosen.parameters, updates))
        if not groups:  # the engine of a teacher or a reward model: sharded inference
            prepare.refuse_unused(chosen)
            if plan.mesh.rank == 0 and (updates or settings.scheduler is not None):
                _log.warning(
                    "the model has no trainable parameters: its engine only evaluates, without the optimizer and the "
                    "schedule of the configuration; to train, set requires_grad before initialize"
                )
            return Prepared([], None, None, monitor, where_offloaded(settings, None))
        owned = tables.with_table_group(groups, plan.tables, settings)
        user = prepare.user_optimizer(plan, owned)
        if user is not None:
            weights = {id(module.weight): name for name, module in plan.tables.items()}
            tables.check_rules(user, weights, settings, users=True)
            scheduler = prepare.build_scheduler(settings, chosen.scheduler, user)
            return Prepared(owned, user, scheduler, monitor, where_offloaded(settings, user))
        # A scheduler of the user's is not tried: its function wants the optimizer that will be stepped.
        tried = prepare.try_optimizer(
            plan.model, settings, owned, plan.cuts_parameters, chosen.scheduler is None, plan.tables
        )
        return Prepared(owned, None, chosen.scheduler, monitor, where_offloaded(settings, tried))

    return agree_run(plan.world, "prepare its optimizer, schedule and monitors", made)


def place_model(plan: Plan, prepared: Prepared) -> tuple[ShardedModel, Optimizer | None, Any, SpreadSequences | None]:
    """Change the model, and build what updates it.

    Returns:
        The sharded states, the optimizer, its schedule, and the sequences that are spread over ranks, if there are any.
    """
    chosen, model, settings, mesh, world = plan.arguments, plan.model, plan.settings, plan.mesh, plan.world

    def spread() -> SpreadSequences | None:
        if mesh.sizes["context"] == 1:
            return None
        if chosen.loss_fn is not None:
            raise ValueError(
                "loss_fn would be given the labels of whole sequences, and logits of this rank's part; leave it out, "
                "and have the model return its loss"
            )
        from zeromesh.parallel.context.spread_model import apply as apply_context

        chosen_context = settings.context_parallel
        return apply_context(model, chosen_context.strategy, mesh.group("context"), unchecked=chosen_context.unchecked)

    check = None  # of code in which sequences are spread; of the model before anything is changed
    if plan.split is not None and plan.split[1]:
        check = check_of(model, *plan.split, mesh.sizes["tensor"])
    # First, because it either succeeds or leaves the model as it was.
    sequences = agree_run(world, "spread its sequences over ranks", spread)
    require_agreement(world, "the tensor-parallel plan", "" if plan.split is None else describe_plan(plan.split[0]))
    length = "none" if plan.loader is None else plan.loader.sampler.length
    require_agreement(world, "training_data", f"samples: {length}")
    groups, split, built, scheduler = prepared.groups, plan.split, prepared.optimizer, prepared.scheduler
    # Found in the whole model: a stage may have the head without the embedding over whose entries it is.
    heads = heads_over_vocabulary(model) if settings.chunked_loss and split is None else []
    # A user's optimizer holds the parameters of all stages; those of other stages have to leave its groups.
    sharded, everywhere = None, [] if built is None else list(model.parameters())
    try:
        described, unread = catch(lambda: describe_sources(model))  # the whole model, of which stages have parts
        if plan.stages is not None:
            groups, split = layout.take_stage(model, plan.stages, groups, split, settings.precision)
        values, failure = catch(lambda: place.Values(materialiser(model, settings.seed)))
        agree_success(world, "read its part of the weights", failure or unread)
        require_agreement(world, "the checkpoint that is read", described or "")
        assert values is not None
        place.place_buffers(model, mesh.device, settings.precision)
        follow_buffers(model)
        separate_seeds(model, mesh.data_rank, mesh.data_size)
        for _, layer in layers(model):
            unpack(layer)
        tensor_parts = None if split is None else split[0].held
        files = preparation(model, prepared.offload, mesh)
        here = tables.table_settings(plan.tables, settings)
        unquantized = _unquantized(model, settings)
        narrow = gathered_weights(model, unquantized, heads) if settings.float8.gather else ()
        sharded = place.shard(model, mesh, settings, values, tensor_parts, plan.stages, files, here, narrow)
        using = place.while_alive(sharded.events.using)
        if split is not None:
            blocks = () if plan.stages is None else plan.stages.cut.blocks
            apply(model, split[0], mesh.group("tensor"), mesh.device, split[1], using, blocks, check)
            # Dropout between split layers has to draw the same numbers on all ranks of the tensor axis.
            share_random_state(mesh.group("tensor"))
        else:
            chunk_losses(model, heads, using)
        if settings.float8.enabled:
            rowwise, resolved = settings.float8.recipe == "rowwise", None if split is None else split[0]
            use_float8(model, rowwise, unquantized, mesh, resolved, heads)
        # Only now: a rank that could not read its weights went on with zeros, so that no other one waited for it.
        agree_success(world, "read its part of the weights", values.failure)
        place.place_quantized(model, mesh)
        pieces = sharded.pieces
        exchange = FlatExchange(sharded.flats, sharded.row, mesh)
        if built is not None:
            pieces_by_parameter: dict[nn.Parameter, Piece | None] = dict.fromkeys(everywhere)
            pieces_by_parameter |= {
                p: pieces[id(p)] for flat in sharded.flats if flat.layout.trainable for p in flat.parameters
            }
            untested = settings.zero_allow_untested_optimizer
            factory.adopt(built, pieces_by_parameter, plan.cuts_parameters, untested, exchange)
        elif groups:
            built = prepare.build_optimizer(model, settings, groups, plan.cuts_parameters, pieces, exchange)
            scheduler = prepare.build_scheduler(settings, chosen.scheduler, built)
        if sharded.swap is not None and built is not None:
            sharded.swap.serve(built, states_of(built))
    except BaseException as error:
        if sharded is not None:
            sharded.close()
        error.add_note("zeromesh.initialize had begun to change the model: build it anew before you try again")
        raise
    return sharded, built, scheduler, sequences


def make_engine(
    plan: Plan, prepared: Prepared, sharded: ShardedModel, optimizer: Optimizer | None, scheduler: Any,
    sequences: SpreadSequences | None, predict: Callable[..., dict[str, Any]],
    kind: Callable[[Parts], Engine] = Engine,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:  # fmt: skip
    """Make the engine of a placed model, and say what is not a default."""
    chosen, settings, mesh = plan.arguments, plan.settings, plan.mesh
    store = place.activation_store(settings, mesh)
    # Last of all that replaces a forward: recomputation has to include what the other parts put around a layer.
    place.checkpoint_activations(plan.model, settings, store)
    first = mesh.rank == 0
    if first:
        used = {} if optimizer is None else {**optimizer.param_groups[0]}
        used["lr"] = used.get("initial_lr", used.get("lr"))  # a schedule has moved it already
        values = {f"optimizer.params.{k}": v for k, v in used.items() if k != "params"}
        tell_unset(chosen.config, settings, values)
    sizes = MicroBatchSizes(settings.train_micro_batch_size_per_gpu, plan.says_batch and first)
    observer = prepare.make_observer(plan, prepared.monitor)

    def explain() -> str:
        return reports.explain(reports.memory(sharded, optimizer, store, plan.before), sharded, optimizer, settings)

    chosen_lengths, precision = settings.curriculum_learning, settings.precision
    lengths = LengthCurriculum(chosen_lengths, plan.model) if chosen_lengths.enabled else None
    engine = kind(
        Parts(
            sharded=sharded,
            config=settings,
            computation=Computation(sharded, precision, observer, chosen.loss_fn, sizes, explain, lengths),
            optimizer=optimizer,
            scheduler=scheduler,
            loader=plan.loader,
            observer=observer,
            context_parallel=sequences,
            activations=store,
            pipelined=plan.stages,
            before=plan.before,
            predict=predict,
        )
    )
    if settings.compile.enabled:
        mode = settings.compile.mode
        engine.compile(settings.compile.backend, {} if mode is None else {"mode": mode})
    owners.register(engine)
    if first:
        size, units = counted(mesh.world_size, "rank"), counted(len(sharded.units), "unit")
        # A line for each key: as one JSON object it is longer than a screen is wide.
        chosen_keys = "".join(f"\n  {line}" for line in lines_of(jsonable(settings.model_dump(exclude_defaults=True))))
        _log.info("%s on %s, %s; settings that are no defaults:%s", row_name(settings.row), size, units, chosen_keys)
    return engine, optimizer, plan.loader, scheduler
