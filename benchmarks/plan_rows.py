"""Layouts that this machine can run, by which the planner is judged, and what a rank measures of one."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import nn

import products
from zeromesh import initialize
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.comm.environment import init_distributed, shutdown

SEQUENCE = 256
PIXELS, CLASSES = 96, 1000


@dataclass(frozen=True)
class Row:
    """One layout: a model, a number of ranks, and the configuration."""

    model: str
    ranks: int
    config: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = 2
    accumulation: int = 1
    bf16: bool = True
    rate: str = ""  # of the link between hosts, each of which has one rank then, in tc's words; "": one host

    @property
    def name(self) -> str:
        """The row in one line."""
        parts = [f"{self.model} x{self.ranks}", "bf16" if self.bf16 else "fp32", _text(self.config), self.rate]
        if (self.micro_batch, self.accumulation) != (2, 1):
            parts.append(f"{self.micro_batch} x {self.accumulation} samples")
        return ", ".join(part for part in parts if part)

    def settings(self, folder: str) -> dict[str, Any]:
        """Return the configuration for ``initialize``; states on NVMe rest in the folder."""
        adam = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch, "gradient_accumulation_steps": self.accumulation,
            "bf16": {"enabled": self.bf16}, "optimizer": adam, **self.config,
        }  # fmt: skip
        zero = dict(found.get("zero_optimization", {}))
        for name in ("offload_optimizer", "offload_param"):
            if zero.get(name, {}).get("device") == "nvme":
                zero[name] = {**zero[name], "nvme_path": folder}
        return {**found, "zero_optimization": zero}


def _text(config: dict[str, Any], path: str = "") -> str:
    parts = []
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        parts.append(_text(value, here) if isinstance(value, dict) else f"{here.rsplit('.', 2)[-1]}={value}")
    return " ".join(parts)


def make_model(name: str) -> nn.Module:
    """Return a model with fresh weights in fp32."""
    torch.manual_seed(0)
    if name == "decoder":
        return Decoder(
            ModelShape(
                architecture="llama", vocab_size=8192, hidden_size=384, layers=6, heads=6, sequence_length=SEQUENCE,
                tie_embeddings=False,
            )
        )  # fmt: skip
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        # Without dropout, as random numbers take a CPU longer than anything that the planner counts.
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=8192, n_positions=SEQUENCE, n_embd=384, n_layer=6, n_head=6, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )  # fmt: skip
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=1536, image_size=PIXELS,
            patch_size=8, num_labels=CLASSES,
        )
    )  # fmt: skip


def inputs_of(name: str, micro_batch: int, generator: torch.Generator) -> Any:
    """Return one micro-batch, as ``Engine.train_batch`` takes it."""
    if name == "vit":
        pixels = torch.randn(micro_batch, 3, PIXELS, PIXELS, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (micro_batch,), generator=generator)}
    tokens = torch.randint(8192, (micro_batch, SEQUENCE + 1), generator=generator)
    if name == "gpt2":
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, :-1].contiguous(), "use_cache": False}
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def zero(stage: int, **further: Any) -> dict[str, Any]:
    """Return a configuration with one row of the placement table."""
    return {"zero_optimization": {"stage": stage, **further}}


HOST, FILE = {"device": "cpu"}, {"device": "nvme"}
RECOMPUTE = {"activation_checkpointing": {"enabled": True}}
SELECTIVE = {"activation_checkpointing": {"enabled": True, "granularity": "selective"}}


def rows() -> list[Row]:
    """Return all rows."""
    found = [Row("decoder", 1, zero(stage), bf16=bf16) for stage in (0, 3) for bf16 in (False, True)]
    found += [Row("decoder", 2, zero(stage), bf16=bf16) for stage in range(4) for bf16 in (False, True)]
    found += [Row("decoder", 4, zero(stage)) for stage in range(4)]
    found += [Row("decoder", 2, zero(3) | {"slots": {"parameter": count}}) for count in (3, 6)]
    found += [Row("decoder", 2, zero(2) | {"slots": {"gradient": count}}) for count in (3, 4)]
    found += [Row("decoder", ranks, zero(stage, offload_optimizer=HOST)) for stage in (1, 2, 3) for ranks in (1, 2)]
    found += [Row("decoder", 2, zero(3, offload_optimizer=HOST, offload_param=HOST))]
    found += [Row("decoder", 2, zero(2, offload_optimizer={**HOST, "ratio": 0.5}))]
    found += [Row("decoder", 2, zero(2, offload_optimizer={**HOST, "update_during_backward": 1.0}))]
    found += [Row("decoder", 2, zero(3, offload_optimizer={**HOST, "split_master": True}, offload_param=HOST))]
    found += [Row("decoder", ranks, zero(3, offload_optimizer=FILE)) for ranks in (1, 2)]
    found += [Row("decoder", 2, zero(3, offload_optimizer=FILE, offload_param=FILE))]
    found += [Row("decoder", 2, zero(stage) | RECOMPUTE) for stage in range(4)]
    on_host = {"activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}}
    found += [Row("decoder", 1, zero(0) | RECOMPUTE), Row("decoder", 2, zero(3) | on_host)]
    found += [Row("decoder", 1, zero(0) | SELECTIVE), Row("decoder", 2, zero(3) | SELECTIVE)]
    found += [Row("decoder", 2, zero(stage), accumulation=4) for stage in range(4)]
    found += [Row("decoder", 2, zero(3), micro_batch=size) for size in (1, 4)]
    tensor = {"mesh": {"tensor": 2}}
    found += [Row("decoder", 2, zero(0) | tensor), Row("decoder", 4, zero(3) | tensor)]
    found += [Row("decoder", 2, zero(0) | tensor | {"tensor_parallel": {"sequence": True}})]
    stages = {"mesh": {"pipeline": 2}}
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        found.append(Row("decoder", 2, zero(0) | stages | {"pipeline": {"schedule": schedule}}, 1, 4))
    found += [Row("decoder", 4, zero(1) | stages, 1, 4)]
    found += [Row("decoder", 2, zero(2) | {"mesh": {"context": 2}})]
    found += [Row("decoder", 4, zero(3) | {"mesh": {"data": 2, "replicate": 2}})]
    for rate in ("100mbit", "1gbit", "10gbit"):
        found += [Row("decoder", 2, zero(stage), rate=rate) for stage in (0, 1, 3)]
    for model in ("gpt2", "vit"):
        found += [Row(model, 2, zero(stage)) for stage in range(4)]
        found += [Row(model, 1, zero(0)), Row(model, 2, zero(3) | RECOMPUTE), Row(model, 2, zero(2) | RECOMPUTE)]
        found += [Row(model, 2, zero(2) | SELECTIVE)]
        found += [Row(model, 2, zero(2, offload_optimizer=HOST)), Row(model, 2, zero(3), micro_batch=8)]
    return found


CPU = torch.device("cpu")


def measure(name: str, folder: str, steps: int) -> dict[str, Any]:
    """Measure a row on one rank; states on NVMe rest in the folder."""
    init_distributed("gloo")
    if products.needed(CPU):
        products.replace()
    (row,) = (row for row in rows() if row.name == name)
    heap = ctypes.CDLL(None)  # the preloaded library's functions are in the process itself
    heap.heap_events_live.restype = heap.heap_events_peak.restype = ctypes.c_long
    _one(row, folder, heap, 0)  # what torch and the engine load at first use would count
    found = _one(row, folder, heap, steps)
    shutdown()
    return found


def _one(row: Row, folder: str, heap: ctypes.CDLL, steps: int) -> dict[str, Any]:
    gc.collect()
    before = heap.heap_events_live()
    engine, *_ = initialize(model=make_model(row.model), config=row.settings(folder))
    # Ranks that share a batch are given the same samples.
    generator = torch.Generator().manual_seed(1 + engine.data_rank)
    batch = inputs_of(row.model, row.micro_batch, generator)

    def step() -> float:
        began = time.perf_counter()
        engine.train_batch(repeat(batch))
        return time.perf_counter() - began

    for _ in range(2):
        step()
    rest = heap.heap_events_live() - before
    heap.heap_events_reset()
    step()
    peak = heap.heap_events_peak() - before
    times = [step() for _ in range(steps)]
    report = engine.memory_report()
    engine.destroy()
    states = {key: sizes for key, sizes in report.items() if key not in ("total", "measured")}
    return {"peak": peak, "rest": rest, "seconds": times, "states": states}
