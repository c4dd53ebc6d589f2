"""The drawings of docs/architecture.md and the table of CONTRIBUTING.md name existing code and real calls."""

import ast
import re
from pathlib import Path

import pytest

import check_layers

ROOT = Path(__file__).resolve().parents[2]

PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS, STEP = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
NODES = dict(re.findall(r'(\w+)\["(.+?)"\]', STEP))


def definition(place: str) -> ast.AST:
    file, _, name = place.partition(": ")
    node: ast.AST = ast.parse((ROOT / "zeromesh" / file).read_text())
    for part in name.split("."):
        node = next(child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part)
    return node


def test_the_rooms_and_their_arrows_are_those_of_the_code() -> None:
    assert check_layers.drawing(ROOT) == ROOMS, "run python tools/check_layers.py --draw"
    nevers = {
        room: set(re.findall(r"`(\w+)`", row))
        for room, row in re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
    }
    assert nevers == {room: set(others) for room, others in check_layers.NEVERS.items()}


@pytest.mark.parametrize("place", sorted(NODES.values()))
def test_a_place_of_the_step_exists(place: str) -> None:
    assert isinstance(definition(place), ast.FunctionDef)


@pytest.mark.parametrize(
    ("caller", "called"), re.findall(r"(\w+)(?:\[.+?\])? --> (\w+)\[", STEP), ids=lambda name: str(NODES.get(name))
)
def test_a_solid_arrow_is_a_call(caller: str, called: str) -> None:
    name = NODES[called].rpartition(": ")[2].rpartition(".")[2]
    used = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(definition(NODES[caller]))}
    assert name in used, f"{NODES[caller]} does not call {NODES[called]}"


def test_files_and_functions_in_the_table_of_contributions_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"`((?:zeromesh|tools|docs|tests)/[\w./-]+)`(?: \(((?:`\w+`(?:, )?)+)\))?", text)
    assert len(rows) > 15
    for file, names in rows:
        path = ROOT / file
        assert path.exists(), file
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(class |def |){name}\b", path.read_text(), re.MULTILINE), f"{file} has no {name}"
