"""Check that a forward does not write to parameters outside of blocks, once for each stage of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zeromesh.config.keys import SCHEDULE

# By bytes of an element. Sums of integers depend neither on order nor on rounding.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
                    f"per rank ({SCHEDULE} 1f1b, gpipe or zb-h1), or change it inside of a block or after "
                    "engine.step()"
                )


def _sum(parameter: Tensor) -> int:
    real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    return int(real.view(_INTEGERS[real.itemsize]).sum(dtype=torch.int64))
