"""Modules as users write them, of classes that nothing is known of, with the plans that an expert gives them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, HEAD, KEYS = 32, 4, 8, 2
Maker = Callable[[], nn.Module]
LONGEST = 32


class NanoAttention(nn.Module):
    """nanoGPT's."""

    def __init__(self, dropout: float = 0.0, flash: bool = True) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = HEADS, WIDTH, dropout, flash
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MinAttention(NanoAttention):
    """minGPT's, with scores that it computes itself."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1, flash=False)


class NanoMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.c_proj, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class LitAttention(nn.Module):
    """lit-gpt's: queries, keys and values of a group lie together."""

    def __init__(self, groups: int = KEYS) -> None:
        super().__init__()
        self.groups, self.n_head, self.head_size = groups, HEADS, HEAD
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * groups) * HEAD)
        self.proj = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _C = x.size()
        q_per_kv = self.n_head // self.groups
        qkv = self.attn(x).view(B, T, self.groups, q_per_kv + 2, self.head_size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        k = k.expand(B, self.groups, q_per_kv, T, self.head_size)
        v = v.expand(B, self.groups, q_per_kv, T, self.head_size)
        q, k, v = (one.reshape(B, -1, T, self.head_size) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(B, T, self.head_size * self.n_head))


class LlamaAttention(nn.Module):
    """Llama's own code: grouped keys, rotary embeddings as complex numbers."""

    def __init__(self, keys: int = KEYS) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.n_rep, self.head_dim = HEADS, keys, HEADS // keys, HEAD
        self.wq = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(WIDTH, keys * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, keys * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def repeat(self, x: Tensor) -> Tensor:
        B, T, heads, width = x.shape
        x = x[:, :, :, None, :].expand(B, T, heads, self.n_rep, width)
        return x.reshape(B, T, heads * self.n_rep, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_local_heads, self.head_dim)
        k = self.wk(x).view(B, T, self.n_local_kv_heads, self.head_dim)
        v = self.wv(x).view(B, T, self.n_local_kv_heads, self.head_dim)
        k, v = self.repeat(k), self.repeat(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        y = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, -1))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedGatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * value)


class MultiQueryAttention(nn.Module):
    """One head of keys and values, in one fused layer with the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 2 * HEAD), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split([C, HEAD, HEAD], dim=-1)
        q = q.view(B, T, HEADS, HEAD).transpose(1, 2)
        y = (q @ k.unsqueeze(1).transpose(-2, -1) / HEAD**0.5).softmax(-1) @ v.unsqueeze(1)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class NormedAttention(nn.Module):
    """Queries and keys are normed: each head by itself, or all heads together."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each, self.heads = each, HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm = (RMSNorm(HEAD if each else WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if not self.each:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (one.view(B, T, self.heads, HEAD).transpose(1, 2) for one in (q, k, v))
        if self.each:
            q, k = self.q_norm(q), self.k_norm(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


class BiasedAttention(nn.Module):
    """Scores with a bias per head: ALiBi's slopes, T5's buckets of distances, or a scale that is learnt."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.n_heads, self.d_kv, self.inner_dim = kind, HEADS, HEAD, WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float())
        if kind == "buckets":
            self.relative = nn.Embedding(8, HEADS)
        elif kind == "scale":
            self.scale = nn.Parameter(torch.ones(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        B, T = x.shape[:2]

        def shape(y: Tensor) -> Tensor:
            return y.view(B, -1, self.n_heads, self.d_kv).transpose(1, 2)

        q, k, v = (shape(layer(x)) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2)) / 4
        distances = torch.arange(T, device=x.device)[None, :] - torch.arange(T, device=x.device)[:, None]
        if self.kind == "alibi":
            scores = scores + self.slopes.view(-1, 1, 1) * distances
        elif self.kind == "buckets":
            scores += self.relative(distances.clamp(-4, 3) + 4).permute(2, 0, 1).unsqueeze(0)
        else:
            scores = scores * self.scale
        y = torch.matmul(scores.softmax(-1), v)
        return self.o(y.transpose(1, 2).contiguous().view(B, -1, self.inner_dim))


class ImageAttention(nn.Module):
    """timm's, of vision transformers; queries, keys and values may be scaled together."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.register_buffer("each", torch.ones(3 * WIDTH) if scaled else None)
        self.num_heads, self.scale = HEADS, HEAD**-0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        y = self.qkv(x) if self.each is None else self.qkv(x) * self.each
        qkv = y.reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class CrossAttention(nn.Module):
    """Attention of a diffusion model: keys and values come from another sequence; the output is two layers."""

    def __init__(self, context: int = 24) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_k, self.to_v = (nn.Linear(context, WIDTH, bias=False) for _ in range(2))
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        B, h = x.shape[0], self.heads
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (y.reshape(B, y.shape[1], h, -1).transpose(1, 2).reshape(B * h, y.shape[1], -1) for y in (q, k, v))
        y = torch.einsum("bij,bjd->bid", (torch.einsum("bid,bjd->bij", q, k) / HEAD**0.5).softmax(-1), v)
        return self.to_out(y.reshape(B, h, -1, y.shape[-1]).transpose(1, 2).reshape(B, x.shape[1], -1))


class GridAttention(nn.Module):
    """Attention of a U-Net, over all places of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(4, WIDTH), HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        y = self.norm(x).view(B, C, H * W).transpose(1, 2)
        q, k, v = self.qkv(y).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (self.heads, C // self.heads)).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(y).transpose(1, 2).view(B, C, H, W)


def chain() -> nn.Module:
    """DLRM's layers for its numbers."""
    layers: list[nn.Module] = []
    for one, other in ((32, 64), (64, 48), (48, 64), (64, 32)):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers)


class ParallelBlock(nn.Module):
    """Attention and MLP read the same, and are summed (GPT-J)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gamma = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        h = self.norm(x)
        q, k, v = (y(h).view(B, T, HEADS, HEAD).transpose(1, 2) for y in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        return x + self.gamma * (self.o(y) + self.down(F.gelu(self.up(h))))


class FlatBlock(ParallelBlock):
    """The same one after the other, in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        h = self.norm(x)
        q, k, v = (y(h).view(B, T, HEADS, HEAD).transpose(1, 2) for y in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.norm(x) * self.gamma)))


class BertAttention(nn.Module):
    """Columns in one module, and rows in another one beside it."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = HEADS
            self.asks, self.keys, self.gives = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            parts = (y(x).unflatten(-1, (self.count, -1)).transpose(1, 2) for y in (self.asks, self.keys, self.gives))
            return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, y: Tensor, x: Tensor) -> Tensor:
            return self.norm(self.last(y) + x)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = self.Inner(), self.Outer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x), x)


class Scaled(torch.autograd.Function):
    """A function with a backward of its own, which sums over all of what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum().reshape(1)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x) / x.shape[-1]


@lru_cache
def ramp(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device) / length


class Odd(nn.Module):
    """Two layers with something between that needs all of the width."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.dim, self.heads = kind, WIDTH, HEADS
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "convolution":
            self.between = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        elif kind == "mixed heads":
            self.between = nn.Linear(HEADS, HEADS, bias=False)
        elif kind == "batch norm":
            self.between = nn.BatchNorm1d(WIDTH)
        elif kind == "dropout of the whole":
            self.dropout = nn.Dropout(0.5)
        elif kind == "running mean":
            self.register_buffer("mean", torch.zeros(WIDTH))
        elif kind == "own backward":
            self.scale = nn.Parameter(torch.ones(1))
        elif kind == "hook of a layer":
            self.one.register_forward_hook(lambda _, args, output: output - output.mean())

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.kind == "softmax":
            y = y.softmax(-1)
        elif self.kind == "norm by reshape":
            y = y / (y.reshape(*y.shape[:-1], -1, 4).pow(2).sum((-1, -2))[..., None] + 1)
        elif self.kind == "mean":
            y = y - y.mean(-1, keepdim=True)
        elif self.kind == "dropout of the whole":
            x = self.dropout(x)
        elif self.kind == "dropout without an attribute":
            y = F.dropout(y, 0.5, self.training)
        elif self.kind == "noise":
            y = y + torch.randn_like(y)
        elif self.kind == "skipped at random":
            return x + self.two(F.relu(y)) * (random.random() < 0.5)
        elif self.kind == "gate from outside":
            y = y * x.mean(-1, keepdim=True)
        elif self.kind == "convolution" or self.kind == "batch norm":
            y = self.between(y.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "mixed heads":
            B, T, _ = y.shape
            y = self.between(y.view(B, T, self.heads, -1).transpose(2, 3)).transpose(2, 3).reshape(B, T, -1)
        elif self.kind == "scale by the width":
            y = y.tanh() / math.sqrt(y.shape[-1])
        elif self.kind == "running mean":
            y = y - self.mean
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
        elif self.kind == "softmax in evaluation" and not self.training:
            y = y.softmax(-1)
        elif self.kind == "loss of its own":
            self.aux = y.abs().mean()
        elif self.kind == "own backward":
            y = Scaled.apply(y, self.scale)
        elif self.kind == "script":
            y = scripted(y)
        elif self.kind == "vmap":
            y = torch.func.vmap(lambda row: row / row.abs().sum())(y.reshape(-1, WIDTH)).view_as(y)
        elif self.kind == "cached table":
            y = y * ramp(WIDTH, y.device).type_as(y)
        elif self.kind == "a value as a number":
            y = y * (1 + y.mean().item())
        elif self.kind == "checkpoint":
            y = checkpoint(lambda z: F.gelu(z) * z.shape[-1] ** -0.5, y, use_reentrant=False)
        elif self.kind == "reentrant checkpoint":
            y = checkpoint(lambda z: F.gelu(z) * z.shape[-1] ** -0.5, y, use_reentrant=True)
        elif self.kind == "in place":
            y = F.relu(y.mul_(2), inplace=True)
        elif self.kind == "written at places":
            y = y.clone()
            y[..., 0] = 0
            y[..., 10:20] += 1
        elif self.kind == "data written":
            y.data.mul_(0.5)
        elif self.kind == "hook of a gradient":
            y.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        elif self.kind == "largest of all":
            y = y * (y >= y.topk(8, -1).values[..., -1:])
        elif self.kind == "weight read":
            return F.linear(F.relu(y), self.two.weight, self.two.bias)
        return x + self.two(F.relu(y))


class ScaledAttention(nn.Module):
    """The scale is an attribute that must stay, and heads one that must be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.h = WIDTH, HEADS
        self.asks, self.keys, self.gives, self.ends = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (y(x).reshape(B, T, self.h, -1).transpose(1, 2) for y in (self.asks, self.keys, self.gives))
        y = ((q @ k.mT) / math.sqrt(self.dim)).softmax(-1) @ v
        return self.ends(y.transpose(1, 2).flatten(2))


class MaskedAttention(ScaledAttention):
    """A mask of samples times heads."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (y(x).reshape(B, T, self.h, -1).transpose(1, 2) for y in (self.asks, self.keys, self.gives))
        q, k, v = (y.reshape(B * self.h, T, -1) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.ends(y.reshape(B, self.h, T, -1).transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Row:
    """A module, and the plan that an expert would give its layers."""

    make: Maker
    plan: dict[str, Any]
    inputs: str = "tokens"  # or images, rows, two, mask
    most: int = 4  # ranks


def fused(*sections: int) -> dict[str, Any]:
    return {"style": C, "sections": list(sections)}


C, R, G = "colwise_parts", "rowwise_parts", "colwise_gather_output"
THIRDS = fused(WIDTH, WIDTH, WIDTH)
SELF = {"q": C, "k": C, "v": C, "o": R}
PAIR, APART = {"one": C, "two": R}, {"one": G, "two": G}

ROWS: dict[str, Row] = {
    "nanoGPT": Row(NanoAttention, {"c_attn": THIRDS, "c_proj": R}),
    "minGPT": Row(MinAttention, {"c_attn": THIRDS, "c_proj": R}),
    "nanoGPT MLP": Row(NanoMLP, {"c_fc": C, "c_proj": R}),
    "lit-gpt": Row(LitAttention, {"attn": C, "proj": R}, most=2),
    "Llama": Row(LlamaAttention, {"wq": C, "wk": C, "wv": C, "wo": R}, most=2),
    "gated MLP": Row(GatedMLP, {"w1": C, "w3": C, "w2": R}),
    "fused gated MLP": Row(FusedGatedMLP, {"up": fused(2 * WIDTH, 2 * WIDTH), "down": R}),
    "multi-query": Row(MultiQueryAttention, {"qkv": fused(WIDTH, HEAD, HEAD), "out": R}),
    "norm per head": Row(lambda: NormedAttention(True), SELF),
    "norm of all heads": Row(lambda: NormedAttention(False), SELF),
    "ALiBi": Row(lambda: BiasedAttention("alibi"), SELF),
    "relative bias": Row(lambda: BiasedAttention("buckets"), SELF),
    "scale per head": Row(lambda: BiasedAttention("scale"), SELF),
    "vision transformer": Row(ImageAttention, {"qkv": THIRDS, "proj": R}),
    "cross-attention": Row(CrossAttention, {"to_q": C, "to_k": C, "to_v": C, "to_out.0": R}, inputs="two"),
    "U-Net": Row(GridAttention, {"qkv": THIRDS, "out": R}, inputs="images"),
    "DLRM": Row(chain, {"0": C, "2": R, "4": C, "6": R}, inputs="rows"),
    "parallel block": Row(ParallelBlock, {**SELF, "up": C, "down": R}),
    "flat block": Row(FlatBlock, {**SELF, "up": C, "down": R}),
    "rows beside columns": Row(BertAttention, {"inner.asks": C, "inner.keys": C, "inner.gives": C, "outer.last": R}),
    "mixed heads": Row(lambda: Odd("mixed heads"), {"one": C, "between": R, "two": G}),
    "scale and heads": Row(ScaledAttention, {"asks": C, "keys": C, "gives": C, "ends": R}),
    "scaled sections": Row(lambda: ImageAttention(True), {"qkv": THIRDS, "proj": R}),
    "mask of samples and heads": Row(MaskedAttention, {"asks": C, "keys": C, "gives": C, "ends": R}, inputs="mask"),
    **{
        kind: Row(lambda kind=kind: Odd(kind), plan)
        for kind, plan in {
            "softmax": APART,
            "softmax in evaluation": PAIR,
            "norm by reshape": PAIR,
            "mean": PAIR,
            "convolution": APART,
            "batch norm": APART,
            "scale by the width": PAIR,
            "gate from outside": PAIR,
            "dropout of the whole": PAIR,
            "dropout without an attribute": PAIR,
            "noise": PAIR,
            "skipped at random": PAIR,
            "running mean": PAIR,
            "loss of its own": PAIR,
            "own backward": APART,
            "script": APART,
            "vmap": APART,
            "cached table": PAIR,
            "a value as a number": PAIR,
            "checkpoint": APART,  # what is computed again is not known to be a part
            "reentrant checkpoint": APART,
            "in place": PAIR,
            "written at places": APART,
            "data written": PAIR,
            "hook of a gradient": PAIR,
            "hook of a layer": PAIR,
            "largest of all": PAIR,
            "weight read": {"one": G},
        }.items()
    },
}


class Model(nn.Module):
    """Two blocks of a module, an input of its kind, and a loss."""

    def __init__(self, row: Row, blocks: int = 2) -> None:
        super().__init__()
        self.inputs = row.inputs
        self.tokens = nn.Embedding(96, WIDTH)
        if row.inputs == "two":
            self.context = nn.Linear(WIDTH, 24)
        self.blocks = nn.ModuleList(row.make() for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 96)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            h = norm(x)
            if self.inputs == "two":
                y = block(h, torch.tanh(self.context(h.flip(1)[:, 1:])))
            elif self.inputs == "mask":
                seen = (ids > 48)[:, None] | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
                y = block(h, seen.repeat_interleave(HEADS, 0))
            elif self.inputs == "images":
                y = block(h.transpose(1, 2).unflatten(-1, (2, -1))).flatten(2).transpose(1, 2)
            else:
                y = block(h.flatten(0, 1)).view_as(h) if self.inputs == "rows" else block(h)
            x = x + y
        logits = self.head(x)
        if labels is None:
            return logits
        more = sum(getattr(block, "aux", 0.0) for block in self.blocks)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + more


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """nanoGPT's, or with other attention and MLPs, whose blocks are called one after the other."""

    def __init__(self, attention: Maker = NanoAttention, mlp: Maker = NanoMLP, blocks: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(96, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.h = nn.ModuleList(Block(attention(), mlp()) for _ in range(blocks))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


DECODERS: dict[str, tuple[Maker, Maker]] = {
    "nanoGPT": (NanoAttention, NanoMLP),
    "Llama": (LlamaAttention, GatedMLP),
    "relative bias": (lambda: BiasedAttention("buckets"), NanoMLP),
}
