"""``zeromesh plan``: which layout of a model fits a machine, how fast it is, and why."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console

from zeromesh.apps.cli.plan_model import SCRIPT, AskedModel, asked_model
from zeromesh.apps.plan.choose.answer import PlanAnswer, answer, layout_text, reason_of, sentences
from zeromesh.apps.plan.choose.certainty import memory_word, mfu_text, seconds_text
from zeromesh.apps.plan.choose.fit import host_bytes
from zeromesh.apps.plan.choose.judge import judge
from zeromesh.apps.plan.choose.layout_documents import document_for, launch_command, layout_from, precision_for
from zeromesh.apps.plan.choose.plan_picture import write_picture
from zeromesh.apps.plan.choose.search import PlanCandidate, PlanResult, search
from zeromesh.apps.plan.choose.space import PlanRequest
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.lower_bounds import least_memory, slowest
from zeromesh.apps.train.screen import write
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.drawing import require_matplotlib
from zeromesh.base.progress import SearchBar
from zeromesh.base.words import bytes_text, counted, scaled_text
from zeromesh.engine.initialize.widths import PRECISIONS

WIDEST = 120  # characters of a line
BAR = 16
CONFIG = "config.json"


@dataclass(frozen=True)
class PlanQuestion:
    """Options of the command."""

    model: str
    batch: int | None
    sequence: int | None
    goal: str = "time"
    layouts: int = 8
    picture: Path | None = None
    out: Path = Path("plan")
    explain: Path | None = None
    as_json: bool = False


def machine_of(
    file: Path | None,
    gpu: str,
    gpus: int | None,
    nodes: int,
    node: str,
    inside: str,
    between: str,
    host_memory: float | None,
    price: float,
) -> Machine:
    """Return the machine of a file, or of names; raise ValueError for both or neither."""
    if file is None:
        if not gpu and not node:
            raise ValueError("name the GPU with --gpu, such as h100, a node with --node, or a file with --machine")
        return cluster(gpu, gpus, nodes, node, inside, between, host_memory and host_memory * 1e9, price)
    if gpu or node or inside or between or gpus is not None or host_memory is not None:
        raise ValueError(f"--machine {file} describes devices, nodes and links; leave out the options that name them")
    machine = Machine.load(file)
    if nodes > 1:
        if len(machine.nodes) > 1:
            raise ValueError(f"{file} has several kinds of nodes with their numbers; leave out --nodes")
        machine = replace(machine, nodes=((machine.nodes[0][0], nodes),))
    return machine


def plan(question: PlanQuestion, machine: Machine) -> bool:
    """Print the plan, and write its files; return whether anything fits."""
    if question.picture is not None:
        require_matplotlib()  # before the work
    precision = precision_for(slowest(machine))
    asked = asked_model(question.model, precision)
    if question.explain is not None:
        return _explain(question, asked, machine)
    request = _request(question, asked, machine, precision)
    with SearchBar(Console(stderr=True), f"tracing {request.source.name}") as bar:
        result = search(request, progress=partial(bar.told, "computing layouts"))
        told = answer(result)
    document = None
    if result.best is not None:
        document = asked.document(document_for(result.best.layout, precision), request.sequence)
    if question.as_json:
        write(json.dumps(_as_json(told, document), indent=1) + "\n")
    else:
        _show(told, question.layouts)
    if result.best is not None:
        nodes = ceil(result.best.layout.ranks / machine.nodes[0][0].devices)
        config = question.out / CONFIG
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        command = launch_command(result.best.layout, nodes, str(config), asked.program)
        if not question.as_json:
            where = " on each node" if nodes > 1 else ""
            note = f" ({asked.program} is your script)" if asked.program == SCRIPT else ""
            _paragraphs([f"The layout is in {config}. Start it{where} with{note}:"])
            write(f"  {command}\n")
    if question.picture is not None:
        write_picture(told, question.picture)
        if not question.as_json:
            _paragraphs([f"The picture is {question.picture}."])
    return result.best is not None


def _request(question: PlanQuestion, asked: AskedModel, machine: Machine, precision: str) -> PlanRequest:
    batch, sequence = question.batch or asked.batch, question.sequence or asked.sequence
    if batch is None:
        raise ValueError(f"{question.model!r} does not say the batch; give --batch (samples of an update)")
    if sequence is None:
        raise ValueError(f"{question.model!r} does not say the sequence; give --sequence (tokens of a sample)")
    widths = PRECISIONS[precision]
    limits, goal, tables = asked.limits, question.goal, asked.tables
    return PlanRequest(asked.source, machine, batch, sequence, limits, goal, widths, tables=tables)


# The screen.


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)


def _paragraphs(texts: Iterable[str]) -> None:
    for text in texts:
        indent = "   " if text[1:3] == ". " else ""  # of a list
        write(textwrap.fill(text, _width(), subsequent_indent=indent, break_on_hyphens=False) + "\n")


def bar(share: float, width: int = BAR) -> str:
    """Return a bar of text; one that is longer than the whole ends in ``>``."""
    fancy = "utf" in (getattr(sys.stdout, "encoding", "") or "utf-8").lower()
    full, empty = ("█", "░") if fancy else ("#", "-")
    cells = min(width, max(0, round(share * width)))
    return full * (width - 1) + ">" if share > 1 else full * cells + empty * (width - cells)


def _show(told: PlanAnswer, most: int) -> None:
    result = told.result
    _header(result)
    limit = least_memory(result.request.machine)
    if result.best is not None:
        device = f"device, of {bytes_text(limit)}"
        write(f"{'':<3}{'step':>8} {'tokens/s':>9} {'MFU':>10}  {device:<{BAR + 15}} host, of node\n")
    for number, candidate in enumerate(result.shown[:most], 1):
        _line(number, candidate)
    write("\n")
    _paragraphs(sentences(told))


def _header(result: PlanResult) -> None:
    request, machine = result.request, result.request.machine
    cost = request.source.at(1, request.sequence, 1)
    _paragraphs(
        [
            f"{request.source.name}: {scaled_text(cost.parameters)} parameters, batches of "
            f"{counted(request.batch, 'sample')} of {counted(request.sequence, 'token')}, "
            f"on {machine.name or 'the machine'}",
            *(f"note: {note}" for note in machine.notes if "taken as" in note),
            f"{counted(result.considered, 'layout')}; states that do not fit: {result.too_large}; memory computed: "
            f"{result.weighed}; time computed: {result.computed}",
        ]
    )
    write("\n")


def _line(number: int, candidate: PlanCandidate) -> None:
    layout, machine = candidate.layout, candidate.machine
    limit, used = least_memory(machine), candidate.fullest.device
    node = machine.nodes[0][0]
    host = host_bytes(candidate.memory, layout, node, "host")
    disk = host_bytes(candidate.memory, layout, node, "nvme")
    speed = scaled_text(candidate.tokens_per_second).replace(" ", "")
    hosts = f" {bar(host / node.host_memory, 5)} {bytes_text(host)}" if host else " -"
    disks = f" disk {bytes_text(disk)}" if disk else ""
    write(
        f"{number:<3}{seconds_text(candidate.time.seconds):>8} {speed:>9} {mfu_text(candidate):>10}  "
        f"{bar(used / limit)} {bytes_text(used):>8} {memory_word(candidate):<5}{hosts}{disks}\n"
    )
    runs = f"{layout.accumulation} x {counted(layout.micro_batch, 'sample')}"
    text = f"{layout_text(layout)}; {runs}; {reason_of(candidate)}"
    write(textwrap.fill(text, _width(), initial_indent="   ", subsequent_indent="   ", break_on_hyphens=False) + "\n")


# As JSON.


def _as_json(told: PlanAnswer, document: dict[str, Any] | None) -> dict[str, Any]:
    result = told.result
    return {
        "model": result.request.source.name,
        "machine": result.request.machine.as_dict(),
        "layouts": [_candidate_json(candidate) for candidate in result.shown],
        "considered": result.considered,
        "computed": result.computed,
        "proven": result.proven,
        "answer": sentences(told),
        "remedies": [remedy._asdict() for remedy in told.remedies],
        "largest": told.largest._asdict() if told.largest is not None else None,
        "configuration": document,
    }


def _candidate_json(candidate: PlanCandidate) -> dict[str, Any]:
    node = candidate.machine.nodes[0][0]
    return {
        "layout": layout_text(candidate.layout),
        "seconds": candidate.time.seconds,
        "seconds_interval": candidate.time.interval,
        "waits": dict(candidate.time.waits),
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "mfu_interval": candidate.mfu_interval,
        "upper_bound": candidate.time.calibration.is_bound,
        "measured_steps": candidate.time.calibration.rows,
        "tight": candidate.tight,
        "price_per_million_tokens": candidate.price,
        "device_bytes": [rank.device for rank in candidate.memory],
        "device_peak": candidate.fullest.peak.label,
        "device_peak_bytes": dict(candidate.fullest.peak.bytes),
        "host_bytes_of_node": host_bytes(candidate.memory, candidate.layout, node, "host"),
        "nvme_bytes_of_node": host_bytes(candidate.memory, candidate.layout, node, "nvme"),
        "reason": reason_of(candidate),
    }


# A layout that the user has.


def _explain(question: PlanQuestion, asked: AskedModel, machine: Machine) -> bool:
    assert question.explain is not None
    settings = TrainSettings.load(question.explain)
    layout, precision = layout_from(settings, machine.devices)
    batch, sequence = layout.samples, question.sequence or asked.sequence
    if question.batch is not None and question.batch != batch:
        raise ValueError(
            f"{question.explain} has batches of {counted(batch, 'sample')}, and --batch is {question.batch}; leave it "
            "out"
        )
    request = _request(replace(question, batch=batch, sequence=sequence), asked, machine, precision)
    with SearchBar(Console(stderr=True), f"tracing {request.source.name}"):
        judgement = judge(request, layout)
    if question.as_json:
        write(json.dumps(judgement.as_json(), indent=1) + "\n")
        return judgement.fits
    _paragraphs([f"{question.explain} on {machine.name or 'the machine'}: {layout_text(layout)}"])
    write("\n")
    limit = least_memory(machine)
    used = judgement.candidate.fullest.device
    write(f"device {bar(used / limit)} {bytes_text(used)} of {bytes_text(limit)}\n")
    for tier, states in judgement.states.items():
        for state, size in sorted(states.items(), key=lambda pair: -pair[1]):
            write(f"  {tier:<7}{state:<12}{bytes_text(size):>9}\n")
    write("\n")
    _paragraphs(judgement.sentences)
    for number, candidate in enumerate(judgement.better[: question.layouts], 1):
        _line(number, candidate)
    return judgement.fits
