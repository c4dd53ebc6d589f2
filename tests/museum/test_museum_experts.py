"""Experts on several ranks: silent errors of other systems, and that ours are those of one process."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from mixtures import EXPERTS, TARGETS, Block, Mixture, build_mixture, mixture_loss, token_rows
from museum import Weights, gap, require, results_by_name, start, weights_of, whole
from run import adamw, train_step
from zeromesh.parallel.expert.dispatch import Choice

LR, CLIP, RATE = 2.0, 0.1, 0.05
BALANCE = 0.5
"""Weight of the balancing loss."""
EXPERT_PARTS = ("gate_up_proj", "down_proj")
MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 2, "expert": 2},
    "tensor": {"tensor": 2, "expert": 2},
}
"""Both on two ranks, each with half of the experts: with samples of its own, and with the other's."""


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Return the loss with the balancing loss of the rows, as a model of transformers returns it."""
    loss = mixture_loss(model, ids)
    mixture: Mixture = getattr(model, "module", model)
    return loss + BALANCE * mixture.auxiliary_loss()


def updated(mesh: dict[str, int], **settings: Any) -> tuple[float | None, Weights]:
    """Update once with two samples of each of two shares of the batch; return the norm and the weights."""
    experts = {"experts": {"targets": TARGETS}}
    engine = start(build_mixture(), lr=LR, mesh=mesh, zero_optimization={"stage": 3}, **experts, **settings)
    ids = token_rows(0).chunk(2)[engine.data_rank] if engine.data_size > 1 else token_rows(0)
    train_step(engine, loss_of(engine, ids))
    return engine.get_global_grad_norm(), whole(engine)


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        rows = {} if name == "data" else {"train_micro_batch_size_per_gpu": 4}
        found[name] = updated(mesh, **rows)
        found[f"{name}, clipped"] = updated(mesh, gradient_clipping=CLIP, **rows)
    return found


Gradients = dict[str, Tensor]


def gradients(parts: int, alter: Callable[..., Tensor] | None = None, balance: float = 1.0) -> Gradients:
    """Return one process's gradients, of the mean over the parts of the batch; with other blocks if altered."""
    model = build_mixture()
    if alter is not None:
        for block in model.blocks:
            block.mix = partial(alter, block)  # type: ignore[method-assign]
    for ids in token_rows(0).chunk(parts):
        ((mixture_loss(model, ids) + balance * BALANCE * model.auxiliary_loss()) / parts).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def changed(before: Gradients, change: Callable[[Tensor], Tensor]) -> Gradients:
    """Return gradients of which those of experts are changed."""
    return {name: change(value) if name.endswith(EXPERT_PARTS) else value for name, value in before.items()}


def norm_of(values: Gradients) -> float:
    return float(torch.stack([value.square().sum() for value in values.values()]).sum().sqrt())


def stepped(values: Gradients, factor: float = 1.0) -> Weights:
    """Return the weights after an update with these gradients."""
    return {name: value - LR * factor * values[name] for name, value in weights_of(build_mixture()).items()}


PARTS = {"data": 2, "tensor": 1}
"""Parts of the batch, each with a loss of its own."""


def require_update(name: str, wrong: Gradients) -> None:
    """Assert that both ranks' weights are those of one process, and that wrong gradients would be seen."""
    right = gradients(PARTS[name])
    for norm, weights in results_by_name(everything)[name]:
        assert norm is not None
        assert gap(norm, norm_of(right)) <= 1e-9
        require(weights, stepped(right), stepped(wrong))


def half(values: Tensor, rank: int) -> Tensor:
    """Return a rank's half of the experts, and zero for the others."""
    mine = torch.arange(EXPERTS) // (EXPERTS // 2) == rank
    return torch.where(mine.view(-1, 1, 1), values, 0)


@pytest.mark.parametrize("name", MESHES)
def test_gradients_of_experts_do_not_grow_with_the_ranks_that_share_them(name: str) -> None:
    # The owner's gradient is the sum over the tokens of both ranks, and was divided as one over a single rank's.
    require_update(name, changed(gradients(PARTS[name]), lambda value: 2 * value))


def detached(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Gathered weights of choices without their graph: the router learns from the balancing loss alone."""
    return block.experts(hidden, index, weights.detach())


def partial_sum(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Gradients of choices among the rank's own experts, without those of the other ranks."""
    return block.experts(hidden, index, torch.where(index < EXPERTS // 2, weights, weights.detach()))


def with_empty_slots(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Slots of other ranks' experts get a local expert's output: times zero forward, but not in the gradient."""
    slots = torch.where(index < EXPERTS // 2, 0.0, weights - weights.detach())
    return block.experts(hidden, index, weights) + block.experts(hidden, index % (EXPERTS // 2), slots)


def mispaired(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Weights in another order than the choices."""
    return block.experts(hidden, index, weights.flip(-1))


@pytest.mark.parametrize("name", MESHES)
def test_the_router_gets_the_gradient_of_all_ranks_experts_from_the_loss(name: str) -> None:
    require_update(name, gradients(PARTS[name], detached))
    require_update(name, gradients(PARTS[name], partial_sum))


@pytest.mark.parametrize("name", MESHES)
def test_weights_and_choices_stay_pairs_and_others_get_no_gradient(name: str) -> None:
    require_update(name, gradients(PARTS[name], with_empty_slots))
    require_update(name, gradients(PARTS[name], mispaired))


def test_a_balancing_loss_weighs_the_same_however_ranks_share_the_batch() -> None:
    for name, parts in PARTS.items():
        require_update(name, gradients(parts, balance=2))  # counted by each rank of the axis
        require_update(name, gradients(parts, balance=0.5))  # divided by its size
        require_update(name, gradients(parts, balance=0))  # computed, and not in the backward


def of_half_the_rows(block: Block, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts get the gradient of one rank's rows."""
    frozen = {name: parameter.detach() for name, parameter in block.experts.named_parameters()}
    mine, others = (values.chunk(2) for values in (hidden, hidden))
    first = block.experts(mine[0], index.chunk(2)[0], weights.chunk(2)[0])
    second: Tensor = functional_call(block.experts, frozen, (others[1], index.chunk(2)[1], weights.chunk(2)[1]))
    return torch.cat([first, second])


@pytest.mark.parametrize("name", MESHES)
def test_experts_are_reduced_over_the_ranks_that_hold_them(name: str) -> None:
    # Taken for dense parameters, they were averaged with the experts that the other rank has in their place.
    require_update(name, changed(gradients(PARTS[name]), lambda value: (value + value.roll(EXPERTS // 2, 0)) / 2))
    # Or got what the rows of one rank of the tensor group gave.
    require_update(name, gradients(PARTS[name], of_half_the_rows))


@pytest.mark.parametrize("name", MESHES)
def test_the_norm_counts_every_expert_once_on_all_ranks(name: str) -> None:
    right = gradients(PARTS[name])
    of_rank = [norm_of(changed(right, partial(half, rank=rank))) for rank in range(2)]
    shared = norm_of(changed(right, torch.zeros_like))
    twice = (norm_of(right) ** 2 + shared**2) ** 0.5
    for norm, weights in results_by_name(everything)[f"{name}, clipped"]:
        # The mean of the ranks' norms, one rank's own, that without experts, and with shared parameters twice
        for wrong in (sum(of_rank) / 2, *of_rank, shared, twice):
            require(norm, norm_of(right), wrong)
        assert gap(weights, stepped(right, CLIP / (norm_of(right) + 1e-6))) <= 1e-9


# The balancing loss of the global batch, as transformers' models define it.

NEAR = 1e-5
"""For models of transformers, which compute in fp32."""
PADDING = 5
"""Tokens without a label at the end of each second row."""


def balanced(**options: Any) -> Any:
    """Return a mixture of transformers that adds its balancing loss, with a large weight."""
    import transformers

    row = MODELS["mixtral"]
    sizes = {**row.options, "output_router_logits": True, "router_aux_loss_coef": 4.0, **options}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(getattr(transformers, row.config)(**sizes)).train()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight)
    return model


def padded(part: slice = slice(None)) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1::2, -PADDING:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: value[part] for name, value in batch.items()}


def global_loss() -> tuple[float, Weights]:
    experts, mesh = {"auxiliary_loss": "global"}, {"data": 2, "expert": 2}
    engine = start(balanced(), lr=0.1, mesh=mesh, experts=experts, zero_optimization={"stage": 1})
    rank = engine.data_rank
    loss = train_step(engine, engine(**padded(slice(2 * rank, 2 * rank + 2))).loss)
    return loss, whole(engine)


def plain_loss(parts: int = 1, softmaxes: int = 1, mask: bool = True) -> tuple[float, Weights]:
    """Train in one process, with the loss of each part by itself, more softmaxes, or padding as tokens."""
    from transformers.models.mixtral import modeling_mixtral

    right = modeling_mixtral.load_balancing_loss_func

    def loss_func(logits: Any, experts: int, top_k: int, attention_mask: Tensor) -> Tensor:
        for _ in range(softmaxes - 1):
            logits = tuple(layer.softmax(dim=-1) for layer in logits)
        return right(logits, experts, top_k, attention_mask if mask else None)

    model, total = balanced(), 0.0
    with patch.object(modeling_mixtral, "load_balancing_loss_func", loss_func):
        for part in range(parts):
            rows = slice(4 // parts * part, 4 // parts * (part + 1))
            loss = model(**padded(rows)).loss / parts
            loss.backward()
            total += loss.item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return total, weights_of(model)


@pytest.mark.full
def test_the_balancing_loss_of_the_global_batch_is_of_logits_of_all_ranks_tokens() -> None:
    found = run_ranks(global_loss, 2)
    right, weights = plain_loss()
    # A second softmax, padding as tokens, and each rank's own fractions
    for wrong in (plain_loss(softmaxes=2), plain_loss(mask=False), plain_loss(parts=2)):
        require(sum(loss for loss, _ in found) / 2, right, wrong[0], NEAR)
    for _, values in found:
        assert gap(values, weights) <= NEAR


# The bias that counts for the choice alone.


def mixed() -> Mixture:
    """Return a mixture whose first router has no bias."""
    model = build_mixture()
    gate = model.blocks[0].gate
    del gate.e_score_correction_bias
    gate.e_score_correction_bias = 0.0
    return model


UPDATES, MICRO_BATCHES = 3, 2
EVALUATED = torch.full((32, 6), 7)


def tokens_of(update: int, micro_batch: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Return a micro-batch, and its mask: most of two rows is padding, all of it one token."""
    ids = token_rows(100 * update + 10 * micro_batch + data_rank)
    mask = torch.ones_like(ids)
    mask[:2, 1:], ids[:2, 1:] = 0, 3
    return ids, mask


def masked_loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(ids, attention_mask=mask).flatten(0, 1), ids.flatten())


def biases() -> list[Tensor]:
    """Train with a bias that moves, and evaluate between updates; return the second router's after each update."""
    experts = {"targets": TARGETS, "bias_update_rate": RATE}
    settings = {"gradient_accumulation_steps": MICRO_BATCHES, "train_micro_batch_size_per_gpu": 4}
    engine = start(mixed(), lr=LR, mesh={"data": 2, "expert": 2}, experts=experts, **settings)
    found = []
    for update in range(UPDATES):
        for micro_batch in range(MICRO_BATCHES):
            train_step(engine, masked_loss(engine, *tokens_of(update, micro_batch, engine.data_rank)))
        found.append(engine.module.blocks[1].gate.e_score_correction_bias.clone())
        engine.eval()
        with torch.no_grad():
            engine(EVALUATED)
        engine.train()
    return found


@cache
def plain_biases(fault: str = "") -> list[Tensor]:
    """Train in one process, where the bias moves as other systems let it."""
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    gate, counts, found = model.blocks[1].gate, torch.zeros(EXPERTS), []
    present: list[Tensor] = []

    def count(_: Any, __: Any, output: Any) -> None:
        chosen = torch.nn.functional.one_hot(output[2], EXPERTS).sum(dim=1)
        counts.add_((chosen * present[0].reshape(-1, 1)).sum(dim=0))

    def move() -> None:
        change = RATE * torch.sign(counts.mean() - counts).double()
        gate.e_score_correction_bias += change - change.mean()
        counts.zero_()

    gate.register_forward_hook(count)
    for update in range(UPDATES):
        for micro_batch in range(MICRO_BATCHES):
            for rank in range(2):
                ids, mask = tokens_of(update, micro_batch, rank)
                present[:] = [torch.ones_like(mask) if fault == "padding" else mask * (fault != "rank" or rank == 0)]
                (masked_loss(model, ids, mask) / (2 * MICRO_BATCHES)).backward()
            if fault == "micro-batch":
                move()
        optimizer.step()
        optimizer.zero_grad()
        if fault not in ("micro-batch", "layer"):
            move()
        found.append(gate.e_score_correction_bias.clone())
        if fault == "evaluation":
            present[:] = [torch.ones_like(EVALUATED)]
            with torch.no_grad():
                model(EVALUATED)
    return found


def test_the_selection_bias_moves_once_an_update_by_the_training_tokens_of_all_ranks() -> None:
    right = plain_biases()
    assert all(abs(float(bias.mean())) < 1e-12 for bias in right)
    for found in run_ranks(biases, 2):
        # After each micro-batch, with tokens of an evaluation, with padding, of one rank, and with a layer before it
        # that has no bias
        for fault in ("micro-batch", "evaluation", "padding", "rank", "layer"):
            require(found, right, plain_biases(fault))


# Weights in files.


def through_files(folder: str) -> tuple[Weights, list[Weights]]:
    """Read a model's weights into shards, train, write them in both formats, and go on; return the weights."""
    import transformers

    settings = {"mesh": {"data": 2, "expert": 2}, "zero_optimization": {"stage": 3}, "optimizer": adamw(0.1)}
    model = zeromesh.from_pretrained(f"{folder}/first")
    engine = zeromesh.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, **settings})[0]
    found = [whole(engine)]
    update(engine)
    engine.save_16bit_model(f"{folder}/second")
    engine.save_checkpoint(f"{folder}/checkpoints")
    found.append(whole(engine))
    update(engine)
    transformers.utils.logging.disable_progress_bar()
    return whole(engine), found


def update(engine: zeromesh.Engine) -> None:
    rows = slice(2 * engine.data_rank, 2 * engine.data_rank + 2) if engine.data_size > 1 else slice(None)
    train_step(engine, engine(**padded(rows)).loss)


@pytest.mark.full
def test_weights_and_moments_of_experts_are_those_of_the_files(tmp_path: Path) -> None:
    import transformers

    original = balanced(output_router_logits=False)
    original.save_pretrained(tmp_path / "first")
    fresh = balanced(output_router_logits=False)
    for parameter in fresh.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    last, (first, second) = run_ranks(through_files, 2, str(tmp_path))[0]
    # Stacked experts that no file's name matched kept the values that they were made with.
    require(first, weights_of(original), weights_of(fresh))
    read = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "second", dtype=torch.float32)
    require(weights_of(read), second, weights_of(fresh))
    for moments in (True, False):
        again = run_ranks(go_on, 1, str(tmp_path), moments)[0]
        assert (gap(again, last) <= NEAR) == moments


def go_on(folder: str, moments: bool) -> Weights:
    """Update once in one process, from the checkpoint of two ranks."""
    settings = {"train_micro_batch_size_per_gpu": 4, "optimizer": adamw(0.1)}
    engine = zeromesh.initialize(model=balanced(output_router_logits=False), config=settings)[0]
    engine.load_checkpoint(f"{folder}/checkpoints", load_optimizer_states=moments)
    update(engine)
    return whole(engine)


def test_rows_behind_the_largest_number_of_32_bits_are_found() -> None:
    rows, width = 524_288, 4_097  # more than 2^31 values, of which the memory that is written is there
    values = torch.empty(rows, width, dtype=torch.uint8)
    values[-1], place = 7, (rows - 1) * width
    wrapped = (place + 2**31) % 2**32 - 2**31
    assert wrapped < 0
    choice = Choice.of(
        torch.tensor([rows - 1]), torch.zeros(rows, dtype=torch.int64).index_fill(0, torch.tensor(-1), 1)
    )
    values.flatten()[wrapped % values.numel()] = 0
    require(choice.take(values)[0, :1], torch.tensor([7]), values.flatten()[wrapped % values.numel()].view(1))
