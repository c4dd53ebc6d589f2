"""A training script as docs/launching.md has it: ``elastic.py FOLDER STEPS FAULT [memory]``; it resumes by itself.

Every step's world and loss is added to FOLDER/losses, every rank's final parameters to FOLDER/final. FAULT is ``kill``
(rank 1 dies once, in step 5, before it is saved), a number (of kills of a rank at any moment), or ``slow``. With
``memory`` the state is saved to memory alone.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from anywhere import CONFIG, make_engine, passes


def kill_at_any_moment(count: int) -> None:
    """Kill this rank soon, unless ranks were killed so often already."""
    kills = len(list(folder.glob("killed-*")))
    if kills < count and kills % engine.mesh.world_size == engine.mesh.rank:

        def kill() -> None:
            time.sleep(random.Random(kills).uniform(0.05, 0.8))
            with training:  # the copies go with the end of the run, which would begin anew
                (folder / f"killed-{kills}").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


training = threading.Lock()
folder, steps, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
in_memory = sys.argv[4:] == ["memory"]
checkpoint = {"peer_copies": 1} if in_memory else {"keep_last": 2}
engine, loader = make_engine(CONFIG | {"gradient_accumulation_steps": 2, "checkpoint": checkpoint})
engine.load_checkpoint(folder / "checkpoints")
batches = passes(loader)
if fault.isdigit():
    kill_at_any_moment(int(fault))
while engine.global_steps < steps:
    loss = float(engine.train_batch(batches))
    if fault == "kill" and engine.global_steps == 5 and engine.mesh.rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if engine.mesh.rank == 0:
        with (folder / "losses").open("a") as file:
            file.write(json.dumps([engine.global_steps, engine.mesh.world_size, loss]) + "\n")
    (engine.save_to_memory if in_memory else engine.save_checkpoint)(folder / "checkpoints")
    time.sleep(0.3 if fault == "slow" else 0)
training.acquire()
final = {name: tensor.tolist() for name, tensor in engine.gathered_state_dict().items()}
if engine.mesh.rank == 0:
    (folder / "final").write_text(json.dumps(final))
engine.destroy()
torch.distributed.destroy_process_group()
