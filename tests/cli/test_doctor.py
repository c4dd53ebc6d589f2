import copy
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from commands import call
from harness import run_command, run_ranks
from zeromesh import Environment
from zeromesh.apps.cli import doctor as module
from zeromesh.apps.cli import machine_file
from zeromesh.apps.cli.doctor import doctor
from zeromesh.apps.plan.machine import speed
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.base import machine as observed
from zeromesh.comm import link_speeds
from zeromesh.comm.environment import VARIABLES, device_of_group

COMMAND = ["-m", "zeromesh.apps.cli.main", "doctor"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around this process, no group that other tests left, and less to write and copy."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(observed, "DISK_BYTES", 4 << 20)
    monkeypatch.setattr(observed, "MEMORY_BYTES", 4 << 20)


def examined(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[bool, dict[str, Any]]:
    sound = doctor(folder, 1, True)
    return sound, json.loads(capsys.readouterr().out)


def messages(report: dict[str, Any]) -> str:
    assert all(row["remedy"] for row in report["problems"])
    return "\n".join(row["problem"] for row in report["problems"])


def test_a_single_process_is_examined(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sound, report = examined(capsys, tmp_path)
    assert sound == (not report["problems"])
    assert report["format"] == 2
    assert report["environment"]["launcher"] == "single"
    [node] = report["nodes"]
    assert node["host"] == socket.gethostname()
    assert node["versions"]["torch"].startswith("2.")
    assert node["processor"]["cores"] >= 1
    assert bool(node["kernels"]["instructions"]) != bool(node["kernels"]["missing"])
    assert node["memory"]["bandwidth_bytes_per_second"] > 1e7
    assert node["disk"]["write_bytes_per_second"] > 0
    assert not list(tmp_path.iterdir())
    backend = {row["name"]: row for row in report["backends"]}
    assert backend["gloo"]["usable"]
    assert backend["nccl"]["usable"] or "nccl" in backend["nccl"]["missing"]
    assert sum(row["auto"] for row in report["backends"]) == 1


def test_contradictory_variables_are_a_problem_of_the_report(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sound, report = examined(capsys, tmp_path)
    assert not sound
    assert report["environment"] is None
    assert report["nodes"][0]["disk"]["folder"] == str(tmp_path)
    assert "RANK=3, WORLD_SIZE=2" in messages(report)


def test_an_unreachable_master_is_a_problem_of_the_report(capsys, monkeypatch, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (own | {"ZEROMESH_START_TIMEOUT": "0.5"}).items():
        monkeypatch.setenv(name, value)
    sound, report = examined(capsys, tmp_path)
    assert not sound
    assert report["environment"]["world_size"] == 2
    assert report["links"] is None
    assert len(report["nodes"]) == 1
    assert f"of 2 ranks, 1 did not come to 127.0.0.1:{port}" in messages(report)
    monkeypatch.setenv("RANK", "1")
    assert not doctor(tmp_path, 1, True)
    said = capsys.readouterr()
    assert said.out == ""  # rank 0 writes the document
    assert f"rank 1 on {socket.gethostname()}: the master at 127.0.0.1:{port} cannot be reached" in said.err


@pytest.mark.full
def test_the_ranks_of_a_launcher_write_one_document_with_their_links(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    finished = run_command([*torchrun, *COMMAND, "--json", "--folder", tmp_path], timeout=120)
    start, end = finished.stdout.index("{"), finished.stdout.rindex("}") + 1
    report = json.loads(finished.stdout[start:end])
    assert finished.returncode == bool(report["problems"])
    assert report["environment"]["launcher"] == "torchrun"
    assert len(report["nodes"]) == 1
    [axis] = report["links"]["axes"]
    assert (axis["axis"], axis["ranks"], axis["where"]) == ("data", 2, "within nodes")
    assert [row["ranks"] for row in report["links"]["pairs"]] == [[0, 1]]


@pytest.mark.full
def test_a_single_process_starts_ranks_to_measure_and_shows_tables(tmp_path: Path) -> None:
    finished = run_command([sys.executable, *COMMAND, "--ranks", "2", "--folder", tmp_path], timeout=120)
    output = finished.stdout
    for part in (
        "this process",
        "backends",
        "machine ",
        "links, backend gloo",
        "ranks 0 and 1",  # the slowest pair, or an unknown one where other work disturbs it
        "synced",
    ):
        assert part in output, output
    assert ("no problems found" in output) == (finished.returncode == 0)
    assert ("problem 1:" in output) == (finished.returncode == 1)


def measured(nodes: list[int], slow: int | None, seconds: float) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    local = nodes.count(nodes[rank])
    place = nodes[:rank].count(nodes[rank])
    environment = Environment(rank, place, nodes[rank], world, local, node_count=len(set(nodes)))
    mesh = link_speeds.mesh_of_nodes(environment, device_of_group(environment))
    original = dist.send
    if rank == slow:

        def late(*arguments: Any) -> None:
            time.sleep(0.05)
            original(*arguments)

        dist.send = late
    try:
        return link_speeds.measure(mesh, nodes, seconds)
    finally:
        dist.send = original


@pytest.mark.full
def test_links_are_measured_along_the_axes_and_between_pairs() -> None:
    results = run_ranks(measured, 4, [0, 0, 1, 1], None, 0.4)
    assert all(result == results[0] for result in results)
    axes = {row["axis"]: (row["ranks"], row["where"]) for row in results[0]["axes"]}
    assert axes == {"data": (2, "within nodes"), "replicate": (2, "across nodes")}
    for row in [*results[0]["axes"], *results[0]["pairs"]]:
        assert row["latency_seconds"] is None or row["latency_seconds"] > 0
        assert (row[link_speeds.SPEED] is None) == bool(row["unknown"])
    where = {tuple(row["ranks"]): row["where"] for row in results[0]["pairs"]}
    assert len(where) == 6
    assert {pair for pair, text in where.items() if text == "within nodes"} == {(0, 1), (2, 3)}


@pytest.mark.full
def test_slow_pairs_show_and_uneven_nodes_are_one_axis() -> None:
    result = run_ranks(measured, 3, [0, 0, 1], 2, 12.0)[0]
    assert [(row["axis"], row["ranks"], row["where"]) for row in result["axes"]] == [("data", 3, "across nodes")]
    pairs = {tuple(row["ranks"]): row["latency_seconds"] for row in result["pairs"]}
    assert pairs[0, 2] > 0.02
    assert pairs[1, 2] > 0.02
    assert pairs[0, 1] < pairs[0, 2]


def link(first: int, second: int, speed: float, where: str = "across nodes") -> dict[str, Any]:
    return {"ranks": [first, second], link_speeds.SPEED: speed, "where": where}


def test_a_link_much_slower_than_the_others_of_its_kind_is_a_problem() -> None:
    inside = [link(0, 1, 90e9, "within nodes"), link(2, 3, 80e9, "within nodes")]
    even = [link(0, 2, 1e9), link(0, 3, 1.1e9), link(1, 2, 0.9e9)]
    assert not module._slow_links({"pairs": inside + even})
    [problem] = module._slow_links({"pairs": [*inside, *even, link(1, 3, 0.1e9)]})
    assert problem["problem"].startswith("the link between ranks 1 and 3 moves 100 MB/s, and the median across nodes")


def test_bandwidths_that_are_unknown_are_no_problem_and_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    known = [link(0, 2, 1e9), link(0, 3, 1.1e9), link(1, 2, 0.9e9)]
    rows = [row | {"latency_seconds": 1e-3, "unknown": None} for row in known]
    lost = link(1, 3, 0.0) | {"latency_seconds": None, "unknown": "the time was up", link_speeds.SPEED: None}
    axis = {"axis": "data", "where": "across nodes", "ranks": 4, "latency_seconds": 2e-3, link_speeds.SPEED: None}
    links = {"axes": [axis | {"unknown": "disturbed"}], "pairs": [*rows, lost], "slowest_pair": rows[2]}
    assert not module._slow_links(links)
    module._show_links(Console(width=200), links | {"backend": "gloo"})
    text = capsys.readouterr().out
    assert "bandwidth unknown: ranks 1 and 3: the time was up" in text
    assert "bandwidth unknown: all-gather along data: disturbed" in text
    assert "ranks 1 and 2, across nodes: 900 MB/s one way, latency 1.0 ms" in text


def sound_machine(folder: Path) -> dict[str, Any]:
    found = observed.inventory(folder)
    found["memory"] |= {"available_bytes": 8 << 30, "shared_bytes": 8 << 30}
    found["disk"] |= {"free_bytes": 100 << 30}
    return found | {"unused_gpus": 0}


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("memory", {"shared_bytes": 64 << 20}, "/dev/shm has 64 MiB"),
        ("memory", {"available_bytes": 100 << 20}, "100 MiB of host memory are available"),
        ("disk", {"free_bytes": 1 << 30}, "1024 MiB are free in"),
        ("disk", {"error": "Read-only file system"}, "cannot be written: Read-only file system"),
        ("versions", {"torch": "2.10.1+cu128"}, "torch is 2.10.1+cu128, and ZeroMesh needs 2.11"),
        (None, {"unused_gpus": 2}, "the machine has 2 Nvidia devices, and torch"),
    ],
)
def test_lacking_resources_are_problems(tmp_path, part, change, problem) -> None:
    machine = sound_machine(tmp_path)
    assert observed.problems(machine) == []
    worse = copy.deepcopy(machine)
    (worse if part is None else worse[part]).update(change)
    [found] = observed.problems(worse)
    assert problem in found["problem"]
    assert found["remedy"]


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    machine = sound_machine(tmp_path) | {"disk": observed.disk(tmp_path / "none")}
    [found] = observed.problems(machine)
    assert "none cannot be used: No such file or directory" in found["problem"]


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "5000", "memory.max": "9000"}, 5000),
        ("0::/a", {"a/memory.max": "max"}, None),
        ("0::/gone", {"memory.max": "7000"}, 7000),
        ("4:memory:/x", {"memory/x/memory.limit_in_bytes": "6000"}, 6000),
        ("4:memory:/x", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("3:cpu:/x", {"x/memory.max": "1"}, None),
    ],
)
def test_the_lowest_limit_of_the_control_groups_counts(tmp_path, line, files, limit) -> None:
    (tmp_path / "cgroup").write_text(line + "\n")
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert observed.memory_limit(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == limit


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small products and kernels, and few of them."""
    monkeypatch.setattr(speed, "SHAPES", ((16, 16, 16), (32, 16, 16)))
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(speed, "_kernel_sizes", lambda device: [64, 4096, 1 << 16])
    monkeypatch.setattr(machine_file, "DISK_BYTES", 1 << 20)


def test_a_saved_machine_can_be_loaded(capsys, monkeypatch, tmp_path) -> None:
    quick(monkeypatch)
    path = tmp_path / "machine.json"
    doctor(tmp_path, 1, True, path)
    said = capsys.readouterr()
    assert "speeds" not in json.loads(said.out)
    assert f"{path}: written" in said.err
    [(node, count)] = Machine.load(path).nodes
    assert (count, node.devices) == (1, max(1, len(observed.devices())))
    assert node.host_memory == (observed.memory()["limit_bytes"] or observed.memory()["total_bytes"])
    assert node.disk_read > 0
    assert [item.name for item in tmp_path.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(("name", "words"), [("", "is a folder"), ("none/machine.json", "there is no folder")])
def test_a_place_where_no_machine_can_be_saved_is_refused_at_once(name: str, words: str, tmp_path: Path) -> None:
    result = call("doctor", "--save", tmp_path / name)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.full
@pytest.mark.parametrize("launcher", [("-m", "torch.distributed.run", "--nproc-per-node", "2"), ()])
def test_the_ranks_of_a_machine_are_measured_together(launcher: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    options = ["--save", path, "--folder", tmp_path, *([] if launcher else ["--ranks", "2"])]
    # Rank 1 waits while rank 0 measures memory and disk, which takes long on a busy machine.
    variables = {"ZEROMESH_START_TIMEOUT": "120"}
    finished = run_command([sys.executable, *launcher, *COMMAND, *options], timeout=250, **variables)
    assert f"{path}: written" in finished.stdout.replace("\n", ""), finished.stdout
    [(node, count)] = Machine.load(path).nodes
    assert (count, node.devices) == (1, 2)
    assert node.device.memory == pytest.approx(node.host_memory / 2)
    assert 0 < node.inside.efficiency <= 1
    assert any("one of 2 ranks" in note for note in Machine.load(path).notes)
