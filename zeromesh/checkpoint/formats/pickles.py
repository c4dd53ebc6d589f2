"""Pickles of other libraries, read without running their code: tensors, numbers, texts and plain containers only."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeromesh.base.files import UnreadableFile, open_regular

REFUSED = (
    "nothing of it was run. Convert only files whose writer you trust: there, load it with that library, and save it "
    "again with tensors, numbers, texts, lists and dicts alone"
)

DAMAGED = "copy it again, or choose another checkpoint"


class Inert:
    """Object without behaviour in the place of one of another library's; it holds what was written of that."""

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        """Keep the arguments of the constructor, and call none."""
        instance = super().__new__(cls)
        instance.arguments = arguments
        return instance

    def __init__(self, *_: Any, **__: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.fields: Any = getattr(self, "fields", {})

    def __setstate__(self, state: Any) -> None:
        """Keep the state as it was written."""
        self.fields = state


class _Dict:
    """Constructor of a plain dict in the place of another library's mapping."""

    def __new__(cls, *_: Any) -> Any:
        return {}


_STAND_INS: dict[str, Any] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "argparse.Namespace": Inert,
    "collections.defaultdict": _Dict,
    "lightning.fabric.utilities.data.AttributeDict": _Dict,
    "lightning_fabric.utilities.data.AttributeDict": _Dict,
    "pathlib.PosixPath": Inert,
    "pathlib._local.PosixPath": Inert,
    "_codecs.encode": Inert,
}
"""Objects that take the place of what a name in a file stands for. None of these names is imported."""

_LIBRARIES = ("deepspeed.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "megatron.", "numpy.")
"""Libraries whose other objects become ``Inert``: settings and states that no conversion needs."""

_METADATA: dict[str, Any] = {
    **{
        f"torch.distributed.checkpoint.metadata.{name}": getattr(metadata, name)
        for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
                     "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")
    },
    "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "collections.OrderedDict": dict,
    "pathlib.PosixPath": Inert,
    "pathlib._local.PosixPath": Inert,
    "builtins.set": set,
}  # fmt: skip
"""Classes of the index of torch's distributed checkpoints: records of numbers and names."""


def read_tensors(path: Path, data: bytes | None = None) -> Any:
    """Return what ``torch.save`` wrote to a file, or to ``data`` in it; tensors are mapped into memory, not read.

    Raises:
        ValueError: it is cut off, or holds something else than tensors and plain containers.
    """
    source: Any = path if data is None else io.BytesIO(data)
    # Only the present format of torch.save can be mapped; what was written before 2020 is read.
    mapped = data is None and _begins(path, b"PK")
    pairs: list[Any] = [(stand_in, name) for name, stand_in in _STAND_INS.items()]
    try:
        # Named without being looked up, let alone called.
        unsafe_names = get_unsafe_globals_in_checkpoint(source) if mapped else []
        pairs += [(Inert, name) for name in unsafe_names if name.startswith(_LIBRARIES) and name not in _STAND_INS]
        with safe_globals(pairs), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|function|class) ([\w.<>]+)", str(error))
        if name is None:
            raise _damaged(path, error) from None
        raise _refused(path, name[1]) from None
    except (FileNotFoundError, PermissionError, UnreadableFile):
        raise
    # A file that is cut off lacks its directory, or ends within a pickle.
    except (RuntimeError, OSError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None


def _begins(path: Path, mark: bytes) -> bool:
    with open_regular(path) as file:
        return file.read(len(mark)) == mark


def read_metadata(path: Path) -> Any:
    """Return the index of a distributed checkpoint of torch; see ``read_tensors``."""
    try:
        with open_regular(path) as file:
            return _Metadata(file, path).load()
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None


class _Metadata(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the classes that the index is made of; a dtype is a name in torch."""
        target = _METADATA.get(f"{module}.{name}")
        if target is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            target = getattr(torch, name)
        # Megatron-Core keeps its plans of saving in the index.
        if target is None and module.startswith(("torch.distributed.checkpoint.", "megatron.")):
            target = Inert
        if target is None:
            raise _refused(self._path, f"{module}.{name}")
        return target


def _refused(path: Path, name: str) -> ValueError:
    return ValueError(f"{path} holds {name}, which is not a tensor and no plain container; {REFUSED}")


def _damaged(path: Path, error: Exception) -> ValueError:
    # Torch appends advice on switching its safety off.
    first = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ValueError(f"{path} is cut off, or no file of this format ({first}); {DAMAGED}")
