"""Training over several hosts: the numbers of one process, and the bytes on the link that the formulas say.

The hosts are network namespaces, where the machine permits them, and the stand-in for them; see ``hosts.py``.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hosts as hosts_module
import namespaces
from harness import FOLDERS, RankFailure, run_command
from hosts import (
    KINDS,
    VARIABLE,
    Hosts,
    bits_per_second,
    close_session_hosts,
    make_network,
    sent_by_this_host,
    session_hosts,
)
from namespaces import Namespaces, NotPermitted
from numerics import MESHES, Case, train_cases
from run import sgd, start_engine
from test_accounting import quiet, update
from test_numerics import check

MEGABYTE = 1_000_000
AGAIN = 0.05
"""How much of some messages TCP may send again, where a busy machine lets it believe that a packet is lost."""


BEST_BY_DEFAULT = [
    kind if kind == hosts_module.best_kind() else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS
]
"""Hosts of the kind that is not the best one here are tested in the full suite."""


@pytest.fixture(scope="module", params=BEST_BY_DEFAULT)
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    asked = os.environ.get(VARIABLE)
    if asked not in (None, "", request.param):
        pytest.skip(f"{VARIABLE} is {asked}")
    try:
        yield session_hosts(request.param)
    except NotPermitted as error:
        pytest.skip(f"the stand-in runs these tests; no namespaces here: {error}")
    if request.param != hosts_module.best_kind():
        close_session_hosts(request.param)


def place() -> tuple[float, dict[str, str]]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLOUR")
    return total.item(), {name: os.environ.get(name, "") for name in names}


def test_ranks_are_numbered_as_torchrun_does_and_each_host_has_variables_of_its_own(hosts: Hosts) -> None:
    found = hosts.run(place, environment={0: {"COLOUR": "red"}, 1: {"COLOUR": "blue"}})
    for rank, (total, variables) in enumerate(found):
        assert total == 0 + 1 + 2 + 3
        host = rank // 2
        expected = {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": host, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
        assert variables == {name: str(value) for name, value in expected.items()} | {
            "MASTER_ADDR": hosts.address(0),
            "COLOUR": ["red", "blue"][host],
        }
    assert [variables["COLOUR"] for _, variables in hosts.run(place)] == [""] * 4


def send(messages: list[tuple[int, int]], nbytes: int) -> tuple[int, float, bool]:
    tensor, group, works = torch.full((nbytes,), dist.get_rank(), dtype=torch.uint8), dist.group.WORLD, []
    dist.barrier()
    before = sent_by_this_host()
    dist.barrier()
    began = time.monotonic()
    received = {source: torch.empty_like(tensor) for source, target in messages if target == dist.get_rank()}
    for source, target in messages:
        if source == dist.get_rank():
            works.append(group.send([tensor], target, 1))
        if target == dist.get_rank():
            works.append(group.recv([received[source]], source, 1))
    for work in works:
        work.wait()
    dist.barrier()
    right = all(bool((values == source).all()) for source, values in received.items())
    return sent_by_this_host() - before, time.monotonic() - began, right


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([(0, 1), (1, 0), (3, 2)], [0, 0]),
        ([(0, 2)], [4, 0]),
        ([(3, 0), (2, 1), (0, 1)], [0, 8]),
        ([(1, 2), (2, 1)], [4, 4]),
    ],
    ids=["inside", "one", "two back", "both ways"],
)
def test_traffic_between_hosts_is_counted_where_it_is_sent_and_nothing_else(hosts, messages, expected) -> None:
    ranks, links = [], []
    for _ in range(3):  # what TCP sends again only adds to what is counted
        before = hosts.sent()
        found = hosts.run(send, messages, 4 * MEGABYTE)
        links.append([after - count for after, count in zip(hosts.sent(), before, strict=True)])
        ranks.append([sent for sent, *_ in found])
        assert all(right for *_, right in found)
        if sum(links[-1]) < (1 + AGAIN) * sum(expected) * MEGABYTE:
            break
    for rank, tries in enumerate(zip(*ranks, strict=True)):
        assert min(tries) == pytest.approx(expected[rank // 2] * MEGABYTE, rel=AGAIN, abs=20_000)
    for link, tries in enumerate(zip(*links, strict=True)):
        assert min(tries) == pytest.approx(expected[link] * MEGABYTE, rel=AGAIN, abs=40_000)


@pytest.mark.full
def test_a_limit_is_shared_by_a_hosts_ranks_and_can_be_changed(hosts: Hosts) -> None:
    two, nbytes = [(0, 2), (1, 3)], MEGABYTE
    for rate, seconds in {"30mbit": 2 * 8 / 30, "60mbit": 2 * 8 / 60}.items():
        hosts.set_rate(rate)
        found = hosts.run(send, two, nbytes)
        assert max(took for _, took, _ in found) > 0.9 * seconds
        assert all(right for *_, right in found)
    hosts.set_rate("1mbit")
    inside = hosts.run(send, [(0, 1), (2, 3)], 10 * MEGABYTE)
    assert max(took for _, took, _ in inside) < 10 * 8, "inside a host there is no limit"
    hosts.set_rate(None)
    assert max(took for _, took, _ in hosts.run(send, two, nbytes)) < 2 * 8, "which 1 Mbit/s would take"


def test_commands_run_on_hosts(hosts: Hosts) -> None:
    program = "import os, sys; print(os.environ['MASTER_ADDR'], sys.argv[1], os.environ['COLOUR'])"
    command = [sys.executable, "-c", program]
    done = hosts.commands({0: [*command, "a"], 1: [*command, "b"]}, COLOUR="green")
    assert {host: one.stdout.split() for host, one in done.items()} == {
        0: [hosts.address(0), "a", "green"],
        1: [hosts.address(0), "b", "green"],
    }
    assert hosts.command(1, ["sh", "-c", "exit 3"]).returncode == 3
    if hosts.kind == "namespaces":
        shown = hosts.command(1, ["cat", "/proc/self/net/fib_trie"]).stdout
        assert hosts.address(1) in shown
        assert hosts.address(0) not in shown


@dataclass(frozen=True)
class Variant:
    """How ranks share their states over 2 x 2.

    Attributes:
        mesh: one of ``numerics.MESHES``.
        config: further keys of the configuration.
        link: elements over the link per update and direction, by row, for each parameter of the model.
    """

    mesh: str
    config: dict[str, Any]
    link: tuple[float, float, float, float]


VARIANTS = {
    "flat": Variant("4", {"communication": {"hierarchical": False}}, (2, 2, 2, 3)),
    "hybrid": Variant("2x2", {}, (2, 1, 1, 1)),
    "hierarchical": Variant("2+2", {}, (1, 1, 1, 1.5)),
}
CASES = [*(Case("float64", f"row {row}", clip=True) for row in range(4)), Case("bf16", "row 3", clip=True)]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name == "hierarchical" else pytest.param(name, marks=pytest.mark.full) for name in VARIANTS]
)
def test_training_over_hosts_gives_the_numbers_of_one_process(hosts: Hosts, name: str) -> None:
    variant = VARIANTS[name]
    cases = [Case(**{**vars(case), "mesh": variant.mesh}) for case in CASES]
    by_rank = hosts.run(train_cases, cases, variant.config, timeout=120)
    for case, runs in zip(cases, zip(*by_rank, strict=True), strict=True):
        check(case, runs)


BLOCKS, WIDTH, STEPS = 32, 256, 2
PARAMETERS = BLOCKS * WIDTH * WIDTH
KEPT = 2
"""Blocks that are still there when the backward of row 3 begins."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@dataclass(frozen=True)
class Moved:
    sent: int
    report: dict[str, dict[str, float]]


def move(rows: list[int], mesh: str, further: dict[str, Any]) -> list[Moved]:
    found = []
    for row in rows:
        engine = start_engine(
            Net(), further, micro=1, optimizer=sgd(1e-3), stage=row, mesh=MESHES[mesh], units=["Linear"]
        )
        inputs = torch.ones(1, WIDTH)
        update(engine, inputs)
        quiet(engine, inputs)
        engine.traffic_report(reset=True)
        before = sent_by_this_host()
        dist.barrier()
        for _ in range(STEPS):
            update(engine, inputs)
        quiet(engine, inputs)
        found.append(Moved(sent_by_this_host() - before, engine.traffic_report()))
        dist.barrier()  # so that nobody begins the next row before all have read
        engine.destroy()
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_on_the_link_are_those_of_the_formulas_and_of_the_report(hosts: Hosts, name: str) -> None:
    variant, rows = VARIANTS[name], list(range(4))
    by_rank = hosts.run(move, rows, variant.mesh, variant.config, timeout=120)
    for row in rows:
        moved = [found[row] for found in by_rank]
        # Row 3 needs not gather a second time what is still there.
        exact = variant.link[row] * (1 - KEPT / (3 * BLOCKS) if row == 3 and name != "hybrid" else 1)
        for host in (0, 1):
            own = moved[2 * host : 2 * host + 2]
            elements = own[0].sent / 4 / STEPS / PARAMETERS
            assert elements == pytest.approx(exact, rel=0.02), f"row {row}"
            assert elements == pytest.approx(variant.link[row], rel=0.04), f"row {row}"
            assert own[0].sent == pytest.approx(own[1].sent, abs=20_000)
            told = sum(entry["across_nodes"] for rank in own for entry in rank.report.values())
            limit = 0 if hosts.kind == "throttle" else 0.02 * told
            assert own[0].sent == pytest.approx(told, abs=limit), f"row {row}"


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError(f"rank {rank} cannot divide")
    dist.barrier()


@pytest.mark.full
def test_three_hosts_and_a_failure_on_one() -> None:
    with Hosts(3, 1) as three:
        assert three.world_size == 3
        found = three.run(send, [(0, 1), (1, 2), (2, 0), (0, 2)], MEGABYTE)
        assert all(right for *_, right in found)
        assert [sent for sent, *_ in found] == pytest.approx([2 * MEGABYTE, MEGABYTE, MEGABYTE], rel=2 * AGAIN)
        with pytest.raises(RankFailure, match="rank 2 cannot divide"):
            three.run(fail_on, 2)
        assert three.pids == []


def gone(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return not state or state.startswith("Z")


@pytest.mark.full
def test_namespaces_end_with_their_owner_however_it_ends() -> None:
    try:
        Namespaces(1).close()
    except NotPermitted as error:
        pytest.skip(str(error))
    code = (
        "import os, signal; from namespaces import Namespaces; network = Namespaces(2); "
        "print(*(holder.pid for holder in network._holders), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run_command([sys.executable, "-c", code], PYTHONPATH=os.pathsep.join(FOLDERS))
    assert done.returncode == -signal.SIGKILL
    holders, limit = [int(pid) for pid in done.stdout.split()], time.monotonic() + 20
    assert len(holders) == 3
    while not all(map(gone, holders)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert all(map(gone, holders))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_SEARCH", "", "ip, tc, unshare, nsenter are not installed"),
        ("_WAYS", (("sh", "-c", "echo no >&2; exit 1"), ("false",)), "echo no >&2; exit 1: no; false: "),
    ],
    ids=["no tools", "no right"],
)
def test_the_stand_in_is_taken_if_namespaces_are_not_permitted(monkeypatch, name, value, message) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(namespaces, name, value)
    monkeypatch.setattr(hosts_module, "best_kind", hosts_module.best_kind.__wrapped__)
    with Hosts(2, 1) as two:
        assert two.kind == "throttle"
    with pytest.raises(NotPermitted, match=message):
        Hosts(2, 1, kind="namespaces")


@pytest.mark.parametrize("rate", ["100", "0mbit", "fast", "-1mbit", "10 mbit"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=f"the rate is '{rate}', but must be a number with kbit, mbit or gbit"):
        Hosts(2, 1, rate=rate, kind="throttle")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'virtual' are asked for, but there are namespaces and throttle"):
        make_network("virtual", 2, 1)


def test_rates_are_in_bits_per_second() -> None:
    given = {None: None, "300kbit": 3e5, "100mbit": 1e8, "2.5gbit": 2.5e9}
    assert {rate: bits_per_second(rate) for rate in given} == given
