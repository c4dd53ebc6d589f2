"""A script with transformers' own Trainer and options of the command line, as transformers' examples have them."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_training import model, samples


@dataclass
class ScriptArguments:
    """Options of the script itself."""

    result: str = field(metadata={"help": "file of the losses"})


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write the losses."""
    args, script = HfArgumentParser((TrainingArguments, ScriptArguments)).parse_args_into_dataclasses(arguments)
    trainer = Trainer(model(), args, train_dataset=samples(32), eval_dataset=samples(8, 2))
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row] + [found["eval_loss"]]
        kind = str(trainer.accelerator.distributed_type)
        Path(script.result).write_text(json.dumps({"losses": losses, "ranks": trainer.args.world_size, "kind": kind}))


if __name__ == "__main__":
    main(sys.argv[1:])
