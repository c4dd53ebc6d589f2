"""Storage of checkpointed blocks' inputs and results until their backward: host memory, parts over ranks, or both.

Sources: Rajbhandari et al., "ZeRO", 2020, section 6.1 (activations that tensor-parallel ranks replicate are
partitioned, and may be offloaded); Ren et al., "ZeRO-Offload", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.comm.collectives import Group

_TAG = 4  # tag of the messages of partitioned inputs; they are waited for at once.

_inside: ContextVar[bool] = ContextVar("a checkpointed block computes", default=False)


class HostPool:
    """Buffers of host memory that are lent out and used again; page-locked where there is an accelerator."""

    def __init__(self, pinned: bool) -> None:
        self.peak = 0  # bytes that were lent at the most; the pool never holds more
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._held = self._lent = 0

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer of at least ``nbytes`` bytes: uint8, 1-D."""
        # At most twice as large, or small inputs would use up the buffers of large ones.
        fitting = [n for n, buffer in enumerate(self._free) if nbytes <= buffer.nbytes <= 2 * nbytes]
        if fitting:
            buffer = self._free.pop(min(fitting, key=lambda n: self._free[n].nbytes))
        else:
            self.peak = max(self.peak, self._lent + nbytes)
            while self._free and self._held + nbytes > self.peak:
                # Torch's allocator of page-locked memory waits for the copies that it is still part of.
                self._held -= self._free.pop(0).nbytes
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
            self._held += nbytes
        self._lent += buffer.nbytes
        self.peak = max(self.peak, self._lent)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer."""
        # No wait: its next writer is a copy on the stream of its last reader, and so comes after it.
        self._lent -= buffer.nbytes
        self._free.append(buffer)


class ActivationStore:
    """Storage of the tensors that a model's checkpointed blocks need in their backward."""

    def __init__(self, device: torch.device, host: bool, group: Group | None = None) -> None:
        self.device = device  # where the model computes; what is elsewhere stays there
        self.least = 4096  # bytes of the smallest tensor that is moved
        self.pool = HostPool(pinned=device.type != "cpu") if host else None
        self.group = group  # the ranks that keep one part of equal inputs each; None: each rank keeps all
        self.stream = torch.Stream(device) if host and device.type != "cpu" else None
        self._known: WeakValueDictionary[Any, KeptTensor] = WeakValueDictionary()
        self._seen: set[int] = set()
        self._last: ref[Visit] | None = None
        self._prefetched: list[ref[KeptTensor]] = []
        self._task = -1
        self._differs: list[Tensor] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the model, or one that is saved, has no store: its inputs stay where they are.
        return type(None), ()

    def visit(self, forward: Callable[..., Any]) -> Visit | None:
        """Return a place for what a call of a block's forward leaves until the backward; None inside of another."""
        if _inside.get() or torch.compiler.is_compiling():
            return None
        if id(forward) in self._seen:  # another pass begins
            self._seen, self._last = set(), None
            self._known.clear()
        self._seen.add(id(forward))
        visit = Visit(self, self._last)
        self._last = ref(visit)
        return visit

    def moves_input(self, tensor: Tensor) -> bool:
        """Return whether an input of a block waits elsewhere."""
        return (
            self.movable(tensor)
            and tensor.nbytes >= self.least
            and (tensor.is_floating_point() or tensor.is_complex())  # others, as masks and token ids, are small
            # Parameters are there anyway, or fetched by their unit.
            and not isinstance(tensor._base, nn.Parameter)
        )

    def movable(self, tensor: Tensor) -> bool:
        """Return whether a tensor can wait elsewhere."""
        return (
            type(tensor) is Tensor  # a subclass may hold more than its elements
            and tensor.nbytes > 0
            and tensor.device.type == self.device.type
            and not tensor.is_inference()  # torch counts no versions of these
            # These two are views whose elements are not what their memory holds.
            and not (tensor.is_conj() or tensor.is_neg())
            and _is_dense(tensor)
        )

    def put(self, tensor: Tensor, storage: StorageWeakRef) -> KeptTensor:
        """Keep a tensor; the same one, unchanged since another block was given it, is kept once."""
        key = (storage.cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        entry = self._known.get(key)
        if entry is None:
            self._known[key] = entry = KeptTensor(self, tensor, storage)
        return entry

    def begin_backward(self) -> None:
        """Note that tensors are asked for, and listen for the end of the backward."""
        self._known.clear()  # an update may follow
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task, self._differs = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def prefetch(self, visit: Visit | None, beside: Visit | None = None) -> None:
        """Start to bring back what a visit left; of others but ``beside``, what nobody took is dropped."""
        wanted, others = ([] if call is None else call.entries for call in (visit, beside))
        for entry in filter(None, (reference() for reference in self._prefetched)):
            if not any(entry is other for other in (*wanted, *others)):
                entry.drop()
        for entry in wanted:
            entry.start()
        self._prefetched = [ref(entry) for entry in (*wanted, *others)]

    def compare(self, gathered: Tensor, expected: Tensor) -> None:
        """Note whether what was gathered is what this rank was given."""
        self._differs.append((checksum(gathered) != expected).any())

    def _end_backward(self) -> None:
        """Drop what nobody took; raise RuntimeError if what was partitioned was not the same on all ranks."""
        self._task = -1
        self.prefetch(None)
        differs, self._differs = self._differs, []
        if self.group is None or not differs:
            return
        # An exchange is safe here: autograd calls this on all ranks alike, as their backwards are the same.
        number = torch.stack(differs).sum().view(1)
        if bool(self.group.exchange(number, _TAG).any()):
            raise RuntimeError(
                "activation_checkpointing.partition_activations keeps a part of each block's inputs on each rank of "
                f"the axis {self.group.axis}, but inputs differ between these ranks, and the gradients are wrong: name "
                "whole blocks in activation_checkpointing.targets, whose inputs are the same on all of them, or set "
                "activation_checkpointing.partition_activations to false"
            )


class KeptTensor:
    """A tensor that waits elsewhere."""

    def __init__(self, store: ActivationStore, tensor: Tensor, storage: StorageWeakRef) -> None:
        # Its copy on the device, if that has been started, and the event after which it is there.
        self.prefetched: tuple[Tensor, torch.Event | None] | None = None
        self._store = store
        self._source = storage  # as long as it is referred to, no other storage has its address
        self._size, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._elements = tensor.numel()
        with torch.no_grad():
            part = tensor.detach().as_strided((self._elements,), (1,))
            group = store.group
            if group is not None:
                self._checksum = checksum(part)
                self._each = -(-self._elements // group.size)
                part = part[self._each * group.rank : self._each * (group.rank + 1)]
            self._part = part.clone() if store.pool is None else self._to_host(part, store.pool)

    def _to_host(self, part: Tensor, pool: HostPool) -> Tensor:
        buffer = pool.take(part.nbytes)
        finalizer = finalize(self, pool.give, buffer)
        # At the end of the process there is nobody to lend the buffer to.
        finalizer.atexit = False
        host = buffer[: part.nbytes].view(self._dtype)
        stream = self._store.stream
        if stream is None:
            return host.copy_(part)
        # The copy waits for the current stream, which wrote the tensor; whoever gets the tensor's memory next waits
        # for the copy.
        stream.wait_stream(torch.accelerator.current_stream(self._store.device))
        with stream:
            host.copy_(part, non_blocking=True)
        part.record_stream(stream)
        return host

    def start(self) -> None:
        """Start to copy this rank's part to the device, unless it is there, or on its way."""
        if self._store.pool is not None and self.prefetched is None:
            self.prefetched = self._to_device()

    def drop(self) -> None:
        """Drop the copy on the device, which nobody took."""
        self.prefetched = None

    def _to_device(self) -> tuple[Tensor, torch.Event | None]:
        there = torch.empty_like(self._part, device=self._store.device, pin_memory=False)
        stream = self._store.stream
        if stream is None:
            return there.copy_(self._part), None
        # The copy waits for the current stream, whose kernels may still read what had this memory before, and, as it
        # is on the same stream, for the copy to the host.
        stream.wait_stream(torch.accelerator.current_stream(self._store.device))
        with stream:
            there.copy_(self._part, non_blocking=True)
        there.record_stream(stream)  # it may be dropped before it has arrived
        return there, stream.record_event()

    def fetch(self) -> Tensor:
        """Return the tensor as it was, in memory of its own. With a group, all its ranks call it."""
        store = self._store
        if store.pool is None:
            part = self._part
        else:
            (part, arrived), self.prefetched = self.prefetched or self._to_device(), None
            if arrived is not None:
                torch.accelerator.current_stream(store.device).wait_event(arrived)
        if store.group is not None:
            gathered = part.new_empty(self._each * store.group.size)
            local_part = gathered.chunk(store.group.size)[store.group.rank]
            local_part[: part.numel()].copy_(part)
            store.group.all_gather(gathered, local_part, _TAG).wait()
            part = gathered[: self._elements]
            store.compare(part, self._checksum)
        return part.as_strided(self._size, self._stride)


class Visit:
    """One call of a block, with the tensors that it stores until its backward."""

    def __init__(self, store: ActivationStore, before: ref[Visit] | None) -> None:
        self.store, self._before = store, before
        self.entries: list[KeptTensor] = []

    def put(self, tensor: Tensor, apart: bool = False) -> KeptTensor:
        """Store a movable tensor; with ``apart``, in a copy that others of its storage do not share."""
        storage = StorageWeakRef(tensor.untyped_storage())
        entry = KeptTensor(self.store, tensor, storage) if apart else self.store.put(tensor, storage)
        self.entries.append(entry)
        return entry

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Start to fetch this call's tensors on entry, and those of the block before it on exit."""
        self.store.begin_backward()
        self.store.prefetch(self)
        yield
        self.store.prefetch(None if self._before is None else self._before(), beside=self)

    def keep_inputs(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], list[Tensor]]:
        """Return the function to checkpoint in place of ``forward(*args, **kwargs)``, and its tensors."""
        # What waits elsewhere is taken out of the arguments: autograd keeps only the others, and checks that nobody
        # changed them in place. A copy has what the tensor held when the block was called, whatever becomes of it.
        staying = [tensor for tensor in tensors_of((args, kwargs)) if not self.store.moves_input(tensor)]
        # Of no elements: torch keeps the random states of the devices of what it is given.
        here = torch.empty(0, device=self.store.device)
        return _Inputs(self, forward, args, kwargs), [here, *staying]


class _Inputs:
    """A block's forward with the inputs that wait elsewhere."""

    def __init__(
        self, visit: Visit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._visit, self._forward = visit, forward
        self._called_with: tuple[Any, Any] | None = (args, kwargs)  # for the first call, which computes with them
        places: list[Tensor] = []
        entries: list[KeptTensor | None] = []

        def take(tensor: Tensor) -> Tensor:
            entries.append(visit.put(tensor) if visit.store.moves_input(tensor) else None)
            self._grads.append(tensor.requires_grad)
            # A placeholder in the containers, so that the tensor itself can be freed.
            places.append(torch.empty(0, device="cpu"))
            return places[-1]

        self._grads: list[bool] = []
        self._tree = map_tensors((args, kwargs), take)
        self._places = {id(place): n for n, place in enumerate(places)}
        self._kept = entries
        stream = visit.store.stream
        self._copied = None if stream is None else stream.record_event()

    def __call__(self, _: Tensor, *staying: Tensor) -> Any:
        called_with, self._called_with = self._called_with, None
        args, kwargs = self._restored(staying) if called_with is None else called_with
        del called_with
        token = _inside.set(True)
        try:
            return self._forward(*args, **kwargs)
        finally:
            _inside.reset(token)
            if self._copied is not None:
                # What the caller does next may change an input in place.
                torch.accelerator.current_stream(self._visit.store.device).wait_event(self._copied)

    def _restored(self, staying: tuple[Tensor, ...]) -> tuple[Any, Any]:
        rest = iter(staying)
        with torch.no_grad(), self._visit.in_backward():
            # In the order of the arguments, which is the same on all ranks.
            values = [next(rest) if entry is None else entry.fetch() for entry in self._kept]
        for value, entry, grad in zip(values, self._kept, self._grads, strict=True):
            if entry is not None:
                value.requires_grad_(grad)
        restored: tuple[Any, Any] = map_tensors(self._tree, lambda place: values[self._places[id(place)]])
        return restored


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in some order of dims, so that a copy can keep the strides."""
    expected = 1
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    for step, size in dims:
        if step != expected:
            return False
        expected *= size
    return tensor.layout is torch.strided


def checksum(values: Tensor) -> Tensor:
    """Return sums of the bits of a tensor's elements: int64, 1-D."""
    flat = values.as_strided((values.numel(),), (1,)) if _is_dense(values) else values.reshape(-1)
    bits = flat.view(torch.uint8)
    words = bits[: bits.numel() // 8 * 8].view(torch.int64)
    # Whole numbers, whose sum depends on no order. Parts, since changes may cancel out in the whole.
    parts = words, words[::2], words[: words.numel() // 3], bits[words.nbytes :]
    return torch.stack([part.sum(dtype=torch.int64) for part in parts])
