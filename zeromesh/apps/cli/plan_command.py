"""``zeromesh plan``: which layout of a model fits a machine, how fast it is, and why."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console

from zeromesh.apps.cli import plan_questions as questions
from zeromesh.apps.cli.plan_model import SCRIPT, Adapters, AskedModel, asked_model
from zeromesh.apps.plan.choose.answer import PlanAnswer, answer, layout_text, reason_of, sentences
from zeromesh.apps.plan.choose.certainty import memory_word, mfu_text, seconds_text
from zeromesh.apps.plan.choose.fit import host_bytes
from zeromesh.apps.plan.choose.judge import judge
from zeromesh.apps.plan.choose.layout_documents import document_for, launch_command, layout_from, precision_for
from zeromesh.apps.plan.choose.plan_picture import PAGE_ENDS, write_picture
from zeromesh.apps.plan.choose.search import PlanCandidate, PlanResult, search
from zeromesh.apps.plan.choose.space import PlanRequest
from zeromesh.apps.plan.cost.passes import WHOLE_SEQUENCES
from zeromesh.apps.plan.cost.resting import RestingCost
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.here import machine_here, tiles_of
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.lower_bounds import least_memory, slowest
from zeromesh.apps.plan.saved import planned_cost
from zeromesh.apps.train.screen import write
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.drawing import require_picture
from zeromesh.base.machine import MACHINE, devices
from zeromesh.base.progress import SearchBar
from zeromesh.base.words import bytes_text, counted, scaled_text
from zeromesh.engine.initialize.widths import PRECISIONS, precision_of

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
    out: Path | None = None  # folder, or file
    explain: Path | None = None
    as_json: bool = False
    adapters: Adapters | None = None
    tokens: float = 0.0  # of the whole training; 0: not asked
    fewest: str = ""  # GPU of which the fewest are asked for, too


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
    """Return the machine of a file, of names, or this one if there are none; raise ValueError for both."""
    if file is not None:
        if gpu or node or inside or between or gpus is not None or host_memory is not None:
            raise ValueError(
                f"--machine {file} describes devices, nodes and links; leave out the options that name them"
            )
        return _priced(_with_nodes(Machine.load(file), nodes, str(file)), price)
    if gpu or node:
        return cluster(gpu, gpus, nodes, node, inside, between, host_memory and host_memory * 1e9, price)
    if inside or between or host_memory is not None:
        raise ValueError(
            "--inside, --between and --host-memory change a machine that is named; name its GPU with --gpu, such as "
            "h100, or a node with --node"
        )
    if path := os.environ.get(MACHINE):
        return _priced(_with_nodes(Machine.load(path), nodes, path), price)
    count = len(devices())
    if gpus is not None and gpus > max(1, count):
        raise ValueError(
            f"--gpus {gpus}: this machine has {counted(count, 'GPU') if count else 'no GPU'}; name the GPU that you "
            "mean with --gpu, such as rtx-4090"
        )
    return _priced(machine_here(gpus or max(1, count), nodes), price)


def _with_nodes(machine: Machine, nodes: int, source: str) -> Machine:
    if nodes == 1:
        return machine
    if len(machine.nodes) > 1:
        raise ValueError(f"{source} has several kinds of nodes with their numbers; leave out --nodes")
    return replace(machine, nodes=((machine.nodes[0][0], nodes),))


def _priced(machine: Machine, price: float) -> Machine:
    """Return a machine whose nodes cost ``price`` an hour; 0 leaves what its file says."""
    if not price:
        return machine
    return replace(machine, nodes=tuple((replace(node, price=price), count) for node, count in machine.nodes))


def plan(question: PlanQuestion, machine: Machine) -> bool:
    """Print the plan, and write the files that are asked for; return whether anything fits."""
    if question.picture is not None and question.picture.suffix.lower() not in PAGE_ENDS:
        require_picture(question.picture)  # before the work
    if question.goal == "cost" and not questions.price_per_hour(machine):
        raise ValueError("--goal cost compares prices; give the price of a node per hour with --price")
    precision = precision_for(slowest(machine))
    if not question.model:
        return _largest(question, machine, precision)
    explained = None if question.explain is None else TrainSettings.load(question.explain)
    tiles = WHOLE_SEQUENCES if explained is None else tiles_of(explained)
    traced = precision if explained is None else precision_of(explained)
    asked = asked_model(question.model, traced, question.adapters, tiles)
    if explained is not None:
        return _explain(question, explained, asked, machine)
    request, assumed = _request(question, asked, machine, precision)
    with SearchBar(Console(stderr=True), f"tracing {request.source.name}") as bar:
        result = search(request, progress=partial(bar.told, "computing layouts"))
        told = answer(result)
    document = None
    if result.best is not None:
        document = asked.document(document_for(result.best.layout, precision), request.sequence)
    around = [*_around(question, asked, told, precision)]
    if question.as_json:
        write(json.dumps(_as_json(told, document, question, assumed, around), indent=1) + "\n")
    else:
        _show(told, question, asked, assumed)
        _paragraphs(around)
    if document is not None:
        _written(question, asked, told, document)
    if question.picture is not None:
        question.picture.parent.mkdir(parents=True, exist_ok=True)
        write_picture(told, question.picture)
        if not question.as_json:
            _paragraphs([f"The picture is {question.picture}."])
    return result.best is not None


def _written(question: PlanQuestion, asked: AskedModel, told: PlanAnswer, document: dict[str, Any]) -> None:
    """Write the configuration if a folder or a file is named for it, and say how a run starts."""
    result = told.result
    assert result.best is not None
    nodes = ceil(result.best.layout.ranks / result.request.machine.nodes[0][0].devices)
    out = question.out or Path()
    config = out if out.suffix == ".json" else out / CONFIG
    if question.out is not None:
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if question.as_json:
        return
    where = " on each node" if nodes > 1 else ""
    note = f" ({asked.program} is your script)" if asked.program == SCRIPT else ""
    written = f"The layout is in {config}."
    if question.out is None:
        written = f"Nothing was written. --out FOLDER writes this layout into {CONFIG}."
    _paragraphs([f"{written} Start it{where} with{note}:"])
    write(f"  {launch_command(result.best.layout, nodes, str(config), asked.program)}\n")


def _around(question: PlanQuestion, asked: AskedModel, told: PlanAnswer, precision: str) -> Iterator[str]:
    """Yield what else people ask: adapters, the fewest GPUs, hours and money."""
    request, best = told.result.request, told.result.best
    if (best is None or not questions.on_devices(best.layout)) and (
        text := questions.adapters_text(question.model, asked, request, precision)
    ):
        yield text
    if question.fewest:
        yield questions.fewest_text(request, question.fewest)
    if question.tokens and best is not None:
        yield questions.budget_text(best, question.tokens, _noun(asked))


def _largest(question: PlanQuestion, machine: Machine, precision: str) -> bool:
    """Print which models fit a machine."""
    batch, sequence = question.batch or questions.SAMPLES * machine.devices, question.sequence or questions.MOST_TOKENS
    _paragraphs(_machine_lines(machine))
    _paragraphs(
        [
            f"Largest models that fit, with batches of {counted(batch, 'sample')} of {counted(sequence, 'token')} "
            "(--batch, --sequence). Name one as MODEL for its plan; zeromesh plan --list shows all."
        ]
    )
    write("\n")
    lines = [*questions.largest_models(machine, precision, batch, sequence)]
    write("\n".join(lines) + "\n")
    return any(not line.endswith("none") for line in lines)


def _noun(asked: AskedModel) -> str:
    return "image" if asked.images else "token"


def _request(
    question: PlanQuestion, asked: AskedModel, machine: Machine, precision: str
) -> tuple[PlanRequest, list[str]]:
    """Return the request, and what it assumes."""
    assumed = []
    batch, sequence = question.batch or asked.batch, question.sequence or asked.sequence
    if asked.images:
        if question.sequence is not None:
            raise ValueError(f"{question.model} takes images, which have no tokens; leave out --sequence")
        sequence = 1
    if sequence is None:
        sequence = min(asked.limits.positions or questions.MOST_TOKENS, questions.MOST_TOKENS)
        assumed.append(f"sequences of {counted(sequence, 'token')} (--sequence)")
    if batch is None:
        each = questions.IMAGES if asked.images else questions.SAMPLES
        batch = each * machine.devices
        assumed.append(f"batches of {counted(batch, 'sample')}, {each} for each device (--batch)")
    widths = PRECISIONS[precision]
    limits, goal, tables = asked.limits, question.goal, asked.tables
    processor = slowest(machine).processor  # its memory is the host's: states have nowhere else to rest
    accepts = questions.all_hold(
        None if asked.chain else lambda layout: layout.pipeline == 1, questions.on_devices if processor else None
    )
    source = asked.source if asked.resting is None else RestingCost(asked.source, widths.parameter)
    request = PlanRequest(source, machine, batch, sequence, limits, goal, widths, accepts=accepts, tables=tables)
    return replace(request, resting=asked.resting), assumed


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


def _show(told: PlanAnswer, question: PlanQuestion, asked: AskedModel, assumed: list[str]) -> None:
    result = told.result
    _header(result, asked, assumed)
    limit = least_memory(result.request.machine)
    if result.best is not None:
        device = f"device, of {bytes_text(limit)}"
        titles = "".join(f" {title:>10}" for title in _budget(result.best, question.tokens))
        write(f"{'':<3}{'step':>8} {f'{_noun(asked)}s/s':>9} {'MFU':>10}{titles}  {device:<{BAR + 15}} host, of node\n")
    for number, candidate in enumerate(result.shown[: question.layouts], 1):
        _line(number, candidate, question.tokens)
    write("\n")
    _paragraphs(sentences(told))


def _machine_lines(machine: Machine) -> Iterator[str]:
    """Yield what was assumed of a machine that was named, or that this one is planned for."""
    node = machine.nodes[0][0]
    disk = f"{bytes_text(node.disk)} of NVMe" if node.disk else "no NVMe"
    host = f"{bytes_text(node.host_memory)} of host memory and {disk}"
    if machine.notes:
        yield (
            f"Assumed: nodes of the kind {node.name} with {host} for {counted(node.devices, 'GPU')}, which exchange "
            f"{bytes_text(node.inside.bandwidth)}/s; change with --host-memory, --node, --inside and --between."
        )
        yield from (f"note: {note}" for note in machine.notes if "taken as" in note)
    elif node.device.processor:
        yield (
            f"This machine has no GPU: planned for its processor, {node.cores} cores with {host}. Plan for a GPU with "
            "--gpu, such as --gpu rtx-4090."
        )
    elif machine.name == "this machine":
        yield f"This machine: {counted(node.devices, 'device')} of {bytes_text(node.device.memory)}, {host}."


def _header(result: PlanResult, asked: AskedModel, assumed: list[str]) -> None:
    request, machine = result.request, result.request.machine
    cost = request.source.at(1, request.sequence, 1)
    samples = counted(request.batch, "image" if asked.images else "sample")
    tokens = "" if asked.images else f" of {counted(request.sequence, 'token')}"
    adapters = f" with {asked.adapters.name}" if asked.adapters is not None else ""
    _paragraphs(
        [
            f"{request.source.name}{adapters}: {scaled_text(cost.parameters)} parameters, batches of {samples}"
            f"{tokens}, on {machine.name or 'the machine'}",
            *_machine_lines(machine),
            *([f"Assumed: {', '.join(assumed)}."] if assumed else []),
            f"{counted(result.considered, 'layout')}; states that do not fit: {result.too_large}; memory computed: "
            f"{result.weighed}; time computed: {result.computed}",
        ]
    )
    write("\n")


def _budget(candidate: PlanCandidate, tokens: float) -> dict[str, str]:
    """Return hours and money of a whole training; without its tokens, the money of a million of them."""
    price = questions.price_per_hour(candidate.machine)
    if not tokens:
        return {"per M": questions.amount_text(candidate.price)} if price else {}
    hours = questions.hours_of(candidate, tokens)
    return {"hours": questions.amount_text(hours)} | ({"cost": questions.amount_text(hours * price)} if price else {})


def _line(number: int, candidate: PlanCandidate, tokens: float = 0.0) -> None:
    layout, machine = candidate.layout, candidate.machine
    limit, used = least_memory(machine), candidate.fullest.device
    node = machine.nodes[0][0]
    host = host_bytes(candidate.memory, layout, node, "host")
    disk = host_bytes(candidate.memory, layout, node, "nvme")
    speed = scaled_text(candidate.tokens_per_second).replace(" ", "")
    budget = "".join(f" {amount:>10}" for amount in _budget(candidate, tokens).values())
    hosts = f" {bar(host / node.host_memory, 5)} {bytes_text(host)}" if host else " -"
    disks = f" disk {bytes_text(disk)}" if disk else ""
    write(
        f"{number:<3}{seconds_text(candidate.time.seconds):>8} {speed:>9} {mfu_text(candidate):>10}{budget}  "
        f"{bar(used / limit)} {bytes_text(used):>8} {memory_word(candidate):<5}{hosts}{disks}\n"
    )
    runs = f"{layout.accumulation} x {counted(layout.micro_batch, 'sample')}"
    text = f"{layout_text(layout)}; {runs}; {reason_of(candidate)}"
    write(textwrap.fill(text, _width(), initial_indent="   ", subsequent_indent="   ", break_on_hyphens=False) + "\n")


# As JSON.


def _as_json(
    told: PlanAnswer, document: dict[str, Any] | None, question: PlanQuestion, assumed: list[str], around: list[str]
) -> dict[str, Any]:
    result = told.result
    best, price = result.best, questions.price_per_hour(result.request.machine)
    hours = questions.hours_of(best, question.tokens) if best is not None and question.tokens else None
    return {
        "model": result.request.source.name,
        "machine": result.request.machine.as_dict(),
        "layouts": [_candidate_json(candidate) for candidate in result.shown],
        "considered": result.considered,
        "computed": result.computed,
        "proven": result.proven,
        "assumed": [*assumed, *_machine_lines(result.request.machine)],
        "answer": [*sentences(told), *around],
        "hours": hours,
        "cost": hours * price if hours is not None and price else None,
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


def _explain(question: PlanQuestion, settings: TrainSettings, asked: AskedModel, machine: Machine) -> bool:
    layout, precision = layout_from(settings, machine.devices)
    batch, sequence = layout.samples, question.sequence or asked.sequence
    if question.batch is not None and question.batch != batch:
        raise ValueError(
            f"{question.explain} has batches of {counted(batch, 'sample')}, and --batch is {question.batch}; leave it "
            "out"
        )
    asked = replace(asked, resting=layout.resting)
    request, _ = _request(replace(question, batch=batch, sequence=sequence), asked, machine, precision)
    with SearchBar(Console(stderr=True), f"tracing {request.source.name}"):
        planned, choices = None, list[str]()
        if settings.activation_checkpointing.planned:
            planned = planned_cost(settings, request.source, request.sequence, layout, machine)
            choices = planned.lines()
        judgement = judge(request, layout, planned)
    if question.as_json:
        better = [{"layout": layout_text(b.layout), "seconds": b.time.seconds} for b in judgement.better]
        told = {"fits": judgement.fits, "lacks": judgement.over, "states": judgement.states, "better": better}
        told |= _candidate_json(judgement.candidate) | ({"saved": choices} if choices else {})
        write(json.dumps(told | {"answer": judgement.sentences}, indent=1) + "\n")
        return judgement.fits
    _paragraphs([f"{question.explain} on {machine.name or 'the machine'}: {layout_text(layout)}"])
    write("\n")
    limit = least_memory(machine)
    used = judgement.candidate.fullest.device
    write(f"device {bar(used / limit)} {bytes_text(used)} of {bytes_text(limit)}\n")
    for tier, states in judgement.states.items():
        for state, size in sorted(states.items(), key=lambda pair: -pair[1]):
            write(f"  {tier:<7}{state:<12}{bytes_text(size):>9}\n")
    write("".join(f"{line}\n" for line in choices) + "\n")
    _paragraphs(judgement.sentences)
    for number, candidate in enumerate(judgement.better[: question.layouts], 1):
        _line(number, candidate)
    return judgement.fits
