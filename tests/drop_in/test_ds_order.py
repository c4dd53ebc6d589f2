"""Loaders of the drop-in have the order of torch's distributed sampler, as DeepSpeed's have; and idle keys, lines."""

import logging
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from zeromesh import deepspeed
from zeromesh.initialization.prepare import build_loader
from zeromesh.training_data import Position


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
