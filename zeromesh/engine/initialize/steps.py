"""Steps of ``initialize``: read the configuration, plan; ``place_model.py`` places the model; make the engine.

Until ``place_model`` the model is as it was, so an error of an earlier step leaves it usable. Power users may write
their own ``initialize`` from the same functions.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zeromesh.base.dtypes import require_names, tell_narrowed
from zeromesh.base.keras_layers import expose_layers, require_policy
from zeromesh.base.placement import Placement
from zeromesh.base.quantized_layers import mark_stacked, require_dtype, stored
from zeromesh.base.words import counted
from zeromesh.checkpoint.weights.pretrained import describe_sources
from zeromesh.comm.agreement import agree, agree_run, catch, describe, world_group
from zeromesh.comm.detect import is_launched, may_restart
from zeromesh.comm.environment import Environment, device_of_group
from zeromesh.comm.mesh import Mesh
from zeromesh.config.printing import jsonable, lines_of, refuse_unfilled, tell_defaults, tell_unset
from zeromesh.config.written import row_name
from zeromesh.engine import owners
from zeromesh.engine.engine import Engine
from zeromesh.engine.initialize import model_layout as layout
from zeromesh.engine.initialize import optimizer_setup as setup
from zeromesh.engine.initialize.offload import where_offloaded
from zeromesh.engine.initialize.place_model import Placing, unquantized
from zeromesh.engine.initialize.place_tables import check_rules, choose_tables, with_table_group
from zeromesh.engine.initialize.rest_experts import find_resting, resting_settings
from zeromesh.engine.initialize.run_plan import Arguments, Plan, cuts_parameters
from zeromesh.engine.observe.monitors import open_monitors
from zeromesh.engine.pipeline_module import PipelineModule, settings_of
from zeromesh.engine.reports import memory_before
from zeromesh.engine.state import EngineState
from zeromesh.parallel.activation.compiled import require_backend
from zeromesh.parallel.tensor.derive import heads_over_vocabulary
from zeromesh.parallel.tensor.float8_layers import check_layers
from zeromesh.parallel.tensor.spread_sequence import check_of
from zeromesh.parallel.tensor.tensor_plan import describe_plan
from zeromesh.shard.find_units import check_compiled, check_parameters, find_units
from zeromesh.shard.parameters import absent_guard as guard
from zeromesh.shard.parameters import hooks

if TYPE_CHECKING:
    from zeromesh.base.loader import Loader
    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.parallel.expert.forms import Experts

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
        settings = layout.take_expert_size(model, settings_of(model, loaded, mesh), mesh)
        expose_layers(model)
        _check_model(model, chosen.scheduler, settings)
        return settings

    settings, failure = catch(read)
    # On one process there is nobody to tell, and a wrong configuration should not first start a process group.
    if failure is not None and not (is_launched() or dist.is_initialized()):
        raise failure
    environment = start()
    world = world_group(device_of_group(environment))
    # A step that can fail on one rank alone tells all ranks before the next collective, in which they would wait; and
    # before the mesh, because all ranks or none make its groups.
    compared = {
        "the configuration": "" if settings is None else "\n".join(lines_of(json.loads(settings.to_json()))),
        "the model": "" if settings is None else describe(model),
    }
    agree(world, "read its configuration and model", failure, compared)
    assert settings is not None
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
    mark_stacked(model)
    check_parameters(model)
    require_dtype(model, settings.precision.compute)
    require_names(model, settings.precision.keep_fp32 or (), "data_types.keep_in_fp32_modules")
    require_policy(model, settings.precision.compute)
    units = find_units(model, settings.units)
    if settings.float8.enabled:
        # The whole model: a stage does not know the names of others.
        check_layers(model, unquantized(model, settings), settings.precision.compute)
    if settings.compile.enabled:
        require_backend(settings.compile.backend)
        if not units:
            raise ValueError("compile is enabled, but the model has no blocks to compile; name some with units")
    if settings.activation_checkpointing.enabled:
        find_units(model, settings.activation_checkpointing.targets)
    if settings.row.parameter is Placement.SHARDED:
        check_compiled(model, settings.units)
    if lr_scheduler is not None and not setup.makes_scheduler(lr_scheduler):
        setup.check_scheduler(lr_scheduler)


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


def plan_run(chosen: Arguments, settings: Settings, mesh: Mesh) -> Plan:
    """Decide where each part of the model will be, and make or try what updates it, while the model is as it was."""
    model, resolved = chosen.model, settings.resolve(mesh.data_size, mesh.sizes, elastic=may_restart())
    world, first = mesh.group("world"), mesh.rank == 0
    if resolved.debug.collectives:
        mesh.compare_calls()
    if first:
        _tell_batch(settings, resolved, mesh.data_size)
        tell_narrowed(model, resolved.precision, "data_types.keep_in_fp32_modules")

    def lay_out() -> tuple[layout.Split | None, list[Experts], Loader | None, list[str]]:
        layout.refuse_axes(model, mesh)
        experts = layout.find_shared_experts(model, resolved, mesh)
        # DeepSpeed's PipelineModule takes the samples in the data set's order.
        shuffles = not isinstance(model, PipelineModule)
        loader = setup.build_loader(chosen.data, chosen.collate_fn, resolved, mesh, shuffles, chosen.data_seed)
        split = layout.split_plan(model, resolved, mesh, experts, loader, chosen.loss_fn)
        # Found in the whole model: a stage may have the head without the embedding over whose entries it is.
        heads = heads_over_vocabulary(model) if resolved.chunked_loss or resolved.tiling.loss else []
        return split, experts, loader, heads if split is None else []

    # Before anything else, while all of the code is as it was written.
    tiled = agree_run(world, "choose its tiles", lambda: layout.find_tiles(model, resolved, first))
    split, experts, loader, heads = agree_run(world, "prepare its layout and data", lay_out)
    stages = layout.plan_stages(model, resolved, mesh, loader, chosen.loss_fn)
    resolved_split = None if split is None else split[0]
    tables = agree_run(
        world, "choose its tables", lambda: choose_tables(model, resolved, resolved_split, stages, first)
    )
    stacks = agree_run(world, "choose its resting experts", lambda: find_resting(model, resolved, mesh))
    cuts = cuts_parameters(resolved, mesh.shard.size, mesh.sizes["tensor"] * mesh.sizes["expert"])
    before = memory_before(model, mesh.device)

    def prepare() -> Plan:
        monitor = open_monitors(resolved, mesh.rank)
        groups, optimizer, scheduler, tried = _prepare_optimizer(chosen, resolved, tables, cuts, first)
        offload = where_offloaded(resolved, optimizer or tried)
        return Plan(
            arguments=chosen,
            settings=resolved,
            says_batch=settings.says_batch,
            mesh=mesh,
            split=split,
            experts=experts,
            check=check_of(model, *split, mesh.sizes["tensor"]) if split is not None and split[1] else None,
            heads=heads,
            tiled=tiled,
            stages=stages,
            loader=loader,
            before=before,
            tables=tables,
            resting=resting_settings(stacks, resolved, optimizer or tried, offload.form.narrow),
            cuts_parameters=cuts,
            monitor=monitor,
            groups=groups,
            optimizer=optimizer,
            scheduler=scheduler,
            offload=offload,
        )

    plan = agree_run(world, "prepare its optimizer, schedule and monitors", prepare)
    sources, failure = catch(lambda: describe_sources(model))
    compared = {
        "the tensor-parallel plan": "" if split is None else describe_plan(split[0]),
        "the experts of the model": "\n".join(f"{item.name}: {item.count} {item.contract.name}" for item in experts),
        "training_data": f"samples: {'none' if loader is None else loader.sampler.length}",
        "the checkpoint that is read": sources or "",
    }
    agree(world, "read its part of the weights", failure, compared)
    return plan


def _prepare_optimizer(
    chosen: Arguments, settings: Resolved, tables: Mapping[str, nn.Module], cuts: bool, tells: bool
) -> tuple[list[dict[str, Any]], Optimizer | None, Any, Optimizer | None]:
    """Return groups of parameters, the user's optimizer, its schedule, and a trial of the configuration's optimizer."""
    updates = chosen.optimizer is not None or settings.optimizer is not None
    groups = list(setup.parameter_groups(chosen.model, chosen.parameters, updates))
    if not groups:  # the engine of a teacher or a reward model: sharded inference
        setup.refuse_unused(chosen)
        if tells and (updates or settings.scheduler is not None):
            _log.warning(
                "the model has no trainable parameters: its engine only evaluates, without the optimizer and the "
                "schedule of the configuration; to train, set requires_grad before initialize"
            )
        return [], None, None, None
    groups = with_table_group(groups, tables, settings)
    user = setup.user_optimizer(chosen, settings, groups, cuts)
    if user is not None:
        check_rules(user, {id(module.weight): name for name, module in tables.items()}, settings, users=True)
        return groups, user, setup.build_scheduler(settings, chosen.scheduler, user), None
    # A scheduler of the user's is not tried: its function wants the optimizer that will be stepped.
    tried = setup.try_optimizer(chosen.model, settings, groups, cuts, chosen.scheduler is None, tables)
    return groups, None, chosen.scheduler, tried


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


def _changed_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that are no defaults, without sizes that only follow from the number of ranks."""
    changed = plan.settings.model_dump(exclude_defaults=True)
    changed["mesh"] = {axis: size for axis, size in changed.get("mesh", {}).items() if size != 1}
    if not plan.says_batch and plan.loader is None:  # the program, as Keras' fit, has batches of its own
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            changed.pop(key, None)
    return {key: value for key, value in changed.items() if value != {}}


def make_engine(
    placing: Placing, predict: Callable[..., dict[str, Any]], kind: Callable[[EngineState], Engine] = Engine
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Make the engine of a placed model, and log the settings that the user changed."""
    plan, optimizer, sharded = placing.plan, placing.optimizer, placing.placed
    settings, first = plan.settings, plan.mesh.rank == 0
    if first:
        used = {} if optimizer is None else {**optimizer.param_groups[0]}
        used["lr"] = used.get("initial_lr", used.get("lr"))  # a schedule has moved it already
        values = {f"optimizer.params.{k}": v for k, v in used.items() if k != "params"}
        tell_unset(plan.arguments.config, settings, values)
        if optimizer is not None:
            tell_defaults(plan.arguments.config)
    try:
        engine = kind(EngineState(placing, predict))
    except BaseException as error:
        placing.abandon(error)
        raise
    owners.register(engine)
    if first:
        size, units = counted(plan.mesh.world_size, "rank"), counted(len(sharded.units), "unit")
        # A line for each key: as one JSON object it is longer than a screen is wide.
        chosen_keys = "".join(f"\n  {line}" for line in lines_of(jsonable(_changed_settings(plan))))
        _log.info("%s on %s, %s; settings you changed:%s", row_name(settings.row), size, units, chosen_keys)
    return engine, optimizer, plan.loader, placing.scheduler
