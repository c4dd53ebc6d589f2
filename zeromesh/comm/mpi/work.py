"""Work that is under way on the ``mpi`` backend, and the thread that advances it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from zeromesh.model.worker import Worker

PAUSE = 1e-3  # seconds between two looks of the thread; a look costs some microseconds of the interpreter's lock
LINGER = 100  # looks in vain after which the thread waits to be woken, which costs whoever wakes it more than a look
SPIN = 2e-4  # seconds for which a wait asks without a pause, as small messages take less; then it sleeps in between
NOTICE = 1.0  # seconds of waiting after which a rank asks whether those that it waits for have ended
LEAVING = 5.0  # seconds that an ending process, or group, still gives to messages that nobody waited for
LEFT = 1  # tag of the message by which a rank says that it ends
NO_TIMEOUT = timedelta(0)  # with which torch says that a wait has no timeout of its own


@dataclass
class Stage:
    """Messages that are under way together: whether each is received, its peer in the whole run, and its memory."""

    messages: list[tuple[bool, int, torch.Tensor]]  # MPI does not keep the memory alive
    requests: list[MPI.Request]

    @functools.cached_property
    def statuses(self) -> list[MPI.Status]:
        """Buffers in which MPI reports failed ranks and lengths."""
        return [MPI.Status() for _ in self.requests]

    def require_whole(self) -> None:
        """Raise RuntimeError where what came does not fill its memory, which MPI takes for right."""
        for status, (received, peer, memory) in zip(self.statuses, self.messages, strict=True):
            if received and status.Get_count(MPI.BYTE) != memory.nbytes:
                raise RuntimeError(
                    f"rank {peer} sent {status.Get_count(MPI.BYTE)} bytes where {memory.nbytes} were expected; ranks "
                    "must give tensors of the same dtype and number of elements"
                )


# Posts messages, yields them as a stage, and is resumed, by whichever thread sees them arrive, to do what comes next,
# such as a sum and the messages with its result. So ranks may wait for their works in any order.
Program = Iterator[Stage]


class Runtime:
    """MPI in this process, and all works that are under way."""

    def __init__(self) -> None:
        # Held during each call of MPI; it is no lock where MPI takes calls from several threads at once.
        self.calls: AbstractContextManager[Any] = nullcontext()
        self.notes: MPI.Comm = MPI.COMM_NULL  # of all ranks, for what the backend itself has to say
        self.failed: list[MpiWork] = []  # kept, as MPI may still write to their memory
        self._pending: dict[MpiWork, None] = {}  # in the order in which they were added
        self.gone: set[int] = set()  # world ranks that are known to have ended
        self._some = threading.Event()
        self._thread: Worker | None = None
        self._ended = False

    def start(self) -> bool:
        """Initialise MPI, unless it is, and return whether it was done here. Collective."""
        ours = not MPI.Is_initialized()
        level = MPI.Init_thread(MPI.THREAD_MULTIPLE) if ours else MPI.Query_thread()
        if level < MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                f"MPI gives the thread level {level}, but the backend needs MPI_THREAD_SERIALIZED "
                f"({MPI.THREAD_SERIALIZED}) or more, as a thread of its own drives the messages; leave mpi4py's "
                "rc.thread_level as it is, use an MPI that was built with threads, or dist_backend gloo"
            )
        if level < MPI.THREAD_MULTIPLE:
            self.calls = threading.RLock()
        self.notes = MPI.COMM_WORLD.Dup()
        return ours

    def add(self, work: MpiWork) -> None:
        """Take over a work and advance it."""
        # Before other threads see it: its first messages must be posted in the same order on all ranks.
        work.advance()
        if work.done:
            error = work.exception()
            if error is not None:  # a wrong call is best told where it was made
                raise error.__cause__ if isinstance(error.__cause__, ValueError) else error
            return
        self._pending[work] = None
        # MPI progresses inside of its own calls only. So a thread looks after all that is under way, and whoever waits
        # looks after everything, too, and more often.
        if self._thread is None:
            self._thread = Worker(self._drive, "mpi")
            self._thread.start()
        self._some.set()

    def remove(self, work: MpiWork) -> None:
        """Forget a work that is done."""
        self._pending.pop(work, None)

    def advance(self) -> None:
        """Advance all works."""
        for work in tuple(self._pending):
            work.advance()

    def _drive(self) -> None:
        idle = 0
        while not self._ended:
            time.sleep(PAUSE)
            if self._pending:
                idle = 0
                self.advance()
            elif (idle := idle + 1) > LINGER:
                self._some.clear()
                if not self._pending:  # else one was added just before
                    self._some.wait()

    def find_gone(self) -> set[int]:
        """Return the world ranks that have ended. Thread-safe."""
        status = MPI.Status()
        with self.calls:
            while (message := self.notes.Improbe(MPI.ANY_SOURCE, LEFT, status)) is not None:
                message.Recv([None, 0, MPI.BYTE])
                self.gone.add(status.source)
        return self.gone

    def finish(self, works: Iterable[MpiWork], patience: float) -> bool:
        """Advance these works for at most ``patience`` seconds; return whether they are done."""
        open_works = [work for work in works if not work.done]
        until = time.monotonic() + patience
        while open_works and time.monotonic() < until:
            self.advance()
            time.sleep(PAUSE)
            open_works = [work for work in open_works if not work.done]
        return not open_works

    def leave(self) -> bool:
        """Finish pending works, tell the other ranks that this one ends, and return whether nothing is left pending."""
        self.finish(tuple(self._pending), LEAVING)
        self._ended = True
        self._some.set()
        if self._thread is not None:
            self._thread.join()
        with self.calls:
            rank = self.notes.Get_rank()
            for other in range(self.notes.Get_size()):
                if other != rank:
                    self.notes.Isend([None, 0, MPI.BYTE], other, LEFT)
        return not self._pending


runtime = Runtime()
"""Work of this process."""


class MpiWork(dist.Work):
    """One collective, or one message, under way; ``limit`` is the seconds that a wait for it may take."""

    def __init__(self, what: str, program: Program, limit: float, outputs: Sequence[torch.Tensor], where: str) -> None:
        super().__init__()
        self.done = False  # True when it has ended, well or not
        self._what = what
        self._where = where
        self._program = program
        self._limit = limit
        self._outputs = list(outputs)
        self._stage: Stage | None = None
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._settled = False
        self._busy = threading.Lock()

    def advance(self) -> None:
        """Run the program as far as messages have arrived, unless another thread does."""
        if self.done or not self._busy.acquire(blocking=False):
            return
        try:
            while not self.done and self._arrived():
                self._stage = next(self._program)
        except StopIteration:
            self._finish(None)
        except BaseException as error:
            self._finish(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._busy.release()
        self._settle()

    def _arrived(self) -> bool:
        if self._stage is None:
            return True
        requests, statuses = self._stage.requests, self._stage.statuses
        with runtime.calls:
            try:
                if not MPI.Request.Testall(requests, statuses):
                    return False
                self._stage.require_whole()
                return True
            except MPI.Exception as error:
                if error.error_class != MPI.ERR_IN_STATUS:
                    raise
                codes = {status.Get_error() for status in statuses} - {MPI.SUCCESS, MPI.ERR_PENDING}
        raise RuntimeError("; ".join(MPI.Get_error_string(code) for code in codes))

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            self._error = RuntimeError(f"{self._what} over {self._where} failed: {error}")
            self._error.__cause__ = error
            runtime.failed.append(self)
        else:
            self._stage, self._program = None, iter(())
        self.done = True
        runtime.remove(self)

    def _settle(self) -> None:
        """Complete the future, once, and without the lock: it may have callbacks."""
        if self._future is None or not self.done:
            return
        with self._busy:
            again, self._settled = self._settled, True
        if again:
            return
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the work is done; raise RuntimeError if it fails, takes too long, or a needed rank has ended."""
        limit = timeout.total_seconds() or self._limit
        began = time.monotonic()
        look = began + NOTICE
        while not self.done:
            runtime.advance()
            now = time.monotonic()
            if self.done:
                break
            if now > look:
                self._require_peers()
                look = now + NOTICE
            if now - began > limit:
                raise RuntimeError(
                    f"{self._what} over {self._where} was not done after {limit:g} s; another rank is slower than "
                    "that, ended, or runs another collective: see what the others say; if they are just slow, give "
                    "init_distributed a longer timeout"
                )
            time.sleep(0 if now - began < SPIN else min(PAUSE, (now - began) / 20))
        if self._error is not None:
            raise self._error
        return True

    def _require_peers(self) -> None:
        """Raise RuntimeError if a rank whose message is missing has ended."""
        gone = runtime.find_gone()
        if not gone:
            return
        runtime.advance()  # what they sent before they ended
        missing: list[int] = []
        with self._busy, runtime.calls:
            if (stage := self._stage) is not None:
                pairs = zip(stage.messages, stage.requests, strict=True)
                missing = sorted(gone & {peer for (_, peer, _), request in pairs if not request.Get_status()})
        if missing:
            raise RuntimeError(
                f"{self._what} over {self._where} waits for rank {', '.join(map(str, missing))}, which has ended; "
                "all ranks must run the same collectives, and what the first rank to end says is the cause"
            )

    def is_completed(self) -> bool:
        """Return whether it is done."""
        runtime.advance()
        return self.done

    def is_success(self) -> bool:
        """Return whether it is done and did not fail."""
        return self.done and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of a failed work."""
        return self._error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors that it fills."""
        if self._future is None:
            self._future = torch.futures.Future()
        self._settle()
        return self._future
