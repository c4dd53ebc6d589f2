"""The example of Ray Train, with Ray if it is installed, else with its documented interface in a few lines."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from harness import run_command

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]

# What Ray does: processes with torchrun's variables, a process group, the function with its options in each.
STAND_IN = """
import multiprocessing, os, socket
from dataclasses import dataclass
import torch.distributed as dist
def report(metrics): assert metrics["loss"] > 0
@dataclass
class ScalingConfig:
    num_workers: int
    use_gpu: bool = False
def _work(rank, size, port, function, options):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")
    function(options)
@dataclass
class TorchTrainer:
    function: object
    train_loop_config: dict
    scaling_config: ScalingConfig
    def fit(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        size = self.scaling_config.num_workers
        chosen = (size, port, self.function, self.train_loop_config)
        workers = [multiprocessing.Process(target=_work, args=(rank, *chosen)) for rank in range(size)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
        assert not any(worker.exitcode for worker in workers)
"""


@pytest.mark.full
def test_workers_of_ray_train_as_one_does(tmp_path: Path) -> None:
    path = [str(ROOT), *sys.path]
    if importlib.util.find_spec("ray") is None:
        (tmp_path / "ray" / "train").mkdir(parents=True)
        (tmp_path / "ray" / "__init__.py").touch()
        (tmp_path / "ray" / "train" / "__init__.py").write_text("from ray.train.torch import *")
        (tmp_path / "ray" / "train" / "torch.py").write_text(STAND_IN)
        path.insert(0, str(tmp_path))
    losses = {}
    for stage, workers in ((0, 1), (3, 2)):
        out = tmp_path / f"out{workers}"
        options = ["--workers", str(workers), "--stage", str(stage), "--steps", "3", "--out", out]
        variables = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        finished = run_command(
            [sys.executable, ROOT / "examples" / "ray_train.py", *options], cwd=tmp_path, **variables
        )
        assert finished.returncode == 0, finished.stdout
        assert (out / "model.safetensors").is_file()
        losses[workers] = json.loads((out / "losses.json").read_text())
    assert len(losses[1]) == 3
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
