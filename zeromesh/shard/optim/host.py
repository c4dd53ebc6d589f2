"""Updates of states on the host by the native kernel, where it computes the same as the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zeromesh.base.kernels.update_pass import StatesApart, StepInput, UpdatePiece, UpdateStep, update, update_on_device
from zeromesh.base.kernels.update_rules import RULES, rule_of, state_dtype
from zeromesh.base.placement import Tier
from zeromesh.shard.store.memory import is_unloaded, unloaded, zeros_on


def states_of(
    optimizer: Optimizer,
    place: str = "the optimizer's state is to rest on NVMe",
    remedy: str = "offload_optimizer.device = cpu",
) -> Callable[[Parameter], Sequence[str]]:
    """Return a function from a parameter to the names of its states that the kernel updates, in order.

    It raises ValueError where the kernel does not know the optimizer or its options: the message says what the kernel
    is needed for (``place``), and what to do without it (``remedy``).
    """
    for number, group in enumerate(optimizer.param_groups):
        if group["params"] and rule_of(optimizer, group) is None:
            raise ValueError(
                f"{place}, but {type(optimizer).__name__}, with the options of group {number}, is not one that is "
                f"updated so: {', '.join(RULES)}, without amsgrad, capturable and differentiable; use one of these, or "
                f"{remedy}"
            )
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    def names(parameter: Parameter) -> Sequence[str]:
        group = groups.get(id(parameter))
        rule = None if group is None else rule_of(optimizer, group)
        return () if group is None or rule is None else RULES[rule].states(group)

    return names


def state_names(optimizer: Optimizer | None) -> tuple[str, ...]:
    """Return the names of all states of a parameter's shape that the kernel updates, in order; as ``states_of``."""
    if optimizer is None:
        return ()
    names = states_of(optimizer)
    # One rule has more states or fewer, as SGD without momentum, and always in one order.
    members = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return max((tuple(names(parameter)) for parameter in members), key=len, default=())


class HostSteps:
    """Updates of an optimizer's parameters as its own ``step`` would do them, which can continue with the states.

    States named in ``narrow`` are bf16 where their master is fp32, as ``state_dtype`` says.
    """

    def __init__(self, optimizer: Optimizer, factor: float, narrow: Collection[str] = ()) -> None:
        self.factor, self.narrow = factor, frozenset(narrow)
        self._optimizer = optimizer
        self.take_options()
        # Numbers of the steps of parameters that come in parts, and whether they had no states before.
        self._begun: dict[int, tuple[int, bool]] = {}

    def take_options(self) -> None:
        """Take the groups' options as they are now: the update may be done while a schedule has gone on."""
        # Of each parameter that the kernel updates, its group and the name of the rule.
        self._updated: dict[int, tuple[dict[str, Any], str]] = {}
        for group in self._optimizer.param_groups:
            taken = options_now(group, group)
            if (rule := rule_of(self._optimizer, taken)) is not None:
                self._updated |= {id(parameter): (taken, rule) for parameter in group["params"]}

    def takes(self, parameter: Parameter, gradient: torch.Tensor) -> bool:
        """Return whether the kernel does for this parameter what the optimizer would."""
        kinds = (torch.float32, torch.float64) if parameter.device.type == "cpu" else (torch.float32,)
        return parameter.dtype in kinds and id(parameter) in self._updated

    def step(self, inputs: Sequence[StepInput]) -> None:
        """Take one step of parameters that ``takes`` is true for; all tensors of one have as many elements.

        A parameter whose states are apart may come in parts, in several calls.
        """
        steps: dict[tuple[int, int], UpdateStep] = {}
        pieces = []
        for parameter, gradient, output, apart in inputs:
            group, rule = self._updated[id(parameter)]
            master, remainder = parameter.detach().view(-1), None
            if apart is None:
                states, number = self._states(parameter)
            else:
                states, number = self._apart(parameter, apart)
                master, remainder = apart.master, apart.remainder
            step = steps.setdefault((id(group), number), UpdateStep(rule, group, number))
            pieces.append(UpdatePiece(step, gradient, master, states, output, remainder=remainder))
        update([piece for piece in pieces if piece.master.device.type == "cpu"], self.factor)
        if on_device := [piece for piece in pieces if piece.master.device.type != "cpu"]:
            update_on_device(on_device, self.factor)

    def coming(self, parameter: Parameter) -> tuple[UpdateStep, tuple[torch.Tensor, ...]] | None:
        """Return the next step of a parameter, and its states; None if it has none yet."""
        if id(parameter) not in self._updated:
            return None
        group, name = self._updated[id(parameter)]
        rule, state = RULES[name], self._optimizer.state.get(parameter, {})
        states = tuple(state.get(key) for key in rule.states(group))
        begun = not rule.counted or "step" in state
        if not (begun and all(isinstance(value, torch.Tensor) for value in states)):
            return None
        if any(
            value.dtype != self._dtype(key, parameter) for key, value in zip(rule.states(group), states, strict=True)
        ):
            return None  # somebody has set it: the step itself makes it narrow
        # The numbers as they are now: whether they still hold is compared when the update is asked for.
        numbers = {key: group[key] for key in rule.options if key in group}
        # SGD only tells the first step from the others, by its momentum.
        return UpdateStep(name, numbers, int(state["step"]) + 1 if rule.counted else 2), states

    def adopt(self, parameter: Parameter, states: Sequence[torch.Tensor]) -> None:
        """Count a step that was taken elsewhere; the states are now these, or as they were where none are given."""
        group, name = self._updated[id(parameter)]
        rule, state = RULES[name], self._optimizer.state[parameter]
        if states:
            state |= dict(zip(rule.states(group), states, strict=True))
        if rule.counted:
            state["step"] = state["step"] + 1

    def _names(self, parameter: Parameter) -> tuple[str, ...]:
        group, rule = self._updated[id(parameter)]
        return RULES[rule].states(group)

    def _states(self, parameter: Parameter) -> tuple[tuple[torch.Tensor, ...], int]:
        """Return the parameter's states, made if it has none yet, and which step this is."""
        number, _ = self._begin(parameter, apart=0)
        state = self._optimizer.state[parameter]
        return tuple(state[name].view(-1) for name in self._names(parameter)), number

    def _apart(self, parameter: Parameter, apart: StatesApart) -> tuple[tuple[torch.Tensor, ...], int]:
        """Return the states of a part, with zeros in those that did not exist yet, and which step this is."""
        if id(parameter) not in self._begun:
            self._begun[id(parameter)] = self._begin(parameter, len(apart.states))
        number, first = self._begun[id(parameter)]
        names = self._names(parameter)
        states = apart.states[: len(names)]
        for state in states if first else ():
            state.zero_()
        # A momentum that was zero at the start has no place apart.
        more, part = names[len(states) :], slice(apart.begin, apart.begin + apart.master.numel())
        state_by_name = self._optimizer.state[parameter]
        return (*states, *(state_by_name[name].view(-1)[part] for name in more)), number

    def _begin(self, parameter: Parameter, apart: int) -> tuple[int, bool]:
        """Count a step of a parameter, make the states that it lacks; return the step, and whether it lacked them.

        The first ``apart`` states rest elsewhere.
        """
        state, names = self._optimizer.state[parameter], self._names(parameter)
        first = any(state.get(name) is None for name in names)
        for index, name in enumerate(names):
            dtype = self._dtype(name, parameter)
            if not first:
                # A user or a checkpoint has given it, or the optimizer has made it when it was built.
                state[name] = state[name] if is_unloaded(state[name]) else state[name].to(dtype)
            elif index < apart:
                state[name] = unloaded(torch.empty_like(parameter, dtype=dtype, device="meta"))
            else:
                zeros = zeros_on(Tier.DEVICE, parameter.numel(), dtype, parameter.device)
                state[name] = zeros.view_as(parameter)
        if not RULES[self._updated[id(parameter)][1]].counted:
            return 1 if first else 2, first
        # On the host: who reads the number of a step from the device waits for it.
        number = state.get("step", torch.tensor(0.0))
        state["step"] = (number.cpu() if isinstance(number, torch.Tensor) else number) + 1
        return int(state["step"]), first

    def _dtype(self, name: str, parameter: Parameter) -> torch.dtype:
        return state_dtype(name in self.narrow, parameter.dtype)


def options_now(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return options of a group as they are now, in numbers: schedules may change them in place before a step."""
    options = {name: group[name] for name in names if name in group and name != "params"}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return tree_map_only(torch.Tensor, float, options)  # type: ignore[no-any-return]
