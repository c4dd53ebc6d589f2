"""Values set between the backward and the step count in the step, wherever states rest, as in plain torch."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks
from run import adamw, configuration
from zeromesh import zero
from zeromesh.deepspeed import local_states
from zeromesh.shard.store.early import EarlyUpdates

HOST = {"device": "cpu", "update_during_backward": 1.0}
PLACES: dict[str, dict[str, Any]] = {
    "device": {"stage": 1},
    "device, sharded": {"stage": 3},
    "host": {"stage": 2, "offload_optimizer": {**HOST, "update_during_backward": 0.0}},
    "host, early": {"stage": 2, "offload_optimizer": HOST},
    "host, early, sharded": {"stage": 3, "offload_optimizer": HOST},
    "all on host, early": {"stage": 3, "offload_optimizer": HOST, "offload_param": {"device": "cpu"}},
    "nvme, early": {"stage": 3, "offload_optimizer": {"device": "nvme", "update_during_backward": 1.0}},
}
LIMIT = 1e-6
"""Relative, fp32: the host's kernel rounds in another order than torch."""


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Plain:
    """A program in plain torch."""

    def __init__(self) -> None:
        self.model = make()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)

    @property
    def parameter(self) -> nn.Parameter:
        return self.model[2].weight

    @property
    def pieces(self) -> Iterator[nn.Parameter]:
        yield self.model[2].weight

    @property
    def states(self) -> Iterator[torch.Tensor]:
        yield from (self.optimizer.state[piece]["exp_avg"] for piece in self.pieces)

    def backward(self, number: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        self.model(x).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_parameter(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.parameter.data.copy_(change(self.parameter.data))

    def set_state(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for state in self.states:
            state.copy_(change(state))

    def set_gradient(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        assert self.parameter.grad is not None
        self.parameter.grad.copy_(change(self.parameter.grad))

    set_local_parameter, set_local_state, set_local_gradient, set_gathered = (
        set_parameter, set_state, set_gradient, set_parameter,
    )  # fmt: skip
    update_gradient = set_gradient

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


class Mesh(Plain):
    """The same program with an engine."""

    def __init__(self, place: dict[str, Any], folder: Path) -> None:
        place = copy.deepcopy(place)
        self.nvme = False
        for section in ("offload_optimizer", "offload_param"):
            if place.get(section, {}).get("device") == "nvme":
                place[section]["nvme_path"], self.nvme = str(folder), True
        self.model = make()
        config = configuration(micro=4, optimizer=adamw(0.01, weight_decay=0.1), zero=place)
        self.engine, self.optimizer, _, _ = zeromesh.initialize(model=self.model, config=config)

    @property
    def pieces(self) -> Iterator[nn.Parameter]:
        _, flat, index = zero.place_of(self.parameter)
        yield from (piece.parameter for number, _, piece in flat.pieces if number == index)

    def backward(self, number: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        self.engine.backward(self.engine(x).square().mean())
        # What is set comes after the early updates, which are to be undone.
        for task in self.engine.sharded.early._tasks.values():
            assert self.nvme or task.done.wait(60)

    def step(self) -> None:
        self.engine.step()

    def set_parameter(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        zero.safe_set_full_fp32_param(self.parameter, change(zero.safe_get_full_fp32_param(self.parameter)))

    def set_state(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        state = zero.safe_get_full_optimizer_state(self.parameter, "exp_avg")
        zero.safe_set_full_optimizer_state(self.parameter, change(state), "exp_avg")

    def set_gradient(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        zero.safe_set_full_grad(self.parameter, change(zero.safe_get_full_grad(self.parameter)))

    def set_local_parameter(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        value = local_states.safe_get_local_fp32_param(self.parameter)
        local_states.safe_set_local_fp32_param(self.parameter, change(value))

    def set_local_state(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        value = local_states.safe_get_local_optimizer_state(self.parameter, "exp_avg")
        local_states.safe_set_local_optimizer_state(self.parameter, change(value), "exp_avg")

    def set_local_gradient(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        local_states.safe_set_local_grad(self.parameter, change(local_states.safe_get_local_grad(self.parameter)))

    def update_gradient(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        zero.safe_update_full_grad_vectorized([self.parameter], lambda gradient, parameter: change(gradient))

    def set_gathered(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with zero.GatheredParameters([self.parameter], modifier_rank=0):
            self.parameter.data.copy_(change(self.parameter.data))

    def parameters(self) -> list[torch.Tensor]:
        with zero.GatheredParameters(list(self.model.parameters())):
            return super().parameters()


def half(value: torch.Tensor) -> torch.Tensor:
    return value * 0.5


def each(change: Callable[[torch.Tensor], object], of: str = "states") -> Callable[[Plain], None]:
    def apply(program: Plain) -> None:
        for tensor in getattr(program, of):
            change(tensor)

    return apply


def replace_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data * 0.5


def halve_in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


def halve_by_numpy(tensor: torch.Tensor) -> None:
    array = tensor.detach().numpy()
    array *= 0.5


def assign(program: Plain) -> None:
    for piece in program.pieces:
        program.optimizer.state[piece]["exp_avg"] = program.optimizer.state[piece]["exp_avg"] * 0.5


def load(program: Plain) -> None:
    values = copy.deepcopy(program.optimizer.state_dict())
    for state in values["state"].values():
        state["exp_avg"] *= 0.5
    program.optimizer.load_state_dict(values)


def set_option(name: str, value: Any) -> Callable[[Plain], None]:
    return lambda program: [group.update({name: value}) for group in program.optimizer.param_groups] and None


SETTERS: dict[str, Callable[[Plain], object]] = {
    "the master": lambda program: program.set_parameter(half),
    "a state": lambda program: program.set_state(half),
    "a gradient": lambda program: program.set_gradient(half),
    "a gradient, by a function": lambda program: program.update_gradient(half),
    "own elements of the master": lambda program: program.set_local_parameter(half),
    "own elements of a state": lambda program: program.set_local_state(half),
    "own elements of a gradient": lambda program: program.set_local_gradient(half),
    "a gathered parameter": lambda program: program.set_gathered(half),
    "a learning rate": set_option("lr", 0.05),
    "weight decay": set_option("weight_decay", 0.5),
    "the number of steps": lambda program: [program.optimizer.state[piece]["step"].add_(5) for piece in program.pieces],
}
# Writes to the optimizer's own tensors; in files there are none.
WRITES: dict[str, Callable[[Plain], object]] = {
    "the optimizer's state_dict": load,
    "a new state": assign,
    "data": each(lambda state: state.data.mul_(0.5)),
    "in place": each(lambda state: state.mul_(0.5)),
    "detached": each(lambda state: state.detach().mul_(0.5)),
    "a view": each(lambda state: state.view(-1).mul_(0.5)),
    "data of a view": each(lambda state: state.view(-1).data.mul_(0.5)),
    "copy_": each(lambda state: state.data.copy_(state * 0.5)),
    "foreach": lambda program: torch._foreach_mul_(list(program.states), 0.5),
    "numpy": each(halve_by_numpy),
    "dlpack": each(lambda state: torch.from_dlpack(state.detach()).data.mul_(0.5)),
    "new data": each(replace_data),
    "the piece's data": each(lambda piece: piece.data.mul_(0.5), "pieces"),
    "the piece in place": each(halve_in_place, "pieces"),
    "the piece by numpy": each(halve_by_numpy, "pieces"),
    "the piece's new data": each(replace_data, "pieces"),
}


def result(program: Plain, setter: Callable[[Plain], object], hold: Callable[[torch.Tensor], Any] | None) -> Any:
    aliases: list[Any] = []
    for number in range(4):
        program.backward(number)
        if number == 2:
            setter(program)
        for alias in aliases:
            alias *= 0.5
        program.step()
        if number == 0 and hold is not None:
            aliases = [hold(state) for state in program.states]
    return program.parameters()


def check(place: str, folder: Path, name: str, setter: Callable[[Plain], object], hold: Any = None) -> None:
    program = Mesh(PLACES[place], folder)
    found, expected = result(program, setter, hold), result(Plain(), setter, hold)
    program.engine.destroy()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=LIMIT, atol=LIMIT, msg=lambda text: f"{place}, {name}: {text}")


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda state: state.data,
    "numpy": lambda state: state.numpy(),
    "the state": lambda state: state,
    "a view": lambda state: state.view(-1),
}


def try_setters(place: str, folder: Path) -> None:
    in_memory = "nvme" not in place
    for name, setter in (SETTERS | WRITES if in_memory else SETTERS).items():
        check(place, folder, name, setter)
    for name, hold in HOLDS.items() if in_memory else ():
        check(place, folder, f"held before: {name}", lambda program: None, hold)


@on_ranks(1)
def test_what_is_set_between_backward_and_step_undoes_early_updates(tmp_path: Path) -> None:
    with patch.object(EarlyUpdates, "adopt", autospec=True, side_effect=EarlyUpdates.adopt) as adopt:
        check("host, early", tmp_path, "nothing", lambda program: None)
    assert adopt.call_count == 3 * 3  # of three layers, but in the first update, which makes the states
    try_setters("host, early", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("place", [*PLACES])
@on_ranks(2)
def test_what_is_set_between_backward_and_step_counts_wherever_states_rest(place: str, tmp_path: Path) -> None:
    try_setters(place, tmp_path)


def write_element(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1)[0] = 1.0


REFUSALS: dict[str, Callable[[torch.Tensor], object]] = {
    "numpy": halve_by_numpy,
    "single memory location": halve_in_place,
    "what was written is lost": write_element,
}


@pytest.mark.parametrize("of", ["states", "pieces"])
@on_ranks(1)
def test_writes_in_place_to_what_rests_on_disk_are_refused(of: str, tmp_path: Path) -> None:
    for error, write in REFUSALS.items():
        program = Mesh(PLACES["nvme, early"], tmp_path)

        def write_and_step(program: Mesh = program, write: Callable[[torch.Tensor], object] = write) -> None:
            for tensor in getattr(program, of):
                write(tensor)
            program.backward(2)
            program.step()

        for number in range(2):
            program.backward(number)
            program.step()
        with pytest.raises(RuntimeError, match=error):
            write_and_step()
        program.engine.destroy()
