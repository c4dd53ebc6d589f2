"""Files and data sets that the sources name, in their order."""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeromesh.train.data.indexed import ENDINGS, file_of, prefix_of

STANDARD_LIBRARY = "python-stdlib"
"""A source that is on every machine: the running Python's own library."""

NOT_LIBRARY = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)
"""Folders of the standard library that are left out: installed packages, tests, applications, generated tables."""

RUN_FILES = frozenset({"config.json", "metrics.jsonl"})
"""Names in a folder that a run wrote. Such a folder below a source is not text."""

MASK = ".mask"
"""A data set of this ending beside another says, for each of its tokens, whether it is a label."""

DATASET_FILES = ("state.json", "dataset_info.json")
"""File that marks a folder of ``datasets``."""

DATASETS_FILE = "dataset_dict.json"
"""File that marks a folder of such folders, one for each split."""


@dataclass(frozen=True)
class Document:
    """One file of the corpus, or the part of it between two bytes; or a data set of several files.

    Attributes:
        name: its path relative to the source it came from, with forward slashes.
        path: the file; of a data set of ``datasets`` its folder, of one in Megatron's format its prefix.
        start: its first byte in the file.
        stop: the byte after its last; None for the end of the file.
    """

    name: str
    path: Path
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes in it; none if there is no such file."""
        if self.stop is not None:
            return self.stop - self.start
        try:
            return sum(file.stat().st_size for file in self.files) - self.start
        except OSError:
            return 0

    @property
    def files(self) -> list[Path]:
        """The files that it is made of."""
        if self.path.is_dir():
            return sorted(file for file in self.path.iterdir() if file.is_file())
        if self.path.is_file():
            return [self.path]
        sides = [self.path, file_of(self.path, MASK)]
        return [file for side in sides for end in ENDINGS if (file := file_of(side, end)).is_file()] or [self.path]


def find_documents(sources: Sequence[str], suffixes: Sequence[str], output: Path | None = None) -> list[Document]:
    """The files that the sources name, in the order of their names, each once.

    Args:
        sources: files, folders, glob patterns, or ``python-stdlib``.
        suffixes: how the names of the files of a folder that count end; empty for all. A file that is named itself
            always counts, and the standard library's are those in ``.py``.
        output: a folder that is written to. What lies in it is left out where it is below a source, and so is what
            other runs wrote.

    Raises:
        ValueError: if a source does not exist, has no file, or is itself written to.
    """
    found: dict[Path, Document] = {}
    for source in sources:
        documents = list(_of_source(source, tuple(suffixes), None if output is None else output.resolve()))
        if not documents:
            raise ValueError(_nothing_found(source, suffixes))
        for document in documents:
            found.setdefault(document.path.resolve(), document)
    return sorted(found.values(), key=lambda document: (document.name, str(document.path)))


def _of_source(source: str, suffixes: tuple[str, ...], output: Path | None) -> Iterator[Document]:
    if source == STANDARD_LIBRARY:
        yield from _of_folder(Path(sysconfig.get_path("stdlib")), (".py",), NOT_LIBRARY, None)
        return
    path = Path(source).expanduser()
    if is_dataset(path):
        yield Document(path.name, path)
    elif (path / DATASETS_FILE).is_file():
        yield _training_split(path)
    elif path.is_dir():
        if path.resolve() == output:
            raise ValueError(
                f"run.output is the data folder {source!r} itself, where what the run writes would become text; "
                "choose another folder with --set run.output=FOLDER"
            )
        yield from _of_folder(path, suffixes, frozenset(), output)
    elif (prefix := prefix_of(path)) is not None and (path.name.endswith(ENDINGS) or not path.is_file()):
        yield Document(prefix.name, prefix)
    elif path.is_file():
        yield Document(path.name, path)
    else:
        yield from _of_pattern(path, output)


def is_special(path: Path) -> bool:
    """Return whether it is a FIFO, a socket or a device: there is no telling when opening it returns."""
    return path.exists() and not (path.is_file() or path.is_dir())


def is_dataset(folder: Path) -> bool:
    """Return whether a folder is one that ``datasets`` wrote."""
    return all((folder / name).is_file() for name in DATASET_FILES)


def _training_split(folder: Path) -> Document:
    splits = sorted(path.name for path in folder.iterdir() if is_dataset(path))
    if "train" not in splits:
        raise ValueError(
            f"data source {str(folder)!r} has no split 'train', but {splits}; name the folder of one of its splits"
        )
    return Document("train", folder / "train")


def _of_folder(
    folder: Path, suffixes: tuple[str, ...], without: frozenset[str], output: Path | None
) -> Iterator[Document]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        here = Path(root)
        if here != folder and (is_dataset(here) or _is_written(here, output)):
            folders.clear()
            if is_dataset(here):
                yield Document(here.relative_to(folder).as_posix(), here)
            continue
        for name in files:
            path = here / name
            if not name.startswith(".") and name.endswith(suffixes or "") and path.exists():
                yield _of_file(path.relative_to(folder).as_posix(), path)


def _of_pattern(pattern: Path, output: Path | None) -> Iterator[Document]:
    base = _fixed_part(pattern)
    written: dict[Path, bool] = {}
    for match in map(Path, glob.glob(str(pattern), recursive=True)):
        name = match.relative_to(base)
        folders = [base / folder for folder in list(name.parents)[:-1]]
        for folder in folders:
            if folder not in written:
                written[folder] = _is_written(folder, output)
        if match.is_file() and not any(written[folder] for folder in folders):
            yield _of_file(name.as_posix(), match)


def _of_file(name: str, path: Path) -> Document:
    """A file, or the data set in Megatron's format that it belongs to."""
    for ending in ENDINGS:
        prefix = path.with_name(path.name.removesuffix(ending))
        prefix = prefix.with_name(prefix.name.removesuffix(MASK))
        if prefix != path and all(file_of(prefix, other).is_file() for other in ENDINGS):
            return Document(name[: len(name) - len(path.name)] + prefix.name, prefix)
    return Document(name, path)


def _is_written(folder: Path, output: Path | None) -> bool:
    """Return whether this run or another one writes to a folder."""
    return folder.resolve() == output or all((folder / name).is_file() for name in RUN_FILES)


def _fixed_part(pattern: Path) -> Path:
    """The folders of a pattern before its first wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))


def _nothing_found(source: str, suffixes: Sequence[str]) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        wanted = f"no file whose name ends in {', '.join(suffixes)}" if suffixes else "no files"
        return f"data folder {source!r} has {wanted}; put text there, or set data.suffixes to what your files end in"
    known = f"name a file, a folder, a glob pattern or {STANDARD_LIBRARY!r}"
    if is_special(path):
        return f"data source {source!r} is a FIFO, a socket or a device, which is read only once; write it to a file"
    return f"data source {source!r} does not exist and matches no file; {known}"
