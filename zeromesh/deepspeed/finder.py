"""Import of the modules in ``names.py``, below ``zeromesh.deepspeed`` and, after ``install``, as ``deepspeed``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from zeromesh.deepspeed import names, plugin_check
from zeromesh.deepspeed.names import ALIAS, OWN

VERSION = "0.19.8+zeromesh"
"""Version of DeepSpeed whose interface this is; libraries ask for at least 0.18.2."""


def _dotted(fullname: str) -> str:
    """Return the name of a module below the package, by either name of that."""
    return fullname.removeprefix(OWN).removeprefix(ALIAS).removeprefix(".")


class TableModule(ModuleType):
    """A module of the table, whose attributes are looked up when they are used."""

    def __getattr__(self, name: str) -> Any:
        return names.resolve(_dotted(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A function that has the name of a module beside it stays in its place, as in DeepSpeed's packages.
        if not (isinstance(value, ModuleType) and name in names.names(_dotted(self.__name__))):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *contents(_dotted(self.__name__))})


def contents(dotted: str) -> set[str]:
    """Return the names and the modules in a module of the table."""
    below = (name.rpartition(".") for name in names.modules() if name)
    return {*names.names(dotted), *(name for parent, _, name in below if parent == dotted)}


class Described(Distribution):
    """Metadata of a package ``deepspeed``, which libraries ask for its version."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of the metadata, and None for any other file."""
        text = f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {VERSION}\nSummary: zeromesh in its place\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Return where a file would be; there is none."""
        return Path(__file__).parent / path


class Finder(DistributionFinder, MetaPathFinder, Loader):
    """Finds and makes the modules of the table.

    A module is made once, as ``zeromesh.deepspeed.NAME``; as ``deepspeed.NAME`` it is the same object, so that classes
    are the same, too.
    """

    def __init__(self) -> None:
        self._answers_alias = False
        self._own_specs: dict[str, ModuleSpec | None] = {}  # by the other name of a module

    def answer_alias(self) -> None:
        """Answer for ``deepspeed``, too, from now on."""
        self._answers_alias = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module of the table."""
        if fullname == plugin_check.HOME and self._answers_alias:
            return plugin_check.find(path)
        is_alias = fullname.partition(".")[0] == ALIAS
        if not (self._answers_alias if is_alias else fullname.startswith(f"{OWN}.")):
            return None
        dotted = _dotted(fullname)
        if dotted in names.modules():
            return ModuleSpec(fullname, self, origin=__file__, is_package=True)
        # Files of this package must not be imported a second time under the other name.
        if is_alias:
            raise ModuleNotFoundError(names.explain(dotted), name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module: a new one under its own name, the same one under any other."""
        dotted = _dotted(spec.name)
        own_name = f"{OWN}.{names.SAME.get(dotted, dotted)}".rstrip(".")
        if spec.name == own_name:
            return TableModule(own_name)
        module = import_module(own_name)
        self._own_specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is; the machinery of imports has given it the spec of its other name."""
        spec = module.__spec__
        if spec is not None and spec.name in self._own_specs:
            vars(module)["__spec__"] = self._own_specs[spec.name]

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  as in the base class
    ) -> Iterable[Distribution]:
        """Return the metadata of ``deepspeed`` where the alias is installed."""
        if self._answers_alias and (context.name is None or context.name.lower() == ALIAS):
            return [Described()]
        return []


_finder = Finder()


def add_finder() -> None:
    """Let the modules below ``zeromesh.deepspeed`` be imported."""
    if _finder not in sys.meta_path:
        # First, or a real package of the name ``deepspeed`` would be found in its place.
        sys.meta_path.insert(0, _finder)


def install() -> None:
    """Let ``import deepspeed``, and whoever asks for a package of this name, find ``zeromesh.deepspeed``.

    Call it before anything imports libraries that look for deepspeed, as they look once.

    Raises:
        ImportError: the real deepspeed has been imported already.
    """
    there = sys.modules.get(ALIAS)
    if there is not None and there is not import_module(OWN):
        raise ImportError(
            f"deepspeed has been imported already, from {getattr(there, '__file__', None)}; call "
            f"{OWN}.install() before that, or run the script with python -m {OWN}"
        )
    add_finder()
    _finder.answer_alias()
