"""Experts that rest on the host or in files train as in one process that updates all of them in every step."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import wait
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from compare import assert_close, assert_same
from harness import run_ranks
from late_copies import LateStreams
from mixtures import build_mixture, mixture_loss, token_rows
from pairwise import pairwise
from run import adamw, configuration, optimizer_of, start_engine
from zeromesh import zero
from zeromesh.engine.reports import planned_states
from zeromesh.shard import sizes
from zeromesh.shard.store.link import Link
from zeromesh.shard.tables import row_fetches, row_steps
from zeromesh.shard.tables.row_fetches import FetchedRows, RowFetcher
from zeromesh.shard.tables.row_memory import RowMemory

STEPS, EXPERTS, LENGTH = 6, 16, 3
RATES = [1e-2 / (1 + step) for step in range(STEPS)]  # a row that is left alone has to know the rates of its time
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.9)}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
}


@dataclass(frozen=True)
class Case:
    """One training run."""

    rest: str = "cpu"
    ranks: int = 1
    optimizer: str = "AdamW"
    stage: int = 0
    accumulation: int = 1
    clip: float = 0.0
    slots: int = 3
    dtype: torch.dtype = torch.float64
    recomputes: bool = False
    narrow: bool = False  # states in bf16


def batches(case: Case, step: int) -> list[torch.Tensor]:
    """Return the micro-batches of all ranks; a token of few choices, so that most experts are left alone."""
    return [token_rows(100 * step + part, 1, LENGTH) for part in range(case.ranks * case.accumulation)]


def engine_of(case: Case, folder: str, **sections: Any) -> Any:
    options = dict(OPTIMIZERS[case.optimizer][1])
    sections |= {"gradient_clipping": case.clip, "gradient_accumulation_steps": case.accumulation}
    if case.recomputes:
        sections["activation_checkpointing"] = {"enabled": True, "targets": ["blocks.*"]}
    if case.narrow:
        sections["optimizer_state_dtype"] = dict.fromkeys(("exp_avg", "exp_avg_sq"), "bf16")
    if case.rest != "none":
        sections["experts"] = {"rest": case.rest, "nvme_path": f"{folder}/files", "slots": case.slots}
    config = configuration(
        optimizer_of(case.optimizer, lr=RATES[0], **options), case.stage, train_micro_batch_size_per_gpu=1, **sections
    )
    return start_engine(build_mixture(case.dtype, experts=EXPERTS), config)


def advance(engine: Any, case: Case, steps: Iterable[int]) -> None:
    for step in steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = RATES[step]
        for part in batches(case, step)[engine.data_rank * case.accumulation :][: case.accumulation]:
            engine.backward(mixture_loss(engine, part))
            engine.step()


def trained(case: Case, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(case, folder)
    advance(engine, case, range(STEPS))
    if case.rest != "none":  # most rows have been left alone for steps: nothing has touched all of them so far
        for table in engine.sharded.tables:
            table.wait()
        missed = [int((table.steps.missed > 0).sum()) for table in engine.sharded.tables]
        assert len(missed) == 4
        assert all(missed), missed
    found: dict[str, torch.Tensor] = engine.gathered_state_dict()
    engine.destroy()
    return found


def plain(case: Case) -> dict[str, torch.Tensor]:
    """Train in plain torch."""
    model = build_mixture(case.dtype, experts=EXPERTS)
    kind, options = OPTIMIZERS[case.optimizer]
    optimizer = kind(model.parameters(), lr=RATES[0], **options)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.zero_grad()
        parts = batches(case, step)
        for part in parts:
            (mixture_loss(model, part) / len(parts)).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(rest="nvme", stage=3, accumulation=2, clip=0.1),
        pytest.param(Case(rest="nvme", slots=1, optimizer="Adam"), marks=pytest.mark.full),
        pytest.param(Case(optimizer="SGD", recomputes=True), marks=pytest.mark.full),
        pytest.param(Case(rest="nvme", optimizer="Adagrad", stage=2), marks=pytest.mark.full),
        *(
            pytest.param(Case(rest=rest, ranks=2, stage=stage, accumulation=steps, clip=clip), marks=pytest.mark.full)
            for rest in ("cpu", "nvme")
            for stage, steps, clip in ((0, 1, 0.0), (1, 2, 0.1), (2, 1, 0.1), (3, 2, 0.0))
        ),
    ],
    ids=str,
)
def test_resting_experts_train_as_in_one_process(case: Case, tmp_path: Path) -> None:
    folder = str(tmp_path)
    found = trained(case, folder) if case.ranks == 1 else run_ranks(trained, case.ranks, case, folder)[0]
    assert_close(found, plain(case), 1e-12)


FACTORS: dict[str, list[Any]] = {
    "rest": ["cpu", "nvme"],
    "ranks": [1, 2],
    "optimizer": list(OPTIMIZERS),
    "stage": [0, 1, 2, 3],
    "accumulation": [1, 3],
    "clip": [0.0, 0.1],
    "slots": [1, 3, EXPERTS],
    "recomputes": [False, True],
}


def trained_all(cases: list[Case], folder: str) -> list[dict[str, torch.Tensor]]:
    return [trained(case, folder) for case in cases]


@pytest.mark.full
def test_every_pair_of_what_it_composes_with_trains_as_in_one_process(tmp_path: Path) -> None:
    cases, folder = [Case(**values) for values in pairwise(FACTORS, seed=1)], str(tmp_path)
    alone, together = ([case for case in cases if case.ranks == ranks] for ranks in (1, 2))
    found = trained_all(alone, folder) + run_ranks(trained_all, 2, together, folder)[0]
    for case, weights in zip(alone + together, found, strict=True):
        try:
            assert_close(weights, plain(case), 1e-12)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize(
    ("rest", "narrow"),
    [
        ("cpu", False),
        ("nvme", True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("nvme", False), ("cpu", True))),
    ],
)
def test_bits_are_those_of_a_run_with_all_experts_in_memory(rest: str, narrow: bool, tmp_path: Path) -> None:
    case = Case(rest=rest, dtype=torch.float32, narrow=narrow)
    assert_same(trained(case, str(tmp_path)), trained(replace(case, rest="none"), str(tmp_path)))


def save(case: Case, folder: str) -> None:
    engine = engine_of(case, folder)
    advance(engine, case, range(STEPS // 2))
    engine.save_checkpoint(folder)
    engine.destroy()


def go_on(case: Case, folder: str, ranks: int) -> dict[str, torch.Tensor]:
    engine = engine_of(case, folder)
    advance(engine, case, range(2))  # states, and steps to be made up for, that must not stay
    engine.load_checkpoint(folder)
    advance(engine, Case(**{**vars(case), "ranks": ranks}), range(STEPS // 2, STEPS))
    found: dict[str, torch.Tensor] = engine.gathered_state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Case(), Case(rest="nvme", slots=2)),
        pytest.param(Case(rest="nvme"), Case(rest="none"), marks=pytest.mark.full),
        pytest.param(Case(rest="none", stage=3), Case(), marks=pytest.mark.full),
        (Case(optimizer="SGD"), Case(optimizer="SGD")),
        pytest.param(Case(rest="none", optimizer="SGD"), Case(optimizer="SGD"), marks=pytest.mark.full),
        pytest.param(Case(optimizer="SGD"), Case(rest="none", optimizer="SGD"), marks=pytest.mark.full),
        pytest.param(Case(rest="nvme", ranks=2), Case(accumulation=2), marks=pytest.mark.full),
        pytest.param(Case(accumulation=2), Case(rest="nvme", ranks=2, stage=3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_with_experts_elsewhere(before: Case, after: Case, tmp_path: Path) -> None:
    for function, case, more in ((save, before, ()), (go_on, after, (after.ranks,))):
        if case.ranks == 1:
            result: Any = function(case, str(tmp_path), *more)
        else:
            result = run_ranks(function, case.ranks, case, str(tmp_path), *more)[0]
    assert_close(result, plain(before), 1e-12)


@pytest.mark.full
def test_a_checkpoint_keeps_the_bits_of_states_in_16_bits(tmp_path: Path) -> None:
    """Rounding asks for the element's own numbers and the step's, so that it goes on wherever experts rest."""
    case = Case(dtype=torch.float32, narrow=True)
    save(case, str(tmp_path))
    expected = trained(case, str(tmp_path))
    for rest in ("cpu", "nvme", "none"):
        assert_same(go_on(replace(case, rest=rest), str(tmp_path), 1), expected)


def test_states_and_weights_that_users_read_miss_no_step(tmp_path: Path) -> None:
    """Whole states and weights are those of the last step, also of experts that have been left alone since long."""
    found = []
    for rest in ("cpu", "none"):
        engine = engine_of(Case(rest=rest), str(tmp_path))
        advance(engine, Case(), range(3))
        weight = engine.module.blocks[0].experts.down_proj
        found.append({key: zero.safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")})
        with zero.GatheredParameters([weight]):
            found[-1]["weight"] = weight.detach().clone()
        engine.destroy()
    assert_close(*found, 1e-12)
    assert bool((found[0]["exp_avg"].flatten(1).abs().sum(1) == 0).any())  # of an expert that no token has chosen


@pytest.mark.parametrize("rest", ["cpu", pytest.param("nvme", marks=pytest.mark.full)])
def test_states_in_the_optimizer_miss_no_step_and_can_be_changed(rest: str, tmp_path: Path) -> None:
    """Users read and write states without the library's functions, while updates go on beside them."""
    engine, model = engine_of(Case(rest=rest), str(tmp_path)), build_mixture(torch.float64, experts=EXPERTS)
    kind, options = OPTIMIZERS["AdamW"]
    optimizer = kind(model.parameters(), lr=RATES[0], **options)
    for step in range(STEPS):
        advance(engine, Case(), [step])
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.zero_grad()
        mixture_loss(model, batches(Case(), step)[0]).backward()
        optimizer.step()
        numbers = {
            id(p): number for number, p in enumerate(p for g in engine.optimizer.param_groups for p in g["params"])
        }
        state = engine.optimizer.state_dict()["state"]
        for table in engine.sharded.tables if step % 3 == 1 else ():
            piece = table.flat.pieces[0][2].parameter
            found = state[numbers[id(piece)]], piece
            expected = optimizer.state[model.get_parameter(table.full_name)], model.get_parameter(table.full_name)
            torch.testing.assert_close(found[0]["exp_avg"], expected[0]["exp_avg"].view(-1), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found[1].data, expected[1].data.view(-1), rtol=1e-12, atol=1e-12)
            for states, _ in (found, expected):
                states["exp_avg"].mul_(3)
    assert_close(engine.gathered_state_dict(), model.state_dict(), 1e-12)
    engine.destroy()


@pytest.mark.parametrize("rest", ["cpu", "nvme"])
def test_forwards_have_what_users_write_to_weights_between_them(rest: str, tmp_path: Path) -> None:
    """Rows that were fetched ahead, or are in the slots, are those from before the write."""
    engine, model = engine_of(Case(rest=rest), str(tmp_path)), build_mixture(torch.float64, experts=EXPERTS)
    pieces = [piece for group in engine.optimizer.param_groups for piece in group["params"]]
    with torch.no_grad():
        for _ in range(2):
            for _ in range(2):  # the second one ends with a guess
                found = mixture_loss(engine, token_rows(0, 1, LENGTH))
            assert found.item() == pytest.approx(mixture_loss(model, token_rows(0, 1, LENGTH)).item(), rel=1e-12)
            for tensor in (*pieces, *model.parameters()):
                tensor.mul_(0.5)
    engine.destroy()


def test_states_that_others_have_replaced_can_be_read(tmp_path: Path) -> None:
    engine = engine_of(Case(), str(tmp_path))
    advance(engine, Case(), [0])
    before = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(deepcopy(before))
    advance(engine, Case(), [1])
    assert all(bool(state["exp_avg"].isfinite().all()) for state in before["state"].values())
    engine.destroy()


def test_sums_of_micro_batches_that_are_not_sent_are_not_rounded(tmp_path: Path) -> None:
    """Gradients in bf16 are added up in fp32; on one rank the update has the sum, as of experts in memory."""
    sections = {"bf16": True, "data_types": {"grad_accum_dtype": "fp32"}}
    found = []
    for rest in ("cpu", "none"):
        engine = engine_of(Case(rest=rest, dtype=torch.float32, accumulation=3), str(tmp_path), **sections)
        advance(engine, Case(accumulation=3), range(2))
        found.append({name: zero.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()})
        engine.destroy()
    assert_same(*found)


def test_experts_that_are_never_used_keep_no_more_than_some_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(row_steps, "MOST_MISSED", 1)
    engine = engine_of(Case(), str(tmp_path))
    advance(engine, Case(), range(STEPS))
    for table in engine.sharded.tables:
        table.wait()
        assert len(table.steps.last) == 1
    found = engine.gathered_state_dict()
    engine.destroy()
    assert_close(found, plain(Case()), 1e-12)


def test_a_forward_has_the_weights_that_were_changed_where_they_are_gathered(tmp_path: Path) -> None:
    found = []
    for rest in ("cpu", "none"):
        engine = engine_of(Case(rest=rest), str(tmp_path))
        weight, ids = engine.module.blocks[0].experts.down_proj, token_rows(1, 1, LENGTH)
        with zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.mul_(3)
            with torch.no_grad():
                without_graph = mixture_loss(engine, ids)
            inside = mixture_loss(engine, ids).detach()
        found.append({"without graph": without_graph, "inside": inside, "after": mixture_loss(engine, ids).detach()})
        engine.destroy()
    assert_close(*found, 1e-12)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_of_all_experts_are_refused(register: str, tmp_path: Path) -> None:
    engine = engine_of(Case(), str(tmp_path))
    getattr(engine.module.blocks[0].experts.down_proj, register)(lambda gradient: None)
    with pytest.raises(RuntimeError, match="down_proj was given a hook, which expects a gradient of its shape"):
        mixture_loss(engine, token_rows(1, 1, LENGTH))
    engine.destroy()


def test_only_chosen_experts_are_fetched(tmp_path: Path) -> None:
    engine = engine_of(Case(), str(tmp_path))
    table, asked = engine.sharded.tables.every[0], []
    answer = table.answer
    table.answer = lambda ids: asked.append(ids.tolist()) or answer(ids)
    rows: list[list[int]] = []
    router = engine.module.blocks[0].gate
    router.register_forward_hook(lambda module, inputs, outputs: rows.append(outputs[2].unique().tolist()))
    engine.eval()
    with torch.no_grad():
        mixture_loss(engine, token_rows(1, 1, LENGTH))
    assert asked == rows
    assert len(rows[0]) < EXPERTS
    engine.destroy()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_recomputed_block_keeps_no_rows_until_the_backward(recomputes: bool, tmp_path: Path) -> None:
    """What holds memory: rows of all blocks, or none; then gradients, and none of those after the update."""
    engine = engine_of(Case(recomputes=recomputes, rest="nvme"), str(tmp_path))
    tables, rows = list(engine.sharded.tables), []

    def watch(table: Any, own: Any) -> Any:
        def new_rows(ids: torch.Tensor) -> torch.Tensor:
            leaf: torch.Tensor = own(ids)
            rows.append(StorageWeakRef(leaf.untyped_storage()))
            return leaf

        return new_rows

    for table in tables:
        table.new_rows = watch(table, table.new_rows)
    loss = mixture_loss(engine, token_rows(0, 1, LENGTH))
    assert [row.expired() for row in rows] == [recomputes] * len(tables)
    engine.backward(loss)
    assert len(rows) == len(tables) * (1 + recomputes)
    assert all(row.expired() for row in rows)
    assert all(table.gradient._arrived for table in tables)
    engine.step()
    assert all(table.gradient.summed.untyped_storage().nbytes() == 0 for table in tables)
    engine.destroy()


def test_updates_go_on_after_the_step_and_forwards_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, begin, take = engine_of(Case(), str(tmp_path)), Event(), row_steps.take_steps
    monkeypatch.setattr(row_steps, "take_steps", lambda *rows: begin.wait(60) and take(*rows))
    advance(engine, Case(), [0])  # comes back, although no row can be updated
    assert not any(table._update.done() for table in engine.sharded.tables)
    begin.set()
    advance(engine, Case(), range(1, STEPS))
    assert_close(engine.gathered_state_dict(), plain(Case()), 1e-12)
    engine.destroy()


def test_an_error_of_an_update_is_logged_and_raised_by_the_next_forward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail(*rows: object) -> None:
        raise MemoryError("no memory for the update")

    engine = engine_of(Case(), str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(row_steps, "take_steps", fail)
        advance(engine, Case(), [0])
        for table in engine.sharded.tables:
            wait([table._update])
    assert "the update of blocks.0.experts.down_proj failed" in caplog.text  # also if it was the last one
    for _ in range(2):  # layers
        with pytest.raises(MemoryError, match="no memory for the update"):
            mixture_loss(engine, token_rows(0, 1, LENGTH))
    advance(engine, Case(), [1])  # rows that have not taken a step miss it
    engine.gathered_state_dict()
    assert all(table.steps.missed.tolist() == [0] * EXPERTS for table in engine.sharded.tables)
    engine.destroy()


def test_rows_that_were_asked_for_before_are_fetched_before_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, fetched, fetch = engine_of(Case(recomputes=True), str(tmp_path)), [], RowFetcher.fetch

    def watch(fetcher: RowFetcher, rows: torch.Tensor, *how: Any) -> FetchedRows:
        fetched.append((fetcher is engine.sharded.tables.beside.ahead, rows.tolist()))
        return fetch(fetcher, rows, *how)

    monkeypatch.setattr(RowFetcher, "fetch", watch)
    for step in range(3):
        engine.optimizer.param_groups[0]["lr"] = 0.0  # the choices stay as they are
        engine.backward(mixture_loss(engine, token_rows(0, 1, LENGTH)))
        engine.step()
        for table in engine.sharded.tables:
            table.wait()
        # Two layers with two tables each, in the forward and again in the backward; then the next step's first layer.
        assert len(fetched) == (10 if step == 0 else 8)
        assert [ahead for ahead, _ in fetched] == [step > 0] * 8 + [True] * (len(fetched) - 8)
        fetched.clear()
    engine.destroy()


@pytest.mark.parametrize("rest", ["cpu", pytest.param("nvme", marks=pytest.mark.full)])
def test_whoever_uses_rows_waits_for_their_copy(rest: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies of a simulated device run as late as they may, row by row through two buffers."""
    streams = []

    def link(device: torch.device) -> Link:
        streams.append(LateStreams())
        return Link(device, streams[-1])

    monkeypatch.setattr(row_fetches, "Link", link)
    monkeypatch.setattr(row_fetches, "STAGED", 1)
    case = Case(rest=rest, recomputes=True, accumulation=2)
    assert_close(trained(case, str(tmp_path)), plain(case), 1e-12)
    assert len(streams) == 2
    assert all(stream.copies > 20 for stream in streams)


def test_the_rows_that_are_used_most_stay_in_the_slots() -> None:
    """Batches with more rows than slots do not push each other's rows out: others are used where they rest."""
    planes = [torch.arange(12.0).view(6, 2), torch.zeros(6, 2)]
    memory, begun = RowMemory(planes[0], torch.device("cpu"), 2, on_host=True), []
    memory.replace(planes)

    def change(row: int, values: list[torch.Tensor]) -> bool:
        begun.append((row, values[0].data_ptr() == planes[0][row].data_ptr()))
        for value in values:
            value += 1
        return True

    for ids in ([1, 4], [0, 1, 2, 4], [1, 3, 4, 5], [0, 1, 4]):
        memory.in_place(torch.tensor(ids), change)
    assert all(at_rest == (row not in (1, 4)) for row, at_rest in begun)
    memory.settle()
    uses = torch.tensor([2.0, 4, 1, 1, 4, 1])[:, None]
    assert torch.equal(planes[0], torch.arange(12.0).view(6, 2) + uses)
    assert torch.equal(planes[1], uses.expand(6, 2))


class Wrong(nn.Module):
    """Calls its experts with a number that none of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_mixture(torch.float32)
        self.inner.blocks[0].gate.register_forward_hook(lambda m, inputs, outputs: (*outputs[:2], outputs[2] + 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def test_a_choice_without_an_expert_is_an_error(tmp_path: Path) -> None:
    engine = start_engine(Wrong(), configuration(adamw(1e-3), train_batch_size=1, experts={"rest": "cpu"}))
    with pytest.raises(IndexError, match="was called with expert 4; it has 4, whose numbers are 0 to 3"):
        engine(token_rows(0, 1))
    engine.destroy()


def tied() -> nn.Module:
    model = build_mixture(torch.float32)
    model.blocks[1].experts.down_proj = model.blocks[0].experts.down_proj
    return model


def listed() -> nn.Module:
    model = build_mixture(torch.float32)
    model.blocks = nn.ModuleList([nn.Linear(6, 6)])
    return model


@pytest.mark.parametrize(
    ("model", "optimizer", "sections", "message"),
    [
        (tied, "AdamW", {"experts": {"rest": "cpu"}}, "blocks.0.experts cannot rest: down_proj is used elsewhere, too"),
        (listed, "AdamW", {"experts": {"rest": "cpu"}}, "no module of Mixture has experts"),
        (
            build_mixture,
            "Lamb",
            {"experts": {"rest": "cpu"}},
            "make up for steps that they miss, but .* updated so: adam, adamw, sgd",
        ),
        (build_mixture, "AdamW", {"experts": {"rest": "nvme"}}, "name a folder with experts.nvme_path"),
        (build_mixture, "AdamW", {"experts": {"rest": "cpu"}, "compile": {"enabled": True}}, "are not compiled"),
        (build_mixture, "AdamW", {"experts": {"rest": "cpu"}, "mesh": {"tensor": 2}}, "leave mesh.expert, mesh.tensor"),
        (build_mixture, "AdamW", {"experts": {"rest": "cpu"}, "mesh": {"expert": 2}}, "leave mesh.expert, mesh.tensor"),
    ],
)
def test_what_cannot_rest_is_refused(model: Any, optimizer: str, sections: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_engine(model(), configuration(optimizer_of(optimizer, lr=1e-3), train_batch_size=2, **sections))


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zeromesh.shard.tables import stacked_rows

    usage = stacked_rows.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(stacked_rows.shutil, "disk_usage", lambda folder: usage._replace(free=20_000))
    # 2 blocks x 16 experts x (2 x 4 x 6 + 6 x 4) numbers x 8 bytes x (weight and two moments)
    with pytest.raises(ValueError, match="20,000 bytes free, and the experts of this rank need 55,296 for weights"):
        engine_of(Case(rest="nvme"), str(tmp_path))


@pytest.mark.parametrize(("rest", "narrow"), [("cpu", False), ("nvme", False), ("nvme", True)])
def test_planned_bytes_are_those_that_are_there(rest: str, narrow: bool, tmp_path: Path) -> None:
    engine = engine_of(Case(rest=rest, dtype=torch.float32, narrow=narrow), str(tmp_path))
    advance(engine, Case(), range(2))
    report, layout = engine.memory_report(), sizes.StateLayout(row=engine.sharded.row, widths=sizes.Widths(4, 4, 4, 0))
    planned = planned_states(engine.sharded, layout, sizes.TableLayout())
    tier = "host" if rest == "cpu" else rest
    numbers = sum(p.numel() for name, p in engine.module.named_parameters() if ".experts." in name)
    steps = 0 if rest == "nvme" else sum(table.flat.master.new_zeros(1).nbytes for table in engine.sharded.tables)
    assert planned["parameter", tier] == report["parameter"][tier] == 4 * numbers
    states = 4 if narrow else 8
    assert planned["optimizer", tier] == report["optimizer"][tier] - steps == states * numbers
    if rest == "nvme":
        assert planned["slot", "host"] == report["slot"]["host"] == (4 + states) * numbers * 3 / EXPERTS
    engine.destroy()
