"""Parameters outside of a stage: zeros in the places of other stages' ones, and a check that a stage writes to none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zeromesh.base.in_place import writes, written

# The code before a stage's blocks, which the stage runs for the shapes only, computes with them. Nothing that counts
# may, or a parameter that is on the wrong stage would go unnoticed.
_counts: ContextVar[bool] = ContextVar("what is computed counts", default=False)

_SHAPES = ("type_as", "expand_as", "view_as", "reshape_as")  # look at the shape or dtype of their second argument

# By bytes of an element. Sums of integers depend neither on order nor on rounding.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Elsewhere(Tensor):
    """Zeros of the shape of a parameter, in the memory of one."""

    path: str

    @classmethod
    def make(cls, path: str, like: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Elsewhere:
        """Return the stand-in of a parameter; ``dtype`` is for those of floating point."""
        dtype = like.dtype if dtype is None or not like.is_floating_point() else dtype
        stand_in = torch.zeros((), dtype=dtype, device=device).expand(like.shape).as_subclass(cls)
        stand_in.path = path
        return stand_in

    def _same(self, result: Tensor) -> Tensor:
        """Return what shares these zeros' memory, such as ``.data`` and views, as one of them."""
        if isinstance(result, Elsewhere) or result.layout is not torch.strided:
            return result
        if result.untyped_storage()._cdata != self.untyped_storage()._cdata:
            return result
        stand_in = result.as_subclass(Elsewhere)
        stand_in.path = self.path
        return stand_in

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
                "other blocks in pipeline.blocks, register the module that has it after the blocks before which it "
                "is not needed, or set mesh.pipeline to 1"
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


class Parameters:
    """Checksums of the parameters of some modules of a model, as they are now."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._model, self._modules = model, modules
        self._sums = {id(parameter): _sum(parameter) for _, _, parameter in self._present()}

    def _present(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for module in self._modules:
            for name, parameter in module._parameters.items():
                # Parameters of unloaded units have a class that loads them at any use, as a checksum would.
                if parameter is not None and type(parameter).__torch_function__ is nn.Parameter.__torch_function__:
                    yield module, name, parameter

    def require_same(self) -> None:
        """Raise RuntimeError, naming the parameter, if one was written since."""
        for module, name, parameter in self._present():
            if self._sums.get(id(parameter), now := _sum(parameter)) != now:
                path = next(path for path, other in self._model.named_modules() if other is module)
                raise RuntimeError(
                    f"the model's forward changes {path}.{name} each time, outside of the pipeline's blocks, and a "
                    "rank with several stages runs that part once for each of them; take a schedule with one stage "
                    "per rank (pipeline.schedule 1f1b, gpipe or zb-h1), or change it inside of a block or after "
                    "engine.step()"
                )


def _sum(parameter: Tensor) -> int:
    real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    return int(real.view(_INTEGERS[real.itemsize]).sum(dtype=torch.int64))
