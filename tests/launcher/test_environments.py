"""What launchers and platforms set is read, or named in an error; the page of the manual shows the same rows."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from commands import call
from environments import ENVIRONMENTS
from harness import free_port, run_command, run_ranks
from zeromesh import Environment, init_distributed
from zeromesh.comm import environment as module
from zeromesh.comm import rank as rank_program
from zeromesh.comm.environment import VARIABLES, StartError
from zeromesh.comm.trust import SealedStore

node_facts, node_table, place = module.nodes.node_facts, module.nodes.node_table, module.nodes.place
launching = import_module("zeromesh.apps.cli.launch_command")  # as the command does, when it runs

PAGE = Path(__file__).parents[2] / "docs" / "launching.md"
NONE_GIVEN = launching.LaunchOptions(None, None, None, None, None, 300.0, None)


def outcome(variables: dict[str, str]) -> str:
    e = Environment.detect(variables)
    if e.launcher == "single":
        assert e == Environment()
        return "a single process"
    own = f"{e.local_rank} of {e.local_world_size} on node {e.node_rank} of {e.node_count}"
    return f"{e.launcher}: rank {e.rank} of {e.world_size}, {own if e.placed else 'nodes by host names'}"


@pytest.mark.parametrize(("name", "variables", "expected"), ENVIRONMENTS, ids=[row[0] for row in ENVIRONMENTS])
def test_variables_of_launchers_are_read_or_refused_with_a_remedy(name, variables, expected) -> None:
    if expected.startswith("error"):
        with pytest.raises(ValueError, match=expected.split("`")[1]) as caught:
            Environment.detect(variables)
        assert "ZEROMESH_ALONE=1" in str(caught.value)
    else:
        assert outcome(variables) == expected
    assert Environment.detect(variables | {"ZEROMESH_ALONE": "1"}) == Environment()


def test_the_manual_has_a_row_for_each_environment() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    shown = {row[0].strip(): (row[1].strip(), row[2].strip()) for row in rows if len(row) == 3}
    for name, variables, expected in ENVIRONMENTS:
        names = ", ".join(f"`{variable}`" for variable in variables if variable != "PYTHONUNBUFFERED")
        assert shown.get(name) == (names, expected), f"| {name} | {names} | {expected} |"


@pytest.mark.parametrize(
    "variables",
    [
        {"SM_HOSTS": '["a","b"]', "SM_NUM_GPUS": "8", "SM_CURRENT_INSTANCE_GROUP_RANK": "1"},
        {"GROUP_WORLD_SIZE": "2", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "4", "LOCAL_SIZE": "2"},
        {"MY_RANK": "0", "MY_BATCH_SIZE": "32", "HISTSIZE": "1000", "TILE_SIZE": "8"},
        {"FOO_RANK": "0", "FOO_SIZE": "1"},
        {"FOO_RANK": "5"},
        {"FOO_RANK": "gold", "FOO_SIZE": "4"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
        {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "2"},
    ],
)
def test_variables_that_do_not_say_more_than_one_process_are_left_alone(variables: dict[str, str]) -> None:
    assert Environment.detect(variables) == Environment()


def test_alone_is_said_by_one() -> None:
    with pytest.raises(ValueError, match="ZEROMESH_ALONE is 'yes', but must be 1"):
        Environment.detect({"ZEROMESH_ALONE": "yes"})


PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "head",
    "PET_MASTER_PORT": "1234",
}


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ({}, {}, (None, None, None, None, None)),
        ({}, PET, (4, "2", 1, "head:1234", None)),
        ({"ranks": 2, "node_rank": 0, "master": "a:1"}, PET, (2, "2", 0, "a:1", None)),
        ({"nodes": "1"}, PET, (4, "1", None, None, None)),
        ({}, PET | {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "1"}, (None, "1", None, None, None)),
        (
            {},
            {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "head:29400", "PET_MAX_RESTARTS": "5"},
            (None, "1:3", None, "head:29400", 5),
        ),
        (
            {},
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
            (None, "2", 1, "10.0.0.1:29500", None),
        ),
        (
            {},
            {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "head", "MASTER_PORT": "5"},
            (None, "3", 1, "head:5", None),
        ),
        ({}, {"PET_NPROC_PER_NODE": "3"}, (3, None, None, None, None)),
        ({}, {"MASTER_PORT": "1234"}, (None, None, None, None, None)),
    ],
)
def test_a_launch_takes_what_is_not_given_from_the_variables(options, variables, expected) -> None:
    result = launching.with_defaults(NONE_GIVEN.__class__(**(vars(NONE_GIVEN) | options)), variables)
    assert (result.ranks, result.nodes, result.node_rank, result.master, result.restarts) == expected


def test_launches_that_would_each_start_the_same_ranks_are_refused() -> None:
    mpi = {f"OMPI_COMM_WORLD_{name}": number for name, number in
           (("RANK", "0"), ("SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2"))}  # fmt: skip
    with pytest.raises(ValueError, match="Open MPI's mpiexec has started 2 processes on this node, and each would"):
        launching.with_defaults(NONE_GIVEN, mpi)
    with pytest.raises(ValueError, match="PET_NPROC_PER_NODE is 'many', but must be a whole number"):
        launching.with_defaults(NONE_GIVEN, {"PET_NPROC_PER_NODE": "many"})


def test_options_of_deepspeeds_launcher_are_taken_or_named() -> None:
    assert launching.master_of(None, "head", 5) == "head:5"
    assert launching.master_of(None, "head", None) == "head:29500"
    assert launching.master_of("a:1", None, 5) == "a:1"
    with pytest.raises(ValueError, match="leave one of them out"):
        launching.master_of("a:1", "head", None)
    launching.refuse_elsewhere({"--include": None})
    with pytest.raises(ValueError, match="--hostfile hosts: .* use zeromesh launch --nnodes N --node-rank R"):
        launching.refuse_elsewhere({"--hostfile": "hosts"})


SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("OPTION", type=int, default=-1)
parser.add_argument("--out")
print(parser.parse_args().local_rank, os.environ["LOCAL_RANK"])
"""


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_a_script_that_knows_local_rank_gets_it(tmp_path: Path, option: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("OPTION", option))
    command = [sys.executable, rank_program.__file__, "script", script]
    assert run_command([*command, "--out", "x"], LOCAL_RANK="3").stdout == "3 3\n"
    assert run_command([*command, f"{option}=1"], LOCAL_RANK="3").stdout == "1 3\n"


@pytest.mark.full
def test_options_of_deepspeeds_launcher_start_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("OPTION", "--local_rank"))
    launch = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch", "--num_gpus", "2", "--num_nodes", "1"]
    finished = run_command([*launch, "--master_port", "29511", script], ZEROMESH_ALONE="1")
    assert {"0 0", "[1] 1 1"} <= set(finished.stdout.splitlines()), finished.stdout


@pytest.mark.parametrize("option", ["--hostfile", "--include", "--exclude"])
def test_options_that_reach_other_nodes_are_refused_with_the_new_name(option: str) -> None:
    result = call("launch", option, "x", __file__)
    assert result.exit_code == 2
    assert f"{option} x: zeromesh launch starts ranks on this node only" in result.output


def fact(node: str, local_rank: int | None = None, size: int | None = None) -> dict[str, object]:
    return {"node": node, "host": f"host-{node}", "local_rank": local_rank, "local_world_size": size}


def test_ranks_are_placed_on_nodes_by_their_hosts_whatever_their_order() -> None:
    table = node_table([fact(node) for node in "abaab"])
    assert table["a"] == {"node_rank": 0, "node_count": 2, "local_ranks": {0: 0, 2: 1, 3: 2}}
    assert table["b"] == {"node_rank": 1, "node_count": 2, "local_ranks": {1: 0, 4: 1}}
    assert node_table([fact("a", 1), fact("a", 0)])["a"]["local_ranks"] == {0: 1, 1: 0}


@pytest.mark.parametrize(
    "facts", [[fact("a", 0), fact("a", 0)], [fact("a", 1), fact("b", 0)], [fact("a", None, 2), fact("b")]]
)
def test_local_ranks_that_cannot_be_are_told_to_every_node(facts: list[dict[str, object]]) -> None:
    for text in node_table(facts).values():
        assert "LOCAL_RANK must be 0 to" in text
        assert "set GROUP_RANK" in text


class Counting:
    """A store that counts calls."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


def test_a_rank_makes_as_few_calls_in_a_large_world_as_in_a_small_one() -> None:
    counts = []
    for world in (8, 4096):
        raw = Counting()
        store = SealedStore(raw, b"key", "the master")
        ranks = [Environment(r, 0, r, world, 1, "head", 1, launcher="torchrun", placed=False) for r in range(world)]
        for rank in range(1, world):
            store.set(f"node of/{rank}", json.dumps(fact(str(rank // 4))))
        raw.calls = 0
        first = place(ranks[0], store)
        calls = raw.calls
        store.set(
            "node/" + node_facts(ranks[5], {})["node"], json.dumps(node_table([fact("0")] * 5 + [fact("1")])["1"])
        )
        raw.calls = 0
        fifth = place(ranks[5], store)
        assert (first.local_rank, first.placed, fifth.node_rank, fifth.placed) == (0, True, 1, True)
        counts.append((calls, raw.calls))
    assert counts[0][1] == counts[1][1] <= 3
    # Rank 0 writes one value for each node.
    assert counts[1][0] - counts[0][0] == (4096 - 8) // 4


def start_by_number(port: int, failing: int | None) -> tuple[object, ...]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    for name in (*VARIABLES, "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    given = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "0.0.0.0", "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in given.items()}, NODE_RANK=str(rank % 2))
    original = module.device_for
    if rank == failing:
        module.device_for = lambda *_: (_ for _ in ()).throw(ValueError("this node has 1 cuda device"))
    try:
        e = init_distributed("gloo")
    except (ValueError, StartError) as error:
        return (str(error),)
    finally:
        module.device_for = original
    again = Environment.detect()
    numbers = (e.local_rank, e.local_world_size, e.node_rank, e.node_count)
    variables = tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return (numbers, e.placed, again == e, variables)


def test_ranks_that_know_their_number_alone_find_out_their_nodes() -> None:
    first, second, third = run_ranks(start_by_number, 3, free_port(), None)
    assert first == ((0, 2, 0, 2), True, True, ("0", "3", "0"))
    assert second == ((0, 1, 1, 2), True, True, ("1", "3", "0"))
    assert third == ((1, 2, 0, 2), True, True, ("2", "3", "1"))


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_without_a_device_tells_the_others_once_nodes_are_known(failing: int) -> None:
    for rank, (text,) in enumerate(run_ranks(start_by_number, 3, free_port(), failing)):
        if rank == failing:
            assert text == "this node has 1 cuda device"
        else:
            assert text.startswith(f"rank {failing} on ")
            assert text.endswith("cannot start: this node has 1 cuda device")
