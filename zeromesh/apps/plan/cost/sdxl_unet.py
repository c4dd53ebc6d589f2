"""The UNet of Stable Diffusion XL as a module: layers and shapes of ``UNet2DConditionModel`` of diffusers.

It is for the planner, which traces it without memory; it reads no weights. Podell et al., 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME = 1280  # width of the embedding of time steps
TEXT = 2048  # width of the text's tokens
POOLED = 2816  # width of the pooled text with six sizes of the picture
HEAD = 64  # width of an attention head
TOKENS = 77  # of a text
EDGE = 128  # of the latent picture, for 1,024 pixels
WIDTHS = (320, 640, 1280)
DEPTHS = (0, 2, 10)  # transformer blocks in each attention, by resolution


class _Residual(nn.Module):
    def __init__(self, width: int, result: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, width), nn.Conv2d(width, result, 3, padding=1)
        self.time_emb_proj = nn.Linear(TIME, result)
        self.norm2, self.conv2 = nn.GroupNorm(32, result), nn.Conv2d(result, result, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(width, result, 1) if width != result else nn.Identity()

    def forward(self, picture: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(picture)))
        hidden = hidden + self.time_emb_proj(F.silu(time))[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        result: Tensor = self.conv_shortcut(picture) + hidden
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, source: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k, self.to_v = nn.Linear(source, width, bias=False), nn.Linear(source, width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, tokens: Tensor, source: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(2, (-1, HEAD)).transpose(1, 2)
            for layer, x in ((self.to_q, tokens), (self.to_k, source), (self.to_v, source))
        ]
        result: Tensor = self.to_out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return result


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn1 = nn.LayerNorm(width), _Attention(width, width)
        self.norm2, self.attn2 = nn.LayerNorm(width), _Attention(width, TEXT)
        self.norm3, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor, text: Tensor) -> Tensor:
        normed = self.norm1(tokens)
        tokens = tokens + self.attn1(normed, normed)
        tokens = tokens + self.attn2(self.norm2(tokens), text)
        value, gate = self.up(self.norm3(tokens)).chunk(2, dim=-1)
        result: Tensor = tokens + self.down(value * F.gelu(gate))
        return result


class _Transformer(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm, self.proj_in = nn.GroupNorm(32, width), nn.Linear(width, width)
        self.transformer_blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.proj_out = nn.Linear(width, width)

    def forward(self, picture: Tensor, text: Tensor) -> Tensor:
        tokens = self.proj_in(self.norm(picture).flatten(2).transpose(1, 2))
        for block in self.transformer_blocks:
            tokens = block(tokens, text)
        result: Tensor = picture + self.proj_out(tokens).transpose(1, 2).unflatten(2, picture.shape[2:])
        return result


class _Level(nn.Module):
    """Layers at one resolution, and the convolution to the next one."""

    def __init__(self, inputs: list[int], width: int, depth: int, resize: nn.Module | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Residual(size, width) for size in inputs)
        self.attentions = nn.ModuleList(_Transformer(width, depth) for _ in inputs if depth)
        self.resize = resize

    def steps(self, picture: Tensor, time: Tensor, text: Tensor, skips: list[Tensor] | None) -> Iterator[Tensor]:
        """Yield the picture after each pair of layers; ``skips`` are pictures of the way down, the last ones first."""
        for place, resnet in enumerate(self.resnets):
            picture = resnet(picture if skips is None else torch.cat([picture, skips.pop()], dim=1), time)
            picture = self.attentions[place](picture, text) if self.attentions else picture
            yield picture
        if self.resize is not None:
            yield self.resize(picture)


class SdxlUnet(nn.Module):
    """UNet with 2,567,463,684 parameters."""

    def __init__(self) -> None:
        super().__init__()
        small, middle, wide = WIDTHS
        self.conv_in = nn.Conv2d(4, small, 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(small, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.add_embedding = nn.Sequential(nn.Linear(POOLED, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        entries = [[small, small], [small, middle], [middle, wide]]
        halves = [nn.Conv2d(small, small, 3, 2, 1), nn.Conv2d(middle, middle, 3, 2, 1), None]
        self.down_blocks = nn.ModuleList(map(_Level, entries, WIDTHS, DEPTHS, halves))
        self.middle, self.mid_block = _Residual(wide, wide), _Level([wide], wide, 0, None)
        self.mid_attention = _Transformer(wide, DEPTHS[-1])
        entries = [[2 * wide, 2 * wide, wide + middle], [wide + middle, 2 * middle, middle + small]]
        entries.append([middle + small, 2 * small, 2 * small])
        doubles = [nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(w, w, 3, padding=1)) for w in (wide, middle)]
        self.up_blocks = nn.ModuleList(map(_Level, entries, WIDTHS[::-1], DEPTHS[::-1], [*doubles, None]))
        self.conv_norm_out, self.conv_out = nn.GroupNorm(32, small), nn.Conv2d(small, 4, 3, padding=1)

    def forward(self, sample: Tensor, time: Tensor, pooled: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of the noise that is predicted.

        Args:
            sample: noisy latent pictures, shape (pictures, 4, height, width).
            time: sines and cosines of the time steps, shape (pictures, 320).
            pooled: the pooled text and the sizes of the picture, shape (pictures, 2816).
            text: its tokens, shape (pictures, tokens, 2048).
            noise: the noise in ``sample``, of its shape.
        """
        embedded = self.time_embedding(time) + self.add_embedding(pooled)
        picture = self.conv_in(sample)
        skips = [picture]
        for level in self.down_blocks:
            skips += level.steps(skips[-1], embedded, text, None)  # type: ignore[operator]
        picture = self.mid_attention(self.middle(skips[-1], embedded), text)
        picture = [*self.mid_block.steps(picture, embedded, text, None)][-1]
        for level in self.up_blocks:
            picture = [*level.steps(picture, embedded, text, skips)][-1]  # type: ignore[operator]
        predicted = self.conv_out(F.silu(self.conv_norm_out(picture)))
        return F.mse_loss(predicted.float(), noise.float())


def unet_inputs(micro_batch: int, _sequence: int) -> dict[str, Tensor]:
    """Return inputs for pictures of 1,024 pixels, on the meta device."""
    shapes = {
        "sample": (4, EDGE, EDGE),
        "time": (WIDTHS[0],),
        "pooled": (POOLED,),
        "text": (TOKENS, TEXT),
        "noise": (4, EDGE, EDGE),
    }
    return {name: torch.empty(micro_batch, *shape, device="meta") for name, shape in shapes.items()}
