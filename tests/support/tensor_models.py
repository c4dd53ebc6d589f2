"""The architectures of the tensor-parallel matrix, and one training run of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import zeromesh
from huggingface_models import GROUPED, IMAGE, LAYERS, SPECIAL, Batch, Model, text, tokens
from huggingface_models import MODELS as OTHERS
from run import configuration, train_step, whole_state

STEPS = 3
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
CLIP = 0.5
FP32_NORM = "a norm of its heads runs in fp32, where shares of the gradient of a key head are rounded"


def wide_images(generator: torch.Generator) -> Batch:
    """With the class token, as many parts as four ranks divide."""
    pixels = torch.randn(4, 3, 56, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(3, (4,), generator=generator)}


def long_pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "labels": tokens(generator)}


def long_speech(generator: torch.Generator) -> Batch:
    features = torch.randn(4, 8, 32, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": tokens(generator)}


MISTRAL = {**GROUPED, **SPECIAL, "sliding_window": None}
MODELS: dict[str, Model] = {
    **{name: OTHERS[name] for name in ("gpt2", "gpt_neox", "opt", "bloom", "falcon", "llama", "qwen2")},
    "mistral": Model("MistralForCausalLM", "MistralConfig", MISTRAL, text, LAYERS),
    "qwen3": replace(OTHERS["qwen3"], tolerance=1e-6, reason=FP32_NORM),
    **{name: OTHERS[name] for name in ("gemma2", "gemma3", "phi3")},
    "olmo2": Model(
        # Each rank adds up the squares of its own heads for the norm, in fp32; `causal_models.py` compares in float64.
        "Olmo2ForCausalLM", "Olmo2Config", {**GROUPED, **SPECIAL}, text, LAYERS, tolerance=2e-4, reason=FP32_NORM
    ),
    "starcoder2": Model("Starcoder2ForCausalLM", "Starcoder2Config", MISTRAL, text, LAYERS),
    "mixtral": replace(OTHERS["mixtral"], tolerance=2e-4),
    **{name: OTHERS[name] for name in ("bert", "roberta")},
    "vit": Model(
        "ViTForImageClassification", "ViTConfig", {**IMAGE, "image_size": (56, 8)}, wide_images, {"vit.layers.#": 3}
    ),
    "t5": replace(OTHERS["t5"], batch=long_pairs),
    "whisper": replace(OTHERS["whisper"], batch=long_speech),
}  # fmt: skip
"""By name; those of ``huggingface_models`` with sequences that four ranks divide."""

WHOLE = re.compile(
    r"norm|ln_|position|token_type|\.gate\.weight|conv\d|patch_embed|cls_token|wpe|relative_attention_bias|^classifier"
    r"|classifier\.out_proj"
)
"""Parameters with several dims that may be whole: norms, positions, routers, stems, and heads of a few classes."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str = "llama"
    tensor: int = 2
    data: int = 1
    row: int = 0
    sequence: bool = False
    checkpointing: bool = False
    clip: bool = False
    accumulation: int = 1
    context: int = 1
    strategy: str = "ring"

    def __str__(self) -> str:
        marks = [mark for mark in ("sequence", "checkpointing", "clip") if getattr(self, mark)]
        marks += [f"context {self.context}-{self.strategy}"] if self.context > 1 else []
        return f"{self.name}-tensor {self.tensor}-data {self.data}-row {self.row}-{self.accumulation} steps" + "".join(
            f"-{mark}" for mark in marks
        )

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.context

    @property
    def config(self) -> dict[str, Any]:
        return configuration(
            batch=4,
            accumulation=self.accumulation,
            clipping=CLIP if self.clip else 0.0,
            optimizer={"type": "AdamW", "params": OPTIMIZER},
            stage=self.row,
            mesh={"tensor": self.tensor, "data": self.data, "context": self.context},
            context_parallel={"strategy": self.strategy},
            tensor_parallel={"sequence": self.sequence},
        )


@dataclass
class Run:
    """What came of it: losses and norms by update, the whole state, and the parts that this rank held."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    parts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def build(name: str, checkpointing: bool = False) -> Any:
    torch.manual_seed(0)
    model = MODELS[name].build().to(MODELS[name].dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def batches(name: str) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [MODELS[name].batch(generator) for _ in range(STEPS)]


def token_pair(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and the labels of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 24, (4, 8), generator=generator), torch.randint(0, 24, (4, 8), generator=generator)


def tensor_bytes(report: dict[str, Any]) -> int:
    """Return the bytes that a report of traffic has for the tensor axis."""
    return sum(row["bytes"] for kind, row in report.items() if kind.endswith("/tensor"))


def share(batch: Batch, number: int, shares: int, dtype: torch.dtype) -> Batch:
    cut = {name: tensor.chunk(shares)[number] for name, tensor in batch.items()}
    return {name: part.to(dtype) if part.is_floating_point() else part for name, part in cut.items()}


def train(case: Case) -> Run:
    """On every rank."""
    model, row = build(case.name, case.checkpointing), MODELS[case.name]
    engine = zeromesh.initialize(model=model, config=case.config)[0]
    losses, norms = [], []
    for batch in batches(case.name):
        mean = 0.0
        for step in range(case.accumulation):
            number = step * case.data + engine.data_rank
            part = share(batch, number, case.data * case.accumulation, row.dtype)
            loss = engine(**part, **row.arguments).loss
            train_step(engine, loss)
            mean += loss.item() / case.accumulation
        losses.append(mean)
        norms.append(engine.get_global_grad_norm())
    state = whole_state(engine.module)
    segments = [segment for flat in engine.sharded.flats for segment in flat.layout.segments]
    parts = {segment.name: (segment.held.whole, tuple(segment.shape)) for segment in segments}
    engine.destroy()
    return Run(losses, norms, state, parts)


def train_cases(cases: list[Case]) -> list[Run]:
    """On every rank, one after the other."""
    return [train(case) for case in cases]


@cache
def plain(name: str, clip: bool, shares: int) -> Run:
    """Plain torch in one process on the global batch, or on its shares where the loss is not a mean over samples."""
    row, model = MODELS[name], build(name)
    shares = shares if row.per_share else 1
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses, norms = [], []
    for batch in batches(name):
        mean = 0.0
        for number in range(shares):
            loss = model(**share(batch, number, shares, row.dtype), **row.arguments).loss
            (loss / shares).backward()
            mean += loss.item() / shares
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP if clip else 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return Run(losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}, {})
