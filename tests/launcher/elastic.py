"""A training script as docs/launching.md has it: ``elastic.py FOLDER STEPS [FAULT]``; it resumes where it got to.

Every step's world and loss is added to FOLDER/losses, every rank's final parameters to FOLDER/final. FAULT is ``kill``
(rank 1 dies once, in step 5, before it is saved), or ``slow``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from anywhere import CONFIG, make_engine, passes

folder, steps, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
engine, loader = make_engine(CONFIG | {"gradient_accumulation_steps": 2, "checkpoint": {"keep_last": 2}})
engine.load_checkpoint(folder / "checkpoints")
batches = passes(loader)
while engine.global_steps < steps:
    loss = float(engine.train_batch(batches))
    if fault == "kill" and engine.global_steps == 5 and engine.mesh.rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if engine.mesh.rank == 0:
        with (folder / "losses").open("a") as file:
            file.write(json.dumps([engine.global_steps, engine.mesh.world_size, loss]) + "\n")
    engine.save_checkpoint(folder / "checkpoints")
    time.sleep(0.3 if fault == "slow" else 0)
final = {name: tensor.tolist() for name, tensor in engine.gathered_state_dict().items()}
if engine.mesh.rank == 0:
    (folder / "final").write_text(json.dumps(final))
torch.distributed.destroy_process_group()
