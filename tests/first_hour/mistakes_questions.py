"""Mistakes in a question to the planner."""

from __future__ import annotations

import json

from mistakes import Mistake

GPU = "--gpu rtx-4090 --gpus 1"

MISTAKES = [
    Mistake(
        "an unknown model",
        f"zeromesh plan lama-3.1-8b {GPU}",
        ("'lama-3.1-8b' is no file, folder or known model; did you mean llama-3.1-8b", "zeromesh plan --list"),
    ),
    Mistake(
        "a model without its size",
        f"zeromesh plan qwen2.5 {GPU}",
        ("did you mean qwen2.5-0.5b or qwen2.5-1.5b",),
    ),
    Mistake("a size without its unit", f"zeromesh plan 7 {GPU}", ("did you mean 7b?",)),
    Mistake(
        "adapters on a network of convolutions",
        f"zeromesh plan resnet-50 --lora 8 {GPU}",
        ("--lora and --qlora are for language models, and resnet-50 is a ResNetForImageClassification",),
    ),
    Mistake(
        "tokens that are no number",
        f"zeromesh plan 7b --tokens many {GPU}",
        ("--tokens is 'many'; give the tokens of the whole training, such as 1e9, 300M or 1.5T",),
    ),
    Mistake(
        "the cheapest layout without a price",
        f"zeromesh plan 7b --goal cost {GPU}",
        ("--goal cost compares prices; give the price of a node per hour with --price",),
    ),
    Mistake(
        "a folder without a model",
        f"zeromesh plan here {GPU}",
        ("the folder 'here' has no config.json", "it has ds_config.json: name that file if it is a configuration"),
        {"here/ds_config.json": "{}"},
    ),
    Mistake("no GPU at all", "zeromesh plan 7b --gpu rtx-4090 --gpus 0", ("--gpus", "greater than or equal to 1")),
    Mistake(
        "adapters beside a configuration that says what it trains",
        f"zeromesh plan mine.json --qlora {GPU}",
        ("mine.json says itself whether it trains adapters; leave out --lora and --qlora",),
        {"mine.json": json.dumps({"train_batch_size": 8, "model": {"hidden_size": 32, "layers": 2, "heads": 2}})},
    ),
    Mistake(
        "a link of a machine that is not named",
        "zeromesh plan 7b --inside nvlink4",
        ("--inside, --between and --host-memory change a machine that is named; name its GPU with --gpu",),
    ),
    Mistake(
        "tokens of an image",
        f"zeromesh plan vit-base --sequence 197 {GPU}",
        ("vit-base takes images, which have no tokens; leave out --sequence",),
    ),
    Mistake(
        "a text longer than the positions",
        f"zeromesh plan bert-base --sequence 4096 {GPU}",
        ("a sequence of 4096 tokens is longer than the 512 that bert-base has positions for",),
    ),
]
