"""Check the size and shape of files and classes: ``python tools/check_structure.py [ROOT]``.

``LIMITS`` hold for all code. ``ABOVE`` lists larger files and classes with their sizes: an entry may shrink and never
grow, and goes once it is within the limit. A key of the configuration that a message names must exist. Nothing is
unpickled but in ``UNPICKLED``. ``MOST`` counts what may become less and never more.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "zeromesh"

LIMITS = {
    "lines of a file": 450,
    "lines of a file of one class or one table": 700,
    "methods of a class": 25,
    "arguments of a constructor": 8,
    "definitions of a public class": 1,
}
"""Methods count with those that a class of the package inherits from others of it."""

ABOVE: dict[str, dict[str, int]] = {
    "methods of a class": {
        "deepspeed/deepspeed_engine.py:DeepSpeedEngine": 45,
        "deepspeed/pipeline.py:PipelineEngine": 50,
        "deepspeed/pipeline.py:StagedModule": 28,
        "engine/engine.py:Engine": 32,
    },
    "arguments of a constructor": {
        "deepspeed/tiling.py:TiledLayer": 9,
        "shard/optim/lamb.py:Lamb": 10,
        "shard/optim/muon.py:Muon": 15,
        "parallel/expert/moe_layer.py:MoE": 15,
        "parallel/expert/moe_layer.py:TopKGate": 11,
        "engine/pipeline_module.py:PipelineModule": 12,
        "zero.py:Init": 16,
    },
}
"""Kind of limit -> file or class -> size. Constructors here have signatures of DeepSpeed or torch."""

NO_KEYS = (
    "autotuning.model_info",
    "checkpoint.utils",
    "optimizer.state",
    "zero_optimization.offload_",
    "zero_optimization.stage3_",
)
"""Names in strings that look like keys: a setting that DeepSpeed's engine answers, its module, beginnings of keys."""

FRAGMENTS = ("What", "Of", "Whether", "As", "How", "By", "To", "If", "That", "Where", "Who", "Which", "All that")
"""First words of docstrings that are not sentences."""

EMPTY_NAMES = ("found", "one", "own", "made", "given", "held", "kept", "known", "whole")
"""Names of variables and arguments that do not say what they hold."""

MOST = {
    "writes to attributes of objects that the function has not made": 33,
    "names that do not say what they hold": 21,
    "names of files that recur": 0,
    "statements that are packed by hand": 40,
}
"""What is counted in the whole package. A number may shrink and never grow."""

THREADS = "base/worker.py"
"""File with the only class of threads: CPython 3.11 takes others for ended after Ctrl-C in a ``join``."""
OBJECT_COLLECTIVES = (
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "irecv_object",
)  # fmt: skip
"""Functions of torch that unpickle what another rank sends; ``comm/messages.py`` has others."""

UNPICKLERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pickle", "_pickle", "dill", "cloudpickle", "marshal"), ("load", "loads", "Unpickler")),
    "joblib": ("load",),
    "shelve": ("open",),
    "torch": ("load",),
}
"""Module -> its functions that may run code of whoever wrote their input."""

UNPICKLED: dict[str, str] = {
    "checkpoint/formats/pickles.py": "Unpickler",  # makes no object but those of a table
    "comm/rank.py": "loads",  # the call, from the process that has started this one
    "horovod/elastic.py": "load",  # objects of the program, from a file of this run in a private folder
    "horovod/functions.py": "loads",  # objects of the program, whose signature has been checked
    "apps/launch/launch.py": "loads",  # results of processes that this one has started
    "apps/verify/plain_training.py": "load",  # the user's model, from a folder of this run
    "apps/verify/ranks.py": "load",
    "apps/verify/verify_run.py": "load",
}
"""File -> the function with which it unpickles what nobody else can have written. No file may be added lightly."""

OWN = ("self", "cls", "ctx", "context")
"""Names of an object in its own methods, and of autograd's contexts, which exist to be written to."""

LOADERS = ("from_pretrained", "from_config")
"""Methods of transformers' automatic classes, which take ``trust_remote_code``."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Statement = ast.Assign | ast.AugAssign | ast.AnnAssign


def sizes(tree: ast.Module, name: str, lines: int) -> Iterator[tuple[str, str, int]]:
    """Yield (kind of limit, file or class, size) of one file."""
    yield f"lines of a file{' of one class or one table' if is_one_thing(tree) else ''}", name, lines
    for node in classes_of(tree):
        for item in methods_of(node):
            if item.name == "__init__":
                count = len(item.args.posonlyargs) + len(item.args.args) + len(item.args.kwonlyargs) - 1
                yield "arguments of a constructor", f"{name}:{node.name}", count


def classes_of(tree: ast.Module) -> list[ast.ClassDef]:
    """Return all classes of a file."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def methods_of(node: ast.ClassDef) -> list[Function]:
    """Return the methods that a class defines itself."""
    return [item for item in node.body if isinstance(item, Function)]


def method_names(file: str, node: ast.ClassDef, classes: dict[str, list[tuple[str, ast.ClassDef]]]) -> set[str]:
    """Return the names of the methods of a class, and of those that it inherits from classes of the package."""
    names = {item.name for item in methods_of(node)}
    for base in node.bases:
        bases = classes.get(re.split(r"[\[.]", ast.unparse(base))[-1], [])
        for where, other in [item for item in bases if item[0] == file] or bases[:1]:
            names |= method_names(where, other, classes) if other is not node else set()
    return names


def foreign_writes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each assignment to an attribute of an object that the function has not made."""
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        statements = [node for node in ast.walk(function) if isinstance(node, Statement)]
        made = {
            target.id
            for node in statements
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in statements:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                        base = part.value
                        if not (isinstance(base, ast.Name) and base.id in {*OWN, *made}):
                            yield part.lineno, ast.unparse(part)


def empty_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable or argument that does not say what it holds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield node.lineno, node.arg


def threads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of what makes a thread of ``threading`` itself, or asks one whether it is alive."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in ("Thread", "is_alive"):
            yield node.lineno, ast.unparse(node)


def unpicklings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and rule of each use of a function that may run code of whoever wrote its input."""
    safe = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        flags = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
        if flags.get("allow_pickle"):
            yield call.lineno, "allow_pickle", "may run code of whoever wrote the file; store plain arrays"
        if flags.get("weights_only"):
            safe.add(call.func)
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and node not in safe:
            names = [(ast.unparse(node.value), node.attr)]
        for module, name in names:
            if name in OBJECT_COLLECTIVES:
                yield node.lineno, name, "unpickles what another rank sends; use comm/messages.py"
            elif name in UNPICKLERS.get(module, ()):
                yield node.lineno, name, "may run code of whoever wrote its input; use JSON, or weights_only=True"


def trusting_calls(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of calls by which transformers asks to run code of a model's folder, or runs it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
            of = ast.unparse(node.func.value).rpartition(".")[2]
            refused = any(
                word.arg == "trust_remote_code" and isinstance(word.value, ast.Constant) and word.value.value is False
                for word in node.keywords
            )
            if of.startswith("Auto") and not of.startswith("AutoHf") and not refused:
                yield node.lineno


def is_one_thing(tree: ast.Module) -> bool:
    """Tell whether a class or a table is more than half of a file."""
    lengths = [(node.end_lineno or node.lineno) - node.lineno for node in tree.body]
    things = [size for node, size in zip(tree.body, lengths, strict=True) if isinstance(node, Statement | ast.ClassDef)]
    return max(things, default=0) * 2 > max((node.end_lineno or 0 for node in tree.body), default=0)


def keys() -> tuple[set[str], re.Pattern[str]]:
    """Return the keys of the configuration, with and without their sections, and what finds such names in a text."""
    from zeromesh.apps.train.train_settings import TrainSettings
    from zeromesh.config.settings import entries
    from zeromesh.config.special_keys import GONE, RENAMED

    paths = [path.split(".") for path in {*entries(TrainSettings), *RENAMED, *GONE}]
    sections = {name for path in paths for name in path[:-1]} - {"model"}  # also begins the names of parameters
    names = {".".join(path[start:]) for path in paths for start in range(len(path))}
    return names, re.compile(rf"(?<![\w./-])(?:{'|'.join(sections)})(?:\.[a-z_0-9]+)+(?![\w(./*])")


def unknown_keys(tree: ast.Module, names: set[str], pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each key that a text names, but that the configuration does not have."""
    for line, text in texts(tree):
        for name in pattern.findall(text):
            free = re.split(r"(?<=params)\.", name)[0]  # parameters of optimizers and schedulers are the classes' own
            if free not in names and name not in NO_KEYS and not name.endswith((".json", ".pt")):
                yield line, name


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that is no docstring."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    alone = {id(item.value) for body in bodies for item in body if isinstance(item, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, those of attributes too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = item.value if isinstance(item, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield item.lineno, value.value


def problems_of(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each thing that no file may have."""
    for line, sentence in docstrings(tree):
        if sentence.split(" ", 1)[0] in FRAGMENTS:
            yield line, f"{sentence.splitlines()[0]!r} opens as a fragment"
    if name != THREADS:
        yield from ((line, f"{text}; use Worker of {THREADS}") for line, text in threads(tree))
    for line, function, rule in unpicklings(tree):
        if function != UNPICKLED.get(name):
            yield line, f"{function} {rule}"
    for line in trusting_calls(tree):
        yield line, "needs trust_remote_code=False, or a folder's code may run"


def check(root: Path) -> list[str]:
    """Return the broken limits of the package under ``root``, as printable lines."""
    measured: dict[str, dict[str, int]] = defaultdict(dict)
    classes: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    files: dict[str, list[str]] = defaultdict(list)
    counted: dict[str, list[str]] = {kind: [] for kind in MOST}
    writes, empty, recurring, packed = counted.values()
    outer: set[ast.ClassDef] = set()
    problems = []
    names, pattern = keys()
    for file in sorted((root / PACKAGE).rglob("*.py")):
        text, name = file.read_text(encoding="utf-8"), str(file.relative_to(root / PACKAGE))
        tree = ast.parse(text, str(file))
        for kind, item, size in sizes(tree, name, text.count("\n")):
            measured[kind][item] = size
        for node in classes_of(tree):
            classes[node.name].append((name, node))
        outer |= {node for node in tree.body if isinstance(node, ast.ClassDef)}
        files[file.name].append(name)
        where = f"{PACKAGE}/{name}"
        writes += [f"{where}:{line}: {target} is of another object" for line, target in {*foreign_writes(tree)}]
        empty += [f"{where}:{line}: {word} does not say what it holds" for line, word in empty_names(tree)]
        lines = text.splitlines()
        packed += [f"{where}:{n}: fmt: skip" for n, line in enumerate(lines, 1) if line.endswith("# fmt: skip")]
        problems += [f"{where}:{line}: {problem}" for line, problem in problems_of(tree, name)]
        problems += [
            f"{where}:{line}: {key} is not a key of the configuration; correct it, or add it to NO_KEYS"
            for line, key in unknown_keys(tree, names, pattern)
            if not (root / PACKAGE / f"{key.replace('.', '/')}.py").is_file()
        ]
    recurring += [f"{', '.join(paths)}: one name" for name, paths in files.items() if paths[1:] and name[0] != "_"]
    for title, nodes in classes.items():
        for name, node in nodes:
            measured["methods of a class"][f"{name}:{title}"] = len(method_names(name, node, classes))
        if not title.startswith("_"):
            measured["definitions of a public class"][title] = sum(node in outer for _, node in nodes)
    for kind, limit in LIMITS.items():
        allowed = ABOVE.get(kind, {})
        for item, size in measured[kind].items():
            most = max(limit, allowed.get(item, 0))
            if size > most:
                where = f" ({', '.join(name for name, _ in classes[item])})" if item in classes else ""
                problems.append(f"{item}{where}: {size} {kind}; at most {most}")
        gone = [item for item in allowed if measured[kind].get(item, 0) <= limit]
        problems += [f"{item}: now within the limit of {kind}; take it out of ABOVE" for item in gone]
    for kind, most in MOST.items():
        if len(counted[kind]) > most:
            problems += [*counted[kind], f"{len(counted[kind])} {kind}; at most {most}"]
    return problems


def main(arguments: list[str]) -> int:
    """Print the broken limits; 1 if there are any."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    problems = check(root)
    print("\n".join(problems) if problems else "structure: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
