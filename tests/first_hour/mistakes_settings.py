"""Mistakes in a configuration."""

from __future__ import annotations

import json

from mistakes import Mistake

MISTAKES = [
    Mistake(
        "a key with a typo",
        "zeromesh config config.json",
        ("train_batchsize is not a known key; did you mean train_batch_size?",),
        {"config.json": json.dumps({"train_batchsize": 8})},
    ),
]
