"""Compare the collectives that a program calls itself, before they are run: a mode for programs that hang.

torch waits for ever where one rank does not call a collective, and where ranks call different ones, or the same one on
other shapes, gloo ends the process or mixes up their messages.
"""

# torch's own mode, TORCH_DISTRIBUTED_DEBUG=DETAIL, must be on before the group starts, tells no lines of code, names a
# rank that is missing only after the group's timeout, and knows no backend that is written in Python; see docs/log.md.

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.comm import course
from zeromesh.comm.peers import named
from zeromesh.comm.signs import read_waits
from zeromesh.comm.watchdog import SLOWEST_LINK, Watchdog

# Functions whose first tensor has one shape and dtype on all ranks; not every version of torch has all of them.
SAME_SHAPES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather_single",
    "reduce_scatter_single",
)

# Functions of torch.distributed in which all ranks of a group take part.
CALLS = (
    *SAME_SHAPES, "barrier", "all_gather", "all_gather_object", "gather", "gather_object", "scatter",
    "scatter_object_list", "broadcast_object_list", "reduce_scatter", "all_to_all", "all_to_all_single",
    "all_reduce_coalesced", "all_gather_coalesced", "monitored_barrier",
)  # fmt: skip

PAUSE, LONGEST_PAUSE = 0.001, 0.1  # seconds between two reads of the store, the first and the last ones

_log = logging.getLogger("zeromesh")


class CollectiveMismatch(RuntimeError):
    """Ranks called different collectives, or some called none."""


def compare_calls(store: Any, watched: Watchdog | None, patience: float) -> None:
    """Compare from now on every collective that is called by its name in ``torch.distributed``.

    Args:
        store: the process group's key-value store.
        watched: is notified of waits; None where nobody says what else a missing rank waits for.
        patience: seconds after which a rank that does not come is named.
    """
    counts: dict[str, int] = defaultdict(int)

    def comparing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
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
                call: dict[str, Any] = {"call": name, "where": course.where(sys._getframe(1))}
                if name in SAME_SHAPES and tensor is not None:
                    call |= {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
                counts[group.group_name] += 1
                _compare(store, watched, patience, group, counts[group.group_name], call)
            return function(*args, **kwargs)

        return compared

    for name in CALLS:
        function = getattr(dist, name, None)
        # A function that the program has imported by its name before is not compared. An engine made before this one
        # may have replaced it here: compared twice, each call would count twice.
        code = getattr(function, "__code__", None)  # a tool may have put an object in its place
        if function is not None and (code is None or code.co_filename != __file__):
            setattr(dist, name, comparing(name, function))


def _compare(
    store: Any, watched: Watchdog | None, patience: float, group: Any, number: int, call: dict[str, Any]
) -> None:
    """Raise CollectiveMismatch if other ranks' calls are different, or a rank that has not come waits elsewhere."""
    base, ranks, own_rank = f"zeromesh/calls/{group.group_name}", dist.get_process_group_ranks(group), dist.get_rank()
    store.set(f"{base}/{number}/{own_rank}", json.dumps(call))
    if watched is not None:  # with a later limit than this function's, which says more
        watched.begin(f"{_shown(call)}, collective {number} of {group.group_name}", int(3 * patience * SLOWEST_LINK))
    try:
        calls = {own_rank: call}
        due, before, pause = time.monotonic() + patience, dict[int, Any](), PAUSE
        while missing := [rank for rank in ranks if rank not in calls]:
            keys = [f"{base}/{number}/{rank}" for rank in missing]
            if not store.check(keys):  # all at once, and one by one only where some do not come
                keys = [key for key in keys if store.check([key])] if time.monotonic() > due else []
            for key, text in zip(keys, store.multi_get(keys) if keys else [], strict=True):
                calls[int(key.rpartition("/")[2])] = json.loads(text)
            if time.monotonic() > due and (missing := [rank for rank in ranks if rank not in calls]):
                due += patience
                waits = read_waits(store)
                elsewhere = {rank: waits.get(rank, {}) for rank in missing}
                text = f"{named(missing)} did not join {_shown(call)} as collective {number} of {group.group_name}"
                # A rank that waits for the same thing as at the last look will not come; another may just be slow.
                if elsewhere == before and all(elsewhere.values()):
                    lines = [f"  rank {rank} waits for {w['what']}, at {w['where']}" for rank, w in elsewhere.items()]
                    raise CollectiveMismatch("\n".join([f"{text}:", *lines]))
                _log.warning("rank %d waits: %s so far", own_rank, text)
                before = elsewhere
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        if watched is not None:
            watched.end()
    if number > 2:  # all have read it: they have come to this call
        store.delete_key(f"{base}/{number - 2}/{own_rank}")
    kinds = {
        json.dumps({key: value for key, value in rank_call.items() if key != "where"}) for rank_call in calls.values()
    }
    if len(kinds) > 1:
        lines = [f"  rank {rank} called {_shown(calls[rank])}" for rank in ranks]
        advice = "all ranks of a group must call the same collectives, in the same order, on the same shapes and dtypes"
        raise CollectiveMismatch("\n".join([f"collective {number} of {group.group_name} differs:", *lines, advice]))


def _shown(call: dict[str, Any]) -> str:
    of = f" of {call['dtype']} {tuple(call['shape'])}" if "shape" in call else ""
    return f"{call['call']}{of} at {call['where'] or 'a line that is not known'}"
