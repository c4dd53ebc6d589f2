"""Seconds of kernels on a device, and the habits of frameworks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import KernelWork, WorkKind
from zeromesh.apps.plan.machine.cluster import Device
from zeromesh.base.axes import GRID

CAST = {"fp8": 4.0, "fp4": 4.0}  # bytes moved for each element of a product's operands, to make them from 16 bits

SMALL = 64  # length of a head at which products of scores reach half of the speed of large ones


@dataclass(frozen=True)
class Habits:
    """Choices of a framework that a layout does not say; the defaults are this library's."""

    dtype: str = ""  # of products; "": the device's 16-bit one
    order: tuple[str, ...] = GRID  # axes by which ranks are numbered, outermost first
    joins_hidden: float = 0.0  # share of the tensor ranks' sums that goes on beside computation in the forward
    joins_hidden_back: float = 0.0  # in the backward; of its reductions alone, under sequence parallelism
    reduces_early: bool = True  # gradients are reduced during the backward, not behind it
    publishes_early: bool = True  # updated parameters are gathered beside the next forward
    even_stages: bool = False  # a pipeline's stages have as many blocks each, whatever they compute
    sums_once: bool = False  # gradients are reduced once for an update, in any row
    messages_block: bool = False  # a pipeline's rank computes nothing while it sends
    messages_scattered: bool = False  # each tensor rank sends its part, and they gather the whole behind it
    rails: int = 0  # a node's links that one group uses at a time; 0: those of all its members
    attention: float = 1.0  # speed of fused attention beside that of FlashAttention-2 on an A100, as shares of the peak
    fusion: float = 1.0  # share of the bytes of norms and elementwise kernels that is left where kernels are fused
    loss: float = 1.0  # bytes that the loss moves, in parts of what torch's cross entropy does
    selective: float = 0.0  # share of the forward that selective recomputation computes again, beside scores
    spread: float = 0.0  # standard deviation of the ranks' speed, as a share of it; all wait for the slowest
    copies: str = "rank"  # a token travels once to each "rank" with one of its experts, each "node", or each "expert"
    exchanges_hidden: float = 0.0  # share of the experts' exchanges that goes on beside computation
    uneven: float = 1.3  # rows of the busiest expert rank, in parts of the mean
    host_traffic: float = 1.0  # bytes that the host's update moves, in parts of those of this library's kernel
    overhead: float = 0.0  # seconds of each micro-batch's passes that are spent beside kernels
    between: float = 0.0  # seconds of each step that are spent beside kernels


def dtype_on(device: Device, wanted: str = "") -> str:
    """Return a dtype of products that the device has: ``wanted``, or the next wider one.

    Raises:
        ValueError: it has none of them.
    """
    names = ("bf16", "fp16", "tf32", "fp32")
    order = (*names[names.index(wanted) :], "fp16", "bf16") if wanted in names else (wanted, *names)
    for name in order:
        if device.flops.get(name):
            return name
    raise ValueError(
        f"device {device.name!r} has no operations per second for {wanted or names[0]}, nor for a wider dtype; give "
        "them in flops"
    )


@dataclass(frozen=True)
class KernelSpeed:
    """Speed of kernels on one rank of a layout."""

    device: Device
    layout: ParallelLayout
    habits: Habits

    @property
    def dtype(self) -> str:
        """Dtype of products; that of the parameters unless the habits or the layout say another."""
        products = self.layout.products if self.device.flops.get(self.layout.products) else ""
        return dtype_on(self.device, self.habits.dtype or products or self._wide)

    @property
    def _wide(self) -> str:
        return "fp32" if self.layout.widths.parameter >= 4 else ""

    @property
    def _unrounded(self) -> str:
        """Dtype of convolutions and of attention's scores, which stay in that of the parameters."""
        return dtype_on(self.device, self._wide) if self.dtype in CAST else self.dtype

    def total(self, works: Iterable[KernelWork], back: bool = False) -> float:
        """Return the seconds of kernels one after the other; ``back`` for those of input gradients."""
        return sum(self.seconds(work, back) for work in works)

    def seconds(self, work: KernelWork, back: bool = False) -> float:
        """Return the seconds of a kernel, ``count`` times: of its operations or its bytes, whichever takes longer."""
        device, tensor, split = self.device, self.layout.tensor, self.layout.sequence
        moved = work.moved.on(tensor, split)
        if work.kind in (WorkKind.NORM, WorkKind.ELEMENTWISE):
            moved *= self.habits.fusion
        elif work.kind is WorkKind.LOSS:
            moved *= self.habits.loss
            if device.loss_bandwidth:
                return work.count * (device.launch + moved / device.loss_bandwidth)
        seconds = device.memory_seconds(moved)
        if work.kind is WorkKind.ATTENTION:
            seconds = self._attention(work, work.flops.on(tensor, split), moved, back)
        elif work.shape is not None:
            rows, columns, sums = (float(length) for length in work.shape)
            parts = self.layout.expert_split if work.groups else tensor
            columns = columns / parts if work.divided == "columns" else columns
            sums = sums / parts if work.divided == "sums" else sums
            if work.groups:
                return work.count * self._grouped(work.groups, rows * parts / tensor, columns, sums)
            seconds = max(seconds, device.product_seconds(rows, columns, sums, self.dtype))
            if self.dtype in CAST:
                # Both operands are read in 16 bits and written as they are and transposed, for the backward.
                seconds += device.memory_seconds(CAST[self.dtype] * (rows * sums + sums * columns))
        elif work.kind is WorkKind.CONVOLUTION:
            rate = device.flops[self._unrounded] * device.product_efficiency
            seconds = max(seconds, work.flops.on(tensor, split) / rate)
        return work.count * seconds

    def _grouped(self, experts: int, rows: float, columns: float, sums: float) -> float:
        """Return the seconds of one kernel that multiplies the rows of each expert with the expert's matrix."""
        device, here = self.device, experts / self.layout.expert
        if self.layout.expert > 1:
            rows *= self.habits.uneven
        # The groups fill the device together, so that only the largest one's result has to.
        each = device.product_seconds(rows / here, columns, sums, self.dtype) - device.launch
        seconds = device.launch + here * each
        if self.dtype in CAST:
            seconds += device.memory_seconds(CAST[self.dtype] * (rows * sums + here * sums * columns))
        return seconds

    def _attention(self, work: KernelWork, flops: float, moved: float, back: bool) -> float:
        device = self.device
        dtype = dtype_on(device, "bf16") if device.processor else self._unrounded
        rate = device.flops[dtype] * device.product_efficiency
        if work.shape is None:
            # A backward computes the scores again: five products for four that are counted.
            rate *= self.habits.attention * (device.attention_backward * 4 / 5 if back else device.attention_forward)
            apart = device.attention_bandwidth_back if back else device.attention_bandwidth
            if apart:
                return device.launch + flops / rate + moved / apart
        else:
            # A batch of small products: short sums leave most of the time to reading and writing scores.
            rate *= work.shape[2] / (work.shape[2] + SMALL)
        return max(device.memory_seconds(moved), flops / rate)
