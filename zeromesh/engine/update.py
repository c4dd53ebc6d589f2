"""Updates of a model: agreement of all ranks, skipping, clipping, the optimizer's step, publication."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.optim import Optimizer

from zeromesh.base.axes import AXES
from zeromesh.base.placement import Placement, Tier
from zeromesh.base.spans import span
from zeromesh.comm.stragglers import Stragglers
from zeromesh.engine.batches import require_same_inputs, tell_uneven
from zeromesh.engine.first_batches import FirstBatches
from zeromesh.engine.replicas import require_equal_replicas
from zeromesh.parallel.head.logits import expire
from zeromesh.shard.optim.bound import answer, pieces_hidden, steps_in_parts
from zeromesh.shard.optim.host import HostSteps
from zeromesh.shard.optim.scaler import LossScaler
from zeromesh.shard.optim.spikes import SpikeWatch
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.sharded import Agreement, ShardedModel

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved
    from zeromesh.parallel.expert.balance import Balance

_log = logging.getLogger("zeromesh")

SAME_LOSS, SAME_LOSS_16_BIT = 1e-5, 1e-3  # relative tolerance between losses of ranks that share a batch: fp32, 16-bit

# Updates in a row that may be skipped for gradients that are not finite, where no loss scale explains them.
MOST_SKIPPED = 10


MOST_LOSSES = 1 << 24  # micro-batches of an update, so that a float64 holds a rank and one of them
ASKED_BITS = 53  # of numbers that ``ask`` is given


class Notes(NamedTuple):
    """Notes of a rank, of which the largest of all ranks count."""

    first_bad: float  # negative number of the first loss that is not finite, counted over ranks; -inf: all are
    asks: float  # 1 if the rank was asked something, else 0
    save_failed: float  # 1 if an asynchronous save of its has failed
    differs: float  # 1 if losses or inputs of ranks that share its batch differ
    most_samples: float  # of its forwards on average; -inf: not known
    fewest_samples: float  # the same, negative


class Update:
    """Updates of one model by one optimizer."""

    def __init__(
        self,
        sharded: ShardedModel,
        config: Resolved,
        optimizer: Optimizer | None,
        first_batches: FirstBatches,
        save_failed: Callable[[], bool] = lambda: False,
        balance: Balance | None = None,
    ) -> None:
        scaler = sharded.accumulation.scaler
        assert scaler is None or isinstance(scaler, LossScaler)
        self.scaler = scaler  # None where losses are not scaled
        self.norm: float | None = None  # of the last update's gradient before clipping
        self.mean_loss: float | None = None  # of the last update, over ranks; None where no rank knows one
        self.asked = 0  # bits of all numbers that any rank passed to ``ask`` before the last update
        self.save_failed = False  # whether a rank's asynchronous save had failed before the last update
        self.skipped = 0  # updates so far that were left out: a gradient was not finite, or they were spikes
        watched = config.spikes
        self.spikes = SpikeWatch(watched.loss, watched.norm, watched.window, watched.action == "skip")
        self._skips_losses = scaler is not None  # whether a loss that is not finite is an overflow, and not an error
        self.updating = False  # whether the optimizer's own step runs as a part of an update
        self._sharded, self._config, self._optimizer = sharded, config, optimizer
        self._mesh, self._accumulation = sharded.mesh, sharded.accumulation
        # Gradients of states on the host are not the optimizer's own either.
        shards = sharded.row.optimizer is Placement.SHARDED and self._mesh.shard.size > 1
        self._holds_pieces = shards or sharded.is_split or self._mesh.sizes["tensor"] > 1 or sharded.updates_by_rules
        self._first_batches = first_batches
        self._asked, self._skipped_in_a_row = 0, 0
        self._save_failed, self._told_uneven = save_failed, False
        self._balance = balance  # of experts; None where nobody counts their tokens
        self._sharing = [axis for axis, role in AXES.items() if role.same_loss and self._mesh.sizes[axis] > 1]
        turns = self._mesh.group("world").ranks_per_slot
        self.stragglers = Stragglers(self._mesh, turns=turns)  # comparison of the ranks' work between updates
        answer(optimizer, self.loss_scale, overflow=False)
        if optimizer is not None:  # by a weak reference: the hook lives as long as the model, the engine may not
            sharded.early.ask(partial(_host_steps, weakref.ref(self)))

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1 where the loss is not scaled."""
        return self.scaler.scale if self.scaler else 1.0

    @property
    def gradient_factor(self) -> float:
        """Factor that makes the mean over the ranks of the gradients' sum as it is kept."""
        return self._sharded.reducer.factor / self.loss_scale

    def resume(self, skipped: int) -> None:
        """Count skipped updates on from those of a checkpoint."""
        self.skipped, self._skipped_in_a_row = skipped, 0

    def ask(self, number: int) -> None:
        """Let all ranks hear of the bits of ``number`` at the next update. A signal handler may call it."""
        self._asked |= number

    def skip_losses(self) -> None:
        """Skip updates with a loss that is not finite, where they would raise."""
        self._skips_losses = True

    def agree(self, number: int) -> Agreement:
        """Complete the gradients of update ``number`` and exchange notes. Collective; raises where ranks disagree."""
        # Notes of all ranks are reduced with the gradients' norm, and all come to the same decision from them.
        asked, self._asked = self._asked, 0  # at once: a signal that comes while ranks agree is for the next update
        losses, inputs, samples = self._accumulation.noted()
        largest, sums = self._notes(losses, inputs, samples, asked)
        agreement = self._sharded.complete(largest, sums)
        if self._balance is not None:
            with span("balance_experts"):
                self._balance.complete()
        # Before the checks: after an error the next micro-batch begins a new update.
        self._accumulation.restart()
        notes = Notes(*agreement.largest)
        self.asked = self._all_asked(asked) if notes.asks else 0
        fingerprints, *seconds = agreement.sums[:, 2:].T.tolist()
        self._first_batches.hear(fingerprints)
        self.stragglers.hear(*seconds)
        self.save_failed = bool(notes.save_failed)
        if notes.differs:
            self._require_same_losses(sum(losses), inputs)
        # Sums over ranks do not weigh samples.
        uneven = isfinite(notes.most_samples) and notes.most_samples != -notes.fewest_samples
        if uneven and not self._told_uneven and self._config.gradient_allreduce_op != "sum":
            every = self._mesh.group("world").exchange(torch.tensor([samples], dtype=torch.float64)).flatten().tolist()
            self._told_uneven = True
            if self._mesh.rank == 0:
                tell_uneven(every, number)
        interval = self._config.replica_check.interval
        if interval is not None and number % interval == 0:
            with span("compare_replicas"):
                require_equal_replicas(self._sharded, f"before update {number}")
        self.norm = agreement.norm * self.gradient_factor
        return agreement

    def apply(self, agreement: Agreement, number: int) -> bool:
        """Update the parameters; return False if the update is skipped instead, on all ranks."""
        optimizer, factor = self._optimizer, self.gradient_factor  # before the loss scale changes
        assert optimizer is not None
        skips = self._must_skip(agreement, number) or self._is_left_out(agreement, number)
        answer(optimizer, self.loss_scale, skips)
        if not skips:
            self._update(optimizer, factor)
        return not skips

    def finish(self, agreement: Agreement) -> None:
        """Note the mean loss."""
        self.mean_loss = _mean_loss(agreement)

    def _update(self, optimizer: Optimizer, factor: float) -> None:
        """Let the optimizer update the masters by the gradients times ``factor``, and send the new parameters."""
        try:
            # In place writes of the user since the last update go into the masters before these are updated.
            with span("take_changes"):
                self._sharded.take_changes()
            if self._balance is not None:
                self._balance.update_biases()
            self._check_groups()
            self._sharded.store.recall()
            if (limit := self._config.gradient_clipping) > 0:
                # The constant is torch's clip_grad_norm_.
                factor *= min(1.0, limit / ((self.norm or 0.0) + 1e-6))
            steps = self._steps(optimizer, factor) if self._sharded.updates_by_rules else None
            self._sharded.tables.scale(factor)
        except BaseException:
            self._sharded.forget_gradients()
            raise
        # The optimizer's hook asks it: a step of the user's is turned into an update, this one is not.
        self.updating = True
        try:
            for flats in _turns(self._sharded.flats, steps_in_parts(optimizer)):
                with span("clip"):
                    self._sharded.set_gradients(factor, steps, flats)
                hides = pieces_hidden(optimizer, None if steps is None else steps.take_options)
                with span("update"), hides if self._holds_pieces else nullcontext():
                    optimizer.step()
                for flat in flats:
                    flat.unset_gradients()
            with span("update"):
                self._sharded.tables.update(optimizer)
        except BaseException:  # some masters may have changed, and other ranks may have done it all
            self._sharded.updated()
            raise
        else:
            with span("publish"):
                self._sharded.updated(steps)
        finally:
            self.updating = False
            expire()  # logits of the last forward would be computed with the new weights

    def _steps(self, optimizer: Optimizer, factor: float) -> HostSteps:
        return HostSteps(optimizer, factor, self._sharded.store.states.narrow)

    def _check_groups(self) -> None:
        """Raise RuntimeError if a group holds a parameter of the model instead of pieces of it."""
        for number, group in enumerate(self._optimizer.param_groups if self._optimizer else []):
            for parameter in group["params"]:
                if (name := self._sharded.names.get(id(parameter))) is not None:
                    raise RuntimeError(
                        f"group {number} of the optimizer holds parameter {name} of the model, which it cannot update: "
                        "it has pieces of parameters since initialize; give all groups to initialize, and freeze "
                        "afterwards what shall be trained later (requires_grad_(False))"
                    )

    def _notes(
        self, losses: Sequence[float], inputs: float, samples: float, asked: int
    ) -> tuple[Notes, tuple[float, ...]]:
        """Return this rank's notes, and what is summed: losses, their number, ``FirstBatches.tell``, its seconds."""
        finite = [isfinite(loss) for loss in losses]
        bad = -inf if all(finite) else -(self._mesh.rank * MOST_LOSSES + finite.index(False))
        notes = Notes(
            first_bad=float(bad),
            asks=float(asked != 0),
            save_failed=float(self._save_failed()),
            differs=float(self._differs_in_batch(sum(losses), inputs)),
            most_samples=samples if samples > 0 else -inf,
            fewest_samples=-samples if samples > 0 else -inf,
        )
        return notes, (sum(losses), float(len(losses)), self._first_batches.tell(), *self.stragglers.tell())

    def _all_asked(self, asked: int) -> int:
        """Return the bits of the numbers that all ranks were asked. Collective."""
        bits = torch.tensor([asked >> bit & 1 for bit in range(ASKED_BITS)], dtype=torch.uint8)
        return sum(flag << bit for bit, flag in enumerate(self._mesh.group("world").reduce(bits)[0].tolist()))

    @property
    def _limit(self) -> float:
        """Relative tolerance between losses of one batch."""
        precision = self._config.precision
        return SAME_LOSS if precision.compute is None and precision.autocast is None else SAME_LOSS_16_BIT

    def _differs_in_batch(self, loss: float, inputs: float) -> bool:
        """Return whether losses or inputs differ among the ranks along an axis that share this rank's batch."""
        row = torch.tensor([loss, -loss, inputs, -inputs], dtype=torch.float64)
        for group in map(self._mesh.group, self._sharing):
            high, low, most, least = group.reduce(row)[0].tolist()
            if most != -least or high + low > self._limit * max(abs(low), abs(high)):
                return True
        return False

    def _require_same_losses(self, loss: float, inputs: float) -> None:
        """Raise, naming the ranks, where those that split one model or one sequence have other losses or inputs."""
        rows = self._mesh.group("world").exchange(torch.tensor([loss, inputs], dtype=torch.float64))
        losses, checksums = rows.T.tolist()
        self._sharded.forget_gradients()
        for ranks in chain.from_iterable(map(self._mesh.lines, self._sharing)):
            require_same_inputs(ranks, [checksums[rank] for rank in ranks])
            low, high = (pick(losses[rank] for rank in ranks) for pick in (min, max))
            if high - low > self._limit * max(abs(low), abs(high)):
                listed = ", ".join(f"{losses[rank]:.6g} on rank {rank}" for rank in ranks)
                raise RuntimeError(
                    f"ranks that share one batch have different losses: {listed}; give them the same samples "
                    "(share engine.data_rank of engine.data_size), and the same random state: let seeds depend on "
                    "engine.data_rank, and not on the rank; and let the loss read neither parameters by themselves nor "
                    "activations of spread sequences: outside of their layers they are parts (docs/tensor.md); an "
                    "auxiliary loss of experts is of a rank's own tokens unless experts.auxiliary_loss is global"
                )

    def _is_left_out(self, agreement: Agreement, number: int) -> bool:
        """Return whether the update is a spike that is to be left out."""
        assert self.norm is not None
        try:
            spike = self.spikes.look(number, _mean_loss(agreement), self.norm)
        except BaseException:
            self._sharded.forget_gradients()
            raise
        if spike is None:
            return False
        if self._mesh.rank == 0:
            _log.warning("%s", spike)
        if spike.skipped:
            self.skipped += 1
            self._sharded.forget_gradients()
        return spike.skipped

    def _must_skip(self, agreement: Agreement, number: int) -> bool:
        """Return whether the gradients cannot be used; the answer is the same on all ranks."""
        first_bad, self.spikes.last = Notes(*agreement.largest).first_bad, None
        unchecked = not self._config.bf16.check_grad_overflow and self._config.zero_optimization.stage in (1, 2)
        if (first_bad == -inf and isfinite(agreement.norm)) or (unchecked and self._config.bf16.enabled):
            self._skipped_in_a_row = 0
            if self.scaler is not None:
                self.scaler.update(False)
            return False
        self.skipped += 1
        self._skipped_in_a_row += 1
        culprit = self._sharded.first_not_finite()
        self._sharded.forget_gradients()
        if first_bad > -inf:
            rank, micro_batch = divmod(int(-first_bad), MOST_LOSSES)
            lost = f"the loss of micro-batch {micro_batch} of update {number} is not finite on rank "
            culprit = f"; {lost}{rank}{culprit}"
            if not self._skips_losses:
                raise FloatingPointError(
                    f"{culprit[2:]}; look at that batch, lower the learning rate, or clip gradients"
                )
        if self.scaler is not None and self.scaler.is_dynamic:
            self.scaler.update(True)
            if self._mesh.rank == 0:
                scale = self.scaler.scale
                _log.info("update %d skipped: overflow; the loss scale is now %g", number, scale)
            return True
        # Ranks that found the culprit tell it, too; the first one tells that it happened.
        if self._mesh.rank == 0 or culprit:
            _log.warning("update %d skipped: the gradient's norm is %s%s", number, self.norm, culprit)
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise FloatingPointError(
                f"the gradient was not finite in {MOST_SKIPPED} updates in a row, the last is {number}"
                f"{culprit}; lower the learning rate, or clip gradients"
            )
        return True


def _turns(flats: Sequence[Flat], in_parts: bool) -> Sequence[Sequence[Flat]]:
    """Return the flat buffers in lists; gradients of one list at a time are made as wide as their masters.

    Args:
        flats: of the model.
        in_parts: the optimizer can take its step in parts; otherwise there is one list.
    """
    # A wider copy of all gradients would take more memory than narrow sums save. The largest list comes first: if there
    # is too little memory for it, nothing has changed yet.
    narrow = sorted(filter(_sums_narrowly, flats), key=_elements, reverse=True) if in_parts else []
    if not narrow:
        return [flats]
    turns: list[list[Flat]] = [[]]
    for flat in narrow:
        if turns[-1] and sum(map(_elements, turns[-1])) + _elements(flat) > _elements(narrow[0]):
            turns.append([])
        turns[-1].append(flat)
    if others := [flat for flat in flats if flat not in narrow]:
        turns.append(others)
    return turns


def _elements(flat: Flat) -> int:
    return flat.master.numel()


def _sums_narrowly(flat: Flat) -> bool:
    """Return whether a gradient on the device is summed in fewer bytes than the master has."""
    sums = None if flat.gradient is None else flat.gradient.shard
    narrow = sums is not None and sums.dtype.itemsize < flat.master.dtype.itemsize
    return narrow and flat.optimizer_tier is Tier.DEVICE


def _mean_loss(agreement: Agreement) -> float | None:
    """Return the mean over ranks and micro-batches; None where the user called the backward of the losses."""
    total, count = agreement.sums[:, :2].sum(0).tolist()
    return total / count if count else None


def _host_steps(update: weakref.ref[Update]) -> HostSteps | None:
    """Return the host's steps of the coming update."""
    alive = update()
    if alive is None or alive._optimizer is None:
        return None
    # As they will be if the gradients are not clipped: an early update that guessed wrong is computed again.
    return alive._steps(alive._optimizer, alive.gradient_factor)
