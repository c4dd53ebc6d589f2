import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import FOLDERS, on_ranks, run_command, run_ranks
from zeromesh import Environment, init_distributed, launch
from zeromesh.comm.environment import VARIABLES, backends, device_for, device_of_group, shutdown
from zeromesh.comm.failure import first_failure

TEST_PATH = os.pathsep.join([*FOLDERS, str(Path(__file__).parents[2])])

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "2",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
RAY = {"NODE_RANK" if name == "GROUP_RANK" else name: value for name, value in TORCHRUN.items()}
SHORT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "expected", "one_node"),
    [
        (TORCHRUN, Environment(5, 1, 2, 8, 2, "node0", 29500), False),
        # Ray's workers; it has another name for the number of the node.
        (TORCHRUN | {"NODE_RANK": "0"}, Environment(5, 1, 2, 8, 2, "node0", 29500), False),
        (RAY, Environment(5, 1, 2, 8, 2, "node0", 29500), False),
        ({"PATH": "/bin"}, Environment(), True),
        (SHORT, Environment(1, 1, 0, 2, 2, "localhost", 29500), True),  # on the loopback interface
    ],
)
def test_variables_of_launchers_are_read(variables, expected, one_node) -> None:
    found = Environment.detect(variables)
    assert (found, found.one_node) == (expected, one_node)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(ValueError, match=f"^{missing} is not set.*torchrun.*unset them all"):
        Environment.detect({name: value for name, value in TORCHRUN.items() if name != missing})
    with pytest.raises(ValueError, match="^RANK is not set, but MASTER_ADDR, MASTER_PORT are;"):
        Environment.detect({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"RANK": "8"}, "RANK is 8, but must be at least 0 and below WORLD_SIZE, 8"),
        ({"RANK": "-1"}, "RANK is -1"),
        ({"RANK": "five"}, "RANK is 'five', but must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but must be at least 0 and below LOCAL_WORLD_SIZE, 2"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9, but must be between 1 and WORLD_SIZE, 8"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK is 1 and RANK is 5"),
        ({"GROUP_RANK": "-1"}, "GROUP_RANK is -1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_inconsistent_variables_are_refused_by_name(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}.*; start the ranks with torchrun"):
        Environment.detect(TORCHRUN | change)


def pretend_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str | None, devices: int) -> None:
    accelerator = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)


@pytest.mark.parametrize(
    ("kind", "devices", "backend", "device"),
    [
        (None, 0, "gloo", "cpu"),
        ("cuda", 4, "nccl", "cuda:3"),
        ("cuda", 4, "gloo", "cuda:3"),
        ("cuda", 2, "gloo", "cuda:1"),
        ("cuda", 4, "mpi", "cpu"),
        ("mps", 1, "gloo", "cpu"),
    ],
)
def test_a_rank_gets_the_device_that_its_backend_serves(monkeypatch, kind, devices, backend, device) -> None:
    pretend_accelerator(monkeypatch, kind, devices)
    assert device_for(Environment(3, 3, 0, 4, 4), backend) == torch.device(device)


def test_more_ranks_than_devices_are_refused_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch, "cuda", 2)
    with pytest.raises(ValueError, match="LOCAL_RANK is 3, but this node has 2 cuda device.*at most 2 ranks per node"):
        device_for(Environment(3, 3, 0, 4, 4), "nccl")


@pytest.mark.parametrize(
    ("kind", "started", "device"),
    [
        (None, "cpu:gloo", "cpu"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda", "cuda:nccl", "cuda:1"),
        ("cuda", "cpu:gloo,cuda:gloo", "cuda:1"),
        ("cuda", "cpu:gloo", "cpu"),
        ("mps", "cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_a_group_of_several_backends_gives_the_device_that_one_of_them_serves(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, started: str, device: str
) -> None:
    pretend_accelerator(monkeypatch, kind, 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: started)
    assert device_of_group(Environment(1, 1, 0, 2, 2)) == torch.device(device)


def test_more_ranks_than_devices_are_refused_for_a_group_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch, "cuda", 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    with pytest.raises(ValueError, match="at most 2 ranks per node"):
        device_of_group(Environment(3, 3, 0, 4, 4))


@on_ranks(2)
def test_a_group_and_its_parts_name_their_backends() -> None:
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group()
    name, whole, part = dist.get_backend(), backends(), backends(dist.new_group([0, 1]))
    assert name != "gloo"
    assert whole["cpu"] == part["cpu"] == "gloo"


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="dist_backend is 'glu', but torch knows gloo"):
        init_distributed("glu")


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_mpi_without_mpi4py_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "mpi4py is not installed; pip install 'mpi4py>=4' mpich brings it"
    monkeypatch.setattr("zeromesh.comm.mpi.backend.missing", lambda: missing)
    with pytest.raises(RuntimeError, match="'mpi', but mpi4py is not installed; pip install .* brings it; or use gloo"):
        init_distributed("mpi")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_without_cuda_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"dist_backend is 'nccl'.*(install a CUDA build|check the driver)"):
        init_distributed("nccl")


def start_anew() -> tuple[list[Environment], float, bool, str]:
    dist.destroy_process_group()
    for name in ("LOCAL_RANK", "GLOO_SOCKET_IFNAME"):
        del os.environ[name]
    environments = [init_distributed(), init_distributed()]
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    shutdown()
    shutdown()
    return environments, tensor.item(), dist.is_initialized(), os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_group_is_started_once_on_the_loopback_interface(world_size: int) -> None:
    for rank, result in enumerate(run_ranks(start_anew, world_size)):
        (first, second), total, remains, interface = result
        assert (first.rank, first.local_rank, first.world_size) == (rank, rank, world_size)
        assert (second.rank, second.local_rank, second.world_size) == (rank, rank, world_size)
        assert total == world_size
        assert not remains
        assert interface.startswith("lo")


@on_ranks(1)
def test_a_single_process_needs_no_variables() -> None:
    dist.destroy_process_group()
    for name in VARIABLES:
        os.environ.pop(name, None)
    assert (init_distributed(), dist.get_world_size()) == (Environment(), 1)


def join_others_group() -> Environment:
    node = str(dist.get_rank() // 2)
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ["GROUP_RANK"] = node
    return init_distributed()


def test_a_group_that_somebody_else_started_tells_the_environment() -> None:
    environments = run_ranks(join_others_group, 3)
    found = [(e.rank, e.local_rank, e.node_rank, e.world_size, e.local_world_size) for e in environments]
    assert found == [(0, 0, 0, 3, 2), (1, 1, 0, 3, 2), (2, 0, 1, 3, 1)]


def write_environment(folder: str) -> None:
    environment = init_distributed()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    found = [environment.rank, environment.world_size, environment.master_address, tensor.item()]
    Path(folder, str(environment.rank)).write_text(json.dumps([*found, os.environ["OMP_NUM_THREADS"]]))


@pytest.mark.usefixtures("_bare")
def test_launch_starts_ranks_that_share_the_cores(tmp_path: Path) -> None:
    launch(write_environment, 2, str(tmp_path))
    cores = str(max(1, len(os.sched_getaffinity(0)) // 2))
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert found == [[rank, 2, "127.0.0.1", 2.0, cores] for rank in (0, 1)]
    assert "OMP_NUM_THREADS" not in os.environ


def fail_on_one() -> None:
    environment = init_distributed()
    if environment.rank == 1:
        raise LookupError("the key is not there")
    dist.barrier()


@pytest.mark.full
@pytest.mark.usefixtures("_bare")
def test_launch_shows_the_first_failure_and_nothing_else() -> None:
    code = (
        "import test_environment as t\n"
        "from zeromesh.apps.launch.launch import RankFailure\n"
        "try:\n"
        "    t.launch(t.fail_on_one, 2)\n"
        "except RankFailure as error:\n"
        "    print(error.rank, error.summary, error, sep='\\n')\n"
    )
    lines = run_command([sys.executable, "-c", code], timeout=180, PYTHONPATH=TEST_PATH).stdout.splitlines()
    summary = "LookupError: the key is not there"
    assert lines[:4] == ["1", summary, f"rank 1 failed first: {summary}", "Traceback (most recent call last):"]
    assert "in fail_on_one" in "".join(lines[4:])
    assert lines[-1] == summary


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_a_process_that_ends_lets_threads_of_gloo_put_down_their_tensors() -> None:
    code = (
        "import ctypes, threading, time\n"
        "from zeromesh.comm.environment import init_distributed, shutdown\n"
        "def spin():\n"
        "    ctypes.CDLL(None).prctl(15, b'pt_gloo_runloop')\n"
        "    end = time.monotonic() + 0.4\n"
        "    while time.monotonic() < end:\n"
        "        pass\n"
        "    print('down')\n"
        "init_distributed()\n"
        "shutdown()\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
    )
    assert run_command([sys.executable, "-c", code]).stdout == "down\n"


def test_the_first_failure_is_the_earliest_exception_or_a_killed_rank(tmp_path: Path) -> None:
    for rank, at in ((0, 20.5), (1, 20.25), (2, 30.0)):
        record = {"at": at, "summary": f"OSError: {rank}", "details": "Traceback", "status": 1, "lingers": 0.0}
        (tmp_path / f"{rank}.failure").write_text(json.dumps(record))
    assert str(first_failure(tmp_path, {0: 1})) == "rank 1 failed first: OSError: 1\nTraceback"
    assert str(first_failure(tmp_path, {0: 1, 2: -11})).startswith("rank 2 failed first: killed by SIGSEGV")
    assert str(first_failure(tmp_path, {1: 1, 2: -15})).startswith("rank 1 failed first")
    assert str(first_failure(tmp_path, {1: 1, 5: 70})) == "rank 5 failed first: exited with status 70"
    assert str(first_failure(tmp_path / "none", {2: 3, 0: -15})) == "rank 2 failed first: exited with status 3"


def remember(where: list[int]) -> None:
    where.append(os.getpid())


@pytest.mark.usefixtures("_bare")
def test_launch_runs_in_process_for_one_rank_and_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    launch(remember, 1, called)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    launch(remember, 2, called)
    assert called == [os.getpid()] * 2
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="RANK is not set"):
        launch(remember, 2, called)


def test_launch_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0, but must be at least 1"):
        launch(remember, 0)


def wait_in_a_collective(folder: str) -> None:
    environment = init_distributed()
    (Path(folder) / f"{environment.rank}.pid").write_text(str(os.getpid()))
    if environment.rank == 1:
        time.sleep(1000)
    dist.barrier()


def pids_of(folder: Path) -> list[int]:
    texts = [file.read_text() for file in folder.glob("*.pid")]
    return [int(text) for text in texts if text]


@pytest.mark.full
@pytest.mark.usefixtures("_bare")
def test_an_interrupt_stops_all_ranks_without_noise(tmp_path: Path) -> None:
    code = (
        "import sys, test_environment as t\n"
        "try:\n"
        "    t.launch(t.wait_in_a_collective, 2, sys.argv[1])\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": TEST_PATH},
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 60
        while len(pids_of(tmp_path)) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=120)[0] == "interrupted\n"
        for pid in pids_of(tmp_path):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
