"""The committed pictures are what their scripts draw, and flowcharts keep their nodes and arrows."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from harness import pretended_rank
from pictures import canvas, concepts, flowchart, mixtures
from zeromesh.comm.mesh import Mesh

ROOT = Path(__file__).resolve().parents[2]
SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", concepts.PICTURES)
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == concepts.PICTURES[name]()


@pytest.mark.parametrize("name", concepts.PICTURES)
def test_text_and_boxes_stay_on_the_sheet_at_a_size_that_a_phone_can_show(name: str) -> None:
    root = ElementTree.fromstring(concepts.PICTURES[name]())
    _, _, width, height = map(float, root.get("viewBox", "").split())
    assert width == canvas.WIDTH <= 390
    for box in root.iter(f"{SPACE}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height
    for text in root.iter(f"{SPACE}text"):
        assert float(text.get("font-size", 0)) >= 10
        assert float(text.get("y", 0)) <= height
        size = float(text.get("font-size", 0)) * len(text.text or "") / 2  # as most fonts have it
        assert float(text.get("x", 0)) + size * (text.get("text-anchor") == "start") <= width, text.text


def test_placement_follows_the_table_of_stages() -> None:
    root = ElementTree.fromstring(concepts.placement())
    colours = [box.get("fill") for box in root.iter(f"{SPACE}rect") if float(box.get("width", 0)) == 66]
    # Of four stages, on four ranks: three states whole, then two, one, none; each box also has its background.
    assert sum(colour != canvas.GREY for colour in colours) == 4 * (3 + 2 + 1)


def test_groups_of_experts_are_those_of_a_mesh_of_eight_ranks() -> None:
    sizes = mixtures.SIZES | {"expert": mixtures.EXPERT_RANKS}
    for rank in range(8):
        with pretended_rank(rank, 8):
            mesh = Mesh(sizes, torch.device("cpu"))
        places = mixtures.places(rank)
        assert {axis: mesh.group(axis).rank for axis in places} == places


def test_a_flowchart_has_every_box_and_every_arrow_of_its_text() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for text in re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL):
        groups = flowchart._parse(text)
        named = {name: label for _, labels, _ in groups for name, label in labels.items()}
        assert named == dict(re.findall(r'(\w+)\["(.+?)"\]', text))
        arrows = {(start, end) for _, _, found in groups for start, end, _ in found}
        stripped = re.sub(r'\[".+?"\]', "", text)
        written = set()
        for line in stripped.splitlines():
            nodes = re.split(r"\s*(?:-->|-\.->)\s*", line.strip())
            written |= {(a, b) for a, b in pairwise(nodes) if a in named and b in named}
        assert arrows == written
        figure = flowchart.figure(text)
        assert figure.count("<line ") == len(arrows)
        assert figure.count("<rect ") == len(named)
        assert "\n\n" not in figure  # Markdown would end the block there
