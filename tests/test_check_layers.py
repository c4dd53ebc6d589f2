from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from harness import run_command

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "check_layers.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tree(root: Path, **files: str) -> Path:
    """A package under ``root``; the key ``shard__unit`` is the file zeromesh/shard/unit.py."""
    (root / "zeromesh").mkdir(exist_ok=True)
    (root / "zeromesh" / "__init__.py").touch()
    for key, text in files.items():
        file = root / "zeromesh" / (key.replace("__", "/") + ".py")
        file.parent.mkdir(exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    return root


def test_the_package_keeps_its_layers(tool: ModuleType) -> None:
    assert tool.check(ROOT) == []


@pytest.mark.parametrize(
    ("importing", "text", "reported"),
    [
        (
            "config__settings",
            "import zeromesh.comm.mesh",
            ":1 imports zeromesh.comm.mesh: config and comm are packages",
        ),
        (
            "shard__unit",
            "\nfrom ..optim import update",
            ":2 imports zeromesh.optim.update: shard and optim are packages",
        ),
        ("model__row", "from zeromesh.config import keys", ":1 imports zeromesh.config.keys: imports point down only"),
        ("comm__mesh", "def f():\n    import zeromesh.engine", ":2 imports zeromesh.engine: imports point down only"),
        ("comm__mesh", "from zeromesh import initialize", ":1 imports zeromesh: imports point down only"),
        (
            "optim__adam",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zeromesh.cli.main import main",
            ":3 imports zeromesh.cli.main: imports point down only",
        ),
        ("cli__main", "import zeromesh.novel.thing", ":1 imports zeromesh.novel.thing: novel is in no layer"),
        ("model__row", "from torch import distributed", ":1 imports torch.distributed: model must not import"),
        ("model__row", "import torch.distributed.tensor", ":1 imports torch.distributed.tensor: model must not import"),
    ],
)
def test_a_broken_rule_is_reported_with_its_place(
    tool: ModuleType, tmp_path: Path, importing: str, text: str, reported: str
) -> None:
    others = {
        "comm__mesh": "",
        "optim__update": "",
        "config__keys": "",
        "engine": "",
        "cli__main": "",
        "novel__thing": "",
    }
    problems = tool.check(tree(tmp_path, **(others | {importing: text})))
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"zeromesh/{importing.replace('__', '/')}.py{reported}")


def test_a_circle_of_files_is_reported(tool: ModuleType, tmp_path: Path) -> None:
    root = tree(
        tmp_path, shard__a="from zeromesh.shard import b", shard__b="from . import c", shard__c="from .a import x"
    )
    (problem,) = tool.check(root)
    assert "a circle, " in problem
    assert all(f"zeromesh.shard.{name}" in problem for name in "abc")


def test_imports_within_a_package_downwards_and_between_top_modules_are_allowed(
    tool: ModuleType, tmp_path: Path
) -> None:
    root = tree(
        tmp_path,
        model__row="import torch",
        shard__a="from zeromesh.model import row\nfrom . import b",
        shard__b="import zeromesh.model.row",
        report="from zeromesh.shard.a import b",
        engine="from zeromesh import report",
        cli__main="import zeromesh",
    )
    assert tool.check(root) == []


def test_the_command_fails_when_a_rule_is_broken(tmp_path: Path) -> None:
    good = tree(tmp_path, model__row="")
    assert run_command([sys.executable, TOOL, good]).returncode == 0
    bad = tree(good, model__row="import zeromesh.engine", engine="")
    finished = run_command([sys.executable, TOOL, bad])
    assert finished.returncode == 1
    assert "zeromesh/model/row.py:1 imports zeromesh.engine: imports point down only" in finished.stdout
