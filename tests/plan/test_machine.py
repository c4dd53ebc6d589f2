import copy
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from zeromesh.apps.plan.machine.cluster import FORMAT, Device, LinkSpeed, Machine, Node
from zeromesh.apps.plan.machine.presets import LINKS, NODES
from zeromesh.base.devices import ACCELERATORS
from zeromesh.config.errors import ConfigError

DEVICE = Device("card", 80e9, {"bf16": 100e12, "fp32": 10e12}, 2e12, 0.5, 0.8, 1e-6, product_padding=0.0)
LINK = LinkSpeed(300e9, 2e-6)
FAST = Node(DEVICE, 8, LINK, LinkSpeed(25e9, 5e-6, shared=2), 1e12, 2e11, 64, 10e9, 5e9, 8e12, "fast", 30.0)
SLOW = Node(Device("old", 16e9, {"fp16": 50e12}, 9e11), 4, LINK, LINK, 1e11, 5e10, 16)
MIXED = Machine(((FAST, 2), (SLOW, 3)), LinkSpeed(12.5e9, 3e-5, 0.9, 8), "mixed", ("a note",))


def test_a_machine_of_different_nodes_is_the_same_after_it_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    MIXED.save(path)
    assert Machine.load(path) == MIXED
    assert MIXED.devices == 2 * 8 + 3 * 4
    MIXED.save(path)  # replaces the file
    assert [item.name for item in tmp_path.iterdir()] == ["machine.json"]


def test_fields_with_a_default_may_be_left_out() -> None:
    document = MIXED.as_dict()
    del document["name"], document["notes"], document["between"]["efficiency"], document["nodes"][1]["device"]["launch"]
    read = Machine.from_dict(document)
    assert (read.name, read.notes, read.between.efficiency) == ("", (), 0.8)
    assert read.nodes[1][0].device.launch == 4e-6


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the document of ``MIXED`` with one value replaced, or taken out for ``...``."""
    document = copy.deepcopy(MIXED.as_dict())
    *inner, last = path.split("/")
    place: Any = document
    for key in inner:
        place = place[int(key) if key.isdigit() else key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("nodes/0/devices", 0, ("nodes[0].devices is 0", "whole number from 1 on")),
        ("nodes/0/devices", 2.5, ("nodes[0].devices is 2.5", "whole number")),
        ("nodes/0/devices", True, ("nodes[0].devices is true", "whole number")),
        ("nodes/1/count", ..., ("nodes[1].count is missing", "whole number", "zeromesh doctor --save")),
        ("nodes/0/device/memory", -1, ("nodes[0].device.memory is -1", "above 0")),
        ("nodes/0/device/memory", 10**400, ("nodes[0].device.memory is 1000", "above 0")),
        ("nodes/0/device/bandwidth", float("nan"), ("nodes[0].device.bandwidth is NaN", "above 0")),
        ("nodes/0/device/flops", {}, ("nodes[0].device.flops is {}", "by dtype")),
        ("nodes/0/device/flops", {"bf17": 1.0}, ("nodes[0].device.flops.bf17 is 1.0", "no such dtype", "bf16")),
        ("nodes/0/device/flops/bf16", 0, ("nodes[0].device.flops.bf16 is 0", "above 0")),
        ("nodes/0/inside/efficiency", 1.2, ("nodes[0].inside.efficiency is 1.2", "at most 1")),
        ("nodes/0/inside", 3, ("nodes[0].inside is 3", "an object with at least bandwidth, latency")),
        ("nodes/0/host", ..., ("nodes[0].host is missing", "an object")),
        ("nodes/0/price", -5.0, ("nodes[0].price is -5.0", "0 or a number above")),
        ("nodes/0/host_memroy", 1.0, ("nodes[0].host_memroy is 1.0", "did you mean host_memory?")),
        ("nodes/0/name", 7, ("nodes[0].name is 7", "must be text")),
        ("nodes", [], ("nodes is []", "a list")),
        ("between/bandwidth", "50 GB/s", ('between.bandwidth is "50 GB/s"', "above 0")),
        ("between/latency", float("inf"), ("between.latency is Infinity", "above it")),
        ("notes", "a", ('notes is "a"', "list of texts")),
        ("format", "1", ('format is "1"', "must be 1")),
        ("format", ..., ("format is missing",)),
        ("format", FORMAT + 1, (f"format is {FORMAT + 1}", "upgrade zeromesh")),
    ],
)
def test_a_wrong_value_is_named_with_its_path_rule_and_remedy(path: str, value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        Machine.from_dict(changed(path, value))
    assert len(error.value.problems) == 1
    for word in words:
        assert word in error.value.problems[0]


def test_all_problems_of_a_file_come_together(tmp_path: Path) -> None:
    document = changed("nodes/0/cores", -3)
    document["nodes"][1]["device"]["memory"] = "16 GB"
    del document["between"]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="has 3 problems") as error:
        Machine.load(path)
    for words in ("nodes[0].cores is -3", 'nodes[1].device.memory is "16 GB"', "between is missing"):
        assert words in str(error.value)


def test_paths_and_texts_that_are_no_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        Machine.load(tmp_path)
    with pytest.raises(ValueError, match="is a folder"):
        MIXED.save(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        Machine.load(tmp_path / "none.json")
    path = tmp_path / "machine.json"
    for text, words in (("[1]", "must be an object"), ('{"format": 1,', "is not JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            Machine.load(path)
    path.write_text(json.dumps(MIXED.as_dict()).replace('"count": 2', '"count": 2, "count": 3'))
    with pytest.raises(ValueError, match="count stands more than once"):
        Machine.load(path)


def test_an_impossible_machine_is_not_written(tmp_path: Path) -> None:
    broken = Machine(((FAST, 0),), LINK)
    with pytest.raises(ValueError, match=r"nodes\[0\].count is 0"):
        broken.save(tmp_path / "machine.json")
    assert not list(tmp_path.iterdir())


def test_a_product_takes_the_longer_of_computation_and_memory_traffic() -> None:
    # 2 x 1000^3 operations at half of 100e12 per second are 40 us; 3 x 1000^2 elements of 2 bytes are 3.75 us.
    assert DEVICE.product_seconds(1000, 1000, 1000, "bf16") == pytest.approx(1e-6 + 40e-6)
    # One row: 2e6 operations are 0.04 us; 1,002,000 elements of 2 bytes at 0.8 x 2e12 bytes/s are 1.2525 us.
    assert DEVICE.product_seconds(1, 1000, 1000, "bf16") == pytest.approx(1e-6 + 1.2525e-6)
    assert DEVICE.memory_seconds(1.6e6) == pytest.approx(1e-6 + 1e-6)


def test_padding_makes_small_and_thin_products_slower_than_their_operations() -> None:
    padded = Device("card", 80e9, {"fp32": 10e12}, 1e15, 1.0, 1.0, 0.0, product_padding=100.0)
    filled = Device("card", 80e9, {"fp32": 10e12}, 1e15, 1.0, 1.0, 0.0, product_padding=0.0, product_fill=100.0)
    assert filled.product_seconds(100, 100, 7, "fp32") == pytest.approx(2 * 2 * 100 * 100 * 7 / 10e12)
    assert padded.product_seconds(100, 100, 100, "fp32") == pytest.approx(2 * 200**3 / 10e12)
    assert padded.product_seconds(900, 900, 0, "fp32") == pytest.approx(2 * 1000 * 1000 * 100 / 10e12)


def test_a_dtype_that_the_device_does_not_have_is_refused() -> None:
    assert (DEVICE.half, SLOW.device.half, Device("cpu", 1, {"fp32": 1}, 1).half) == ("bf16", "fp16", "fp32")
    with pytest.raises(ValueError, match="old has no products in bf16, only in fp16"):
        SLOW.device.product_seconds(1, 1, 1, "bf16")


PAGE = (Path(__file__).parents[2] / "docs" / "machine.md").read_text(encoding="utf-8")


def test_the_page_describes_every_field_and_no_other() -> None:
    rows = re.findall(r"^\| `?(nodes|link|device)(?:\[\]\.|: )(.+?) \|(.*?)\|", PAGE, re.MULTILINE)
    found = {(kind, name.strip("`")): default.strip() for kind, names, default in rows for name in names.split(", ")}
    expected = {("nodes", "count"): ""}
    for kind, prefix in ((Node, "nodes"), (LinkSpeed, "link"), (Device, "device")):
        for item in fields(kind):
            named = {MISSING: "", "": "empty"}  # as the page has them
            default = "false" if item.default is False else item.default
            expected[prefix, item.name] = named.get(default, default)
    assert set(found) == set(expected)
    for key, default in expected.items():
        assert found[key] == default or float(found[key]) == default, key


def test_the_page_names_all_presets() -> None:
    names = set(re.findall(r"`([^`\n]+)`", PAGE))
    assert {*LINKS, *NODES, *(row.short for row in ACCELERATORS)} <= names
