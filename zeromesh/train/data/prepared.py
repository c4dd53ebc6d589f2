"""Prepared text: sets of token files, and their summary on disk."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromesh.config.train import TextData
from zeromesh.train.data.corpus import MASK
from zeromesh.train.data.indexed import Indexed, file_of, open_indexed

LENGTH = "model.sequence_length or huggingface.sequence_length"
"""The keys, of which a run has one, that say how many tokens a sample has."""


@dataclass(frozen=True)
class TokenSet:
    """Documents of a data set in Megatron's format that are learned from, or held out.

    Attributes:
        prefix: path of the files without their endings.
        chosen: file with the numbers of the documents, int64, rising; None for all.
        documents: how many.
        tokens: of them.
        labels: tokens that are learned from, or scored.
        bytes: of text that the labels stand for; 0 if that is not known.
        packed: whether documents are learned from as wholes, with a file of masks; otherwise they are a stream.
        highest: the largest id in the files.
    """

    prefix: Path
    chosen: Path | None
    documents: int
    tokens: int
    labels: int
    bytes: int
    packed: bool
    highest: int

    @cached_property
    def indexed(self) -> Indexed:
        """The open files."""
        return open_indexed(self.prefix)

    @cached_property
    def mask(self) -> NDArray[np.uint8] | None:
        """1 for each token of the files that may be a label, u8; None where all may."""
        return open_indexed(file_of(self.prefix, MASK)).tokens if self.packed else None

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Numbers of its documents in the files, int64, shape ``(documents,)``; mapped into memory where in a file."""
        if self.chosen is None:
            return np.arange(self.indexed.documents)
        numbers: NDArray[np.int64] = np.load(self.chosen, mmap_mode="r" if self.documents else None)
        return numbers


@dataclass(frozen=True)
class PreparedData:
    """Text as token files.

    Attributes:
        key: changes when the sources, the tokenizer or the settings of the text do, but for the size of the vocabulary.
        train: what is trained on, one set for each part of a blend.
        validation: what is held out; none of them is empty.
        vocabulary: entries of the tokenizer; without one, one more than the largest id.
        pad: the id that fills up samples.
        capped: whether the entries are fewer than the default because the text has no more.
        skipped: documents that are empty, cannot be read, or are not UTF-8.
        dropped: records that were longer than a sample.
        gzip_bytes: what ``gzip -9`` makes of the held-out text, one document after the other.
        python: whether all documents end in ``.py``.
        tokenizer: folder of the tokenizer; None where the sources are tokens already and none was named.
        weights: share of each part of the blend; they add up to 1.
        packing: "pack" or "pad".
        document_attention: whether tokens see those of their own document only.
    """

    key: str
    train: tuple[TokenSet, ...]
    validation: tuple[TokenSet, ...]
    vocabulary: int
    pad: int
    capped: bool
    skipped: int
    dropped: int
    gzip_bytes: int
    python: bool
    tokenizer: Path | None
    weights: tuple[float, ...] = (1.0,)
    packing: str = "pack"
    document_attention: bool = False

    @property
    def held_out_bytes(self) -> int:
        """Bytes of text that the held-out labels stand for; 0 if that is not known of all of them."""
        sizes = [held.bytes for held in self.validation]
        return sum(sizes) if all(sizes) else 0

    @property
    def held_out_labels(self) -> int:
        """Labels of all held-out documents."""
        return sum(held.labels for held in self.validation)

    @property
    def gzip_bits_per_byte(self) -> float | None:
        """The yardstick for the model's bits per byte; None where nothing is held out, or its bytes are not known."""
        return 8 * self.gzip_bytes / self.held_out_bytes if self.held_out_bytes else None

    def sampled(self, data: TextData) -> PreparedData:
        """The same with what the settings say of samples, which the files do not depend on."""
        packs = any(part.packed for part in self.train) and data.packing == "pack"
        return replace(
            self,
            weights=tuple(weight for _, weight in data.blend),
            packing=data.packing,
            document_attention=packs if data.document_attention is None else data.document_attention,
        )


def save_summary(prepared: PreparedData, path: Path) -> None:
    """Write the summary; paths in its folder are written relative to it."""
    part = path.with_name(path.name + ".part")

    def plain(value: Any) -> str:
        return os.path.relpath(value, path.parent) if value.is_relative_to(path.parent) else str(value.resolve())

    part.write_text(json.dumps(asdict(prepared), indent=2, default=plain))
    part.replace(path)


def load_summary(path: Path) -> PreparedData | None:
    """Return the prepared data; None if there is none, or it is incomplete or of another version."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields(PreparedData)}:
        return None

    def here(name: str | None) -> Path | None:
        return None if name is None else path.parent / name

    for side in ("train", "validation"):
        values[side] = tuple(
            TokenSet(**{**part, "prefix": path.parent / part["prefix"], "chosen": here(part["chosen"])})
            for part in values[side]
        )
    return PreparedData(**{**values, "tokenizer": here(values["tokenizer"]), "weights": tuple(values["weights"])})
