"""Client states of many types come back equal; manifests that were altered, and hashed anew, are refused."""

import argparse
import datetime
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from compare import assert_same
from harness import on_ranks, run_ranks
from manifests import boxes_in, content_of, sign
from runs import config, start, train

STATE: dict[str, Any] = {
    "tensor": torch.arange(6.0).view(2, 3),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "one": torch.tensor([2.5], dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "array": numpy.arange(4, dtype=numpy.int64).reshape(2, 2),
    "column": numpy.arange(9.0).reshape(3, 3)[:, 1],
    "number": numpy.float32(0.1),
    "double": numpy.float64(0.1),
    "moment": numpy.datetime64("2026-11-24T03:00:00.123456789", "ns"),
    "span": numpy.timedelta64(5, "ns"),
    "letters": numpy.str_("ab"),
    "set": {1, 2},
    "frozen": frozenset({("a", 1)}),
    "bytes": b"\x00\xff",
    "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
    "day": datetime.date(2026, 1, 2),
    "took": datetime.timedelta(days=1, microseconds=3),
    "arguments": argparse.Namespace(lr=0.1, betas=(0.9, 0.99), device=None),
    "simple": SimpleNamespace(a=1),
    "path": Path("somewhere") / "else",
    "complex": 1 + 2j,
    "by number": {1: "x", (2, 3): [None, True]},
    "inf": [float("inf"), -float("inf")],
    "nested": {"deep": [{"t": torch.arange(3)}]},
    "__tuple__": "a mark",
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            type(one) is type(other) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(one.dtype == other.dtype and (one == other).all())
    return bool(type(one) is type(other) and one == other)


def keeps(folder: str) -> None:
    engine = start(1, config(3))
    engine.save_checkpoint(folder, client_state=STATE)
    _, found = engine.load_checkpoint(folder)
    for key, value in STATE.items():
        assert same(found[key], value), (key, found[key])
    with pytest.raises(
        TypeError, match=r"client_state\['a'\]\[1\]\['b'\] is a function, which a checkpoint cannot hold"
    ):
        engine.save_checkpoint(folder, client_state={"a": [1, {"b": keeps}]})
    with pytest.raises(TypeError, match=r"client_state\['words'\] is a ndarray of <U1"):
        engine.save_checkpoint(folder, client_state={"words": numpy.array(["a"])})
    for none in ("", None):
        with pytest.raises(ValueError, match="save_dir is .*; pass the folder"):
            engine.save_checkpoint(none)  # type: ignore[arg-type]


def test_client_states_come_back_as_they_were(tmp_path: Path) -> None:
    run_ranks(keeps, 2, str(tmp_path))


def swap_states(manifest: dict[str, Any]) -> None:
    one, other = (next(box for box in boxes_in(manifest) if box["name"] == f"optimizer/exp_avg/blocks.0.{name}")
                  for name in ("weight", "bias"))  # fmt: skip
    one["name"], other["name"] = other["name"], one["name"]


def repeat(manifest: dict[str, Any]) -> None:
    manifest["ranks"][0]["boxes"].append(dict(manifest["ranks"][0]["boxes"][0]))


def lengthen(manifest: dict[str, Any]) -> None:
    boxes_in(manifest)[0]["stop"] += 7


def move(manifest: dict[str, Any]) -> None:
    boxes_in(manifest)[0]["start"] = -3


def retype(manifest: dict[str, Any]) -> None:
    box = next(box for box in boxes_in(manifest) if box["name"] == "optimizer/exp_avg_sq/blocks.0.weight")
    box["dtype"] = manifest["tensors"][box["name"]]["dtype"] = "int64"


def untype(manifest: dict[str, Any]) -> None:
    boxes_in(manifest)[0]["dtype"] = "load"


CHANGES: dict[Callable[[dict[str, Any]], None], str] = {
    swap_states: r"optimizer/exp_avg/blocks.0.(bias|weight) has another shape or dtype than in manifest.json",
    repeat: r"bytes of another box",
    lengthen: r"describes a box that cannot be",
    move: r"boxes.0.start is '-3'",
    retype: r"exp_avg_sq/blocks.0.weight in .* is torch.int64 of shape",
    untype: r"boxes.0.dtype is 'load'",
}


@on_ranks(1)
def test_altered_manifests_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = str(tmp_path)
    root = Path(folder)
    engine = start(1, config(0, mesh="1"))
    train(engine, 1)
    engine.save_checkpoint(root, tag="tag")
    written = content_of(root / "tag")
    train(engine, 1)
    before = engine.gathered_state_dict()
    for change, message in CHANGES.items():
        manifest = deepcopy(written)
        change(manifest)
        sign(root / "tag", manifest)
        with pytest.raises(ValueError, match=message):
            engine.load_checkpoint(root, "tag")
        assert_same(engine.gathered_state_dict(), before)
    sign(root / "tag", written)
    engine.load_checkpoint(root, "tag")
    train(engine, 1)
