"""Order of what ``initialize`` does to a model, and the names of an engine that its parts answer."""

from __future__ import annotations

import gc
import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import zeromesh
import zeromesh.deepspeed
from zeromesh.engine import state
from zeromesh.engine.engine import Engine
from zeromesh.engine.engine_reports import Reports
from zeromesh.engine.initialize.place_model import TRANSFORMATIONS, Placing
from zeromesh.engine.saving import Saves

NAMES = [row.name for row in TRANSFORMATIONS]
REPLACES_FORWARDS = (
    "balance experts",
    "spread sequences",
    "split layers",
    "share experts",
    "chunk losses",
    "use float8",
)


def test_each_row_stands_behind_the_rows_that_it_needs() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for number, row in enumerate(TRANSFORMATIONS):
        assert set(row.after) <= set(NAMES[:number]), row.name
        assert all(row.after.values()), row.name


def test_what_may_fail_without_a_trace_comes_first() -> None:
    atomic = [row.atomic for row in TRANSFORMATIONS]
    assert atomic == sorted(atomic, reverse=True)
    assert NAMES[:2] == ["balance experts", "spread sequences"]


def test_recomputation_is_the_last_to_replace_a_forward_but_compilation() -> None:
    recomputation = NAMES.index("recompute")
    assert all(NAMES.index(name) < recomputation for name in REPLACES_FORWARDS)
    assert NAMES[recomputation + 1 :] == ["compile"]


def test_ranks_agree_on_values_before_an_optimizer_takes_them() -> None:
    agreement = NAMES.index("agree on values")
    assert NAMES.index("shard states") < agreement
    assert agreement < min(NAMES.index("adopt optimizer"), NAMES.index("build optimizer"))


def test_a_row_that_needs_placed_states_finds_them_or_says_so() -> None:
    plan: Any = SimpleNamespace(
        groups=[], split=None, experts=[], optimizer=None, scheduler=None, model=nn.Linear(1, 1)
    )
    with pytest.raises(AssertionError, match="not placed yet"):
        Placing(plan).serve_states()


def delegated(part: type) -> list[str]:
    return [name for name, value in vars(part).items() if not name.startswith("_") and inspect.isfunction(value)]


@pytest.mark.parametrize("part", [Saves, Reports])
def test_the_engine_has_each_method_of_its_parts_with_signature_and_docstring(part: type) -> None:
    assert delegated(part)
    for name in delegated(part):
        ours, theirs = getattr(Engine, name), getattr(part, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.getdoc(ours) == inspect.getdoc(theirs)


def test_subclasses_extend_methods_and_attributes_lead_to_the_state() -> None:
    class Noted(Engine):
        def memory_report(self) -> dict[str, Any]:
            return {**super().memory_report(), "noted": True}

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine, _, _, schedule = zeromesh.initialize(nn.Linear(2, 1), config=config)
    try:
        noted = Noted(engine._state)
        assert noted.memory_report()["noted"]
        assert noted.memory_report()["total"] == engine.memory_report()["total"]
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert engine.global_steps == engine._state.global_steps == 1
        engine.lr_scheduler = schedule
        assert engine._state.lr_scheduler is schedule
        with pytest.raises(AttributeError):
            engine.skipped_steps = 2
        del engine.lr_scheduler
        assert not hasattr(engine, "lr_scheduler")
    finally:
        engine.destroy()


def test_an_engine_that_cannot_be_made_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no engine")

    monkeypatch.setattr(state, "Health", fail)
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": disk}}
    with pytest.raises(ValueError, match="no engine") as caught:
        zeromesh.initialize(nn.Linear(2, 1), config=config)
    assert "build it anew" in caught.value.__notes__[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_configuration_of_the_drop_in_can_be_kept_without_the_engine() -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    engine = zeromesh.deepspeed.initialize(model=nn.Linear(2, 1), config=config)[0]
    try:
        kept = engine.config
        assert pickle.loads(pickle.dumps(kept)) == kept == config
        engine.set_train_batch_size(2)
        assert (engine.config.train_batch_size, kept.train_batch_size) == (2, 1)
    finally:
        engine.destroy()
    sharded = ref(engine.sharded)
    del engine
    gc.collect()
    assert sharded() is None
