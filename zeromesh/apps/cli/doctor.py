"""``zeromesh doctor``: what the machines of a run have, how fast it is, and what is wrong, as tables or as JSON."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zeromesh.apps.cli.machine_file import check_target, save_machine, speeds_of_rank
from zeromesh.apps.launch.launch import RankFailure, default_ranks, launch
from zeromesh.apps.train.screen import make_console, write
from zeromesh.base.machine import inventory, problems
from zeromesh.base.requirements import untested_torch
from zeromesh.base.words import bytes_text, counted, some
from zeromesh.comm.agreement import texts, world_group
from zeromesh.comm.environment import (
    Environment,
    StartError,
    available_backends,
    backends,
    default_backend,
    device_of_group,
    init_distributed,
    require_backend,
    shutdown,
)
from zeromesh.comm.launchers import MPI
from zeromesh.comm.link_speeds import SPEED, measure, mesh_of_nodes

FORMAT = 2  # of the JSON document; it grows when a key goes or changes its meaning
START_SECONDS = 10.0  # that ranks wait for each other, unless ZEROMESH_START_TIMEOUT is set
SLOW = 4.0  # a link that is so many times slower than the median of its kind is a problem

Problem = dict[str, str]


def doctor(folder: Path, ranks: int, as_json: bool, save: Path | None = None) -> bool:
    """Examine this machine, or all ranks of a launcher, and show it on rank 0; return whether nothing is wrong.

    With ``save``, products and kernels are measured too, and the file is written for the planner.

    Raises:
        ValueError: ``save`` cannot be written.
    """
    if save is not None:
        check_target(save)
    report: dict[str, Any] = {"format": FORMAT, "environment": None, "backends": [], "nodes": [], "links": None}
    issues: list[Problem] = []
    environment: Environment | None = None
    try:
        environment = Environment.detect()
    except ValueError as error:
        issues.append({"problem": str(error), "remedy": "set or unset the variables as said"})
    report["environment"] = environment and asdict(environment)
    with _progress(environment) as say:
        say("looking for backends")
        report["backends"] = _backends(environment)
        measured = "links" if save is None else "links, products, kernels and the disk, in about 20 seconds"
        disk = None if save is None else folder
        ranks = ranks if save is None else max(ranks, default_ranks())  # the links join all accelerators
        alone = environment is not None and environment.world_size == 1
        if alone and ranks > 1:
            # First, as this process holds memory of each accelerator once it has asked for its size.
            say(f"starting {counted(ranks, 'rank')} and measuring their {measured}")
            report |= _local_links(ranks, disk, issues)
        say("measuring memory and disk")
        # Once on each node: ranks that measured at the same time would share its memory and disk.
        local_facts = inventory(folder) if environment is None or environment.local_rank == 0 else None
        if environment is not None and not alone:
            say(f"measuring {measured}")
            report |= _of_all_ranks(environment, local_facts, disk, issues)
        elif alone and ranks == 1 and save is not None:
            say("measuring products, kernels and the disk, in about 10 seconds")
            report["speeds"] = [speeds_of_rank(None, folder)]
        report["nodes"] = report["nodes"] or ([local_facts] if local_facts else [])
    speeds, node_of = report.pop("speeds", []), report.pop("node_of", None)
    issues += _wrong_with(report)
    report["problems"] = issues
    if environment is not None and environment.rank > 0:
        return not issues  # rank 0 shows what all have found
    if save is not None and speeds:
        for line in save_machine(save, report["nodes"], node_of or [0] * len(speeds), speeds, report["links"]):
            print(f"{line}; measure again when the machine is idle", file=sys.stderr)
    if as_json:
        write(json.dumps(report, indent=2) + "\n")
    else:
        _show(report)
    if save is not None:
        print(f"{save}: {'written' if speeds else 'not written, as the speeds are unknown'}", file=sys.stderr)
    return not issues


def _backends(environment: Environment | None) -> list[dict[str, Any]]:
    """Return each backend, and what it lacks to be usable here; ``auto`` marks the default."""
    chosen = None if environment is None else default_backend(environment)
    rows = []
    for name in dict.fromkeys(["gloo", "nccl", "mpi", *available_backends()]):
        try:
            require_backend(name)
            missing = ""
        except (RuntimeError, ImportError) as error:
            missing = str(error)
        rows.append({"name": name, "usable": not missing, "missing": missing, "auto": name == chosen})
    return rows


def _of_all_ranks(
    environment: Environment, local_facts: dict[str, Any] | None, disk: Path | None, issues: list[Problem]
) -> dict[str, Any]:
    """Return the facts that need all ranks: the machines of all nodes, and the links; with ``disk`` all speeds."""
    # Shorter than usual: a rank that does not come is what this command is to find out.
    waits = None if "ZEROMESH_START_TIMEOUT" in os.environ else timedelta(seconds=START_SECONDS)
    try:
        environment = init_distributed(environment=environment, start_timeout=waits)
        device = device_of_group(environment)
        mine = [local_facts if environment.local_rank == 0 else None, environment.node_rank]
        said = [json.loads(text) for text in texts(world_group(device), json.dumps(mine))]
        node_of = [node for _, node in said]
        more: dict[str, Any] = {"links": _links(environment, device, node_of)}
        if disk is not None:
            more |= {"speeds": _speeds(environment, device, disk), "node_of": node_of}
    except (StartError, ValueError) as error:
        issues.append({"problem": str(error), "remedy": "see the message, and what the other ranks say"})
        if environment.rank > 0:  # rank 0 may not be there to say it
            print(f"rank {environment.rank} on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        return {}
    finally:
        shutdown()  # torch warns of a group that is still there at the end
    nodes = [facts for facts, _ in said if facts is not None]
    return {"environment": asdict(environment), "nodes": nodes} | more


def _local_links(ranks: int, disk: Path | None, issues: list[Problem]) -> dict[str, Any]:
    """Return the links between ranks that are started on this machine; with ``disk`` all speeds."""
    try:
        result: dict[str, Any] = launch(_measure_here, ranks, disk)[0]
        return result
    except RankFailure as error:
        issues.append({"problem": f"{counted(ranks, 'rank')} here: {error.summary}", "remedy": "see the message"})
        return {}


def _measure_here(disk: Path | None = None) -> dict[str, Any]:
    environment = init_distributed(start_timeout=timedelta(seconds=6 * START_SECONDS))
    device = device_of_group(environment)
    facts: dict[str, Any] = {"links": _links(environment, device, [0] * environment.world_size)}
    return facts if disk is None else facts | {"speeds": _speeds(environment, device, disk)}


def _speeds(environment: Environment, device: torch.device, disk: Path) -> list[dict[str, Any]]:
    """Return the times of all ranks, by rank. Collective."""
    world = world_group(device)
    local_speeds = speeds_of_rank(world, disk if environment.local_rank == 0 else None, environment.local_rank)
    return [json.loads(text) for text in texts(world, json.dumps(local_speeds))]


def _links(environment: Environment, device: torch.device, node_of: list[int]) -> dict[str, Any]:
    return measure(mesh_of_nodes(environment, device), node_of) | {"backend": backends()[device.type]}


def _wrong_with(report: Mapping[str, Any]) -> list[Problem]:
    issues = []
    several = len(report["nodes"]) > 1
    for node in report["nodes"]:
        where = f"{node['host']}: " if several else ""
        issues += [row | {"problem": where + row["problem"]} for row in problems(node)]
    environment = report["environment"]
    mpi = next(row for row in report["backends"] if row["name"] == "mpi")
    if environment and environment["launcher"] in MPI and not mpi["usable"]:
        issues.append({"problem": "MPI started the ranks, and cannot be their backend", "remedy": mpi["missing"]})
    node = report["nodes"][0] if report["nodes"] else None
    here = environment["local_world_size"] if environment else 1
    if node and node["devices"] and here > len(node["devices"]):
        issues.append(
            {
                "problem": f"this node has {counted(here, 'rank')}, and {counted(len(node['devices']), 'device')}",
                "remedy": "start as many ranks as devices, or use the backend gloo",
            }
        )
    return issues + _slow_links(report["links"])


def _slow_links(links: Mapping[str, Any] | None) -> list[Problem]:
    issues = []
    for where in ("within nodes", "across nodes"):
        pairs = [pair for pair in (links or {}).get("pairs", ()) if pair["where"] == where and pair[SPEED] is not None]
        if len(pairs) < 3:
            continue  # the median of two says nothing about either
        usual, slowest = statistics.median(pair[SPEED] for pair in pairs), min(pairs, key=lambda pair: pair[SPEED])
        if slowest[SPEED] * SLOW < usual:
            first, second = slowest["ranks"]
            issues.append(
                {
                    "problem": f"the link between ranks {first} and {second} moves {bytes_text(slowest[SPEED])}/s, and "
                    f"the median {where} is {bytes_text(usual)}/s",
                    "remedy": "see what else uses these machines, their cables and network interfaces; "
                    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME chooses the interface",
                }
            )
    return issues


@contextmanager
def _progress(environment: Environment | None) -> Iterator[Any]:
    """Show the current step, where stderr is a terminal."""
    quiet = environment is not None and environment.rank > 0
    with Console(stderr=True, quiet=quiet).status("starting") as status:
        yield lambda text: status.update(text)


def _show(report: Mapping[str, Any]) -> None:
    console = make_console()
    environment = report["environment"]
    if environment:
        _table(console, "this process", ("", ""), [(k.replace("_", " "), str(v)) for k, v in environment.items()])
    rows = [
        (row["name"] + (" (auto)" if row["auto"] else ""), row["missing"] or "usable") for row in report["backends"]
    ]
    _table(console, "backends", ("", ""), rows)
    for node in report["nodes"]:
        _show_node(console, node)
    if report["links"]:
        _show_links(console, report["links"])
    if not report["problems"]:
        console.print("no problems found")
    for number, row in enumerate(report["problems"], 1):
        console.print(f"problem {number}: {row['problem']}\n  remedy: {row['remedy']}")


def _show_node(console: Console, node: Mapping[str, Any]) -> None:
    versions, cores, have, disk = node["versions"], node["processor"], node["memory"], node["disk"]
    rows = [(name, versions[name] or "not installed") for name in ("zeromesh", "torch", "python")]
    if notice := untested_torch(versions["torch"]):
        rows.append(("", notice))
    rows += [(name, row["version"] or f"not installed: {row['install']}") for name, row in versions["packages"].items()]
    _table(console, f"versions on {node['host']}", ("", ""), rows)
    rows = [
        (
            f"{row['type']}:{row['index']}",
            f"{row['name'] or ''}, {_bytes(row['memory_bytes'])}, {_bytes(row['free_bytes'])} free",
        )
        for row in node["devices"]
    ]
    instructions = ", ".join(cores["instructions"]) or "none of those that matter"
    rows += [
        ("processor", f"{cores['model']}, {counted(cores['cores'], 'core')}"),
        ("instructions", instructions),
        ("update on the host", node["kernels"]["instructions"] or node["kernels"]["missing"]),
        ("memory", f"{_bytes(have['total_bytes'])}, {_bytes(have['available_bytes'])} available"),
        ("memory limit", "none" if have["limit_bytes"] is None else _bytes(have["limit_bytes"])),
        ("memory copies", f"{_bytes(have[SPEED])}/s read and written"),
        ("/dev/shm", f"{_bytes(have['shared_bytes'])}, {_bytes(have['shared_free_bytes'])} free"),
        ("disk", f"{disk['folder']}: {_bytes(disk['free_bytes'])} free"),
        ("disk writes", f"{_bytes(disk['write_bytes_per_second'])}/s, synced"),
        ("disk reads", f"{_bytes(disk['read_bytes_per_second'])}/s, once the system has forgotten the file"),
    ]
    _table(console, f"machine {node['host']}", ("", ""), rows)


def _show_links(console: Console, links: Mapping[str, Any]) -> None:
    rows = [
        (row["axis"], row["where"], str(row["ranks"]), _speed(row[SPEED]), _time(row["latency_seconds"]))
        for row in links["axes"]
    ]
    headings = ("all-gather along", "where", "ranks", "received per rank", "latency")
    _table(console, f"links, backend {links['backend']}", headings, rows)
    slowest = links["slowest_pair"]
    if slowest is not None:
        first, second = slowest["ranks"]
        console.print(
            f"slowest pair: ranks {first} and {second}, {slowest['where']}: {_speed(slowest[SPEED])} one way, "
            f"latency {_time(slowest['latency_seconds'])}\n"
        )
    reasons: dict[str, list[str]] = {}
    for axis in links["axes"]:
        reasons.setdefault(axis["unknown"], []).append(f"all-gather along {axis['axis']}")
    for pair in links["pairs"]:
        reasons.setdefault(pair["unknown"], []).append("ranks {} and {}".format(*pair["ranks"]))
    for reason, names in reasons.items():
        if reason:
            console.print(f"bandwidth unknown: {some(names)}: {reason}\n")


def _table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _bytes(count: float | None) -> str:
    return "unknown" if count is None else bytes_text(count)


def _speed(rate: float | None) -> str:
    return "unknown" if rate is None else f"{bytes_text(rate)}/s"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
