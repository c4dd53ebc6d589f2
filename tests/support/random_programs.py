"""Models drawn from a seed: layers, with the functions between them that users write, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEAD, LENGTH = 96, 16, 4, 8

# Function of activations of shape (batch, tokens, width), all of one width, to one of any width. Values stay bounded.
Function = Callable[..., Tensor]


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, HEAD).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).transpose(-1, -2) / HEAD**0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return joined(F.softmax(scores.masked_fill(later, float("-inf")), -1) @ heads(v))


def attention_of_interleaved(x: Tensor) -> Tensor:
    """Split each group of heads into queries, keys and values, as fused layers of GPT-NeoX do."""
    q, k, v = x.tile(1, 1, 3).view(*x.shape[:2], -1, 3, HEAD).unbind(3)
    return joined(F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v))))


def attention_over_shared_keys(x: Tensor, y: Tensor) -> Tensor:
    k = heads(y)[:, :1].expand(-1, x.shape[-1] // HEAD, -1, -1)
    return joined(F.scaled_dot_product_attention(heads(x), k, k))


def mixed_by_einsum(x: Tensor, y: Tensor) -> Tensor:
    weights = torch.einsum("btw,bsw->bts", x, y).softmax(-1)
    return torch.einsum("bts,bsw->btw", weights, x)


def gated(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return F.silu(one) * torch.tanh(other)


def in_thirds(x: Tensor) -> Tensor:
    a, b, c = x.tile(1, 1, 3).split(x.shape[-1], dim=2)
    return a * torch.sigmoid(b) + 0.5 * c


def written_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z += 0.5 * y
    z[..., 0] = 0
    z[:, 1:] = z[:, 1:] * 0.5
    return z.mul_(0.9)


def by_condition(x: Tensor, y: Tensor) -> Tensor:
    return x if float(x.detach().abs().mean()) > 0.3217 else y


def by_width(x: Tensor) -> Tensor:
    return x + 1 if x.shape[-1] > 2 * WIDTH else x - 1


def top(x: Tensor) -> Tensor:
    return torch.tanh(x) * x.topk(4, -1).values.mean(-1, keepdim=True)


def shuffled(x: Tensor) -> Tensor:
    return x.index_select(-1, torch.arange(x.shape[-1] - 1, -1, -1, device=x.device))


def stacked(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack((x, y), 2).mean(2)


def normal_by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


BY_COUNT: dict[int, list[Function]] = {  # of activations that functions take
    1: [
        F.gelu, F.relu, torch.tanh, gated, gated, in_thirds, attention_of_interleaved, by_width, top, shuffled,
        normal_by_hand,
        lambda x: F.softmax(x, -1),
        lambda x: F.dropout(x, 0.0),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x.cumsum(1) / LENGTH,
        lambda x: x.cumsum(-1) / WIDTH,
        lambda x: x.flip(-1),
        lambda x: x.roll(1, 1),
        lambda x: x.roll(1, -1),
        lambda x: x[..., : x.shape[-1] // 2],
        lambda x: x[..., ::2],
        lambda x: x[:, :1] + x,
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.unflatten(-1, (-1, HEAD)).flip(-1).flatten(2),
        lambda x: x.reshape(x.shape[0] * x.shape[1], -1).view(x.shape),
        lambda x: x.reshape(-1, 2, x.shape[-1] // 2).sum(1, keepdim=True).expand(-1, 2, -1).reshape(x.shape),
        lambda x: heads(x).amax((1, 3)).unsqueeze(-1) * torch.tanh(x),
        lambda x: checkpoint(lambda y: torch.sin(y) * y, x, use_reentrant=False),
    ],
    2: [
        attention_over_shared_keys, mixed_by_einsum, written_in_place, by_condition, stacked,
        lambda x, y: x + y,
        lambda x, y: x + y.detach(),
        lambda x, y: x * torch.sigmoid(y),
        lambda x, y: torch.cat((x, y), -1),
        lambda x, y: torch.where(x > y, x, 0.5 * y),
    ],
    3: [attention, attention, attention_by_hand],
}  # fmt: skip
FUNCTIONS = [(function, count) for count, functions in BY_COUNT.items() for function in functions]


class Scale(nn.Module):
    """A parameter of each entry of the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Program(nn.Module):
    """Steps drawn from a seed, each a layer or a function of earlier activations, and a loss."""

    def __init__(self, seed: int, steps: int = 14) -> None:
        super().__init__()
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[Function | int, tuple[int, ...]]] = []  # a function or the number of a layer; its inputs
        widths = [WIDTH]
        while len(self.steps) < steps:
            width = widths[-1] if drawn.random() < 0.7 else drawn.choice(widths)
            recent = [place for place, one in enumerate(widths) if one == width][-3:]
            if drawn.random() < 0.5:
                self.steps.append((len(self.layers), (drawn.choice(recent),)))
                wide = drawn.choice([1, 1, 2, 3]) * WIDTH
                linear = nn.Linear(width, wide, bias=drawn.random() < 0.7)
                self.layers.append(
                    drawn.choice([linear, linear, linear, nn.LayerNorm(width), nn.RMSNorm(width), Scale(width)])
                )
                widths.append(wide if self.layers[-1] is linear else width)
                continue
            function, count = drawn.choice(FUNCTIONS)
            wide = function(*[torch.zeros(1, LENGTH, width)] * count).shape[-1]
            if wide % (2 * HEAD) == 0 and wide <= 4 * WIDTH:
                self.steps.append((function, tuple(drawn.choice(recent) for _ in range(count))))
                widths.append(wide)
        self.last = nn.ModuleList(nn.Linear(width, WIDTH) for width in widths[-3:])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        held = [self.tokens(ids)]
        for step, places in self.steps:
            function = self.layers[step] if isinstance(step, int) else step
            held.append(function(*(held[place] for place in places)))
        logits = self.head(sum(layer(torch.tanh(x)) for layer, x in zip(self.last, held[-3:], strict=True)))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
