"""Peak memory of single-rank trainings of small models, as planned and as measured, setting by setting.

    python benchmarks/planned_peaks.py [--only TEXT] [--markdown FILE]

Settings differ in dtypes of states, ZeRO rows, tiers, tiles, recomputation and models. The peak is that of malloc
blocks of 64 KiB and more in one step beyond what there was before the model, counted at each allocation by a preloaded
library (``heap_events.c``, for which a C compiler is needed). Device and host are the same memory on a CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

import products
from plan_layouts import heap_library
from plan_rows import FILE, HOST, RECOMPUTE, SELECTIVE, zero
from zeromesh import initialize
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.machine.here import cost_here, machine_here
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.config.settings import Settings

WORDS, WIDTH, INNER, LAYERS, PIXELS = 2048, 256, 1024, 3, 128
BOUND = 0.02
"""The planner's error of a peak."""

NARROW = {"optimizer_state_dtype": {"exp_avg": "bf16", "exp_avg_sq": "bf16"}}
INPUTS_AWAY = {"activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}}


def tiled(tokens: int | str | None, loss: bool = False) -> dict[str, Any]:
    """Return a configuration with tiles over tokens."""
    return {"tiling": {"mlp": tokens, "loss": loss}}


@dataclass(frozen=True)
class Setting:
    """One training."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    tokens: int = 512
    samples: int = 1
    bf16: bool = True
    optimizer: str = "AdamW"
    bound: float = BOUND  # of the planner's error

    @property
    def name(self) -> str:
        """The setting in one line."""
        shape = f"{self.samples} x {self.tokens}" if self.model != "vit" else f"{self.samples} images"
        parts = [self.model, "bf16" if self.bf16 else "fp32", shape, self.optimizer]
        return " ".join((*parts, *_words(self.config)))

    def document(self, folder: str) -> dict[str, Any]:
        """Return the configuration; states on NVMe rest in the folder."""
        chosen = dict(self.config)
        stage = dict(chosen.pop("zero_optimization", {"stage": 0}))
        for key in ("offload_optimizer", "offload_param"):
            if stage.get(key, {}).get("device") == "nvme":
                stage[key] = {**stage[key], "nvme_path": folder}
        return {
            "train_micro_batch_size_per_gpu": self.samples, "bf16": {"enabled": self.bf16},
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-4}}, "zero_optimization": stage, **chosen,
        }  # fmt: skip


def _words(config: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _words(value, key)
        elif key != "enabled" and value is not False and value is not None:
            yield f"{path}.{key}={value}" if path else f"{key}={value}"
        elif key == "enabled":
            yield path


def settings() -> list[Setting]:
    """Return all settings."""
    found = [Setting("llama", zero(stage) | NARROW) for stage in range(4)]
    # The update of narrow states beside an fp32 parameter is planned with a copy that is mostly not there.
    found += [Setting("llama", zero(3) | NARROW, bf16=False, bound=0.05), Setting("llama", zero(3))]
    found += [Setting("llama", zero(3, offload_optimizer=place) | NARROW) for place in (HOST, FILE)]
    found += [Setting("llama", zero(3, offload_optimizer=HOST, offload_param=HOST) | NARROW)]
    found += [Setting("llama", zero(3) | {"optimizer_state_dtype": {"exp_avg": "bf16"}}, optimizer="Lion")]
    found += [Setting("llama", zero(0) | one, 2048, bf16=False) for one in ({}, tiled(256), tiled(256) | RECOMPUTE)]
    found += [Setting("llama", zero(3) | tiled(256), 2048, bf16=bf16) for bf16 in (True, False)]
    found += [Setting("llama", zero(3) | tiled(tokens, True), 2048) for tokens in (None, 256)]
    # The second slot of gradients is counted, and on a CPU the first is free again by then.
    found += [Setting("llama", zero(3) | tiled("width", True), 2048, bf16=False, bound=0.05)]
    found += [Setting("llama", zero(3) | tiled(256, True), 512, 4)]
    found += [Setting("llama", zero(3) | tiled(256, True) | way, 2048) for way in (RECOMPUTE, SELECTIVE)]
    # On a CPU inputs are on the host where they are, so that the two on their way to the device take nothing.
    found += [Setting("llama", zero(3) | tiled(256, True) | INPUTS_AWAY, 2048, bound=0.05)]
    found += [Setting("llama", zero(3) | NARROW | tiled(256, True) | RECOMPUTE, 4096)]
    found += [Setting("llama", zero(3, offload_optimizer=HOST) | NARROW | tiled(256, True) | RECOMPUTE, 2048)]
    found += [Setting("llama", zero(3) | tiled(256) | {"gradient_accumulation_steps": 2}, 2048)]
    found += [Setting("llama", zero(3) | way, 2048) for way in (RECOMPUTE, INPUTS_AWAY)]
    found += [Setting("gpt2", zero(3) | tiled(256) | way, 2048, bf16=False) for way in ({}, RECOMPUTE)]
    of_images = [zero(0) | NARROW, zero(3) | NARROW, zero(3) | tiled(256), zero(3) | RECOMPUTE]
    of_images += [zero(3, offload_optimizer=HOST)]
    found += [Setting("vit", config, samples=8, bf16=False) for config in of_images]
    return found


def make(model: str) -> nn.Module:
    """Return a model of transformers with fresh weights in fp32."""
    import transformers as hf

    torch.manual_seed(0)
    if model == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1 << 14, use_cache=False,
            )
        )  # fmt: skip
    if model == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=WORDS, n_positions=2048, n_embd=WIDTH, n_layer=LAYERS, n_head=4, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=INNER,
            image_size=PIXELS, patch_size=8, num_labels=100,
        )
    )  # fmt: skip


def batch(setting: Setting) -> dict[str, torch.Tensor]:
    """Return one micro-batch."""
    generator = torch.Generator().manual_seed(1)
    if setting.model == "vit":
        pixels = torch.randn(setting.samples, 3, PIXELS, PIXELS, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(100, (setting.samples,), generator=generator)}
    ids = torch.randint(WORDS, (setting.samples, setting.tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def planned(setting: Setting, folder: str) -> float:
    """Return the peak that the planner predicts, in bytes: of the device and the host together."""
    chosen = Settings.load(setting.document(folder))
    layout, _ = layout_from(chosen, 1)
    source, _ = cost_here(make(setting.model), batch(setting), None, chosen)
    (rank,) = memory_of(source, 1 if setting.model == "vit" else setting.tokens, layout, machine_here(1, 1))
    return rank.peak.total + rank.on("host")


class Peak(NamedTuple):
    """What a step took."""

    bytes: float  # at the most
    rest: float  # of them, what there is between steps
    seconds: float


def measured(setting: Setting, folder: str) -> Peak:
    """Return what a step of a training takes, after the first one."""
    heap = ctypes.CDLL(None)  # the preloaded library's functions are in the process itself
    heap.heap_events_live.restype = heap.heap_events_peak.restype = ctypes.c_long
    gc.collect()
    before = heap.heap_events_live()
    engine, *_ = initialize(model=make(setting.model), config=setting.document(folder))
    data, found = batch(setting), []
    engine.train_batch(repeat(data))
    # Where other programs delay a thread of this one, memory is free a little later: the least of two steps.
    for _ in range(2):
        rest, began = heap.heap_events_live() - before, time.perf_counter()
        heap.heap_events_reset()
        engine.train_batch(repeat(data))
        seconds = time.perf_counter() - began
        found.append(Peak(heap.heap_events_peak() - before, rest, seconds))
    engine.destroy()
    return min(found)


@dataclass(frozen=True)
class PeakRow:
    """A setting's peaks in bytes."""

    setting: Setting
    planned: float
    measured: float

    @property
    def holds(self) -> bool:
        """True if the plan is within the setting's bound."""
        return abs(self.error) <= self.setting.bound

    @property
    def error(self) -> float:
        """Of the plan, in parts of what was measured."""
        return self.planned / self.measured - 1

    @property
    def line(self) -> str:
        """The row of the table."""
        return f"| {self.setting.name} | {self.planned / 1e6:.1f} | {self.measured / 1e6:.1f} | {self.error:+.2%} |"


def peaks(only: str = "") -> Iterator[PeakRow]:
    """Yield the rows of the settings whose names have a text; the library must be loaded."""
    if products.needed(torch.device("cpu")):
        products.replace()
    chosen = [setting for setting in settings() if only in setting.name]
    with tempfile.TemporaryDirectory() as folder:
        seen = set()
        for setting in chosen:
            shape = setting.model, setting.bf16, setting.samples, setting.tokens
            if shape not in seen:
                measured(setting, folder)  # what torch and the engine keep from the first use on would count
            seen.add(shape)
            yield PeakRow(setting, planned(setting, folder), measured(setting, folder).bytes)


def table(rows: Sequence[PeakRow]) -> str:
    """Return the table in Markdown."""
    head = ["| setting | planned, MB | measured, MB | error |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(row.line for row in rows)]) + "\n"


def main() -> None:
    """Print the table; exit with 1 if a plan is further off than its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name has this text")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    given = parser.parse_args()
    if "heap_events" not in os.environ.get("LD_PRELOAD", ""):
        # A library can be preloaded when a process begins only.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(heap_library())})
    rows = []
    for row in peaks(given.only):
        rows.append(row)
        print(row.line, flush=True)
    if given.markdown:
        given.markdown.write_text(table(rows))
    sys.exit(not all(row.holds for row in rows))


if __name__ == "__main__":
    main()
