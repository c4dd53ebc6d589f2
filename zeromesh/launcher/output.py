"""Relay of ranks' output: whole lines that name their rank.

Rank 0 writes to the terminal itself, so that its lines of progress stay alive. What the others write comes through
named pipes, line by line, as ``[RANK] line``.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

LONGEST = 1 << 16
"""Bytes of a line without an end that are shown as a line."""

LAST_READS = 16
"""Number of reads of a pipe as it is closed. A process that a rank left behind may never stop writing."""


class Relay:
    """Copies lines from pipes to this process's streams, in a thread of its own, until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._pipes: list[_Pipe] = []
        self._count = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="zeromesh-output", daemon=True)
        self._thread.start()

    def pipe(self, stream: TextIO, prefix: str) -> str:
        """The path of a new pipe, whose lines go to ``stream`` after ``prefix``."""
        with self._lock:
            path = self._folder / f"pipe-{self._count}"
            self._count += 1
            pipe = _Pipe(path, stream, prefix)
            self._pipes.append(pipe)
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        return str(path)

    def drop(self) -> None:
        """Show what is left in the pipes so far and close them."""
        with self._lock:
            for pipe in self._pipes:
                self._selector.unregister(pipe.descriptor)
                pipe.close()
            self._pipes = []

    def close(self) -> None:
        """Show what is left, and end the thread."""
        self._closing.set()
        self._thread.join()
        self.drop()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            ready = self._selector.select(0.1)
            with self._lock:
                for key, _ in ready:
                    if key.data in self._pipes:
                        key.data.read()
            if not ready and not self._pipes:
                self._closing.wait(0.1)


class _Pipe:
    def __init__(self, path: Path, stream: TextIO, prefix: str) -> None:
        os.mkfifo(path)
        self._path = path
        self._stream = stream
        self._prefix = prefix
        self._begun = b""
        # For writing too: then it is never at its end, and whoever writes need not wait for a reader.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def read(self) -> bool:
        """Show the lines that have come; whether something had."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST:
            lines, self._begun = [*lines, self._begun], b""
        if lines:
            self._show(lines)
        return True

    def close(self) -> None:
        for _ in range(LAST_READS):
            if not self.read():
                break
        if self._begun:
            self._show([self._begun])
        os.close(self.descriptor)
        self._path.unlink()

    def _show(self, lines: list[bytes]) -> None:
        # Of a line that was written over, as progress is shown, what it came to.
        lasting = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        prefix, encoding = self._prefix.encode(), getattr(self._stream, "encoding", None) or "utf-8"
        with suppress(Exception):  # the stream is closed, or takes no more; the ranks must not wait for that
            for piece in _pieces([prefix + line + b"\n" for line in lasting]):
                self._stream.write(piece.decode(encoding, "replace").encode(encoding, "replace").decode(encoding))
                self._stream.flush()


def _pieces(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Whole lines, together as long as a pipe takes at once: rank 0 writes to the same one."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) > select.PIPE_BUF:
            yield piece
            piece = b""
        piece += line
    yield piece


class OutputStreams(DefaultLogsSpecs):
    """Destinations of the ranks' output, in the form of torchrun's library.

    Args:
        folder: for torchrun's files.
        relay: carries what the ranks above 0 write.
        variables: further variables that the ranks get.
    """

    def __init__(self, folder: Path, relay: Relay, variables: dict[str, str]) -> None:
        super().__init__(log_dir=str(folder))
        self._relay = relay
        self._variables = variables

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called before each start of the ranks, with their variables by local rank."""
        destination = super().reify(envs)
        self._relay.drop()
        for local_rank, variables in envs.items():
            variables.update(self._variables)
            rank = int(variables["RANK"])
            prefix = f"[{rank}] " if rank else ""
            streams: list[tuple[dict[int, str], Any, Any]] = [
                (destination.stdouts, sys.stdout, sys.__stdout__),
                (destination.stderrs, sys.stderr, sys.__stderr__),
            ]
            for paths, stream, original in streams:
                if rank or stream is not original:  # such as a notebook's
                    paths[local_rank] = self._relay.pipe(stream, prefix)
        return destination
