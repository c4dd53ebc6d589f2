"""``torch.nn.MultiheadAttention`` and torch's transformers, split by heads: all that they can be asked for."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks

WIDTH, HEADS, SAMPLES, LENGTH = 16, 4, 2, 8

CASES: dict[str, dict[str, Any]] = {
    "self": {},
    "no weights": {"call": {"need_weights": False}},
    "weights of heads": {"call": {"average_attn_weights": False}},
    "samples first": {"make": {"batch_first": True}},
    "no biases": {"make": {"bias": False}},
    "added keys": {"make": {"add_bias_kv": True, "add_zero_attn": True}},
    "added keys, masks, no weights": {
        "make": {"add_bias_kv": True, "add_zero_attn": True}, "call": {"need_weights": False}, "padding": "bool",
        "mask": "bool",
    },
    "other widths": {"make": {"kdim": 12, "vdim": 20}, "keys": "apart"},
    "keys of another": {"keys": "memory"},
    "keys of another, samples first": {"keys": "memory", "make": {"batch_first": True}},
    "keys and values apart": {"keys": "apart"},
    "query and keys the same": {"keys": "values"},
    "padding": {"padding": "bool"},
    "added padding": {"padding": "float", "mask": "float"},
    "mask": {"mask": "bool", "call": {"need_weights": False}},
    "mask of heads": {"mask": "heads", "padding": "bool", "call": {"need_weights": False}},
    "mask of heads and weights": {"mask": "heads"},
    "learned bias": {"mask": "learned"},
    "learned bias, no weights": {"mask": "learned", "call": {"need_weights": False}},
    "learned bias of heads": {"mask": "learned heads"},
    "causal": {"mask": "causal", "call": {"need_weights": False, "is_causal": True}},
    "causal with weights": {"mask": "causal", "call": {"is_causal": True}},
    "causal with padding": {"mask": "causal", "padding": "bool", "call": {"need_weights": False, "is_causal": True}},
    "one sample": {"single": True},
    "one sample with masks": {"single": True, "padding": "bool", "mask": "heads", "call": {"need_weights": False}},
}  # fmt: skip


class Attending(nn.Module):  # an attention between layers of its own, so that gradients of what it is given count
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = case.get("make", {})
        self.before = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, made.get("kdim", WIDTH))
        self.values = nn.Linear(WIDTH, made.get("vdim", WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **made)
        for name, parameter in self.attention.named_parameters():
            if "bias" in name:
                nn.init.normal_(parameter)  # torch makes them zero
        if case.get("mask", "").startswith("learned"):
            samples = 1 if case.get("single") else SAMPLES
            heads = (samples * HEADS,) if "heads" in case["mask"] else ()
            self.bias = nn.Parameter(torch.randn(*heads, LENGTH, LENGTH))
        self.case = case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        case = self.case
        generator = torch.Generator().manual_seed(1)
        x = self.before(x)
        keys, values = x, x
        length = LENGTH
        if case.get("keys") == "memory":
            length = 5
            keys = values = self.keys(x.narrow(int(self.attention.batch_first), 0, length))
        elif case.get("keys") == "apart":
            keys, values = self.keys(x), self.values(x)
        elif case.get("keys") == "values":
            values = self.values(x)
        given = dict(case.get("call", {}))
        samples = 1 if case.get("single") else SAMPLES
        if "padding" in case:
            hidden = torch.zeros(samples, length, dtype=torch.bool)
            hidden[0, -2:] = True
            padding = hidden if case["padding"] == "bool" else torch.randn(samples, length, generator=generator).to(x)
            given["key_padding_mask"] = padding[0] if case.get("single") else padding
        mask: Any = {
            "bool": torch.rand(LENGTH, length, generator=generator) > 0.8,
            "float": torch.randn(LENGTH, length, generator=generator).to(x),
            "heads": torch.rand(samples * HEADS, LENGTH, length, generator=generator) > 0.8,
            "causal": torch.ones(LENGTH, length, dtype=torch.bool).triu(1),
        }.get(case.get("mask", ""), getattr(self, "bias", None))
        if mask is not None:
            given["attn_mask"] = mask
        output, weights = self.attention(x, keys, values, **given)
        loss = (output.sin() * torch.arange(1.0, 1 + output.numel()).view_as(output).cos()).sum()
        if weights is not None:
            loss = loss + (weights.sin() * torch.arange(1.0, 1 + weights.numel()).view_as(weights).cos()).sum()
        return loss


def given(case: dict[str, Any], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    if case.get("single"):
        return torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    shape = (SAMPLES, LENGTH) if case.get("make", {}).get("batch_first") else (LENGTH, SAMPLES)
    return torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)


def trained(case: dict[str, Any], tensor: int) -> tuple[list[float], dict[str, torch.Tensor], list[int], float]:
    model = Attending(case).double()
    engine, *_ = zeromesh.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
            "mesh": {"tensor": tensor},
        },
    )
    losses = []
    for step in range(3):
        loss = engine(given(case, step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    first = next(p for p in engine.module.attention.parameters() if p.ndim == 2)
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    with torch.no_grad():
        last = float(engine.eval()(given(case, 3)))
    return losses, state, list(first.shape), last


def plain(case: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], float]:
    model = Attending(case).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(3):
        loss = model(given(case, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, model.state_dict(), float(model.eval()(given(case, 3)))


@pytest.mark.some(7)
@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_attention_of_torch_is_split_by_heads_whatever_it_is_asked_for(name: str, tensor: int) -> None:
    losses, state, last = plain(CASES[name])
    whole = next(p for p in Attending(CASES[name]).attention.parameters() if p.ndim == 2)
    for found in run_ranks(trained, tensor, CASES[name], tensor):
        assert found[2] == [whole.shape[0] // tensor, whole.shape[1]]
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[3] == pytest.approx(last, rel=1e-9)
        for key, want in state.items():
            assert torch.allclose(found[1][key], want, rtol=1e-9, atol=1e-9), key


class Translator(nn.Module):
    def __init__(self, batch_first: bool = True, dropout: float = 0.0, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, WIDTH)
        both = {"dim_feedforward": 24, "batch_first": batch_first, "dropout": dropout, **more}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, **both), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, **both), 2)
        self.head = nn.Linear(WIDTH, 32)
        self.batch_first = batch_first

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = source == 0
        if not self.batch_first:
            source, target = source.t(), target.t()
        memory = self.encoder(self.embedding(source), src_key_padding_mask=hidden)
        causal = nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
        x = self.decoder(self.embedding(target), memory, causal, memory_key_padding_mask=hidden, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def sentences(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    source = torch.randint(1, 32, (4, 12), generator=generator)
    source[0, -4:] = 0
    return source, torch.randint(1, 32, (4, 8), generator=generator)


def translate(made: dict[str, Any], settings: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], float]:
    engine, *_ = zeromesh.initialize(
        model=Translator(**made).double(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            **settings,
        },
    )
    losses = []
    for step in range(3):
        loss = engine(*sentences(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    with torch.no_grad():
        return losses, state, float(engine.eval()(*sentences(3)))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("made", "settings"),
    [
        ({}, {"mesh": {"tensor": 2}}),
        ({"batch_first": False, "norm_first": True}, {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 3}}),
        ({"activation": "gelu"}, {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}}),
        ({"activation": nn.Softmax(-1)}, {"mesh": {"tensor": 2}}),
        ({"batch_first": False}, {"mesh": {"tensor": 4}, "tensor_parallel": {"sequence": True}}),
    ],
    ids=["post-norm", "pre-norm, sharded", "sequence", "softmax", "sequence, four ranks"],
)
def test_transformers_of_torch_are_split(made: dict[str, Any], settings: dict[str, Any]) -> None:
    model = Translator(**made).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        loss = model(*sentences(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        last = float(model.eval()(*sentences(3)))
    for found, state, without in run_ranks(translate, settings["mesh"]["tensor"], made, settings):
        assert found == pytest.approx(losses, rel=1e-9)
        assert without == pytest.approx(last, rel=1e-9)
        for key, want in model.state_dict().items():
            assert torch.allclose(state[key], want, rtol=1e-9, atol=1e-9), key


def test_dropped_weights_differ_between_ranks_and_all_else_is_alike() -> None:
    settings = {"mesh": {"tensor": 2}, "seed": 3}
    found = run_ranks(translate, 2, {"dropout": 0.2}, settings)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def fail(case: dict[str, Any], settings: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r".") as failure:
        zeromesh.initialize(
            model=Attending(case).double(),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                **settings,
            },
        )
    return str(failure.value)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"attention.out_proj": "rowwise"}, "attention.out_proj is not called by attention, .* the style heads"),
        ({"attention": "colwise"}, "attention is a MultiheadAttention, which the style colwise does not fit"),
        ({"before": "heads"}, r"before is a Linear, which the style heads does not .* torch.nn.MultiheadAttention"),
    ],
)
def test_rules_that_do_not_fit_attention_of_torch_are_refused(plan: dict[str, str], said: str) -> None:
    (found, _) = run_ranks(fail, 2, {}, {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": plan}})
    assert re.search(said, found), found


def test_heads_that_ranks_do_not_divide_are_refused_with_the_sizes_that_work() -> None:
    (found, *_) = run_ranks(fail, 3, {}, {"mesh": {"tensor": 3}})
    assert "attention (heads): 4 heads of width 4 cannot be split over 3 ranks" in found
    assert "2 and 4" in found
