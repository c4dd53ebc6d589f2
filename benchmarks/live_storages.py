"""Bytes of storages that operators make, while they live."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """The most bytes of storages that operators made and that live at one time.

    Args:
        ignored: tells of a new tensor that its storage does not count.
    """

    def __init__(self, ignored: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        super().__init__()
        self.live, self.peak, self.keys, self.ignored = 0, 0, set[int](), ignored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not self.ignored(tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.keys and key not in before:
                    self.keys.add(key)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self.keys.discard(key)
        self.live -= size
