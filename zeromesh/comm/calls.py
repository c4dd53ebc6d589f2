"""Compare the collectives that a program calls itself, before they are run: a mode for programs that hang.

torch waits for ever where one rank does not call a collective, and where ranks call different ones, or the same one on
other shapes, gloo ends the process or mixes up their messages. Here each rank first writes what it is about to call,
and where in the program, to the process group's store, and reads what the others wrote.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.comm import watchdog
from zeromesh.comm.watchdog import SLOWEST_LINK, Watchdog

CALLS = (
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "gather", "gather_object", "scatter", "scatter_object_list", "broadcast_object_list", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_single", "reduce_scatter_single",
    "all_reduce_coalesced", "all_gather_coalesced", "monitored_barrier",
)  # fmt: skip
"""Functions of torch.distributed in which all ranks of a group take part."""

SAME_SHAPES = (
    "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single",
    "reduce_scatter_single",
)  # fmt: skip
"""Functions whose first tensor has one shape and dtype on all ranks."""

PAUSE = 0.001
"""Seconds between two reads of the store."""

_log = logging.getLogger("zeromesh")


class CollectiveMismatch(RuntimeError):
    """Ranks called different collectives, or some called none."""


def compare_calls(store: Any, watched: Watchdog | None, patience: float) -> None:
    """Compare from now on every collective that is called by its name in ``torch.distributed``.

    A function that the program imported before, as in ``from torch.distributed import all_reduce``, is not compared.

    Args:
        store: the process group's key-value store.
        watched: is notified of waits; None with nccl, where nobody says what else a missing rank waits for.
        patience: seconds after which a rank that does not come is named.
    """
    counts: dict[str, int] = defaultdict(int)
    for name in CALLS:
        function = getattr(dist, name, None)  # not every version of torch has all of them
        if function is not None and not hasattr(function, "_zeromesh_compares"):
            setattr(dist, name, _comparing(name, function, partial(_compare, store, watched, patience), counts))


def _comparing(
    name: str, function: Callable[..., Any], compare: Callable[[Any, int, dict[str, Any]], None], counts: dict[str, int]
) -> Callable[..., Any]:  # fmt: skip
    signature = inspect.signature(function)

    @functools.wraps(function)
    def compared(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong
        group: Any = arguments.get("group") or dist.group.WORLD
        if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
            tensor = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
            call: dict[str, Any] = {"call": name, "where": watchdog.where(sys._getframe(1))}
            if name in SAME_SHAPES and tensor is not None:
                call |= {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
            counts[group.group_name] += 1
            compare(group, counts[group.group_name], call)
        return function(*args, **kwargs)

    compared._zeromesh_compares = True  # type: ignore[attr-defined]
    return compared


def _compare(
    store: Any, watched: Watchdog | None, patience: float, group: Any, number: int, call: dict[str, Any]
) -> None:  # fmt: skip
    """Write this rank's call, and wait for those of the others as long as they may come.

    Raises:
        CollectiveMismatch: they are different, or a rank that has not come waits elsewhere.
    """
    base, ranks, own = f"zeromesh/calls/{group.group_name}", dist.get_process_group_ranks(group), dist.get_rank()
    store.set(f"{base}/{number}/{own}", json.dumps(call))
    if watched is not None:  # later than this function, which says more
        watched.begin(f"{_shown(call)}, collective {number} of {group.group_name}", int(3 * patience * SLOWEST_LINK))
    try:
        found = {own: call}
        due, before = time.monotonic() + patience, dict[int, Any]()
        while missing := [rank for rank in ranks if rank not in found]:
            for rank in missing:
                if text := watchdog.last_said(store, f"{base}/{number}/{rank}"):
                    found[rank] = json.loads(text)
            if time.monotonic() > due and (missing := [rank for rank in ranks if rank not in found]):
                due += patience
                elsewhere = {rank: watchdog.wait_of(store, rank) for rank in missing}
                _say(own, _ranks(missing), call, number, group, elsewhere, elsewhere == before)
                before = elsewhere
            time.sleep(PAUSE)
    finally:
        if watched is not None:
            watched.end()
    if number > 2:  # all have read it: they have come to this call
        store.delete_key(f"{base}/{number - 2}/{own}")
    kinds = {json.dumps({key: value for key, value in one.items() if key != "where"}) for one in found.values()}
    if len(kinds) > 1:
        lines = [f"  rank {rank} called {_shown(found[rank])}" for rank in ranks]
        advice = "all ranks of a group must call the same collectives, in the same order, on the same shapes and dtypes"
        raise CollectiveMismatch("\n".join([f"collective {number} of {group.group_name} differs:", *lines, advice]))


def _say(
    own: int, missing: str, call: dict[str, Any], number: int, group: Any, elsewhere: dict[int, Any], still: bool
) -> None:  # fmt: skip
    """Warn that ranks have not come; raise if all of them wait elsewhere, as they did the time before."""
    text = f"{missing} did not join {_shown(call)} as collective {number} of {group.group_name}"
    if not (still and all(elsewhere.values())):
        _log.warning("rank %d waits: %s so far", own, text)
        return
    lines = [f"  rank {rank} waits for {wait['what']}, at {wait['where']}" for rank, wait in elsewhere.items()]
    raise CollectiveMismatch("\n".join([f"{text}:", *lines]))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _shown(call: dict[str, Any]) -> str:
    of = f" of {call['dtype']} {tuple(call['shape'])}" if "shape" in call else ""
    return f"{call['call']}{of} at {call['where'] or 'a line that is not known'}"
