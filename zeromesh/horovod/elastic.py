"""Elastic training: state that survives a restart of the ranks.

Horovod changes the ranks inside living processes. Here the launcher starts all ranks again (``zeromesh launch
--max-restarts``), and committed state goes through a file, which rank 0 writes and reads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hmac
import io
import os
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import torch

from zeromesh.base.files import UnreadableFile, new_file, open_regular
from zeromesh.comm.detect import Environment, may_restart
from zeromesh.comm.trust import LASTING, require_private, run_token, sign
from zeromesh.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from zeromesh.horovod.horovod_start import rank, size
from zeromesh.horovod.world import HorovodInternalError

FOLDER = "ZEROMESH_ELASTIC"
"""Variable with the folder of committed states, which all nodes see; by default .zeromesh-elastic."""


def state_file() -> Path | None:
    """Return the file of the state committed in this run; None if no launcher restarts the ranks."""
    if not may_restart():
        return None
    # The launcher's process is the same after a restart, and another one in each run.
    launcher = os.getppid()
    stat = Path(f"/proc/{launcher}/stat")
    since = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else "0"
    # In a folder of this user alone, also where all may write to the one around it.
    return Path(os.environ.get(FOLDER) or ".zeromesh-elastic") / f"user-{os.geteuid()}" / f"{launcher}-{since}.pt"


def _write(path: Path, data: memoryview) -> None:
    """Write a signed file in a folder of this user alone; a rank that dies meanwhile leaves the one before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(path.parent)
    draft = path.with_suffix(".part")
    with new_file(draft) as file:
        file.write(sign(_key(), path.name, data))
        file.write(data)
    draft.replace(path)


def _read(path: Path) -> memoryview | None:
    """Return what ``_write`` has written in this run, or None; raise ValueError if somebody else has written it."""
    if not path.parent.is_dir():
        return None
    require_private(path.parent)
    signed = memoryview(b"")
    try:
        with contextlib.suppress(UnreadableFile), open_regular(path) as file:
            signed = memoryview(file.read())
    except FileNotFoundError:
        return None
    if not hmac.compare_digest(signed[:32], sign(_key(), path.name, signed[32:])):
        raise ValueError(
            f"{path} is not the state that this run has committed: another run or user has written it, or it is "
            "damaged; remove it, and start the run anew"
        )
    return signed[32:]


def _key() -> bytes:
    return os.environ.get(LASTING, "").encode() or run_token(Environment.detect())


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler that divides an epoch's samples over the ranks, and after a restart those that are left.

    Args:
        dataset: has a length.
        shuffle: permute the samples, differently in each epoch.
        seed: of the permutation; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, at its end rather than its start, since a restart inside an epoch continues it."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples processed in it, by all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue an epoch."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are left of the epoch over the ranks that there are now."""
        self.rank, self.num_replicas = rank(), size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        left = order[self.processed_num :]
        # All ranks get as many samples: the first ones once more where they do not divide.
        padded = -(-len(left) // self.num_replicas) * self.num_replicas
        self.indices = [left[place % len(left)] for place in range(self.rank, padded, self.num_replicas)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


PARTS = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
"""Classes of objects of which only the ``state_dict`` is saved."""


class ObjectState:
    """Named objects that can be committed and restored; each is an attribute.

    Args:
        bcast_object: in place of ``broadcast_object``.
        get_rank: in place of ``rank``.
        values: the objects, by name. Modules, optimizers and ``ElasticSampler`` keep their identity, and only their
            states are copied; others are Python objects.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None, **values: Any
    ) -> None:
        self._broadcast = bcast_object or broadcast_object
        self._rank = get_rank or rank
        self._callbacks: list[Callable[[], None]] = []
        self._names = list(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._saved = self._snapshot()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions that are called when the ranks have been started again, perhaps in another number."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Call the registered functions, after a restart."""
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        """Keep a copy in memory; rank 0 also in a file where a launcher restarts the ranks."""
        self._saved = self._snapshot()
        path = state_file()
        if path is None or self._rank() != 0:
            return
        file = io.BytesIO()
        torch.save(self._saved, file)
        _write(path, file.getbuffer())

    def commit(self) -> None:
        """Save the state, and check for new hosts."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the launcher starts the ranks again when nodes come or go, and tells no living rank."""

    def restore(self) -> None:
        """Go back to the last commit."""
        self._take(copy.deepcopy(self._saved))

    def load(self) -> bool:
        """Take the state that an earlier start of this run committed; return whether there is one. Collective."""
        path = state_file()
        data = None if path is None or self._rank() != 0 else _read(path)
        if data is not None:
            # This run has signed it, and it holds the program's own objects.
            self._saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            self.restore()
        return bool(self._broadcast(data is not None))

    def sync(self) -> None:
        """Give every rank the state of rank 0, and keep a copy in memory."""
        others = {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                others[name] = value.state_dict() if isinstance(value, ElasticSampler) else value
        self._take(self._broadcast(others))
        self._saved = self._snapshot()

    def _take(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            current = getattr(self, name, None)
            if isinstance(current, PARTS):
                current.load_state_dict(value)
            else:
                setattr(self, name, value)

    def _snapshot(self) -> dict[str, Any]:
        """Return a copy of everything that is committed."""
        values = {name: getattr(self, name) for name in self._names}
        return copy.deepcopy({n: v.state_dict() if isinstance(v, PARTS) else v for n, v in values.items()})


State = ObjectState
"""Horovod's name for what states have in common."""


class TorchState(ObjectState):
    """State of training: a model, an optimizer, which may be a ``DistributedOptimizer``, and others by name."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is its state.

    The function starts with the last committed state after a restart, and with that of rank 0 on all ranks. If it
    raises HorovodInternalError that is no ValueError, the state goes back to the last commit, and the error goes on to
    the launcher, which starts all ranks again.
    """

    @functools.wraps(function)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        if state.load():
            state.on_reset()
        state.sync()
        try:
            result = function(state, *args, **kwargs)
        except HorovodInternalError as error:
            if not isinstance(error, ValueError):  # no rank is lost where arguments are wrong
                state.restore()
            raise
        path = state_file()
        if path is not None and rank() == 0:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return result

    return wrapper
