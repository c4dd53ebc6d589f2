"""Layers split over ranks: silent errors of other systems, and that ours are those of one process."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS, without_dropout
from museum import Weights, gap, require, results_of, start, weights_of, whole
from run import plain_step, train_step
from test_tensor_rules import masks
from zeromesh.apps.train.data.ordered_loader import NO_LABEL, Batch
from zeromesh.apps.train.run_loss import weighted

WORDS, SMOOTHING = 96, 0.3
NEAR = 1e-6
"""For models of transformers, which compute norms and losses in fp32."""


def randomized(name: str, **options: Any) -> Any:
    """Return a model of transformers in which nothing is zero or one, biases and norms included."""
    import transformers

    row = MODELS[name]
    config = getattr(transformers, row.config)(**{**row.options, **options})
    without_dropout(config)
    torch.manual_seed(0)
    model = getattr(transformers, row.name)(config).to(row.dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


ONE = {"num_hidden_layers": 1}
BUILDS: dict[str, tuple[Callable[[], Any], bool]] = {
    "biases": (lambda: randomized("gpt2", n_layer=1), False),
    "sequence": (lambda: randomized("llama", **ONE), True),
    "norms of heads": (lambda: randomized("qwen3", **ONE), False),
    "one head of keys": (lambda: randomized("llama", **ONE, num_key_value_heads=1), False),
    "experts": (lambda: randomized("mixtral", **ONE, output_router_logits=True, router_aux_loss_coef=0.5), False),
}
"""By name: a model, and whether its sequences are split, too."""


def ids(step: int) -> Tensor:
    return torch.randint(3, WORDS, (2, 8), generator=torch.Generator().manual_seed(step))


def wide(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of the model": lambda model, x: model(input_ids=x, labels=x).loss,
    "smoothed": lambda model, x: wide(model(input_ids=x).logits, x, label_smoothing=SMOOTHING),
    "of whole logits": lambda model, x: wide(model(input_ids=x).logits * 1.0, x),
}


def split(model: nn.Module, sequence: bool = False) -> zeromesh.Engine:
    settings = {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": sequence}, "train_batch_size": 2}
    return zeromesh.initialize(model=model, config=settings | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0]


def train(build: Callable[[], Any], sequence: bool, loss_of: Callable[[Any, Tensor], Tensor], steps: int = 2) -> Any:
    """Return losses and weights of a few updates of a split model."""
    engine, losses = split(build(), sequence), []
    for step in range(steps):
        losses.append(train_step(engine, loss_of(engine, ids(step))))
    return losses, whole(engine)


def counted() -> tuple[float | None, int, int, Weights]:
    """Train on all labels alike: loss, labels and samples that were counted, and weights."""
    engine = split(randomized("llama", **ONE))
    language: Any = SimpleNamespace(logits=lambda model, batch: model(input_ids=batch.tokens).logits)
    given, labels = weighted(engine, language, [Batch(ids(0), targets())])
    engine.train_batch(iter(given))
    return engine.get_mean_loss(), labels, engine.global_samples, whole(engine)


def targets() -> Tensor:
    return torch.where(torch.arange(8) < torch.tensor([[3], [8]]), ids(1), NO_LABEL)


class Odd(nn.Module):
    """Cuts the entries of a layer that is split in other places than the ranks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 12), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).view(-1, 3))


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd().double()


def rows() -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def odd_views() -> tuple[Tensor, str]:
    """Return the output of a model that is split by itself, and the error for a plan that would not gather."""
    out = split(odd())(rows()).detach()
    plan = {"first": "colwise", "second": "rowwise"}
    settings = {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": plan}, "train_batch_size": 2}
    try:
        zeromesh.initialize(model=odd(), config=settings | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0](
            rows()
        )
    except (RuntimeError, ValueError) as error:
        return out, str(error)
    return out, ""


def program(name: str) -> Any:
    if name in BUILDS:
        return train(*BUILDS[name], LOSSES["of the model"])
    if name in LOSSES:
        return train(BUILDS["sequence"][0], False, LOSSES[name])
    return counted() if name == "counted" else odd_views()


@cache
def plain(build: str, loss: str = "of the model") -> tuple[list[float], Weights]:
    """Train in one process."""
    model, losses = BUILDS[build][0](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        losses.append(plain_step(optimizer, LOSSES[loss](model, ids(step))))
    return losses, weights_of(model)


def first_loss(build: str, change: Callable[[Any], None]) -> float:
    """Return the loss of a model that was changed."""
    model = BUILDS[build][0]()
    with torch.no_grad():
        change(model)
        return float(LOSSES["of the model"](model, ids(0)))


def test_the_bias_of_a_layer_that_is_split_by_rows_is_added_once() -> None:
    def twice(model: Any) -> None:
        for layer in (model.transformer.h[0].attn.c_proj, model.transformer.h[0].mlp.c_proj):
            layer.bias.mul_(2)

    losses, weights = plain("biases")
    for found in results_of(program, name="biases"):
        require(found[0][0], losses[0], first_loss("biases", twice), limit=NEAR)
        assert gap(found[1], weights) <= NEAR


def test_smoothed_labels_are_spread_over_the_whole_vocabulary() -> None:
    losses, weights = plain("sequence", "smoothed")
    model = BUILDS["sequence"][0]()
    with torch.no_grad():
        logs = model(input_ids=ids(0)).logits[:, :-1].log_softmax(-1)
    hits = logs.gather(-1, ids(0)[:, 1:, None]).mean()
    halves = [float(-(1 - SMOOTHING) * hits - SMOOTHING * half.mean()) for half in logs.chunk(2, -1)]
    for found in results_of(program, name="smoothed"):
        require(found[0][0], losses[0], halves[0], limit=NEAR)
        require(found[0][0], losses[0], halves[1], limit=NEAR)
        assert gap(found[1], weights) <= NEAR


@pytest.mark.full
def test_a_loss_of_whole_logits_counts_each_entry_of_the_vocabulary_once() -> None:
    losses, weights = plain("sequence", "of whole logits")
    for found in results_of(program, name="of whole logits"):
        require(found[0][0], losses[0], losses[0] + torch.tensor(2.0).log().item(), limit=NEAR)
        assert gap(found[1], weights) <= NEAR


def with_parts_of(build: str, name: str, part: Callable[[Tensor], Tensor]) -> Weights:
    """Train in one process with a part of one parameter's gradient, as a rank that is not given the others'."""
    model = BUILDS[build][0]()
    model.get_parameter(name).register_hook(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        plain_step(optimizer, LOSSES["of the model"](model, ids(step)))
    return weights_of(model)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        ("sequence", "model.layers.0.input_layernorm.weight"),
        ("sequence", "model.norm.weight"),
        pytest.param("norms of heads", "model.layers.0.self_attn.q_norm.weight", marks=pytest.mark.full),
        pytest.param("norms of heads", "model.layers.0.self_attn.k_norm.weight", marks=pytest.mark.full),
        pytest.param("one head of keys", "model.layers.0.self_attn.k_proj.weight", marks=pytest.mark.full),
        pytest.param("one head of keys", "model.layers.0.self_attn.v_proj.weight", marks=pytest.mark.full),
        pytest.param("experts", "model.layers.0.mlp.gate.weight", marks=pytest.mark.full),
    ],
)
def test_a_parameter_that_all_ranks_hold_gets_the_gradients_of_all(build: str, name: str) -> None:
    losses, weights = plain(build)
    assert name in weights
    wrong = with_parts_of(build, name, lambda gradient: gradient / 2)  # of about half of the tokens or heads
    limit = MODELS["mixtral"].tolerance if build == "experts" else NEAR
    first, second = results_of(program, name=build)
    assert torch.equal(first[1][name], second[1][name])
    for found in (first, second):
        require(found[1][name], weights[name], wrong[name], limit=min(limit, 1e-5))
        assert gap(found[1], weights) <= max(limit, 1e-5)
        assert gap(found[0], losses) <= max(limit, NEAR)


@pytest.mark.full
def test_balancing_losses_and_routes_are_those_of_whole_experts() -> None:
    losses, _ = plain("experts")

    def unbalanced(model: Any) -> None:
        model.router_aux_loss_coef *= 2  # a share from each of two ranks

    def mixed(model: Any) -> None:
        model.model.layers[0].mlp.gate.weight.copy_(model.model.layers[0].mlp.gate.weight.flip(0))

    for found in results_of(program, name="experts"):
        require(found[0][0], losses[0], first_loss("experts", unbalanced), limit=1e-5)
        require(found[0][0], losses[0], first_loss("experts", mixed), limit=1e-5)


def test_ranks_that_share_a_batch_count_it_once() -> None:
    model = randomized("llama", **ONE)
    loss = F.cross_entropy(model(input_ids=ids(0)).logits.flatten(0, 1), targets().flatten(), ignore_index=NO_LABEL)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found, labels, samples, weights in results_of(program, name="counted"):
        require(found, loss.item(), 2 * loss.item(), limit=NEAR)
        assert (labels, samples) == (11, 2)
        assert gap(weights, weights_of(model)) <= NEAR


def test_a_view_across_the_ranks_parts_is_right_or_refused() -> None:
    model = odd()
    first = model.first(rows())
    wrong = model.second(torch.cat([half.reshape(-1, 3) for half in first.chunk(2, -1)]))
    for out, said in results_of(program, name="views"):
        require(out, model(rows()), wrong)
        assert "second" in said


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.full), True])
def test_ranks_drop_the_same_where_they_hold_the_same_and_not_elsewhere(sequence: bool) -> None:
    one, other = run_ranks(masks, 2, sequence)
    equal = [torch.equal(first, second) for (_, first), (_, second) in zip(one, other, strict=True)]
    # Embeddings, attention, output of both halves, and what the program draws afterwards.
    assert equal == [True, False, not sequence, not sequence, True]


def dropped() -> tuple[list[bool], list[bool]]:
    """Return masks of dropout of a rank with others' samples, where the program seeds all ranks alike, and apart."""
    engine = start(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    found = []
    for seed in (5, 5 + engine.data_rank):
        torch.manual_seed(seed)
        found.append((engine(torch.ones(1, 8)) == 0).flatten().tolist())
    return found[0], found[1]


@pytest.mark.full
def test_ranks_with_other_samples_drop_others_if_they_are_seeded_apart() -> None:
    (alike, first), (same, second) = run_ranks(dropped, 2)
    assert alike == same  # as in plain torch: the manual says to seed by engine.data_rank
    assert first != second


class Tempered(nn.Linear):
    """A linear layer whose class has a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def tempered() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Tempered(4, 12), nn.ReLU(), nn.Linear(12, 8)).double()


def tempered_output() -> Tensor:
    return split(tempered())(rows()).detach()


def test_layers_with_a_forward_of_their_own_are_not_replaced() -> None:
    model: Any = tempered()
    wrong = model[2](F.linear(rows(), model[0].weight, model[0].bias).relu())
    for out in run_ranks(tempered_output, 2):
        require(out, model(rows()), wrong)
