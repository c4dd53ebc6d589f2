"""Placement of a model: the table of what ``initialize`` does to it, and what each row does.

``TRANSFORMATIONS`` has the order, and for each row the rows that must come before it, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch
from torch import nn

from zeromesh.base import quantized_layers as quantized
from zeromesh.base.dtypes import dtypes, kept_layers
from zeromesh.base.keras_layers import follow_buffers, separate_seeds
from zeromesh.base.piece import Piece
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.base.substitution import is_linear
from zeromesh.checkpoint.random_state import share_random_state
from zeromesh.comm.agreement import agree_run, agree_success, catch
from zeromesh.engine.initialize import model_layout as layout
from zeromesh.engine.initialize import optimizer_setup
from zeromesh.engine.initialize.balance_experts import balance_of, counts_experts
from zeromesh.engine.initialize.offload import preparation
from zeromesh.engine.initialize.place_tables import table_settings
from zeromesh.engine.initialize.run_plan import Plan
from zeromesh.parallel.activation.compiled import compile_blocks
from zeromesh.parallel.tensor.float8_layers import gathered_weights, use_float8
from zeromesh.parallel.tensor.split_model import apply, chunk_losses
from zeromesh.shard.find_units import find_units
from zeromesh.shard.gradients.accumulation import Accumulation
from zeromesh.shard.optim import factory
from zeromesh.shard.optim.host import states_of
from zeromesh.shard.optim.scaler import LossScaler
from zeromesh.shard.parameters.deferred import Source
from zeromesh.shard.parameters.flat import write_parameter
from zeromesh.shard.parameters.flat_exchange import FlatExchange, join_experts
from zeromesh.shard.parameters.materialise import materialiser, replace
from zeromesh.shard.place_units import ModelPart, Sharding, Slots
from zeromesh.shard.sharded import ShardedModel

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved, Settings
    from zeromesh.parallel.activation.activation_store import ActivationStore
    from zeromesh.parallel.context.applied import SpreadSequences
    from zeromesh.parallel.expert.balance import Balance

_log = logging.getLogger("zeromesh")


@dataclass(frozen=True)
class Transformation:
    """A row of ``TRANSFORMATIONS``."""

    apply: Callable[[Placing], None]
    applies: Callable[[Plan], bool] = lambda plan: True
    after: Mapping[str, str] = field(default_factory=dict)  # names of rows before this one, and why they come before
    atomic: bool = False  # it succeeds, or leaves the model as it was

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.apply.__name__.replace("_", " ")


class Placing:
    """A model on the way to its places, and what the rows of ``TRANSFORMATIONS`` hand on.

    Attributes:
        plan: says where everything goes.
        groups: parameters that are updated, of this rank's stages.
        split: plan of the tensor axis, of this rank's stages.
        experts: that ranks share, of this rank's stages.
        sequences: spread over ranks; None where they are not.
        sharded: the placed states; None until then.
        optimizer: updates this rank's pieces; None if there is none.
        scheduler: of the optimizer; None if there is none.
        activations: storage of checkpointed inputs until the backward; None where they stay in place.
        balance: of experts; None where nobody counts their tokens.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.groups, self.split, self.experts = plan.groups, plan.split, plan.experts
        self.optimizer, self.scheduler = plan.optimizer, plan.scheduler
        self.sequences: SpreadSequences | None = None
        self.sharded: ShardedModel | None = None
        self.activations: ActivationStore | None = None
        self.balance: Balance | None = None
        self._values: Values | None = None
        self._unquantized: list[str] = []  # names of layers that do not compute in float8
        # A user's optimizer holds the parameters of all stages; those of other stages have to leave its groups.
        self._everywhere = [] if plan.optimizer is None else list(plan.model.parameters())

    @property
    def placed(self) -> ShardedModel:
        """The placed states, for rows behind ``shard states``."""
        assert self.sharded is not None, "the states are not placed yet"
        return self.sharded

    def abandon(self, error: BaseException) -> None:
        """Release memory, files and hooks of the placed states, and note on the error that the model has changed."""
        if self.sharded is not None:
            self.sharded.close()
        error.add_note("zeromesh.initialize had begun to change the model: build it anew before you try again")

    def balance_experts(self) -> None:
        """Listen to routers, and let their losses be those of the configuration."""
        self.balance = balance_of(
            self.plan,
            lambda: self.placed.accumulation.added_factor(),
            lambda parameter, value: write_parameter(self.placed.flats, parameter, value),
        )

    def spread_sequences(self) -> None:
        """Spread sequences over the ranks of the context axis."""
        plan = self.plan

        def spread() -> SpreadSequences:
            if plan.arguments.loss_fn is not None:
                raise ValueError(
                    "loss_fn would be given the labels of whole sequences, and logits of this rank's part; leave it "
                    "out, and have the model return its loss"
                )
            from zeromesh.parallel.context.spread_model import apply as apply_context

            chosen, group = plan.settings.context_parallel, plan.mesh.group("context")
            checkpointing = plan.settings.activation_checkpointing
            others = [f"mesh.{axis}" for axis in ("tensor", "pipeline", "expert") if plan.mesh.sizes[axis] > 1]
            others += ["activation_checkpointing.granularity"] * (checkpointing.granularity != "full")
            others += ["compile"] * plan.settings.compile.enabled + ["tiling"] * bool(plan.tiled)
            degrees = {"degree": chosen.ulysses_degree, "tensor": plan.mesh.sizes["tensor"]}
            return apply_context(
                plan.model, chosen.strategy, group, unchecked=chosen.unchecked, others=others, **degrees
            )

        self.sequences = agree_run(plan.world, "spread its sequences over ranks", spread)

    def take_stages(self) -> None:
        """Take the layers of other ranks' stages away."""
        plan = self.plan
        assert plan.stages is not None
        precision = plan.settings.precision
        self.groups, self.split = layout.take_stage(plan.model, plan.stages, self.groups, self.split, precision)
        self.experts = [item for item in self.experts if next(item.module.parameters(), None) is not None]

    def find_values(self) -> None:
        """Find what gives each parameter its value."""
        plan = self.plan
        values, failure = catch(lambda: Values(materialiser(plan.model, plan.settings.seed)))
        agree_success(plan.world, "read its part of the weights", failure)
        self._values = values

    def place_buffers(self) -> None:
        """Move buffers, and what draws random numbers, to this rank."""
        model, mesh = self.plan.model, self.plan.mesh
        chosen = dtypes(model, self.plan.settings.precision)
        # By ``id``, so that what is in two places stays one; with the old one, so that it keeps its ``id``.
        placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in placed:
                    placed[id(buffer)] = buffer, buffer.to(device=mesh.device, dtype=chosen[id(buffer)])
                module._buffers[name] = placed[id(buffer)][1]
        follow_buffers(model)
        separate_seeds(model, mesh.data_rank, mesh.data_size)

    def shard_states(self) -> None:
        """Shard parameters, gradients and states of the optimizer over the mesh."""
        plan, settings, stages = self.plan, self.plan.settings, self.plan.stages
        for _, layer in quantized.layers(plan.model):
            quantized.unpack(layer)
        scaler = LossScaler(settings.precision.loss_scale) if settings.precision.loss_scale else None
        # Before the dtypes of parameters change, which it reads.
        self._unquantized = unquantized(plan.model, settings)
        sharding = Sharding(
            row=settings.row,
            precision=settings.precision,
            slots=Slots(settings.slots.parameter, settings.slots.gradient),
            targets=settings.units,
            predivide=settings.gradient_predivide,
            summed=settings.gradient_allreduce_op == "sum",
            tables=table_settings(plan.tables, plan.resting, settings),
            narrow=gathered_weights(plan.model, self._unquantized, plan.heads) if settings.float8.gather else (),
        )
        split = {} if self.split is None else self.split[0].held
        experts: list[str] = []
        if self.experts:
            from zeromesh.parallel.expert.place import holdings

            split |= holdings(plan.mesh, self.experts)
            experts = [item.caller for item in self.experts]
        tied, idle = ({}, ()) if stages is None else (stages.tied, stages.idle)
        part = ModelPart(split, tied, idle, experts)
        managed = settings.managed_gradient_accumulation
        accumulation = Accumulation(settings.gradient_accumulation_steps, scaler, managed)
        files = preparation(plan.model, settings, plan.offload, plan.mesh)
        self.sharded = ShardedModel(plan.model, plan.mesh, sharding, part, accumulation, self._values, files)

    def split_layers(self) -> None:
        """Split layers over the ranks of the tensor axis."""
        plan, mesh = self.plan, self.plan.mesh
        assert self.split is not None
        resolved, stacks = self.split
        blocks = () if plan.stages is None else plan.stages.cut.blocks
        using = while_alive(self.placed.events.using)
        apply(plan.model, resolved, mesh.group("tensor"), mesh.device, stacks, using, blocks, plan.check)
        # Dropout between split layers has to draw the same numbers on all ranks of the tensor axis.
        share_random_state(mesh.group("tensor"))

    def share_experts(self) -> None:
        """Let modules with experts compute over the ranks that share these."""
        from zeromesh.parallel.expert.place import apply

        apply(self.plan.model, self.plan.mesh, self.experts)
        if not self.placed.sharded:
            join_experts(self.plan.model, self.placed.flats, self.plan.mesh)

    def chunk_losses(self) -> None:
        """Compute losses of whole heads a chunk of tokens at a time."""
        chunk_losses(self.plan.model, self.plan.heads, while_alive(self.placed.events.using))

    def use_float8(self) -> None:
        """Compute products of linear layers in 8 bits."""
        plan, settings = self.plan, self.plan.settings
        resolved = None if self.split is None else self.split[0]
        rowwise = settings.float8.recipe == "rowwise"
        stacked = [item.name for item in self.experts if not any(map(is_linear, item.module.modules()))]
        if stacked and plan.mesh.rank == 0:
            dtype = str(next(self.experts[0].module.parameters()).dtype).removeprefix("torch.")
            _log.info(
                "float8 is for linear layers: experts compute in %s, their products are grouped: %s",
                dtype,
                ", ".join(stacked),
            )
        use_float8(plan.model, rowwise, self._unquantized, plan.mesh, resolved, plan.heads)

    def agree_on_values(self) -> None:
        """Raise an error on all ranks if one could not read its values, which went on with zeros."""
        assert self._values is not None
        agree_success(self.plan.world, "read its part of the weights", self._values.failure)

    def settle_quantized(self) -> None:
        """Let layers of bitsandbytes compute with their placed weights, and with the first rank's scales."""
        mesh = self.plan.mesh
        for _, layer in quantized.layers(self.plan.model):
            quantized.settle(layer, mesh.device)
            for state in quantized.states(layer):
                # The weights are the first rank's: scales that another kernel had computed would not fit them.
                mesh.group("stage").broadcast(state)

    def adopt_optimizer(self) -> None:
        """Give the user's optimizer this rank's pieces in place of the parameters."""
        plan, sharded = self.plan, self.placed
        assert plan.optimizer is not None
        pieces: dict[nn.Parameter, Piece | None] = dict.fromkeys(self._everywhere)
        trained = (flat for flat in sharded.flats if flat.layout.trainable)
        pieces |= {p: sharded.pieces[id(p)] for flat in trained for p in flat.parameters}
        untested = plan.settings.zero_allow_untested_optimizer
        factory.adopt(plan.optimizer, pieces, plan.cuts_parameters, untested, self._exchange())

    def build_optimizer(self) -> None:
        """Build the configuration's optimizer over this rank's pieces, and its schedule."""
        plan, settings = self.plan, self.plan.settings
        self.optimizer = optimizer_setup.build_optimizer(
            plan.model, settings, self.groups, plan.cuts_parameters, self.placed.pieces, self._exchange()
        )
        self.scheduler = optimizer_setup.build_scheduler(settings, plan.arguments.scheduler, self.optimizer)

    def _exchange(self) -> FlatExchange:
        return FlatExchange(self.placed.flats, self.placed.row, self.plan.mesh)

    def serve_states(self) -> None:
        """Let states of the optimizer rest where the placement says."""
        if self.placed.swap is not None and self.optimizer is not None:
            self.placed.swap.serve(self.optimizer, states_of(self.optimizer))

    def tile_tokens(self) -> None:
        """Compute what treats tokens apart a tile of tokens at a time."""
        from zeromesh.parallel.activation.tiles import tile_modules

        tokens = self.plan.settings.tiling.mlp
        assert tokens is not None
        tile_modules(self.plan.model, self.plan.tiled, tokens)

    def recompute(self) -> None:
        """Recompute activations of the configured modules in the backward."""
        from zeromesh.parallel.activation.checkpoint import checkpoint_modules
        from zeromesh.parallel.activation.selective import GRANULARITIES

        settings, mesh, plans = self.plan.settings, self.plan.mesh, self.plan.saved
        chosen, group = settings.activation_checkpointing, mesh.group("tensor")
        # Where the sequence is split over these ranks, each has a part of the inputs anyway.
        partitions = chosen.partition_activations and group.size > 1 and not settings.tensor_parallel.sequence
        partitions = partitions and plans is None  # results inside of blocks differ between them
        if plans is None:
            inputs = Saved.MOVE if chosen.cpu_checkpointing or partitions else Saved.KEEP
            row = BlockPlan(inputs, keeps=GRANULARITIES[chosen.granularity].keeps)
            units = find_units(self.plan.model, chosen.targets or settings.units)
            # A leaf has nothing inside that would be kept; recomputing it only costs time.
            inner = (name for name, module in units if chosen.targets or next(module.children(), None) is not None)
            plans = dict.fromkeys(inner, row)
        if any(plan.moves for plan in plans.values()):
            from zeromesh.parallel.activation.activation_store import ActivationStore

            host = chosen.cpu_checkpointing or not partitions
            self.activations = ActivationStore(mesh.device, host, group if partitions else None)
        for name, plan in plans.items():
            module = self.plan.model.get_submodule(name)
            # Layers of other stages have no parameters here.
            if next(module.parameters(), None) is not None:
                checkpoint_modules([module], self.activations if plan.moves else None, plan)

    def compile(self) -> None:
        """Compile the forward of each unit."""
        chosen = self.plan.settings.compile
        options = {"backend": chosen.backend} | ({} if chosen.mode is None else {"mode": chosen.mode})
        # Nor those that exchange tokens, which read numbers of rows on the host: the graphs around them break there.
        exchanging = {item.caller for item in self.experts}
        # The first unit is the model itself, whose forward calls those of the others.
        blocks = [unit.module for unit in self.placed.units[1:] if unit.name not in exchanging]
        compile_blocks(blocks, options, self.plan.mesh.rank == 0)


UNIT = {"shard states": "the new forward asks for the parameters of its unit"}
PIECES = {"shard states": "it gets pieces of the placed states", "agree on values": "masters are the agreed values"}
ITS_STATES = dict.fromkeys(("adopt optimizer", "build optimizer"), "it is its states that rest elsewhere")
INSIDE = dict.fromkeys(
    ("spread sequences", "split layers", "share experts", "chunk losses", "use float8"),
    "what is computed again includes what others put around a layer's forward",
)

TRANSFORMATIONS = (
    Transformation(Placing.balance_experts, counts_experts, atomic=True),
    Transformation(Placing.spread_sequences, lambda plan: plan.mesh.sizes["context"] > 1, atomic=True),
    Transformation(Placing.take_stages, lambda plan: plan.stages is not None, {"spread sequences": "of all layers"}),
    Transformation(Placing.find_values, after={"take stages": "values of other stages are not read"}),
    Transformation(Placing.place_buffers),
    Transformation(Placing.shard_states, after={"find values": "each unit gets its values as it is placed"}),
    Transformation(Placing.split_layers, lambda plan: plan.split is not None, UNIT),
    Transformation(
        Placing.share_experts,
        lambda plan: bool(plan.experts),
        UNIT | {"split layers": "its hooks are around the exchange of tokens"},
    ),
    Transformation(Placing.chunk_losses, lambda plan: bool(plan.heads), UNIT),
    Transformation(
        Placing.use_float8,
        lambda plan: plan.settings.float8.enabled,
        {"shard states": "names are taken before dtypes change", "split layers": "a rank computes with its part"},
    ),
    Transformation(Placing.agree_on_values, after={"shard states": "it is there that values are read"}),
    Transformation(Placing.settle_quantized, after={"shard states": "layers take their placed weights"}),
    Transformation(Placing.adopt_optimizer, lambda plan: plan.optimizer is not None, PIECES),
    Transformation(Placing.build_optimizer, lambda plan: plan.optimizer is None and bool(plan.groups), PIECES),
    Transformation(Placing.serve_states, after=ITS_STATES),
    Transformation(Placing.tile_tokens, lambda plan: bool(plan.tiled), INSIDE),
    Transformation(
        Placing.recompute,
        lambda plan: plan.settings.activation_checkpointing.enabled,
        INSIDE | {"tile tokens": "a block is computed again by its tiles"},
    ),
    Transformation(
        Placing.compile, lambda plan: plan.settings.compile.enabled, {"recompute": "forwards include recomputation"}
    ),
)
"""Transformations of a model, in their order."""


def place_model(plan: Plan) -> Placing:
    """Change the model as ``TRANSFORMATIONS`` say, and return what they made. Collective.

    After an error the model is as it was unless a note says that it has begun to change.
    """
    placing, has_changed = Placing(plan), False
    for transformation in TRANSFORMATIONS:
        if not transformation.applies(plan):
            continue
        try:
            transformation.apply(placing)
        except BaseException as error:
            if has_changed or not transformation.atomic:
                placing.abandon(error)
            raise
        has_changed = True
    return placing


def unquantized(model: nn.Module, settings: Settings | Resolved) -> list[str]:
    """Return patterns of names of layers that do not compute in float8: named as such, or kept in fp32."""
    return [*settings.float8.skip, *kept_layers(model, settings.precision)]


class Values:
    """Values of parameters from a materialiser. After a failure they are zeros until all ranks have heard of it."""

    def __init__(self, materialise: Callable[[str, nn.Parameter], Source | None]) -> None:
        self.failure: Exception | None = None  # the first one
        self._materialise = materialise

    def __call__(self, name: str, parameter: nn.Parameter) -> Source | None:
        """Give a parameter its value, or return where to read it from; see ``materialiser``."""
        source, failure = catch(lambda: self._materialise(name, parameter))
        if failure is not None:
            # Raising here would leave the other ranks waiting in the collectives of the next unit.
            replace(parameter, self._stand_in(failure, parameter.shape).to(parameter.dtype))
        return None if source is None else Reading(source, self._stand_in)

    def _stand_in(self, failure: Exception | None, size: torch.Size) -> torch.Tensor:
        self.failure = self.failure or failure
        return torch.zeros(size)


@dataclass(frozen=True)
class Reading:
    """Source of a parameter's elements whose failures ``Values`` notes."""

    source: Source
    stand_in: Callable[[Exception | None, torch.Size], torch.Tensor]

    def __str__(self) -> str:
        return str(self.source)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop``, 1-D; zeros if they cannot be read."""
        value, failure = catch(lambda: self.source.read(start, stop))
        return value if value is not None else self.stand_in(failure, torch.Size([stop - start]))


def while_alive(using: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Return ``using`` without a reference to its engine."""
    # The replaced layers hold it: the model, and copies of it, may outlive the engine.
    method = WeakMethod(using)

    def use() -> AbstractContextManager[None]:
        alive = method()
        return nullcontext() if alive is None else alive()

    return use
