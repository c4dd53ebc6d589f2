"""The tests' own code: no helper is defined twice, and private modules that tests import become fewer."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

from harness import ROOT

MOST_MODULES = 338
"""Private modules of the package that tests import. The number may only shrink."""
SIZE = 3
"""Lines of the smallest helper that counts, with its ``def``: shorter ones are an expression with a name."""
PUBLIC = ("zeromesh.zero", "zeromesh.pipe", "zeromesh.checkpointing", "zeromesh.build")
"""Modules that users import; packages that they import have one dot, too."""
APART = {"ds_facts.py", "deepspeed_scripts.py"}
"""Programs that also run where ZeroMesh is not, and share nothing."""


@cache
def trees() -> list[tuple[str, ast.Module]]:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths]


def shape(helper: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a helper's code without its name, docstring and annotations, and with its local names numbered.

    The tree is changed to that.
    """
    helper.name = ""
    if ast.get_docstring(helper) is not None:
        helper.body = helper.body[1:]
    nodes = list(ast.walk(helper))
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    numbers: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.arg):
            node.arg, node.annotation = numbers.setdefault(node.arg, f"local {len(numbers)}"), None
        elif isinstance(node, ast.Name) and node.id in local:
            node.id = numbers.setdefault(node.id, f"local {len(numbers)}")
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(helper)


def defined_twice(files: Iterable[tuple[str, ast.Module]]) -> list[list[str]]:
    """Return the places of helpers of which several have the same shape."""
    similar = defaultdict(list)
    for path, tree in files:
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("test_"):
                continue
            if node.end_lineno - node.lineno + 1 >= SIZE and path.rsplit("/", 1)[-1] not in APART:
                calls = tuple(step.attr for step in ast.walk(node) if isinstance(step, ast.Attribute))
                similar[calls].append((f"{path}: {node.name}", node))
    places = defaultdict(list)
    for name, node in (pair for pairs in similar.values() if len(pairs) > 1 for pair in pairs):
        places[shape(node)].append(name)
    return [same for same in places.values() if len(same) > 1]


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the package that a file imports, and those that it imports names from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = ROOT / f"{node.module}.{alias.name}".replace(".", "/")
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def test_no_helper_is_defined_twice() -> None:
    assert defined_twice(trees()) == []


def test_helpers_of_other_names_and_docstrings_are_the_same() -> None:
    one = 'def one(x: int) -> int:\n    """Double."""\n    y = x + x\n    return y\n'
    same = "def same(a):\n    b = a + a\n    return b\n"
    other = "def other(a):\n    b = a + 1\n    return b\n"
    files = ((name, ast.parse(text)) for name, text in {"a.py": one, "b.py": same, "c.py": other}.items())
    assert defined_twice(files) == [["a.py: one", "b.py: same"]]


def test_private_modules_that_tests_import_become_fewer() -> None:
    modules = {module for _, tree in trees() for module in imported_modules(tree) if module.startswith("zeromesh.")}
    private = {module for module in modules if module.count(".") > 1 and module not in PUBLIC}
    assert len(private) <= MOST_MODULES, "import a public name, or what tests/support imports already"
