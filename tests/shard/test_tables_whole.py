"""Tables as whole tensors: checkpoints, gathered weights, gradients that are asked for or replaced, and errors."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_same
from harness import on_ranks, run_ranks
from run import sgd, start_engine, train_step
from test_tables import (
    ROWS,
    STEPS,
    WORDS,
    Case,
    Model,
    advance,
    batch_of,
    check,
    config_of,
    engine_of,
    make,
    norm_of,
    plain,
)
from zeromesh import zero
from zeromesh.deepspeed import local_states


def save(case: Case, folder: str) -> None:
    engine = engine_of(case, f"{folder}/files")
    advance(engine, case, range(STEPS // 2))
    engine.save_checkpoint(folder)
    engine.destroy()


def go_on(case: Case, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(case, f"{folder}/files")
    advance(engine, case, range(20, 22))  # states that must not stay
    engine.load_checkpoint(folder)
    advance(engine, case, range(STEPS // 2, STEPS))
    found = engine.gathered_state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "before", "after", "device"),
    [
        ("rowwise_adagrad", 2, 2, "nvme"),
        pytest.param("rowwise_adagrad", 3, 1, "none", marks=pytest.mark.full),
        pytest.param("rowwise_adagrad", 1, 3, "cpu", marks=pytest.mark.full),
        pytest.param("adam", 4, 3, "nvme", marks=pytest.mark.full),
        pytest.param("adam", 1, 2, "none", marks=pytest.mark.full),
        pytest.param("adagrad", 2, 4, "cpu", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_goes_on_with_other_ranks_and_tiers(
    kind: str, before: int, after: int, device: str, tmp_path: Path
) -> None:
    # The global batch stays: with other numbers of ranks the micro-batches are others, so that the data follow from the
    # first number.
    first = Case(before, kind, 2)
    run_ranks(save, before, first, str(tmp_path))
    then = Case(after, kind, 3, device=device)
    found = run_ranks(go_on, after, then, str(tmp_path))[0]
    if before == after:
        check(found, plain(first), then)
    else:
        expected = run_ranks(go_on, before, first, str(tmp_path))[0]
        model = make()
        assert {name: value.shape for name, value in found.items()} == {
            n: v.shape for n, v in model.state_dict().items()
        }
        assert all(torch.isfinite(value).all() for value in found.values())
        assert found.keys() == expected.keys()


def loaded_states(case: Case, folder: str) -> dict[str, Any]:
    engine = engine_of(case, f"{folder}/files")
    engine.load_checkpoint(folder)
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    weights = engine.gathered_state_dict()
    states = {
        key: [zero.safe_get_full_optimizer_state(engine.module.words.weight, key)]
        for key in ("exp_avg", "exp_avg_sq")
        if case.kind == "adam"
    }
    engine.destroy()
    return {"weights": weights, "states": states}


@pytest.mark.full
def test_weights_and_states_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save, 3, Case(3), str(tmp_path))
    found = [
        run_ranks(loaded_states, n, Case(n, device=d), str(tmp_path))[0]
        for n, d in ((3, "none"), (2, "nvme"), (1, "cpu"))
    ]
    for other in found[1:]:
        assert_same(other["weights"], found[0]["weights"])
        for key, (value,) in found[0]["states"].items():
            assert torch.equal(other["states"][key][0], value)
            assert value.any()


@on_ranks(2)
def test_weights_are_whole_where_they_are_asked_for() -> None:
    before = make().state_dict()
    engine = engine_of(Case(stage=0), "")
    weight = engine.module.words.weight
    assert_same(before, engine.state_dict())
    with zero.GatheredParameters([weight], modifier_rank=1):
        assert torch.equal(weight, before["words.weight"])
        if engine.mesh.rank == 1:
            weight.data.mul_(2.0)
    assert torch.equal(engine.state_dict()["words.weight"], 2 * before["words.weight"])
    engine.load_state_dict(before)
    assert torch.equal(dict(engine.full_weights())["words.weight"], before["words.weight"])
    engine.backward(engine(batch_of(0, engine.data_rank, 2)))
    gradient = zero.safe_get_full_grad(weight)
    model = make()
    model(batch_of(0, None, 2)).backward()
    assert gradient is not None
    torch.testing.assert_close(gradient, model.words.weight.grad.to_dense(), rtol=1e-12, atol=1e-14)
    norm = zeromesh.clip_grad_norm_(engine.parameters(), 1e-3)
    plain_norm = norm_of(model.parameters())
    torch.testing.assert_close(norm, plain_norm, rtol=1e-12, atol=0.0)
    after = zero.safe_get_full_grad(weight)
    torch.testing.assert_close(after, gradient * (1e-3 / (norm + 1e-6)), rtol=1e-12, atol=1e-14)
    engine.destroy()


@on_ranks(2)
def test_a_table_built_on_meta_has_the_values_of_an_ordinary_one() -> None:
    torch.manual_seed(0)
    expected = make().state_dict()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        with zero.Init():
            model = Model()
        torch.manual_seed(0)
        ordinary = Model().state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    engine = zeromesh.initialize(model=model, config=config_of(Case(), ""))[0]
    assert_same(ordinary, engine.state_dict())
    assert expected.keys() == ordinary.keys()
    engine.destroy()


@on_ranks(2)
def test_gradients_of_tables_are_dropped_and_asked_for_as_others(tmp_path: Path) -> None:
    engine = engine_of(Case(kind="sgd", device="nvme"), str(tmp_path))
    with torch.inference_mode():  # the cache is made here
        engine(batch_of(0, engine.data_rank, 2))
    advance(engine, Case(kind="sgd"), range(1))
    before = engine.state_dict()
    for drop in (engine.module.zero_grad, lambda: setattr(engine.module.words.weight, "grad", None)):
        engine.backward(engine(batch_of(1, engine.data_rank, 2)))
        with pytest.raises(RuntimeError, match="the gradient of words.weight has rows only.*safe_get_full_grad"):
            torch.nn.utils.clip_grad_norm_([engine.module.words.weight], 1.0)
        drop()
        assert engine.module.words.weight.grad is None
        engine.zero_grad()
    engine.backward(engine(batch_of(1, engine.data_rank, 2)))
    engine.module.zero_grad()
    advance(engine, Case(kind="sgd"), range(1, 2))
    other = engine_of(Case(kind="sgd"), "")
    other.load_state_dict(before)
    advance(other, Case(kind="sgd"), range(1, 2))
    check(engine.state_dict(), other.state_dict(), "dropped")
    other.destroy()
    engine.destroy()


@on_ranks(2)
def test_gradients_of_tables_are_read_and_replaced_whole_and_in_parts() -> None:
    engine = engine_of(Case(kind="sgd"), "")
    weights = [engine.module.words.weight, engine.module.idle.weight]
    before = engine.state_dict()
    engine.backward(engine(batch_of(0, engine.data_rank, 2)))
    whole = zero.safe_get_full_grad(weights[0])
    assert whole is not None
    table = zero.place_of(weights[0])[0]
    own = local_states.safe_get_local_grad(weights[0])
    assert own is not None
    first = table.first
    assert torch.equal(own.view(-1, 6), whole[first : first + own.numel() // 6])
    zero.safe_update_full_grad_vectorized([*weights, engine.module.net[0].weight], lambda value, _: value / 2)
    assert torch.equal(zero.safe_get_full_grad(weights[0]), whole / 2)
    assert zero.safe_get_full_grad(weights[1]) is None  # no batch has used it
    local_states.safe_set_local_grad(weights[0], own / 4)
    given = whole / 4
    assert torch.equal(zero.safe_get_full_grad(weights[0]), given)
    idle = torch.zeros(3, 2, dtype=torch.float64)
    idle[1] = 1.0
    zero.safe_set_full_grad(weights[1], idle)
    engine.step()
    after = engine.state_dict()
    torch.testing.assert_close(after["words.weight"], before["words.weight"] - 0.1 * given, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after["idle.weight"], before["idle.weight"] - 0.1 * idle, rtol=1e-12, atol=1e-14)
    engine.destroy()


@on_ranks(2)
def test_tables_move_with_offloaded_states() -> None:
    case = Case(kind="adagrad")
    engine = engine_of(case, "")
    advance(engine, case, range(3))
    with torch.no_grad():
        expected_loss = engine(batch_of(3, engine.data_rank, 2))  # shortens rows
    expected = engine.state_dict()
    table = zero.place_of(engine.module.words.weight)[0]
    planes = [plane.data_ptr() for plane in table.rows.planes]
    engine.offload_states()
    assert len(planes) == 2
    assert len(table.rows.planes) == 1  # the memory of the states is given back
    assert table.rows.planes[0].data_ptr() == table.flat.master.data_ptr() != planes[0]
    for move in (engine.reload_states, engine.offload_states, engine.reload_states):
        with torch.no_grad():
            assert torch.equal(engine(batch_of(3, engine.data_rank, 2)), expected_loss)
        move()
    check(engine.state_dict(), expected, "reloaded")
    engine.offload_states(["optimizer"])
    advance(engine, case, range(3, STEPS))  # brings them back
    check(engine.state_dict(), plain(case), "offloaded")
    engine.destroy()


@on_ranks(2)
def test_a_weight_that_is_passed_is_computed_with() -> None:
    engine = engine_of(Case(), "")
    module, other = engine.module.words, torch.randn(WORDS, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([1, 4, 4])
    found = torch.func.functional_call(module, {"weight": other}, (ids,))
    assert torch.equal(found, other[ids])
    found.sum().backward()
    assert other.grad is not None
    assert other.grad.to_dense()[4].eq(2).all()
    whole = engine.state_dict()["words.weight"]
    with zero.GatheredParameters([module.weight]), torch.no_grad():
        if engine.mesh.rank == 1:  # alone, as ranks that generate texts of different lengths
            assert torch.equal(module(ids), whole[ids])
            assert torch.equal(copy.deepcopy(module)(ids), whole[ids])
    assert torch.equal(module(ids), whole[ids])
    engine.destroy()


SCHEDULES: dict[str, tuple[dict[str, Any], float]] = {
    "WarmupLR": ({"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}, 0.1),
    "WarmupDecayLR": ({"total_num_steps": 8, "warmup_num_steps": 4}, 0.001),
    "WarmupCosineLR": ({"total_num_steps": 8, "warmup_num_steps": 4}, 0.5),
    "OneCycle": ({"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}, 0.1),
    "OneCycleLR": ({"max_lr": 0.1, "total_steps": 9}, 0.1),
}
"""By name: parameters, and the highest rate of the other parameters, whose own rate is 0.5."""


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_with_a_rate_of_their_own_follow_the_schedule_in_proportion(name: str) -> None:
    params, highest = SCHEDULES[name]
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    engine = start_engine(
        model,
        optimizer=sgd(0.5),
        scheduler={"type": name, "params": params},
        embedding_tables={"optimizer": {"type": "sgd", "params": {"lr": 2.0}}},
    )
    rates = []
    for _ in range(8):
        rates.append(engine.get_lr())
        train_step(engine, engine(torch.tensor([1])).sum())
    assert max(own for own, _ in rates) == pytest.approx(highest, rel=0.01)
    for own, of_tables in rates:
        assert of_tables == pytest.approx(own * 2.0 / highest)
    engine.destroy()


# Errors.


@on_ranks(2)
def test_an_index_out_of_range_raises_on_every_rank() -> None:
    engine = engine_of(Case(), "")
    batch = batch_of(0, engine.data_rank, 2)
    if engine.mesh.rank == 1:
        bad = batch.bags.clone() if batch.bags.numel() else torch.tensor([ROWS])
        pairs = batch.pairs.clone()
        pairs[2, 1] = ROWS + 4
        batch = replace(batch, pairs=pairs)
        assert bad is not None
    text = (
        rf"index {ROWS + 4} of sample 2 is out of range for means, which has {ROWS} rows"
        if engine.mesh.rank == 1
        else "rank 1 failed in a lookup of means"
    )
    with pytest.raises(IndexError if engine.mesh.rank == 1 else RuntimeError, match=text):
        engine(batch)
    advance(engine, Case(), range(1))  # it goes on
    engine.destroy()


@on_ranks(2)
def test_ranks_that_look_up_different_tables_are_told() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Embedding(4, 2, sparse=True) for name in "ab"})
    model["head"] = nn.Linear(2, 1)
    engine = start_engine(model, optimizer=sgd(0.1))
    with pytest.raises(RuntimeError, match="looks up rows of another table than"):
        engine.module["ab"[engine.mesh.rank]](torch.tensor([1])).sum()
    engine.destroy()


@on_ranks(2)
def test_a_weight_used_as_a_whole_is_refused() -> None:
    engine = engine_of(Case(), "")
    weight = engine.module.words.weight
    assert weight.shape == (WORDS, 6)
    for use in (lambda: weight.sum(), lambda: nn.init.normal_(weight), lambda: torch.randn(2, 6) @ weight.T):
        with pytest.raises(RuntimeError, match="words.* has its rows spread over 2 ranks.*GatheredParameters"):
            use()
    weight.data = torch.zeros(WORDS, 6, dtype=torch.float64)
    engine.backward(engine(batch_of(0, engine.data_rank, 2)))
    with pytest.raises(RuntimeError, match="words.weight was given new data"):
        engine.step()
    engine.destroy()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weight decay": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
        "weight_decay = 0.01 of AdamW would change rows of 0.weight that no batch has used",
    ),
    "momentum": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        "momentum = 0.9 of SGD would change rows of 0.weight",
    ),
    "no rule": ({"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}, "Lion has no update for rows of 0.weight"),
    "unknown option": (
        {
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "embedding_tables": {"optimizer": {"type": "sgd", "params": {"eps": 1}}},
        },
        "embedding_tables.optimizer.params.eps is not an option of sgd, which has lr",
    ),
    "no embedding": (
        {"optimizer": {"type": "SGD"}, "embedding_tables": {"modules": ["tables.*"]}},
        r"embedding_tables.modules: 'tables.\*' matches no embedding of the model; it has 0",
    ),
    "no folder": ({"embedding_tables": {"device": "nvme"}}, "embedding_tables.device is nvme; name a folder"),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_rows_that_no_batch_used_is_refused(name: str) -> None:
    config, message = REFUSED[name]
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    with pytest.raises(ValueError, match=message):
        zeromesh.initialize(model=model, config=config)
    model(torch.tensor([1])).sum().backward()  # the model is as it was
