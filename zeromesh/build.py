"""``initialize``: puts the parts together. Power users may write their own from the same functions."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zeromesh import zero
from zeromesh.batches import cast, loss_of
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.comm.agreement import attempt, describe, require_agreement, share, world_group
from zeromesh.comm.detect import may_restart
from zeromesh.comm.environment import Environment, device_of_group, init_distributed, is_launched
from zeromesh.comm.formats import FORMATS
from zeromesh.comm.mesh import Links, Mesh
from zeromesh.config.printing import jsonable, lines_of
from zeromesh.config.unset import tell_unset
from zeromesh.engine import Engine
from zeromesh.fed import FedBatches
from zeromesh.model.containers import map_tensors
from zeromesh.model.piece import Piece
from zeromesh.model.placement import Placement
from zeromesh.model.split import Held
from zeromesh.observing import make_observer, open_monitors
from zeromesh.offload import Offload, preparation, where_offloaded
from zeromesh.optim.host import states_of
from zeromesh.pipe import PipelineModule, settings_of
from zeromesh.precision.scaler import LossScaler
from zeromesh.pretrained import describe_sources
from zeromesh.shard import guard, hooks
from zeromesh.shard.accumulation import Accumulation
from zeromesh.shard.deferred import Source
from zeromesh.shard.exchange import FlatExchange
from zeromesh.shard.find import check_compiled, check_parameters, find_units
from zeromesh.shard.materialise import materialiser, replace
from zeromesh.shard.needs import Prepare
from zeromesh.shard.sharded import Sharded, Slots
from zeromesh.signatures import refuse, takes_args_first
from zeromesh.tensor.apply import apply, chunk_losses
from zeromesh.tensor.derive import derive, heads_over_vocabulary
from zeromesh.tensor.plan import Resolved as SplitPlan
from zeromesh.tensor.plan import as_json, describe_plan, parse, resolve
from zeromesh.tensor.sequence import Stack, find_stacks

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from zeromesh.activation.store import Store
    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.context.applied import Applied
    from zeromesh.model.piece import PieceExchange
    from zeromesh.observe.monitors import Monitor
    from zeromesh.pipeline.cut import Blocks
    from zeromesh.pipeline.samples import Sample
    from zeromesh.pipelined import Pipelined
    from zeromesh.training_data import Loader

Config = str | Path | Mapping[str, Any]

Split = tuple[SplitPlan, list[Stack]]

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
    from zeromesh.config.settings import Settings

    if not isinstance(model, nn.Module):
        named = "" if model is None else f", not a {type(model).__name__}"
        raise ValueError(f"initialize needs a model: pass model= with a torch.nn.Module{named}")
    sizes = 'set the sizes of the axes in the configuration, as in "mesh": {"tensor": 2, "context": 2}'
    refuse("initialize", "mpu", mpu, sizes)
    refuse("initialize", "mesh_param", mesh_param, sizes)
    given = _configuration(config, config_params, args)
    _show_log()
    if loss_fn is None and isinstance(model, PipelineModule):
        loss_fn = model.loss_fn
    settings, failure = attempt(lambda: settings_of(model, Settings.load(given), mesh))
    if failure is None:
        assert settings is not None
        failure = attempt(lambda: _check(model, lr_scheduler, settings))[1]
    if failure is not None and not (is_launched() or dist.is_initialized()):
        raise failure
    environment = init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = world_group(device_of_group(environment))
    share(world, "read its configuration and model", failure)
    assert settings is not None
    # Before the mesh, whose groups are made by all ranks or by none.
    require_agreement(world, "the configuration", "\n".join(lines_of(json.loads(settings.to_json()))))
    require_agreement(world, "the model", describe(model))
    mesh = mesh or make_mesh(settings, environment)
    resolved = settings.resolve(mesh.data_size, mesh.sizes, elastic=may_restart())
    if resolved.debug.collectives:
        mesh.compare_calls()
    _tell_batch(settings, resolved, mesh)
    if mesh.rank == 0:
        _tell_sparse(model)

    def prepare() -> tuple[list[dict[str, Any]], Optimizer | None, Any, Loader | None, Monitor, Split | None, Offload]:
        """What can be made, or tried, while the model is as it was."""
        plan = split_plan(model, resolved, mesh)
        if resolved.chunked_loss:
            heads_over_vocabulary(model)
        shuffles = not isinstance(model, PipelineModule)
        loader = _loader(training_data, collate_fn, resolved, mesh, shuffles)
        monitor = open_monitors(resolved, mesh)
        owned = list(_parameters_and_groups(model, model_parameters))
        user = _user_optimizer(optimizer, owned)
        if user is not None:
            _check_users_optimizer(user, model, mesh, resolved)
            scheduler = _build_scheduler(resolved, lr_scheduler, user)
            return owned, user, scheduler, loader, monitor, plan, where_offloaded(resolved, user)
        with _silent("zeromesh.optim"):  # it will speak when they are made in earnest
            stand_in = _stand_in(model, mesh, resolved, owned)
            if lr_scheduler is None:
                _build_scheduler(resolved, None, stand_in)
        return owned, None, lr_scheduler, loader, monitor, plan, where_offloaded(resolved, stand_in)

    prepared, failure = attempt(prepare)
    share(world, "prepare its optimizer, schedule, data and monitors", failure)
    assert prepared is not None
    owned, built, scheduler, loader, monitor, plan, offload = prepared
    cut = plan_stages(model, resolved, mesh, loader, loss_fn)
    spread, failure = attempt(lambda: spread_sequences(model, resolved, mesh, loss_fn))
    share(world, "spread its sequences over ranks", failure)
    require_agreement(world, "the tensor-parallel plan", "" if plan is None else describe_plan(plan[0]))
    require_agreement(world, "training_data", f"samples: {'none' if loader is None else loader.sampler.length}")
    sharded, everywhere = None, [] if built is None else list(model.parameters())
    try:
        described, unread = attempt(lambda: describe_sources(model))  # the whole, of which stages have parts
        if cut is not None:
            owned, plan = _take_stage(model, cut, owned, plan, resolved.precision.compute)
        values, failure = attempt(lambda: Values(materialiser(model, resolved.seed)))
        share(world, "read its part of the weights", failure or unread)
        assert values is not None
        require_agreement(world, "the checkpoint that is read", described or "")
        _place_buffers(model, mesh.device, resolved.precision.buffers)
        held = None if plan is None else plan[0].held
        sharded = shard(model, mesh, resolved, values, held, cut, preparation(model, offload, mesh))
        if plan is not None:
            apply(model, plan[0], mesh.group("tensor"), mesh.device, plan[1], _while_it_lives(sharded.events.using))
            share_random_state(mesh.group("tensor"))
        elif resolved.chunked_loss:
            chunk_losses(model, heads_over_vocabulary(model), _while_it_lives(sharded.events.using))
        share(world, "read its part of the weights", values.failure)
        if built is not None:
            _adopt(built, sharded, resolved, everywhere)
        else:
            exchange = FlatExchange(sharded.flats, sharded.row, mesh)
            built = _build_optimizer(model, mesh, resolved, owned, sharded.pieces, exchange)
            scheduler = _build_scheduler(resolved, lr_scheduler, built)
        if sharded.swap is not None and built is not None:
            sharded.swap.serve(built, states_of(built))
    except BaseException as error:
        if sharded is not None:
            sharded.close()
        error.add_note("zeromesh.initialize had begun to change the model: build it anew before you try again")
        raise
    store = _store(resolved, mesh)
    _checkpoint_activations(model, resolved, store)
    if mesh.rank == 0:
        tell_unset(given, resolved, _used(built))
    fed = FedBatches((settings.says_batch and resolved.train_micro_batch_size_per_gpu) or None, mesh.rank == 0)
    observer = make_observer(model, resolved, mesh, monitor)
    engine = Engine(sharded, resolved, built, scheduler, loss_fn, loader, observer, fed)
    engine.context_parallel = spread
    engine.pipelined = cut
    engine.activations = store
    zero.register(engine)
    if mesh.rank == 0:
        text = json.dumps(jsonable(resolved.model_dump(exclude_defaults=True)))
        _log.info("%d ranks, %d units; what is not a default: %s", mesh.world_size, len(sharded.units), text)
    return engine, built, loader, scheduler


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


def _tell_batch(settings: Settings, resolved: Resolved, mesh: Mesh) -> None:
    """Say where the number of ranks has changed what the configuration says about batches."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    changes = [
        f"{key} is {getattr(resolved, key)} instead of {getattr(settings, key)}"
        for key in keys
        if getattr(settings, key) not in (None, getattr(resolved, key))
    ]
    if changes and mesh.rank == 0:
        ranks, batch = mesh.data_size, resolved.train_batch_size
        _log.info(
            "%s: train_batch_size = %d is kept on %d data-parallel rank%s",
            " and ".join(changes),
            batch,
            ranks,
            "s" * (ranks > 1),
        )


def _used(optimizer: Optimizer | None) -> dict[str, Any]:
    """The arguments of the optimizer's first group, by their keys in the configuration."""
    group = {} if optimizer is None else {**optimizer.param_groups[0]}
    group["lr"] = group.get("initial_lr", group.get("lr"))  # a schedule has moved it already
    return {f"optimizer.params.{key}": value for key, value in group.items() if key != "params"}


class Values:
    """Parameters' values as a materialiser makes them; if that fails, wrong ones until all ranks can hear of it.

    Attributes:
        failure: the first one.
    """

    def __init__(self, materialise: Callable[[str, nn.Parameter], Source | None]) -> None:
        self.failure: Exception | None = None
        self._materialise = materialise

    def __call__(self, name: str, parameter: nn.Parameter) -> Source | None:
        """See ``materialiser``."""
        source, failure = attempt(lambda: self._materialise(name, parameter))
        if failure is not None:
            replace(parameter, self._stand_in(failure, parameter.shape).to(parameter.dtype))
        return None if source is None else Reading(source, self._stand_in)

    def _stand_in(self, failure: Exception | None, size: torch.Size) -> torch.Tensor:
        self.failure = self.failure or failure
        return torch.zeros(size)


@dataclass(frozen=True)
class Reading:
    """A source of ``Values``."""

    source: Source
    stand_in: Callable[[Exception | None, torch.Size], torch.Tensor]

    def __str__(self) -> str:
        return str(self.source)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements of it, or those that stand for them."""
        value, failure = attempt(lambda: self.source.read(start, stop))
        return value if value is not None else self.stand_in(failure, torch.Size([stop - start]))


def _show_log() -> None:
    """Where nobody has said what becomes of the log, write it to standard error; on the first rank from INFO on."""
    logger = logging.getLogger("zeromesh")
    if logger.handlers or logging.root.handlers or logger.level != logging.NOTSET:
        return
    first = (dist.get_rank() if dist.is_initialized() else Environment.detect().rank) == 0
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("zeromesh: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if first else logging.WARNING)


def make_mesh(settings: Settings, environment: Environment | None = None) -> Mesh:
    """The mesh that the configuration describes, over the ranks that are running."""
    environment = environment or init_distributed()
    sizes = settings.resolve_mesh(environment.world_size)
    return Mesh(sizes, device_of_group(environment), _links(settings, environment))


def _links(settings: Settings, environment: Environment) -> Links:
    """Where this rank is among the nodes, and how the links between them are used."""
    gather, reduce = (None if name is None else FORMATS[name] for name in settings.across_nodes)
    node = None if environment.one_node else environment.node_rank
    count = settings.communication.ranks_per_node
    if count is not None:
        if environment.world_size % count:
            raise ValueError(
                f"communication.ranks_per_node is {count}, which does not divide the {environment.world_size} ranks; "
                "set it to a divisor, or leave it out"
            )
        node = environment.rank // count
    return Links(node, settings.communication.hierarchical, gather, reduce)


def shard(
    model: nn.Module, mesh: Mesh, settings: Resolved, materialise: Any = None, split: Mapping[str, Held] | None = None,
    cut: Pipelined | None = None, prepare: Prepare | None = None,
) -> Sharded:  # fmt: skip
    """Place the model's states over the mesh as the configuration says; ``split`` as ``Sharded`` takes it."""
    scaler = LossScaler(settings.precision.loss_scale) if settings.precision.loss_scale else None
    return Sharded(
        model,
        mesh,
        settings.row,
        settings.precision,
        Slots(settings.slots.parameter, settings.slots.gradient),
        targets=settings.units,
        accumulation=Accumulation(settings.gradient_accumulation_steps, scaler),
        predivide=settings.gradient_predivide,
        materialise=materialise,
        split=split,
        tied=None if cut is None else cut.tied,
        idle=frozenset() if cut is None else cut.idle,
        prepare=prepare,
    )


def _tell_sparse(model: nn.Module) -> None:
    """Warn of embeddings whose gradients torch would make sparse."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    names = [name or "the model" for name, m in model.named_modules() if isinstance(m, tables) and m.sparse]
    if names:
        _log.warning(
            "gradients of %s are dense here, in spite of sparse=True: optimizers with moments or weight decay change "
            "rows that no batch used, which in torch they refuse to do; leave sparse=True out if that is what you want",
            ", ".join(names),
        )


def split_plan(model: nn.Module, settings: Resolved, mesh: Mesh) -> Split | None:
    """What of the model is split along the tensor axis, and where the sequence is; None where that has one rank.

    Raises:
        ValueError: the model cannot be split so.
    """
    group = mesh.group("tensor")
    given = parse(settings.tensor_parallel.plan or {})
    if group.size == 1:
        resolve(model, given, {}, 0, 1)  # raises where the plan is wrong, which is better told before there are ranks
        return None
    found, notes = derive(model, group.size)
    if mesh.rank == 0:
        whole = "".join(f"\n  {note}" for note in notes)
        _log.info("the model is split over %d ranks by this plan:\n%s%s", group.size, as_json(found | given), whole)
    resolved = resolve(model, given, found, group.rank, group.size)
    if mesh.rank == 0:
        parameters = [(one, resolved.of_parameter.get(id(one))) for one in model.parameters()]
        every = sum(one.nbytes for one, _ in parameters)
        here = sum(one.nbytes if held is None else prod(held.shape) * one.itemsize for one, held in parameters)
        split = sum(one.nbytes for one, held in parameters if held is not None and held.split is not None)
        _log.info(
            "the tensor axis splits %.1f %% of the bytes of the parameters; each of its %d ranks has %.1f %% of all",
            100 * split / every, group.size, 100 * here / every,
        )  # fmt: skip
    return resolved, find_stacks(model, resolved) if settings.tensor_parallel.sequence else []


def plan_stages(
    model: nn.Module, settings: Resolved, mesh: Mesh, loader: Loader | None = None, loss_fn: Any = None
) -> Pipelined | None:
    """Where the model is cut into stages, and in which order these compute; None where there is one.

    All ranks call it.

    Raises:
        ValueError: it cannot be cut so, or there is no such schedule.
    """
    chosen, world = settings.pipeline, mesh.group("world")
    if mesh.sizes["pipeline"] == 1:
        if chosen.record is not None:
            _log.warning("pipeline.record is set, but mesh.pipeline is 1: there are no stages, and nothing is recorded")
        return None
    from zeromesh.pipeline.cut import describe_stages, examine
    from zeromesh.pipelined import Pipelined, agreed

    sample = None if loader is None else _sample(loader, loss_fn, mesh.device)

    def look() -> Blocks:
        blocks = examine(model, chosen.blocks, sample)
        return _measured(model, blocks, settings, mesh.device) if chosen.partition == "time" else blocks

    found, failure = attempt(look)
    share(world, "cut the model into stages", failure)
    assert found is not None
    blocks = agreed(world, found)
    made = Pipelined(model, mesh, chosen, settings.gradient_accumulation_steps, blocks)
    if mesh.rank == 0:
        lines = "".join(f"\n  {line}" for line in describe_stages(model, blocks, made.cut))
        _log.info("the model is cut into stages by pipeline.partition = %s:%s", json.dumps(chosen.partition), lines)
    return made


def _measured(model: nn.Module, blocks: Blocks, settings: Resolved, device: torch.device) -> Blocks:
    """The blocks with the time that each takes, if it is known what the model is called with."""
    from zeromesh.pipeline.timing import measured

    precision = settings.precision

    def prepare(copied: nn.Module) -> Callable[..., Any]:
        """As the engine would call it."""
        _place_buffers(copied, device, precision.buffers)
        if settings.chunked_loss:
            chunk_losses(copied, heads_over_vocabulary(copied), nullcontext)
        _checkpoint_activations(copied, settings)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if precision.compute is not None and precision.cast_inputs:
                args, kwargs = map_tensors((args, kwargs), partial(cast, dtype=precision.compute))
            with torch.autocast(device.type, precision.autocast, precision.autocast is not None, cache_enabled=False):
                return copied(*args, **kwargs)

        return forward

    try:
        return measured(model, blocks, device, precision.compute, prepare)
    except Exception as error:
        raise ValueError(
            f'pipeline.partition is "time", and the time that blocks of {type(model).__name__} take cannot be measured '
            f"({type(error).__name__}: {error}); pass training_data to initialize with samples that the model takes, "
            'or set it to "best"'
        ) from error


def _sample(loader: Loader, loss_fn: Any, device: torch.device) -> Sample | None:
    """What the model will be given; None where the data cannot be read like that."""
    from zeromesh.pipeline.samples import Sample, undisturbed

    def read() -> Sample:
        own = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn  # it may count its calls
        return Sample(loader.example(), partial(loss_of, loss_fn=own))

    with undisturbed(device):
        sample, failure = attempt(read)
    if failure is not None:
        _log.debug("the first samples of training_data cannot be read", exc_info=failure)
    return sample


def _take_stage(
    model: nn.Module, cut: Pipelined, owned: list[dict[str, Any]], plan: Split | None, dtype: torch.dtype | None
) -> tuple[list[dict[str, Any]], Split | None]:
    """Leave the model what this rank's stages need; the parameter groups and the plan have only that then, too."""
    cut.take_away(dtype)
    here = {id(parameter) for parameter in model.parameters()}
    groups = [{**group, "params": [p for p in group["params"] if id(p) in here]} for group in owned]
    if plan is not None:
        resolved, stacks = plan
        members = [m for m in resolved.members if _is_here(m, here)]
        heads = {
            name: heads
            for name, heads in resolved.heads.items()
            if next(model.get_submodule(name).parameters(), None) is not None
        }
        parts = [stack.part(blocks) for blocks in cut.blocks_by_stage for stack in stacks]
        stacks = [part for part in parts if part.blocks]
        plan = SplitPlan(members, resolved.held, resolved.of_parameter, heads), stacks
    return groups, plan


def _is_here(member: Any, here: set[int]) -> bool:
    """Whether this rank has what a member of a plan is about."""
    module = member.module
    parameters = [module._parameters.get(member.parameter)] if member.parameter else module.parameters()
    return any(id(parameter) in here for parameter in parameters)


def _while_it_lives(using: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """The same for a model that outlives its engine, whose memory it must not keep, and for copies of the model."""
    method = WeakMethod(using)

    def use() -> AbstractContextManager[None]:
        alive = method()
        return nullcontext() if alive is None else alive()

    return use


def spread_sequences(model: nn.Module, settings: Resolved, mesh: Mesh, loss_fn: Any) -> Applied | None:
    """Change the model so that each rank along the context axis computes its part of the sequences; None: there is one.

    Raises:
        ValueError: the model cannot be spread; it is as it was then.
    """
    group = mesh.group("context")
    if group.size == 1:
        return None
    if loss_fn is not None:
        raise ValueError(
            "loss_fn would be given the labels of whole sequences, and logits of this rank's part; leave it out, and "
            "have the model return its loss"
        )
    from zeromesh.context.apply import apply as spread

    return spread(model, settings.context_parallel.strategy, group)


def _check(model: nn.Module, lr_scheduler: Any, settings: Settings) -> None:
    """Refuse what cannot be trained while everything is as it was."""
    _check_free(model)
    check_parameters(model)
    find_units(model, settings.units)
    if settings.activation_checkpointing.enabled:
        find_units(model, settings.activation_checkpointing.targets)
    if settings.row.parameter is Placement.SHARDED:
        check_compiled(model, settings.units)
    if lr_scheduler is not None and not _makes_scheduler(lr_scheduler):
        _check_scheduler(lr_scheduler)


def _check_free(model: nn.Module) -> None:
    """Raise ValueError if some of the model belongs to an engine: two would move the same memory."""
    held = [name for name, module in model.named_modules() if _is_driven(module)]
    held += [name for name, parameter in model.named_parameters() if _is_held(parameter)]
    if held:
        raise ValueError(
            f"{held[0] or 'the model'} already belongs to an engine; train with that one, or pass another model, which "
            "may load the weights that the engine's gathered_state_dict() gives; where parameters are not sharded, the "
            "model is free again after engine.destroy()"
        )


def _is_held(parameter: nn.Parameter) -> bool:
    """Whether it is an engine's that has not been destroyed, or was left sharded by one that has."""
    owner = zero._OWNERS.get(parameter, lambda: None)()
    return type(parameter).__module__ == guard.__name__ or (owner is not None and _is_driven(owner.module))


def _is_driven(module: nn.Module) -> bool:
    """Whether an engine that has not been destroyed listens to the module's forward."""
    return any(isinstance(hook, hooks.Hook) for hook in module._forward_pre_hooks.values())


def _makes_scheduler(given: Any) -> bool:
    """Whether it is a function, or a class, that makes one."""
    return isinstance(given, type) or not hasattr(given, "step")


def _check_scheduler(scheduler: Any) -> None:
    arguments = inspect.signature(scheduler.step).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    if needed:
        raise ValueError(
            f"{type(scheduler).__name__}.step needs {', '.join(needed)}, which the engine does not have; pass no "
            "lr_scheduler, and call its step yourself"
        )


def _place_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move buffers to the device, and convert floating-point ones to ``dtype``; None keeps the dtype of each.

    Normalisations with running statistics, whose parameters keep their dtype in 16-bit runs, keep that of their
    buffers, too.
    """
    # By ``id``, so that what is in two places stays one; with the old one, so that it keeps its ``id``.
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        keeps_all = isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in placed:
                converts = buffer.is_floating_point() and not keeps_all
                placed[id(buffer)] = buffer, buffer.to(device=device, dtype=dtype if converts else None)
            module._buffers[name] = placed[id(buffer)][1]


def _store(settings: Resolved, mesh: Mesh) -> Store | None:
    """Where the inputs of checkpointed modules wait for the backward; None: where they are."""
    chosen = settings.activation_checkpointing
    if not chosen.enabled:
        return None
    group = mesh.group("tensor")
    # Where the sequence is split over these ranks, each has a part of the inputs anyway.
    partitions = chosen.partition_activations and group.size > 1 and not settings.tensor_parallel.sequence
    if not (chosen.cpu_checkpointing or partitions):
        return None
    from zeromesh.activation.store import Store

    return Store(mesh.device, chosen.cpu_checkpointing, group if partitions else None)


def _checkpoint_activations(model: nn.Module, settings: Resolved, store: Store | None = None) -> None:
    chosen = settings.activation_checkpointing
    if chosen.enabled:
        from zeromesh.activation.checkpoint import checkpoint_modules

        found = find_units(model, chosen.targets or settings.units)
        # A leaf has nothing inside that would be kept; recomputing it only costs time.
        inner = (module for _, module in found if chosen.targets or next(module.children(), None) is not None)
        checkpoint_modules(inner, store)


def _parameters_and_groups(model: nn.Module, given: Iterable[Any] | None) -> Iterator[dict[str, Any]]:
    """The parameter groups that the configuration's optimizer is to update, as lists of the model's parameters."""
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


def _user_optimizer(given: Any, owned: Sequence[dict[str, Any]]) -> Optimizer | None:
    if given is None or isinstance(given, Optimizer):
        return given
    if not callable(given) or isinstance(given, nn.Module):
        raise ValueError(f"optimizer is a {type(given).__name__}; pass a torch optimizer, or a function that makes one")
    made = given([dict(group) for group in owned] if len(owned) > 1 else list(owned[0]["params"]))
    if not isinstance(made, Optimizer):
        raise ValueError(f"the function passed as optimizer returned a {type(made).__name__}, not a torch optimizer")
    return made


def _build_optimizer(
    model: nn.Module,
    mesh: Mesh,
    settings: Resolved,
    owned: Sequence[dict[str, Any]],
    pieces: Mapping[int, Piece | None],
    exchange: PieceExchange,
) -> Optimizer | None:
    """The configuration's. ``pieces`` are by ``id`` of the parameter."""
    from zeromesh.optim import factory
    from zeromesh.optim.groups import hidden_matrices

    if settings.optimizer is None:
        return None
    groups = []
    for group in owned:
        mine = [pieces.get(id(parameter)) for parameter in group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "name", "param_names")}
        groups.append(factory.Group(tuple(piece for piece in mine if piece is not None), options))
    chosen, allow = settings.optimizer, settings.zero_allow_untested_optimizer
    matrices = hidden_matrices(model) if chosen.type.lower() == "muon" else frozenset()
    return factory.build(chosen.type, dict(chosen.params), groups, exchange, _is_cut(mesh, settings), allow, matrices)


def _stand_in(model: nn.Module, mesh: Mesh, settings: Resolved, owned: Sequence[dict[str, Any]]) -> Optimizer | None:
    """The configuration's optimizer over pieces without memory: it raises what the real one would."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    pieces: dict[int, Piece | None] = {}
    for name, like in trained:
        empty = nn.Parameter(torch.empty(like.numel(), dtype=like.dtype, device="meta"))
        pieces[id(like)] = Piece(name, Held(tuple(like.shape)), 0, like.numel(), empty)
    exchange: Any = SimpleNamespace(buckets=[[name for name, _ in trained]])
    return _build_optimizer(model, mesh, settings, owned, pieces, exchange)


def _check_users_optimizer(user: Optimizer, model: nn.Module, mesh: Mesh, settings: Resolved) -> None:
    from zeromesh.optim import factory

    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    factory.check_users(user, trained, _is_cut(mesh, settings), settings.zero_allow_untested_optimizer)


def _adopt(user: Optimizer, sharded: Sharded, settings: Resolved, everywhere: Sequence[nn.Parameter]) -> None:
    """Have it update this rank's pieces; ``everywhere`` are the parameters of all stages."""
    from zeromesh.optim import factory

    pieces = sharded.pieces
    by_parameter: dict[nn.Parameter, Piece | None] = dict.fromkeys(everywhere)
    by_parameter |= {p: pieces[id(p)] for flat in sharded.flats if flat.gradient for p in flat.parameters}
    factory.adopt(user, by_parameter, _is_cut(sharded.mesh, settings), settings.zero_allow_untested_optimizer)


def _is_cut(mesh: Mesh, settings: Resolved) -> bool:
    """Whether an optimizer's pieces may be less than whole parameters."""
    sharded = settings.row.optimizer is Placement.SHARDED and mesh.shard.size > 1
    return sharded or mesh.group("tensor").size > 1


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """In this context a logger, and those below it, say nothing."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _build_scheduler(settings: Resolved, given: Any, optimizer: Optimizer | None) -> Any:
    if given is not None and _makes_scheduler(given):
        made = given(optimizer)
        _check_scheduler(made)
        return made
    if given is not None or settings.scheduler is None:
        return given
    if optimizer is None:
        raise ValueError("the configuration has a scheduler but there is no optimizer; add one, or pass optimizer=")
    from zeromesh.optim import schedules

    return schedules.build(settings.scheduler.type, dict(settings.scheduler.params), optimizer)


def _loader(data: Any, collate_fn: Any, settings: Resolved, mesh: Mesh, shuffles: bool) -> Loader | None:
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
