import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zeromesh.apps.train.metrics import MetricsLog, read_metrics
from zeromesh.base import machine
from zeromesh.base.kernels import measure
from zeromesh.base.kernels.measure import product_speed
from zeromesh.base.machine import peak_flops
from zeromesh.base.progress import Display, Figures
from zeromesh.base.words import bytes_text, duration_text, scaled_text


def figures(step: int) -> Figures:
    return Figures(
        step=step,
        loss=3.21,
        learning_rate=1e-3,
        gradient_norm=0.5,
        tokens_per_second=12345.0,
        utilization=0.5,
        memory=2**30,
        seconds_left=83,
    )


def test_a_resumed_log_has_every_step_once_and_none_of_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write("train", step, loss=float(step))
    log.write("validation", 2, loss=0.5)
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # the line that a crash cut off
    resumed = MetricsLog(path, last_step=2)
    resumed.write("validation", 2, loss=0.5)
    resumed.write("train", 3, loss=30.0)
    resumed.close()
    found = [(record["kind"], record["step"], record["loss"]) for record in read_metrics(path)]
    assert found == [("train", 1, 1.0), ("train", 2, 2.0), ("validation", 2, 0.5), ("train", 3, 30.0)]


def test_records_are_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("train", 1, loss=0.1 + 0.2)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"kind": "train", "step": 1, "loss": 0.1 + 0.2}]


def test_without_a_terminal_there_are_plain_lines_for_the_first_and_the_last_step() -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=200), 50) as display:
        for step in range(1, 51):
            display.step(figures(step))
        display.line("a note")
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/50", "step 50/50", "a note"]
    for part in ("loss 3.210", "lr 1.00e-03", "norm 0.50", "12.3 ktok/s", "MFU 50%", "1.07 GB", "left 1:23"):
        assert part in lines[0]


def test_a_terminal_that_cannot_rewrite_a_line_gets_plain_ones() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, soft_wrap=True, _environ={"TERM": "dumb"})
    with Display(console, 50) as display:
        for step in range(1, 51):
            display.step(figures(step))
    assert [line.split("  ")[0] for line in output.getvalue().splitlines()] == ["step 1/50", "step 50/50"]


def test_on_a_terminal_one_line_is_rewritten() -> None:
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=True)
    with Display(console, 50) as display:
        for step in range(1, 51):
            display.step(figures(step))
    assert "step 50/50" in output.getvalue()
    assert output.getvalue().count("\n") < 5


def test_peak_operations_are_measured_where_no_table_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert 1e8 < product_speed(cpu, torch.float32, seconds=0.05) < 1e14
    assert peak_flops(cpu, torch.float32) > 1e8
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == 1513e12 / 2  # the data sheet's is with sparsity


def test_a_momentary_disturbance_does_not_spoil_the_measurement(monkeypatch) -> None:
    now = 0.0
    busy_until = 0.25

    class Clock:
        """A machine on which every reading of the clock is a product later; products take longer while it is busy."""

        def perf_counter(self) -> float:
            nonlocal now
            now += 0.1 if now < busy_until else 0.001
            return now

        def sleep(self, seconds: float) -> None:
            nonlocal now
            now += seconds

    monkeypatch.setattr(measure, "time", Clock())
    operations = 2.0 * (512 * math.isqrt(torch.get_num_threads())) ** 3
    assert product_speed(torch.device("cpu"), torch.float32, seconds=0.05) == pytest.approx(operations / 0.001)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1.00 k"), (12345, "12.3 k"), (999_600, "1.00 M"), (0.25, "0.25")],
)
def test_numbers_are_shown_with_three_digits(value: float, text: str) -> None:
    assert scaled_text(value) == text
    assert bytes_text(value) == text + ("B" if text[-1].isalpha() else " B")


def test_durations_are_shown_as_on_a_clock() -> None:
    assert [duration_text(seconds) for seconds in (0, 7.4, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"/proc/self/status": ["VmPeak:\t  900 kB", "VmHWM:\t  7 kB"]}  # as Linux writes it
    monkeypatch.setattr(machine, "read_lines", lambda file: status[file])
    assert machine.peak_bytes(torch.device("cpu")) == 7 * 1024
