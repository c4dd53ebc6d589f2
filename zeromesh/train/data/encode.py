"""Portions of files to tokens, in one or several processes. The result does not depend on their number."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeromesh.config.train import TextData
from zeromesh.train.data.formats import Portion, placed, read_portion
from zeromesh.train.data.indexed import token_dtype
from zeromesh.train.data.records import KINDS, Tokens, encode_text, read_record, share_of
from zeromesh.train.data.tokenizer import TextTokenizer, load_tokenizer

LENGTH = "model.sequence_length or huggingface.sequence_length"
"""Keys for the tokens of a sample; a run has one of them."""

TASK_BYTES = 2**21
"""Size of a task, roughly. Encoding takes many times as much memory."""

SMALL = 2**24
"""Bytes that are encoded before a second process would have started."""

WAITING = 2
"""Tasks per process that are submitted before their results are needed."""


@dataclass(frozen=True)
class Encoded:
    """Tokens of a task. A sequence is a record or a piece of a text.

    Attributes:
        ids: ids of all sequences one after the other, shape ``(tokens,)``, in the dtype that they are stored in.
        mask: 1 for labels, u8, shape ``(tokens,)``; None if all are.
        lengths: tokens of each sequence, int32.
        last: whether a document ends with the sequence, bool.
        shares: number in [0, 1) of each sequence's document, float64; see ``Document``.
        sizes: bytes of text that the labels of each sequence stand for, int64.
        dropped: number of records that were too long.
        read: bytes of files that were read.
    """

    ids: NDArray[Any]
    mask: NDArray[np.uint8] | None
    lengths: NDArray[np.int32]
    last: NDArray[np.bool_]
    shares: NDArray[np.float64]
    sizes: NDArray[np.int64]
    dropped: int
    read: int


class Encoder:
    """Turns tasks into tokens in one process.

    Args:
        path: folder or file of the tokenizer.
        data: settings.
        length: tokens of a sample, which records must fit into; None for any.
        tokenizer: the tokenizer, if it is in memory already.
    """

    def __init__(self, path: Path, data: TextData, length: int | None, tokenizer: TextTokenizer | None = None) -> None:
        self.arguments = path, data, length
        self.data, self.length = data, length
        self.tokenizer = load_tokenizer(path) if tokenizer is None else tokenizer
        self.dtype = token_dtype(self.tokenizer.size)

    def encode(self, task: Sequence[Portion]) -> Encoded:
        """Return the tokens of all portions.

        Raises:
            ValueError: a record is wrong; the message has its place.
        """
        found: list[tuple[Tokens, bool, float]] = []
        dropped = 0
        texts = [text for portion in task if portion.document.kind is None for _, text in read_portion(portion)]
        pieces = encode_text(self.tokenizer, texts)
        for portion in task:
            document = portion.document
            if document.kind is None:
                tokens = next(pieces)
                ids = self.tokenizer.bounded(tokens.ids, portion.start == document.start, portion.last)
                found.append((Tokens(ids, None, tokens.size), portion.last, document.share or 0.0))
                continue
            records = list(self._records(portion, document.kind))
            found += [(record, True, share) for record, share in records if record is not None]
            dropped += sum(record is None for record, _ in records)
        masked = any(portion.document.kind in KINDS and KINDS[portion.document.kind].packed for portion in task)
        ids_of_all = [tokens.ids.astype(self.dtype) for tokens, _, _ in found]
        masks = [tokens.mask for tokens, _, _ in found if tokens.mask is not None]
        return Encoded(
            ids=np.concatenate([np.empty(0, dtype=self.dtype), *ids_of_all]),
            mask=np.concatenate([np.empty(0, dtype=np.uint8), *masks]) if masked else None,
            lengths=np.array([len(tokens.ids) for tokens, _, _ in found], dtype=np.int32),
            last=np.array([last for _, last, _ in found], dtype=bool),
            shares=np.array([share for _, _, share in found], dtype=np.float64),
            sizes=np.array([tokens.size for tokens, _, _ in found], dtype=np.int64),
            dropped=dropped,
            read=sum(portion.size for portion in task),
        )

    def _records(self, portion: Portion, name: str) -> Iterator[tuple[Tokens | None, float]]:
        """Yield the tokens of each record, or None if it is dropped, and its share."""
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
                tokens = next(encoded)
                yield (self._fitted(tokens) if kind.packed else tokens), share

    def _fitted(self, tokens: Tokens) -> Tokens | None:
        """Return a record that fits into a sample; None if it is dropped."""
        length, count = self.length, len(tokens.ids)
        if length is None or count <= length + 1:
            return tokens
        if self.data.too_long == "error":
            raise ValueError(
                f"has {count} tokens, and a sample of {LENGTH} = {length} holds {length + 1} with its "
                'last label; set data.too_long to "truncate" or "drop", or make the sequence longer'
            )
        assert tokens.mask is not None
        mask = tokens.mask[: length + 1]
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


def encode_all(tasks: Iterable[Sequence[Portion]], encoder: Encoder, workers: int) -> Generator[Encoded, None, None]:
    """Yield the tokens of tasks in order.

    Args:
        tasks: taken as they are needed, so that memory does not grow with their number.
        encoder: encoder of this process; the others make their own.
        workers: number of processes; 1 for this one only.

    Raises:
        ValueError: a record is wrong.
        ChildProcessError: a process ended.
    """
    if workers == 1:
        yield from map(encoder.encode, tasks)
        return
    context = get_context("spawn")
    stopped = context.Event()  # starts a helper process of Python, which would undo _uninterrupted: so it comes first
    pool = ProcessPoolExecutor(workers, context, _start, (stopped, *encoder.arguments))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for task in tasks:
            with _uninterrupted():
                waiting.append(pool.submit(_encode, task))
            if len(waiting) >= WAITING * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "a process that turns text into tokens was ended from outside, perhaps for lack of memory; "
            "try fewer with data.workers = 1"
        ) from None
    finally:
        stopped.set()  # tasks that a process has queued cannot be cancelled
        pool.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Start processes that ignore Ctrl-C. A terminal sends it to all of them, and this process ends the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_encoder: Encoder | None = None
_stopped: Event | None = None
"""Encoder of a worker process, and whether its results are still wanted."""


def _start(stopped: Event, path: Path, data: TextData, length: int | None) -> None:
    global _encoder, _stopped
    Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder, _stopped = Encoder(path, data, length), stopped


def _end_with_the_parent() -> None:
    """End this process when its parent ends: a parent that was killed could not, and tasks would never come."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(task: Sequence[Portion]) -> Encoded:
    assert _encoder is not None
    assert _stopped is not None
    return _encoder.encode([] if _stopped.is_set() else task)
