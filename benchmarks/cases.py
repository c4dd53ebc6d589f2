"""What is trained in a benchmark: sizes, precision, clipping, the model and its batch. The same in every variant."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Said in full, as the defaults of torch and DeepSpeed differ."""


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        batch: samples per rank and step.
        sequence: tokens per sample.
        bf16: 16-bit parameters with masters in fp32; under DDP, autocast over parameters in fp32.
        clip: the limit on the gradient's global norm; 0 is none.
        hidden: the model's width.
        layers: its blocks.
        vocabulary: its tokens.
        warmup: steps before those that are measured.
        steps: that are measured, in each round.
    """

    batch: int
    sequence: int
    bf16: bool
    clip: float = 0.0
    hidden: int = 512
    layers: int = 6
    vocabulary: int = 8192
    warmup: int = 3
    steps: int = 10

    @property
    def tolerance(self) -> float:
        """Largest relative difference of a step's loss from the same step's under DDP.

        In fp32 only the order of sums differs. In bf16 it also matters what is rounded, and on a batch that is repeated
        the loss falls so fast that a difference of rounding in one step is seen in the next ones.
        """
        return 0.05 if self.bf16 else 1e-3

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters that the model computes with."""
        return torch.bfloat16 if self.bf16 else torch.float32


CASES = {
    "communication-fp32": Case(1, 64, bf16=False),
    "communication-bf16": Case(1, 64, bf16=True),
    "communication-bf16-clip": Case(1, 64, bf16=True, clip=1.0),
    "compute-fp32": Case(2, 256, bf16=False, steps=6),
    "compute-bf16": Case(2, 256, bf16=True, steps=6),
    "110M-bf16": Case(2, 256, bf16=True, hidden=768, layers=12, vocabulary=16384, warmup=2, steps=4),
    "tiny-fp32": Case(1, 16, bf16=False, hidden=64, layers=2, vocabulary=256, warmup=1, steps=2),
    "tiny-bf16": Case(1, 16, bf16=True, hidden=64, layers=2, vocabulary=256, warmup=1, steps=2),
    "tiny-clip": Case(1, 16, bf16=False, clip=0.1, hidden=64, layers=2, vocabulary=256, warmup=1, steps=2),
}
DEFAULT = [name for name in CASES if not name.startswith("tiny")]


def make_model(case: Case) -> Decoder:
    """The same weights in every process, in fp32.

    In a case in bf16 they are numbers that bf16 can hold: then it does not matter whether a master is made before
    rounding or, as DeepSpeed does, after it.
    """
    torch.manual_seed(0)
    model = Decoder(
        ModelShape(
            architecture="llama", vocab_size=case.vocabulary, hidden_size=case.hidden, layers=case.layers,
            heads=max(4, case.hidden // 64), sequence_length=case.sequence, tie_embeddings=False,
        )
    )  # fmt: skip
    return model.to(case.dtype).float()


def make_batch(case: Case, rank: int) -> torch.Tensor:
    """This rank's tokens, int64 of shape (batch, sequence + 1); the same ones in each step.

    On a batch that is repeated the loss falls fast, so wrong gradients show.
    """
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randint(case.vocabulary, (case.batch, case.sequence + 1), generator=generator)


def batch_of(case: Case, whole: bool, rank: int, ranks: int) -> torch.Tensor:
    """What a rank is given: its own tokens, or with ``whole`` those of all ranks."""
    return torch.cat([make_batch(case, other) for other in (range(ranks) if whole else [rank])])
