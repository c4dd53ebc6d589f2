"""Where time and operations go: spans, breakdowns, traces, counts; and that looking changes nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks
from models import Block
from run import adamw, configuration, train_step
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.architectures.flops import multiplied_parameters, training_cost, training_operations
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.files import free_path
from zeromesh.base.operation_counts import Operations
from zeromesh.base.spans import NOTHING, Clock, Spans, span
from zeromesh.engine.observe.breakdown import MOST_PHASES, Timer
from zeromesh.engine.observe.profiler_trace import span_table

RANKS = 2
WIDTH, BLOCKS, ROWS = 16, 3, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def config(row: int, **more: Any) -> dict[str, Any]:
    return (
        configuration(micro=ROWS, accumulation=2, clipping=0.1, stage=row, optimizer=adamw(0.01), units=["Block"])
        | more
    )


def trained(row: int, updates: int, more: dict[str, Any], model: type[nn.Module] = Model) -> Any:
    torch.manual_seed(0)
    engine = zeromesh.initialize(model=model(), config=config(row, **more))[0]
    for update in range(updates):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * update + 10 * micro + engine.mesh.rank)
            train_step(engine, engine(torch.randn(ROWS, WIDTH, generator=generator)))
    return engine


def logged(action: Any) -> list[str]:
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, listener = logging.getLogger("zeromesh"), Listener()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    try:
        action()
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
    return found


class Ticks:
    def __init__(self) -> None:
        self.now = 0

    def clock(self) -> Clock:
        return Clock(self.mark, lambda begin, end: float(end - begin), lambda mark: None)

    def mark(self) -> int:
        self.now += 1
        return self.now


def ticking() -> Spans:
    spans = Spans(torch.device("cpu"))
    spans.clock, spans.timed = Ticks().clock(), True
    return spans


def test_a_breakdown_has_phases_that_add_up_and_kinds_without_what_is_inside_of_them() -> None:
    spans = ticking()
    timer = Timer(spans)  # 1
    with spans.phase("forward"), span("fetch"), span("wait"):  # 2 3 4 to 5 6 7
        pass
    with spans.phase("step"):  # 8
        with span("fetch"):  # 9 to 10
            pass
        with spans.phase("forward"):  # 11 to 12: a part of the step
            pass
    found = timer.take(2)  # 13, 14
    assert found.total == (14 - 1) / 2
    assert found.phases == {"data": 0.5, "forward": 2.5, "step": 2.5, "other": 1.0}
    assert sum(found.phases.values()) == found.total
    assert found.inside == {"forward": {"fetch": 1.0, "wait": 0.5}, "step": {"fetch": 0.5, "forward": 0.5}}
    assert ["forward", "2500.00", "38.5%"] in [line.split() for line in found.text().splitlines()]


def test_a_breakdown_keeps_no_more_with_more_updates() -> None:
    def update(spans: Spans) -> None:
        for kind in ("forward", "backward", "step"):
            with spans.phase(kind), span("fetch"):
                pass

    spans, kept = ticking(), ticking()
    timer, every = Timer(spans), Timer(kept)
    for _ in range(300):
        update(spans)
        timer.after_update()
        assert len(spans.phases) <= 6
        update(kept)
    assert timer.take(300) == every.take(300)
    timer.begin()
    for _ in range(2 * MOST_PHASES):
        with spans.phase("evaluation"):
            pass
        timer.after_phases()
        assert len(spans.phases) <= MOST_PHASES
    assert timer.take(1).phases["evaluation"] == 2 * MOST_PHASES


@on_ranks(1)
def test_an_engine_keeps_the_phases_of_two_updates_at_most() -> None:
    engine = trained(0, 0, {"wall_clock_breakdown": True, "steps_per_print": 1000})
    found = []
    for _ in range(5):
        for _ in range(2):
            train_step(engine, engine(torch.randn(ROWS, WIDTH)))
        found.append(len(engine.observer.spans.phases))
    engine.destroy()
    assert max(found) <= 2 * 5, "two micro-batches of an update have five phases"


def test_spans_without_a_watcher_cost_nothing() -> None:
    spans = Spans(torch.device("cpu"))
    assert spans.phase("forward") is NOTHING
    assert span("fetch", "unit") is NOTHING
    with spans.phase("forward"), span("fetch"):
        assert not spans.in_phase
    assert spans.phases == []


def test_spans_go_to_the_engine_whose_phase_it_is_and_end_with_exceptions() -> None:
    outer, inner = ticking(), ticking()
    with outer.phase("forward"):
        with inner.phase("forward"), span("fetch"):
            pass
        with pytest.raises(KeyError), span("reduce"):
            raise KeyError
    assert span("fetch") is NOTHING
    assert [[part.kind for part in spans.phases[0].inside] for spans in (outer, inner)] == [["reduce"], ["fetch"]]
    assert outer.open.spans == inner.open.spans == []


def test_spans_of_another_thread_belong_to_the_phase() -> None:  # as in a backward on an accelerator
    import threading

    spans = ticking()

    def work() -> None:
        with span("fetch"), span("wait"):
            pass

    timer = Timer(spans)
    with spans.phase("backward"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    found = timer.take(1)
    assert found.phases["backward"] == 5.0
    assert found.inside["backward"] == {"fetch": 2.0, "wait": 1.0}


def broken_down(row: int, folder: str) -> Any:
    found: list[Any] = []
    original = Timer.take

    def take(self: Timer, updates: int) -> Any:
        found.append(original(self, updates))
        return found[-1]

    Timer.take = take  # type: ignore[method-assign]
    try:
        lines = logged(lambda: shown(row, folder))
    finally:
        Timer.take = original  # type: ignore[method-assign]
    return found, [line for line in lines if "ms each" in line]


def shown(row: int, folder: str) -> None:
    more = {"wall_clock_breakdown": True, "steps_per_print": 2, "csv_monitor": {"enabled": True, "output_path": folder}}
    engine = trained(row, 4, more)
    with torch.no_grad():
        engine(torch.zeros(ROWS, WIDTH))
    engine.save_checkpoint(folder)
    engine.destroy()


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 3])
def test_the_log_says_every_few_updates_where_the_time_went(row: int, tmp_path: Path) -> None:
    (found, lines), (others, silent) = run_ranks(broken_down, RANKS, row, str(tmp_path))
    assert not silent
    assert [line.splitlines()[0].split(",")[0] for line in lines] == ["update 2: 2 updates", "update 4: 2 updates"]
    assert len(found) == len(others) == 2
    for each in (*found, *others):
        assert list(each.phases) == ["data", "forward", "backward", "step", "other"]
        assert sum(each.phases.values()) == pytest.approx(each.total, rel=1e-9)
        assert min(each.phases.values()) >= 0
        for phase, kinds in each.inside.items():
            assert min(kinds.values(), default=0.0) >= 0
            assert sum(kinds.values()) <= each.phases[phase] * (1 + 1e-9)
        assert {"norm", "agree", "clip", "update", "publish", "take_changes"} <= each.inside["step"].keys()
        assert {"accumulate", "reduce", "wait_reduce"} <= each.inside["backward"].keys() | each.inside["step"].keys()
        assert ("fetch" in each.inside["forward"]) == (row == 3)
    job = tmp_path / "DeepSpeedJobName"
    for name in ("forward", "backward", "step"):
        rows = (job / f"Train_Samples_elapsed_time_ms_{name}.csv").read_text().splitlines()[1:]
        assert [float(line.split(",")[1]) for line in rows] == [1e3 * each.phases[name] for each in found]


@on_ranks(1)
def test_without_an_interval_there_is_a_breakdown_every_ten_updates() -> None:
    lines = logged(lambda: trained(0, 10, {"wall_clock_breakdown": True}).destroy())
    assert [line.splitlines()[0].split(",")[0] for line in lines if "ms each" in line] == ["update 10: 10 updates"]


class FakeEvent:  # of an accelerator: known only after it has been waited for
    now = 0.0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert (device.type, enable_timing) == ("cuda", True)
        self.milliseconds: float | None = None
        self.known = False

    def record(self) -> None:
        FakeEvent.now += 250.0
        self.milliseconds = FakeEvent.now

    def synchronize(self) -> None:
        self.known = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.milliseconds is not None
        assert other.milliseconds is not None
        return other.milliseconds - self.milliseconds


def test_on_an_accelerator_events_are_read_when_a_breakdown_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", FakeEvent)
    spans = Spans(torch.device("cuda"))
    spans.timed = True
    timer = Timer(spans)
    with spans.phase("forward"):
        pass
    assert not spans.phases[0].end.known
    assert timer.take(1).phases == {"data": 0.25, "forward": 0.25, "other": 0.25}


@on_ranks(1)
def test_evaluation_and_saving_are_phases_of_their_own(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = trained(0, 2, {"wall_clock_breakdown": True, "steps_per_print": 2})
    with torch.no_grad():
        engine(torch.zeros(ROWS, WIDTH))
    engine.save_checkpoint(folder)
    engine.destroy()
    kinds = [phase.kind for phase in engine.observer.spans.phases]
    assert kinds == ["evaluation", "checkpoint"]


EVERYWHERE = {
    "forward", "backward", "step", "accumulate", "reduce", "wait_reduce", "norm", "agree", "take_changes", "clip",
    "update", "publish", "reduce_scatter", "exchange", "monitor", "observe",
}  # fmt: skip
BY_ROW = {0: {"all_gather"}, 3: {"all_gather", "fetch", "wait_fetch", "evict"}}


def traced(row: int, folder: str) -> list[str]:
    window = {"enabled": True, "start_step": 2, "steps": 2, "output": folder, "memory": row == 3}
    return logged(lambda: trained(row, 4, {"profile": window}).destroy())


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 3])
def test_a_trace_names_every_span_on_every_rank(row: int, tmp_path: Path) -> None:
    told = run_ranks(traced, RANKS, row, str(tmp_path))
    for rank in range(RANKS):
        events = json.loads((tmp_path / f"rank_{rank}.json").read_text())["traceEvents"]
        names = [event["name"].removeprefix("zeromesh.") for event in events if event["name"].startswith("zeromesh.")]
        assert {name.split(" ")[0] for name in names} == EVERYWHERE | BY_ROW[row]
        assert names.count("step") == 2
        assert any(event["name"] == "[memory]" for event in events) == (row == 3)
        assert names.count("forward") == 4
        assert {name for name in names if name.startswith("reduce ")} == {
            "reduce blocks.1", "reduce blocks.2", "reduce (root)",
        }  # fmt: skip
        size = 4 * WIDTH * 4 * WIDTH // RANKS
        assert any(name.startswith("reduce_scatter data ") and int(name.split(" ")[2]) >= size for name in names)
        [table] = [line for line in told[rank] if line.startswith("recorded ")]
        assert all(f"  {kind} " in table for kind in EVERYWHERE)


class Event:
    def __init__(self, name: str, milliseconds: float, parent: Any = None) -> None:
        self.name = name
        self.cpu_time_total = 1e3 * milliseconds
        self.cpu_parent = parent
        self.device_type = torch._C._autograd.DeviceType.CPU


def test_the_table_of_spans_takes_off_what_is_inside_of_them() -> None:
    outer = Event("zeromesh.forward", 10)
    operator = Event("aten::mm", 8, outer)
    inside = [Event("zeromesh.fetch blocks.0", 3, operator), Event("zeromesh.fetch blocks.1", 1, outer)]
    lines = span_table([outer, operator, *inside], updates=2).splitlines()[1:]
    assert [line.split() for line in lines] == [["forward", "0.5", "3.00", "5.00"], ["fetch", "1.0", "2.00", "2.00"]]


def test_a_trace_that_exists_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.json"
    assert free_path(path) == path
    path.write_text("")
    (tmp_path / "rank_0_2.json").write_text("")
    assert free_path(path) == tmp_path / "rank_0_3.json"


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [lines] = run_ranks(traced, 1, 0, str(tmp_path / "file"))
    assert any("the trace of rank 0 was not written" in line and "exists" in line for line in lines)


@on_ranks(1)
def test_a_trace_does_not_end_the_users_own(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with torch.profiler.profile() as users:
        lines = traced(0, folder)
    (lines, recorded) = lines, sum(event.name == "aten::tanh" for event in users.events())
    assert any("rank 0 records no trace: another profiler is running" in line for line in lines)
    assert not list(tmp_path.iterdir())
    assert recorded == 4 * 2 * BLOCKS


def test_operations_of_a_linear_layer_by_hand() -> None:
    """Forward 2 n i o, the weight's gradient as much, the input's as much where it is wanted; a bias costs nothing."""
    layer = nn.Sequential(nn.Linear(5, 7))
    x = torch.randn(3, 5)
    with Operations(layer) as plain:
        layer(x).sum().backward()
    assert (plain.forward, plain.backward, plain.recomputed) == (2 * 3 * 5 * 7, 2 * 3 * 5 * 7, 0)
    assert plain.modules == {"": 210, "0": 210}
    layer.requires_grad_(False)
    with Operations(layer) as frozen:
        layer(x.requires_grad_()).sum().backward()
    assert (frozen.forward, frozen.backward) == (210, 210)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_of_attention_by_hand(device: str) -> None:
    """Scores and sums are 2 s s d each, for every head; backwards twice that, whatever the kernel does."""
    rows, heads, length, width = 2, 3, 8, 4
    x = torch.randn(rows, heads, length, width, device=device, requires_grad=True)
    model = Attention()
    with Operations(model) as counted:
        model(x).sum().backward()
    forward = rows * heads * 4 * length * length * width
    assert (counted.forward, counted.backward) == (forward, 2 * forward)


GROUPED = {
    "rows of one matrix": ((16, 8), (3, 8, 32)),
    "columns of another": ((3, 16, 8), (8, 32)),
    "rows and columns": ((8, 16), (16, 32)),
    "a product for each": ((3, 16, 8), (3, 8, 32)),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_operations_of_the_products_of_experts_by_hand(kind: str) -> None:
    first, second = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in GROUPED[kind])
    ends = None if kind == "a product for each" else torch.empty(3, dtype=torch.int32, device="meta")
    with Operations(nn.Module()) as counted:
        torch._grouped_mm(first, second, offs=ends)
    assert counted.forward == 2 * 16 * 8 * 32 * (3 if ends is None else 1)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_operations_of_a_model_of_transformers_are_the_same_without_its_values(name: str) -> None:
    pytest.importorskip("transformers")
    from huggingface_models import MODELS

    model, batch = MODELS[name].build(), MODELS[name].batch(torch.Generator().manual_seed(0))
    with Operations(model) as counted:
        model(**batch).loss.backward()
    cost = training_cost(model, batch, batch["input_ids"].numel())
    assert cost == (counted.forward + counted.backward) / batch["input_ids"].numel()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_recomputed_operations_count_apart(checkpointed: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    block = Block(WIDTH)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with Operations(block) as counted:
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        y.sum().backward()
    forward = 2 * ROWS * WIDTH * 2 * WIDTH * 2
    assert (counted.forward, counted.backward) == (forward, 2 * forward)
    # The last product's output is not looked at again, and is not computed again.
    assert counted.recomputed in ((forward // 2, forward) if checkpointed else (0,))


@pytest.mark.some(1)
@pytest.mark.parametrize(("architecture", "heads"), [("llama", 4), ("llama", 2), ("gpt", 4)])
def test_counted_operations_of_a_decoder_are_the_formulas(architecture: str, heads: int) -> None:
    """6 P + 12 L h s per token, P without norms and biases, which are no products."""
    length, hidden, layers = 32, 64, 3
    grouped = {"kv_heads": heads} if architecture == "llama" else {}
    shape = ModelShape(
        architecture=architecture, vocab_size=128, hidden_size=hidden, layers=layers, heads=4, sequence_length=length,
        **grouped,
    )  # fmt: skip
    model = Decoder(shape)
    tokens = torch.zeros(2, length, dtype=torch.long)
    cost = training_cost(model, {"tokens": tokens, "labels": tokens}, tokens.numel())
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert cost == 6 * (multiplied_parameters(shape) - vectors) + 12 * layers * hidden * length
    assert not any(p.is_meta for p in model.parameters())
    model.blocks.requires_grad_(False)
    model.embedding.requires_grad_(False)
    counted = training_operations(model, {"tokens": tokens, "labels": tokens})
    head = 2 * tokens.numel() * hidden * 128
    scores = 4 * tokens.numel() * layers * hidden * length
    # The final norm is trained; of gpt the positions, too, so that gradients go through everything.
    assert counted.backward == (2 * head if architecture == "llama" else counted.forward + scores)


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3, bias=False)
        self.second = nn.Linear(3, 1, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if x.sum() > 0 else self.first(x)


def test_a_model_that_looks_at_values_costs_what_its_parameters_say() -> None:
    assert training_cost(Choosy(), {"x": torch.ones(4, 2)}, 4) == 6 * 6 + 4 * 3


def final_state(row: int, more: dict[str, Any]) -> Any:
    found: dict[str, torch.Tensor] = {}

    def run() -> None:
        engine = trained(row, 4, more)
        found.update(engine.gathered_state_dict())
        engine.destroy()

    lines = logged(run)
    return found, [line for line in lines if line.startswith("operations of")]


def looked_at(row: int, more: dict[str, Any], looking: dict[str, Any]) -> Any:
    plain, watched = final_state(row, more), final_state(row, more | looking)
    assert all(torch.equal(value, watched[0][name]) for name, value in plain[0].items())
    return len(plain[0]), plain[1], watched[1]


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("again", [False, True])
def test_looking_changes_no_bit_and_the_report_says_what_was_done(row: int, again: bool, tmp_path: Path) -> None:
    more = {"bf16": {"enabled": True}, "activation_checkpointing": {"enabled": again}}
    looking = {
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": 2},
        "wall_clock_breakdown": True,
        "steps_per_print": 1,
        "profile": {"enabled": True, "start_step": 2, "steps": 2, "output": str(tmp_path)},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path)},
    }
    (compared, before, [report]), (_, _, silent) = run_ranks(looked_at, RANKS, row, more, looking)
    assert compared == len(list(Model().parameters()))
    assert not before
    assert not silent
    lines = {line.split()[0]: line.split()[1:] for line in report.splitlines()}
    assert report.startswith("operations of update 2 on one rank, per micro-batch, of which there were 2")
    product = 2 * ROWS * WIDTH * 2 * WIDTH
    forward, head = 2 * BLOCKS * product, 2 * ROWS * WIDTH
    # Nothing goes back through the frozen block, and into the input of the first trained product.
    backward = 2 * (BLOCKS - 1) * 2 * product - product + 2 * head
    assert lines["forward"][:2] == [f"{(forward + head) / 1e3:.1f}", "kFLOP,"]
    assert lines["backward"][:2] == [f"{backward / 1e3:.1f}", "kFLOP,"]
    assert (lines["done"][1] != "0") == again
    assert {"achieved", "peak", "MFU", "HFU"} <= lines.keys()
    assert "    blocks.1 (Block)" in report
    assert "blocks.1.up" not in report
    assert "    blocks (ModuleList)" in report
    assert report.count("depth 2: ") == 1


def test_the_report_goes_to_a_file_and_an_older_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.txt"
    chosen = {"enabled": True, "output_file": str(path), "detailed": False}
    for _ in range(2):
        run_ranks(final_state, 1, 0, {"flops_profiler": chosen})
    first, second = path.read_text(), path.with_stem("report_2").read_text()
    assert first.startswith("operations of update 2")
    assert second.startswith("operations of update 2")
    assert "all modules" not in first
