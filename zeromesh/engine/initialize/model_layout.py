"""Layout of a model over the ranks: mesh, tensor plan, pipeline stages, spread sequences."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.base.axes import AXES
from zeromesh.base.keras_layers import layers_of
from zeromesh.base.precision import Precision
from zeromesh.base.quantized_layers import layers
from zeromesh.comm.agreement import agree_run, catch, require_agreement
from zeromesh.comm.environment import Environment, device_of_group, init_distributed
from zeromesh.comm.mesh import Links, Mesh
from zeromesh.comm.message_formats import FORMATS
from zeromesh.engine.batches import loss_of
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.sequence import Stack, find_stacks
from zeromesh.parallel.tensor.split_plan import PlanRule, matches, pattern_of
from zeromesh.parallel.tensor.split_plan import SplitPlan as SplitPlan
from zeromesh.parallel.tensor.tensor_plan import as_json, parse, resolve
from zeromesh.shard.find_units import find_units
from zeromesh.shard.tables.find_tables import find_tables

if TYPE_CHECKING:
    from zeromesh.base.dry.model_inputs import ModelInput
    from zeromesh.base.loader import Loader
    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.engine.pipelined import Pipelined
    from zeromesh.parallel.activation.tiles import Tiled
    from zeromesh.parallel.expert.forms import Experts

# Plan of the tensor axis, and the stacks of blocks between which the sequence is split.
Split = tuple[SplitPlan, list[Stack]]

_log = logging.getLogger("zeromesh")


def find_tiles(model: nn.Module, settings: Resolved, tells: bool) -> Mapping[str, Tiled]:
    """Return the modules to compute in tiles of tokens, by name; raise ValueError for one that mixes tokens."""
    chosen = settings.tiling
    if chosen.mlp is None:
        return {}
    from zeromesh.parallel.activation.tiles import find_tiled

    tiled = find_tiled(model, find_units(model, chosen.modules) if chosen.modules else None)
    if tells:
        _log.info("computed in tiles of %s tokens: %s", chosen.mlp, ", ".join(dict.fromkeys(map(pattern_of, tiled))))
    return tiled


def make_mesh(settings: Settings, environment: Environment | None = None) -> Mesh:
    """Return the mesh that the configuration describes, over the running ranks. Collective."""
    environment = environment or init_distributed()
    sizes = settings.resolve_mesh(environment.world_size)
    gather, reduce = (None if name is None else FORMATS[name] for name in settings.across_nodes)
    node = None if environment.one_node else environment.node_rank
    count = settings.communication.ranks_per_node
    if count is not None:
        if environment.world_size % count:
            raise ValueError(
                f"communication.ranks_per_node is {count}, which does not divide the {environment.world_size} ranks; "
                "set it to a divisor, or leave it out"
            )
        # The setting wins over what was detected, as a fast link may join less or more than a machine.
        node = environment.rank // count
    links = Links(node, settings.communication.hierarchical, gather, reduce, settings.communication.local_memory)
    return Mesh(sizes, device_of_group(environment), links)


def take_expert_size(model: nn.Module, settings: Settings, mesh: Mesh | None) -> Settings:
    """Return the configuration, with the ``ep_size`` of MoE layers. Raise ValueError if they contradict it."""
    layers = sys.modules.get("zeromesh.parallel.expert.moe_layer")  # not imported: then no model has any
    wanted = 1 if layers is None else layers.wanted_ranks(model)
    said = settings.mesh.expert if "expert" in settings.mesh.model_fields_set else None
    said = said if mesh is None else mesh.sizes["expert"]
    if wanted == 1 or said == wanted:
        return settings
    if said is not None:
        raise ValueError(
            f"the model's MoE layers have ep_size {wanted}, and mesh.expert is {said}; leave one of them out"
        )
    return settings.model_copy(update={"mesh": settings.mesh.model_copy(update={"expert": wanted})})


def find_shared_experts(model: nn.Module, settings: Resolved, mesh: Mesh) -> list[Experts]:
    """Return the experts that the ranks of the expert axis share; none where it has one rank."""
    if mesh.sizes["expert"] == 1:
        return []
    # Imported here: a dense model needs none of it.
    from zeromesh.parallel.expert.forms import find_experts

    return find_experts(model, settings.experts.targets, mesh.sizes["expert"])


def split_plan(
    model: nn.Module,
    settings: Resolved,
    mesh: Mesh,
    experts: Sequence[Experts] = (),
    loader: Loader | None = None,
    loss_fn: Any = None,
) -> Split | None:
    """Return the plan of the tensor axis: the user's entries over derived ones; None where the axis has one rank."""
    group = mesh.group("tensor")
    user_rules = parse(settings.tensor_parallel.plan or {})
    if group.size == 1:
        resolve(model, user_rules, {}, 0, 1)  # raises for a wrong plan, on one rank too
        return None
    if (coded := next(iter(layers(model)), None)) is not None:
        raise ValueError(
            f"{coded[0]}.weight is quantized, and its blocks cannot be split over the {group.size} ranks of "
            'mesh.tensor; leave that out: "zero_optimization": {"stage": 3} shards such weights over the ranks'
        )
    derived_rules, notes = derive(model, group.size, lambda: _sample(loader, loss_fn, mesh.device))
    # On a slow machine one rank may have run out of time in its trace.
    require_agreement(group, "the plan of the tensor axis", as_json(derived_rules))
    # The rows of tables are spread over the data ranks; only a rule of the user's splits one over these ranks instead.
    tables, _ = find_tables(model, settings.embedding_tables.modules, {})
    derived_rules = {name: rule for name, rule in derived_rules.items() if name not in tables}
    # Experts that ranks share are whole, and what calls them gets all tokens of this rank's samples.
    callers = dict.fromkeys((item.caller for item in experts), PlanRule("shared_experts"))
    derived_rules = callers | derived_rules | callers  # go first, also before rules for the same names
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    inside = [name for name in named if any(f"{name}.".startswith(f"{item.name}.") for item in experts)]
    for pattern in user_rules:
        if (clash := next((name for name in (*inside, *callers) if matches(name, pattern)), None)) is not None:
            raise ValueError(
                f"tensor_parallel.plan: {pattern!r} names {clash}, but mesh.expert is {mesh.sizes['expert']}, and "
                "experts that ranks share stay whole; leave the rule out, or set mesh.expert to 1, to split each expert"
            )
    without = {*tables, *inside} - {*callers}
    if mesh.rank == 0:
        listing = "".join(f"\n  {note}" for note in notes)
        _log.info(
            "the model is split over %d ranks by this plan:\n%s%s",
            group.size,
            as_json(derived_rules | user_rules),
            listing,
        )
    resolved = resolve(model, user_rules, derived_rules, group.rank, group.size, without=without)
    if mesh.rank == 0:
        parameters = [(parameter, resolved.of_parameter.get(id(parameter))) for parameter in model.parameters()]
        every = sum(parameter.nbytes for parameter, _ in parameters)
        here = sum(
            parameter.nbytes if part is None else prod(part.shape) * parameter.itemsize
            for parameter, part in parameters
        )
        split = sum(parameter.nbytes for parameter, part in parameters if part is not None and part.split is not None)
        _log.info(
            "the tensor axis splits %.1f %% of the bytes of the parameters; each of its %d ranks has %.1f %% of all",
            100 * split / every,
            group.size,
            100 * here / every,
        )
    return resolved, find_stacks(model, resolved) if settings.tensor_parallel.sequence else []


def refuse_axes(model: nn.Module, mesh: Mesh) -> None:
    """Raise ValueError if ranks would share layers of a model of Keras, which are not split."""
    shared = [axis for axis, role in AXES.items() if (role.splits or role.folded) and mesh.sizes[axis] > 1]
    wanted = [f"{axis} = {mesh.sizes[axis]}" for axis in shared]
    if wanted and (layer := next(layers_of(model), None)) is not None:
        raise ValueError(
            f"the mesh has {' and '.join(wanted)}, and {type(layer).__name__} is of Keras, whose layers are not split: "
            'leave it out; "zero_optimization": {"stage": 3} shards all parameters, gradients and optimizer '
            "states over the ranks"
        )


def plan_stages(
    model: nn.Module, settings: Resolved, mesh: Mesh, loader: Loader | None = None, loss_fn: Any = None
) -> Pipelined | None:
    """Return the pipeline stages of the model and their schedule; None where there is one stage. Collective."""
    chosen, world = settings.pipeline, mesh.group("world")
    if mesh.sizes["pipeline"] == 1:
        if chosen.record is not None:
            _log.warning("pipeline.record is set, but mesh.pipeline is 1: there are no stages, and nothing is recorded")
        return None
    # Imported here: a run without stages needs none of it.
    from zeromesh.engine.pipelined import Pipelined, agreed
    from zeromesh.parallel.pipeline.runtime.cut import describe_stages, examine

    sample = _sample(loader, loss_fn, mesh.device)
    # What runs a block as a whole, or again in the backward, knows no stage that begins inside of it.
    wholes = settings.activation_checkpointing.enabled or settings.compile.enabled
    spreads = mesh.sizes["tensor"] * mesh.sizes["context"] > 1
    parts = not (wholes or spreads or chosen.blocks)

    examined = agree_run(world, "cut the model into stages", lambda: examine(model, chosen.blocks, sample, parts))
    blocks = agreed(world, examined)
    accumulation = settings.gradient_accumulation_steps
    # A forward that was traced without gradients computes none itself, and recomputation would keep what it saves.
    splits = blocks.operations is not None and not settings.activation_checkpointing.enabled
    pipelined = agree_run(
        world, "plan the pipeline", lambda: Pipelined(model, mesh, chosen, accumulation, blocks, splits)
    )
    if pipelined.schedules.from_file:
        require_agreement(world, "the schedule of the pipeline", str(pipelined.schedules.of(accumulation)))
    if mesh.rank == 0:
        lines = "".join(f"\n  {line}" for line in describe_stages(model, blocks, pipelined.cut))
        chosen_cut = f"pipeline.partition = {json.dumps(chosen.partition)}"
        _log.info("the model is cut into stages by %s:%s", chosen_cut, lines)
    return pipelined


def _sample(loader: Loader | None, loss_fn: Any, device: torch.device) -> ModelInput | None:
    """Return the first samples of the data, as the model will get them; None where they cannot be read."""
    from zeromesh.base.dry.model_copy import undisturbed
    from zeromesh.base.dry.model_inputs import ModelInput

    if loader is None:
        return None

    def read() -> ModelInput:
        loss_copy = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn  # it may count its calls
        return ModelInput(loader.example(), partial(loss_of, loss_fn=loss_copy))

    # Reading may draw random numbers, and the run is to draw the same with and without this look.
    with undisturbed(device):
        sample, failure = catch(read)
    if failure is not None:
        # No error: without a sample the model is cut by its structure alone.
        _log.debug("the first samples of training_data cannot be read", exc_info=failure)
    return sample


def take_stage(
    model: nn.Module, cut: Pipelined, owned: list[dict[str, Any]], plan: Split | None, precision: Precision
) -> tuple[list[dict[str, Any]], Split | None]:
    """Take from the model all that other stages have; return the parameter groups and the plan of the rest."""
    cut.take_away(precision)
    # All groups stay, even empty ones, so that each has the same number on every stage.
    here = {id(parameter) for parameter in model.parameters()}
    groups = [{**group, "params": [p for p in group["params"] if id(p) in here]} for group in owned]
    if plan is not None:
        resolved, stacks = plan
        members = []
        for member in resolved.members:
            member_parameter = member.module._parameters.get(member.parameter) if member.parameter else None
            # A member without parameters here belongs to a layer of another stage.
            if any(
                id(tensor) in here
                for tensor in ([member_parameter] if member.parameter else member.module.parameters())
            ):
                members.append(member)
        heads = {
            name: heads
            for name, heads in resolved.heads.items()
            if next(model.get_submodule(name).parameters(), None) is not None
        }
        parts = [stack.part(blocks) for blocks in cut.blocks_by_stage for stack in stacks]
        stacks = [part for part in parts if part.blocks]
        plan = SplitPlan(members, resolved.held, resolved.of_parameter, heads), stacks
    return groups, plan
