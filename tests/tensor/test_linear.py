"""Layers split by columns and rows: numbers, and what travels when."""

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness import on_ranks, run_ranks
from zeromesh import Mesh
from zeromesh.base import linear_arithmetic as linear
from zeromesh.base.linear_arithmetic import Columns, multiply
from zeromesh.comm.collectives import Group
from zeromesh.parallel.tensor.split_linear import enter, leave

SEQUENCE, WIDTH, INNER = 4, 6, 8


def weights(transposed: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    found = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    found |= {f"{name} bias": torch.randn(shape[0], dtype=torch.float64) for name, shape in shapes.items()}
    if transposed:
        found |= {name: found[name].t().contiguous() for name in shapes}
    return {name: value.requires_grad_() for name, value in found.items()}


def inputs() -> torch.Tensor:
    torch.manual_seed(6)
    return torch.randn(2, SEQUENCE, WIDTH, dtype=torch.float64, requires_grad=True)


def plain(x: torch.Tensor, w: dict[str, torch.Tensor], transposed: bool) -> torch.Tensor:
    gate, up, down = (Columns(w[name], w[f"{name} bias"], transposed) for name in ("gate", "up", "down"))
    return multiply(F.silu(multiply(x, gate)) * multiply(x, up), down)


def own(whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return whole.detach().chunk(group.size, dim)[group.rank].clone().requires_grad_()


class Split:  # the same MLP, of which each rank has a part
    def __init__(self, transposed: bool, dim: int | None) -> None:
        self.mesh = Mesh({"tensor": dist.get_world_size()}, torch.device("cpu"))
        self.group, self.dim, self.transposed = self.mesh.group("tensor"), dim, transposed
        whole, out = weights(transposed), 1 if transposed else 0
        dims = {"gate": out, "up": out, "down": 1 - out, "gate bias": 0, "up bias": 0}
        self.weights = {name: own(whole[name], at, self.group) for name, at in dims.items()}
        self.weights["down bias"] = whole["down bias"].detach().requires_grad_()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weights
        columns = [Columns(w[name], w[f"{name} bias"], self.transposed) for name in ("gate", "up")]
        whole, layers = enter(x, columns, self.group, 40, self.dim)
        gate, up = [layer(whole) for layer in layers] or [multiply(whole, one) for one in columns]
        partial = multiply(F.silu(gate) * up, Columns(w["down"], None, self.transposed))
        return leave(partial, w["down bias"], self.group, 42, self.dim)


def train(transposed: bool, dim: int | None, twice: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mlp = Split(transposed, dim)
    x = inputs() if dim is None else own(inputs(), dim, mlp.group)
    y = mlp(x)
    names = ["x", *mlp.weights]
    operands = [x, *mlp.weights.values()]
    gradients = torch.autograd.grad(y.square().sum(), operands, create_graph=twice)
    if twice:
        penalty = gradients[0].square().sum()
        gradients = torch.autograd.grad(penalty, operands, allow_unused=True, materialize_grads=True)
    return y.detach(), dict(zip(names, gradients, strict=True))


@pytest.mark.some(6)
@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("ranks", "twice"), [(1, False), (2, False), (2, True), (4, False)])
def test_split_layers_compute_what_whole_ones_do(ranks: int, transposed: bool, dim: int | None, twice: bool) -> None:
    w, x = weights(transposed), inputs()
    y = plain(x, w, transposed)
    expected = torch.autograd.grad(y.square().sum(), [x, *w.values()], create_graph=twice)
    if twice:
        penalty = expected[0].square().sum()
        expected = torch.autograd.grad(penalty, [x, *w.values()], allow_unused=True, materialize_grads=True)
    want = dict(zip(["x", *w], expected, strict=True))
    outs, found = zip(*run_ranks(train, ranks, transposed, dim, twice), strict=True)
    got = torch.cat(outs, dim) if dim is not None else outs[0]
    torch.testing.assert_close(got, y.detach())
    out = 1 if transposed else 0
    for name, at in {"gate": out, "up": out, "down": 1 - out, "gate bias": 0, "up bias": 0}.items():
        torch.testing.assert_close(torch.cat([of[name] for of in found], at), want[name])
    if dim is None:
        for of in found:
            torch.testing.assert_close(of["x"], want["x"])
            torch.testing.assert_close(of["down bias"], want["down bias"])
    else:
        torch.testing.assert_close(torch.cat([of["x"] for of in found], dim), want["x"])
        torch.testing.assert_close(sum(of["down bias"] for of in found), want["down bias"])


@on_ranks(2)
def test_the_input_gradient_is_summed_once_and_travels_while_weight_gradients_are_computed() -> None:
    mlp, heard = Split(False, None), []
    y = mlp(inputs())
    mlp.mesh.traffic.listen(lambda collective, axis, sent: heard.append(f"{collective} {sent}"))
    computed = linear.Plain.of_weight

    def gradients(*arguments: Any) -> Any:
        heard.append("gradient of a weight")
        return computed(*arguments)

    with patch.object(linear.Plain, "of_weight", gradients):
        y.sum().backward()
    half = 2 * SEQUENCE * WIDTH * 8 // 2
    expected = ["gradient of a weight", f"all_gather {half}", "gradient of a weight"]
    assert heard == [f"reduce_scatter {half}", *expected]


@on_ranks(2)
def test_a_pass_leaves_nothing_behind() -> None:
    mlp = Split(False, None)
    gc.collect()
    gc.disable()  # so that circles show
    try:
        mlp(inputs()).sum().backward()
        mlp(inputs())
        assert not [thing for thing in gc.get_objects() if isinstance(thing, linear.Ticket)]
    finally:
        gc.enable()


def reuse() -> list[torch.Tensor]:
    """Call one layer twice in a pass, another never, and both without gradients; return gradients."""
    mlp = Split(False, None)
    w, x = mlp.weights, inputs()
    columns = [Columns(w[name], w[f"{name} bias"]) for name in ("gate", "up")]
    whole, (gate, _) = enter(x, columns, mlp.group, 40)
    y = leave(multiply(gate(whole) * gate(whole), Columns(w["down"], None)), w["down bias"], mlp.group, 42)
    y.sum().backward()
    with torch.no_grad():
        assert torch.equal(mlp(x), mlp(x))
        assert enter(x, columns, mlp.group, 40)[1] == []
    assert w["up"].grad is None
    return [x.grad, w["gate"].grad]


def test_a_layer_may_be_called_twice_or_not_at_all() -> None:
    w, x = weights(False), inputs()
    gate = multiply(x, Columns(w["gate"], w["gate bias"]))
    multiply(gate * gate, Columns(w["down"], w["down bias"])).sum().backward()
    found = run_ranks(reuse, 2)
    for of_x, _ in found:
        torch.testing.assert_close(of_x, x.grad)
    torch.testing.assert_close(torch.cat([of_gate for _, of_gate in found]), w["gate"].grad)
