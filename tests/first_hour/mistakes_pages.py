"""Missing packages, and pages of runs and plans."""

from __future__ import annotations

import json

from mistakes import Mistake

# A person who lacks packages, in an environment that has them all.
LACKING = """import sys
for package in sys.argv.pop(1).split(","):
    sys.modules[package] = None
from zeromesh.apps.cli.main import main
main()
"""

TEXT = "the model trains on text. " * 400

CONFIG: dict[str, object] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "model": {"hidden_size": 32, "layers": 2, "heads": 2, "sequence_length": 32},
    "data": {"train": "text.txt"},
    "run": {"steps": 3},
}

RUN = {
    "out/time.jsonl": "".join(
        json.dumps(row) + "\n"
        for row in (
            {"began": 100.0, "step": 0},
            {"at": 110.0, "step": 10, "seconds": {"starting": 4.0, "steps that count": 6.0}, "ends": True},
        )
    ),
    "out/metrics.jsonl": json.dumps({"kind": "train", "step": 10, "loss": 2.5}) + "\n",
}


def lacking(name: str, packages: str, says: tuple[str, ...], **changed: object) -> Mistake:
    """Return a run of ``zeromesh train`` without packages: told before the text is read."""
    document = {key: value for key, value in (CONFIG | changed).items() if value is not None}
    return Mistake(
        name,
        f"python lacking.py {packages} train config.json",
        says,
        {"lacking.py": LACKING, "config.json": json.dumps(document), "text.txt": TEXT},
        silent_about=("Traceback (most recent call last)", "reading the text", "zeromesh["),
        most_lines=6,
    )


HUGGINGFACE = {"path": "models/none", "sequence_length": 32}

MISTAKES = [
    lacking(
        "wandb is switched on and not installed",
        "wandb",
        ("wandb.enabled needs the package wandb, which is not installed: pip install wandb",),
        wandb={"enabled": True},
    ),
    lacking(
        "tensorboard is switched on and not installed",
        "tensorboard",
        ("tensorboard.enabled needs the package tensorboard, which is not installed: pip install tensorboard",),
        tensorboard={"enabled": True},
    ),
    lacking(
        "neither transformers nor peft is installed",
        "transformers,peft",
        (
            "huggingface needs the package transformers",
            "lora needs the package peft",
            "all at once: pip install 'transformers>=5' peft",
        ),
        model=None,
        huggingface=HUGGINGFACE,
        lora={"r": 4},
    ),
    lacking(
        "weights in 4 bits without bitsandbytes",
        "bitsandbytes",
        ("huggingface.quantization needs the package bitsandbytes, which is not installed: pip install bitsandbytes",),
        model=None,
        huggingface=HUGGINGFACE | {"quantization": {"bits": 4}},
        lora={"r": 4},
    ),
    lacking(
        "weights in 8 bits without torchao",
        "torchao",
        ("huggingface.quantization needs the package torchao, which is not installed: pip install torchao",),
        model=None,
        huggingface=HUGGINGFACE | {"quantization": {"library": "torchao", "bits": 8}},
        lora={"r": 4},
    ),
    lacking(
        "a data set of the Hub without datasets",
        "datasets",
        ("'some/texts' on the Hub needs the package datasets, which is not installed: pip install datasets",),
        data={"train": "some/texts"},
    ),
    lacking(
        "a parquet file without pyarrow",
        "pyarrow",
        ("'rows.parquet' needs the package pyarrow, which is not installed: pip install pyarrow",),
        data={"train": "rows.parquet"},
    ),
    Mistake(
        "the PNG of a plan without matplotlib",
        "python lacking.py matplotlib,matplotlib.figure plan llama-3-8b --gpu h100 --gpus 8 --batch 8 --sequence 4096"
        " --picture plan.png",
        ("a picture needs matplotlib", "pip install matplotlib; a page, FILE.html, needs nothing"),
        {"lacking.py": LACKING},
        most_lines=4,
    ),
    Mistake(
        "a picture of a plan in no known format",
        "zeromesh plan llama-3-8b --gpu h100 --gpus 8 --batch 8 --sequence 4096 --picture plan.docx",
        ("'plan.docx' names no picture; end it in .html for a page, or in one of",),
        most_lines=4,
    ),
    Mistake(
        "the report of a folder that has no run",
        "zeromesh report .",
        ("'.' has no run: name the folder that run.output of zeromesh train names",),
        most_lines=2,
    ),
    Mistake(
        "the report of a configuration",
        "zeromesh report config.json",
        ("'config.json' is no folder: name the folder that run.output of zeromesh train names",),
        {"config.json": json.dumps(CONFIG)},
        most_lines=2,
    ),
    Mistake(
        "watching a folder that has no run",
        "zeromesh report --watch out",
        ("'out' is no folder: name the folder that run.output of zeromesh train names",),
        most_lines=2,
        seconds=60.0,
    ),
    Mistake(
        "watching a run that has ended",
        "zeromesh report out --watch",
        ("report.html shows the run", "the run has ended; the page is complete"),
        RUN,
        status=0,
        seconds=60.0,
    ),
    Mistake(
        "the report of a run whose log was cut off",
        "zeromesh report out",
        ("left out 1 lines of its logs that are no records of a run", "wrote out/report.html"),
        RUN | {"out/metrics.jsonl": RUN["out/metrics.jsonl"] + '{"kind": "train", "st'},
        status=0,
    ),
]
