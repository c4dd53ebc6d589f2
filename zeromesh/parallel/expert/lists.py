"""Experts that are a list of modules, which a loop of the model calls.

Nobody needs to know the loop: the forward of the block around the experts runs twice. In the rehearsal each expert
notes its input and returns a placeholder. Then all inputs travel in one exchange, and their owners compute them. In the
replay each expert checks that its input has the bits that it had, and returns its result. So any order, skips of
experts without tokens, capacities and drops are the model's own. Inputs get their gradients through the rehearsal's
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.base.in_place import version
from zeromesh.base.randomness import drawing_from, random_state, set_random_state
from zeromesh.base.substitution import has_hooks
from zeromesh.parallel.expert.rehearsal import rehearsal
from zeromesh.parallel.expert.stacked import (
    DTYPES,
    CallChain,
    Entry,
    ExpertSharing,
    by_expert,
    by_sender,
    compute_at_owners,
    odd_output,
)
from zeromesh.parallel.follow.activation_parts import replace_forward

PLACEHOLDER = 0.8125  # not zero: experts whose last weights are zeros would hide that another's input depends on them
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a dtype, to compare bits
_UNEQUAL = (
    "they get other inputs when it runs again, so these depend on what other experts return, or on what the forward "
    "changes or draws outside of torch; let it compute the inputs of all experts from its own"
)


class CallPhase(Enum):
    """Action of a call of an expert."""

    IDLE = "refuse"
    REHEARSAL = "note the input"
    REPLAY = "return the result"


class _Run:
    """Calls of experts in one forward of the block."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Tensor]] = []  # expert, input
        self.results: list[Tensor] = []  # of the calls
        self._replayed = 0
        self._differs: list[Tensor] = []  # whether an input is another one in the replay

    def replay(self, expert: int, x: Tensor) -> Tensor | None:
        """Return the result of the next call; None if it is not what the rehearsal called next."""
        place = self._replayed
        self._replayed += 1
        if place >= len(self.calls) or self.calls[place][0] != expert or self.calls[place][1].shape != x.shape:
            return None
        self._differs.append((_bits(self.calls[place][1]) != _bits(x)).any())
        return self.results[place]

    def is_equal(self) -> bool:
        """Return whether the replay called what the rehearsal called, with the same bits."""
        return self._replayed == len(self.calls) and not (self._differs and bool(torch.stack(self._differs).any()))


class ListedExperts:
    """The experts of a block, which its forward calls.

    Args:
        block: the module whose forward calls them.
        experts: all of them, in order; this rank has the parameters of some.
        sharing: which these are, and the ranks that have the others.
        mixes: whether an expert mixes the rows of a call.
    """

    def __init__(self, block: nn.Module, experts: Sequence[nn.Module], sharing: ExpertSharing, mixes: bool) -> None:
        self._block, self._sharing, self._phase, self._run = block, sharing, CallPhase.IDLE, _Run()
        self._mixes = mixes
        if mixes and sharing.lines is not None:
            raise self._refusal("an expert mixes the rows of its input, of which tensor-parallel ranks take parts")
        others = {id(module) for expert in experts for module in expert.modules()}
        # Those that are called in the rehearsal: what is inside of experts, of one, which tells what outputs are like.
        self._running = [module for module in block.modules() if id(module) not in others]
        self._running += dict.fromkeys([*experts, *experts[sharing.local[0]].modules()])
        self._forwards = [expert.forward for expert in experts]
        self._inner = [[*expert.modules()][1:] for expert in experts]
        self._forms: dict[Any, tuple[int, torch.dtype]] = {}  # width and dtype of outputs, by what they depend on
        for index, expert in enumerate(experts):
            replace_forward(expert, partial(self._called, index))
            for inner in [] if index in sharing.local else expert.modules():
                if inner is not expert and any(True for _ in inner.parameters(recurse=False)):
                    replace_forward(inner, partial(self._inside, index))
        # Partial functions, which a copy of the model copies with all that they have.
        replace_forward(block, partial(torch.compiler.disable(ListedExperts._compute), self, block.forward))

    def _compute(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Forward of the block."""
        assert self._phase is CallPhase.IDLE, f"{self._sharing.name}: the forward of the block calls itself"
        chain, self._run = CallChain(self._block, args, kwargs), _Run()
        device = next(self._block.parameters()).device
        try:
            # Experts draw the random numbers behind the block's, which the replay draws again.
            behind = self._rehearse(forward, device, args, kwargs)
            with drawing_from(behind, device):
                self._exchange(chain)
                behind = random_state(device)
            self._phase = CallPhase.REPLAY
            output = forward(*args, **kwargs)
            set_random_state(behind, device)
            if not self._run.is_equal():
                raise self._refusal(_UNEQUAL)
        finally:
            self._phase, self._run = CallPhase.IDLE, _Run()
        return map_tensors(output, lambda x: chain(x, copy=True) if x.is_floating_point() else x)

    def _rehearse(
        self, forward: Callable[..., Any], device: torch.device, args: Any, kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Note the inputs of the experts; return the state of random numbers after it, which is taken back."""
        arguments = tensors_of((args, kwargs))
        versions = [version(x) for x in arguments]
        self._phase = CallPhase.REHEARSAL
        with rehearsal(self._running, (args, kwargs), device):
            forward(*args, **kwargs)
            behind = random_state(device)
        if [version(x) for x in arguments] != versions:
            raise self._refusal("it writes to its inputs; let it write to copies")
        return behind

    def _called(self, expert: int, /, *args: Any, **kwargs: Any) -> Any:
        """Forward of an expert."""
        if self._phase is CallPhase.IDLE:
            raise self._refusal(
                f"expert {expert} was called outside of it, or by the recomputation of a checkpoint inside of it; call "
                "the block, or let the checkpoint call it"
            )
        values = (*args, *kwargs.values())
        x = values[0] if len(values) == 1 else None
        if isinstance(x, Tensor) and x.ndim == 1 and not self._mixes:
            return self._called(expert, x[None])[0]
        if not isinstance(x, Tensor) or x.ndim < 2 or x.dtype not in DTYPES:
            shown = ", ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in values)
            raise self._refusal(
                f"expert {expert} was called with ({shown}); call it with one floating-point tensor (rows, width), and "
                "apply what else there is to its input or output"
            )
        if self._phase is CallPhase.REHEARSAL:
            self._run.calls.append((expert, x))
            width, dtype = self._form(x)
            return x.new_full((*x.shape[:-1], width), PLACEHOLDER, dtype=dtype)
        result = self._run.replay(expert, x)
        if result is None:
            raise self._refusal(_UNEQUAL)
        return result

    def _inside(self, expert: int, /, *args: Any, **kwargs: Any) -> Any:
        """Forward of a module inside of an expert that another rank has."""
        raise self._refusal(f"a module inside of expert {expert} was called by itself; let the expert call it")

    def _form(self, x: Tensor) -> tuple[int, torch.dtype]:
        """Return the width and the dtype of an expert's output: one that is here computes one row."""
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = (*x.shape[1:], x.dtype, autocast, self._block.training)
        if key not in self._forms:
            row = x.detach()[:1] if len(x) else x.new_zeros(1, *x.shape[1:])
            with torch.no_grad(), drawing_from(random_state(x.device), x.device):
                y = self._forwards[self._sharing.local[0]](row)
            if not isinstance(y, Tensor) or y.shape[:-1] != row.shape[:-1] or y.dtype not in DTYPES:
                raise odd_output(f"an expert of {self._sharing.name}", y, "one row for each row")
            self._forms[key] = y.shape[-1], y.dtype
        return self._forms[key]

    def _exchange(self, chain: CallChain) -> None:
        """Have the inputs of all calls computed, and note their results."""
        run, sharing = self._run, self._sharing
        order = sorted(range(len(run.calls)), key=lambda place: run.calls[place][0])
        inputs = [run.calls[place][1] for place in order]
        # Rows, calls, and the outer dims of a call that has more than two.
        table: list[Entry] = [[0] * 4 for _ in range(sharing.count)]
        for expert, x in run.calls:
            entry, shape = table[expert], x.shape
            together = len(shape) > 2 or self._mixes  # rows that may belong together
            if together and (entry[1] or len(shape) > 4 or sharing.lines is not None):
                raise self._refusal(
                    f"expert {expert} was called with shape {tuple(shape)}; with more than two dims, or if it mixes "
                    "rows, it may be called once in a forward, have four, and not be tensor-parallel: call it with "
                    "(rows, width), of which each gives a result by itself"
                )
            table[expert] = [entry[0] + shape[:-1].numel(), entry[1] + 1, *[*shape[:-2], 0, 0][:2]]
        rows = torch.cat([x.flatten(0, -2) for x in inputs]) if inputs else self._nothing()
        results = compute_at_owners(rows, table, sharing, chain, self._compute_here)
        parts = _Parts.apply(results, [x.shape[:-1].numel() for x in inputs])  # type: ignore[no-untyped-call]
        shaped = (part.view(*x.shape[:-1], part.shape[-1]) for x, part in zip(inputs, parts, strict=True))
        run.results.extend(y for _, y in sorted(zip(order, shaped, strict=True), key=itemgetter(0)))

    def _compute_here(self, arrived: Tensor, senders: list[list[Entry]]) -> Tensor:
        """Return the results of the rows that have arrived. An expert that no rank has called is not called."""
        results: list[list[Tensor]] = []
        by_local = zip(by_expert(arrived, senders), zip(*senders, strict=True), strict=True)
        for expert, (pieces, told) in zip(self._sharing.local, by_local, strict=True):
            # Hooks may mix rows, and rows of more dims may belong together: each call by itself.
            if self._mixes or any(outer for _, _, outer, _ in told) or any(map(has_hooks, self._inner[expert])):
                results.append([self._outer(expert, *call) for call in zip(pieces, told, strict=True)])
            elif any(calls for _, calls, *_ in told):
                results.append(list(self._one(expert, torch.cat(pieces)).split([*map(len, pieces)])))
        if results:
            return by_sender(results)
        # What others return to this rank is like what its calls expect.
        calls = self._run.calls
        return self._nothing(*self._form(calls[0][1])) if calls else self._nothing()

    def _outer(self, expert: int, rows: Tensor, entry: Entry) -> Tensor:
        """Return the results of a call with more than two dims, as rows."""
        outer = [dim for dim in entry[2:] if dim]
        x = rows.view(*outer, len(rows) // max(1, prod(outer)), rows.shape[-1])
        return self._one(expert, x.clone()).flatten(0, -2) if entry[1] else rows.new_empty(0, dtype=self._form(x)[1])

    def _nothing(self, width: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(0, width, dtype=dtype, device=next(self._block.parameters()).device)

    def _one(self, expert: int, x: Tensor) -> Tensor:
        (width, dtype), y = self._form(x), self._forwards[expert](x)
        if not isinstance(y, Tensor) or y.shape != (*x.shape[:-1], width) or y.dtype != dtype:
            wanted = f"as others do, of shape {(*x.shape[:-1], width)} and {dtype}"
            raise odd_output(f"expert {expert} of {self._sharing.name}", y, wanted)
        return y

    def _refusal(self, reason: str) -> RuntimeError:
        block, ranks = type(self._block).__name__, self._sharing.exchange.group.size
        return RuntimeError(
            f"{ranks} ranks cannot share the experts {self._sharing.name}, which the forward of {block} calls: "
            f"{reason}; or set mesh.expert to 1"
        )


class _Parts(torch.autograd.Function):
    """Cut the results of all calls apart; each may be written to, as what an expert returns may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(part.data for part in x.split(sizes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat(gradients), None


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(_INTEGERS[x.itemsize])


def share_listed(block: nn.Module, experts: nn.Module, sharing: ExpertSharing, mixes: bool = False) -> None:
    """Let a block have the experts that it calls, those of a list, computed by the ranks that have them."""
    members = [child for child in experts.children() if any(True for _ in child.parameters())]
    ListedExperts(block, members, sharing, mixes)
