"""Step time and bytes over the rate of the link between two hosts: ``make bench-links``, or

    python benchmarks/links.py --rates 10mbit 100mbit unlimited --rounds 2

The hosts are network namespaces on this machine, with two ranks each; see ``tests/support/hosts.py``. At each rate all
rows take turns, round by round, and each round begins with another one. Where namespaces are not permitted, the
stand-in for them is measured, which sees the messages of ZeroMesh only: torch's rows then say so. The figures go to one
JSON file, and from there to a page and a picture; see ``links_page.py``.

The exit status is 1 if a row of ZeroMesh failed, or its losses are not those of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import commit, free_name, machine, positive
from cases import make_model
from harness import RankFailure
from hosts import Hosts, bits_per_second
from links_page import differing, write
from links_rows import CASE, HOSTS, RANKS, ROWS, measure

ROOT = Path(__file__).resolve().parents[1]
UNLIMITED = "unlimited"
RATES = ["10mbit", "30mbit", "100mbit", "300mbit", "1000mbit", UNLIMITED]
UNSEEN = "needs hosts that are network namespaces: the stand-in for them does not see what torch sends"


def rate(text: str) -> str:
    """A rate of the command line."""
    try:
        bits_per_second(None if text == UNLIMITED else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; or {UNLIMITED}") from None
    return text


def steps_at(rate: str) -> int:
    """How many steps are measured: fewer where they take seconds."""
    return 10 if rate == UNLIMITED else max(2, min(10, round((bits_per_second(rate) or 0.0) / 2e7)))


def compare(
    hosts: Hosts, names: Sequence[str], rates: Sequence[str], rounds: int, limit: float = 600.0
) -> Iterator[dict[str, Any]]:
    """The results so far, after each round.

    Args:
        hosts: ``HOSTS`` hosts with ``RANKS`` ranks each.
        names: of ``ROWS``.
        rates: of the link.
        rounds: how often each row runs at each rate.
        limit: seconds that one row may take at one rate.
    """
    began = time.monotonic()
    rows: dict[str, Any] = {
        name: {
            "link": ROWS[name].link,
            "tolerance": ROWS[name].tolerance,
            "rates": {at: [] for at in rates},
            "error": None,
        }
        for name in names
    }
    for name in names:
        if hosts.kind != "namespaces" and ROWS[name].family == "torch":
            rows[name]["error"] = UNSEEN
    result = {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), "kind": hosts.kind,
        "load": os.getloadavg()[0], "cores": os.cpu_count(),
        "parameters": sum(parameter.numel() for parameter in make_model(CASE).parameters()),
        "layers": CASE.layers, "hidden": CASE.hidden, "torch": torch.__version__, "rows": rows,
    }  # fmt: skip
    for number in range(rounds):
        first = number % len(names)
        for at in rates:
            hosts.set_rate(None if at == UNLIMITED else at)
            for name in [*names[first:], *names[:first]]:
                if rows[name]["error"] is None:
                    told = turn(hosts, name, at, limit, rows[name])
                    minutes = (time.monotonic() - began) / 60
                    print(f"[round {number + 1} of {rounds}, {minutes:.0f} min] {at}: {name}: {told}", flush=True)
        yield {**result, "rounds": number + 1}


def turn(hosts: Hosts, name: str, rate: str, limit: float, row: dict[str, Any]) -> str:
    """One round of one row goes into it: the slowest rank's seconds, each host's bytes, and the losses of rank 0."""
    try:
        found = hosts.run(measure, name, steps_at(rate), timeout=limit)
    except RankFailure as error:
        row["error"] = str(error).replace(f"{ROOT}{os.sep}", "")
        return "failed"
    figures = {
        "seconds": max(figures["seconds"] for figures in found),
        "sent": [found[host * RANKS]["sent"] for host in range(HOSTS)],
        "losses": found[0]["losses"],
    }
    row["rates"][rate].append(figures)
    return f"{figures['seconds']:.3f} s per step"


def main() -> None:
    """Read the command line, measure, and write the results after each round, so that an interruption keeps them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=rate, nargs="+", default=RATES, metavar="RATE", help=", ".join(RATES))
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW", help="; ".join(ROWS)
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds that one row may take at one rate")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for page and figures")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the ranks are ended, too
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = free_name(arguments.out, f"{time.strftime('%Y-%m-%d')}-links")
    with Hosts(HOSTS, RANKS) as hosts:
        for result in compare(hosts, arguments.rows, arguments.rates, arguments.rounds, arguments.limit):
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"the figures are in {path}, the page in {write(path)}")
    bad = [
        f"{name}: {row['error'] or 'its losses differ from those of the others'}"
        for name, row in result["rows"].items()
        if ROWS[name].family == "ZeroMesh" and (row["error"] is not None or differing(result, name))
    ]
    sys.exit("\n".join(bad) or 0)


if __name__ == "__main__":
    main()
