"""Check that imports keep to the rooms of the house: ``python tools/check_layers.py [--draw] [ROOT]``.

Every import statement counts, also inside functions and under ``TYPE_CHECKING``. Arrows between rooms point down, some
rooms never know each other, and no files import each other in a circle. Prints ``file:line imports X: rule``.
``--draw`` writes the drawing of the rooms into ``docs/architecture.md``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "zeromesh"

LEVELS: tuple[tuple[str, ...], ...] = (
    ("doors",),
    ("apps",),
    ("engine",),
    ("checkpoint",),
    ("shard", "parallel"),
    ("comm", "config"),
    ("base",),
)
"""Rooms, top to bottom. Imports point down, and rooms beside each other do not import each other."""

NEVERS: dict[str, tuple[str, ...]] = {
    "engine": ("doors", "apps"),
    "checkpoint": ("doors", "engine", "parallel"),
    "shard": ("doors", "parallel", "config"),
    "parallel": ("doors", "shard", "config"),
    "comm": ("doors", "shard", "parallel", "config"),
    "config": ("doors",),
    "base": ("doors", "apps", "engine", "checkpoint", "shard", "parallel", "comm", "config"),
}
"""Rooms that a room does not know, whatever lies above or below."""

VISITORS = {"apps": "doors"}
"""Rooms that import one above them: applications call the engine as users do, by its doors."""

DOORS = ("__init__", "__main__", "build", "zero", "pipe", "checkpointing", "moe", "deepspeed", "horovod", "keras", "hf")
"""Modules and packages of the room ``doors``; each other room is the package of its name."""

TABLE = "docs/adr/0001-structure.md"
"""Has a row for each room, if it is there."""

DRAWING = "docs/architecture.md"
"""Has the drawing of the rooms as its first diagram."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "base": ("torch.distributed",),
    "parallel.pipeline.schedule": ("torch", "zeromesh.parallel.pipeline.runtime"),
}
"""Modules that a package, or a package in it, must not import."""

APPLICATION = "apps.train"
"""Package that imports public names only: those of ``zeromesh`` itself, and the modules below."""

REACHED = (
    "base.chart_page",
    "base.drawing",
    "base.files",
    "base.lengths",
    "base.lock",
    "base.machine",
    "base.operation_counts",
    "base.progress",
    "base.quantized_layers",
    "base.requirements",
    "base.words",
    "checkpoint.boxes",
    "checkpoint.checkpoint_folder",
    "checkpoint.copies.memory_files",
    "checkpoint.random_state",
    "checkpoint.weights.export",
    "checkpoint.weights.pretrained",
    "checkpoint.weights.quantize_weights",
    "comm.agreement",
    "comm.detect",
    "comm.environment",
    "comm.failure",
    "comm.rank",
    "config.batch_sizes",
    "config.document",
    "config.errors",
    "config.printing",
    "config.refusals",
    "config.section",
    "config.settings",
    "engine.batches",
    "engine.initialize.trial",
    "parallel.context.sequence_order",
)
"""Private modules that the application imports all the same. The list may shrink and never grow: an entry goes when
nothing there imports it any more."""

DEPTH = {room: depth for depth, level in enumerate(LEVELS) for room in level}


@dataclass(frozen=True)
class Import:
    """One imported module: ``file`` imports ``target`` (dotted) at ``line``."""

    file: Path
    line: int
    source: str
    target: str


def module_name(file: Path, root: Path) -> str:
    """The dotted name of a source file under ``root``."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str | None:
    """The room of a module of the package; None if it is in none."""
    name = (module.split(".")[1:] or ["__init__"])[0]
    return "doors" if name in DOORS else name if name in DEPTH else None


def imports_of(file: Path, root: Path, modules: set[str]) -> Iterator[Import]:
    """All imports of one file; a name imported from a package counts as its module where there is one."""
    source = module_name(file, root)
    package = source.split(".") if file.name == "__init__.py" else source.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, source, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                known = inner in modules or inner in ("torch.distributed",)
                yield Import(file, node.lineno, source, inner if known else base)


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def target_in(item: Import) -> str:
    """The imported module without the name of the package."""
    return item.target.removeprefix(PACKAGE).removeprefix(".")


def broken_rule(item: Import) -> str | None:
    """The rule that an import breaks, or None."""
    for package, names in FORBIDDEN.items():
        for name in names:
            if _is_in(item.source, f"{PACKAGE}.{package}") and _is_in(item.target, name):
                return f"{package} must not import {name}"
    if item.target.split(".")[0] != PACKAGE:
        return None
    here, there = room(item.source), room(item.target)
    for module, place in ((item.source, here), (item.target, there)):
        if place is None:
            return f"{module} is in no room; move it into one, or add it to DOORS in tools/check_layers.py"
    assert here is not None
    assert there is not None
    is_trainer = _is_in(item.source, f"{PACKAGE}.{APPLICATION}")
    if is_trainer and there != "apps" and target_in(item) not in ("", *REACHED):
        return f"{APPLICATION} imports public names only, from {PACKAGE} itself; find one, or make one public"
    if there in NEVERS.get(here, ()):
        return f"{here} never imports {there}"
    if DEPTH[there] <= DEPTH[here] and here != there and VISITORS.get(here) != there:
        return f"imports point down only, and {there} is not below {here}"
    return None


def cycles(edges: dict[str, dict[str, Import]]) -> Iterator[list[Import]]:
    """The circles that a depth-first walk over the files closes, each as its list of imports."""
    state: dict[str, str] = {}
    path: list[Import] = []

    def walk(module: str) -> Iterator[list[Import]]:
        state[module] = "open"
        for target, item in edges.get(module, {}).items():
            path.append(item)
            if state.get(target) == "open":
                start = next(index for index, step in enumerate(path) if step.source == target)
                yield path[start:]
            elif target not in state:
                yield from walk(target)
            path.pop()
        state[module] = "done"

    for module in edges:
        if module not in state:
            yield from walk(module)


def check(root: Path) -> list[str]:
    """All broken rules of the package under ``root``, as printable lines."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    modules = {module_name(file, root) for file in files}
    edges: dict[str, dict[str, Import]] = {}
    problems = []
    reached = set()
    for file in files:
        for item in imports_of(file, root, modules):
            where = f"{file.relative_to(root)}:{item.line} imports {item.target}"
            if rule := broken_rule(item):
                problems.append(f"{where}: {rule}")
            if _is_in(item.source, f"{PACKAGE}.{APPLICATION}"):
                reached.add(target_in(item))
            if item.target in modules and item.target != item.source:
                edges.setdefault(item.source, {}).setdefault(item.target, item)
    if reached:
        gone = [name for name in REACHED if name not in reached]
        problems += [f"{APPLICATION} does not import {name} any more; take it out of REACHED" for name in gone]
    for circle in cycles(edges):
        first = circle[0]
        names = " > ".join([step.source for step in circle] + [first.source])
        problems.append(f"{first.file.relative_to(root)}:{first.line} imports {first.target}: a circle, {names}")
    table = root / TABLE
    if table.is_file():
        described = table.read_text(encoding="utf-8")
        problems += [f"{TABLE}: no row for the room {name}" for name in DEPTH if f"| `{name}` |" not in described]
    return list(dict.fromkeys(problems))


def drawing(root: Path) -> str:
    """The rooms of the package under ``root`` and the arrows between them, as a diagram of mermaid.

    An arrow that others together imply is left out.
    """
    files = sorted((root / PACKAGE).rglob("*.py"))
    modules = {module_name(file, root) for file in files}
    arrows: dict[str, set[str]] = {name: set() for name in DEPTH}
    for file in files:
        for item in imports_of(file, root, modules):
            if _is_in(item.target, PACKAGE):
                arrows[str(room(item.source))].add(str(room(item.target)))
    lines = ["flowchart TB"]
    for level in LEVELS:
        for name in level:
            inner = (
                DOORS
                if name == "doors"
                else [path.parent.name for path in sorted(root.glob(f"{PACKAGE}/{name}/*/*.py"))]
            )
            text = " ".join(dict.fromkeys(inner)).replace("__init__", PACKAGE)
            lines.append(f'  {name}["<b>{name}</b>{text and f"<br>{text}"}"]')
    for name in DEPTH:
        below = {other for other in arrows[name] if DEPTH[other] > DEPTH[name]}
        implied = {far for near in below for far in arrows[near] if far != near and DEPTH[far] > DEPTH[near]}
        lines += [f"  {name} --> {other}" for other in DEPTH if other in below - implied]
        if VISITORS.get(name) in arrows[name]:
            lines.append(f"  {name} -.-> {VISITORS[name]}")
    return "\n".join(lines) + "\n"


def drawn(page: str, picture: str) -> str:
    """The text of a page with this picture as its first diagram."""
    return re.sub(r"```mermaid\n.*?```", lambda _: f"```mermaid\n{picture}```", page, count=1, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Print what is wrong, or draw; 1 if anything is wrong."""
    draws, roots = "--draw" in arguments, [name for name in arguments if name != "--draw"]
    root = Path(roots[0]) if roots else Path(__file__).resolve().parent.parent
    if draws:
        page = root / DRAWING
        page.write_text(drawn(page.read_text(encoding="utf-8"), drawing(root)), encoding="utf-8")
        return 0
    problems = check(root)
    print("\n".join(problems) if problems else "import rooms: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
