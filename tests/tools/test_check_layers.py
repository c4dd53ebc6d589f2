import sys
from pathlib import Path

import pytest

import check_layers as tool
from harness import run_command

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "check_layers.py"


def tree(root: Path, **files: str) -> Path:
    (root / "zeromesh").mkdir(parents=True, exist_ok=True)
    (root / "zeromesh" / "__init__.py").touch()
    for key, text in files.items():
        file = root / "zeromesh" / (key.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    return root


@pytest.mark.full  # `make check` runs the tool
def test_the_package_keeps_its_layers() -> None:
    assert tool.check(ROOT) == []


# A module of each room.
MODULES = {
    "doors": "zero", "apps": "apps__plan__search", "engine": "engine__reports", "checkpoint": "checkpoint__load",
    "shard": "shard__optim__lion", "parallel": "parallel__tensor__plan", "comm": "comm__mesh",
    "config": "config__settings", "base": "base__spans",
}  # fmt: skip


@pytest.mark.parametrize(
    ("importing", "text", "reported"),
    [
        ("config__settings", "import zeromesh.comm.mesh", ":1 imports zeromesh.comm.mesh: imports point down only"),
        (
            "checkpoint__load",
            "\nfrom ..engine import pipelined",
            ":2 imports zeromesh.engine.pipelined: checkpoint never",
        ),
        ("comm__mesh", "def f():\n    import zeromesh.engine", ":2 imports zeromesh.engine: imports point down only"),
        ("comm__mesh", "from zeromesh import initialize", ":1 imports zeromesh: comm never imports doors"),
        (
            "shard__optim__adam",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zeromesh.apps.cli.main import main",
            ":3 imports zeromesh.apps.cli.main: imports point down only",
        ),
        (
            "engine__observe__observer",
            "from zeromesh.apps.plan.speed import x",
            ":1 imports zeromesh.apps.plan.speed: engine never",
        ),
        (
            "apps__cli__main",
            "import zeromesh.novel.thing",
            ":1 imports zeromesh.novel.thing: zeromesh.novel.thing is in no room",
        ),
        ("base__row", "from torch import distributed", ":1 imports torch.distributed: base must not import"),
        (
            "parallel__pipeline__schedule__actions",
            "import torch",
            ":1 imports torch: parallel.pipeline.schedule must not",
        ),
        ("base__row", "import torch.distributed.tensor", ":1 imports torch.distributed.tensor: base must not import"),
    ],
)
def test_a_broken_rule_is_reported_with_its_place(tmp_path, importing, text, reported) -> None:
    others = dict.fromkeys(("comm__mesh", "engine__pipelined", "apps__cli__main", "apps__plan__speed", "novel__x"), "")
    problems = tool.check(tree(tmp_path, **(others | {importing: text})))
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"zeromesh/{importing.replace('__', '/')}.py{reported}")


def broken(folder: Path, importing: str, imported: str) -> list[str]:
    """Check a house of two files, of which one imports the other."""
    names = MODULES[importing], MODULES[imported]
    target = names[1].replace("__", ".")
    return tool.check(tree(folder, **{names[1]: "", names[0]: f"import zeromesh.{target}"}))


def test_every_never_is_seen(tmp_path: Path) -> None:
    wanted = {"base": set(MODULES) - {"base"}, "comm": {"shard", "parallel", "config"}, "shard": {"parallel", "config"}}
    wanted |= {"parallel": {"shard", "config"}, "checkpoint": {"parallel", "engine"}, "engine": {"apps"}}
    below = set(MODULES) - {"doors", "apps"}
    nevers = [(room, other) for room in below for other in wanted.get(room, set()) | {"doors"}]
    assert {(room, other) for room, others in tool.NEVERS.items() for other in others} == set(nevers)
    for importing, imported in nevers:
        (problem,) = broken(tmp_path / f"{importing}-{imported}", importing, imported)
        assert problem.endswith(f": {importing} never imports {imported}")


def test_arrows_between_rooms_point_down(tmp_path: Path) -> None:
    assert set(MODULES) == set(tool.DEPTH)
    for importing in MODULES:
        for imported in MODULES:
            problems = broken(tmp_path / f"{importing}-{imported}", importing, imported)
            visits = (importing, imported) == ("apps", "doors")
            down = tool.DEPTH[importing] < tool.DEPTH[imported] and imported not in tool.NEVERS.get(importing, ())
            assert (not problems) == (down or visits or importing == imported), (importing, imported, problems)


def test_a_circle_of_files_is_reported(tmp_path: Path) -> None:
    root = tree(
        tmp_path, shard__a="from zeromesh.shard import b", shard__b="from . import c", shard__c="from .a import x"
    )
    (problem,) = tool.check(root)
    assert "a circle, " in problem
    assert all(f"zeromesh.shard.{name}" in problem for name in "abc")


def test_imports_within_a_room_and_downwards_are_allowed(tmp_path) -> None:
    root = tree(
        tmp_path,
        base__row="import torch",
        shard__a="from zeromesh.base import row\nfrom . import b\nfrom zeromesh.shard.optim import lion",
        shard__b="import zeromesh.base.row",
        shard__optim__lion="",
        engine__reports="from zeromesh.shard.a import b",
        engine__engine="from zeromesh.engine import reports",
        apps__cli__main="import zeromesh",
    )
    assert tool.check(root) == []


def test_the_drawing_has_arrows_that_others_do_not_imply(tmp_path: Path) -> None:
    text = "import zeromesh.comm.mesh\nimport zeromesh.base.row"
    root = tree(tmp_path, engine__x="import zeromesh.shard.a\n" + text, shard__a=text, comm__mesh=text, base__row="")
    arrows = [line.strip() for line in tool.drawing(root).splitlines() if "--" in line]
    assert arrows == ["engine --> shard", "shard --> comm", "comm --> base"]


def test_the_application_imports_public_names_and_listed_modules_only(tmp_path: Path) -> None:
    text = "from zeromesh import Engine\nimport zeromesh.comm.rank\nimport zeromesh.engine.engine"
    broken, *gone = tool.check(tree(tmp_path, apps__train__loop=text, comm__rank="", engine__engine=""))
    rule = "apps.train imports public names only"
    assert broken.startswith(f"zeromesh/apps/train/loop.py:3 imports zeromesh.engine.engine: {rule}")
    assert len(gone) == len(tool.REACHED) - 1
    assert "apps.train does not import config.settings any more; take it out of REACHED" in gone


def test_the_command_fails_when_a_rule_is_broken(tmp_path: Path) -> None:
    good = tree(tmp_path, base__row="")
    assert run_command([sys.executable, TOOL, good]).returncode == 0
    bad = tree(good, base__row="import zeromesh.engine", engine__engine="")
    finished = run_command([sys.executable, TOOL, bad])
    assert finished.returncode == 1
    assert "zeromesh/base/row.py:1 imports zeromesh.engine: base never imports engine" in finished.stdout


def test_every_room_has_a_row_in_the_table(tmp_path: Path) -> None:
    root = tree(tmp_path, comm__mesh="")
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    (tmp_path / tool.TABLE).write_text("".join(f"| `{room}` | a room |\n" for room in tool.DEPTH if room != "shard"))
    assert tool.check(root) == [f"{tool.TABLE}: no row for the room shard"]


LARGE = {
    "shard__a": "class Twice:\n    pass\n",
    "shard__b": "class Twice:\n    pass\n",
    "shard__long": "x = 1\n" * 451,
    "shard__many": "class Many:\n" + "".join(f"    def m{n}(self):\n        pass\n" for n in range(26)),
    "shard__arguments": f"class Wide:\n    def __init__(self, {', '.join('abcdefghi')}):\n        pass\n",
    "shard__riddle": '"""What it is."""\n',
    "shard__keys": "x = 'set mesh.dat to 1'\n",
    "shard__trusting": "def f(lib):\n    return lib.AutoModel.from_pretrained('x')  # as an example\n",
    "shard__writes": "def f(x):\n" + "".join(f"    x.a{n} = 1\n" for n in range(300)),
}


@pytest.mark.parametrize(
    ("key", "reported"),
    [
        ("shard__a", "Twice (shard/a.py, shard/b.py): 2 definitions of a public class; at most 1"),
        ("shard__long", "shard/long.py: 451 lines of a file; at most 450"),
        ("shard__many", "shard/many.py:Many: 26 methods of a class; at most 25"),
        ("shard__arguments", "shard/arguments.py:Wide: 9 arguments of a constructor; at most 8"),
        ("shard__riddle", "zeromesh/shard/riddle.py:1: 'What it is.' opens as a fragment"),
        ("shard__keys", "zeromesh/shard/keys.py:1: mesh.dat is not a key of the configuration"),
        ("shard__trusting", "zeromesh/shard/trusting.py:2: needs trust_remote_code=False"),
        ("shard__writes", "300 writes to attributes of objects that the function has not made; at most"),
    ],
)
def test_a_broken_limit_is_reported(key: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import check_structure

    monkeypatch.setattr(check_structure, "ABOVE", {})
    others = {"shard__b": LARGE["shard__b"]} if key == "shard__a" else {}
    problems = check_structure.check(tree(tmp_path, **{key: LARGE[key], **others}))
    assert any(problem.startswith(reported) for problem in problems), problems
    assert check_structure.check(tree(tmp_path / "other", shard__a="x = 1  # as an example\n")) == []
