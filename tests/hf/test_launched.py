"""Scripts under the launchers of Accelerate and torch, on two processors, equal themselves in one plain process."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import FOLDERS, run_command
from hf_training import EPS, RATE, stage

pytest.importorskip("accelerate")
pytestmark = pytest.mark.full

HERE = Path(__file__).parent
LOOP, TRAINER = HERE / "launched_loop.py", HERE / "launched_trainer.py"
PYTHON = (sys.executable, "-m")
ALIAS = (*PYTHON, "zeromesh.deepspeed")
LAUNCH = ("accelerate.commands.launch", "--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone")
AGAIN = ("-m", "zeromesh.deepspeed")  # in each rank

# Of `accelerate config`, shortened.
ACCELERATE_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {gradient_accumulation_steps: 2, zero_stage: 2, zero3_init_flag: false, gradient_clipping: 0.0}
machine_rank: 0
"""

LAUNCHED: dict[str, tuple[Any, ...]] = {
    "accelerate, options": (*ALIAS, "-m", *LAUNCH, "--use_deepspeed", "--zero_stage", "3", *AGAIN, LOOP),
    "accelerate, its file": (*ALIAS, "-m", *LAUNCH, "--config_file", "accelerate.yaml", *AGAIN, LOOP),
    "accelerate, a file of DeepSpeed's": (
        *ALIAS, "-m", *LAUNCH, "--use_deepspeed", "--deepspeed_config_file", "ds.json", *AGAIN, LOOP,
    ),
    "accelerate, our plugin": (*PYTHON, *LAUNCH, "--multi_gpu", LOOP),
    "torchrun, our plugin": (*PYTHON, *TORCHRUN, LOOP),
    "torchrun, a script of transformers": (*ALIAS, "-m", *TORCHRUN, *AGAIN, TRAINER),
}  # fmt: skip


def launched(folder: Path, *command: Any) -> dict[str, Any]:
    """Run a command in a folder, and return what the script wrote there."""
    (folder / "config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    (folder / "ds.json").write_text(json.dumps(stage(2, gradient_clipping=0.0, gradient_accumulation_steps=2)))
    (folder / "accelerate.yaml").write_text(ACCELERATE_FILE)
    result = folder / "result.json"
    rest: tuple[Any, ...] = (result,)
    if TRAINER in command:
        plain = command[0] == sys.executable and len(command) == 2
        rest = ("--output_dir", folder, "--result", result, "--max_steps", 4, "--logging_steps", 1, "--report_to")
        rest = (*rest, "none", "--learning_rate", RATE, "--adam_epsilon", EPS, "--per_device_train_batch_size")
        rest = (*rest, *((4, "--use_cpu") if plain else (2, "--deepspeed", "ds_auto.json")))
        (folder / "ds_auto.json").write_text(json.dumps(stage(3)))
    elif "zeromesh.deepspeed" not in command and len(command) > 2:
        rest = (result, "config.json")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), *FOLDERS]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    finished = run_command([*command, *map(str, rest)], timeout=300, cwd=folder, **variables)
    assert finished.returncode == 0, finished.stdout
    return json.loads(result.read_text())


@pytest.mark.parametrize("name", LAUNCHED)
def test_launchers_start_ranks_that_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    command = LAUNCHED[name]
    (tmp_path / "plain").mkdir()
    (tmp_path / "ranks").mkdir()
    wanted = launched(tmp_path / "plain", sys.executable, command[-1])
    found = launched(tmp_path / "ranks", *command)
    assert found["ranks"] == 2
    assert "DEEPSPEED" in found["kind"]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
