"""``python -m zeromesh.deepspeed train.py ARGUMENTS``: run a script that finds ZeroMesh as ``deepspeed``."""

from __future__ import annotations

import os
import sys

from zeromesh.comm import rank
from zeromesh.deepspeed.finder import install

USAGE = "usage: python -m zeromesh.deepspeed [-m] SCRIPT [ARGUMENTS]: run SCRIPT, where `import deepspeed` is ZeroMesh"


def main(arguments: list[str]) -> None:
    """Run the script, or with ``-m`` the module, that the arguments begin with."""
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:] or ["--help"]
    if target in ("-h", "--help"):
        raise SystemExit(USAGE)
    if not is_module and not os.path.isfile(target):
        raise SystemExit(f"{target!r} is not a file; name a Python script, or -m MODULE\n{USAGE}")
    install()
    rank.run(target, rest, is_module)


if __name__ == "__main__":
    main(sys.argv[1:])
