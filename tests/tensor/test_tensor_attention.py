"""``torch.nn.MultiheadAttention`` and torch's transformers, split by heads: all that they can be asked for."""

from typing import Any

import pytest
import torch
from torch import nn

from harness import on_ranks, run_ranks
from same_training import require_same_training, train_on_engine

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


@pytest.mark.some(7)
@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
@on_ranks("tensor")
def test_attention_of_torch_is_split_by_heads_whatever_it_is_asked_for(name: str, tensor: int) -> None:
    case = CASES[name]
    settings = {"train_micro_batch_size_per_gpu": SAMPLES, "mesh": {"tensor": tensor}}
    shapes = require_same_training(lambda: Attending(case), lambda step: (given(case, step),), settings, lr=0.01)
    first, whole = next((n, p.shape) for n, p in Attending(case).attention.named_parameters() if p.ndim == 2)
    assert shapes[f"attention.{first}"] == (whole[0] // tensor, whole[1])


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


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("made", "settings", "ranks"),
    [
        ({}, {}, 2),
        ({"batch_first": False, "norm_first": True}, {"zero_optimization": {"stage": 3}}, 2),
        ({"activation": "gelu"}, {"tensor_parallel": {"sequence": True}}, 2),
        ({"activation": nn.Softmax(-1)}, {}, 2),
        pytest.param({"batch_first": False}, {"tensor_parallel": {"sequence": True}}, 4, marks=pytest.mark.full),
    ],
    ids=["post-norm", "pre-norm, sharded", "sequence", "softmax", "sequence, four ranks"],
)
@on_ranks("ranks")
def test_transformers_of_torch_are_split(made: dict[str, Any], settings: dict[str, Any], ranks: int) -> None:
    settings = {"train_micro_batch_size_per_gpu": 4, "mesh": {"tensor": ranks}, **settings}
    require_same_training(lambda: Translator(**made), sentences, settings)


def translate_with_dropout() -> Any:
    settings = {"train_micro_batch_size_per_gpu": 4, "mesh": {"tensor": 2}, "seed": 3}
    return train_on_engine(Translator(dropout=0.2).double(), sentences, settings)


def test_dropped_weights_differ_between_ranks_and_all_else_is_alike() -> None:
    found = run_ranks(translate_with_dropout, 2)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


@pytest.mark.parametrize(
    ("ranks", "plan", "said"),
    [
        (2, {"attention.out_proj": "rowwise"}, "attention.out_proj is not called by attention, .* the style heads"),
        (2, {"attention": "colwise"}, "attention is a MultiheadAttention, which the style colwise does not fit"),
        (2, {"before": "heads"}, r"before is a Linear, which the style heads does not .* torch.nn.MultiheadAttention"),
        (3, {}, r"attention \(heads\): 4 heads of width 4 cannot be split over 3 ranks.*2 and 4"),
    ],
)
@on_ranks("ranks")
def test_rules_and_heads_that_do_not_fit_attention_of_torch_are_refused(ranks, plan, said) -> None:
    settings = {"mesh": {"tensor": ranks}, "tensor_parallel": {"plan": plan}}
    with pytest.raises(ValueError, match=said):
        train_on_engine(Attending({}).double(), lambda step: (given({}, step),), settings)
