"""Byte-level byte-pair tokens, and files of them that are mapped into memory.

Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016; on bytes, as in GPT-2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|eot|>", "</s>", "<eos>")
"""What tokenizers call the token between two documents."""

SMALLEST_VOCABULARY = 257

ENCODED_AT_ONCE = 2**21
"""Pieces of so many characters are encoded together, in parallel; the library needs many times that in memory."""


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one that is encoded by itself.

    Attributes:
        text: what it holds.
        last: whether the document ends with it.
    """

    text: str
    last: bool = True


@dataclass(frozen=True)
class TokenFile:
    """Documents as one stream of token ids: end of text, document, end of text, document, ..., end of text.

    Attributes:
        path: the file, token ids without a header.
        dtype: "uint16" or "uint32".
        tokens: ids in the file, with the ends of text.
        documents: documents in it.
        bytes: bytes of text that the documents had.
    """

    path: Path
    dtype: str
    tokens: int
    documents: int
    bytes: int

    def read(self) -> NDArray[np.unsignedinteger]:
        """The ids, shape ``(tokens,)``, mapped into memory."""
        if self.tokens == 0:
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))


def train_tokenizer(texts: Iterable[str], size: int, fill: bool = True) -> Tokenizer:
    """Learn a byte-level byte-pair vocabulary.

    Args:
        texts: what to learn from.
        size: entries of the vocabulary.
        fill: refuse texts that do not have enough pairs to fill it, instead of making a smaller one.

    Raises:
        ValueError: if ``size`` has no room for the bytes, or the texts do not fill it.
    """
    if size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"data.vocabulary_size = {size} is too small: the 256 bytes and the end of a text need "
            f"{SMALLEST_VOCABULARY} entries"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if fill and reached < size:
        raise ValueError(
            f"data.vocabulary_size = {size} is too large: the training text only gives {reached} entries; "
            f"set it to {reached} or less, or add text"
        )
    return plain(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file.

    Raises:
        ValueError: if the file does not exist, is not a tokenizer, or has no token for the end of a text.
    """
    if not path.is_file():
        raise ValueError(f"tokenizer file {str(path)!r} does not exist; name a JSON file of the tokenizers library")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{str(path)!r} is not a tokenizer.json of the tokenizers library: {error}") from error
    end_of_text(tokenizer)
    return plain(tokenizer)


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Make the tokenizer take the names of special tokens in a text for text."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id that separates documents.

    Raises:
        ValueError: if the tokenizer has none of ``KNOWN_ENDS``.
    """
    for name in KNOWN_ENDS:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return int(found)
    raise ValueError(f"the tokenizer has no token for the end of a text; it needs one of {', '.join(KNOWN_ENDS)}")


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of text that each id stands for; none for special tokens.

    In a byte-level vocabulary every character of an entry stands for one byte.
    """
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    byte_of = _byte_of_character()
    found = [b""] * tokenizer.get_vocab_size()
    for entry, token in tokenizer.get_vocab().items():
        if token in added:
            found[token] = b"" if added[token].special else added[token].content.encode()
        else:
            found[token] = bytes(byte_of.get(character, ord("?")) for character in entry)
    return found


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the others for 256 and on, in order."""
    plain_bytes = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain_bytes]
    return {chr(byte): byte for byte in plain_bytes} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Bytes of text that each id stands for, shape ``(vocabulary,)``."""
    return np.array([len(text) for text in token_bytes(tokenizer)], dtype=np.int64)


def write_tokens(path: Path, tokenizer: Tokenizer, pieces: Iterable[Piece]) -> TokenFile:
    """Encode documents into a token file, which appears under its name only when it is complete.

    Raises:
        ValueError: if the tokens of a piece do not stand for its bytes, so that bits per byte could not be counted.
    """
    dtype = "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"
    lengths = byte_lengths(tokenizer)
    end = end_of_text(tokenizer)
    tokens, documents, size = 1, 0, 0
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.array([end], dtype=dtype).tofile(file)
        for piece, ids in _encoded(tokenizer, pieces):
            given = len(piece.text.encode())
            counted = int(lengths[ids].sum())
            if given != counted:
                raise ValueError(
                    f"the tokenizer turns text of {given} bytes into tokens for {counted}; bits per byte need "
                    "a byte-level tokenizer without normalization or added spaces"
                )
            (np.append(ids, end) if piece.last else ids).astype(dtype).tofile(file)
            tokens, documents, size = tokens + len(ids) + piece.last, documents + piece.last, size + given
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return TokenFile(path, dtype, tokens, documents, size)


def _encoded(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, NDArray[np.int64]]]:
    for batch in _batches(pieces):
        texts = [piece.text for piece in batch]
        for piece, encoding in zip(batch, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            yield piece, np.array(encoding.ids, dtype=np.int64)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces in lists of at least ``ENCODED_AT_ONCE`` characters, but for the last one."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= ENCODED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
