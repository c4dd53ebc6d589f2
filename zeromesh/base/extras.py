"""Packages that only some features need: which are missing, and the command that installs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

REQUIREMENTS = {"transformers": "'transformers>=5'", "mpi4py": "'mpi4py>=4' mpich", "keras": "'keras>=3'"}
"""Requirements by package, where pip is not asked for the package's own name alone."""


def install_line(packages: Iterable[str]) -> str:
    """Return the command that installs packages, which also works from a clone."""
    return f"pip install {' '.join(REQUIREMENTS.get(package, package) for package in packages)}"


def is_installed(package: str) -> bool:
    """Return whether a package can be found; it is not imported, which may take seconds."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or it was switched off in sys.modules
        return False


def missing_packages(needed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each package that is missing, of those in ``needed`` with what needs them."""
    return [
        f"{reason} needs the package {package}, which is not installed: {install_line([package])}"
        for package, reason in needed.items()
        if not is_installed(package)
    ]
