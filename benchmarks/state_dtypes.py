"""Three small trainings with optimizer states in fp32 and bf16, as curves: ``python benchmarks/state_dtypes.py``.

A decoder on the text of Python's standard library, a vision transformer on drawn shapes and a recommender on made-up
clicks. Each trains by AdamW of the host's kernel with beta2 = 0.999, with the moments in fp32, in bf16 by stochastic
rounding, and in bf16 to nearest, from the same start on the same batches. What is plotted is the loss on data that is
not trained on. It takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zeromesh.base.kernels.update_pass import UpdatePiece, UpdateStep, update  # noqa: E402

ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
STATES = {"fp32": torch.float32, "bf16, stochastic": torch.bfloat16, "bf16, nearest": torch.float32}
NEAREST = "bf16, nearest"
WIDTH, TOKENS, SIDE, PATCH, USERS = 64, 64, 16, 4, 200

Batches = Callable[[torch.Generator], tuple[Tensor, Tensor]]


class Transformer(nn.Module):
    """Two layers over embedded tokens or patches; logits of each position, or of their mean."""

    def __init__(self, embedding: nn.Module, positions: int, classes: int, causal: bool) -> None:
        super().__init__()
        self.embedding, self.causal = embedding, causal
        self.positions = nn.Parameter(torch.randn(positions, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits, (batch, positions, classes) if causal, else (batch, classes)."""
        hidden = self.embedding(inputs) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(len(self.positions)) if self.causal else None
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=self.causal)
        logits: Tensor = self.head(hidden if self.causal else hidden.mean(1))
        return logits


class Recommender(nn.Module):
    """A click from the embeddings of a user and an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 16), nn.Embedding(USERS, 16)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, pairs: Tensor) -> Tensor:
        """Return logits, (batch, 2), of (batch, 2) numbers of users and items."""
        logits: Tensor = self.layers(torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1))
        return logits


@dataclass(frozen=True)
class Training:
    """A model, its batches and its learning rate."""

    model: Callable[[], nn.Module]
    batch: Batches
    lr: float


def decoder() -> Training:
    """Characters of the standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files))).clamp(max=127)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        begins = torch.randint(len(text) - TOKENS - 1, (16,), generator=generator)
        rows = torch.stack([text[begin : begin + TOKENS + 1] for begin in begins])
        return rows[:, :-1], rows[:, 1:]

    return Training(lambda: Transformer(nn.Embedding(128, WIDTH), TOKENS, 128, causal=True), batch, 1e-3)


def vision() -> Training:
    """Bars, crosses, frames and disks at random places, in noise."""
    line = torch.arange(SIDE)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        kind = torch.randint(4, (64,), generator=generator)
        place = torch.randint(4, 12, (2, 64, 1, 1), generator=generator)
        y, x = (line[:, None] - place[0]).abs(), (line - place[1]).abs()
        far = torch.maximum(y, x)
        forms = [(y < 2) & (x < 4), ((y < 1) | (x < 1)) & (far < 4), far == 3, (y * y + x * x) < 10]
        image = torch.stack(forms)[kind, torch.arange(64)].float()
        image = image + 0.7 * torch.randn(image.shape, generator=generator)
        patches = F.unfold(image[:, None], PATCH, stride=PATCH).transpose(1, 2)
        return patches, kind

    count = (SIDE // PATCH) ** 2
    return Training(lambda: Transformer(nn.Linear(PATCH**2, WIDTH), count, 4, causal=False), batch, 1e-3)


def recommender() -> Training:
    """Clicks that hidden tastes make likely; some users and items are seen often, most seldom."""
    generator = torch.Generator().manual_seed(7)
    tastes = torch.randn(2, USERS, 6, generator=generator)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs = (torch.rand(512, 2, generator=generator) ** 2 * USERS).long()
        score = (tastes[0, pairs[:, 0]] * tastes[1, pairs[:, 1]]).sum(1)
        return pairs, (torch.rand(512, generator=generator) < score.sigmoid()).long()

    return Training(Recommender, batch, 3e-3)


TRAININGS = {"decoder": decoder, "vision transformer": vision, "recommender": recommender}


def losses(training: Training, states: str, steps: int, every: int) -> Iterator[tuple[int, float]]:
    """Train with these states; yield steps and losses on held-out batches."""
    torch.manual_seed(0)
    model, generator = training.model(), torch.Generator().manual_seed(1)
    held_out = [training.batch(torch.Generator().manual_seed(10**6 + index)) for index in range(8)]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = [tuple(torch.zeros(p.numel(), dtype=STATES[states]) for _ in range(2)) for p in parameters]

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    for number in range(1, steps + 1):
        gradients = torch.autograd.grad(loss_of(training.batch(generator)), parameters)
        step = UpdateStep("adamw", ADAMW | {"lr": training.lr * min(1.0, number / 100)}, number)
        rows = zip(parameters, gradients, moments, strict=True)
        update([UpdatePiece(step, g.reshape(-1), p.detach().view(-1), pair) for p, g, pair in rows])
        if states == NEAREST:
            for moment in (moment for pair in moments for moment in pair):
                moment.copy_(moment.bfloat16())
        if number % every == 0:
            with torch.no_grad():
                yield number, float(torch.stack([loss_of(batch) for batch in held_out]).mean())


def draw(curves: dict[str, dict[str, list[tuple[int, float]]]], path: Path) -> None:
    """Draw the losses of each training side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, of) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for (states, points), style in zip(of.items(), ("-", "--", ":"), strict=True):
            axes.plot(*zip(*points, strict=True), style, label=states)
        axes.set(title=name, xlabel="step", ylabel="held-out loss")
        axes.legend()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Train, write the picture, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=40, help="steps between measurements")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder of the picture")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the layers are too small for more
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    print("| training | states | loss after a quarter | after half | at the end |\n|---|---|---|---|---|")
    for name, make in TRAININGS.items():
        training = make()
        for states in STATES:
            points = list(losses(training, states, given.steps, given.every))
            curves.setdefault(name, {})[states] = points
            told = [points[len(points) * part // 4 - 1][1] for part in (1, 2, 4)]
            print(f"| {name} | {states} | " + " | ".join(f"{loss:.4f}" for loss in told) + " |", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    draw(curves, given.out / "state-dtypes.png")


if __name__ == "__main__":
    main()
