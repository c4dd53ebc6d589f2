"""Mistakes in what a plan is asked of a machine."""

from __future__ import annotations

import json

from mistakes import Mistake

ASK = "zeromesh plan gpt2 --batch 8 --sequence 1024"
LINK = {"bandwidth": 5e10, "latency": 5e-6}
DEVICE = {"name": "a card", "memory": 80e9, "flops": {"bf16": 9e14}, "bandwidth": 3e12}
NODE = {
    "count": 1,
    "device": DEVICE,
    "devices": 8,
    "inside": LINK,
    "host": LINK,
    "host_memory": 1e12,
    "host_bandwidth": 3e11,
    "cores": 64,
}


def machine(**changes: object) -> str:
    """Return the text of a machine's file, with changes of its node."""
    return json.dumps({"format": 1, "between": LINK, "nodes": [{**NODE, **changes}]})


MISTAKES = [
    Mistake("a GPU with a typo", f"{ASK} --gpu h10O", ("'h10O' is no known GPU; did you mean h100?",)),
    Mistake("a GPU that does not exist", f"{ASK} --gpu h900", ("is no known GPU", "machine.json")),
    Mistake("a link with a typo", f"{ASK} --gpu h100 --inside nvlnk4", ("did you mean nvlink4?",)),
    Mistake("a link without a unit", f"{ASK} --gpu h100 --nodes 2 --between 100", ("is no known link", '"25 Gbit"')),
    Mistake("a link of no speed", f"{ASK} --gpu h100 --nodes 2 --between '0 Gbit'", ("give a speed above 0",)),
    Mistake("a node with a typo", f"{ASK} --node dgx-h10", ("is no known node; did you mean dgx-h100?",)),
    Mistake("more GPUs than a node has", f"{ASK} --gpu h100 --gpus 16", ("more than the 8 of dgx-h100", "more nodes")),
    Mistake("a host's memory in bytes", f"{ASK} --gpu h100 --host-memory 2e12", ("GB to --host-memory",)),
    Mistake("a host's memory that is negative", f"{ASK} --gpu h100 --host-memory=-5", ("host_memory is -5",)),
    Mistake(
        "a card's memory in GB in a machine's file",
        f"{ASK} --machine machine.json",
        ("nodes[0].device.memory is 80", "bytes", "80e9"),
        {"machine.json": machine(device={**DEVICE, "memory": 80})},
    ),
    Mistake(
        "a key with a typo in a machine's file",
        f"{ASK} --machine machine.json",
        ("nodes[0].core is 64, but there is no such key; did you mean cores?",),
        {"machine.json": machine(core=64)},
    ),
    Mistake(
        "a link of no bandwidth in a machine's file",
        f"{ASK} --machine machine.json",
        ("nodes[0].inside.bandwidth is 0, but must be a number above 0",),
        {"machine.json": machine(inside={**LINK, "bandwidth": 0})},
    ),
]
