"""Models of the Hugging Face Hub: a name becomes a local folder, from the cache where it is there."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeromesh.base.files import inside, read_text
from zeromesh.base.requirements import imported

MODEL_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

MAIN = "main"  # branch of a repository that is taken where no revision is named

# No code and no pickles are fetched.
SETTINGS = ("*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt")
WEIGHTS = ("*.safetensors",)


def is_model_id(name: str | Path) -> bool:
    """Return whether a name is one of the Hub, and no local path."""
    return bool(MODEL_ID.fullmatch(str(name))) and not Path(name).exists()


@functools.cache
def model_folder(name: str | Path, weights: bool = True, revision: str = MAIN) -> Path:
    """Return the folder of a model: ``name`` itself, or the copy of a model of the Hub in its cache.

    Raises:
        ValueError: the model is neither in the cache nor can it be fetched, it has no safetensors for ``weights``, or a
            revision is named for a local folder.
    """
    if not is_model_id(name):
        if revision != MAIN:
            raise ValueError(f"{str(name)!r} is a local folder, which has no revision {revision!r}; leave it out")
        return Path(name).expanduser()
    needs = f"{str(name)!r} is not a local folder, and a model of the Hub needs the package huggingface_hub"
    hub = imported("huggingface_hub", needs)
    patterns = [*SETTINGS, *(WEIGHTS if weights else ())]
    fetch = functools.partial(hub.snapshot_download, str(name), revision=revision, allow_patterns=patterns)
    # The cache first: all ranks, and a run that is resumed, take the same files, with or without a network.
    try:
        folder = Path(fetch(local_files_only=True))
        if _is_complete(folder, weights):
            return folder
    except hub.errors.LocalEntryNotFoundError:
        pass
    try:
        folder = Path(fetch())
        problem = "" if (folder / "config.json").is_file() else "it has no config.json"
    except Exception as error:  # many types, of several packages
        problem = reason_of(error)
    if problem or not _is_complete(folder, weights):
        other = "" if revision == MAIN else f" --revision {revision}"
        raise ValueError(
            f"{str(name)!r} is not a local folder, and the Hugging Face Hub did not give a model of this name "
            f"({problem or 'not all of its weights are there as safetensors'}); where there is a network, "
            f"`hf download {name}{other}` puts it into the cache, whose place HF_HOME names, and from there it is used "
            "without one; or name a local folder"
        )
    return folder


def _is_complete(folder: Path, weights: bool) -> bool:
    """Return whether the cache has all that is read; it may have been interrupted, or asked for less."""
    if not (folder / "config.json").is_file():
        return False
    if not weights or (folder / "model.safetensors").is_file():
        return True
    try:
        index = json.loads(read_text(folder / "model.safetensors.index.json"))
        return all(inside(folder, part, "a file").is_file() for part in set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


@contextmanager
def configured(name: object) -> Iterator[None]:
    """Let what transformers raises for wrong values of a model's configuration in this context be ValueError."""
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # many types, of several packages
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no more is known"]
        raise ValueError(
            f"transformers makes no model of the configuration of {str(name)!r} ({type(error).__name__}: "
            f"{' '.join(lines)[:200]}); correct it, or copy the folder again"
        ) from error


def reason_of(error: Exception) -> str:
    """Return the reason of a failure in one line."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set, and the cache does not have it"
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
