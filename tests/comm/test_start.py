import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from harness import free_port, on_ranks, run_command, run_ranks
from zeromesh import Environment, init_distributed
from zeromesh.comm import environment as module
from zeromesh.comm import interface, nodes, peers, rendezvous
from zeromesh.comm.collectives import Group, PeerLost
from zeromesh.comm.environment import VARIABLES, StartError, default_backend, device_for, shutdown
from zeromesh.comm.peers import Peer, with_topology
from zeromesh.comm.rendezvous import reach, start_limit
from zeromesh.comm.traffic import Traffic

pytestmark = pytest.mark.usefixtures("no_group")  # which tests of other files may have left in this process

SHORT = timedelta(seconds=0.5)


def two_ranks(rank: int, port: int, address: str = "127.0.0.1") -> Environment:
    return Environment(rank, rank, 0, 2, 2, address, port, launcher="torchrun")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def refused(environment: Environment, **arguments: object) -> str:
    with pytest.raises(StartError) as caught:
        init_distributed("gloo", start_timeout=SHORT, environment=environment, **arguments)
    assert not dist.is_initialized()
    return str(caught.value)


def test_a_master_that_nobody_is_says_where_and_what_to_look_at() -> None:
    port = free_port()
    message = refused(two_ranks(1, port))
    assert f"the master at 127.0.0.1:{port} cannot be reached from {socket.gethostname()}" in message
    assert "attempts in 0.5 s, the last one: Connection refused" in message
    assert all(word in message for word in ("rank 0 is running", "MASTER_ADDR", "firewall", "ZEROMESH_START_TIMEOUT"))


def test_a_master_on_loopback_is_named_by_all_while_they_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    port = free_port()
    hint = "the master listens on loopback, as MASTER_ADDR is localhost, and other hosts cannot reach it"
    assert hint in refused(two_ranks(0, port, "localhost"))
    assert f"not all ranks have come to localhost:{port} in 0.1 s: {hint}" in caplog.text
    caplog.clear()
    gc.collect()  # the error's traceback holds the store that still listens
    with pytest.raises(StartError, match="does not have localhost as MASTER_ADDR, so that it listens on loopback"):
        init_distributed(start_timeout=timedelta(seconds=1.5), environment=two_ranks(1, port, socket.gethostname()))
    assert "rank 1 has not reached the master" in caplog.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # a launcher that has counted the ranks of this node
    assert "loopback" not in refused(two_ranks(0, port, "localhost"))


def test_the_holder_of_the_store_stays_until_the_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LEAVING_SECONDS", 0.05)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = dist.HashStore()
    for rank in (0, 1, 0):  # the first of these goes after a while, the last one at once
        rendezvous.leave(two_ranks(rank, 1), store, os.getpid())
    assert store.add("left", 0) == 3
    rendezvous.leave(two_ranks(1, 1), store, os.getpid() + 1)  # in a fork
    monkeypatch.setattr(sys, "last_value", KeyError(), raising=False)
    rendezvous.leave(two_ranks(0, 1), store, os.getpid())
    assert store.add("left", 0) == 3


def with_other_secrets(port: int) -> str:
    rank = dist.get_rank()
    leave()
    os.environ.pop("ZEROMESH_TOKEN", None)
    os.environ["ZEROMESH_SECRET"] = "sixteen letters " + str(rank)
    return error_of_start(two_ranks(rank, port), seconds=1.0)


def test_ranks_with_other_secrets_are_told_so() -> None:
    first, second = run_ranks(with_other_secrets, 2, free_port())
    assert "did not come" in first
    assert "have the same ZEROMESH_SECRET" in first
    assert "does not have this rank's ZEROMESH_SECRET" in second
    assert "Set ZEROMESH_SECRET to the same text on all ranks" in second


def test_a_message_that_gloo_refuses_to_start_names_the_cause() -> None:
    def closed(*_: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")

    group = Group("data", None, torch.device("cpu"), Traffic())
    group.process_group, group._hosted = SimpleNamespace(recv=closed, send=closed), True
    group.purposes[3] = "all-gather of parameters"
    with pytest.raises(PeerLost, match=r"^all-gather of parameters .* could not be finished: another rank .*pair.cc"):
        group._post([(1, torch.zeros(1))], [], 3)


def test_a_master_whose_name_is_unknown_is_told() -> None:
    assert "the name 'no-such-host.invalid' is not known here" in refused(two_ranks(1, 1234, "no-such-host.invalid"))


def test_a_master_that_is_another_program_is_told(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    message = refused(two_ranks(1, port))
    assert f"something listens at 127.0.0.1:{port}" in message
    assert "MASTER_PORT" in message


def test_a_port_in_use_says_by_which_process(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    message = refused(two_ranks(0, port))
    assert f"rank 0 cannot listen on port {port}, MASTER_PORT: Address already in use" in message
    if sys.platform == "linux":
        assert f"(process {os.getpid()}, " in message
    assert "free port" in message


def test_ranks_that_do_not_come_are_named() -> None:
    port = free_port()
    message = refused(two_ranks(0, port))
    assert f"of 2 ranks, 1 did not come to 127.0.0.1:{port} within 0.5 s" in message


@pytest.mark.full
def test_ctrl_c_ends_a_rank_that_waits_for_the_others() -> None:
    port = free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", "import zeromesh; zeromesh.init_distributed()"]
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 60
        while not (reached := reach("127.0.0.1", port, 0.0)[1] == "") and time.monotonic() < limit:
            time.sleep(0.1)
        assert reached
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
    finally:
        process.kill()
        process.wait()


def error_of_start(environment: Environment, backend: str = "gloo", seconds: float = 5.0) -> str:
    try:
        init_distributed(backend, start_timeout=timedelta(seconds=seconds), environment=environment)
    except (StartError, ValueError) as error:
        assert not dist.is_initialized()
        return f"{type(error).__name__}: {error}"
    return ""


def leave() -> None:  # give up the group of the harness, once every rank has it
    dist.barrier()
    dist.destroy_process_group()


def fail_on(failing: int, port: int) -> str:
    rank = dist.get_rank()
    leave()
    original = module.device_for
    if rank == failing:
        module.device_for = lambda *_: (_ for _ in ()).throw(ValueError("this node has 1 cuda device"))
    try:
        return error_of_start(two_ranks(rank, port))
    finally:
        module.device_for = original


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_at_the_start_reaches_the_others(failing: int) -> None:
    said = run_ranks(fail_on, 2, failing, free_port())
    assert said[failing] == "ValueError: this node has 1 cuda device"
    expected = f"StartError: rank {failing} on {socket.gethostname()} cannot start: this node has 1 cuda device"
    assert said[1 - failing] == expected


@pytest.mark.parametrize("stage", ["place", "start_together"])
def test_a_rank_that_ends_before_the_nodes_are_told_ends_the_start_within_its_limit(stage: str) -> None:
    """Torch's own limit, of five minutes, would count from the rendezvous on."""
    found = [text for text in run_ranks(without_a_rank, 3, free_port(), stage) if text]
    assert len(found) == 2
    assert all("does not hear" in text for text in found), found


def without_a_rank(port: int, stage: str) -> str:
    rank = dist.get_rank()
    leave()
    environment = Environment(rank, 0, rank, 3, 1, "127.0.0.1", port, launcher="torchrun", placed=False)
    with patch.object(nodes, stage, side_effect=SystemExit) if rank == 2 else nullcontext():
        try:
            return error_of_start(environment, seconds=2.0)
        except SystemExit:
            return ""


def test_a_rank_that_ends_between_two_calls_of_the_store_is_not_waited_for_beyond_the_limit() -> None:
    meeting = rendezvous.Meeting(two_ranks(0, 1), "", timedelta(seconds=0.05))
    meeting._store = dist.HashStore()
    meeting._store.set_timeout(timedelta(seconds=30))
    meeting._store.set("here/1", "")  # and no count
    began = time.monotonic()
    with pytest.raises(StartError, match="of 2 ranks, some rank did not come"):
        meeting._exchange("here", b"value")
    assert time.monotonic() - began < 20


def on_a_port_in_use(port: int) -> str:
    rank = dist.get_rank()
    leave()
    return error_of_start(two_ranks(rank, port), seconds=1.0)


def test_with_a_port_in_use_no_rank_waits_for_ever(listener: socket.socket) -> None:
    first, second = run_ranks(on_a_port_in_use, 2, listener.getsockname()[1])
    assert "Address already in use" in first
    assert "did not answer as rank 0 does" in second


def with_other_versions(port: int) -> str:
    rank = dist.get_rank()
    leave()
    original = Peer.own
    if rank == 2:
        Peer.own = classmethod(lambda cls: replace(original(), versions=("0.0.9", "2.11.0+cpu", "3.12")))  # type: ignore
    try:
        return error_of_start(Environment(rank, rank, 0, 3, 3, "127.0.0.1", port, launcher="torchrun"))
    finally:
        Peer.own = original  # type: ignore


def test_versions_that_differ_are_shown_to_every_rank() -> None:
    for message in run_ranks(with_other_versions, 3, free_port()):
        assert message.startswith("StartError: the ranks have different versions; install the same ones")
        lines = [line.split() for line in message.splitlines()[1:]]
        assert lines[0] == ["ranks", "zeromesh", "torch", "python"]
        assert lines[1] == ["0-1", *Peer.own().versions]
        assert lines[2] == ["2", "0.0.9", "2.11.0+cpu", "3.12"]


def late_rank(port: int, timeout: float | None) -> str:
    rank = dist.get_rank()
    leave()
    init_distributed(
        "gloo",
        environment=two_ranks(rank, port),
        start_timeout=timedelta(seconds=2),
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    if rank == 1:
        time.sleep(3)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "done"


@pytest.mark.full
def test_the_limit_of_the_start_is_not_that_of_collectives() -> None:
    assert run_ranks(late_rank, 2, free_port(), None) == ["done", "done"]
    first, _ = run_ranks(late_rank, 2, free_port(), 1.0)
    assert first != "done"


def under_slurm(port: int) -> tuple[Environment, float, str]:
    rank = dist.get_rank()
    leave()
    for name in (*VARIABLES, "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    own = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": rank, "LOCALID": 0, "NODEID": rank, "NTASKS": 2}
    own |= {"TASKS_PER_NODE": "1(x2)", "NNODES": 2, "STEP_NODELIST": "localhost,other"}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in own.items()}, MASTER_PORT=str(port))
    environment = init_distributed()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    shutdown()
    return environment, tensor.item(), os.environ.get("GLOO_SOCKET_IFNAME", "")


def test_tasks_of_slurm_meet_at_the_first_node() -> None:
    port = free_port()
    for rank, (environment, total, name) in enumerate(run_ranks(under_slurm, 2, port)):
        assert environment == Environment(rank, 0, rank, 2, 1, "localhost", port, 2)
        assert environment.launcher == "slurm"
        assert total == 2
        assert not name.startswith("lo")


SCRIPT = """
import torch, torch.distributed as dist, zeromesh
environment = zeromesh.init_distributed("gloo")
tensor = torch.full((1,), environment.rank + 1.0)
dist.all_reduce(tensor)
print(environment.launcher, environment.world_size, environment.local_world_size, tensor.item(), flush=True)
"""


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="there is no mpiexec")
def test_ranks_of_mpiexec_meet_without_mpi() -> None:
    bare = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "PYTHONUNBUFFERED")}
    finished = run_command(["env", "-i", *(f"{n}={v}" for n, v in bare.items()), "mpiexec", "-n", "2", sys.executable,
                            "-c", SCRIPT])  # fmt: skip
    lines = [line.rsplit(" ", 3) for line in finished.stdout.splitlines()]
    assert [line[1:] for line in lines] == [["2", "2", "3.0"]] * 2, finished.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rank": 1}, "rank is 1 and world_size is -1; give both"),
        ({"init_method": "file://"}, "init_method is 'file://', but must be tcp://address:port, file://path"),
        ({"init_method": "tcp://host"}, "init_method is 'tcp://host'"),
        ({"start_timeout": timedelta(0)}, "start_timeout is 0:00:00, but must be a number of seconds above 0"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR is not set, but RANK, WORLD_SIZE are"),
        ({"dist_init_required": False}, "dist_init_required is False, but no process group"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises((ValueError, StartError), match=problem):
        init_distributed(**arguments)


def with_arguments(port: int) -> tuple[int, int, float]:
    rank = dist.get_rank()
    leave()
    for name in VARIABLES:
        os.environ.pop(name, None)
    environment = init_distributed(
        "gloo", True, 29500, False, timedelta(seconds=30), f"tcp://127.0.0.1:{port}", None, None, rank, 2
    )
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return environment.local_rank, environment.master_port, tensor.item()


def test_the_arguments_may_tell_who_the_process_is_in_deepspeeds_order() -> None:
    port = free_port()
    assert run_ranks(with_arguments, 2, port) == [(0, port, 2.0), (1, port, 2.0)]


@pytest.mark.parametrize("in_query", [False, True])
@on_ranks(2)
def test_ranks_meet_in_a_file(tmp_path: Path, in_query: bool) -> None:
    path = str(tmp_path / "store")
    rank = dist.get_rank()
    leave()
    for name in VARIABLES:
        os.environ.pop(name, None)
    sums = []
    for number in range(2):
        query = f"?rank={rank}&world_size=2" if in_query else ""
        numbers = {} if in_query else {"rank": rank, "world_size": 2}
        init_distributed("gloo", init_method=f"file://{path}{number}{query}", **numbers)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        leave()
    assert sums == [2.0, 2.0]


def test_arguments_that_contradict_the_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="RANK is 0, but the argument rank is 1; leave it out"):
        init_distributed(rank=1, world_size=2)


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("0.5", 0.5), (None, 300.0)])
def test_the_limit_of_the_start_is_set_by_a_variable(monkeypatch, text, seconds) -> None:
    monkeypatch.delenv("ZEROMESH_START_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("ZEROMESH_START_TIMEOUT", text)
    assert start_limit() == timedelta(seconds=seconds)
    assert start_limit(timedelta(seconds=3)) == timedelta(seconds=3)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ZEROMESH_START_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"ZEROMESH_START_TIMEOUT is '{text}', but must be a number"):
        start_limit()


SEVERAL_NODES = Environment(1, 1, 0, 4, 2, "", 0, launcher="mpich")


def pretend_mpi(monkeypatch: pytest.MonkeyPatch, missing: str, found: tuple[int, int]) -> None:
    stand_in = SimpleNamespace(
        missing=lambda: missing, rank_and_size=lambda: found, agree_on_master=lambda: ("head", 4321)
    )
    monkeypatch.setattr(module, "mpi", stand_in)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize(
    ("launcher", "missing", "found", "backend", "said"),
    [
        ("mpich", "", (0, 4), "mpi", ""),
        ("open mpi", "", (0, 4), "mpi", ""),
        ("mpich", "mpi4py is not installed", (0, 4), "gloo", "not mpi, as mpi4py is not installed"),
        ("mpich", "", (0, 1), "gloo", "MPI says that this is rank 0 of 1"),
        ("torchrun", "", (0, 4), "gloo", ""),
        ("slurm", "", (0, 4), "gloo", ""),
    ],
)
def test_auto_is_mpi_where_mpi_started_the_ranks_and_can_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    launcher: str, missing: str, found: tuple[int, int], backend: str, said: str,
) -> None:  # fmt: skip
    pretend_mpi(monkeypatch, missing, found)
    with caplog.at_level(logging.INFO, "zeromesh"):
        assert default_backend(Environment(0, 0, 0, 4, 4, launcher=launcher)) == backend
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_several_nodes_without_a_master_ask_mpi_or_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_mpi(monkeypatch, "", (1, 4))
    asked = module._with_master(SEVERAL_NODES, "gloo", None)
    assert (asked.master_address, asked.master_port) == ("head", 4321)
    pretend_mpi(monkeypatch, "mpi4py is not installed; pip install 'mpi4py>=4' mpich brings it", (1, 4))
    with pytest.raises(ValueError, match="mpi4py is not installed.*or set MASTER_ADDR .* and MASTER_PORT"):
        init_distributed("gloo", environment=SEVERAL_NODES)


def test_mpi_discovery_may_be_refused() -> None:
    with pytest.raises(ValueError, match="auto_mpi_discovery is False, but the mpiexec of MPICH"):
        init_distributed("gloo", auto_mpi_discovery=False, environment=SEVERAL_NODES)


def test_a_port_of_deepspeeds_argument_is_used_where_no_variable_says_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert module._with_master(replace(SEVERAL_NODES, master_address="a"), "gloo", 77).master_port == 77
    assert module._with_master(two_ranks(1, 5), "gloo", 77).master_port == 5
    monkeypatch.setenv("MASTER_PORT", "6")
    assert module._with_master(replace(SEVERAL_NODES, master_address="a"), "gloo", 77).master_port == 0


@pytest.mark.parametrize("local_rank", range(4))
def test_all_ranks_of_a_node_with_too_few_devices_hear_of_it(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    four = Environment(local_rank, local_rank, 0, 4, 4, launcher="slurm")
    with pytest.raises(ValueError, match=f"SLURM_LOCALID is {local_rank}, but this node has 1 cuda .* at most 1 rank"):
        device_for(four, "nccl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as Slurm gives each task a device of its own
    assert device_for(four, "nccl") == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="at most 1 rank"):
        device_for(replace(four, launcher="torchrun"), "nccl")


def test_hosts_tell_the_nodes_where_the_launcher_does_not() -> None:
    versions = Peer.own().versions
    everyone = [Peer(versions, host) for host in "aabab"]
    found = [with_topology(Environment(rank, 0, 0, 5, 1, launcher="mpich"), everyone) for rank in range(5)]
    assert [(e.local_rank, e.node_rank, e.local_world_size, e.node_count) for e in found] == [
        (0, 0, 3, 2), (1, 0, 3, 2), (0, 1, 2, 2), (2, 0, 3, 2), (1, 1, 2, 2)
    ]  # fmt: skip


def test_numbers_are_written_in_short() -> None:
    assert peers.ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_the_interface_is_the_one_that_has_the_address_towards_the_master() -> None:
    names = {name for _, name in socket.if_nameindex()}
    try:
        own = interface.own_address(interface.ANYWHERE, 1)
    except OSError:  # a machine without a network
        own = None
    found = interface.interface_to("127.0.0.1", 29500)
    if own is None or sys.platform != "linux":
        assert found is None
    else:
        assert found in names - {"lo"}
        assert interface.interface_to(own, 29500) == found
    if sys.platform == "linux":
        assert interface._interface_with("127.0.0.1") == "lo"
