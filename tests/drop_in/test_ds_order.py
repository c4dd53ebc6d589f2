"""Loaders of the drop-in have the order of torch's distributed sampler, as DeepSpeed's have; and idle keys, lines."""

import logging
import sys
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from zeromesh import deepspeed
from zeromesh.base.loader import Position
from zeromesh.engine.initialize.optimizer_setup import build_loader


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("size", [6, 7, 13])
def test_each_pass_has_the_order_of_torchs_sampler(ranks: int, drop: bool, size: int) -> None:
    data: Any = range(size)
    settings: Any = SimpleNamespace(dataloader_drop_last=drop, train_micro_batch_size_per_gpu=2)
    for rank in range(ranks):
        mesh: Any = SimpleNamespace(data_size=ranks, data_rank=rank, device=torch.device("cpu"))
        loader = build_loader(data, None, settings, mesh, shuffles=True, seed=0)
        assert loader is not None
        sampler = DistributedSampler(data, ranks, rank)
        plain = DataLoader(data, 2, sampler=sampler, drop_last=drop)
        first = [batch.tolist() for batch in plain]
        assert [batch.tolist() for _ in range(2) for batch in loader] == 2 * first
        assert len(loader) == len(plain)
        for epoch in (5, 0):
            sampler.set_epoch(epoch)
            loader.sampler.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
        list(islice(loader, 1))
        resumed = build_loader(data, None, settings, mesh, shuffles=True, seed=0)
        assert resumed is not None
        resumed.go_to(loader.state(loader.position))
        rest = [batch.tolist() for batch in resumed]
        assert rest == first[1:] or (len(first) == 1 and (resumed.position == Position(5, size) or rest == first))


@pytest.mark.usefixtures("one_rank")
def test_keys_without_effect_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "contiguous_gradients": True},
    }
    ds: Any = deepspeed
    with caplog.at_level(logging.INFO, "zeromesh"):
        with ds.zero.Init(config_dict_or_path=config):
            model = torch.nn.Linear(2, 2)
        ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert caplog.text.count("have no effect") == 1


class Trainer:
    """As transformers' is where its arguments name a configuration: it makes another optimizer than it was given."""

    def __init__(self, optimizer: Any, uses: bool) -> None:
        self.callback_handler = SimpleNamespace(optimizer=optimizer)
        self.uses = uses

    def prepare(self, model: torch.nn.Module) -> Any:
        optimizer = self.callback_handler.optimizer if self.uses else torch.optim.AdamW(model.parameters())
        config = {"train_micro_batch_size_per_gpu": 1}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def test_an_optimizer_that_transformers_drops_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=Trainer))  # type: ignore[arg-type]
    for uses in (True, False):
        model = torch.nn.Linear(2, 2)
        with caplog.at_level(logging.WARNING, "zeromesh"):
            Trainer(torch.optim.SGD(model.parameters(), lr=0.1), uses).prepare(model)
        assert ("transformers drops the SGD of Trainer(optimizers=...)" in caplog.text) is not uses


def test_a_schedule_that_needs_a_metric_gets_it_with_the_step(one_rank: None) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, _, _, schedule = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=plateau, config=config)
    assert schedule is plateau is engine.lr_scheduler
    rates = []
    for metric in (1.0, 2.0):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step(lr_kwargs={"metrics": metric})
        rates += engine.get_lr()
    assert rates == [1.0, 0.5]


def test_a_schedule_that_needs_a_metric_is_refused_beside_one_of_the_configuration(one_rank: None) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = {"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": "WarmupLR", "params": {}}}
    with pytest.raises(ValueError, match="scheduler"):
        deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=plateau, config=config)
