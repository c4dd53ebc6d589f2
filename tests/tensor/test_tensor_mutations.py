"""Mistakes in splitting that leave losses of ordinary runs as they are: each test fails where one is made."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_close
from harness import on_ranks, run_ranks
from huggingface_models import MODELS
from run import plain_step, train_step, whole_state
from test_tensor_rules import LIMIT, STEPS, batch, config, gpt2, llama, trained
from zeromesh import Mesh, no_decay_groups
from zeromesh.parallel.head.linear_cross_entropy import Vocabulary, linear_cross_entropy

# 6: the maximum is that of all ranks.


def far_logits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Losses and gradients where one rank's logits are so much larger that their exponentials have no number."""
    group = Mesh({"tensor": 2}, torch.device("cpu")).group("tensor")
    found = []
    for large in range(2):
        hidden = torch.ones(3, 1, requires_grad=True)
        weight = torch.tensor([[1e3 if group.rank == large else -1e3], [0.0]])
        labels = torch.arange(3)
        loss = linear_cross_entropy(hidden, weight, labels, vocabulary=Vocabulary(2 * group.rank, 4, group))
        loss.backward()
        assert hidden.grad is not None
        found.append((loss.detach(), hidden.grad))
    return found


def test_logits_may_be_far_apart_on_different_ranks() -> None:
    by_rank = run_ranks(far_logits, 2)
    for large in range(2):
        first = torch.tensor([[1e3], [0.0]])
        parts = [first, torch.tensor([[-1e3], [0.0]])]
        hidden = torch.ones(3, 1, requires_grad=True)
        logits = hidden @ torch.cat(parts if large == 0 else parts[::-1]).t()
        expected = nn.functional.cross_entropy(logits, torch.arange(3))
        expected.backward()
        for of_rank in by_rank:
            torch.testing.assert_close(of_rank[large][0], expected.detach())
        torch.testing.assert_close(sum(of_rank[large][1] for of_rank in by_rank), hidden.grad)


# 4, 8, 9, 10: sums over ranks that hold the same, with everything else that is summed.


def accumulated(mesh: dict[str, int], row: int, look: bool, **options: Any) -> Any:
    settings = config(1, row, gradient_accumulation_steps=2, mesh=mesh, gradient_clipping=0.1)
    settings["tensor_parallel"] = {"sequence": mesh.get("tensor", 1) > 1}
    engine = zeromesh.initialize(model=llama(num_hidden_layers=1, **options), config=settings)[0]
    norms, seen = [], []
    for number in range(2):
        for ids in batch(number).chunk(2):
            mine = ids.chunk(engine.data_size)[engine.data_rank]
            engine.backward(engine(input_ids=mine, labels=mine).loss)
            if look:
                layer = engine.module.model.layers[0]
                for weight in (layer.self_attn.k_proj.weight, layer.input_layernorm.weight):
                    seen.append(zeromesh.zero.safe_get_full_grad(weight))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, seen, whole_state(engine.module)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("mesh", "row"),
    [({"tensor": 4}, 0), ({"tensor": 4}, 2), ({"replicate": 2, "tensor": 2}, 1), ({"data": 2, "tensor": 2}, 3)],
    ids=str,
)
def test_gradients_looked_at_between_micro_batches_are_summed_once(mesh: dict[str, int], row: int) -> None:
    norms, seen, state = run_ranks(accumulated, 1, {}, 0, True, timeout=LIMIT)[0]
    assert_close(run_ranks(accumulated, 1, {}, 0, False, timeout=LIMIT)[0][2], state, 1e-12)
    for found_norms, found, found_state in run_ranks(accumulated, 4, mesh, row, True, timeout=LIMIT):
        assert found_norms == pytest.approx(norms, rel=1e-6)
        for one, want in zip(found, seen, strict=True):
            torch.testing.assert_close(one, want, rtol=1e-6, atol=1e-9)
        assert_close(found_state, state)


# 11: the norm is that of gradients without the loss scale, and what is clipped is, too.


def scaled(tensor: int, power: int | None) -> Any:
    precision = {} if power is None else {"fp16": {"enabled": True, "loss_scale": 2**power}}
    settings = config(tensor, 1, gradient_clipping=0.05, **precision)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    engine = zeromesh.initialize(model=llama(torch.float32, num_hidden_layers=1), config=settings)[0]
    before = zeromesh.zero.safe_get_full_fp32_param(engine.module.model.layers[0].mlp.up_proj.weight)
    train_step(engine, engine(input_ids=batch(0), labels=batch(0)).loss)
    after = zeromesh.zero.safe_get_full_fp32_param(engine.module.model.layers[0].mlp.up_proj.weight)
    return engine.get_global_grad_norm(), float((after - before).norm())


def test_the_clipped_norm_does_not_depend_on_the_loss_scale() -> None:
    norm, change = run_ranks(scaled, 1, 1, None, timeout=LIMIT)[0]
    assert norm > 0.1  # so that it is clipped
    for power in (4, 10):
        for found in run_ranks(scaled, 2, 2, power, timeout=LIMIT):
            # One layer, forth and back, has up to 64 roundings to fp16, of either sign: they add up to eight.
            assert found == pytest.approx((norm, change), rel=8 * 2**-11)


# 14: a rank's own stream goes on.


def masks_of_attention() -> list[torch.Tensor]:
    model = gpt2(attn_pdrop=0.5, attn_implementation="eager")
    engine = zeromesh.initialize(model=model, config=config(2))[0]
    found, dropout = [], nn.functional.dropout

    def recording(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = dropout(x, *args, **kwargs)
        if x.ndim == 4:
            found.append(((y == 0) & (x != 0)).clone())
        return y

    with patch.object(nn.functional, "dropout", recording):
        for _ in range(2):
            engine(input_ids=batch(0))
    return found


def test_each_layer_and_step_draws_other_numbers_on_each_rank() -> None:
    masks = [mask for of_rank in run_ranks(masks_of_attention, 2, timeout=LIMIT) for mask in of_rank]
    assert len(masks) == 8  # of two ranks, two steps and two layers
    assert len({mask.numpy().tobytes() for mask in masks}) == 8


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.attention(x, x, x)[0]
        return y.square().mean()


def dropped_by_torch() -> torch.Tensor:
    plan = {"attention": "heads"}
    engine = zeromesh.initialize(model=Attending().double(), config=config(2, tensor_parallel={"plan": plan}))[0]
    found, dropout = [], nn.functional.dropout

    def recording(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(y := dropout(x, *args, **kwargs))
        return y

    with patch.object(nn.functional, "dropout", recording):
        engine(torch.ones(4, 8, 16, dtype=torch.float64))
    (weights,) = found
    return weights == 0


def test_attention_of_torch_drops_other_weights_on_each_rank() -> None:
    one, other = run_ranks(dropped_by_torch, 2, timeout=LIMIT)
    assert one.shape == other.shape == (4, 2, 8, 8)
    assert 0.3 < one.double().mean() < 0.7
    assert not torch.equal(one, other)


# 5: the row of padding.


def padded_embedding(tensor: int, padding: int) -> torch.Tensor:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(12, 8, padding_idx=padding)
            self.head = nn.Linear(8, 12, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), ids.flatten())

    plan = {"tokens": "embedding_rowwise", "head": "vocabulary"}
    engine = zeromesh.initialize(model=Model().double(), config=config(tensor, tensor_parallel={"plan": plan}))[0]
    engine.backward(engine(torch.arange(12).view(4, 3)))
    gradient = zeromesh.zero.safe_get_full_grad(engine.module.tokens.weight)
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("padding", [1, 10])
def test_only_the_row_of_padding_gets_no_gradient(padding: int) -> None:
    expected = run_ranks(padded_embedding, 1, 1, padding, timeout=LIMIT)[0]
    assert [row for row in range(12) if not expected[row].any()] == [padding]
    for found in run_ranks(padded_embedding, 2, 2, padding, timeout=LIMIT):
        torch.testing.assert_close(found, expected)


# 5: what fills the last rank of layers of any size.


def odd(tensor: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8)).double()
    plan = {"0": "colwise_gather_output", "2": "rowwise_split_input"}
    settings = config(tensor, tensor_parallel={"plan": plan} if tensor > 1 else {})
    engine = zeromesh.initialize(model=model, config=settings)[0]
    widths = []
    engine.module[1].register_forward_hook(lambda module, args, output: widths.append(output.shape[-1]))
    y = engine(torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8))
    engine.backward(y.square().mean())
    gradients = {name: zeromesh.zero.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    return widths, {"output": y.detach(), **gradients}


def test_padding_of_the_last_ranks_part_is_not_seen() -> None:
    _, expected = run_ranks(odd, 1, 1, timeout=LIMIT)[0]
    for tensor in (3, 4):
        for widths, found in run_ranks(odd, tensor, tensor, timeout=LIMIT):
            assert widths == [10]
            assert_close(found, expected)


# 2: halves of a fused weight are cut one by one, where a plan says so without their lengths.


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_and_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_and_up(x).chunk(2, -1)
        y: torch.Tensor = self.down(nn.functional.silu(gate) * up).square().mean()
        return y


def fused(tensor: int) -> Any:
    torch.manual_seed(0)
    plan = {"gate_and_up": "packed_colwise", "down": "rowwise"}
    settings = config(tensor, tensor_parallel={"plan": plan} if tensor > 1 else {})
    engine = zeromesh.initialize(model=Fused().double(), config=settings)[0]
    engine.backward(loss := engine(torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)))
    gradients = {name: zeromesh.zero.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    return loss.item(), gradients, tuple(engine.module.gate_and_up.weight.shape)


def test_the_halves_of_a_fused_weight_are_each_cut() -> None:
    loss, gradients, _ = run_ranks(fused, 1, 1, timeout=LIMIT)[0]
    for found, parts, shape in run_ranks(fused, 2, 2, timeout=LIMIT):
        assert found == pytest.approx(loss, rel=1e-12)
        assert_close(parts, gradients)
        assert shape == (12, 8)


# 4: with fewer heads of keys than ranks, attention that repeats them itself.


def grouped(tensor: int) -> Any:
    model = llama(num_hidden_layers=1, attn_implementation="eager")
    engine = zeromesh.initialize(model=model, config=config(tensor))[0]
    engine.backward(loss := engine(input_ids=batch(0), labels=batch(0)).loss)
    attention = engine.module.model.layers[0].self_attn
    names = ("q_proj", "k_proj", "v_proj")
    return loss.item(), {name: zeromesh.zero.safe_get_full_grad(getattr(attention, name).weight) for name in names}


def test_heads_of_keys_that_ranks_share_are_repeated_as_often_as_there_are_queries() -> None:
    loss, gradients = run_ranks(grouped, 1, 1, timeout=LIMIT)[0]
    for tensor in (2, 4):
        for found, parts in run_ranks(grouped, tensor, tensor, timeout=LIMIT):
            assert found == pytest.approx(loss, rel=1e-6)
            assert_close(parts, gradients)


# 10, 13: what optimizers are told of parts.


@on_ranks(2, timeout=LIMIT)
def test_each_group_has_its_own_decay() -> None:
    model = llama(num_hidden_layers=1)
    settings = config(2, 1, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 3.0}})
    state = trained(model, settings, model_parameters=no_decay_groups(model, 5.0))[1]
    model = llama(num_hidden_layers=1)
    optimizer = torch.optim.AdamW(no_decay_groups(model, 5.0), lr=1e-2, eps=1e-4)
    for number in range(STEPS):
        plain_step(optimizer, model(input_ids=batch(number), labels=batch(number)).loss)
    assert_close(state, model.state_dict(), 1e-6)


def with_lamb(tensor: int) -> dict[str, torch.Tensor]:
    """Of a fused weight, ranks have heads of queries that no other has, and heads of keys that others have, too."""
    torch.manual_seed(0)
    model = MODELS["phi3"].build().double().train()
    settings = config(tensor, optimizer={"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.5}})
    return trained(model, settings)[1]


def test_norms_of_whole_parameters_count_what_several_ranks_hold_once() -> None:
    expected = run_ranks(with_lamb, 1, 1, timeout=LIMIT)[0]
    for state in run_ranks(with_lamb, 4, 4, timeout=LIMIT):
        assert_close(state, expected)
