"""Questions around a plan: the fewest GPUs, adapters in the devices' memory, hours and money, the largest models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

from zeromesh.apps.cli.plan_model import Adapters, AskedModel, asked_model
from zeromesh.apps.plan.choose.answer import batch_for, fits_any, layout_text
from zeromesh.apps.plan.choose.certainty import seconds_text
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.search import PlanCandidate, SearchEffort, search
from zeromesh.apps.plan.choose.space import PlanRequest
from zeromesh.apps.plan.cost.named_models import CatalogueModel, catalogue
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.lower_bounds import least_memory
from zeromesh.base.placement import Tier
from zeromesh.base.words import bytes_text, counted, scaled_text
from zeromesh.engine.initialize.widths import PRECISIONS

RANK = 16  # of adapters, where the command does not say it
PACKED = 0.5  # bytes of a parameter in 4 bits
MOST_GPUS = 1024  # of those that are tried
MOST_TOKENS = 2048  # of a sample, where the command does not say it and the model takes more
SAMPLES, IMAGES = 8, 32  # of an update on each device, where the command does not say it
SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def tokens_of(text: str) -> float:
    """Return a number of tokens such as ``1e9``, ``300M`` or ``1.5T``; raise ValueError for another text."""
    match = re.fullmatch(r"(\d+(?:[._]\d+)*(?:e[+]?\d+)?)\s*([kmbgt]?)", text.strip().lower())
    tokens = float(match[1]) * SCALES[match[2]] if match else 0.0
    if not 0 < tokens < math.inf:
        raise ValueError(f"--tokens is {text!r}; give the tokens of the whole training, such as 1e9, 300M or 1.5T")
    return tokens


def names_text() -> Iterator[str]:
    """Yield the catalogue, a line each."""
    models = catalogue()
    widest = max(map(len, models))
    for model in models.values():
        kind = "language model" if model.causal else "images" if model.images else "encoder, or encoder and decoder"
        yield f"{model.name:<{widest}}  {scaled_text(model.parameters):>7}  {kind:<32}{model.hub}".rstrip()
    yield "Also: a size such as 7b, sizes such as llama:layers=32,hidden=4096,heads=32, a folder, a configuration."


def on_devices(layout: ParallelLayout) -> bool:
    """Return whether all states and activations of a layout are in the memory of devices."""
    tiers = {layout.row.parameter_tier, layout.row.gradient_tier, layout.row.optimizer_tier}
    return tiers == {Tier.DEVICE} and not layout.activations_on_host


def all_hold(*rules: Callable[[ParallelLayout], bool] | None) -> Callable[[ParallelLayout], bool] | None:
    """Return a rule that holds where all of some do; None for none at all."""
    present = [rule for rule in rules if rule is not None]
    return (lambda layout: all(rule(layout) for rule in present)) if present else None


# Hours and money.


def hours_of(candidate: PlanCandidate, tokens: float) -> float:
    """Return the hours in which a layout trains on so many tokens."""
    return tokens / candidate.tokens_per_second / 3600


def price_per_hour(machine: Machine) -> float:
    """Return the price of all nodes; 0 where one is unknown."""
    prices = [node.price * count for node, count in machine.nodes]
    return sum(prices) if all(prices) else 0.0


def amount_text(amount: float) -> str:
    """Return hours or money with three digits."""
    return f"{amount:,.0f}" if amount >= 99.95 else f"{amount:.3g}"


def budget_text(candidate: PlanCandidate, tokens: float, noun: str) -> str:
    """Return the hours and the money of a whole training in a sentence."""
    hours, price = hours_of(candidate, tokens), price_per_hour(candidate.machine)
    nodes = counted(sum(count for _, count in candidate.machine.nodes), "node")
    duration = f"{amount_text(hours)} hours" if hours >= 1 else f"{amount_text(hours * 60)} minutes"
    text = f"{scaled_text(tokens)} {noun}s take {duration}"
    if hours >= 48:
        text += f" ({amount_text(hours / 24)} days)"
    if not price:
        return f"{text}; --price PER_NODE_AND_HOUR adds what they cost."
    return f"{text} and cost {amount_text(hours * price)}, at {amount_text(price)} an hour for {nodes}."


# The fewest devices.


def fewest_text(request: PlanRequest, gpu: str) -> str:
    """Return the fewest devices of a kind on which the model trains, with and without the host's memory."""
    texts = []
    for accepts, where in ((None, "with the host's memory or disks"), (on_devices, "without them")):
        count = _fewest(replace(request, accepts=all_hold(request.accepts, accepts)), gpu)
        texts.append(f"{counted(count, 'device') if count else f'more than {MOST_GPUS} devices'} {where}")
    if texts[0].split(" with")[0] == texts[1].split(" with")[0]:
        return f"Fewest {gpu}: {texts[0].split(' with')[0]}, with all states in their own memory."
    return f"Fewest {gpu}: {', '.join(texts)} (of 1, 2, 4, ...; sharded, and recomputed where that helps)."


def _fewest(request: PlanRequest, gpu: str) -> int:
    """Return the least power of two of devices on which anything fits; 0 for more than the most that are tried."""
    count, most = 1, 0
    while count <= MOST_GPUS:
        try:
            machine = cluster(gpu, count)
            most = count
        except ValueError:  # more than a node has
            machine = cluster(gpu, most, nodes=count // most)
        if fits_any(replace(request, machine=machine)):
            return count
        count *= 2
    return 0


# Adapters beside a plan of full training.


def adapters_text(text: str, asked: AskedModel, request: PlanRequest, precision: str) -> str:
    """Return whether adapters can be trained in the devices' memory; "" for a model that cannot have any."""
    if not asked.causal or asked.adapters is not None or asked.configuration or find_spec("peft") is None:
        return ""
    memory = sum(node.devices * count * node.device.memory for node, count in request.machine.nodes)
    parameters = request.source.at(1, request.sequence, 1).parameters
    for adapters in (Adapters(RANK), Adapters(RANK, quantized=True)):
        # Adding adapters to a large model takes long, and is needless where its frozen weights alone do not fit.
        if parameters * (PACKED if adapters.quantized else PRECISIONS[precision].parameter) > memory:
            continue
        try:
            model = asked_model(text, precision, adapters)
        except ValueError:
            return ""
        trial = replace(
            request,
            source=model.source,
            limits=model.limits,
            accepts=all_hold(request.accepts, on_devices),
            goal="time",
        )
        best = search(batch_for(trial), SearchEffort(12, 8, 300, 1)).best
        if best is not None:
            option = "--qlora" if adapters.quantized else f"--lora {adapters.rank}"
            used, limit = bytes_text(best.fullest.device), bytes_text(least_memory(best.machine))
            return (
                f"{adapters.name} fits in the devices' memory: {used} of {limit}, {layout_text(best.layout)}, "
                f"{seconds_text(best.time.seconds)} a step. Plan it with {option}."
            )
    return "Neither LoRA nor QLoRA (r = 16) fits in the devices' memory at this batch and sequence."


# No model.


def largest_models(machine: Machine, precision: str, batch: int, sequence: int) -> Iterator[str]:
    """Yield the largest language model of the catalogue that trains on a machine, by the way it trains."""
    models = sorted((m for m in catalogue().values() if m.causal and m.shape()), key=lambda m: m.parameters)
    ways: tuple[tuple[str, Adapters | None, bool], ...] = (
        ("full training, in the devices' memory", None, True),
        ("full training, with the host's memory or disks", None, False),
        ("LoRA (--lora 16), in the devices' memory", Adapters(RANK), True),
        ("QLoRA (--qlora), in the devices' memory", Adapters(RANK, quantized=True), True),
    )
    for name, adapters, only_devices in ways:
        if adapters is not None and (find_spec("peft") is None or find_spec("transformers") is None):
            continue

        def fits(model: CatalogueModel, adapters: Adapters | None = adapters, alone: bool = only_devices) -> bool:
            asked = asked_model(model.name, precision, adapters)
            length = min(sequence, asked.limits.positions or sequence)
            accepts = on_devices if alone else None
            widths = PRECISIONS[precision]
            return fits_any(
                PlanRequest(asked.source, machine, batch, length, asked.limits, widths=widths, accepts=accepts)
            )

        low, high = 0, len(models)  # the first ``low`` fit
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(models[middle]) else (low, middle)
        largest = f"{models[low - 1].name} ({scaled_text(models[low - 1].parameters)} parameters)" if low else "none"
        yield f"{name:<48}{largest}"
