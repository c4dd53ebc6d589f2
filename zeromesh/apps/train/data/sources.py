"""Sources of a data set: the files that the settings name, what each holds, and which of them are held out."""

from __future__ import annotations

import codecs
import glob
import hashlib
import itertools
import json
import logging
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from zeromesh.apps.train.data import file_kinds
from zeromesh.apps.train.data.csv_tables import WITHOUT_HEADER, header_of
from zeromesh.apps.train.data.hub_datasets import dataset_folder, is_dataset_id
from zeromesh.apps.train.data.indexed import ENDINGS, MASK, file_of, prefix_of
from zeromesh.apps.train.data.records import KINDS, RAW, describe_keys, kind_of
from zeromesh.apps.train.data.text_formats import (
    INDEXED,
    TABLES,
    Document,
    cut_before,
    format_of,
    is_dataset,
    is_special,
    placed,
    portions,
    read_portion,
)
from zeromesh.apps.train.train_settings import TextData
from zeromesh.base.words import some
from zeromesh.checkpoint.weights.pretrained import MAIN

_log = logging.getLogger(__name__)

STANDARD_LIBRARY = "python-stdlib"  # on every machine: the library of the running Python

# Installed packages, tests, applications and generated tables are no text to learn from.
NOT_LIBRARY = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)
RUN_FILES = frozenset({"config.json", "metrics.jsonl"})  # in the folder of a run
DATASETS_FILE = "dataset_dict.json"  # marks a folder with one data set of datasets per split
NAMED_FILES = 5  # in a message, at most
LOOKED_AT = 2**24  # bytes of a .json file in which the end of its first record is looked for


@dataclass(frozen=True)
class Part:
    """Files of one data set."""

    name: str  # of its token files
    wanted: str  # its sources as in the settings, for messages
    sources: tuple[tuple[Document, ...], ...]  # documents of each source
    fraction: float  # share that is held out: 0 for none, 1 for all

    @property
    def documents(self) -> list[Document]:
        """Documents of all sources."""
        return [document for source in self.sources for document in source]


def find_documents(
    sources: Sequence[str], suffixes: Sequence[str], output: Path | None = None, revision: str = MAIN
) -> list[Document]:
    """Return the files that the sources name, each once, ordered by name; ``suffixes`` select files in folders."""
    # A file that is a source itself is used whatever its name ends in. The folder of the run is left out.
    by_path: dict[Path, Document] = {}
    for source in sources:
        documents = list(_find(source, tuple(suffixes), None if output is None else output.resolve(), revision))
        if not documents:
            raise ValueError(_nothing_found(source, suffixes))
        for document in documents:
            by_path.setdefault(document.path.resolve(), document)
    return sorted(by_path.values(), key=lambda document: (document.name, str(document.path)))


def _find(source: str, suffixes: tuple[str, ...], output: Path | None, revision: str) -> Iterator[Document]:
    if source == STANDARD_LIBRARY:
        yield from _find_in_folder(Path(sysconfig.get_path("stdlib")), (".py",), NOT_LIBRARY, None)
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
        yield from _find_in_folder(path, suffixes, frozenset(), output)
    # A file that has the name of a prefix is that file: the prefix can be named by one of its own files.
    elif (prefix := prefix_of(path)) is not None and (path.name.endswith(ENDINGS) or not path.is_file()):
        yield Document(prefix.name, prefix)
    elif path.is_file():
        yield Document(path.name, path, named=True)
    elif is_dataset_id(source):
        yield Document(source, dataset_folder(source, revision))
    else:
        yield from _find_by_pattern(path, output)


def _training_split(folder: Path) -> Document:
    splits = sorted(path.name for path in folder.iterdir() if is_dataset(path))
    # Only this split: the others are for tests, which must not be trained on.
    if "train" not in splits:
        raise ValueError(
            f"data source {str(folder)!r} has no split 'train', but {splits}; name the folder of one of its splits"
        )
    return Document("train", folder / "train")


def _find_in_folder(
    folder: Path, suffixes: tuple[str, ...], without: frozenset[str], output: Path | None
) -> Iterator[Document]:
    for root, folders, files in os.walk(folder):
        # In place, since os.walk goes into what is left in the list.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        here = Path(root)
        if here != folder and (is_dataset(here) or _is_written(here, output)):
            folders.clear()
            if is_dataset(here):
                yield Document(here.relative_to(folder).as_posix(), here)
            continue
        for name in files:
            path = here / name
            if not name.startswith(".") and name.endswith(suffixes or "") and path.exists():  # not a broken link
                yield _document(path.relative_to(folder).as_posix(), path)


def _find_by_pattern(pattern: Path, output: Path | None) -> Iterator[Document]:
    base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))
    is_written = cache(lambda folder: _is_written(folder, output))  # a folder may have very many files
    for match in map(Path, glob.glob(str(pattern), recursive=True)):
        name = match.relative_to(base)
        if match.is_file() and not any(is_written(base / folder) for folder in list(name.parents)[:-1]):
            yield _document(name.as_posix(), match)


def _document(name: str, path: Path) -> Document:
    """Return a file, or the data set in Megatron's format that it belongs to."""
    for ending in ENDINGS:
        prefix = path.with_name(path.name.removesuffix(ending))
        prefix = prefix.with_name(prefix.name.removesuffix(MASK))
        if prefix != path and all(file_of(prefix, other).is_file() for other in ENDINGS):
            return Document(name[: len(name) - len(path.name)] + prefix.name, prefix)
    return Document(name, path)


def _is_written(folder: Path, output: Path | None) -> bool:
    """Return whether this run or another one writes to a folder."""
    # Logs and reports of runs in a source would become text.
    return folder.resolve() == output or all((folder / name).is_file() for name in RUN_FILES)


def _nothing_found(source: str, suffixes: Sequence[str]) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        wanted = f"no file whose name ends in {', '.join(suffixes)}" if suffixes else "no files"
        return f"data folder {source!r} has {wanted}; put text there, or set data.suffixes to what your files end in"
    if is_special(path):
        return f"data source {source!r} is a FIFO, a socket or a device, which is read only once; write it to a file"
    return (
        f"data source {source!r} does not exist and matches no file; name a file, a folder, a glob pattern or "
        f"{STANDARD_LIBRARY!r}"
    )


def names_of(documents: Sequence[Document]) -> str:
    """Return the names of the first documents, for messages."""
    names = ", ".join(document.name for document in documents[:NAMED_FILES])
    more = len(documents) - NAMED_FILES
    return f"{names} and {more} more" if more > 0 else names


def look(data: TextData, part: Part, skipped: list[Document]) -> list[Document]:
    """Return the files of a data set in order, with their kinds and shares; add unreadable ones to ``skipped``."""
    texts: list[Document] = []
    files: list[Document] = []
    markup: list[Document] = []
    for source in part.sources:
        kind: str | None = None
        for file in source:
            document = replace(file, raw=data.format == RAW, columns=tuple(data.columns))
            form = format_of(document)
            if is_special(document.path):  # opening it might wait for ever
                skipped.append(document)
            elif form == INDEXED:
                _require_index(document)
                files.append(replace(document, kind=INDEXED))
            elif (other := _other_kind(data, document)) is not None:
                if document.named:
                    raise ValueError(file_kinds.refusal(document.path, other))
                (markup if other.is_markup and is_text(document) else skipped).append(document)
            elif form == ".json" and not document.named and not _has_records(data, document):
                (markup if is_text(document) else skipped).append(document)
            # The first record of a source decides for all of it, so that an odd record is an error and no other kind.
            elif form and (kind := kind or _tell(data, document, _first(data, document))) is not None:
                files.append(replace(document, kind=kind))
            elif not form and is_text(document):
                _require_no_records(data, document)
                texts.append(document)
            else:
                skipped.append(document)
    # Pages and settings beside other text, as in a folder of sources, are text as well.
    if markup and not texts:
        first = file_kinds.kind_of_file(markup[0].path)
        if first is not None:
            raise ValueError(file_kinds.refusal(markup[0].path, first))
        _first(data, markup[0])  # raises what is wrong
    texts += [replace(document, raw=True) for document in markup]
    if not texts and not files:
        kinds = file_kinds.summary([document.path for document in part.documents if not is_special(document.path)])
        tables = [document for document in part.documents if format_of(document) in TABLES and is_text(document)]
        if tables and not kinds:
            kinds = f"{names_of(tables)} has no rows below the header; add rows{WITHOUT_HEADER}"
        verb = "is" if len(part.documents) == 1 else "are"
        raise ValueError(
            f"there is no readable text in {part.wanted}: "
            + (
                kinds
                or f"{names_of(part.documents)} {verb} empty or not UTF-8; add text, or convert it to UTF-8, as with "
                "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
            )
        )
    if texts and data.format not in (None, "text", RAW):
        raise ValueError(
            f"{part.wanted} has plain text, {texts[0].path}, and data.format = {data.format!r} needs records: JSON "
            "lines (.jsonl, .jsonl.gz), .json, .csv, .tsv, .parquet, or a data set of Hugging Face; choose files with "
            "data.suffixes"
        )
    _require_one_kind(part, texts, files)
    if part.fraction in (0.0, 1.0):
        files += [replace(document, share=1.0 - part.fraction) for document in texts]
    else:
        for share, side in zip((1.0, 0.0), split_documents(texts, part.fraction), strict=True):
            files += [replace(document, share=share) for document in side]
    # In an order that depends on names only: that of a file system differs between machines.
    return sorted(files, key=lambda file: (file.name, str(file.path), file.start))


def is_text(document: Document) -> bool:
    """Return whether a file can be read, is UTF-8, and has a byte that is not zero."""
    decoder, has_text = codecs.getincrementaldecoder("utf-8")(), False
    try:
        with document.path.open("rb") as file:
            while block := file.read(2**20):
                decoder.decode(block)
                has_text = has_text or bool(block.strip(b"\0"))  # a file after a crash may be all zeros
        decoder.decode(b"", final=True)  # raises for half a character at the end
    except (OSError, UnicodeDecodeError):
        return False
    return has_text


def _other_kind(data: TextData, document: Document) -> file_kinds.FileKind | None:
    """Return what a file is that is not read; None for text, records and tables, and for what the settings ask for."""
    path = document.path
    if document.raw or not path.is_file() or format_of(document) == ".parquet":
        return None
    kind = file_kinds.kind_of_file(path)
    compressed = path.name.lower().endswith((".jsonl.gz", ".ndjson.gz"))
    chosen = data.suffixes and path.name.endswith(tuple(data.suffixes))
    return (
        None if kind is None or (compressed and file_kinds.GZIP in kind.begins) or (kind.is_markup and chosen) else kind
    )


def _require_index(document: Document) -> None:
    """Refuse the tokens' half of a data set in Megatron's format if it is a text of another program."""
    tokens, index = (file_of(document.path, ending) for ending in ENDINGS)
    if index.is_file() or not file_kinds.is_plain(file_kinds.head_of(tokens)):
        return
    raise ValueError(
        f"{tokens} is text, and its name ends like that of Megatron's tokens, for which {index.name} is missing; let "
        "the name of text end in .txt, and that of records in .jsonl or .csv"
    )


def _has_records(data: TextData, document: Document) -> bool:
    """Return whether a file of JSON has records."""
    try:
        return _first(data, document) is not None
    except ValueError:
        return False


def _first(data: TextData, document: Document) -> tuple[str, Mapping[str, Any]] | None:
    """Return the kind of the first record of a file, and the record; None if it has none."""
    form = format_of(document)
    for portion in portions(document):
        for number, record in read_portion(portion):
            with placed(portion, number):
                try:
                    return kind_of(data, record), record
                except ValueError as error:
                    if form in TABLES:
                        raise ValueError(_undecided(data, document, record)) from None
                    raise ValueError(f"{error}; {file_kinds.AS_WRITTEN}" if form == ".json" else str(error)) from None
    return None


def _tell(data: TextData, document: Document, first: tuple[str, Mapping[str, Any]] | None) -> str | None:
    """Return the kind of the first record; log which of its keys are read, unless these are all that it has."""
    if first is None:
        return None
    kind, record = first
    if format_of(document) in TABLES or len(record) > len(KINDS[kind].keys(data, record)):
        _log.info("%s: %s", document.name, describe_keys(data, kind, record))
    return kind


def _undecided(data: TextData, document: Document, record: Mapping[str, str]) -> str:
    """Return the error for a table whose columns do not say what is to be learned."""
    columns = ", ".join(map(repr, record))
    asked = f", and data.format = {data.format!r} needs others" if data.format else ""
    header = "" if document.columns else WITHOUT_HEADER
    return (
        f"the table has the columns {columns}{asked}; say what is to be learned: --set data.text_key=COLUMN, or --set "
        f"data.prompt_key=COLUMN --set data.response_key=COLUMN{header}; {file_kinds.AS_WRITTEN}"
    )


def _require_one_kind(part: Part, texts: Sequence[Document], files: Sequence[Document]) -> None:
    """Refuse a mixture of text, packed records and token files."""
    # They become samples in different ways, and a data set has one.
    groups = {"text": [*texts]}
    for file in files:
        packed = file.kind in KINDS and KINDS[file.kind].packed
        name = file.kind if file.kind in (INDEXED, "preference") else "records" if packed else "text"
        groups.setdefault(name, []).append(file)
    if sum(map(bool, groups.values())) > 1 or len(groups.get(INDEXED, ())) > 1:
        names = "; ".join(f"{name}: {names_of(documents)}" for name, documents in groups.items() if documents)
        raise ValueError(
            f"{part.wanted} has more than one data set ({names}); name them one by one, in data.train as "
            '{"source": ..., "weight": ...}'
        )


def _kind_or_none(data: TextData, record: Mapping[str, Any]) -> str | None:
    try:
        return kind_of(data, record)
    except ValueError:
        return None


def _require_no_records(data: TextData, document: Document) -> None:
    """Refuse records and tables in a file that is named itself and ends as plain text does."""
    # The model would learn quotes and brackets.
    if document.raw or not document.named:
        return
    names = header_of(file_kinds.head_of(document.path))
    if len(names) > 1 and _kind_or_none(data, dict.fromkeys(names)) not in (None, "text"):
        raise ValueError(
            f"{document.path} begins with the header of a table ({some(names)}), and its name ends like that of plain "
            f"text; let it end in .csv; {file_kinds.AS_WRITTEN}"
        )
    if not file_kinds.head_of(document.path).lstrip().startswith((b"{", b"[")):
        return
    with document.path.open("rb") as file:
        # The end of what was read may be half a character.
        text = file.read(LOOKED_AT).decode("utf-8-sig", errors="ignore").strip()
    try:
        first, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
        kind_of(data, first)
    except (ValueError, RecursionError):
        return
    ending = ".json" if text.startswith("[") else ".jsonl"
    raise ValueError(
        f"{document.path} has {'an array of records' if ending == '.json' else 'records'} in JSON, and its name ends "
        f"like that of plain text; let it end in {ending}; {file_kinds.AS_WRITTEN}"
    )


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and those to hold out, about ``fraction`` of them."""
    # The hash of the name alone decides, so a document stays on its side when others come or go. If this holds out
    # nothing, or leaves less than half of the text that should be trained on, the end of the largest document is.
    held_out = {document for document in documents if _share(document.name) < fraction}
    if fraction > 0 and documents:
        size = sum(document.size for document in documents)
        rest = size - sum(document.size for document in held_out)
        if not held_out or rest <= (1 - fraction) * size / 2:
            return _split_largest(documents, round(fraction * size))
    training = [document for document in documents if document not in held_out]
    return training, [document for document in documents if document in held_out]


def _split_largest(documents: Sequence[Document], size: int) -> tuple[list[Document], list[Document]]:
    """Hold out the last ``size`` bytes of the largest document, or a little more, from the start of a line."""
    largest = max(documents, key=lambda document: document.size)
    start, stop = largest.start, largest.start + largest.size
    if stop - start < 2:
        return [*documents], []
    wanted = min(max(stop - size, start + 1), stop - 1)
    cut = cut_before(largest.path, max(start, wanted - size), wanted)  # at most twice as much, for any length of lines
    if cut == stop:
        return [*documents], []
    head = replace(largest, stop=cut)
    return [head if document == largest else document for document in documents], [replace(largest, start=cut)]


def _share(name: str) -> float:
    """Return a number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2.0**64
