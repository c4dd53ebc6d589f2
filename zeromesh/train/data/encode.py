"""Files to tokens in several processes: the result does not depend on how many."""

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
from zeromesh.train.data.indexed import token_dtype
from zeromesh.train.data.portions import Portion, placed, read_portion
from zeromesh.train.data.prepared import LENGTH
from zeromesh.train.data.records import KINDS, Tokens, encode_text, read_record, share_of
from zeromesh.train.data.tokenizer import TextTokenizer, load_tokenizer

TASK_BYTES = 2**21
"""Portions of together so many bytes are encoded at a time; libraries need many times that in memory."""

SMALL = 2**24
"""So much text is encoded before another process has even started."""

WAITING = 2
"""Tasks given out ahead, per process."""


@dataclass(frozen=True)
class EncodeSettings:
    """Settings of encoding; the same in every process.

    Attributes:
        tokenizer: folder or file of the tokenizer.
        data: keys of records, what happens to long ones, and what is held out.
        length: tokens of a sample, which records must fit into; None for any.
    """

    tokenizer: Path
    data: TextData
    length: int | None


@dataclass(frozen=True)
class Side:
    """A portion, and what is known of it before it is read.

    Attributes:
        portion: of a file.
        kind: of its records; None for plain text.
        share: a number in [0, 1) for the whole portion; below the share that is held out, it is. None: each record has
            its own.
    """

    portion: Portion
    kind: str | None
    share: float | None


@dataclass(frozen=True)
class Encoded:
    """Encode a task; a sequence is a record, or a piece of a text.

    Attributes:
        ids: of all sequences, one after the other, shape ``(tokens,)``, in the dtype that they are stored in.
        mask: u8, 1 for labels, of the same shape; None where all are.
        lengths: int32, tokens of each sequence.
        last: bool, whether a document ends with the sequence.
        shares: float64, of each sequence's document.
        sizes: int64, bytes of text that each sequence's labels stand for.
        dropped: records that were too long.
        read: bytes of the files.
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
        settings: how.
        tokenizer: the one that they name, where it is in memory already.
    """

    def __init__(self, settings: EncodeSettings, tokenizer: TextTokenizer | None = None) -> None:
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer) if tokenizer is None else tokenizer
        self.dtype = token_dtype(self.tokenizer.size)

    def encode(self, task: Sequence[Side]) -> Encoded:
        """The tokens of all portions.

        Raises:
            ValueError: at the first record that is wrong, with its place.
        """
        found: list[tuple[Tokens, bool, float]] = []
        dropped = 0
        texts = [side for side in task if side.kind is None]
        pieces = encode_text(self.tokenizer, [text for side in texts for _, text in read_portion(side.portion)])
        for side in task:
            if side.kind is None:
                found.append((self._bounded(next(pieces), side.portion), side.portion.last, side.share or 0.0))
                continue
            for tokens, share in self._records(side.portion, side.kind, side.share):
                if tokens is None:
                    dropped += 1
                else:
                    found.append((tokens, True, share))
        ids = [tokens.ids.astype(self.dtype) for tokens, _, _ in found]
        masks = [tokens.mask for tokens, _, _ in found if tokens.mask is not None]
        masked = any(side.kind is not None and KINDS[side.kind].packed for side in task)
        return Encoded(
            ids=np.concatenate([np.empty(0, dtype=self.dtype), *ids]),
            mask=np.concatenate([np.empty(0, dtype=np.uint8), *masks]) if masked else None,
            lengths=np.array([len(tokens.ids) for tokens, _, _ in found], dtype=np.int32),
            last=np.array([last for _, last, _ in found], dtype=bool),
            shares=np.array([share for _, _, share in found], dtype=np.float64),
            sizes=np.array([tokens.size for tokens, _, _ in found], dtype=np.int64),
            dropped=dropped,
            read=sum(side.portion.size for side in task),
        )

    def _bounded(self, tokens: Tokens, portion: Portion) -> Tokens:
        first = portion.start == portion.document.start
        return Tokens(self.tokenizer.bounded(tokens.ids, first, portion.last), None, tokens.size)

    def _records(self, portion: Portion, name: str, share: float | None) -> Iterator[tuple[Tokens | None, float]]:
        """Tokens, None for a record that is dropped, and the share of each record."""
        data, kind = self.settings.data, KINDS[name]
        numbers, values, shares = [], [], []
        for number, record in read_portion(portion):
            with placed(portion, number):
                values.append(read_record(data, name, record))
            numbers.append(number)
            shares.append(share_of(record) if share is None else share)
        encoded = kind.encode(self.tokenizer, values)
        for number, own in zip(numbers, shares, strict=True):
            with placed(portion, number):
                tokens = next(encoded)
                yield (self._fitted(tokens) if kind.packed else tokens), own

    def _fitted(self, tokens: Tokens) -> Tokens | None:
        """A record that fits into a sample; None if it is to be dropped."""
        length, count = self.settings.length, len(tokens.ids)
        if length is None or count <= length + 1:
            return tokens
        if self.settings.data.too_long == "error":
            raise ValueError(
                f"has {count} tokens, and a sample of {LENGTH} = {length} holds {length + 1} with its "
                'last label; set data.too_long to "truncate" or "drop", or make the sequence longer'
            )
        assert tokens.mask is not None
        mask = tokens.mask[: length + 1]
        if self.settings.data.too_long == "drop" or not mask[1:].any():
            return None
        # Bytes in proportion: what the labels that are left stand for is not known to the byte.
        size = round(tokens.size * int(mask.sum()) / int(tokens.mask.sum()))
        return Tokens(tokens.ids[: length + 1], mask, size)


def encode_all(tasks: Iterable[Sequence[Side]], encoder: Encoder, workers: int) -> Generator[Encoded, None, None]:
    """Encode tasks, in their order.

    Args:
        tasks: taken as they are needed, so that memory does not grow with their number.
        encoder: of this process; the others make their own.
        workers: processes; 1 for this one alone.

    Raises:
        ValueError: if something is wrong with a record.
        ChildProcessError: if a process ended.
    """
    if workers == 1:
        yield from map(encoder.encode, tasks)
        return
    context = get_context("spawn")
    stopped = context.Event()  # it also starts a helper of Python's, which would undo _uninterrupted
    pool = ProcessPoolExecutor(workers, context, _start, (encoder.settings, stopped))
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
        stopped.set()  # tasks that are queued in a process already cannot be cancelled
        pool.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let processes that are started meanwhile know no Ctrl-C, which goes to all: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def grouped(sides: Iterable[Side]) -> Iterator[list[Side]]:
    """Tasks of at least ``TASK_BYTES``, but for the last."""
    task: list[Side] = []
    size = 0
    for side in sides:
        task.append(side)
        size += side.portion.size
        if size >= TASK_BYTES:
            yield task
            task, size = [], 0
    if task:
        yield task


_encoder: Encoder | None = None
_stopped: Event | None = None
"""Encoder of a worker process."""


def _start(settings: EncodeSettings, stopped: Event) -> None:
    global _encoder, _stopped
    Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder, _stopped = Encoder(settings), stopped


def _end_with_the_parent() -> None:
    """A process that was killed cannot end those that it started, and they would wait for tasks for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(task: Sequence[Side]) -> Encoded:
    assert _encoder is not None
    assert _stopped is not None
    return _encoder.encode([] if _stopped.is_set() else task)
