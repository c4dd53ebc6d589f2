"""Check the size and shape of files and classes: ``python tools/check_structure.py [ROOT]``.

``LIMITS`` hold for all code. ``ABOVE`` lists larger files and classes with their sizes: an entry may shrink and never
grow, and goes once it is within the limit. Only ``config`` names keys of the configuration and ZeRO stages, in messages
too; ``NAMED_ELSEWHERE`` counts the strings of other packages that still do. Nothing is unpickled but in ``UNPICKLED``.
Names that say nothing (``EMPTY_NAMES``) may become fewer, never more.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "zeromesh"

LIMITS = {
    "lines of a file": 450,
    "methods of a class": 25,
    "arguments of a constructor": 8,
    "definitions of a public class": 1,
}

ABOVE: dict[str, dict[str, int]] = {
    "lines of a file": {},
    "methods of a class": {},
    "arguments of a constructor": {
        "deepspeed/tiling.py:TiledLayer": 9,
        "deepspeed/optimizers.py:DeepSpeedCPUAdam": 9,
        "deepspeed/optimizers.py:FusedAdam": 9,
        "deepspeed/optimizers.py:FusedLamb": 11,
        "optim/lamb.py:Lamb": 10,
        "optim/muon.py:Muon": 15,
        "pipe.py:PipelineModule": 12,
        "zero.py:Init": 16,
    },
}
"""Kind of limit -> file or class -> size. Constructors here have signatures of DeepSpeed or torch."""

NAMED_ELSEWHERE: dict[str, int] = {"train": 1}  # of a layer of transformers that has the name of a key
"""Package -> its strings that name a key or a ZeRO stage. A number may shrink and never grow."""

FRAGMENTS = ("What", "Of", "Whether", "As", "How", "By", "To", "If", "That", "Where", "Who", "Which", "All that")
"""First words of docstrings that are no sentences."""

MOST_FOREIGN_WRITES = 34
"""Assignments in the package to attributes of objects that the function has not made."""

EMPTY_NAMES = ("found", "one", "own", "made", "given", "held", "kept", "known", "whole")
"""Names of variables and arguments that do not say what they hold."""

MOST_EMPTY_NAMES = 1004
"""Places in the package where such a name gets its value. The number may shrink and never grow."""

LEAST_COMMENTS = 0.06
"""Share of lines that have a comment, which says why."""

THREADS = "model/worker.py"
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
    "launcher/launch.py": "loads",  # results of processes that this one has started
    "verification/plain.py": "load",  # the user's model, from a folder of this run
    "verification/ranks.py": "load",
    "verification/run.py": "load",
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
    yield "lines of a file", name, lines
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, Function)]
            yield "methods of a class", f"{name}:{node.name}", len(methods)
            for item in methods:
                if item.name == "__init__":
                    count = len(item.args.posonlyargs) + len(item.args.args) + len(item.args.kwonlyargs) - 1
                    yield "arguments of a constructor", f"{name}:{node.name}", count


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


def comments(text: str) -> int:
    """Return the number of comments of a file."""
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def names_of_keys() -> re.Pattern[str]:
    """Return what finds a dotted key, a key in JSON, or a ZeRO stage in a text."""
    from zeromesh.config.settings import entries
    from zeromesh.config.tables import GONE, RENAMED

    known = {*entries(), *RENAMED, *GONE}
    known |= {path.split(".", 1)[1] for path in known if path.count(".") > 1}  # as in "offload_param.device"
    keys = sorted(known, key=len, reverse=True)
    dotted, top = ("|".join(re.escape(key) for key in keys if ("." in key) is inside) for inside in (True, False))
    return re.compile(rf"(?<![\w.])(?:{dotted})(?!\w)|\"(?:{top})\":|\bZeRO-[0-3]\b|\bstage [0-3]\b")


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


def check(root: Path) -> list[str]:
    """Return the broken limits of the package under ``root``, as printable lines."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    classes: dict[str, list[str]] = defaultdict(list)
    named: dict[str, list[str]] = defaultdict(list)
    fragments, writes, empty, alone, pickles, trusting, key = [], [], [], [], [], [], names_of_keys()
    total, commented = 0, 0
    for file in sorted((root / PACKAGE).rglob("*.py")):
        text, name = file.read_text(encoding="utf-8"), str(file.relative_to(root / PACKAGE))
        tree = ast.parse(text, str(file))
        total, commented = total + text.count("\n"), commented + comments(text)
        for kind, what, size in sizes(tree, name, text.count("\n")):
            found[kind][what] = size
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
        writes += [
            f"{PACKAGE}/{name}:{line}: {target} is of another object" for line, target in {*foreign_writes(tree)}
        ]
        empty += [f"{PACKAGE}/{name}:{line}: {what} does not say what it holds" for line, what in empty_names(tree)]
        if name != THREADS:
            alone += [f"{PACKAGE}/{name}:{line}: {what}; use Worker of {THREADS}" for line, what in threads(tree)]
        pickles += [
            f"{PACKAGE}/{name}:{line}: {function} {rule}"
            for line, function, rule in unpicklings(tree)
            if function != UNPICKLED.get(name)
        ]
        trusting += [
            f"{PACKAGE}/{name}:{line}: needs trust_remote_code=False, or a folder's code may run"
            for line in trusting_calls(tree)
        ]
        room = name.split("/")[0] if "/" in name else "top-level modules"
        if room != "config":
            hits = [(line, key.search(text)) for line, text in texts(tree)]
            named[room] += [
                f"{PACKAGE}/{name}:{line}: {hit[0]!r} is for zeromesh/config to say" for line, hit in hits if hit
            ]
        for line, sentence in docstrings(tree):
            if sentence.split(" ", 1)[0] in FRAGMENTS:
                fragments.append(f"{PACKAGE}/{name}:{line}: {sentence.splitlines()[0]!r} opens as a fragment")
    found["definitions of a public class"] = {name: len(files) for name, files in classes.items()}
    problems = []
    for kind, limit in LIMITS.items():
        allowed = ABOVE.get(kind, {})
        for what, size in found[kind].items():
            most = max(limit, allowed.get(what, 0))
            if size > most:
                where = f" ({', '.join(classes[what])})" if what in classes else ""
                problems.append(f"{what}{where}: {size} {kind}; at most {most}")
        gone = [what for what in allowed if found[kind].get(what, 0) <= limit]
        problems += [f"{what}: now within the limit of {kind}; take it out of ABOVE" for what in gone]
    for room, lines in named.items():
        if len(lines) > NAMED_ELSEWHERE.get(room, 0):
            problems += [*lines, f"{room}: {len(lines)} names of keys; at most {NAMED_ELSEWHERE.get(room, 0)}"]
    problems += [
        f"{room}: names no keys; take it out of NAMED_ELSEWHERE" for room in NAMED_ELSEWHERE if not named[room]
    ]
    problems += [*fragments, *alone, *pickles, *trusting]
    if commented < LEAST_COMMENTS * total:
        problems.append(f"{commented} comments in {total} lines; at least {LEAST_COMMENTS:.0%}")
    if len(writes) > MOST_FOREIGN_WRITES:
        problems += [*writes, f"{len(writes)} writes to attributes of other objects; at most {MOST_FOREIGN_WRITES}"]
    if len(empty) > MOST_EMPTY_NAMES:
        problems += [*empty, f"{len(empty)} names that do not say what they hold; at most {MOST_EMPTY_NAMES}"]
    return problems


def main(arguments: list[str]) -> int:
    """Print the broken limits; 1 if there are any."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    problems = check(root)
    print("\n".join(problems) if problems else "structure: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
