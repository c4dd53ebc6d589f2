"""Mistakes that are planted into the engine, and what ``zeromesh.verify`` has to say of each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

import zeromesh
from verifying import OWN, of_model
from zeromesh import Engine, Mesh
from zeromesh.comm.collectives import Group
from zeromesh.engine.update import Update
from zeromesh.parallel.context import huggingface_decoders as huggingface
from zeromesh.parallel.expert.routed import RoutedExperts
from zeromesh.parallel.follow.token_check import TokenCheck
from zeromesh.parallel.tensor import operators, styles
from zeromesh.parallel.tensor import split_linear as tensor_linear
from zeromesh.shard import place_units as place
from zeromesh.shard import sharded
from zeromesh.shard.gradients import gradient_sums as sums
from zeromesh.shard.gradients.gradient import Gradient
from zeromesh.shard.gradients.reducer import Reducer
from zeromesh.shard.optim.host import HostSteps
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.model_buffers import ModelBuffers
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.tables.table import RowGradient

ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}}
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 1e-1, "momentum": 0.9}}


def before(target: Any, name: str, change: Callable[..., Any]) -> Any:
    """Call ``change`` with the arguments before a method."""
    plain = getattr(target, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        change(*args, **kwargs)
        return plain(*args, **kwargs)

    return patch.object(target, name, changed)


def after(target: Any, name: str, change: Callable[..., Any]) -> Any:
    """Call ``change`` with the arguments after a method."""
    plain = getattr(target, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        change(*args, **kwargs)
        return result

    return patch.object(target, name, changed)


def times(target: Any, name: str, factor: float | Callable[[Any], float]) -> Any:
    """Multiply a property."""
    plain = getattr(target, name).fget

    def changed(self: Any) -> Any:
        return plain(self) * (factor(self) if callable(factor) else factor)

    return patch.object(target, name, property(changed))


def pieces_of(engine: Any) -> Iterator[Any]:
    for flat in engine.sharded.flats:
        for _, _, piece in flat.pieces:
            yield piece


def after_updates(change: Callable[[Any], None]) -> Any:
    return after(Update, "_update", lambda update, *_: change(update))


# Gradients.


def not_reduced(axis: str) -> Any:
    """Leave a reduce-scatter over the ranks of a shard group out: each keeps its own part."""
    plain = Group.reduce_scatter

    def own(self: Group, full: Any, received: Any, out: Any, add: bool, tag: int, *more: Any) -> Any:
        if self.axis != axis or self.size == 1:
            return plain(self, full, received, out, add, tag, *more)
        part = full.view(self.size, -1)[self.rank].to(out.dtype) * self.size
        out.add_(part) if add else out.copy_(part)
        return SimpleNamespace(wait=lambda: None)

    return patch.object(Group, "reduce_scatter", own)


def dropped(number: int) -> Any:
    plain = Engine.backward

    def changed(self: Engine, loss: Any, *args: Any, **kwargs: Any) -> Any:
        lost = self._accumulation.counted == number
        return plain(self, loss * 0 if lost else loss, *args, **kwargs)

    return patch.object(Engine, "backward", changed)


def overwritten() -> Any:
    """Keep only the last of the micro-batches' sums."""
    plain = Group.reduce_scatter

    def last(self: Group, full: Any, received: Any, out: Any, add: bool, *more: Any) -> Any:
        return plain(self, full, received, out, False, *more)

    return patch.object(Group, "reduce_scatter", last)


def twice(suffix: str) -> Any:
    def double(self: Gradient, index: int, value: torch.Tensor, factor: float) -> None:
        if self.layout.segments[index].name.endswith(suffix):
            value.mul_(2)

    return before(Gradient, "fill", double)


def one_rank_skips(rank: int) -> Any:
    plain = ShardedModel.set_gradients

    def changed(self: ShardedModel, *args: Any) -> None:
        plain(self, *args)
        if self.mesh.rank == rank:
            for piece in pieces_of(SimpleNamespace(sharded=self)):
                piece.set_gradient(None)

    return patch.object(ShardedModel, "set_gradients", changed)


# Optimizer.


def moved_states(update: Update) -> None:
    for piece in pieces_of(SimpleNamespace(sharded=update._sharded)):
        for key, state in update._optimizer.state.get(piece.parameter, {}).items():
            if key in ("exp_avg", "sum") and state.ndim:
                state.copy_(state.roll(1))


def swapped_states(update: Update) -> None:
    for state in update._optimizer.state.values():
        first = state["exp_avg"].clone()
        state["exp_avg"].copy_(state["exp_avg_sq"])
        state["exp_avg_sq"].copy_(first)


def rounded_masters(update: Update) -> None:
    for flat in update._sharded.flats:
        if flat.layout.trainable:
            flat.master.copy_(flat.master.bfloat16())


def decayed_twice(update: Update) -> None:
    for piece in pieces_of(SimpleNamespace(sharded=update._sharded)):
        piece.parameter.data.mul_(1 - 1e-2 * 0.1)


def with_options(**options: Any) -> Any:
    """Give the engine's optimizer other options."""

    def change(self: Engine, parts: Any) -> None:
        for group in parts.optimizer.param_groups:
            group.update(options)

    return after(Engine, "__init__", change)


def late_schedule() -> Any:
    """Do not step the schedule after the first update."""
    plain = Engine._step

    def changed(self: Engine, schedule: Any) -> None:
        plain(self, schedule if self.global_steps else None)

    return patch.object(Engine, "_step", changed)


# Publication and buffers.


def unpublished(unit: str) -> Any:
    """Do not send one unit's new parameters to the second rank."""
    plain = Flat.begin_fetch

    def changed(self: Flat, mesh: Any, link: Any) -> Any:
        old = self.full.clone() if mesh.rank == 1 and any(unit in s.name for s in self.layout.segments) else None
        pending = plain(self, mesh, link)
        if old is not None and self.full.data_ptr():
            for one in pending:
                one.wait()
            self.full.copy_(old)
            return []
        return pending

    return patch.object(Flat, "begin_fetch", changed)


def stale_shards() -> Any:
    """Do not write masters to the parameters that are gathered; they are apart in 16 bits."""
    return patch.object(Flat, "write_shard", lambda self: None)


# Axes.


def local_norm() -> Any:
    """Count the squares of this rank alone, as often as there are ranks."""
    plain = sharded.squared_norm

    def changed(gradients: Any, mesh: Mesh) -> Any:
        return plain(gradients, mesh) * (mesh.rank == 0) * mesh.world_size

    return patch.object(sharded, "squared_norm", changed)


def norm_of_copies() -> Any:
    """Count what tensor ranks have copies of on each of them."""
    return after(
        Gradient, "__init__", lambda self, *_: setattr(self, "counted", ((0, self.own.stop - self.own.start),))
    )


def bias_on_every_rank() -> Any:
    plain = tensor_linear.leave

    def changed(partial: Any, bias: Any, *args: Any) -> Any:
        return plain(partial if bias is None else partial + bias, bias, *args)

    return patch.object(styles, "leave", changed)


def unsummed_rows() -> Any:
    """Leave out the sum over tensor ranks after layers that are split by rows, once."""
    return patch.dict(operators.DONE, {"sum": lambda x, *_: x * 2})


def unsummed_inputs() -> Any:
    """Leave out the sum of the input's gradient before layers that are split by columns."""
    return patch.object(tensor_linear._Passage, "begin", lambda self, gradient: gradient)


def positions_off_by_one() -> Any:
    """Shift the positions of the tokens that the engine gives the model."""
    plain = Engine.__call__

    def changed(self: Engine, *args: Any, **kwargs: Any) -> Any:
        kwargs["position_ids"] = torch.arange(1, kwargs["input_ids"].shape[1] + 1).expand_as(kwargs["input_ids"])
        return plain(self, *args, **kwargs)

    return patch.object(Engine, "__call__", changed)


def recomputed_otherwise() -> Any:
    """Recompute activations to something else than in the forward."""
    plain = LlamaMLP.forward

    def changed(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x * (1.01 if torch._C._current_graph_task_id() != -1 else 1.0))

    return patch.object(LlamaMLP, "forward", changed)


def unclipped(plain: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Update, *args: Any) -> Any:
        config, self._config = self._config, self._config.model_copy(update={"gradient_clipping": 0.0})
        try:
            return plain(self, *args)
        finally:
            self._config = config

    return changed


def unshared(plain: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: ModelBuffers, notes: Any) -> None:
        if self._shared:  # the first one, at the start, is made
            self._shared = self._look()
        else:
            plain(self, notes)

    return changed


def host_factor() -> Any:
    plain = HostSteps.__init__

    def changed(self: HostSteps, optimizer: Any, factor: float) -> None:
        plain(self, optimizer, factor * 2)

    return patch.object(HostSteps, "__init__", changed)


def written_values_lost() -> Any:
    """Let an update begin before its script writes to a parameter, and not hear of it."""
    return patch.object(zeromesh.zero, "safe_set_full_fp32_param", lambda *_: None)


def all_in_16_bits() -> Any:
    """Compute with all parameters in 16 bits, routers too."""
    plain = place.dtypes

    def changed(model: Any, precision: Any) -> Any:
        return plain(model, replace(precision, keep_fp32=()))

    return patch.object(place, "dtypes", changed)


def rows_of_one_rank() -> Any:
    """Leave out the gradients that later ranks send for the rows of tables."""
    plain = RowGradient.take_sum
    return patch.object(RowGradient, "take_sum", lambda self, ids, gradients: plain(self, ids[:1], gradients[:1]))


@contextmanager
def pairs_of_tokens() -> Iterator[None]:
    """Let blocks mix pairs of tokens, and leave out the check of their code: some lengths cut pairs."""
    plain = LlamaMLP.forward

    def changed(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        pairs = x.view(len(x), -1, 2, x.shape[-1])
        return plain(self, x + 0.1 * pairs.mean(2, keepdim=True).expand_as(pairs).reshape_as(x))

    with (
        patch.object(LlamaMLP, "forward", changed),
        patch.object(TokenCheck, "begin", lambda *_: None),
        patch.object(TokenCheck, "end", lambda *_: None),
    ):
        yield


# Experts that ranks share.


def of_experts(factor: float) -> Any:
    """Multiply the gradients of experts."""

    def scale(self: Gradient, index: int, value: torch.Tensor, _: float) -> None:
        if self.layout.axis == "expert":
            value.mul_(factor)

    return before(Gradient, "fill", scale)


def norm_of_experts() -> Any:
    """Count the squares of experts once more."""
    plain = sharded.squared_norm

    def changed(gradients: Any, mesh: Mesh) -> Any:
        every = [*gradients]
        return plain(every, mesh) + plain([g for g in every if g.layout.axis == "expert"], mesh)

    return patch.object(sharded, "squared_norm", changed)


def of_arguments(change: Callable[..., tuple[Any, ...]]) -> Any:
    """Call experts with other tokens, indices and weights."""
    plain = RoutedExperts.__call__
    return patch.object(RoutedExperts, "__call__", lambda self, *args: plain(self, *change(*args)))


def of_results(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change what owners of experts send back."""
    plain = RoutedExperts._compute
    return patch.object(RoutedExperts, "_compute", lambda self, *args: change(plain(self, *args)))


@dataclass(frozen=True)
class Fault:
    """A mistake, a run in which it shows, and words of the report."""

    plant: Callable[[], Any]
    words: tuple[str, ...]  # of the sentence
    config: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    ranks: int = 2


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


TENSOR = {"mesh": {"tensor": 2}}
HOST = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ROWS = zero(2, embedding_tables={"optimizer": {"type": "rowwise_adagrad", "params": {"lr": 1e-2}}})
EXPERTS = {"mesh": {"expert": 2}}
FAULTS: dict[str, Fault] = {
    "gradients summed over data ranks": Fault(
        lambda: times(Reducer, "factor", 2.0), ("gradient", "2 times too large", "data ranks"), zero(2)
    ),
    "gradients divided twice": Fault(lambda: times(Reducer, "factor", 0.5), ("2 times too small",), zero(1)),
    "no reduction over data ranks": Fault(
        lambda: not_reduced("data"), ("only this rank's own samples", "not reduced"), zero(2, gradient_clipping=0.0)
    ),
    "micro-batch dropped": Fault(lambda: dropped(1), ("micro-batch 1 is missing",), zero(2)),
    "micro-batches overwritten": Fault(overwritten, ("micro-batch 0 is missing",), zero(3)),
    "gradient counted twice": Fault(lambda: twice("o_proj.weight"), ("o_proj.weight", "twice"), zero(2)),
    "one rank's shard without an update": Fault(lambda: one_rank_skips(1), ("rank 1",), zero(2)),
    "replicas not reduced": Fault(
        lambda: patch.object(sums, "_sum_replicas", lambda *_: None), ("gradient", "only this rank's own samples"),
        zero(3, mesh={"replicate": 2, "data": 1}),
    ),
    "moments of other elements": Fault(lambda: after_updates(moved_states), ("optimizer state exp_avg",), zero(3)),
    "states exchanged": Fault(
        lambda: after_updates(swapped_states), ("holds the value of state", "exchanged"), zero(1)
    ),
    "weight decay twice": Fault(lambda: after_updates(decayed_twice), ("master weight",), zero(3)),
    "other beta": Fault(lambda: with_options(betas=(0.9, 0.99)), ("state exp_avg_sq", "times"), zero(2)),
    "other eps": Fault(lambda: with_options(eps=2e-4), ("master weight",), zero(2)),
    "schedule one update late": Fault(
        late_schedule, ("learning rate", "one update late"),
        zero(2, scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}),
    ),
    "not clipped": Fault(
        lambda: patch.object(Update, "_update", unclipped(Update._update)), ("not clipped",), zero(2)
    ),
    "clipped by another norm": Fault(local_norm, ("gradient norm", "gradients are right"), zero(2)),
    "parameters not published": Fault(
        lambda: unpublished("layers.0"), ("parameter model.layers.0", "not published", "on rank 1"), zero(2)
    ),
    "16-bit parameters stale": Fault(
        stale_shards, ("parameter", "not what its master says"),
        zero(2, bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 1e-3}}),
    ),
    "masters rounded to 16 bits": Fault(lambda: after_updates(rounded_masters), ("master weight",), zero(2)),
    "loss scale not divided": Fault(
        lambda: times(Update, "gradient_factor", lambda update: update.loss_scale), ("not divided by the loss scale",),
        zero(2, fp16={"enabled": True, "initial_scale_power": 6}),
    ),
    "running statistics not shared": Fault(
        lambda: patch.object(ModelBuffers, "share", unshared(ModelBuffers.share)),
        ("buffer first.1", "own statistics", "rank 1"), zero(1), "net",
    ),
    "host updates with another factor": Fault(host_factor, ("state exp_avg", "2 times too large"), HOST),
    "norm of tensor ranks' copies": Fault(norm_of_copies, ("gradient norm", "gradients are right"), TENSOR),
    "no sum after split rows": Fault(unsummed_rows, ("loss of micro-batch 0",), TENSOR),
    "no sum of inputs' gradients": Fault(unsummed_inputs, ("gradient model.layers.1",), TENSOR),
    "bias on every tensor rank": Fault(bias_on_every_rank, ("gradient transformer", ".bias", "twice"), TENSOR, "gpt2"),
    "shares of norms not summed": Fault(
        lambda: patch.object(sums, "_sum_shares", lambda *_: None), ("gradient model", "norm.weight"),
        {**TENSOR, "tensor_parallel": {"sequence": True}},
    ),
    "positions off by one": Fault(positions_off_by_one, ("loss of micro-batch 0",), zero(1), "gpt2"),
    "tied stages not summed": Fault(
        lambda: patch.object(sums, "_sum_ties", lambda *_: None), ("gradient transformer.wte",),
        {"mesh": {"pipeline": 2}}, "gpt2",
    ),
    "written values lost": Fault(
        written_values_lost, ("master weight", "written to between the backward and this update"), zero(2)
    ),
    "routers in 16 bits": Fault(
        all_in_16_bits, ("parameter router.weight", "bfloat16 here and torch.float32"), zero(2, bf16={"enabled": True}),
        "routed",
    ),
    "pairs of tokens in another length": Fault(
        pairs_of_tokens, ("first at step 2", "loss", "tokens in this update"), {"mesh": {"context": 2}}, "llama"
    ),
    "positions of parts of sequences": Fault(
        lambda: patch.object(huggingface, "_counted_positions", lambda *_: None),
        ("first at step 1", "loss", "counts positions"), {"mesh": {"context": 2}}, "decoder",
    ),
    "rows of one rank": Fault(rows_of_one_rank, ("gradient", "s.weight"), ROWS, "tables"),
    "states of other rows": Fault(
        lambda: after_updates(moved_states), ("optimizer state sum", "s.weight"), ROWS, "tables"
    ),
    "gradients of experts summed over those who share them": Fault(
        lambda: of_experts(2.0), ("gradient", "experts", "2 times too large"), EXPERTS, "qwen3_moe"
    ),
    "gradients of experts divided once too often": Fault(
        lambda: of_experts(0.5), ("gradient", "experts", "2 times too small"), {**EXPERTS, **zero(3)}, "qwen3_moe"
    ),
    "experts not reduced over those with the same": Fault(
        lambda: not_reduced("expert_data"), ("gradient", "experts"), {**EXPERTS, **zero(2)}, "qwen3_moe", 4
    ),
    "router detached": Fault(
        lambda: of_arguments(lambda x, index, weights: (x, index, weights.detach())), ("gradient model.layers.1",),
        EXPERTS, "qwen3_moe",
    ),
    "norm counts experts twice": Fault(
        norm_of_experts, ("gradient norm", "gradients are right"), EXPERTS, "qwen3_moe"
    ),
    "tokens to other experts": Fault(
        lambda: of_arguments(lambda x, index, weights: (x, index ^ 1, weights)), ("loss of micro-batch 0",), EXPERTS,
        "qwen3_moe",
    ),
    "tokens dropped": Fault(
        lambda: of_results(lambda y: torch.cat([y[:-1], 0 * y[-1:]])), ("loss of micro-batch 0",), EXPERTS,
        "qwen3_moe",
    ),
    "results of other tokens": Fault(
        lambda: of_results(lambda y: y.roll(1, 0)), ("loss of micro-batch 0",), EXPERTS, "qwen3_moe"
    ),
    "recomputation of something else": Fault(
        recomputed_otherwise, ("gradient model.layers.1",), zero(2, activation_checkpointing={"enabled": True})
    ),
}  # fmt: skip
"""Faults by name."""


def config_of(fault: Fault) -> dict[str, Any]:
    base = {
        "optimizer": ADAM, "gradient_clipping": 0.05, "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 1,
    }  # fmt: skip
    return base | fault.config


def found(name: str) -> tuple[str, str]:
    """Verify with a fault, on every rank; the verdict and the sentence."""
    fault = FAULTS[name]
    verify = OWN.get(fault.model, of_model)
    with fault.plant():
        report = verify(fault.model, config_of(fault))
    return report.verdict.name, report.sentence
