import re
import sys

import pytest

from harness import run_command
from zeromesh import Environment
from zeromesh.comm.environment import is_launched
from zeromesh.comm.launchers import FIRST_PORT, PORTS, first_host, tasks_of_nodes

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[08-10],login",
    "SLURM_JOB_NODELIST": "other[1-9]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
TORCHRUN = {
    "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


def place(environment: Environment) -> tuple[int, int, int, int, int, int, str]:
    e = environment
    return e.rank, e.local_rank, e.node_rank, e.world_size, e.local_world_size, e.node_count, e.launcher


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, (5, 1, 2, 7, 2, 4, "slurm")),
        (OPEN_MPI, (3, 1, 1, 4, 2, 2, "open mpi")),
        (MPICH, (3, 1, 1, 4, 2, 2, "mpich")),
        (TORCHRUN, (1, 1, 0, 2, 2, 1, "torchrun")),
        ({}, (0, 0, 0, 1, 1, 1, "single")),
    ],
)
def test_each_launchers_variables_are_read(variables: dict[str, str], expected: tuple[int | str, ...]) -> None:
    assert place(Environment.detect(variables)) == expected
    assert is_launched(variables) == bool(variables)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (SLURM | TORCHRUN, "torchrun"),
        (MPICH | TORCHRUN, "torchrun"),
        (SLURM | MPICH, "mpich"),
        (SLURM | OPEN_MPI, "open mpi"),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, "slurm"),
        (OPEN_MPI | {"PMIX_RANK": "3"}, "open mpi"),
    ],
)
def test_a_launcher_that_another_one_started_counts(variables: dict[str, str], launcher: str) -> None:
    assert Environment.detect(variables).launcher == launcher


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": None, "ENVIRONMENT": "BATCH"},
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_ID": "4294967290"},
        {"SLURM_STEP_ID": None, "SLURM_PROCID": None, "SLURM_LOCALID": None, "SLURM_NODEID": None},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_ID": None, "ENVIRONMENT": "BATCH", "MASTER_ADDR": "gpu08", "MASTER_PORT": "1234"},
    ],
)
def test_a_shell_in_an_allocation_is_a_single_process(change: dict[str, str | None]) -> None:
    variables = {name: value for name, value in (SLURM | change).items() if value is not None}
    assert place(Environment.detect(variables)) == (0, 0, 0, 1, 1, 1, "single")


def test_older_names_of_slurm_and_the_jobs_instead_of_the_steps_do_too() -> None:
    old = {"SLURM_STEPID": "0", "SLURM_NPROCS": "3", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_NODELIST": "a,b"}
    own = {"SLURM_JOBID": "9", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    environment = Environment.detect(old | own)
    assert place(environment) == (2, 0, 1, 3, 1, 2, "slurm")
    assert environment.master_address == "a"


def test_the_number_of_the_step_and_the_list_of_tasks_may_be_missing() -> None:
    few = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    assert place(Environment.detect(few | {"SLURM_JOB_NODELIST": "a,b"})) == (3, 1, 1, 4, 2, 2, "slurm")
    alone = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}
    assert place(Environment.detect(alone)) == (1, 1, 0, 2, 2, 1, "slurm")


def test_slurms_ranks_agree_on_a_master_that_another_step_does_not_use() -> None:
    first = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    last = SLURM | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    found = [Environment.detect(variables) for variables in (first, last)]
    assert {environment.master_address for environment in found} == {"gpu08"}
    assert len({environment.master_port for environment in found}) == 1
    assert FIRST_PORT <= found[0].master_port < FIRST_PORT + PORTS
    for other in ({"SLURM_STEP_ID": "3"}, {"SLURM_JOB_ID": "4712"}):
        assert Environment.detect(first | other).master_port != found[0].master_port


def test_on_one_node_the_master_is_the_loopback_interface() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "0"}
    assert Environment.detect(SLURM | one).master_address == "127.0.0.1"
    mpi = Environment.detect(MPICH | {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"})
    assert mpi.master_address == "127.0.0.1"
    assert FIRST_PORT <= mpi.master_port < FIRST_PORT + PORTS
    assert (Environment.detect(MPICH).master_address, Environment.detect(MPICH).master_port) == ("", 0)


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI, MPICH])
def test_a_master_set_by_hand_is_taken(variables: dict[str, str]) -> None:
    environment = Environment.detect(variables | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (environment.master_address, environment.master_port) == ("head", 1234)
    assert environment.launcher != "torchrun"
    assert Environment.detect(OPEN_MPI | {"MASTER_ADDR": "head"}).master_port == 29500


def test_some_of_torchruns_variables_set_by_hand_must_say_the_same() -> None:
    by_hand = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu08"}
    assert place(Environment.detect(SLURM | by_hand)) == (5, 1, 2, 7, 2, 4, "slurm")
    with pytest.raises(
        ValueError, match="WORLD_SIZE is '8', but srun started this process with world size 7"
    ) as caught:
        Environment.detect(SLURM | by_hand | {"WORLD_SIZE": "8"})
    assert "SLURM_STEP_NUM_TASKS=7" in str(caught.value)
    assert "WORLD_SIZE=8" in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID is 7, but must be at least 0 and below SLURM_STEP_NUM_TASKS, 7"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "2(x3) is 6 tasks, but SLURM_STEP_NUM_TASKS is 7"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, "SLURM_STEP_TASKS_PER_NODE: '2(3)' does not say how many"),
        (SLURM | {"SLURM_NODEID": "4"}, "SLURM_NODEID is 4, but 4 nodes have tasks"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[08-10"}, "'gpu[08-10' is not a list of hosts"),
        (SLURM | {"SLURM_LOCALID": "two"}, "SLURM_LOCALID is 'two', but must be a whole number"),
        (SLURM | {"SLURM_PROCID": "--2"}, "SLURM_PROCID is '--2', but must be a whole number"),
        (SLURM | {"MASTER_PORT": "high"}, "MASTER_PORT is 'high', but must be a whole number"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, "SLURM_PROCID is not set, but SLURM_LOCALID"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4"),
        (MPICH | {"MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID is 2, but must be at least 0 and below MPI_LOCALNRANKS, 2"),
        (MPICH | {"MPI_LOCALNRANKS": "4"}, "MPI_LOCALRANKID is 1 and PMI_RANK is 3"),
        ({"PMI_RANK": "1"}, "PMI_SIZE is not set, but PMI_RANK are"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, "GROUP_WORLD_SIZE is 2, but 2 of 2 ranks are on this node"),
    ],
)
def test_contradictions_and_gaps_list_all_that_is_set(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        Environment.detect(variables)
    message = str(caught.value)
    assert "unset them all" in message or "found" in message
    shown = [f"{name}={value}" for name, value in variables.items() if name not in ("PMI_FD", "SLURM_JOB_ID")]
    assert all(text in message for text in shown), message


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", "a"),
        ("n[01-03,7],x", "n01"),
        ("n[8-11]-ib.local", "n8-ib.local"),
        ("r[1-2]n[3,1]", "r1n3"),
        ("b2,c[1]", "b2"),
    ],
)
def test_the_first_of_a_list_of_hosts_is_found(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "a[1-", "a]", "a[x]", "a[1-2", ",a", "a,,b", "a[[1]]"])
def test_malformed_lists_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of hosts"):
        first_host(text)


def test_tasks_per_node_are_counted() -> None:
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of_nodes("4") == [4]
    with pytest.raises(ValueError, match="does not say"):
        tasks_of_nodes("2x3")


RANKS = """
import os, subprocess, sys
job = dict(MPI_LOCALNRANKS="2", PMI_SIZE="2")
code = "from zeromesh.comm.detect import Environment; print(Environment.detect().master_port)"
ranks = [dict(os.environ, **job, PMI_RANK=str(r), MPI_LOCALRANKID=str(r)) for r in range(2)]
# The second rank has a shell between it and the launcher.
direct = subprocess.run([sys.executable, "-c", code], env=ranks[0], capture_output=True, text=True).stdout
wrapped = subprocess.run(["sh", "-c", '"$0" -c "$1"; true', sys.executable, code], env=ranks[1],
                         capture_output=True, text=True).stdout
print(os.getpid(), direct.strip(), wrapped.strip())
"""


def test_ranks_of_one_node_derive_the_port_from_the_process_that_started_them() -> None:
    ports = []
    for _ in range(2):
        pid, direct, wrapped = run_command([sys.executable, "-c", RANKS]).stdout.split()
        assert direct == wrapped == str(FIRST_PORT + int(pid) % PORTS)
        ports.append(direct)
    assert ports[0] != ports[1]
