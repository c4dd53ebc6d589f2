"""Training steps of ``gpu_steps.py``: the largest model that fits, seconds and memory of its updates, and a trace."""

from __future__ import annotations

import gc
import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import profile, record_function
from torch.utils.data import TensorDataset

import zeromesh
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.passes import TraceOptions
from zeromesh.apps.plan.machine.here import machine_here, tiles_of, with_host
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.apps.plan.predict.time import time_of
from zeromesh.apps.plan.saved import planned_cost
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.architectures.flops import parameters, training_flops_per_token
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.kernels.measure import synchronize
from zeromesh.base.kernels.native import library
from zeromesh.base.machine import memory, peak_bytes
from zeromesh.base.spans import PREFIX
from zeromesh.base.words import bytes_text
from zeromesh.config.settings import Settings
from zeromesh.engine.observe.breakdown import Timer

Options = Mapping[str, Any]
Figures = dict[str, Any]

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
SHARES = {"device": 0.95, "host": 0.92, "nvme": 0.9}  # of free memory; libraries and fragments take some, too
TILE = (1 << 18) + 3  # elements that are drawn of a weight; no width is a multiple of it
NORM_TOLERANCE = 1e-4  # relative; on the device the engine adds squares of 16-bit gradients in fp32
FEW_BLOCKS = (3, 6)  # whose memory tells that of more
SHOWN = 40  # kernels, and spans of the engine, that take most time
BINS = 240  # of the picture of a trace
BLOCKING = ("cudaMemcpy", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
KERNELS = {"cuda": ("kernel",), "cpu": ("cpu_op",)}  # categories of a trace; a CPU's operators stand for kernels


class LeftOut(Exception):
    """The step cannot run on this machine."""


def tell(job: Options, found: Figures) -> None:
    """Write the figures so far, for the case that the process is ended."""
    file = Path(job["out"]).with_suffix(".new")
    file.write_text(json.dumps(found))
    file.replace(job["out"])


class Quick(Decoder):
    """The decoder with weights that cost little: billions of random numbers take longer than what is measured."""

    def reset_parameters(self) -> None:
        """Draw the beginning of each weight, and repeat it."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
                continue
            flat = parameter.detach().view(-1)
            done = min(TILE, flat.numel())
            flat[:done].normal_(std=0.02)
            while done < flat.numel():
                more = min(done, flat.numel() - done)
                flat[done : done + more].copy_(flat[:more])
                done += more


def shape_of(options: Options, layers: int) -> ModelShape:
    """Return the shape of the model with so many blocks."""
    return ModelShape(architecture="llama", layers=layers, sequence_length=options["sequence"], **options["model"])


def configuration(options: Options, folder: str, ratio: float | None = None) -> dict[str, Any]:
    """Return the engine's configuration; ``ratio`` is the share of the optimizer's states off the device."""
    zero = {key: dict(value) if isinstance(value, dict) else value for key, value in options["zero"].items()}
    for place in (value for value in zero.values() if isinstance(value, dict)):
        place |= {"nvme_path": folder} if place["device"] == "nvme" else {}
    if ratio is not None:
        zero["offload_optimizer"]["ratio"] = ratio
    recompute = options.get("recompute", "full")
    again: dict[str, Any] = {"enabled": recompute != "none"}
    if recompute == "auto":
        again["budget_gb"] = options["budget_gb"]
    else:
        again["targets"] = ["Block"]
    return {
        "train_micro_batch_size_per_gpu": options["batch"],
        "gradient_accumulation_steps": options.get("accumulation", 1), "gradient_clipping": 1.0,
        "bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": options.get("optimizer", ADAMW),
        "activation_checkpointing": again | ({"granularity": recompute} if recompute != "none" else {})
        | ({"cpu_checkpointing": True} if options.get("inputs_on_host") else {}),
        **options.get("config", {}),
    }  # fmt: skip


def batch_of(options: Options, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of one micro-batch; the same in every run."""
    count, generator = options["model"]["vocab_size"], torch.Generator().manual_seed(1)
    tokens = torch.randint(count, (options["batch"], options["sequence"] + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# What fits.


def room(options: Options, job: Options) -> dict[str, float]:
    """Return bytes by tier that a model may take; the options' own come first, as in the rehearsal."""
    host = memory()
    known = [host[key] for key in ("available_bytes", "limit_bytes") if host[key] is not None]
    found = {"host": min(known, default=math.inf), "nvme": shutil.disk_usage(job["folder"]).free}
    if job.get("host_gib"):
        found["host"] = job["host_gib"] * 2**30
    found["device"] = torch.cuda.mem_get_info()[0] if job["device"] != "cpu" else found["host"]
    found = {tier: share * found[tier] * job["share"] for tier, share in SHARES.items()}
    return found | options.get("room", {})


class Planner:
    """Foresees memory and time of a model with any number of blocks."""

    def __init__(self, options: Options, job: Options) -> None:
        self._options, self._folder = options, job["folder"]
        self._kernels = "cpu" if job["device"] == "cpu" else "cuda"
        self._machine = None
        if self._kernels == "cuda":
            with suppress(ValueError):  # a GPU that the planner does not know: memory is foreseen all the same
                self._machine = with_host(cluster(gpu=torch.cuda.get_device_name(), gpus=1))
        self._costs: dict[int, TracedCost] = {}

    def foresee(self, layers: int, ratio: float | None, timed: bool = False) -> dict[str, float]:
        """Return bytes by tier and, if asked for and on a known GPU, seconds of an update."""
        settings = Settings.load(configuration(self._options, self._folder, ratio))
        layout, _ = layout_from(settings, 1)
        sequence = self._options["sequence"]
        if layers not in self._costs:
            with torch.device("meta"):
                model = Decoder(shape_of(self._options, layers))
                if self._options.get("adapters"):
                    add_adapters(model, self._options["adapters"])

            def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
                tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
                return {"tokens": tokens, "labels": tokens}

            precision, tiles = settings.precision, tiles_of(settings)
            traced = TraceOptions(precision.compute, precision.autocast, self._kernels, tiles=tiles)
            self._costs[layers] = TracedCost(model, inputs, traced, None)
        cost: CostSource = self._costs[layers]
        if settings.activation_checkpointing.planned:
            cost = planned_cost(settings, cost, sequence, layout, machine_here(1, 1))  # as the engine plans
        (rank,) = memory_of(cost, sequence, layout, self._machine)
        found = {"device": rank.device, "host": rank.on("host"), "nvme": rank.on("nvme")}
        if timed and self._machine is not None:
            found["seconds"] = float(time_of(cost, sequence, layout, self._machine).seconds)
        return found

    def largest(self, ratios: Sequence[float] | None, most: Mapping[str, float]) -> tuple[int, float | None]:
        """Return the most blocks that fit, 0 if not even one does, and the ratio with which they do."""
        # Memory grows by the same with each block and, but for the rounding to whole units, with the ratio.
        ends = (0.0, 1.0) if ratios else (None,)
        few, more = ([self.foresee(layers, ratio) for ratio in ends] for layers in FEW_BLOCKS)

        def between(sizes: list[dict[str, float]], tier: str, ratio: float | None) -> float:
            return sizes[0][tier] + (ratio or 0.0) * (sizes[-1][tier] - sizes[0][tier])

        def blocks(ratio: float | None) -> int:
            fits = []
            for tier, size in most.items():
                base = between(few, tier, ratio)
                each = (between(more, tier, ratio) - base) / (FEW_BLOCKS[1] - FEW_BLOCKS[0])
                fits += [int(FEW_BLOCKS[0] + (size - base) / each)] if each > 0 else []
            return min(fits)

        ratio = max(ratios or [None], key=blocks)
        layers = max(0, blocks(ratio))
        while layers > 0 and over(self.foresee(layers, ratio), most):
            layers -= 1
        return layers, ratio


def over(planned: Mapping[str, float], most: Mapping[str, float]) -> list[str]:
    """Return the tiers in which more is planned than there may be."""
    return [tier for tier, size in planned.items() if size > most.get(tier, math.inf)]


def choose(options: Options, job: Options) -> Figures:
    """Return the number of blocks, the ratio and what is foreseen.

    Raises:
        LeftOut: the model, or one block of it, does not fit into the memory at hand.
    """
    planner, most = Planner(options, job), room(options, job)
    layers, ratio = options.get("layers"), None
    if layers is None:
        layers, ratio = planner.largest(options.get("ratios"), most)
        if layers < 1:
            raise LeftOut(f"not one block fits into {told(most, most)}")
    planned = planner.foresee(layers, ratio, True)
    if tiers := over(planned, most):
        raise LeftOut(f"takes {told(planned, tiers)}, and this machine has room for {told(most, tiers)}")
    return {"layers": layers, "ratio": ratio, "planned": planned, "room": most}


def told(sizes: Mapping[str, float], tiers: Iterable[str]) -> str:
    """Return bytes by tier in words."""
    return ", ".join(f"{bytes_text(int(sizes[tier]))} ({tier})" for tier in tiers)


# Training.


def engine_of(options: Options, folder: str, layers: int, ratio: float | None) -> Any:
    """Return an engine whose model was never held as a whole."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        stack.enter_context(zeromesh.zero.Init())
        for kind in (nn.Linear, nn.Embedding):  # layers do not draw weights that Quick would draw again
            stack.enter_context(patch.object(kind, "reset_parameters", lambda module: None))
        model = Quick(shape_of(options, layers))
        if options.get("adapters"):
            add_adapters(model, options["adapters"])
    data = None
    if options.get("recompute") == "auto":  # the planner asks how long samples are
        data = TensorDataset(*batch_of(options, torch.device("cpu")))
    engine, *_ = zeromesh.initialize(model=model, config=configuration(options, folder, ratio), training_data=data)
    if options.get("compile"):
        engine.compile(backend=options.get("backend", "inductor"))
    return engine


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze a model, and add trained adapters (LoRA) to all its projections but the head, in place.

    Raises:
        LeftOut: the package peft is not there.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise LeftOut("needs the package peft") from None
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "head"]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), model)


def update(engine: Any, options: Options, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Train one update, and return the loss of its last micro-batch, detached."""
    for _ in range(options.get("accumulation", 1)):
        with record_function("the forward"):
            loss = engine(*batch)
        with record_function("the backward"):
            engine.backward(loss)
        with record_function("the update"):
            engine.step()
    found: torch.Tensor = loss.detach()
    return found


def norm_of(engine: Any) -> float:
    """Return the norm of all gradients, in float64; between a backward and its step."""
    squares = [
        torch.linalg.vector_norm(gradient.to(engine.device), dtype=torch.float64).square()
        for parameter in engine.module.parameters()
        if (gradient := zeromesh.zero.safe_get_full_grad(parameter)) is not None
    ]
    return float(torch.stack(squares).sum().sqrt())


def train(options: Options, job: Options) -> Figures:
    """Train some updates on one batch: seconds, operations, memory and losses, beside what the planner foresees."""
    chosen = choose(options, job)
    device, layers = torch.device(job["device"]), chosen["layers"]
    shape = shape_of(options, layers)
    tokens = options["batch"] * options["sequence"] * options.get("accumulation", 1)
    found = {**chosen, "parameters": parameters(shape), "tokens": tokens}
    tell(job, found)
    if job.get("host_gib") and chosen["planned"]["host"] > (memory()["available_bytes"] or math.inf):
        torch.ones(int(chosen["planned"]["host"]), dtype=torch.uint8)  # such a machine gets memory when it is used
    began = time.perf_counter()
    engine = engine_of(options, job["folder"], layers, chosen["ratio"])
    found |= {"build": time.perf_counter() - began, "native": library() is not None}
    tell(job, found)
    batch, losses, marks = batch_of(options, device), [], []
    warmup, steps = options.get("warmup", 2), options.get("steps", 4)
    for _ in range(warmup):  # compiles, allocates, and makes the optimizer's states
        losses.append(update(engine, options, batch))
    synchronize(device)
    marks.append(time.perf_counter())
    tell(job, found | {"warmup": marks[0] - began - found["build"]})
    for _ in range(steps):
        losses.append(update(engine, options, batch))
        marks.append(time.perf_counter())
    synchronize(device)
    seconds = (time.perf_counter() - marks[0]) / steps
    # Frozen weights have no gradients, which are a third of the operations.
    share = 2 / 3 if options.get("adapters") else 1.0
    flops = share * tokens * training_flops_per_token(shape) / seconds
    told_losses = [loss.item() for loss in losses]
    found |= {
        "seconds_per_update": seconds, "flops": flops, "losses": told_losses,
        "times": [after - before for before, after in pairwise(marks)],
        "device_peak": peak_bytes(device) if device.type != "cpu" else None,
        "host_peak": peak_bytes(torch.device("cpu")), "states": states_of(engine), "wrong": [],
    }  # fmt: skip
    tell(job, found)
    if not all(map(math.isfinite, told_losses)) or told_losses[-1] >= told_losses[0]:
        found["wrong"] = [f"the losses {told_losses} must be finite and fall"]  # else its times say nothing
    if options.get("norm"):
        engine.backward(engine(*batch))
        expected = norm_of(engine)
        engine.step()
        found["norm"] = {"expected": expected, "engine": engine.get_global_grad_norm(), "clip": 1.0}
        if not abs(found["norm"]["engine"] / expected - 1) <= NORM_TOLERANCE:
            found["wrong"].append(f"the norm that is clipped by is {found['norm']['engine']}, not {expected}")
    if options.get("kernels"):
        found["kernels"] = profiled(engine, options, batch, Path(job["folder"], "trace.json"))["kernels"]
    if options.get("spans"):  # last, as watching takes time
        engine.observer.spans.timed = True
        timer = Timer(engine.observer.spans)
        update(engine, options, batch)
        found["spans"] = asdict(timer.take(1))
    return found


def states_of(engine: Any) -> dict[str, Any]:
    """Return bytes by state and tier."""
    report = engine.memory_report()
    return {state: tiers for state, tiers in report.items() if isinstance(tiers, dict) and state != "measured"}


# A trace.


def trace(options: Options, job: Options) -> Figures:
    """Profile one update with states in several places: idle time, copies beside kernels, and calls that block."""
    device, rows, wrong = torch.device(job["device"]), {}, []
    for place, zero in options["zeros"].items():
        own = {**options, "zero": zero}
        engine, batch = engine_of(own, job["folder"], options["layers"], None), batch_of(options, device)
        for _ in range(3):
            update(engine, own, batch)
        synchronize(device)
        rows[place] = found = profiled(engine, own, batch, Path(job["folder"], "trace.json"))
        engine.destroy()
        del engine
        gc.collect()  # modules and hooks refer to each other, and would keep its memory for a while
        if found["blocking"]:
            wrong.append(f"{place}: the backward waits for the device in {', '.join(found['blocking'])}")
        if device.type == "cuda" and len(zero) > 1 and not found["beside kernels"]:
            wrong.append(f"{place}: no copy runs beside a kernel")
    return {"rows": rows, "wrong": wrong}


def profiled(engine: Any, options: Options, batch: tuple[torch.Tensor, torch.Tensor], file: Path) -> Figures:
    """Return what a trace of one more update says, which is left in a file."""
    engine.observer.spans.trace(True)
    with profile() as profiler, record_function("all"):
        update(engine, options, batch)
        synchronize(engine.device)
    engine.observer.spans.trace(False)
    profiler.export_chrome_trace(str(file))
    return look(json.loads(file.read_text())["traceEvents"], engine.device.type)


def look(events: Sequence[Mapping[str, Any]], device: str) -> Figures:
    """Return what a trace says of the update whose range is called "all".

    Args:
        events: of a trace in Chrome's format, with times in microseconds.
        device: type of the device.

    Returns:
        ``seconds`` of the range; ``idle``, the share of it without a kernel; ``blocking``, calls in its backward that
        made a thread wait which launches kernels; ``copied``, seconds of copies between device and host; ``beside
        kernels``, the share of them during which a kernel ran; ``kernels``, seconds of those that took most; ``host``,
        name, begin and seconds of the engine's spans that took most; ``lanes``, by kind of work the busy share of each
        of ``BINS`` parts of the range.
    """
    spans = [event for event in events if event.get("ph") == "X"]

    def named(name: str) -> tuple[float, float]:
        found = next(event for event in spans if event["name"] == name and event.get("cat") == "user_annotation")
        return found["ts"], found["ts"] + found["dur"]

    (begin, end), (first, last) = named("all"), named("the backward")
    inside = [event for event in spans if begin <= event["ts"] < end]
    work = [event for event in inside if event.get("cat") in KERNELS[device]]
    copies = [event for event in inside if event.get("cat") == "gpu_memcpy"]
    lanes = {
        "kernels": merged(work),
        "copies to the host": merged(event for event in copies if "DtoH" in event["name"]),
        "copies to the device": merged(event for event in copies if "HtoD" in event["name"]),
    }
    host = [event for event in inside if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)]
    for lane, kind in (("norm on the host", "norm"), ("update on the host", "update_on_host")):
        if found := merged(event for event in host if event["name"].split()[0] == PREFIX + kind):
            lanes[lane] = found
    both = merged(event for event in copies if "DtoH" in event["name"] or "HtoD" in event["name"])
    copied = sum(stop - start for start, stop in both)
    busy: dict[str, float] = {}
    for event in work:
        busy[event["name"]] = busy.get(event["name"], 0.0) + event["dur"] / 1e6
    launch = {event.get("tid") for event in spans if "LaunchKernel" in event["name"]}
    waits = (event for event in spans if first <= event["ts"] < last and event["name"] in BLOCKING)
    width = (end - begin) / BINS
    bins = [[(begin + number * width, begin + (number + 1) * width)] for number in range(BINS)]
    return {
        "seconds": (end - begin) / 1e6,
        "idle": 1 - overlap([(begin, end)], lanes["kernels"]) / (end - begin),
        "blocking": [event["name"] for event in waits if event.get("tid") in launch],
        "copied": copied / 1e6,
        "beside kernels": overlap(both, lanes["kernels"]) / copied if copied else 0.0,
        "kernels": dict(sorted(busy.items(), key=lambda item: -item[1])[:SHOWN]),
        "host": [
            [event["name"].removeprefix(PREFIX), (event["ts"] - begin) / 1e6, event["dur"] / 1e6]
            for event in sorted(sorted(host, key=lambda event: -event["dur"])[:SHOWN], key=lambda event: event["ts"])
        ],
        "lanes": {name: [round(overlap(part, lane) / width, 3) for part in bins] for name, lane in lanes.items()},
    }


Stretches = Sequence[tuple[float, float]]


def merged(events: Iterable[Mapping[str, Any]]) -> Stretches:
    """Return the stretches of time of events, in order; those that overlap are one."""
    return list(_merged(sorted((event["ts"], event["ts"] + event["dur"]) for event in events)))


def _merged(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    begin, end = -math.inf, -math.inf
    for start, stop in spans:
        if start > end:
            if end > begin:
                yield begin, end
            begin, end = start, stop
        end = max(end, stop)
    if end > begin:
        yield begin, end


def overlap(one: Stretches, other: Stretches) -> float:
    """Return the time that two lists of stretches, each in order and without overlaps, have in common."""
    found, place = 0.0, 0
    for start, stop in one:
        while place < len(other) and other[place][1] <= start:
            place += 1
        for begin, end in islice(other, place, None):
            if begin >= stop:
                break
            found += min(stop, end) - max(start, begin)
    return found
