"""Results that a checkpointed block keeps, or moves to the host, so that its recomputation takes them as they were.

Sources: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from zeromesh.base.containers import tensors_of
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.parallel.activation.activation_store import Visit, checksum
from zeromesh.parallel.activation.choices import Eager, is_choice, named_arguments

_log = logging.getLogger("zeromesh")

PRODUCTS = {"mm", "addmm", "convolution", "_grouped_mm", "_scaled_mm"}
ATTENTION = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward")
"""Operators of torch's whose results are kept; the latter are beginnings of names.

Batched products are not among them: most are scores of attention, whose size is the square of the sequence's length.
"""


@cache
def keeps_result(operator: Any) -> bool:
    """Return whether the results of an operator of torch's are kept."""
    name = str(operator.name()).rpartition("::")[2].partition(".")[0]
    return name in PRODUCTS or name.startswith(ATTENTION)


GRANULARITIES = {"full": BlockPlan(), "selective": BlockPlan(keeps=keeps_result)}
"""Plans by ``activation_checkpointing.granularity``: the rest is computed again."""


class BlockResults:
    """Results of one call of a block that wait for its recomputation.

    Args:
        plan: of the block.
        block: the module.
        visit: of the store that moved results wait in; None: they are kept.
    """

    def __init__(self, plan: BlockPlan, block: nn.Module, visit: Visit | None = None) -> None:
        self.counts = False  # whether the block's own operators run, and not what is around them
        self._plan, self._name, self._visit, self._again = plan, type(block).__name__, visit, False
        self._noted: dict[tuple[str, int], _Noted] = {}
        self._numbers: Counter[str] = Counter()  # of calls, by operator
        self._trail = 0  # hash of all operators so far, in their order
        self._of_storage: dict[int, tuple[str, int]] = {}  # which operator made it, by address
        self._proofs = _proofs.setdefault(block, {})
        self._unproven: list[tuple[_Result, tuple[str, int], list[Tensor], list[Tensor]]] = []

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the contexts of a forward and of its recomputation, for ``torch.utils.checkpoint.checkpoint``."""
        return _Numbered(self, self._note), _Numbered(self, self._take)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the block's function: in the first context, and then in the other."""
        if self._again and self._visit is not None and self._plan.inputs is not Saved.MOVE:  # otherwise it has begun
            with self._visit.in_backward():
                pass
        self._numbers, self._trail, self.counts = Counter(), 0, True
        try:
            result = function(*args, **kwargs)
            self.counts = False
            self._forget(result)  # whoever gets it may change it
            self._prove()
            return result
        finally:
            self.counts = False
            self._of_storage, self._unproven = {}, []
            if self._again:  # what lies behind the last tensor that the backward needs
                self._noted = {key: noted for key, noted in self._noted.items() if noted.fate is Saved.MOVE}
            else:
                self._again = True
                self._tell_missing()

    def dispatch(self, how: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Number an operator, and return its result."""
        name = func._schema.name
        key, mark = (name, self._numbers[name]), self._trail
        self._numbers[name] += 1
        fate = self._plan.fate(func, key[1])
        # Products are the model's alone. Others may be the engine's, too, which need not run both times.
        if self._plan.keeps is None or fate is Saved.KEEP:
            shapes = [x.shape for x in args if isinstance(x, Tensor)]
            self._trail = hash((mark, name, torch.is_grad_enabled(), *shapes))
        if func._schema.is_mutable:
            self._forget(_written(func, args, kwargs))
        if fate is Saved.RECOMPUTE or func._schema.is_mutable or is_choice(func, args, kwargs):
            return func(*args, **kwargs)
        return how(key, self._trail, fate, partial(func, *args, **kwargs))

    def _forget(self, values: Any) -> None:
        """Let results be computed again that something may change: a copy may still be on its way to the host."""
        for tensor in filter(_is_plain, tensors_of(values)) if self._of_storage else ():
            self._noted.pop(self._of_storage.get(_address(tensor), ("", 0)), None)

    def _prove(self) -> None:
        """Find results that something has changed without torch, as kernels in other languages can."""
        for proof, key, tensors, sums in self._unproven:
            self._proofs[proof] = key not in self._noted or all(map(torch.equal, map(checksum, tensors), sums))
            if self._proofs[proof]:
                continue
            del self._noted[key]
            _tell(
                f"{self._name} changes the result of call {key[1]} of {key[0]} in place without torch's knowledge, "
                "which is therefore computed again"
            )

    def _note(self, key: tuple[str, int], mark: int, fate: Saved, call: partial[Any]) -> Any:
        generator = _generator(call)
        before = None if generator is None else generator.get_state()
        result = call()
        tensors = [x for x in tensors_of(result) if _is_plain(x)]
        proof = key, tuple(x.shape for x in tensors)
        if not self._proofs.get(proof, True):
            return result
        if proof not in self._proofs and len(self._proofs) < _MOST_PROOFS:
            aliases = [x.detach() for x in tensors]
            self._unproven.append((proof, key, aliases, [checksum(x) for x in aliases]))
        self._of_storage |= {_address(x): key for x in tensors}
        proceed = None
        if generator is not None and before is not None and not torch.equal(before, generator.get_state()):
            proceed = partial(generator.set_state, generator.get_state())  # attention without dropout draws nothing
        if self._visit is None or not all(map(self._visit.store.movable, tensors_of(result))):
            fate = Saved.KEEP
        values = tree_map(lambda x: self._wait(fate, x) if isinstance(x, Tensor) else x, result)
        averages = [x.clone() for x in _averages(call)]
        self._noted[key] = _Noted(fate, values, mark, proceed, averages)
        return result

    def _wait(self, fate: Saved, value: Tensor) -> Callable[[], Any]:
        if fate is Saved.MOVE and self._visit is not None:
            return partial(self._visit.put(value, apart=True).fetch)
        # Without its graph, and with the count of versions that it has.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return partial(_unchanged, value.detach(), value._version)

    def _take(self, key: tuple[str, int], mark: int, fate: Saved, call: partial[Any]) -> Any:
        noted = self._noted.get(key)
        if noted is None or noted.mark != mark:
            return call()
        if noted.fate is Saved.KEEP:
            del self._noted[key]  # who needs it from here on keeps it
        values = tree_map(lambda x: x() if isinstance(x, partial) else x, noted.values)
        if any(value is Saved.RECOMPUTE for value in tree_leaves(values)):
            return call()
        if noted.proceed is not None:
            noted.proceed()
        for now, then in zip(_averages(call), noted.averages, strict=True):
            now.data.copy_(then)  # as the operator does, without a new version
        return values

    def _tell_missing(self) -> None:
        missing = [name for name, number in self._plan.results if number >= self._numbers[name]]
        if missing:
            _tell(
                f"the plan of activation_checkpointing names operators that {self._name} does not call, as "
                f"{missing[0]}, and computes again what it would have kept; plan for inputs of the shapes that are "
                "trained on"
            )


@cache
def _tell(message: str) -> None:
    _log.warning(message)


_Result = tuple[tuple[str, int], tuple[torch.Size, ...]]  # of a block: operator, number of the call, and shapes
_MOST_PROOFS = 1000  # of a block, whose inputs may have many lengths

# By block: whether its code left a result alone when it was first computed.
_proofs: WeakKeyDictionary[nn.Module, dict[_Result, bool]] = WeakKeyDictionary()


class _Noted(NamedTuple):
    """Result of one operator."""

    fate: Saved
    values: Any  # with functions that return the tensors
    mark: int  # of the operators before
    proceed: Callable[[], Any] | None  # lets the generator that it drew from go on behind it
    averages: list[Tensor]  # that it has changed


def _unchanged(value: Tensor, version: int) -> Tensor | Saved:
    """Return a kept result, or that it is computed again, as an operator such as a ReLU has changed it in place."""
    return value if value._version == version else Saved.RECOMPUTE


def _is_plain(value: Tensor) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and value.device.type != "meta" and value.nbytes > 0


def _address(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _written(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator changes."""
    named = named_arguments(operator, args, kwargs)
    written = (x.name for x in operator._schema.arguments if x.alias_info is not None and x.alias_info.is_write)
    return [named.get(name) for name in written]


def _averages(call: partial[Any]) -> list[Tensor]:
    """Return the running averages that a batch norm in training changes, which its schema does not tell."""
    if not call.func._schema.name.endswith("batch_norm") or len(call.args) < 6 or call.args[5] is not True:  # type: ignore[attr-defined]
        return []
    return [x for x in call.args[3:5] if isinstance(x, Tensor)]


def _generator(call: partial[Any]) -> torch.Generator | None:
    """Return the default generator that an operator may draw random numbers from, if any."""
    if torch.Tag.nondeterministic_seeded not in call.func.tags:  # type: ignore[attr-defined]
        return None
    named = torch.device(call.keywords.get("device") or "cpu")
    device = next((x.device for x in tree_leaves((call.args, call.keywords)) if isinstance(x, Tensor)), named)
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(getattr(torch, device.type, None), "default_generators", None)
    return generators[device.index or 0] if generators else None


class _Numbered(Eager):
    """Context in which a block's operators are numbered."""

    supports_higher_order_operators = True

    def __init__(self, results: BlockResults, how: Callable[..., Any]) -> None:
        super().__init__()
        self._results, self._how = results, how

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # Views have no memory of their own; operators of higher order have no schema.
        if not self._results.counts or not isinstance(func, torch._ops.OpOverload) or func.is_view:
            return func(*args, **(kwargs or {}))
        return self._results.dispatch(self._how, func, args, kwargs or {})


def compiled_contexts(plan: BlockPlan) -> Callable[[], tuple[Any, Any]]:
    """Return the function that gives the contexts in which torch's compiler traces a block; moved results are kept."""

    def contexts() -> tuple[Any, Any]:
        numbers: Counter[tuple[bool, str]] = Counter()

        def is_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
            if not isinstance(operator, torch._ops.OpOverload) or operator.is_view:
                return False
            key = context.is_recompute, operator._schema.name
            numbers[key] += 1
            return plan.fate(operator, numbers[key] - 1) is not Saved.RECOMPUTE

        pair: tuple[Any, Any] = create_selective_checkpoint_contexts(is_kept)
        return pair

    return contexts
