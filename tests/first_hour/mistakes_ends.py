"""Mistakes by which a rank ends, fails or goes elsewhere while others wait, and by which ranks do the same work."""

from __future__ import annotations

from mistakes import Mistake

BEGINNING = """
import sys
import torch, zeromesh
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)], nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)

    def generate(self, x, tokens):
        for _ in range(tokens):
            self(x)

torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": STAGE},
          "gradient_accumulation_steps": STEPS, "optimizer": {"type": "AdamW"},
          "communication": {"local_memory": MEMORY}}
engine, *_ = zeromesh.initialize(model=Net(), config=config)
rank = engine.mesh.rank
data = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))

def step(number):
    loss = engine(data[number * 4 % 64:][:4]).square().mean()
    engine.backward(loss)
    engine.step()
"""


def _script(end: str, stage: int = 3, steps: int = 1, memory: bool = True) -> dict[str, str]:
    """Return a training script with a mistake at its end."""
    text = BEGINNING.replace("STAGE", str(stage)).replace("STEPS", str(steps)).replace("MEMORY", str(memory))
    return {"train.py": text + end}


def _function(end: str, beginning: str) -> str:
    """Return a script that launches the training script as a function."""
    body = "".join(f"    {line}\n" for line in f"{beginning}{end}".splitlines())
    return f"def main():\n{body}\nif __name__ == '__main__':\n    import zeromesh\n    zeromesh.launch(main, 2)\n"


LAUNCH, TORCHRUN = "zeromesh launch --nproc 2 train.py", "python -m torch.distributed.run --nproc_per_node 2 train.py"
CIRCULAR = ("failed first", "Traceback", "what the first rank to fail says", "was silenced")
BATCHES = "Give every rank as many batches (DistributedSampler, drop_last=True, or training_data= of initialize)"

MISTAKES = [
    Mistake(
        "uneven loaders",
        LAUNCH,
        (
            "error: rank 0 ended after 4 updates; rank 1 waits in update 5, in the forward (parameters of unit",
            "train.py:",
            "Rank 1 has more batches, or goes on alone. " + BATCHES,
        ),
        _script("for number in range(4 + rank): step(number)"),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "uneven loaders with accumulation and replicated states over gloo",
        LAUNCH,
        (
            "error: rank 1 ended after 2 updates; rank 0 waits in update 3, in the backward of micro-batch 2 of 2",
            BATCHES,
        ),
        _script("for number in range(6 - 2 * rank): step(number)", stage=0, steps=2, memory=False),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "uneven loaders under torchrun",
        TORCHRUN,
        ("zeromesh: rank 0 ended after 4 updates; rank 1 waits in update 5, in the", BATCHES),
        _script("for number in range(4 + rank): step(number)", stage=2),
        status=1,
        silent_about=("PeerLost", "what the first rank to fail says"),
        most_lines=45,  # most of them torchrun's own
    ),
    Mistake(
        "a stop condition on one rank",
        LAUNCH,
        (
            "error: rank 1 ended after 3 updates; rank 0 waits in update 4",
            "let a stop condition hold on all ranks at once",
        ),
        _script("for number in range(6):\n    if rank == 1 and number == 3: break\n    step(number)", stage=1),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "uneven loaders in a function of zeromesh.launch",
        "python train.py",
        ("RankFailure: rank 0 ended after 2 updates; rank 1 waits in update 3", BATCHES),
        {"train.py": _function("for number in range(2 + rank): step(number)", _script("", stage=2)["train.py"])},
        status=1,
        silent_about=("failed first", "PeerLost"),
        most_lines=30,
    ),
    Mistake(
        "uneven loaders in forks of a notebook in which a cell has failed before",
        """python -c "exec(open('train.py').read())" """,
        ("RankFailure: rank 0 ended after 2 updates; rank 1 waits in update 3", BATCHES),
        {
            "train.py": "import sys\nsys.last_value = NameError('of a cell')\n"
            + _function("for number in range(2 + rank): step(number)", _script("", stage=2)["train.py"])
        },
        status=1,
        silent_about=("NameError",),
        most_lines=30,
    ),
    Mistake(
        "a save on rank 0 alone, at the end",
        LAUNCH,
        (
            "error: rank 1 ended after 3 updates; rank 0 waits in save_checkpoint() after 3 updates",
            "All ranks take part in a save: call it on every rank, not under `if rank == 0:`.",
        ),
        _script("for number in range(3): step(number)\nif rank == 0: engine.save_checkpoint('checkpoints')", stage=1),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "a save on rank 0 alone, between updates",
        LAUNCH,
        (
            "rank 0 waits in its collective",
            "in save_checkpoint() after 2 updates: exchange",
            "in update 3, in the forward: all_gather",
            "All ranks take part in a save: call it on every rank, not under `if rank == 0:`.",
        ),
        _script(
            "for number in range(4):\n    if rank == 0 and number == 2: engine.save_checkpoint('c')\n    step(number)"
        ),
        status=70,
        most_lines=16,  # a line for each rank
        silent_about=CIRCULAR,
    ),
    Mistake(
        "unequal numbers of batches to evaluate",
        LAUNCH,
        (
            "error: rank 0 ended after 1 update; rank 1 waits in a forward without gradients after 1 update",
            "Ranks that evaluate must run as many forwards as the others",
        ),
        _script("step(0)\nwith torch.no_grad():\n    for number in range(3 + 2 * rank): engine(data[:4])"),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "unequal numbers of batches to evaluate between updates",
        LAUNCH,
        (
            "error: ranks wait for each other in different calls:",
            "Without gradients, since the last update: 3 forwards on rank 0; 4 forwards on rank 1.",
            "Ranks that evaluate must run as many forwards as the others",
        ),
        _script(
            "for number in range(3):\n    step(number)\n    with torch.no_grad():\n"
            "        for _ in range(3 + rank): engine(data[:4])"
        ),
        status=70,
        silent_about=CIRCULAR,
        most_lines=16,  # a line for each rank
    ),
    Mistake(
        "generate of unequal lengths",
        LAUNCH,
        (
            "error: rank 0 ended after 1 update; rank 1 waits in generate() after 1 update",
            "pass synced_gpus=True to generate",
        ),
        _script("step(0)\nwith torch.no_grad(): engine.generate(data[:4], 3 + 2 * rank)"),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "a forward on rank 0 alone",
        LAUNCH,
        ("error: rank 1 ended after 1 update; rank 0 waits in", "let no rank call the model alone"),
        _script("step(0)\nwith torch.no_grad():\n    if rank == 0: engine(data[:4])"),
        status=1,
        silent_about=CIRCULAR,
    ),
    Mistake(
        "step() left out on one rank",
        LAUNCH,
        (
            "in update 2, in the step: exchange",
            "in the forward: all_gather",
            "none may leave one out, or run one alone",
        ),
        _script(
            "for number in range(4):\n    engine.backward(engine(data[:4]).mean())\n"
            "    if rank == 0 or number != 1: engine.step()"
        ),
        status=70,
        most_lines=16,  # a line for each rank
        silent_about=CIRCULAR,
    ),
    Mistake(
        "an exception on one rank",
        TORCHRUN,
        (
            "ValueError: sample 17 has no label",
            "zeromesh: rank 1 failed after 2 updates: ValueError: sample 17 has no label; rank 0 waits in update 3",
        ),
        _script(
            "for number in range(4):\n    if rank == 1 and number == 2: raise ValueError('sample 17 has no label')\n"
            "    step(number)"
        ),
        status=1,
        silent_about=("PeerLost",),
        most_lines=60,
    ),
    Mistake(
        "no DistributedSampler",
        LAUNCH,
        ("ranks 0-1 train on the same samples", "num_replicas=engine.data_size, rank=engine.data_rank"),
        _script(
            "for x, in DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=4):\n"
            "    engine.backward(engine(x).mean()); engine.step()"
        ),
        status=0,
    ),
    Mistake(
        "a DistributedSampler, about which nothing is said",
        LAUNCH,
        (),
        _script(
            "set_ = TensorDataset(torch.randn(32, 16))\n"
            "for x, in DataLoader(set_, batch_size=4, sampler=DistributedSampler(set_)):\n"
            "    engine.backward(engine(x).mean()); engine.step()"
        ),
        status=0,
        silent_about=("same samples", "Traceback"),
    ),
]
