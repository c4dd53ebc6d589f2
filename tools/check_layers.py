"""Check that imports point down only: ``python tools/check_layers.py [ROOT]``.

Every import statement counts, also inside functions and under ``TYPE_CHECKING``. Packages of one layer do not import
each other, modules of one layer may, and no files import each other in a circle. Prints ``file:line imports X: rule``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "zeromesh"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("hf",),
    ("train", "deepspeed", "horovod", "keras"),
    ("__init__",),
    ("verification",),
    ("build",),
    ("initialization",),
    (
        "launcher",
        "engine",
        "engine_answers",
        "engine_saving",
        "engine_state",
        "update",
        "export",
        "convert",
        "zero",
        "checkpointing",
        "pipe",
    ),
    ("checkpoint",),
    (
        "batches",
        "computation",
        "curriculum",
        "joint_batch",
        "reports",
        "training_data",
        "pretrained",
        "quantized",
        "weight_files",
        "pipelined",
        "replicas",
        "signatures",
    ),
    ("plan",),
    ("context",),
    ("shard", "tensor", "pipeline", "activation", "precision", "optim"),
    ("comm", "observe", "tiers"),
    ("config",),
    ("model", "kernels"),
)
"""Packages and top-level modules, top to bottom."""

TABLE = "docs/adr/0001-structure.md"
"""Has a row for each package, if it is there."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "model": ("torch.distributed",),
    "kernels": ("torch.distributed",),
    "pipeline.schedule": ("torch", "zeromesh.pipeline.runtime"),
}
"""Modules that a package, or a package in it, must not import."""

APPLICATION = "train"
"""Package that imports public names only: those of ``zeromesh`` itself, and the modules below."""

REACHED = (
    "batches",
    "checkpoint.boxes",
    "checkpoint.memory_files",
    "checkpoint.folder",
    "checkpoint.random_state",
    "comm.agreement",
    "comm.detect",
    "comm.environment",
    "comm.failure",
    "comm.rank",
    "config.errors",
    "config.keys",
    "config.printing",
    "config.settings",
    "config.train",
    "context.order",
    "export",
    "initialization.trial",
    "model.files",
    "model.lengths",
    "model.quantized",
    "observe.machine",
    "observe.metrics",
    "observe.operations",
    "observe.progress",
    "observe.drawing",
    "observe.units",
    "pretrained",
    "quantized",
    "tiers.lock",
)
"""Private modules that the application imports all the same. The list may shrink and never grow: an entry goes when
nothing there imports it any more."""

DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}


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


def room(module: str) -> str:
    """The row of the table that a module of the package belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


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
    here = room(item.source)
    for package, names in FORBIDDEN.items():
        for name in names:
            if _is_in(item.source, f"{PACKAGE}.{package}") and _is_in(item.target, name):
                return f"{package} must not import {name}"
    if item.target.split(".")[0] != PACKAGE:
        return None
    there = room(item.target)
    for name in (here, there):
        if name not in DEPTH:
            return f"{name} is in no layer; add it to LAYERS in tools/check_layers.py"
    if DEPTH[there] < DEPTH[here]:
        return f"imports point down only, and {there} is above {here}"
    if here == APPLICATION != there and target_in(item) not in ("", *REACHED):
        return f"{here} imports public names only, from {PACKAGE} itself; find one, or make one public"
    modules_only = all("." not in name.removeprefix(PACKAGE + ".") for name in (item.source, item.target))
    if DEPTH[there] == DEPTH[here] and here != there and not modules_only:
        return f"{here} and {there} are packages of one layer"
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
            if room(item.source) == APPLICATION:
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
        packages = sorted(path.parent.name for path in (root / PACKAGE).glob("*/__init__.py"))
        problems += [f"{TABLE}: no row for the package {name}" for name in packages if f"| `{name}` |" not in described]
    return list(dict.fromkeys(problems))


def main(arguments: list[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    problems = check(root)
    print("\n".join(problems) if problems else "import layers: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
