"""Packages that ZeroMesh works with: how to install the optional ones, and which torch it is tested with."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from typing import Any

OPTIONAL = ("mpi4py", "transformers", "peft", "datasets", "matplotlib", "tensorboard", "wandb")
"""Optional packages that ``zeromesh doctor`` looks for."""

# What pip is asked for, where it is not the package's name alone; pyproject.toml has the same in its extras.
_REQUIREMENTS = {
    "transformers": ("transformers>=5",),
    "keras": ("keras>=3",),
    "mpi4py": ("mpi4py>=4", "mpich"),
}

LEAST_TORCH = (2, 11)
TESTED_TORCH = (2, 13)
"""The oldest torch that is accepted, and the newest that the tests have run with."""


def pip_install(*packages: str) -> str:
    """Return the command that installs optional packages. It works anywhere, also without a clone of ZeroMesh."""
    return shlex.join(
        ["pip", "install", *(name for package in packages for name in _REQUIREMENTS.get(package, (package,)))]
    )


def imported(module: str, purpose: str) -> Any:
    """Return a module of an optional package; raise ValueError with its ``purpose`` where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"{purpose} ({error}): {pip_install(module.partition('.')[0])}") from None


def user_function(name: str) -> Any:
    """Return a user's function by ``package.module:function``; raise ValueError if it cannot be imported."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")  # as `python -m` finds a user's module
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {name!r} cannot be imported ({error}); name package.module:function") from None
    finally:
        sys.path.remove("")


def torch_release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version of torch such as "2.13.0+cpu"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def untested_torch(version: str) -> str:
    """Return a sentence if a torch is newer than the tests have run with, else ""."""
    if torch_release(version) <= TESTED_TORCH:
        return ""
    newest = ".".join(map(str, TESTED_TORCH))
    remedy = shlex.join(["pip", "install", f"torch=={newest}.*"])
    return f"torch {version} is newer than {newest}, the newest that ZeroMesh is tested with; if it fails: {remedy}"
