"""The ``.grad`` and ``.data`` of parameters, which lie in flat buffers: read, written and dropped as in torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeromesh.base.axes import AXES
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.accumulation import Accumulation
from zeromesh.shard.gradients.gradient import Gradient, GradientArrival
from zeromesh.shard.gradients.gradient_sums import Place, norm_of
from zeromesh.shard.gradients.reducer import Reducer, complete_together
from zeromesh.shard.parameters.absent_guard import OWN_CLASS, Absent, change_class
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.store.early import EarlyUpdates

# Autograd's own. Its `.grad` is empty between backwards: each gradient is moved into its flat buffer as it arrives.
PLAIN_GRAD: Any = torch._C.TensorBase.grad
PLAIN_DATA: Any = torch._C.TensorBase.data

# By it `torch.compile` describes a parameter, with the storage of its `.grad`, which compiled code does not use.
_DESCRIPTION = getattr(sys.modules.get("torch._subclasses.meta_utils"), "safe_grad", None)


class UnavailableGradient(Absent):
    """Stands for a gradient that is not whole on this rank."""

    zero: Callable[[], None]  # sets the gradient to zero, on all ranks together

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.detach_:
            return args[0]
        if func in (torch.Tensor.zero_, torch._foreach_zero_):
            for gradient in tree_leaves(args[0]):
                gradient.zero()
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class Grads:
    """Answers for the ``.grad`` of the trainable parameters of one model."""

    def __init__(
        self,
        flats: Sequence[Flat],
        names: Mapping[int, str],
        reducer: Reducer,
        accumulation: Accumulation,
        mesh: Mesh,
        settle: Callable[[], None],
        early: EarlyUpdates,
    ) -> None:
        self._flats = {id(p): (flat, index) for flat in flats for index, p in enumerate(flat.parameters)}
        self._places = {key: (flat.gradient, index) for key, (flat, index) in self._flats.items() if flat.gradient}
        self._tables = {id(table.flat.parameters[0]): table for table in reducer.tables}
        self._parameters = [p for flat in flats if flat.gradient is not None for p in flat.parameters]
        self._names = names  # fully qualified names by the parameters' `id`
        self._reducer = reducer
        self._accumulation = accumulation
        self._mesh = mesh
        # Axes along which a gradient is not final before the update, or is a part of the model's.
        self._spread = ", ".join(axis for axis, role in AXES.items() if not role.shards and mesh.sizes[axis] > 1)
        self._settle = settle  # drops what a backward has left that the user called and that raised
        self._early = early
        self._classes: dict[type, type[nn.Parameter]] = {}

    # Classes.

    def install(self) -> None:
        """Give every trainable parameter a class whose ``grad`` is answered here."""
        for parameter in self._parameters:
            change_class(parameter, self.class_of(type(parameter)))

    def remove(self) -> None:
        """Give the parameters their own classes back."""
        for parameter in self._parameters:
            change_class(parameter, own_class(type(parameter)))

    def class_of(self, plain_class: type[nn.Parameter]) -> type[nn.Parameter]:
        """Return the subclass of a parameter's own class whose ``grad`` is answered here."""
        if plain_class not in self._classes:
            self._classes[plain_class] = _with_grad(plain_class, ref(self))
        return self._classes[plain_class]

    # What torch's attributes do.

    def expose(self, parameter: torch.Tensor) -> None:
        """Note that the parameter may be written to from now on without a trace."""
        # Torch does not count writes to `parameter.data`. The value is taken when the parameter leaves the memory, or
        # at the update.
        if id(parameter) in self._flats:
            flat, index = self._flats[id(parameter)]
            flat.exposed.add(index)

    def read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient, averaged over the ranks: a view of the flat buffer, so that in-place changes count.

        Where it is not whole on this rank: a stand-in without memory; None where there is no gradient.
        """
        plain: torch.Tensor | None = PLAIN_GRAD.__get__(parameter)
        if plain is None and (table := self._tables.get(id(parameter))) is not None and any(table.gradient.used):
            text = (
                f"the gradient of {table.full_name} has rows only: read it with "
                "zeromesh.zero.safe_get_full_grad(parameter), and clip with zeromesh.clip_grad_norm_ or "
                "`gradient_clipping` in the configuration"
            )
            return self._unavailable(parameter, text, lambda: table.gradient.scale(0.0))
        if plain is not None or id(parameter) not in self._places:
            return plain
        self._settle()
        gradient, index = self._places[id(parameter)]
        if not self._reducer.begun or not self._exists(gradient, index):
            return None
        if (reason := self._missing(gradient)) is not None:
            text = f"the gradient of {self._names[id(parameter)]} {reason}"
            return self._unavailable(parameter, text, lambda: self._zero(gradient, index))
        self._reducer.average(self._factor)
        assert gradient.shard is not None
        # Through a view of it the gradient may change unseen.
        self._early.spoil()
        return gradient.shard[gradient.part(index)].view(parameter.shape)

    @staticmethod
    def _unavailable(parameter: torch.Tensor, reason: str, zero: Callable[[], None]) -> UnavailableGradient:
        gradient = UnavailableGradient.of(parameter, parameter.device, reason)
        gradient.zero = zero
        return gradient

    def write(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Let the update use this gradient, the same on all ranks, in place of what there is; None drops that.

        Raises:
            RuntimeError: the value is not like the parameter, or cannot replace the gradient now.
        """
        if (table := self._tables.get(id(parameter))) is not None:
            if value is None:
                table.gradient.reset()
            elif not isinstance(value, UnavailableGradient):
                raise RuntimeError(f"the gradient of {table.full_name} has rows only, and cannot be replaced")
            return
        if id(parameter) not in self._places or PLAIN_GRAD.__get__(parameter) is not None:
            PLAIN_GRAD.__set__(parameter, value)
            return
        self._settle()
        gradient, index = self._places[id(parameter)]
        if isinstance(value, UnavailableGradient):
            return  # it was read from here
        if value is None:
            self._drop(gradient, index)
            return
        name = self._names[id(parameter)]
        if value.shape != parameter.shape:
            raise RuntimeError(
                f"assigned grad has data of a different size: {tuple(value.shape)}, but {name} has "
                f"{tuple(parameter.shape)}"
            )
        if (reason := self._fixed(gradient)) is not None:
            raise RuntimeError(f"the gradient of {name} {reason}")
        self._early.spoil()
        self._reducer.put(gradient, index, value.detach(), self._factor)
        if not self._accumulation.begun:
            self._accumulation.note()

    def clip(self, parameters: Sequence[torch.Tensor], limit: float, order: float) -> float:
        """Scale gradients so that their norm is at most ``limit``; return the norm before. All ranks call it."""
        self._settle()
        self._early.spoil()
        complete_together(self._reducer, self._mesh)
        keys = [id(parameter) for parameter in parameters]
        # Tables come last: the order in which numbers are added is a part of the result.
        places: list[Place] = [self._places[key] for key in keys if key in self._places]
        places += [(self._tables[key].gradient, 0) for key in keys if key in self._tables]
        norm = norm_of(places, order, self._mesh) * self._factor
        if (coefficient := limit / (norm + 1e-6)) < 1.0 or norm != norm:  # torch's constant
            for gradient, index in places:
                gradient.scale(coefficient, index)
        return norm

    def _drop(self, gradient: Gradient, index: int) -> None:
        if self._reducer.begun and self._exists(gradient, index):
            self._early.spoil()
            self._reducer.drop(gradient, index)
            if not any(any(g.used) for g in self._reducer.gradients):
                self._accumulation.forget_losses()

    def _zero(self, gradient: Gradient, index: int) -> None:
        used = gradient.used[index]
        self._early.spoil()
        self._reducer.drop(gradient, index)
        gradient.used[index] = used  # a gradient of zero is not the same as none: momentum and weight decay go on

    @property
    def _factor(self) -> float:
        return self._reducer.factor / self._accumulation.scale

    def _exists(self, gradient: Gradient, index: int) -> bool:
        if gradient.used[index] or gradient.shard is None or self._accumulation.running:
            return gradient.used[index]
        return bool(gradient.shard[gradient.part(index)].any())  # another rank's

    def _missing(self, gradient: Gradient) -> str | None:
        """Return why the mean is not whole on this rank, as the end of a sentence; None if it is."""
        mesh, reducer = self._mesh, self._reducer
        remedy = (
            "read it on all ranks with zeromesh.zero.safe_get_full_grad(parameter), change it with safe_set_full_grad, "
            "clip with zeromesh.clip_grad_norm_ or `gradient_clipping` in the configuration, and update with "
            "engine.step()"
        )
        if self._accumulation.running:
            return "is not complete before the backward has ended"
        if self._spread:
            return f"is not whole on one rank before the update, where there are several along {self._spread}: {remedy}"
        if mesh.world_size > 1 and reducer.policy.owned:
            return f"is sharded over {mesh.shard.size} ranks: {remedy}"
        if mesh.world_size > 1 and reducer.waits:
            return f"is not summed over the ranks before the last micro-batch of the update: {remedy}"
        reducer.complete()  # without a message
        if gradient.shard is None or gradient.shard.device != mesh.device:
            return f"rests on the {gradient.tier.value}: {remedy}"
        if self._factor != 1.0 and gradient.shard.dtype is torch.float16:
            return f"is kept in float16, times the loss scale: {remedy}"
        return None

    def _fixed(self, gradient: Gradient) -> str | None:
        """Return why the gradient cannot be replaced on this rank alone, as the end of a sentence; None if it can."""
        remedy = "use zeromesh.zero.safe_set_full_grad(parameter, value) on all ranks after the last backward"
        if self._accumulation.running:
            return f"cannot be replaced before the backward has ended: {remedy}"
        if self._spread:
            return f"cannot be replaced in this way where there are several ranks along {self._spread}: {remedy}"
        if self._mesh.world_size > 1 and self._reducer.begun and self._reducer.waits:
            return f"cannot be replaced before it is summed over the ranks: {remedy}"
        return None


def _with_grad(plain_class: type[nn.Parameter], grads: ref[Grads]) -> type[nn.Parameter]:
    def read(self: nn.Parameter) -> torch.Tensor | None:
        alive = grads()
        described = sys._getframe(1).f_code is getattr(_DESCRIPTION, "__code__", None)
        value: torch.Tensor | None = PLAIN_GRAD.__get__(self) if alive is None or described else alive.read(self)
        return value

    def write(self: nn.Parameter, value: torch.Tensor | None) -> None:
        alive = grads()
        if alive is None:
            PLAIN_GRAD.__set__(self, value)
        else:
            alive.write(self, value)

    def read_data(self: nn.Parameter) -> torch.Tensor:
        if (alive := grads()) is not None:
            alive.expose(self)
        data: torch.Tensor = PLAIN_DATA.__get__(self)
        return data

    def register(self: nn.Parameter, hook: Any) -> Any:
        """Let the user's hook see the gradient before the engine takes it."""
        register_plainly: Any = torch.Tensor.register_post_accumulate_grad_hook
        handle = register_plainly(self, hook)
        hooks: Any = self._post_accumulate_grad_hooks
        for key in [key for key, registered in hooks.items() if isinstance(registered, GradientArrival)]:
            hooks[key] = hooks.pop(key)  # not move_to_end: autograd does not see the order of an OrderedDict
        return handle

    def copy(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        """Copies are parameters of no engine."""
        duplicate = plain_class.__deepcopy__(self, memo)
        if type(duplicate) is not plain_class:
            duplicate.__class__ = plain_class
        return duplicate

    members = {
        "grad": property(read, write, lambda self: write(self, None)),
        "data": property(read_data, PLAIN_DATA.__set__),
        "register_post_accumulate_grad_hook": register,
        "__deepcopy__": copy,
        "__module__": plain_class.__module__,
        OWN_CLASS: plain_class,
    }
    metaclass: Any = type(plain_class)
    subclass: type[nn.Parameter] = metaclass(plain_class.__name__, (plain_class,), members)
    return subclass


def own_class(cls: type) -> type:
    """Return the class that a parameter of class ``cls`` had before ``Grads.install``; of any other, ``cls``."""
    plain_class: type = cls.__dict__.get(OWN_CLASS, cls)
    return plain_class
