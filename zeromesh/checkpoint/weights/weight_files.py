"""Files of a whole model in a folder, one or several with an index: safetensors read in parts, or any written."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from zeromesh.base.files import UnreadableFile, inside, read_text, require_regular, write_text
from zeromesh.base.words import some

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

OPEN_FILES = 64

# Bytes of tensors in one file that is written, which wait in memory until then.
LARGEST_FILE = 4 * 10**9


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file; ``kind`` is what the file calls its dtype."""

    file: Path
    key: str
    shape: tuple[int, ...]
    kind: str = "F32"

    def __str__(self) -> str:
        return f"{self.key} in {self.file.name}"

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the flattened tensor; only the rows that they lie in are read."""
        if not self.shape:
            return self.whole().reshape(1)[start:stop]
        width = math.prod(self.shape[1:])
        first, last = start // max(width, 1), -(-stop // max(width, 1))
        rows = self._taken(lambda file: file.get_slice(self.key)[first:last])
        return rows.reshape(-1)[start - first * width : stop - first * width]

    def whole(self) -> torch.Tensor:
        """Return the tensor in its shape."""
        return self._taken(lambda file: file.get_tensor(self.key))

    def _taken(self, take: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            file = _opened(self.file)
            # The file may have been written anew since: other elements would be taken without a word.
            if (shape := tuple(file.get_slice(self.key).get_shape())) != self.shape:
                raise ValueError(f"its shape was {self.shape} before, and is {shape} now")
            return take(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{self.key} in {str(self.file)!r} cannot be read: {error}") from None


def checkpoint_tensors(folder: Path) -> Iterator[FileTensor]:
    """Yield the tensors of the safetensors files in a folder; raise ValueError if there are none, or one is damaged."""
    for file, keys in _files(folder).items():
        opened = _opened(file)
        present = set(opened.keys())
        if lacking := sorted(keys - present):
            raise ValueError(f"{str(file)!r} lacks {some(lacking)}, which {INDEX} says it holds; copy the file again")
        for key in sorted(keys or present):
            tensor_slice = opened.get_slice(key)
            yield FileTensor(file, key, tuple(tensor_slice.get_shape()), tensor_slice.get_dtype())


def _files(folder: Path) -> dict[Path, set[str]]:
    """Return the files of a checkpoint, with the tensors that its index expects in each; none without an index."""
    index = folder / INDEX
    if index.is_file():
        try:
            places: dict[str, str] = dict(json.loads(read_text(index))["weight_map"].items())
            if not all(isinstance(name, str) for name in places.values()):
                raise ValueError("weight_map has to give the name of a file for each tensor")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{str(index)!r} is not an index of safetensors: {error!r}; copy the file again") from None
        files: dict[Path, set[str]] = {}
        for key, name in places.items():
            files.setdefault(inside(folder, name, f"a file in {INDEX}"), set()).add(key)
        if absent := [file.name for file in files if not file.is_file()]:
            keys = [key for key, name in places.items() if name in absent]
            raise ValueError(f"{str(folder)!r} lacks {', '.join(absent)} with {some(keys)}; copy it again")
        # An earlier export may have left one of them, and which one is meant cannot be told.
        if (folder / SINGLE).is_file() and folder / SINGLE not in files:
            raise ValueError(
                f"{str(folder)!r} holds both {SINGLE} and {INDEX} of other files; take out those that are not meant"
            )
        return files
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    # What is there says what to do.
    pickles, others = (sorted(path.name for path in folder.glob(f"*{ending}")) for ending in (".bin", ".safetensors"))
    content = "it has no weights"
    if others:
        content = f"it has {', '.join(others[:3])}, and what is in which of several files is told by the index"
    elif pickles:
        content = f"only {', '.join(pickles[:3])}, which are pickles and may run any code; convert them"
    raise ValueError(
        f"{str(folder)!r} holds no {SINGLE} and no {INDEX}: {content}; "
        "model.save_pretrained(folder) of a recent transformers writes safetensors"
    )


def _opened(file: Path) -> Any:
    try:
        require_regular(file)
        state = file.stat()
    except UnreadableFile:
        raise
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read ({error.strerror}); copy it again") from None
    return _handle(file, state.st_ino, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=OPEN_FILES)
def _handle(file: Path, *state: int) -> Any:
    # The state is in the key of the cache, so that a file that was rewritten is opened again.
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt")
    except (OSError, MemoryError) as error:
        raise ValueError(f"{str(file)!r} cannot be opened ({error})") from None
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is truncated or not a safetensors file ({error}); copy it again") from None


class ExportFiles:
    """Files of weights in a folder, which appear under their names when all are complete.

    A context in which they are written: without an error it finishes them, else it removes what there is of them. The
    end of ``name`` says of which kind: ``.safetensors``, or ``.bin``, which is torch's pickle.
    """

    def __init__(self, folder: Path, name: str, largest: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for part in _named(folder, rf"{re.escape(name)}\.\d{{5}}\.part"):
            part.unlink()  # of a process that was killed
        # Of one file, if that is enough for the largest number of bytes; else they are numbered, with an index.
        self._folder, self._name, self._largest = folder, name, largest or LARGEST_FILE
        self._state: dict[str, torch.Tensor] = {}
        self._written: list[tuple[Path, list[str]]] = []
        self._bytes = self._held = 0  # of all files, and of the tensors that wait for the next one

    def add(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take tensors on the CPU; a file is written when there are enough."""
        for name, tensor in state.items():
            if self._state and self._held + tensor.nbytes > self._largest:
                self._flush()
            self._state[name] = tensor.contiguous()
            self._held += tensor.nbytes

    def finish(self) -> None:
        """Write the rest and give the files their names; remove files of an earlier, longer export."""
        if self._state or not self._written:
            self._flush()
        total, (stem, end) = len(self._written), os.path.splitext(self._name)
        index = self._folder / f"{self._name}.index.json"
        places: dict[str, str] = {}
        for number, (part, names) in enumerate(self._written, start=1):
            # Only now is their number known, which is in their names.
            final = self._name if total == 1 else f"{stem}-{number:05d}-of-{total:05d}{end}"
            os.replace(part, self._folder / final)
            places |= dict.fromkeys(names, final)
        if total > 1:
            text = json.dumps({"metadata": {"total_size": self._bytes}, "weight_map": places}, indent=2)
            # A reader sees the old index or the new one, and no half of either.
            write_text(index, text)
        else:
            index.unlink(missing_ok=True)
        # Files of an earlier, longer export would make two models of one folder.
        numbered = rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(end)}"
        for path in _named(self._folder, rf"{re.escape(self._name)}|{numbered}"):
            if path.name not in places.values():
                path.unlink()

    def discard(self) -> None:
        """Remove the files written so far."""
        for part, _ in self._written:
            part.unlink(missing_ok=True)

    def __enter__(self) -> ExportFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        part = self._folder / f"{self._name}.{len(self._written):05d}.part"
        self._written.append((part, list(self._state)))  # before it is there, so that ``discard`` finds half a file
        try:
            if self._name.endswith(".bin"):
                torch.save(self._state, part)
            else:
                save_file(self._state, part, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{part} could not be written: {error}; make room, or choose another folder") from None
        # Before the rename: after a loss of power, a name without its data would pass for a model.
        with part.open("rb") as file:
            os.fsync(file.fileno())
        self._bytes += self._held
        self._state, self._held = {}, 0


def _named(folder: Path, pattern: str) -> list[Path]:
    """Return the files whose names fit a regular expression."""
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]
