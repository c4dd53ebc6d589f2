"""Weight gradients that come later than input gradients: of which layers, and what they are then."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import run_ranks
from run import start_engine
from test_pipeline import ADAMW, MESHES, SAMPLES, Plain, batches, build, compare
from zeromesh.base.linear_arithmetic import Columns, Kept, keeping, multiply
from zeromesh.parallel.pipeline.runtime.weight_gradients import postpone, roots_of


def kept_by_stages(further: dict[str, Any], tensor: int) -> list[tuple[int, list[str]]]:
    engine = start_engine(
        build("llama").float(),
        further,
        batch=SAMPLES * 4,
        micro=SAMPLES,
        optimizer=ADAMW,
        mesh={"pipeline": 2, "tensor": tensor},
        pipeline={"schedule": "zb-h1"},
    )
    found: list[tuple[int, list[str]]] = []
    weights, arrive = engine.stage_work.stage_weights, engine.sharded.reducer.arrive

    def stage_weights(stage: int, kept: Kept, last: bool) -> None:
        found.append((len(roots_of(kept)), []))
        weights(stage, kept, last)

    def arrived(gradient: Any, index: int, value: Tensor) -> None:
        if found:
            found[-1][1].append(gradient.layout.segments[index].name)
        arrive(gradient, index, value)

    engine.stage_work.stage_weights = stage_weights  # type: ignore[method-assign]
    engine.sharded.reducer.arrive = arrived  # type: ignore[method-assign]
    engine.train_batch(batches("llama", 0, 4, 0, 1))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("further", [{}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}], ids=str)
@pytest.mark.parametrize("tensor", [1, 2])
def test_gradients_of_the_weights_of_all_linear_layers_come_later(tensor: int, further: dict[str, Any]) -> None:
    for rank, found in enumerate(run_ranks(kept_by_stages, 2 * tensor, further, tensor)):
        # Four or more layers of seven each; the first reads what has a gradient, too: the embedding.
        assert len(found) == 4, rank
        for layers, _ in found:
            assert layers >= 4 * 7, rank
        # The last micro-batch's, after which no input gradient comes.
        assert len({name for name in found[-1][1] if "proj" in name}) >= 4 * 7, rank


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "further"), [("llama", "float64"), pytest.param("gpt2", "checkpointing", marks=pytest.mark.full)]
)
def test_split_layers_whose_weights_come_later_train_to_the_numbers_of_one_process(kind: str, further: str) -> None:
    compare(kind, further, **MESHES["2 stages, tensor 2"], row=0, schedule="zb-h1", microbatches=4)


class Headed(Plain):
    """Takes the loss of its logits in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(tied=False)
        self.way = way

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first, mask = self.embedding(ids), (ids > 3)[..., None]
        x = first
        for layer in self.layers:
            x = layer(x, first, mask=mask)
        logits, flat = self.head(self.norm(x)).flatten(0, 1), labels.flatten()
        if self.way == "of values":
            return (logits.logsumexp(-1) - logits.gather(1, flat[:, None])[:, 0]).mean()
        losses = nn.functional.cross_entropy(logits, flat, reduction=self.way)
        return losses if self.way == "mean" else (losses * torch.arange(len(flat))).mean()


def headed(way: str, further: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    engine = start_engine(
        Headed(way).double(), further, batch=SAMPLES * 4, micro=SAMPLES, optimizer=ADAMW, clipping=0.5
    )
    due: list[int] = []  # layers whose weight gradients were left, of each micro-batch
    early: list[str] = []  # parameters whose gradients came with those of inputs
    if further:
        weights, backward = engine.stage_work.stage_weights, engine.stage_work.stage_backward

        def stage_weights(stage: int, kept: Kept, last: bool) -> None:
            due.append(len(roots_of(kept)))
            weights(stage, kept, last)

        def stage_backward(*args: Any) -> None:
            arrived.clear()
            backward(*args)
            early.extend(arrived)

        arrived: list[str] = []
        arrive = engine.sharded.reducer.arrive

        def noted(gradient: Any, index: int, value: Tensor) -> None:
            arrived.append(gradient.layout.segments[index].name)
            arrive(gradient, index, value)

        engine.stage_work.stage_weights, engine.stage_work.stage_backward = stage_weights, stage_backward
        engine.sharded.reducer.arrive = noted
    losses = [
        float(engine.train_batch(batches("plain", step, 4, engine.data_rank, engine.data_size))) for step in (0, 1)
    ]
    with engine.sharded.gathered(engine.sharded.units):
        whole = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return losses, whole, due, early


SPLIT = {"mesh": {"pipeline": 2, "tensor": 2}}
LAZY = {"chunked_loss": True, "mesh": {"pipeline": 2}}


@pytest.mark.parametrize("way", ["mean", "none", "of values"])
@pytest.mark.parametrize(
    ("further", "row"),
    [(LAZY, 0), pytest.param(LAZY, 3, marks=pytest.mark.full), pytest.param(SPLIT, 1, marks=pytest.mark.full)],
)
def test_the_weight_gradient_of_a_lazy_head_comes_later(way: str, further: dict[str, Any], row: int) -> None:
    losses, weights, _, _ = run_ranks(headed, 1, way, {})[0]
    settings = {**further, "zero_optimization": {"stage": row}, "pipeline": {"schedule": "zb-h1"}}
    runs = run_ranks(headed, 2 * further["mesh"].get("tensor", 1), way, settings)
    for found, whole, _, early in runs:
        assert found == pytest.approx(losses, rel=1e-9)
        assert early
        assert not {"head.weight", "head.bias"} & {*early}
        for name, value in whole.items():
            assert float((value - weights[name]).abs().max()) <= 1e-8, name
    last = runs[-1]
    assert "head.weight" in last[1]
    # Two layers in each of four blocks or more, and the head.
    assert len(last[2]) == 8
    assert all(count % 2 == 1 for count in last[2])


def model_of(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 4, bias=False))


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_gradients_that_come_later_are_the_same(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = model_of(nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    postpone(model)
    x = torch.randn(6, 8, requires_grad=True)
    own = x.detach().clone().requires_grad_()
    kept: Kept = []
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None), keeping(kept):
        loss = model(x).float().square().mean()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        plain(own).float().square().mean().backward()
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert own.grad is not None
    torch.testing.assert_close(x.grad, own.grad)
    torch.autograd.backward(roots_of(kept), [torch.empty_like(root) for root in roots_of(kept)])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad.dtype == other.dtype
        torch.testing.assert_close(one.grad, other.grad)


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = model_of(nn.Linear(8, 8))
    postpone(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(torch.ones(2, 8)).abs().max() == 0
    with keeping([]):
        assert other(torch.ones(2, 8, requires_grad=True)).abs().max() == 0


def gradient(given: Tensor, later: bool, inner: bool | None = None) -> Tensor | None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(3, 3)), given.clone().requires_grad_()
    kept: Kept | None = [] if later else None
    with keeping(kept):
        y = multiply(2 * x, Columns(weight, None))
        if inner is not None:
            (more,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True, create_graph=inner)
            y = y + more
        y.pow(3).sum().backward()
    if kept:
        roots = roots_of(kept)
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return weight.grad


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3)])
def test_inputs_may_have_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    given = torch.randn(shape)
    torch.testing.assert_close(gradient(given, later=True), gradient(given, later=False))


@pytest.mark.some(1)
@pytest.mark.parametrize("graph", [False, True])
def test_gradients_inside_of_a_forward_are_refused_where_those_of_weights_come_later(graph: bool) -> None:
    with pytest.raises(RuntimeError, match="choose another schedule, such as gpipe"):
        gradient(torch.randn(2, 3), later=True, inner=graph)
