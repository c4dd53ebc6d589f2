"""Stand-ins of parameters that other stages have: zeros that take no memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zeromesh.config.keys import ONE_STAGE, STAGE_BLOCKS
from zeromesh.model.in_place import writes, written

# The code before a stage's blocks, which the stage runs for the shapes only, computes with them. Nothing that counts
# may, or a parameter that is on the wrong stage would go unnoticed.
_counts: ContextVar[bool] = ContextVar("what is computed counts", default=False)

_SHAPES = ("type_as", "expand_as", "view_as", "reshape_as")  # look at the shape or dtype of their second argument


class Elsewhere(Tensor):
    """Zeros of the shape of a parameter, in the memory of one."""

    path: str

    @classmethod
    def make(cls, path: str, like: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Elsewhere:
        """Return the stand-in of a parameter; ``dtype`` is for those of floating point."""
        dtype = like.dtype if dtype is None or not like.is_floating_point() else dtype
        made = torch.zeros((), dtype=dtype, device=device).expand(like.shape).as_subclass(cls)
        made.path = path
        return made

    def _same(self, result: Tensor) -> Tensor:
        """Return what shares these zeros' memory, such as ``.data`` and views, as one of them."""
        if isinstance(result, Elsewhere) or result.layout is not torch.strided:
            return result
        if result.untyped_storage()._cdata != self.untyped_storage()._cdata:
            return result
        made = result.as_subclass(Elsewhere)
        made.path = self.path
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handle a function of torch that is given such a tensor."""
        kwargs = kwargs or {}
        target = written(args, kwargs) if writes(func, kwargs) else None
        # A write is dropped: the stage that has the parameter does it, too.
        drops = isinstance(target, Elsewhere)
        source = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Elsewhere)), None)
        with torch._C.DisableTorchFunctionSubclass():
            result = target if drops else func(*args, **kwargs)
            if source is not None and not drops:
                result = tree_map_only(Tensor, source._same, result)
        if _counts.get() and _computes(func.__name__, args, result):
            path = "a parameter" if source is None else source.path
            raise RuntimeError(
                f"{path} is needed on a stage of the pipeline that does not have it, as it is used elsewhere in a "
                "trace of the model's forward, or in the order of registration where that cannot be traced; name "
                f"other blocks in {STAGE_BLOCKS}, register the module that has it after the blocks before which it "
                f"is not needed, or {ONE_STAGE}"
            )
        return result


def _computes(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Return whether a function makes tensors of the values of these zeros, and not of their shapes only."""
    if name in _SHAPES or name == "to":
        of_values = isinstance(args[0], Elsewhere)
    else:
        of_values = not (name.startswith("new_") or name.endswith("_like"))
    return of_values and any(isinstance(x, Tensor) for x in tree_leaves(result))


@contextmanager
def counting() -> Iterator[None]:
    """Run a stage: computations with these zeros are allowed until ``counts`` is called."""
    token = _counts.set(False)
    try:
        yield
    finally:
        _counts.reset(token)


def counts() -> None:
    """Refuse computations with these zeros from now on: the stage's own blocks begin."""
    _counts.set(True)
