"""Updates of what rests off the device that begin during the backward, as soon as a gradient is whole.

Sources: Ren et al., "ZeRO-Offload", 2021 (the update on the host); Lian et al., "SuperOffload", 2025, which begins
before the norm is known, too, and undoes in place what did not count.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue

import torch
from torch import nn

from zeromesh.base.kernels.update_pass import UpdatePiece as Elements
from zeromesh.base.kernels.update_pass import UpdateStep, update
from zeromesh.base.placement import Tier
from zeromesh.base.worker import Worker
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.gradient import Arrival, Gradient
from zeromesh.shard.optim.host import HostSteps
from zeromesh.shard.parameters.absent_guard import change_class, watched_class
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.store.link import DONE, Copy, Link
from zeromesh.shard.store.memory import empty_on, is_unloaded, zeros_on
from zeromesh.shard.store.swap import StateForm, Swap
from zeromesh.shard.store.tiers import Tiers
from zeromesh.shard.store.window import StateWindow, pieces_in, whole_window

MOST_PAUSES = 31  # updates without any that begins early, after several in a row that did not count
OWN_REFERENCES = 4  # to a state: of the optimizer, of a tuple of states, of who asks, and of who counts


def can_begin_early(flat: Flat, mesh: Mesh) -> bool:
    """Return whether a flat buffer is updated off the device from a gradient that is whole before the backward ends."""
    gradient = flat.gradient
    if gradient is None or flat.optimizer_tier is Tier.DEVICE:
        return False
    # Sums over replicas, tensor ranks and tied stages are made at the end, for all gradients together.
    return mesh.replicate.size == 1 and not gradient.shared and not gradient.tied_stages


@dataclass
class _Next:
    """Host memory of one flat buffer for an update that may not count."""

    output: torch.Tensor | None  # the parameter as it is computed with; None where that is the master
    master: torch.Tensor | None = None  # None for what rests in files, which have a spare place for the next master
    states: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # of each piece, in order; empty for files
    sent: Copy = DONE  # the copy of `output` to the parameter's shard, which reads it

    def fit(self, states: list[tuple[torch.Tensor, ...]], device: torch.device) -> None:
        if [len(new) for new in self.states] != [len(old) for old in states]:
            self.states = [
                tuple(empty_on(Tier.HOST, old.numel(), old.dtype, device, False).view_as(old) for old in tensors)
                for tensors in states
            ]

    def publish(self, flat: Flat, link: Link) -> None:
        """Let the next master be the flat buffer's, and begin to send the new parameters to the shard."""
        if self.master is not None:
            # They change places: the present master is the memory of the next update, and nothing is copied.
            apart = flat.shard is not flat.master
            new, self.master = self.master, flat.master
            flat.bind_master(new)
            if not apart:
                flat.bind_shard(new)
        if self.output is not None:
            self.sent = flat.send_shard(self.output, link)


@dataclass(eq=False)
class _Task:
    flat: Flat
    shard: torch.Tensor  # of the gradient
    factor: float
    steps: list[UpdateStep]  # of each piece, in order
    states: list[tuple[torch.Tensor, ...]]  # of each piece, as they are read
    next: _Next
    landed: Arrival | None  # to be waited for before `shard` is used; None: it is there
    master_version: int  # count of writes to the master, as it is read
    shard_version: int = -1  # the same of `shard`
    done: threading.Event = field(default_factory=threading.Event)
    is_current: bool = True  # nobody has used master and states meanwhile, and may have written to them

    def begin(self) -> None:
        """Note how often the gradient was written to before it is read."""
        self.shard_version = self.shard._version

    def outdate(self) -> None:
        """Note that somebody uses the master or the states, and may write to them."""
        self.is_current = False

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The optimizer's tensors that are read: pieces and states."""
        yield from (piece.parameter for _, _, piece in self.flat.pieces)
        yield from (state for states in self.states for state in states)


class EarlyState(Enum):
    """State of early updates between two updates of the optimizer."""

    OPEN = "open"  # gradients come, and the updates of those that are whole may begin
    SPOILT = "spoilt"  # a gradient or a state was changed under them: none begins before the next update
    COUNTED = "counted"  # the update was asked for: what counts is adopted


class EarlyUpdates:
    """Begins updates during the backward, and knows afterwards which of them count."""

    # Whether an update counts is known when all gradients are: none overflowed, and the norm is below the limit of
    # clipping. So it changes nothing: it reads the present masters and states and writes the next ones, on the host
    # into copies, on NVMe into spare places of the file. What does not count is computed again from the present ones,
    # so that the result is the same to the bit. No other rank needs to know: all of it concerns the states of this rank
    # alone.

    def __init__(self, store: Tiers, mesh: Mesh, link: Link, pinned: bool) -> None:
        self._steps: Callable[[], HostSteps | None] | None = None  # set by ``ask``
        self._flats = {id(flat.gradient): flat for flat in store.early}
        self._swap = store.swap
        self._device, self._pinned = mesh.device, pinned
        self._link = link
        self._states = store.states
        self._next: dict[Flat, _Next] = {}
        self._tasks: dict[Flat, _Task] = {}
        self._update: HostSteps | None = None
        self._arrived: list[Flat] = []
        self._ready: list[Flat] = []
        self._order: list[Flat] = []  # in which gradients became whole in the last update
        self._pauses, self._left = 0, 0
        self._state = EarlyState.OPEN
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: Worker | None = None
        self._error: BaseException | None = None
        self._references = {flat: _references(flat.master) for flat in store.early}
        # Users reach pieces and states through the optimizer, and torch does not count writes to their `.data`.
        self._watched = {base: watched_class(base, self._used) for base in (torch.Tensor, nn.Parameter)}
        self._readers: dict[int, _Task] = {}  # of watched tensors, by their `id`
        store.before_states(self._before_states)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory, at the most."""
        return sum(sum(next_bytes(flat, flat.master.dtype, self._states)) for flat in self._flats.values())

    # During the backward.

    def ask(self, steps: Callable[[], HostSteps | None]) -> None:
        """Ask ``steps`` for the update when its first gradient is whole; before this call nothing begins early."""
        self._steps = steps

    def is_whole(self, gradient: Gradient) -> None:
        """Begin the update from a gradient that is summed over all ranks, with nothing expected to be added."""
        assert self._state is not EarlyState.COUNTED, self._state
        flat = self._flats.get(id(gradient))
        if flat is None or self._steps is None:
            return
        if not self._arrived:
            self._update = None if self._left else self._steps()
            self._left = max(0, self._left - 1)
        if flat in self._arrived:  # more was added after all
            self.spoil()
        self._arrived.append(flat)
        if not all(gradient.used[index] for index, *_ in flat.pieces):
            if self._swap is not None and flat in self._order:
                self._queue.put(None)  # regions are read in an order in which it may be the next
            return  # whether another rank used the rest is not known yet
        self._ready.append(flat)
        if self._update is None or self._state is EarlyState.SPOILT:
            return
        task = self._task(flat, gradient, self._update)
        if task is None:
            return
        if self._thread is None:
            if self._swap is not None:
                self._swap.flush()
            self._error, self._queue = None, SimpleQueue()
            # In a thread: the kernel and the disk leave Python's lock alone, so the backward goes on beside them.
            self._thread = Worker(self._work, "early update")
            self._thread.start()
        self._tasks[flat] = task
        self._queue.put(task)

    def _task(self, flat: Flat, gradient: Gradient, steps: HostSteps) -> _Task | None:
        """Return the update to compute; None if the optimizer's own step does it, or makes the states first."""
        shard = gradient.shard
        assert shard is not None
        if not all(steps.takes(piece.parameter, shard) for _, _, piece in flat.pieces):
            return None
        coming = [steps.coming(piece.parameter) for _, _, piece in flat.pieces]
        updates = [entry for entry in coming if entry is not None]
        if len(updates) < len(coming):
            return None
        states = [tensors for _, tensors in updates]
        on_disk = self._swap is not None and flat in self._swap
        if on_disk and not all(is_unloaded(tensor) for tensors in states for tensor in tensors):
            return None  # somebody has set it: it goes to the file first
        if not (on_disk or self._is_ours(flat, states)):
            return None
        if flat not in self._next:
            elements, place = flat.own.stop - flat.own.start, (self._device, self._pinned)
            output = zeros_on(Tier.HOST, elements, flat.shard.dtype, *place) if flat.shard is not flat.master else None
            master = None if on_disk else zeros_on(Tier.HOST, elements, flat.master.dtype, *place)
            self._next[flat] = _Next(output, master)
        memory = self._next[flat]
        if not on_disk:
            memory.fit(states, self._device)
        taken = [step for step, _ in updates]
        task = _Task(flat, shard, steps.factor, taken, states, memory, gradient.landed, flat.master._version)
        # What rests in files nobody can write to without `_before_states`.
        for tensor in () if on_disk else task.tensors:
            self._readers[id(tensor)] = task
            change_class(tensor, self._watched[type(tensor)])
        return task

    def _is_ours(self, flat: Flat, states: list[tuple[torch.Tensor, ...]]) -> bool:
        """Return whether nobody else refers to a master and its states, whose memory changes with an early update."""
        return _references(flat.master) == self._references[flat] and all(
            type(state) is torch.Tensor
            and _references(state) == 1 + state._is_view()  # a view has its base, too
            and sys.getrefcount(state) == OWN_REFERENCES
            for tensors in states
            for state in tensors
        )

    def _used(self, tensor: torch.Tensor) -> None:
        """Note that somebody uses a piece or a state, and may write to it."""
        task = self._readers[id(tensor)]
        task.outdate()
        self._unwatch(task)

    def _unwatch(self, task: _Task) -> None:
        for tensor in task.tensors:
            if self._readers.pop(id(tensor), None) is not None:
                change_class(tensor, nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor)

    def _work(self) -> None:
        """Compute one update after the other, in the thread, until None arrives or nothing may begin any more."""
        try:
            with torch._C.DisableTorchFunctionSubclass():  # nobody else uses what is watched here
                if self._swap is None:
                    while (task := self._queue.get()) is not None and self._state is EarlyState.OPEN:
                        _compute(task)
                        task.done.set()
                else:
                    self._work_on_disk(self._swap)
        except BaseException as error:  # it is raised where the update is asked for
            self._error = error

    def _work_on_disk(self, swap: Swap) -> None:
        """Compute updates in the order of the last update, in which regions are read ahead."""
        order = [flat for flat in self._order if flat in swap]
        waiting: dict[Flat, _Task] = {}
        last: _Task | None = None
        with closing(swap.stream(order, provisional=True)) as windows:
            for window in windows:
                if last is not None and last.flat is not window.flat:
                    last.done.set()  # it is being written
                    last = None
                while window.flat not in waiting:
                    task = self._queue.get()
                    if task is None or self._state is not EarlyState.OPEN:
                        return
                    waiting[task.flat] = task
                last = waiting[window.flat]
                _compute(last, window)
        if last is not None:
            last.done.set()

    # When the update is asked for, or will not be.

    def counted(self, steps: HostSteps | None) -> set[Flat]:
        """Stop, and forget what does not count of the update ``steps``; ``adopt`` the rest, all of it.

        Raises:
            OSError: the disk failed meanwhile.
        """
        assert self._state is not EarlyState.COUNTED, self._state
        self._stop(EarlyState.COUNTED)
        for task in self._tasks.values():
            self._unwatch(task)
        self._order = list(dict.fromkeys(self._ready)) or self._order
        error, self._error = self._error, None
        if error is not None:
            self._forget()
            raise error
        done = [task for task in self._tasks.values() if task.done.is_set()]
        good = [] if steps is None else [task for task in done if _holds(task, steps)]
        if done:
            # Where most updates are clipped, little is to be computed twice.
            self._pauses = 0 if good else min(2 * self._pauses + 1, MOST_PAUSES)
            self._left = self._pauses
        if self._swap is not None:
            if len(good) < len(done):  # in files all of it counts or nothing, as `commit` is one operation
                good = []
            if good:
                self._swap.blocks.commit()
        flats = {task.flat for task in good}
        if not flats:
            self._forget()
        return flats

    def adopt(self, steps: HostSteps, flat: Flat) -> None:
        """Let the update of one flat buffer count, and send the new parameters to its shard."""
        assert self._state is EarlyState.COUNTED, self._state
        task = self._tasks.pop(flat)
        memory = task.next
        memory.publish(flat, self._link)
        for number, (_, _, piece) in enumerate(flat.pieces):
            new = memory.states[number] if memory.states else ()
            steps.adopt(piece.parameter, new)
            if new:
                memory.states[number] = task.states[number]
        task.states.clear()

    def spoil(self) -> None:
        """Forget what was computed, as gradients change, and begin nothing more before the next update."""
        self._stop(EarlyState.SPOILT)
        self._error = None
        self._forget()

    def begin(self) -> None:
        """Forget what was computed: the next gradients are another update's."""
        self.spoil()
        self._arrived, self._ready, self._update = [], [], None
        self._state = EarlyState.OPEN

    def _before_states(self, flat: Flat, write: bool) -> None:
        """Forget what was computed before anybody changes states, or reads them from files.

        Regions of files have one user at a time.
        """
        here = self._tasks and self._swap is not None and flat in self._swap
        if here and (self._state is EarlyState.OPEN or id(flat.gradient) in self._flats):
            self.spoil()
        if write and flat in self._tasks:
            self._tasks[flat].outdate()

    def _forget(self) -> None:
        """Drop the next masters and states; what an update needs is as it was before the backward."""
        if self._swap is not None:
            self._swap.blocks.drop()
        for task in self._tasks.values():
            self._unwatch(task)
            task.states.clear()  # who has the task is not to count as a user of them
        self._tasks.clear()

    def _stop(self, state: EarlyState) -> None:
        """Enter a state in which nothing begins; the thread ends after the update that it computes now."""
        self._state = state
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None  # not before: who interrupts the wait, and goes on, waits again


def _references(tensor: torch.Tensor) -> int:
    """Return the number of tensors in this memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def next_bytes(flat: Flat, dtype: torch.dtype, states: StateForm) -> tuple[int, int]:
    """Return the bytes in host memory for an early update: of masters (in ``dtype``) and states, and of parameters."""
    elements = flat.own.stop - flat.own.start
    apart = flat.apart or dtype != flat.layout.dtype
    output = elements * flat.layout.dtype.itemsize if apart else 0
    if flat.optimizer_tier.in_blocks:
        return 0, output  # its next masters and states go to spare places of the file
    owned = sum(stop - start for _, start, stop in flat.layout.owned(flat.own.start, flat.own.stop))
    return elements * dtype.itemsize + states.state_bytes(dtype) * owned, output


def _compute(task: _Task, window: StateWindow | None = None) -> None:
    """Compute the update of one flat buffer; of a window in place, else into the task's own memory."""
    memory = task.next
    memory.sent.wait()  # the host: the copy to the device of the last update still reads `output` until then
    if task.landed is not None:
        task.landed.wait()  # the host: the gradient is on its way from the device, on the stream of copies to the host
    task.begin()  # not before: what comes may be added to it
    numbers = {id(piece): number for number, (_, _, piece) in enumerate(task.flat.pieces)}
    pieces = []
    for _, part, within, piece in pieces_in(window or whole_window(task.flat)):
        number = numbers[id(piece)]
        output = None if memory.output is None else memory.output[part]
        fixed = task.steps[number], task.shard[part]
        if window is not None:
            assert window.rows is not None
            master, *states = (row[within] for row in window.rows[: 1 + len(task.states[number])])
            pieces.append(Elements(*fixed, master, tuple(states), output))
            continue
        assert memory.master is not None
        old, new = (tuple(state.view(-1) for state in s) for s in (task.states[number], memory.states[number]))
        master = piece.parameter.detach().view(-1)
        pieces.append(Elements(*fixed, master, old, output, memory.master[part], new))
    update(pieces, task.factor)


def _holds(task: _Task, steps: HostSteps) -> bool:
    flat = task.flat
    if flat.gradient is None or flat.gradient.shard is not task.shard or steps.factor != task.factor:
        return False
    versions = flat.master._version, task.shard._version
    if not task.is_current or versions != (task.master_version, task.shard_version):
        return False
    for number, (_, _, piece) in enumerate(flat.pieces):
        coming = steps.coming(piece.parameter)
        if coming is None or coming[0] != task.steps[number]:
            return False
        if any(tensor is not other for tensor, other in zip(coming[1], task.states[number], strict=True)):
            return False
    return True
