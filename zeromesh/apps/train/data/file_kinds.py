"""Kinds of files that are no training text, known by first bytes and by name, and what to do with each."""

from __future__ import annotations

import codecs
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zeromesh.base.words import counted, some

HEAD = 512  # bytes by which a file is known; a tar archive names itself at byte 257
TAR = (257, b"ustar")
PARQUET = b"PAR1"
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
GZIP = b"\x1f\x8b"

READ = (
    "ZeroMesh reads plain text, .jsonl, .ndjson (also with .gz), .json, .csv, .tsv, .parquet, folders written by "
    "datasets, and Megatron's .bin with .idx"
)
AS_WRITTEN = "to learn it as it is written: --set data.format=raw"
TABLE = "save it as CSV with a header"
CONVERT = "convert it to text first, as with pandoc"
UNPACK = "unpack it, and name the files in it"
RECORDS = 'write its records as JSON lines (.jsonl), as {"text": ...} or {"prompt": ..., "response": ...}'
SCRIPT = "zeromesh train takes text only; for other data write a script with zeromesh.initialize (examples/vision)"
WEIGHTS = "name a model's folder in huggingface.path, and data in data.train"


class FileKind(NamedTuple):
    """A row of ``KINDS``."""

    name: str  # with its article
    endings: tuple[str, ...]
    remedy: str
    begins: tuple[bytes, ...] = ()  # in lower case for markup
    member: str = ""  # of a ZIP archive: part of a name in it
    is_markup: bool = False  # text that can be learned as it is written

    @property
    def noun(self) -> str:
        """The name without its article."""
        return self.name.partition(" ")[2]


KINDS: tuple[FileKind, ...] = (
    FileKind("an Excel workbook", (".xlsx", ".xlsm", ".xls"), TABLE, member="xl/workbook"),
    FileKind("an OpenDocument file", (".ods", ".odt", ".odp"), f"{TABLE}, or as text", member="content.xml"),
    FileKind("a Word document", (".docx", ".doc"), "save it as plain text", member="word/document"),
    FileKind("a PowerPoint file", (".pptx", ".ppt"), CONVERT, member="ppt/presentation"),
    FileKind(
        "an Office document", (), "save it as CSV with a header, or as plain text", (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a",)
    ),
    FileKind("an EPUB book", (".epub",), CONVERT, member="META-INF/container.xml"),
    FileKind("a PDF document", (".pdf",), "extract its text, as with pdftotext", (b"%PDF-",)),
    FileKind("an RTF document", (".rtf",), CONVERT, (b"{\\rtf",)),
    FileKind("a NumPy archive", (".npz",), RECORDS, member=".npy"),
    FileKind("a PyTorch file", (".pt", ".pth", ".ckpt"), WEIGHTS, member=".pkl"),
    FileKind("a ZIP archive", (".zip",), UNPACK, ZIP),
    FileKind("a tar archive", (".tar", ".tar.gz", ".tgz"), UNPACK),
    FileKind(
        "a gzip file", (".gz",), "gunzip it; only JSON lines are read compressed (.jsonl.gz, .ndjson.gz)", (GZIP,)
    ),
    FileKind("a bzip2 file", (".bz2",), "unpack it with bunzip2", (b"BZh",)),
    FileKind("an xz file", (".xz",), "unpack it with unxz", (b"\xfd7zXZ\0",)),
    FileKind("a Zstandard file", (".zst", ".zstd"), "unpack it with unzstd", (b"\x28\xb5\x2f\xfd",)),
    FileKind("a 7z archive", (".7z",), UNPACK, (b"7z\xbc\xaf\x27\x1c",)),
    FileKind("a RAR archive", (".rar",), UNPACK, (b"Rar!\x1a\x07",)),
    FileKind("a PNG image", (".png",), SCRIPT, (b"\x89PNG\r\n\x1a\n",)),
    FileKind("a JPEG image", (".jpg", ".jpeg"), SCRIPT, (b"\xff\xd8\xff",)),
    FileKind("a GIF image", (".gif",), SCRIPT, (b"GIF87a", b"GIF89a")),
    FileKind("a TIFF image", (".tif", ".tiff"), SCRIPT, (b"II*\0", b"MM\0*")),
    FileKind("a WebP image", (".webp",), SCRIPT),
    FileKind("a BMP image", (".bmp",), SCRIPT),
    FileKind("an audio file", (".wav", ".mp3", ".flac", ".ogg", ".m4a"), SCRIPT, (b"ID3", b"fLaC", b"OggS")),
    FileKind("a video file", (".mp4", ".mkv", ".avi", ".mov", ".webm"), SCRIPT, (b"\x1a\x45\xdf\xa3",)),
    FileKind("a RIFF file", (), SCRIPT, (b"RIFF",)),
    FileKind("a SQLite database", (".sqlite", ".sqlite3", ".db"), TABLE, (b"SQLite format 3\0",)),
    FileKind("a pickle", (".pkl", ".pickle", ".joblib"), RECORDS, (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")),
    FileKind("a NumPy array", (".npy",), RECORDS, (b"\x93NUMPY",)),
    FileKind("an HDF5 file", (".h5", ".hdf5"), RECORDS, (b"\x89HDF\r\n\x1a\n",)),
    FileKind(
        "an Arrow table",
        (".arrow", ".feather"),
        "name the folder in which datasets wrote it, or write it as .parquet",
        (b"ARROW1\0\0", b"FEA1", b"\xff\xff\xff\xff"),
    ),
    FileKind("an ORC table", (".orc",), "write it as .parquet", (b"ORC",)),
    FileKind("an Avro file", (".avro",), "write it as .parquet", (b"Obj\x01",)),
    FileKind("a weight file", (".safetensors", ".gguf"), WEIGHTS, (b"GGUF",)),
    FileKind("a UTF-16 text", (), "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW", (b"\xff\xfe", b"\xfe\xff")),
    FileKind("an HTML page", (".html", ".htm", ".xhtml"), CONVERT, (b"<!doctype html", b"<html"), is_markup=True),
    FileKind("an XML file", (".xml",), RECORDS, (b"<?xml",), is_markup=True),
    FileKind("a YAML file", (".yaml", ".yml"), RECORDS, is_markup=True),
    FileKind("a notebook", (".ipynb",), "export its text, as with jupyter nbconvert --to script", is_markup=True),
)
"""Kinds, of which the first counts whose bytes a file begins with, else the first whose ending it has."""

ENDINGS = tuple(ending for kind in KINDS for ending in kind.endings)
READ_ENDINGS = (
    *(".txt", ".md", ".rst", ".tex", ".py", ".log"),
    *(".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".bin", ".idx"),
)


# Bytes of texts: none of the control characters but those of layout and of terminals.
_PRINTED = bytes([*range(7, 14), 27, *range(32, 256)])


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""


def is_plain(head: bytes) -> bool:
    """Return whether the beginning of a file is UTF-8 text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its end may be half a character
    except UnicodeDecodeError:
        return False
    return bool(head) and not head.translate(None, delete=_PRINTED)


def kind_of_file(path: Path) -> FileKind | None:
    """Return what a file is, if it is no text, table or records that can be read; None for all else."""
    head = head_of(path)
    if head.startswith(ZIP):
        return _kind_of_archive(path)
    plain = is_plain(head)
    markup = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    for kind in KINDS:
        if kind.is_markup:
            matches = plain and markup.startswith(kind.begins or (b"\0",))
        else:
            # Letters alone prove nothing about a text: it may begin with ORC.
            matches = head.startswith(kind.begins or (b"\0never",)) and (
                not plain or head.startswith((b"%PDF-", b"{\\rtf"))
            )
        if matches:
            return kind
    if head[TAR[0] :].startswith(TAR[1]):
        return next(kind for kind in KINDS if kind.name == "a tar archive")
    return _kind_by_name(path) if head else None


def _kind_by_name(path: Path) -> FileKind | None:
    name = path.name.lower()
    return next((kind for kind in KINDS if name.endswith(kind.endings or ("\0",))), None)


def _kind_of_archive(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        names = []
    fits = (kind for kind in KINDS if kind.member and any(kind.member in name for name in names))
    named = _kind_by_name(path)
    rest = named if named is not None and named.member else next(kind for kind in KINDS if kind.begins == ZIP)
    return next(fits, rest)


def refusal(path: Path, kind: FileKind) -> str:
    """Return the error for a file of a kind that is not read."""
    if not kind.is_markup and is_plain(head_of(path)) and not head_of(path).startswith(kind.begins or (b"\0",)):
        return (
            f"{path} is text, and its name ends like that of {kind.name}; let the name end in .txt, or in "
            f".csv or .jsonl if it has records; {AS_WRITTEN}"
        )
    as_written = f"; {AS_WRITTEN}" if kind.is_markup else ""
    return f"{path} is {kind.name}, which is not read: {kind.remedy}{as_written}; {READ}"


def summary(paths: Sequence[Path]) -> str:
    """Return what files are, with the remedy of the most frequent kind, as ``3 PNG images (a)``; "" if unknown."""
    groups: dict[FileKind, list[str]] = {}
    for path in paths:
        if (kind := kind_of_file(path)) is not None:
            groups.setdefault(kind, []).append(path.name)
    if not groups:
        return ""
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    words = [f"{counted(len(names), kind.noun)} ({some(names, most=3)})" for kind, names in ordered]
    rest = len(paths) - sum(map(len, groups.values()))
    words += [f"{counted(rest, 'file')} that cannot be read as UTF-8"] if rest else []
    return f"{', '.join(words)}: {ordered[0][0].remedy}; {READ}"
