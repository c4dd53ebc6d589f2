"""Code between the layers of a decoder: what computes over tokens, and what leaves them apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 8, 24
HEAD = WIDTH // HEADS

Code = Callable[[Any, Tensor], Tensor]  # of the module that runs it, and its activation (samples, tokens, width)


class Shifted(torch.autograd.Function):
    """Each token and the one before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.roll(-1, 1)


class Twice(torch.autograd.Function):
    """Each entry twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def own_attention(y: Tensor) -> Tensor:
    """Causal attention by matrix products."""
    length = y.shape[1]
    q = y.unflatten(2, (HEADS, HEAD)).transpose(1, 2)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ q.mT / 3).masked_fill(hidden, -1e9).softmax(-1)
    return (scores @ q).transpose(1, 2).flatten(2)


def turned(y: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of (samples, width, tokens)."""
    return function(y.transpose(1, 2)).transpose(1, 2)


def previous(y: Tensor) -> Tensor:
    """Return the token before each one."""
    return F.pad(y, (0, 0, 1, -1))


# Code that computes over tokens -> what the check says of it.
MIXES: dict[str, tuple[Code, str]] = {
    "running sum": (lambda m, y: y.cumsum(1) / LENGTH, "cumsum"),
    "other order": (lambda m, y: y.flip(1), "flip"),
    "sorted": (lambda m, y: y.sort(1).values, "sort"),
    "shift": (lambda m, y: y + y.roll(1, 1), "roll"),
    "softmax": (lambda m, y: y.softmax(-2), "softmax"),
    "products of tokens": (lambda m, y: torch.einsum("btd,bsd->bts", y, y).softmax(-1) @ y, "einsum"),
    "state": (lambda m, y: y @ (y.mT @ y) / LENGTH, "sums over the tokens"),
    "own attention": (lambda m, y: own_attention(y), "matmul"),
    "matrix over tokens": (lambda m, y: torch.ones(y.shape[1], y.shape[1], dtype=y.dtype).tril() @ y, "matmul"),
    "length": (lambda m, y: y * y.shape[1], "depend on the length of the sequence"),
    "root of the length": (lambda m, y: y / math.sqrt(y.size(1)), "depend on the length of the sequence"),
    "length as a tensor": (lambda m, y: y / torch.tensor(float(len(y[0]))), "made for the length of the sequence"),
    "places": (lambda m, y: y + torch.arange(y.shape[1], dtype=y.dtype)[None, :, None], "entry for each of the"),
    "begin of a table": (lambda m, y: y + m.table[: y.shape[1]], "entry for each of the"),
    "largest of all": (lambda m, y: y / y.abs().amax((1, 2), keepdim=True), "amax"),
    "norm of all": (lambda m, y: y / y.norm(), "norm"),
    "spread of tokens": (lambda m, y: y / y.std(1, keepdim=True), "std"),
    "mean": (lambda m, y: y - y.mean(1, keepdim=True), "mean.* sums over the tokens"),
    "detached mean": (lambda m, y: y - y.detach().mean(1, keepdim=True), "mean.* sums over the tokens"),
    "mean without gradients": (lambda m, y: y * m.mean_of(y), "mean.* sums over the tokens"),
    "number": (lambda m, y: y * abs(float(y.detach().sum())) ** 0.1, "sum"),
    "pooling": (lambda m, y: turned(y, lambda x: F.avg_pool1d(x, 3, 1, 1)), "avg_pool1d"),
    "convolution": (lambda m, y: turned(y, lambda x: F.conv1d(x, m.kernel, padding=1, groups=WIDTH)), "conv1d"),
    "Fourier transform": (lambda m, y: torch.fft.fft(torch.fft.fft(y, dim=-1), dim=-2).real, "fft"),
    "batch norm": (lambda m, y: turned(y, lambda x: F.batch_norm(x, None, None, training=True)), "batch_norm"),
    "group norm": (lambda m, y: turned(y, lambda x: F.group_norm(x, 4)), "group_norm"),
    "instance norm": (lambda m, y: turned(y, F.instance_norm), "instance_norm"),
    "norm of tokens": (lambda m, y: F.layer_norm(y, y.shape[1:]), "layer_norm"),
    "first token": (lambda m, y: y + y[:, :1], "__getitem__"),
    "last token": (lambda m, y: y + y[:, -1].unsqueeze(1), "__getitem__"),
    "first token, flat": (lambda m, y: y + y.flatten(1)[:, :WIDTH].unsqueeze(1), "__getitem__"),
    "tokens by index": (lambda m, y: y[:, torch.arange(y.shape[1] - 1, -1, -1)], "__getitem__"),
    "tokens by gather": (lambda m, y: y.gather(1, y.argsort(1)), "argsort"),
    "previous token": (lambda m, y: torch.lerp(y, previous(y), 0.3), "pad"),
    "difference": (lambda m, y: torch.cat([y[:, :1], y.diff(dim=1)], 1), "__getitem__"),
    "windows": (lambda m, y: F.pad(y, (0, 0, 1, 0)).unfold(1, 2, 1).sum(-1), "pad"),
    "samples as tokens": (lambda m, y: y + 0.5 * y.transpose(0, 1).reshape(y.shape), "add"),
    "own function": (lambda m, y: Shifted.apply(y), "roll"),
    "largest tokens": (lambda m, y: y * (y.sum(-1) >= y.sum(-1).topk(2).values[:, -1:])[..., None], "topk"),
    "written": (lambda m, y: (z := y.clone(), z.__setitem__((slice(None), 0), 0.0), z)[2], "__setitem__"),
    "any": (lambda m, y: y * 2 if bool((y > 3).any()) else y, "any"),
    "length by numpy": (lambda m, y: y / numpy.sqrt(y.shape[1]), "depend on the length of the sequence"),
    "length of a branch": (lambda m, y: y * math.log(y.shape[1]) if y.shape[1] > LENGTH - 2 else y, "depend on the"),
    "length that is kept": (lambda m, y: y * m.kept(1 / y.shape[1]), "depend on the length of the sequence"),
    "length as an epsilon": (lambda m, y: F.layer_norm(y, (WIDTH,), eps=1 / y.shape[1]), "depend on the length"),
    "length as a flag": (lambda m, y: y * (y.shape[1] > LENGTH - 2), "depend on the length of the sequence"),
    "length in a list": (lambda m, y: y * torch.tensor([float(y.shape[1])]), "made for the length of the sequence"),
    "sum of places": (lambda m, y: y * torch.arange(y.shape[1]).sum(), "made for the length of the sequence"),
    "last of a table": (lambda m, y: y + m.table[y.shape[1] - 1], "made for the length of the sequence"),
    "mean of a table": (lambda m, y: y + m.table[: y.shape[1]].mean(0), "made for the length of the sequence"),
    "scores of a table": (lambda m, y: (y @ m.table[: y.shape[1]].mT).softmax(-1) @ m.table[: y.shape[1]], "length"),
    "groups": (lambda m, y: (z := y.unflatten(1, (4, -1)), (z - z.mean(2, keepdim=True)).flatten(1, 2))[1], "length"),
    "samples and back": (lambda m, y: y.transpose(0, 1).reshape(y.shape).cumsum(1)
                         .reshape(y.shape[1], -1, WIDTH).transpose(0, 1), "length"),
    "first of ones": (lambda m, y: (k := torch.ones(y.shape[1], 1), k.__setitem__(0, 0.0), y * k)[2], "entry for each"),
    "copied places": (lambda m, y: (k := torch.zeros(y.shape[1]), k.copy_(torch.arange(y.shape[1])), y + k[:, None])[2],
                      "entry for each|made for the length"),
    "added length": (lambda m, y: (k := torch.zeros(()), k.add_(y.shape[1]), y + k)[2], "made for the length"),
    "error that is caught": (lambda m, y: m.careless(y), "cumsum"),
    "flaws that are written": (lambda m, y: y * 2 if torch.isnan(y).logical_or_(y > 0).any() else y, "any"),
}  # fmt: skip

# Attention that is not over tokens: under context parallelism every call of it is taken for one over tokens.
OTHER_ATTENTION: dict[str, Code] = {
    "keys of a table": lambda m, y: F.scaled_dot_product_attention(
        y[:, None], *[m.table[:8].expand(y.shape[0], 1, 8, WIDTH)] * 2
    )[:, 0],
    "over samples": lambda m, y: F.scaled_dot_product_attention(*[y.transpose(0, 1)[:, None]] * 3)[:, 0].transpose(
        0, 1
    ),
    "over heads": lambda m, y: F.scaled_dot_product_attention(*[y.unflatten(2, (HEADS, HEAD))] * 3).flatten(2),
    "over the width": lambda m, y: F.scaled_dot_product_attention(*[y.flatten(0, 1)[:, None, :, None]] * 3).view(
        y.shape
    ),
}  # fmt: skip


def experts(m: Any, y: Tensor) -> Tensor:
    """Two experts of four for each token, all of which are computed."""
    weights, chosen = m.gate(y).softmax(-1).topk(2, -1)
    shares = torch.zeros_like(m.gate(y)).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
    return torch.einsum("btc,ecd,bte->btd", y, m.experts, shares)


def experts_of_rows(m: Any, y: Tensor) -> Tensor:
    """Return the same for rows of tokens, in a loop."""
    rows = y.view(-1, WIDTH)
    shares, found = m.gate(rows).softmax(-1), torch.zeros_like(rows)
    for number in range(4):
        found = found + shares[:, number : number + 1] * (rows @ m.experts[number])
    return found.view(y.shape)


class Dim(IntEnum):
    """Dims of an activation."""

    WIDTH = 2


# Code that leaves tokens apart.
APART: dict[str, Code] = {
    "nothing": lambda m, y: y,
    "activations": lambda m, y: F.silu(y) * y.sigmoid() + F.gelu(y, approximate="tanh"),
    "rows": lambda m, y: m.gate(y.view(-1, WIDTH)).view(*y.shape[:2], 4).repeat(1, 1, 8),
    "rows and back": lambda m, y: (y.reshape(-1, WIDTH) * 2).reshape(y.shape[0], y.shape[1], WIDTH),
    "addmm": lambda m, y: torch.addmm(m.kernel[:, 0, 0], y.view(-1, WIDTH), m.experts[0]).view(y.shape),
    "gated": lambda m, y: torch.cat([y.chunk(2, -1)[0] * F.gelu(y.chunk(2, -1)[1])] * 2, -1),
    "experts": experts,
    "experts of rows": experts_of_rows,
    "one expert": lambda m, y: torch.einsum("btc,ecd,bte->btd", y, m.experts,
                                            F.one_hot(m.gate(y).argmax(-1), 4).to(y.dtype)),
    "zeros": lambda m, y: y + y.new_zeros(y.shape) + torch.zeros(*y.shape[:2], 1) + torch.zeros(y.shape[:2])[..., None],
    "filled": lambda m, y: (k := torch.empty(y.shape[1], 1), k.fill_(2.0), y * k)[2],
    "written": lambda m, y: (z := torch.empty_like(y), z.__setitem__(..., y * 2), z)[2],
    "in place": lambda m, y: y.clone().mul_(0.5).add_(1).clamp_(-2, 2),
    "where": lambda m, y: torch.where(y > 0, y, y.expm1()),
    "scattered": lambda m, y: torch.zeros_like(y).scatter_(-1, y.argsort(-1), y)
                              + y.gather(dim=-1, index=y.argsort(-1)),
    "vector": lambda m, y: y * (y @ m.kernel[:, 0, 0])[..., None] + torch.linalg.vector_norm(y, dim=-1, keepdim=True),
    "other names": lambda m, y: y - y.mean(axis=-1, keepdims=True) + torch.special.softmax(y, -1),
    "copied": lambda m, y: torch.empty_like(y).copy_(y),
    "padded width": lambda m, y: F.pad(y, (0, 1))[..., :WIDTH],
    "all tokens": lambda m, y: y[:, : y.shape[1]] + y[:, 0:],
    "convolution of each": lambda m, y: turned(y, lambda x: F.conv1d(x, m.kernel[..., :1].expand(-1, WIDTH, 1))),
    "autocast": lambda m, y: m.in_16_bits(y),
    "widths in a loop": lambda m, y: torch.stack([one * n for n, one in enumerate(y.unbind(-1))], -1),
    "norm of heads": lambda m, y: F.layer_norm(y.unflatten(-1, (HEADS, HEAD)), (HEAD,)).flatten(2),
    "norm written out": lambda m, y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),
    "unit length": lambda m, y: F.normalize(y, dim=-1),
    "sorted width": lambda m, y: y.sort(-1).values + y.cumsum(-1) + y.gather(-1, y.argsort(-1)),
    "tokens in front": lambda m, y: y.movedim(1, 0).tanh().movedim(0, 1),
    "own function": lambda m, y: Twice.apply(y),
    "recomputed": lambda m, y: checkpoint(torch.tanh, y, use_reentrant=False),
    "recomputed, reentrant": lambda m, y: checkpoint(torch.tanh, y, use_reentrant=True),
    "flaws": lambda m, y: m.without_flaws(y),
    "pairs": lambda m, y: y.unflatten(1, (-1, 2)).sum(2).repeat_interleave(2, 1),
    "width": lambda m, y: y / math.sqrt(y.shape[-1]) * y.size(0),
    "NumPy's numbers": lambda m, y: y.view(*numpy.array([*y.shape[:2], 4, 8])).softmax(numpy.int64(-1)).flatten(2),
    "numbers with names": lambda m, y: y - y.mean(Dim.WIDTH, keepdim=True) + y.sort(Dim.WIDTH).values,
    "no drops": lambda m, y: F.dropout(y, 0.0) + F.dropout(y, 0.5, training=False),
}  # fmt: skip
NOISE: dict[str, Code] = {
    "dropout": lambda m, y: F.dropout(y, 0.5),
    "noise": lambda m, y: y + torch.randn_like(y) + torch.randn(*y.shape[:2], 1),
}
"""Random numbers for each entry, which one process draws otherwise."""


class Inside(nn.Module):
    """Module that runs such code."""

    table: Tensor
    kernel: Tensor

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))
        self.register_buffer("kernel", torch.ones(WIDTH, 1, 3))

    def mean_of(self, y: Tensor) -> Tensor:
        """Return the mean of the tokens, which no gradient flows through."""
        with torch.no_grad():
            return y.mean(1, keepdim=True)

    def in_16_bits(self, y: Tensor) -> Tensor:
        """Compute a layer in bf16."""
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(y.float(), self.gate.weight.float()).repeat(1, 1, 8).to(y.dtype)

    def kept(self, number: float) -> float:
        """Return the first number."""
        if not hasattr(self, "number"):
            self.number = number
        return self.number

    def careless(self, y: Tensor) -> Tensor:
        """Take what works."""
        try:
            return y.cumsum(1)
        except Exception:
            return y

    def without_flaws(self, y: Tensor) -> Tensor:
        """Raise an error for an activation that is not finite."""
        if torch.isnan(y).any() or not torch.isfinite(y).all():
            raise FloatingPointError("the activation is not finite")
        return y

    def forward(self, y: Tensor) -> Tensor:
        """Run the code."""
        return self.code(self, y)


def rotated(x: Tensor) -> Tensor:
    """Return the halves of each head in other order, one of them negative."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def by_angles(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads by angles for each token, (samples, 1, tokens, width of half a head)."""
    both = torch.cat((angles, angles), -1)
    return x * both.cos() + rotated(x) * both.sin()


# Rotary positions: of an attention, its queries or keys, and the positions (samples, tokens).
ROTARY: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "none": lambda m, x, at: x,
    "table": lambda m, x, at: by_angles(x, m.angles[at][:, None]),
    "rows of a table": lambda m, x, at: by_angles(
        x, m.angles.index_select(0, at.flatten()).unflatten(0, at.shape)[:, None]),
    "embedding": lambda m, x, at: by_angles(x, F.embedding(at, m.angles)[:, None]),
    "computed": lambda m, x, at: by_angles(x, (at[..., None].to(x.dtype) * m.rates)[:, None]),
    "einsum": lambda m, x, at: by_angles(x, torch.einsum("bt,d->btd", at.to(x.dtype), m.rates)[:, None]),
    "dots": lambda m, x, at: by_angles(x, torch.einsum("...t,d->...td", at.to(x.dtype), m.rates)[:, None]),
    "outer": lambda m, x, at: by_angles(x, torch.outer(at[0].to(x.dtype), m.rates)[None, None]),
    "product": lambda m, x, at: by_angles(x, (m.rates[None, :, None].expand(len(at), -1, 1)
                                              @ at[:, None, :].to(x.dtype)).mT[:, None]),
    "complex": lambda m, x, at: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        * torch.polar(torch.ones_like(m.angles), m.angles)[at][:, None]).flatten(3),
    "every other": lambda m, x, at: torch.stack(
        (x[..., ::2] * m.angles[at][:, None].cos(), x[..., 1::2]), -1).flatten(-2),
}  # fmt: skip


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys."""

    rates: Tensor
    angles: Tensor

    def __init__(self, rotary: str, fused: bool) -> None:
        super().__init__()
        self.rotary, self.fused = ROTARY[rotary], fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        rates = 10.0 ** -torch.arange(HEAD // 2)
        self.register_buffer("rates", rates)
        self.register_buffer("angles", torch.arange(4.0 * LENGTH)[:, None] * rates)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the attention's result for (samples, tokens, width)."""
        samples, length, _ = x.size()
        if self.fused:
            q, k, v = self.qkv(x).reshape(samples, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (one.view(samples, length, HEADS, HEAD).transpose(1, 2) for one in self.qkv(x).split(WIDTH, 2))
            k, v = (one[:, :2].repeat_interleave(2, 1) for one in (k, v))
        q, k = self.rotary(self, q, positions), self.rotary(self, k, positions)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(samples, length, WIDTH))


class Block(nn.Module):
    """Attention, and an MLP with such code before it."""

    def __init__(self, code: Code, rotary: str, fused: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(rotary, fused)
        self.second, self.inside = nn.LayerNorm(WIDTH), Inside(code)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add both to (samples, tokens, width)."""
        x = x + self.attention(self.norm(x), positions)
        return x + self.down(self.up(self.inside(self.second(x))).relu())


# Losses of logits (samples, tokens, vocabulary) and labels.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1), ignore_index=-100),
    "each": lambda x, y: (F.cross_entropy(x.mT, y, reduction="none") * (y != -100)).sum() / (y != -100).sum(),
    "log softmax": lambda x, y: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), y.flatten()),
    "gather": lambda x, y: (-x.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y != -100)).sum()
                           / (y != -100).sum(),
    "chosen": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "smooth": lambda x, y: F.cross_entropy(x.flatten(0, -2), y.flatten(), label_smoothing=0.1),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.permute(0, 2, 1), y),
}  # fmt: skip


class Decoder(nn.Module):
    """Decoder of two blocks, which returns its mean loss if there are labels."""

    def __init__(self, code: Code, rotary: str = "none", loss: str = "flat", fused: bool = False) -> None:
        super().__init__()
        self.loss = LOSSES[loss]
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(4 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(code, rotary, fused) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return the loss, or logits."""
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        x = (self.tokens(tokens) + self.places(positions)).masked_fill((tokens == 3)[..., None], 0.0)
        for block in self.blocks:
            x = block(x, positions)
        logits = self.head(self.norm(x))
        return logits if labels is None else self.loss(logits, labels)


def build(code: Code, *options: Any) -> Decoder:
    """Return such a decoder in float64."""
    torch.manual_seed(0)
    return Decoder(code, *options).double()


def batch(step: int = 0) -> dict[str, Tensor]:
    """Return tokens and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[0, :3] = -100
    return {"tokens": text[:, :-1], "labels": labels}
