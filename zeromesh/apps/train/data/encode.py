"""Portions of files to tokens. The threads of the tokenizers library work on the texts of a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeromesh.apps.train.data.indexed import token_dtype
from zeromesh.apps.train.data.records import KINDS, Tokens, encode_text, read_record, share_of
from zeromesh.apps.train.data.text_formats import Portion, placed, read_portion
from zeromesh.apps.train.data.tokenizer import TextTokenizer
from zeromesh.apps.train.train_settings import TextData
from zeromesh.base.words import counted

# Enough texts for the threads of a machine; encoding takes many times as much memory.
TASK_BYTES = 2**21


class Encoded(NamedTuple):
    """Tokens of a task. A sequence is a record or a piece of a text."""

    ids: NDArray[Any]  # of all sequences one after the other, in the dtype that they are stored in
    mask: NDArray[np.uint8] | None  # 1 for labels; None if all are
    lengths: NDArray[np.int32]  # tokens of each sequence
    last: NDArray[np.bool_]  # True where a document ends with the sequence
    shares: NDArray[np.float64]  # of each sequence's document; see Document
    sizes: NDArray[np.int64]  # bytes of text that the labels of each sequence stand for
    dropped: int  # records that were too long
    read: int  # bytes of files


class Encoder:
    """Encoder of tasks into tokens; records must fit into samples of ``length`` tokens, or of any length for None."""

    def __init__(self, tokenizer: TextTokenizer, data: TextData, length: int | None) -> None:
        self.tokenizer, self.data, self.length = tokenizer, data, length
        self.dtype = token_dtype(tokenizer.size)

    def encode(self, task: Sequence[Portion]) -> Encoded:
        """Return the tokens of all portions; raise ValueError with the place of a wrong record."""
        sequences: list[tuple[Tokens, bool, float]] = []
        dropped = 0
        # All texts of the task in one call, so that the tokenizer's threads share them.
        texts = [text for portion in task if portion.document.kind is None for _, text in read_portion(portion)]
        pieces = encode_text(self.tokenizer, texts)
        for portion in task:
            document = portion.document
            if document.kind is None:
                tokens = next(pieces)
                ids = self.tokenizer.bounded(tokens.ids, portion.start == document.start, portion.last)
                sequences.append((Tokens(ids, None, tokens.size), portion.last, document.share or 0.0))
                continue
            records = list(self._records(portion, document.kind))
            for parts, share in records:
                sequences += [(tokens, tokens is parts[-1], share) for tokens in parts]
                dropped += not parts
        masked = any(portion.document.kind in KINDS and KINDS[portion.document.kind].packed for portion in task)
        ids_of_all = [tokens.ids.astype(self.dtype) for tokens, _, _ in sequences]
        masks = [tokens.mask for tokens, _, _ in sequences if tokens.mask is not None]
        return Encoded(
            # An empty array first, since a task may have no token and nothing cannot be concatenated.
            ids=np.concatenate([np.empty(0, dtype=self.dtype), *ids_of_all]),
            mask=np.concatenate([np.empty(0, dtype=np.uint8), *masks]) if masked else None,
            lengths=np.array([len(tokens.ids) for tokens, _, _ in sequences], dtype=np.int32),
            last=np.array([last for _, last, _ in sequences], dtype=bool),
            shares=np.array([share for _, _, share in sequences], dtype=np.float64),
            sizes=np.array([tokens.size for tokens, _, _ in sequences], dtype=np.int64),
            dropped=dropped,
            read=sum(portion.size for portion in task),
        )

    def _records(self, portion: Portion, name: str) -> Iterator[tuple[list[Tokens], float]]:
        """Yield the sequences of each record, none if it is dropped, and its share."""
        kind = KINDS[name]
        numbers, values, shares = [], [], []
        for number, record in read_portion(portion):
            with placed(portion, number):
                values.append(read_record(self.data, name, record))
            numbers.append(number)
            shares.append(share_of(record))
        encoded = kind.encode(self.tokenizer, values)
        for number, share in zip(numbers, shares, strict=True):
            with placed(portion, number):
                parts = [next(encoded) for _ in range(kind.sequences)]
                fitted = [self._fitted(tokens) if kind.packed else tokens for tokens in parts]
            yield [] if any(tokens is None for tokens in fitted) else [tokens for tokens in fitted if tokens], share

    def _fitted(self, tokens: Tokens) -> Tokens | None:
        """Return a record that fits into a sample; None if it is dropped."""
        length, count = self.length, len(tokens.ids)
        # One more than a sample has: the last token is only a label.
        if length is None or count <= length + 1:
            return tokens
        if self.data.too_long == "error":
            raise ValueError(
                f"has {counted(count, 'token')}, and a sample of model.sequence_length or "
                f"huggingface.sequence_length = {length} holds {length + 1} "
                'with its last label; set data.too_long to "truncate" or "drop", or make the sequence longer'
            )
        assert tokens.mask is not None
        mask = tokens.mask[: length + 1]
        # Without a label left, a row would have no loss.
        if self.data.too_long == "drop" or not mask[1:].any():
            return None
        # An estimate: the bytes that single ids stand for are not known.
        size = round(tokens.size * int(mask.sum()) / int(tokens.mask.sum()))
        return Tokens(tokens.ids[: length + 1], mask, size)


def grouped(portions: Iterable[Portion]) -> Iterator[list[Portion]]:
    """Yield tasks of at least ``TASK_BYTES``, except for the last."""
    task: list[Portion] = []
    size = 0
    for portion in portions:
        task.append(portion)
        size += portion.size
        if size >= TASK_BYTES:
            yield task
            task, size = [], 0
    if task:
        yield task
