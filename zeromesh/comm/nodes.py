"""Nodes of ranks whose launcher tells only rank and world size: found out through the store in which they meet.

Each rank makes the same few calls however many there are, and reads one value, of its own node.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zeromesh.comm.detect import Environment
from zeromesh.comm.failure import StartError
from zeromesh.comm.launchers import TORCHRUN, names_of, value
from zeromesh.comm.rendezvous import FAREWELL_SECONDS
from zeromesh.comm.signs import network_place
from zeromesh.comm.trust import SealedStore


def place(environment: Environment, store: SealedStore) -> Environment:
    """Return the environment with this rank's place on its node. Collective.

    Raises:
        StartError: what some ranks have as LOCAL_RANK or LOCAL_WORLD_SIZE is not so, or rank 0 is gone.
    """
    mine, keys = node_facts(environment, os.environ), [f"node of/{rank}" for rank in range(environment.world_size)]
    try:
        store.set(keys[environment.rank], json.dumps(mine))
        if environment.rank == 0:
            store.raw.wait(keys, store.timeout)
            pairs = zip(keys, store.raw.multi_get(keys), strict=True)
            for name, text in node_table([json.loads(store.unseal(key, sealed)) for key, sealed in pairs]).items():
                store.set(f"node/{name}", json.dumps(text))
        answer = json.loads(store.get(f"node/{mine['node']}"))
    except StartError:
        raise
    except RuntimeError as error:
        raise StartError(
            f"rank {environment.rank} does not hear from rank 0 which ranks are on which node: "
            f"{str(error).splitlines()[0]}; see the output of rank 0, and set the same variables of LOCAL_RANK, "
            "LOCAL_WORLD_SIZE and GROUP_RANK, or none of them, on all ranks"
        ) from None
    if isinstance(answer, str):
        start_together(environment, store, StartError(answer))
    local_ranks = answer["local_ranks"]
    return replace(
        environment,
        local_rank=local_ranks[str(environment.rank)],
        node_rank=answer["node_rank"],
        local_world_size=len(local_ranks),
        node_count=answer["node_count"],
        placed=True,
    )


def start_together(environment: Environment, store: SealedStore, problem: Exception | None) -> None:
    """Return when all ranks can go on. Collective.

    Raises:
        StartError: another rank cannot.
        Exception: ``problem``, why this one cannot; the others are told.
    """
    if problem is not None:
        text = f"rank {environment.rank} on {socket.gethostname()} cannot start: {problem}"
        store.compare_set("start", "", text)
    elif store.add("ready", 1) == environment.world_size:
        store.set("start", "")
    try:
        reply = store.get("start").decode()
    except StartError:
        raise
    except RuntimeError as error:
        raise StartError(
            f"rank {environment.rank} does not hear that all ranks can start: {str(error).splitlines()[0]}; a rank has "
            "ended meanwhile: see the other ranks' output"
        ) from None
    if not reply:
        return
    end, heard = time.monotonic() + FAREWELL_SECONDS, store.add("heard", 1)
    # The store may be in the process of rank 0, which stays until the others have read the problem.
    while environment.rank == 0 and heard < environment.world_size and time.monotonic() < end:
        time.sleep(0.02)
        heard = store.add("heard", 0)
    raise problem or StartError(reply)


def node_facts(environment: Environment, env: Mapping[str, str]) -> dict[str, Any]:
    """Return what tells the node of this process, and what its launcher says of its place there."""
    row = names_of(environment.launcher)
    # Containers may share a name, and pods a machine. Ranks of one node reach each other over loopback.
    node = f"{socket.gethostname()} {network_place()} {value(env, TORCHRUN.node_rank)}"
    local_rank = value(env, row.local_rank or TORCHRUN.local_rank)
    local_size = value(env, row.local_world_size or TORCHRUN.local_world_size)
    return {
        "node": hashlib.sha256(node.encode()).hexdigest()[:32],
        "host": socket.gethostname(),
        "local_rank": None if local_rank is None else int(local_rank),
        "local_world_size": None if local_size is None else int(local_size),
    }


def node_table(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what each node's ranks have to know, by node, from the facts of all ranks; a text where they cannot be."""
    nodes: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        nodes.setdefault(fact["node"], []).append(rank)
    table: dict[str, Any] = {}
    for number, (name, ranks) in enumerate(nodes.items()):
        stated_ranks = [facts[rank]["local_rank"] for rank in ranks]
        local_ranks = [index if local is None else local for index, local in enumerate(stated_ranks)]
        sizes = {facts[rank]["local_world_size"] for rank in ranks} - {None}
        if sorted(local_ranks) != list(range(len(ranks))) or sizes - {len(ranks)}:
            settings = [f"rank {rank} has LOCAL_RANK={facts[rank]['local_rank']}" for rank in ranks[:8]]
            settings += [f"LOCAL_WORLD_SIZE={size}" for size in sorted(sizes)]
            problem = (
                f"{len(ranks)} of {len(facts)} ranks are on the node {facts[ranks[0]]['host']}, but "
                f"{', '.join(settings).replace('None', '(not set)')}; their LOCAL_RANK must be 0 to {len(ranks) - 1}: "
                "unset LOCAL_RANK and LOCAL_WORLD_SIZE on all ranks, and they are found out; if these are containers "
                "that are nodes of their own, set GROUP_RANK to the number of the node in each"
            )
            return dict.fromkeys(nodes, problem)
        table[name] = {
            "node_rank": number,
            "node_count": len(nodes),
            "local_ranks": dict(zip(ranks, local_ranks, strict=True)),
        }
    return table
