"""Mistakes in a configuration."""

from __future__ import annotations

import json

from mistakes import TINY, Mistake

TRAINED = {
    "run.json": json.dumps({"train_batch_size": 2, "model": TINY, "data": {"train": "words.txt"}, "run": {"steps": 1}}),
    "words.txt": "one two three\n" * 50,
}

MISTAKES = [
    Mistake(
        "a key with a typo",
        "zeromesh config config.json",
        ("train_batchsize is not a known key; did you mean train_batch_size?",),
        {"config.json": json.dumps({"train_batchsize": 8})},
    ),
    Mistake(
        "a key of the settings as an option",
        "zeromesh train run.json --learning-rate 0.1",
        ("No such option: --learning-rate", "--set", "optimizer.params.lr=VALUE"),
        TRAINED,
    ),
    Mistake(
        "a key outside of its section",
        "zeromesh train run.json --set steps=100",
        ("steps is not a known key; did you mean run.steps?",),
        TRAINED,
    ),
    Mistake(
        "an override without its equals sign",
        "zeromesh train run.json --set run.steps 100",
        ('--set: "run.steps" must be of the form path=value',),
        TRAINED,
        silent_about=("Traceback (most recent call last)", "data.train=DATA"),
    ),
    Mistake(
        "a pattern of files that the shell expands",
        "zeromesh train tiny words.txt more.txt",
        ("DATA is one name, and here are 2: words.txt, more.txt; name their folder, or write a pattern in quotes",),
        {**TRAINED, "more.txt": "one two three\n" * 50},
    ),
    Mistake(
        "a configuration that is empty",
        "zeromesh train run.yaml",
        ("run.yaml: is empty; write a configuration, as zeromesh init MODEL DATA does",),
        {"run.yaml": "\n"},
    ),
]
