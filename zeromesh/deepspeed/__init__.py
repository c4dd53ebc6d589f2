"""Drop-in for ``deepspeed``: its public names, each doing what it says with ZeroMesh's engine.

``import zeromesh.deepspeed as deepspeed``, or ``python -m zeromesh.deepspeed train.py`` for a script that says
``import deepspeed``. See docs/deepspeed.md.
"""

from __future__ import annotations

from typing import Any

from zeromesh.deepspeed import finder, names

__version__ = finder.VERSION
__version_major__, __version_minor__, __version_patch__ = map(int, __version__.partition("+")[0].split("."))
__git_hash__ = __git_branch__ = None

finder.add_finder()


def __getattr__(name: str) -> Any:
    return names.resolve("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *finder.contents("")})
