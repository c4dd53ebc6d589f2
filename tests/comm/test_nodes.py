"""Collectives over several nodes: in two steps, in fewer bits between nodes, with exactly the bytes of the formulas.

Here the nodes are groups of ranks on one machine; ``test_hosts.py`` has hosts with a link between them.
"""

import sys
import weakref
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import zeromesh
from harness import on_ranks, run_command, run_ranks
from run import adam, start_engine, train_step
from test_collectives import in_order, values
from zeromesh import Mesh, Settings
from zeromesh.comm.mesh import Links
from zeromesh.comm.message_formats import BLOCK, FORMATS
from zeromesh.comm.ordered_sums import CHUNK
from zeromesh.comm.second_step import SecondSteps, _OnStream
from zeromesh.comm.topology import Topology
from zeromesh.comm.traffic import Traffic
from zeromesh.config.errors import ConfigError

CPU = torch.device("cpu")
LENGTH = 7
ARRANGEMENTS = {"block": [0, 0, 1, 1], "cyclic": [0, 1, 0, 1], "four nodes": [0, 1, 2, 3], "one node": [5, 5, 5, 5]}
"""The node of each of four ranks."""


def mesh_of(nodes: list[int], sizes: dict[str, int] | None = None, **options: Any) -> Mesh:
    return Mesh(sizes or {"data": len(nodes)}, CPU, Links(nodes[dist.get_rank()], **options))


def test_topology_of_ranks_that_are_dealt_to_the_nodes_in_turn() -> None:
    topology = Topology.of([0, 1, 0, 1], 3, None)
    assert topology.nodes == ((0, 2), (1, 3))
    assert (topology.node, topology.place) == (1, 1)
    assert topology.across == [(0, 2)]
    assert topology.mates == [(0, 1)]
    assert topology.shards_of(0) == [0, 1]


def test_uneven_nodes_are_flat_and_refused_where_two_steps_are_asked_for() -> None:
    assert Topology.of([0, 0, 1], 0, None).across == []
    assert Topology.of([0, 0, 1, 1], 0, False).across == []
    with pytest.raises(ValueError, match="lies on nodes with 2, 1 of them; it needs as many on every node"):
        Topology.of([0, 0, 1], 0, True)


def gather_and_scatter(nodes: list[int]) -> dict[Any, Any]:
    group = mesh_of(nodes).shard
    size, found = group.size, {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        full = torch.full((size * LENGTH,), 77, dtype=dtype)
        gathering = group.all_gather(full, values(group.rank, LENGTH, dtype), 16)
        sums = []
        for tag, out_dtype in ((17, torch.float64), (18, dtype)):
            mine = values(group.rank, size * LENGTH, dtype)
            out = torch.ones(LENGTH, dtype=out_dtype)
            received = torch.empty(group.receive_elements(LENGTH), dtype=dtype)
            sums.append((group.reduce_scatter(mine, received, out, tag == 18, tag), out, mine))
        # Ranks wait in different orders.
        for pending in [gathering, *(s[0] for s in sums)][:: 1 if group.rank % 2 else -1]:
            pending.wait()
        found[dtype] = (full, *(out for _, out, _ in sums))
    return found


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_two_steps_give_the_sums_of_the_nodes_in_order(name: str) -> None:
    nodes = ARRANGEMENTS[name]
    members = [[rank for rank in range(4) if nodes[rank] == node] for node in sorted(set(nodes))]
    results = run_ranks(gather_and_scatter, 4, nodes)
    for rank, result in enumerate(results):
        for dtype, (full, wide, added) in result.items():
            assert torch.equal(full, torch.cat([values(other, LENGTH, dtype) for other in range(4)])), (name, dtype)
            parts = [values(other, 4 * LENGTH, dtype).chunk(4)[rank] for other in range(4)]
            between = torch.float32 if dtype.itemsize == 2 else dtype
            if len(members) > 1:
                parts = [in_order([parts[m] for m in node], between).to(dtype) for node in members]
            assert torch.equal(wide, in_order(parts, torch.float64)), (name, dtype, rank)
            total = in_order([torch.ones(LENGTH, dtype=dtype), in_order(parts, dtype)], dtype)
            assert torch.equal(added, total), (name, dtype, rank)


@on_ranks(4)
def test_collectives_with_one_tag_do_not_mix() -> None:
    group = mesh_of([0, 0, 1, 1]).shard
    outs, pendings, kept = [], [], []
    for turn in range(20):
        mine = torch.full((4 * LENGTH,), float(10**group.rank) * (turn + 1))
        received, out = torch.empty(group.receive_elements(LENGTH)), torch.zeros(LENGTH)
        pendings.append(group.reduce_scatter(mine, received, out, False, 17))
        outs.append(out)
        kept += [mine, received]
    for pending in pendings:
        pending.wait()
    sums = torch.stack(outs)
    assert sums[:, 0].tolist() == [1111.0 * (turn + 1) for turn in range(20)]


def traffic(hierarchical: bool | None, form: str | None, length: int) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    given = None if form is None else FORMATS[form]
    mesh = mesh_of([0, 0, 1, 1], hierarchical=hierarchical, gather=given, reduce=given)
    group = mesh.shard
    full = torch.randn(4 * length)
    group.all_gather(full, full.chunk(4)[group.rank], 16, given).wait()
    out, full = torch.zeros(length), torch.randn(4 * length)
    group.reduce_scatter(full, torch.empty(group.receive_elements(length)), out, False, 17, given).wait()
    return {
        kind: (
            mesh.traffic.bytes[kind, "data"],
            mesh.traffic.across[kind, "data"],
            mesh.traffic.relative_error(kind, "data"),
        )
        for kind in ("all_gather", "reduce_scatter")
    }


@pytest.mark.parametrize(
    ("hierarchical", "form", "across", "inside"),
    [
        (False, None, 2 * 4, 1 * 4),  # to each of two ranks on the other node
        (None, None, 1 * 4, 2 * 4),
        (True, None, 1 * 4, 2 * 4),
        (None, "16bit", 1 * 2, 2 * 4),
        (None, "8bit", 1 + 4 / BLOCK, 2 * 4),
    ],
)
def test_bytes_between_nodes_are_those_of_the_formula(hierarchical, form, across, inside) -> None:
    length = 3 * BLOCK
    for result in run_ranks(traffic, 4, hierarchical, form, length):
        for sent, crossing, error in result.values():
            assert crossing == across * length
            assert sent - crossing == inside * length
            limit = {None: 0.0, "16bit": 2**-8, "8bit": 0.01}[form]
            assert (error is None) if form is None else (0 < error < limit)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_messages_have_their_length_and_read_back_within_the_step_of_the_format(form, dtype, elements) -> None:
    vector = values(3, elements).to(dtype) / 100
    message, back = form.encode(vector), torch.empty(elements, dtype=dtype)
    assert message.nbytes == form.bytes_for(elements)
    form.decode(message, back)
    largest = torch.stack([part.abs().max() for part in vector.float().split(BLOCK)])
    steps = largest / 254 if form.name == "8bit" else largest * 2**-8
    rounding = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0
    limit = steps.repeat_interleave(BLOCK)[:elements] * 1.001 + vector.float().abs() * rounding
    assert bool(((back.float() - vector.float()).abs() <= limit).all())
    again = torch.empty(elements, dtype=dtype)
    form.decode(form.encode(torch.zeros(elements, dtype=dtype)), again)
    assert torch.equal(again, torch.zeros(elements, dtype=dtype))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_numbers_that_are_not_finite_stay_so_on_the_other_side(form: Any, bad: float) -> None:
    vector = torch.ones(3 * BLOCK)
    vector[BLOCK + 3] = bad
    back = torch.empty_like(vector)
    form.decode(form.encode(vector), back)
    assert not bool(back[BLOCK + 3].isfinite())
    assert bool(back[:BLOCK].isfinite().all())
    assert bool(back[2 * BLOCK :].isfinite().all())


def test_denormal_numbers_keep_their_sign_in_8_bits() -> None:
    """Their scale is of one or two bits, and 178 of its steps do not fit into 8."""
    vector = torch.full((3,), 178 * 2.0**-149)
    back = torch.empty_like(vector)
    FORMATS["8bit"].decode(FORMATS["8bit"].encode(vector), back)
    assert torch.equal(back, torch.full((3,), 127 * 2.0**-149))


def test_a_step_that_is_done_keeps_no_buffer() -> None:
    steps, buffer = SecondSteps(CPU), torch.ones(3)
    kept = weakref.ref(buffer)

    def step(buffer: torch.Tensor = buffer) -> None:
        buffer.add_(1)

    steps.run(step, 16).wait()
    del buffer, step
    assert kept() is None


def test_a_step_on_a_stream_keeps_its_buffers_until_it_has_been_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of the caller's stream, which would give their memory away while the other one reads it."""
    stream = MagicMock(torch.Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    buffer = torch.ones(3)
    kept = weakref.ref(buffer)

    def step(buffer: torch.Tensor = buffer) -> None:
        buffer.add_(1)

    work = _OnStream(stream, step)
    del buffer, step
    assert kept() is not None
    work.wait()
    assert kept() is None


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made._base is None:
            self.elements = max(self.elements, made.numel())
        return made


def test_errors_are_counted_in_fp64_without_a_copy_of_all_numbers() -> None:
    traffic, true = Traffic(), values(3, 3 * CHUNK + 5)
    written = true.bfloat16().float()
    with Largest() as largest:
        traffic.add_error("all_gather", "data", true, written)
    assert largest.elements == CHUNK
    expected = (written.double() - true.double()).norm() / true.double().norm()
    assert traffic.relative_error("all_gather", "data") == pytest.approx(expected.item(), rel=1e-12)


def gather_in(form: str, nodes: list[int]) -> torch.Tensor:
    mesh = mesh_of(nodes, gather=FORMATS[form])
    full = torch.zeros(4 * 300)
    mesh.shard.all_gather(full, values(mesh.rank, 300), 16, mesh.links.gather).wait()
    return full


@pytest.mark.parametrize(("form", "name"), list(product(FORMATS, ["block", "cyclic", "four nodes"])))
def test_all_ranks_have_the_same_numbers_after_a_gather_in_fewer_bits(form: str, name: str) -> None:
    results = run_ranks(gather_in, 4, form, ARRANGEMENTS[name])
    expected = torch.zeros(4 * 300)
    for rank, part in enumerate(expected.chunk(4)):
        FORMATS[form].decode(FORMATS[form].encode(values(rank, 300)), part)
    assert all(torch.equal(full, expected) for full in results)


def arrangement(nodes: list[int]) -> tuple[list[int], list[int], int]:
    mesh = mesh_of(nodes, {"replicate": 2, "data": 2})
    rows = [group.exchange(torch.tensor([mesh.rank])).flatten().tolist() for group in (mesh.shard, mesh.replicate)]
    return rows[0], rows[1], mesh.data_rank


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]])
def test_shard_groups_lie_inside_nodes_and_replicas_across(nodes: list[int]) -> None:
    results = run_ranks(arrangement, 4, nodes)
    for shard, replicas, _ in results:
        assert nodes[shard[0]] == nodes[shard[1]]
        assert nodes[replicas[0]] != nodes[replicas[1]]
    assert sorted(data_rank for _, _, data_rank in results) == [0, 1, 2, 3]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def train(config: dict[str, Any]) -> tuple[list[float], dict[str, Any], dict[str, torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Net()
    engine = start_engine(model, config, optimizer=adam(0.01))
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + engine.data_rank)
        losses.append(train_step(engine, engine(torch.randn(3, 32, generator=generator))))
    exact = [zeromesh.zero.safe_get_full_fp32_param(p) for p in model.parameters()]
    report = engine.traffic_report()
    return losses, report, engine.gathered_state_dict(), exact


QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
NEAR = 0.015
"""How far numbers in 8 bits are off, as a part of their norm.

The largest of 256 normal numbers is some three deviations, a step 3 / 127, and the error a step over the root of 12:
0.007. Gradients, of which few are large, may be off by twice as much.
"""


@pytest.mark.some(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_in_8_bits_between_nodes_is_near_and_says_how_near(stage: int) -> None:
    base = {"communication": {"ranks_per_node": 2}, **({} if stage == 3 else {"bf16": {"enabled": True}})}
    plain = run_ranks(train, 4, {**base, "zero_optimization": {"stage": stage}})
    rounded = run_ranks(train, 4, {**base, "zero_optimization": {"stage": stage, **QUANTISED}})
    for (losses, *_), (other, report, *_) in zip(plain, rounded, strict=True):
        # The loss is a mean of squares, which are off by twice what weights are; updates are a small part of these.
        assert other == pytest.approx(losses, rel=2 * NEAR)
        for kind in ("all_gather/data", "reduce_scatter/data"):
            assert 1e-3 < report[kind]["relative_error"] < NEAR
    state, masters = rounded[0][2], rounded[0][3]
    for (name, value), master in zip(state.items(), masters, strict=True):
        assert torch.equal(value, master.to(value.dtype)), f"{name} is written as it was rounded for the wire"


def test_hybrid_sharding_reduces_its_replicas_in_fewer_bits() -> None:
    base = {"mesh": {"replicate": 2}, "communication": {"ranks_per_node": 2, "across_nodes_reduce": "16bit"}}
    results = run_ranks(train, 4, {**base, "zero_optimization": {"stage": 3}})
    for _, report, *_ in results:
        assert 0 < report["all_gather/replicate"]["relative_error"] < 2**-8
        assert report["all_gather/replicate"]["across_nodes"] > 0
        assert report["all_gather/data"]["across_nodes"] == 0
    masters = [torch.cat([m.flatten() for m in result[3]]) for result in results]
    assert all(torch.equal(masters[0], other) for other in masters)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"communication": {"across_nodes_gather": "4bit"}}, "across_nodes_gather"),
        ({"communication": {"hierarchical": False, "across_nodes_reduce": "8bit"}}, "hierarchical is false"),
        ({"zero_optimization": {"stage": 1, "zero_quantized_weights": True}}, "no other copy that is exact"),
        (
            {"zero_optimization": {"stage": 0, "zero_quantized_weights": True}, "bf16": {"enabled": True}},
            "none are gathered",
        ),
        (
            {
                "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
                "communication": {"across_nodes_gather": "16bit"},
            },
            "keep one of them",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.load(config)


@on_ranks(2)
def test_ranks_per_node_that_do_not_divide_the_ranks_are_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match="ranks_per_node") as caught:
        train({"communication": {"ranks_per_node": 3}})
    text = str(caught.value)
    assert text.startswith("communication.ranks_per_node is 3, which does not divide the 2 ranks; set it to")


ENDS = """
import torch, zeromesh

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)])
config = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "units": ["Linear"],
    "communication": {"ranks_per_node": 1, "across_nodes_gather": "8bit"},
}
engine, *_ = zeromesh.initialize(model=model, config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
"""


@pytest.mark.full
def test_a_process_may_end_while_parameters_are_on_their_way(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    done = run_command([sys.executable, "-m", "zeromesh.apps.cli.main", "launch", "--nproc", "2", script])
    assert done.returncode == 0, done.stdout
    assert "terminate" not in done.stdout
