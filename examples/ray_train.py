"""Train a model of transformers on workers of Ray Train: ``python examples/ray_train.py --workers 2``.

Each worker is a rank, and gets its GPU from Ray where ``--gpu`` is given. ``pip install 'ray[train]'`` first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

LENGTH = 64  # bytes of a sequence


def model() -> Any:
    """Return a small model over bytes, with the same weights on every worker."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


def samples() -> list[dict[str, torch.Tensor]]:
    """Return the bytes of this file in sequences."""
    read = torch.tensor(list(Path(__file__).read_bytes()))
    rows = read[: len(read) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def train_on_worker(options: dict[str, Any]) -> None:
    """Train as one rank; Ray has started the process group."""
    import ray.train
    import transformers

    import zeromesh.hf

    sizes = {"max_steps": options["steps"], "per_device_train_batch_size": options["batch"], "logging_steps": 1}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": not options["gpu"]}
    args = transformers.TrainingArguments(options["out"], learning_rate=1e-3, **sizes, **quiet)
    trainer = zeromesh.hf.Trainer(model(), args, train_dataset=samples(), zeromesh=options["config"])
    trainer.train()
    trainer.save_model(options["out"])
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    ray.train.report({"loss": losses[-1]})
    if trainer.is_world_process_zero():
        (Path(options["out"]) / "losses.json").write_text(json.dumps(losses))


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples of an update, over all workers")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", default="out-ray")
    chosen = parser.parse_args()
    import ray.train.torch

    options = {"config": {"zero_optimization": {"stage": chosen.stage}}, "steps": chosen.steps, "gpu": chosen.gpu}
    # Workers run in folders of their own.
    options |= {"batch": chosen.batch // chosen.workers, "out": str(Path(chosen.out).absolute())}
    scaling = ray.train.ScalingConfig(num_workers=chosen.workers, use_gpu=chosen.gpu)
    trainer = ray.train.torch.TorchTrainer(train_on_worker, train_loop_config=options, scaling_config=scaling)
    trainer.fit()


if __name__ == "__main__":
    main()
