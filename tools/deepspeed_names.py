"""Record the modules of an installed DeepSpeed and their public names, with the values of constants.

python tools/deepspeed_names.py .../site-packages/deepspeed > zeromesh/deepspeed/modules.json
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLAIN = (str, int, float, bool, type(None))
LONGEST = 40  # characters of a text that is a constant; longer ones are templates of messages

# Packages whose internal modules are listed alone, as nobody imports their names to find out what there is.
INTERNAL = (
    "accelerator", "autotuning", "compile", "inference", "io", "linear", "model_implementations", "module_inject",
    "moe", "nvme", "ops.fp_quantizer", "ops.op_builder", "ops.transformer", "ops.triton_ops",
    "runtime.checkpoint_engine", "runtime.data_pipeline.data_routing", "runtime.data_pipeline.data_sampling",
    "runtime.domino", "runtime.model_checkpointing", "runtime.rollout", "runtime.superoffload", "runtime.swap_tensor",
    "runtime.tensor_parallel", "runtime.zenflow", "sequence",
)  # fmt: skip


def record(file: Path) -> dict[str, Any]:
    """Return the names of a file with the values of constants.

    Names without a value are under ``""``, and modules whose names are in reach under ``"*"``.
    """
    names: set[str] = set()
    values: dict[str, Any] = {}
    sources: list[str] = []
    is_package = file.name == "__init__.py"

    def visit(body: Iterable[ast.stmt]) -> None:
        for line in body:
            if isinstance(line, ast.FunctionDef | ast.ClassDef):
                names.add(line.name)
            elif isinstance(line, ast.Assign | ast.AnnAssign):
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                for name in (target.id for target in targets if isinstance(target, ast.Name)):
                    names.add(name)
                    if name.isupper() and line.value is not None:
                        note(name, line.value)
            elif isinstance(line, ast.ImportFrom) and (line.level or (line.module or "").startswith("deepspeed.")):
                if is_package and line.names[0].name != "*":
                    names.update(alias.asname or alias.name for alias in line.names)
                else:
                    sources.append("." * line.level + (line.module or ""))
            elif isinstance(line, ast.If | ast.Try):
                for part in (line.body, *(handler.body for handler in getattr(line, "handlers", ())), line.orelse):
                    visit(part)

    def note(name: str, value: ast.expr) -> None:
        try:
            found = values[value.id] if isinstance(value, ast.Name) else ast.literal_eval(value)
        except (ValueError, KeyError):
            return
        if isinstance(found, PLAIN) and len(str(found)) <= LONGEST:
            values[name] = found

    visit(ast.parse(file.read_text()).body)
    plain = " ".join(sorted(name for name in names - values.keys() if not name.startswith("_")))
    return {"": plain, "*": [*dict.fromkeys(sources)]} | {
        name: values[name] for name in sorted(values) if not name.startswith("_")
    }


def main(root: Path) -> None:
    """Print the table of a package."""
    table: dict[str, dict[str, Any]] = {}
    internal: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        parts = [*file.relative_to(root).with_suffix("").parts]
        path = parts[:-1] if parts[-1] == "__init__" else parts
        package = next((name for name in INTERNAL if ".".join(path).startswith(f"{name}.")), None)
        if package is not None:
            internal[package].append(".".join(path).removeprefix(f"{package}."))
            continue
        row = record(file)
        # Modules below the package, by their names in the table.
        row["*"] = " ".join(
            ".".join([*parts[: len(parts) - dots], *filter(None, [name.lstrip(".")])]) if dots
            else name.removeprefix("deepspeed.")
            for name in row["*"] for dots in [len(name) - len(name.lstrip("."))]
        )  # fmt: skip
        table[".".join(path)] = {key: value for key, value in row.items() if value != "" or key not in ("", "*")}
    for package, names in internal.items():
        table[package]["**"] = " ".join(names)
    lines = (f" {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in table.items())
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
