"""``python -m zeromesh.deepspeed train.py ARGUMENTS``: run a script that finds ZeroMesh as ``deepspeed``."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from zeromesh.comm import rank
from zeromesh.deepspeed.finder import install

USAGE = "usage: python -m zeromesh.deepspeed [-m] SCRIPT [ARGUMENTS]: run SCRIPT, where `import deepspeed` is ZeroMesh"

PASS_LOCAL_RANK = "--pass-local-rank"
"""First argument of ``zeromesh launch``, which stands in for DeepSpeed's launcher."""

_NAMES = ("--local_rank", "--local-rank")


def _pass_local_rank() -> None:
    """Let parsers of the command line find ``--local_rank``, which DeepSpeed's launcher passes, if they know it."""
    parse = ArgumentParser.parse_known_args

    def with_local_rank(parser: ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        name = next((name for name in _NAMES if name in parser._option_string_actions), None)
        words = sys.argv[1:] if args is None else [*args]
        # Not for a script that parses something else, and behind nothing that takes all arguments after it.
        if name and words == sys.argv[1:] and not any(word.startswith(_NAMES) for word in words):
            words = [f"{name}={os.environ['LOCAL_RANK']}", *words]
        return parse(parser, words, namespace)

    setattr(ArgumentParser, parse.__name__, with_local_rank)


def main(arguments: list[str]) -> None:
    """Run the script, or with ``-m`` the module, that the arguments begin with."""
    if arguments[:1] == [PASS_LOCAL_RANK]:
        arguments = arguments[1:]
        _pass_local_rank()
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:] or ["--help"]
    if target in ("-h", "--help"):
        raise SystemExit(USAGE)
    if not is_module and not os.path.isfile(target):
        raise SystemExit(f"{target!r} is no file; name a Python script, or -m MODULE\n{USAGE}")
    install()
    rank.run(target, rest, is_module)


if __name__ == "__main__":
    main(sys.argv[1:])
