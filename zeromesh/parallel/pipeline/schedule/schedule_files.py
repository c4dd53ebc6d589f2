"""Schedules and measured costs in files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any

from zeromesh.base.files import read_text
from zeromesh.parallel.pipeline.schedule.actions import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    parse,
    read_action,
    unreadable,
)
from zeromesh.parallel.pipeline.schedule.simulate import Costs

COSTS = "costs"  # in "otherData" of a trace, where viewers expect what is not an event

KEYS = ("microbatches", "placement", "ranks")

# Kinds of torch.distributed.pipelining by their names in its tables.
_TORCH = {
    "F": Kind.FORWARD, "I": Kind.INPUT, "W": Kind.WEIGHT, "B": Kind.BACKWARD, "SEND_F": Kind.SEND_ACTIVATION,
    "RECV_F": Kind.RECEIVE_ACTIVATION, "SEND_B": Kind.SEND_GRADIENT, "RECV_B": Kind.RECEIVE_GRADIENT,
}  # fmt: skip
_CELL = re.compile(r"(\d+)([A-Z_]+?)(\d+)")


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from a file: text, JSON, or, if its name ends in ``.csv``, a table of torch's pipelines.

    Raises:
        ScheduleError: there is no such file, or it cannot be read; with the line or the rank, and the word.
    """
    text = _text_of(path)
    if path.suffix.lower() == ".csv":
        return parse_table(text)
    return parse_json(text) if text.lstrip().startswith("{") else parse(text)


def parse_json(text: str) -> Schedule:
    """Read ``{"microbatches": 1, "placement": [0], "ranks": [["F0.0", "B0.0"]]}``. Raise ScheduleError."""
    document = _json_of(text)
    for key in document:
        if key not in KEYS:
            raise unreadable("the object", key, f"its keys are {', '.join(KEYS)}")
    microbatches, placement, ranks = document.get("microbatches"), document.get("placement"), document.get("ranks")
    if not isinstance(microbatches, int) or isinstance(microbatches, bool):
        raise unreadable("microbatches", str(microbatches), "it must be a whole number")
    if not (isinstance(placement, list) and placement and all(map(_is_number, placement))):
        raise unreadable("placement", str(placement), "it must be a list with the rank of each stage")
    if not (isinstance(ranks, list) and all(isinstance(order, list) for order in ranks)):
        raise unreadable("ranks", str(ranks)[:40], 'it must be a list with a list of actions, as "F0.1", of each rank')
    orders = [tuple(read_action(str(word), f"rank {rank}") for word in order) for rank, order in enumerate(ranks)]
    return Schedule(microbatches, tuple(placement), tuple(orders))


def parse_table(text: str) -> Schedule:
    """Read a table as torch writes it: a line per rank, and cells such as ``1F0``, or nothing for idle time.

    Raises:
        ScheduleError: a cell is not an action that exists here, or a stage is on no rank or on several.
    """
    ranks: list[tuple[Action, ...]] = []
    places: dict[int, int] = {}
    for rank, row in enumerate(csv.reader(text.splitlines())):
        actions = [_torch_action(cell.strip(), rank) for cell in row if cell.strip()]
        for action in actions:
            if places.setdefault(action.stage, rank) != rank:
                rule = f"stage {action.stage} is on rank {places[action.stage]} already; all its actions are on one"
                raise unreadable(f"rank {rank}", str(action), rule)
        ranks.append(tuple(actions))
    missing = [stage for stage in range(max(places, default=0) + 1) if stage not in places]
    if missing:
        raise unreadable("the table", f"stage {missing[0]}", "no rank has an action of it")
    microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    return Schedule(microbatches, tuple(places[stage] for stage in sorted(places)), tuple(ranks))


def _torch_action(cell: str, rank: int) -> Action:
    match = _CELL.fullmatch(cell)
    if not match or match[2] not in _TORCH:
        # torch's others load and release parameters and reduce gradients, which the engine does as it computes.
        rule = f"an action is one of {', '.join(_TORCH)} between a stage and a micro-batch; write the table in torch "
        raise unreadable(f"rank {rank}", cell, rule + 'with format="compute_only"')
    return Action(_TORCH[match[2]], int(match[1]), int(match[3]))


def with_costs(trace: Mapping[str, Any], costs: Costs) -> dict[str, Any]:
    """Return a trace that has costs in it, too; ``read_costs`` reads them."""
    entries = {field.name: getattr(costs, field.name) for field in fields(costs)}
    return {**trace, "otherData": {COSTS: entries}}


def read_costs(path: Path) -> Costs:
    """Read the measured costs in a trace that ``pipeline.record`` wrote; times are in seconds.

    Raises:
        ValueError: there is no such file, or it has no costs.
    """
    document = _json_of(_text_of(path))
    entries = document.get("otherData", document)
    entries = entries.get(COSTS) if isinstance(entries, dict) else None
    names = [field.name for field in fields(Costs)]
    lists = [value for value in entries.values() if isinstance(value, list)] if isinstance(entries, dict) else []
    if (
        not isinstance(entries, dict)
        or not all(key in names and _is_cost(key, value) for key, value in entries.items())
        or len({len(value) for value in lists}) > 1
    ):
        raise ValueError(
            f"{path} has no measured costs: {', '.join(names)} in otherData.{COSTS}, each one number or one for each "
            "stage; give the JSON file that pipeline.record has written"
        )
    values: dict[str, Any] = {key: tuple(cost) if isinstance(cost, list) else cost for key, cost in entries.items()}
    return Costs(**values)


def _text_of(path: Path) -> str:
    try:
        return read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError("unreadable file", f"{path}: {error}; give the path of a text file") from None


def _json_of(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError("unreadable text", f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ScheduleError("unreadable text", "it must be a JSON object")
    return document


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_cost(key: str, value: object) -> bool:
    if key == "latency" or not isinstance(value, list):
        return _is_time(value) or (key == "backward" and value is None)
    return bool(value) and all(map(_is_time, value))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf
