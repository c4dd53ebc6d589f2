"""Plan the configurations of ``examples/recipes``, and write the table of their README: ``python tools/recipes.py``.

``python tools/recipes.py NAME...`` plans some of them and prints their rows. Nothing is downloaded: models of the Hub
are planned by their published sizes.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "recipes"
PAGE = FOLDER / "README.md"
MARKERS = "<!-- by tools/recipes.py: begin -->", "<!-- by tools/recipes.py: end -->"
HEADER = (
    "| configuration | model | hardware | layout | s per update | tokens/s | device, GB | host, GB | figures are |",
    "|---|---|---|---|---|---|---|---|---|",
)
SMALL_LLAMA = "llama:heads={},kv_heads=8,layers={},hidden={},width=8192,vocabulary=128256,tied=1"

# config.json of Llama 3.1 8B, without what does not change a plan.
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Recipe:
    """A configuration, the machine that it is for, and what is known of it.

    Args:
        name: of the file, without its end.
        model: what a reader knows it as.
        hardware: in words.
        machine: options of ``zeromesh plan``; "" where it has no preset.
        planned_as: the model in words of ``zeromesh plan``; None: adapters, which need a trace of ``LLAMA_8B``.
        measured: page and cells of the row, of a run of this configuration's layout.
    """

    name: str
    model: str
    hardware: str
    machine: str = ""
    planned_as: str | None = None
    measured: tuple[str, str] | None = None

    @property
    def path(self) -> Path:
        """The file of the configuration."""
        return FOLDER / f"{self.name}.json"

    def plan(self) -> dict[str, Any]:
        """Return the planner's judgement of the layout, as ``zeromesh plan --explain --json`` writes it."""
        document = json.loads(self.path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as name:
            config, model = self.path, self.planned_as
            if model is None:
                document["huggingface"]["path"] = name
                Path(name, "config.json").write_text(json.dumps(LLAMA_8B))
                config = Path(name, "recipe.json")
                config.write_text(json.dumps(document))
                model = str(config)
            sequence = str(document["huggingface"]["sequence_length"])
            command = [sys.executable, "-m", "zeromesh", "plan", model, "--explain", str(config), "--json"]
            command += ["--sequence", sequence, *self.machine.split()]
            result = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
        if not result.stdout:
            sys.exit(f"{shlex.join(command)}\n{result.stderr}")
        return json.loads(result.stdout)

    def row(self) -> str:
        """Return the row of the table."""
        cells = [f"[{self.name}]({self.name}.json)", self.model, self.hardware]
        if self.measured is not None:
            page, figures = self.measured
            return f"| {' | '.join(cells)} | {figures} | [measured]({page}) |"
        answer = self.plan()
        if not answer["fits"]:
            sys.exit(f"{self.name} does not fit: {answer['lacks']}")
        device, host = max(answer["device_bytes"]) / 1e9, answer["host_bytes_of_node"] / 1e9
        numbers = [f"{answer['seconds']:.3g}", f"{answer['tokens_per_second']:,.0f}", f"{device:.1f}", f"{host:.1f}"]
        return f"| {' | '.join([*cells, answer['layout'], *numbers])} | planned |"


RECIPES = (
    Recipe(
        "cpu-27m",
        "decoder of 27 M, from scratch",
        "2 cores, no GPU",
        measured=("../../docs/benchmarks/2026-11-27.md", "data 2, ZeRO-3 | 0.363 | 2,821 | - | 0.3"),
    ),
    Recipe(
        "24gb-1b-full",
        "Llama 3.2 1B, all weights",
        "1 x 24 GB (RTX 4090), 64 GB of host memory",
        "--gpu rtx-4090 --gpus 1 --host-memory 64",
        SMALL_LLAMA.format(32, 16, 2048),
    ),
    Recipe(
        "24gb-3b-full",
        "Llama 3.2 3B, all weights",
        "1 x 24 GB (RTX 4090), 96 GB of host memory",
        "--gpu rtx-4090 --gpus 1 --host-memory 96",
        SMALL_LLAMA.format(24, 28, 3072),
    ),
    Recipe("24gb-8b-lora", "Llama 3.1 8B, LoRA", "1 x 24 GB (RTX 4090)", "--gpu rtx-4090 --gpus 1 --host-memory 64"),
    Recipe("24gb-8b-qlora", "Llama 3.1 8B, QLoRA", "1 x 24 GB (RTX 4090)", "--gpu rtx-4090 --gpus 1 --host-memory 64"),
    Recipe(
        "80gb-8b-full",
        "Llama 3.1 8B, all weights",
        "1 x 80 GB (H100), 256 GB of host memory",
        "--gpu h100 --gpus 1 --host-memory 256",
        "llama-3-8b",
    ),
    Recipe(
        "141gb-8b-full",
        "Llama 3.1 8B, all weights",
        "1 x 141 GB (H200), 126 GiB of host memory",
        measured=(
            "../../docs/benchmarks/2026-11-26-gpu.md",
            "one device, ZeRO-2, 60% of optimizer on host | 15.9 | 8,242 | 126.4 | 81.2",
        ),
    ),
    Recipe(
        "8x80gb-8b-full",
        "Llama 3.1 8B, all weights",
        "8 x 80 GB (DGX H100)",
        "--gpu h100 --gpus 8",
        "llama-3-8b",
    ),
    Recipe(
        "8x80gb-70b-full",
        "Llama 3.3 70B, all weights",
        "8 x 80 GB (DGX H100), 2 TB of host memory",
        "--gpu h100 --gpus 8",
        "llama-3-70b",
    ),
    Recipe(
        "2x8x80gb-70b-full",
        "Llama 3.3 70B, all weights",
        "2 x 8 x 80 GB (DGX H100)",
        "--gpu h100 --gpus 8 --nodes 2",
        "llama-3-70b",
    ),
)


def main(names: list[str]) -> None:
    """Print the rows of some recipes, or write those of all into the page."""
    chosen = [recipe for recipe in RECIPES if not names or recipe.name in names]
    rows = []
    for recipe in chosen:
        rows.append(recipe.row())
        print(rows[-1], flush=True)
    if names:
        return
    begin, end = MARKERS
    table = "\n".join([begin, *HEADER, *rows, end])
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
