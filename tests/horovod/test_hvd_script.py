"""Whole scripts under ``zeromesh launch``: one of Horovod's usual shape, and an elastic one that is restarted."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data.distributed import DistributedSampler

import hvd_digits
import hvd_elastic
import zeromesh.horovod as hvd
from harness import on_ranks, run_command

FOLDER = Path(__file__).parent
LAUNCH = [sys.executable, "-m", "zeromesh", "launch", "-np", "2"]


def test_a_horovod_script_trains_as_one_process_on_the_joint_batch(tmp_path: Path) -> None:
    done = run_command([*LAUNCH, FOLDER / "hvd_digits.py", "--batch-size", "32", "--output", tmp_path / "out.pt"])
    assert done.returncode == 0, done.stdout
    assert "trained on 2 ranks" in done.stdout
    found = torch.load(tmp_path / "out.pt")
    torch.manual_seed(42)
    model, data = hvd_digits.Net().double(), hvd_digits.digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    losses = []
    samplers: list[DistributedSampler] = [DistributedSampler(data, num_replicas=2, rank=rank) for rank in range(2)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in samplers]
        for start in range(0, len(orders[0]), 32):
            images, labels = data[[sample for order in orders for sample in order[start : start + 32]]]
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-6, atol=0.0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.full
def test_elastic_state_survives_a_rank_that_dies(tmp_path: Path) -> None:
    command = [*LAUNCH, "--max-restarts", "1", FOLDER / "hvd_elastic.py", "--output", tmp_path / "out.pt"]
    died = run_command([*command, "--die-at", "3"], cwd=tmp_path, ZEROMESH_ELASTIC=str(tmp_path / "states"))
    assert died.returncode == 0, died.stdout
    found = torch.load(tmp_path / "out.pt")
    assert found["first_step"] == 2  # that of the last commit
    assert found["resets"] == 1
    assert [path for path in (tmp_path / "states").rglob("*") if path.is_file()] == []  # folders of users stay
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(hvd_elastic.STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (hvd_elastic.loss_of(model, step, rank) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(found["weight"], model.weight.detach(), rtol=1e-12, atol=1e-13)


def test_state_goes_back_to_its_last_commit() -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=1, seen=[1])
    before = model.weight.detach().clone()
    state.commit()
    with torch.no_grad():
        model.weight.add_(1.0)
    state.epoch, state.optimizer.param_groups[0]["lr"] = 7, 0.5
    state.seen.append(2)

    @hvd.elastic.run
    def fail(state: hvd.elastic.TorchState) -> None:
        state.epoch = 9
        raise hvd.HorovodInternalError("a peer is gone")

    state.restore()
    assert torch.equal(model.weight, before)
    assert (state.epoch, state.seen, state.optimizer.param_groups[0]["lr"]) == (1, [1], 0.1)
    try:
        fail(state)
    except hvd.HorovodInternalError:
        assert state.epoch == 1
    hvd.shutdown()


@on_ranks(2)
def test_a_state_starts_with_that_of_rank_0_everywhere() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    sampler.record_batch(0, 1 + hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=hvd.rank(), seen=[hvd.rank()])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, extra: int) -> int:
        assert (state.epoch, state.seen, optimizer.param_groups[0]["lr"]) == (0, [0], 0.1)
        assert list(sampler) == [2 + hvd.rank(), 4 + hvd.rank(), 6 + hvd.rank()]
        weights = hvd.allgather(model.weight.detach())
        assert torch.equal(weights[0], weights[1])
        with torch.no_grad():
            model.weight.add_(1.0)
        state.epoch = 5
        state.restore()
        assert (state.epoch, model.weight.detach().equal(weights[:1])) == (0, True)
        return extra

    assert train(state, 3) == 3
    hvd.shutdown()


def test_the_elastic_sampler_gives_what_is_left_of_an_epoch() -> None:
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(10), seed=3)
    order = list(sampler)
    assert sorted(order) == list(range(10))
    sampler.record_batch(0, 4)
    again = hvd.elastic.ElasticSampler(range(10), seed=3)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == order[4:]
    assert len(again) == 6
    again.set_epoch(1)
    assert sorted(again) == list(range(10))
    assert list(again) != order
    hvd.shutdown()
