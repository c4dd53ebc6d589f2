"""The files of ``examples/`` to copy for clusters: each starts the ranks that its system's variables describe."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from commands import call, write_config
from harness import run_command
from zeromesh import Environment
from zeromesh.apps.launch.agent import LaunchPlan

EXAMPLES = Path(__file__).parents[2] / "examples"
TOOL = Path(__file__).parents[2] / "tools" / "slurm_scenarios.py"
SECRET = "of all nodes, and of no one else"

# What the systems set in the second of two nodes with 8 GPUs, by their documentation.
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "first",
    "PET_MASTER_PORT": "29500",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "first\nsecond",
}
# LSF's own, and those of the mpirun that it starts.
LSF = {
    "LSB_JOBID": "12",
    "LSB_DJOB_NUMPROC": "16",
    "OMPI_COMM_WORLD_RANK": "11",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}


def arguments_of(script: str, program: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """Run a shell's lines, with a program that only shows its arguments, and return these."""
    stand_in = folder / program
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env={**path, **variables}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    arguments: list[str] = json.loads(done.stdout.splitlines()[-1])
    return arguments


def containers(file: str) -> list[dict[str, Any]]:
    """Return what starts in each kind of pod of a manifest."""
    spec = yaml.safe_load((EXAMPLES / "kubernetes" / file).read_text())["spec"]
    if "trainer" in spec:
        assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 8)
        return [spec["trainer"]]
    kinds = spec["pytorchReplicaSpecs"]
    assert sum(kind["replicas"] for kind in kinds.values()) == 2
    return [kind["template"]["spec"]["containers"][0] for kind in kinds.values()]


def scripts() -> dict[str, tuple[str, dict[str, str]]]:
    """Return the shell's lines of each file that starts ``zeromesh launch`` on each node, and the variables there."""
    found = {}
    for file in ("pytorchjob.yaml", "trainjob.yaml"):
        for number, container in enumerate(containers(file)):
            assert container["command"] == ["sh", "-c"]
            found[f"{file} {number}"] = (container["args"][0], KUBEFLOW)
    found["skypilot"] = (yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())["run"], SKYPILOT)
    return found


@pytest.mark.parametrize("name", sorted(scripts()))
def test_a_manifest_starts_the_ranks_of_its_node(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, variables = scripts()[name]
    arguments = arguments_of(script, "zeromesh", tmp_path, variables)
    assert arguments[-5:] == ["-m", "zeromesh", "train", "/runs/config.json", "--auto-resume"]
    monkeypatch.setenv("ZEROMESH_SECRET", SECRET)
    with patch("zeromesh.apps.launch.agent.run") as run:
        result = call(*arguments)
    assert result.exit_code == 0, result.output
    command, plan = run.call_args.args[:2]
    assert command[-3:] == ["train", "/runs/config.json", "--auto-resume"]
    assert isinstance(plan, LaunchPlan)
    assert (plan.ranks, plan.least_nodes, plan.most_nodes, plan.node_rank) == (8, 2, 2, 1)
    assert (plan.master, plan.secret) == ("first:29500", SECRET.encode())


def test_lsf_starts_as_many_ranks_as_it_has_given_and_queues_again_what_was_saved(tmp_path: Path) -> None:
    text = (EXAMPLES / "lsf" / "train.lsf").read_text()
    options = dict(re.findall(r"^#BSUB (-\w+) ?(.*)$", text, re.MULTILINE))
    assert options["-Q"] == '"75"'
    assert (options["-wa"], options["-n"]) == ("TERM", LSF["LSB_DJOB_NUMPROC"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    arguments = arguments_of(
        text.replace("$(python ", "$(python3 "), "mpirun", tmp_path, {**LSF, "VENV": str(tmp_path)}
    )
    assert arguments[:2] == ["-n", "16"]
    assert arguments[-4:] == ["zeromesh", "train", "config.json", "--auto-resume"]
    environment = Environment.detect(LSF)
    assert (environment.rank, environment.world_size, environment.local_rank) == (11, 16, 3)


@pytest.mark.parametrize("file", ["slurm/train.sbatch", "lsf/train.lsf", "mpi/train.sh"])
def test_shells_can_read_the_file(file: str) -> None:
    done = subprocess.run(["bash", "-n", EXAMPLES / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpirun.openmpi", "mpiexec.hydra"])
def test_the_file_for_mpi_trains_under_either_family(launcher: str, corpus: Path, tmp_path: Path) -> None:
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mpiexec = shutil.which(launcher, path=search)
    if mpiexec is None:
        pytest.skip(f"{launcher} is not installed")
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "model": {"hidden_size": 16, "layers": 2, "heads": 2, "sequence_length": 32},
        "data": {"train": str(corpus), "vocabulary_size": 270, "validation_fraction": 0.05},
        "run": {"steps": 2, "output": str(tmp_path / "run"), "evaluate_batches": 1},
    }
    path = write_config(tmp_path, settings)
    (tmp_path / "hosts").write_text("localhost\n")
    # Open MPI asks twice before it starts as root.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["sh", EXAMPLES / "mpi" / "train.sh", tmp_path / "hosts", "2", path]
    done = run_command(command, timeout=200, MPIEXEC=mpiexec, PATH=search, **root)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["mesh"]["data"] == 2


@pytest.mark.full
def test_slurm_does_in_every_scenario_what_it_must() -> None:
    sys.path.append(str(TOOL.parent))
    import slurm_scenarios

    if reason := slurm_scenarios.missing():
        pytest.skip(reason)
    wrong = [outcome for outcome in slurm_scenarios.run_scenarios() if not outcome.right]
    assert not wrong, "\n".join(f"{outcome.scenario.name}: {outcome.happened}" for outcome in wrong)
