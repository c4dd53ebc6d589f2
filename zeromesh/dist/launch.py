"""Start the ranks of one machine from within Python, through torchrun's library."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeromesh.dist.environment import Environment, is_launched


class RankFailure(RuntimeError):
    """A rank that was started by ``launch`` failed.

    Attributes:
        rank: the rank that failed first.
        summary: one line that says why.
    """

    def __init__(self, rank: int, summary: str, details: str) -> None:
        self.rank = rank
        self.summary = summary
        super().__init__(f"rank {rank} failed first: {summary}\n{details}".rstrip())


def launch(entry: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run ``entry(*args)`` on ``ranks`` processes of this machine, and wait for them.

    Where a launcher has already set torchrun's variables, this process is one of the ranks, and just calls the
    function; so it does where one rank is asked for. A new process gets torchrun's variables, with a rendezvous on the
    loopback interface, and OMP_NUM_THREADS, unless it is set: the machine's cores divided among the ranks.

    Args:
        entry: a function that can be imported by name.
        ranks: number of processes.
        args: what can be pickled, the same for every rank.

    Raises:
        ValueError: if ``ranks`` is below 1, or the variables are wrong.
        RankFailure: if a rank raised or died; it shows the first failure, and the other ranks have been ended.
        KeyboardInterrupt: on Ctrl-C, once all ranks have ended.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, but must be at least 1; name the number of processes to start")
    if is_launched():
        Environment.detect()
        entry(*args)
    elif ranks == 1:
        entry(*args)
    else:
        _start(entry, ranks, args)


def _start(entry: Callable[..., None], ranks: int, args: tuple[Any, ...]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="zeromesh-") as folder, _threads(ranks), _silence():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="zeromesh",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, _run_rank)(folder, entry, args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise _first_failure(Path(folder), rank, failure.exitcode) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


def _run_rank(folder: str, entry: Callable[..., None], args: tuple[Any, ...]) -> None:
    """What each rank runs."""
    # A rank that waits in a collective never gets to run Python's handler, so let Ctrl-C end it outright.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        entry(*args)
    except Exception as error:
        summary = traceback.format_exception_only(error)[-1].strip()
        record = {"at": time.time(), "summary": summary, "details": traceback.format_exc()}
        Path(folder, f"{os.environ['RANK']}.failure").write_text(json.dumps(record))
        raise SystemExit(1) from None


def _first_failure(folder: Path, rank: int, exitcode: int) -> RankFailure:
    """The failure to show: a rank that was killed, else the earliest exception.

    torchrun looks at the ranks ten times a second, and a rank whose peer is gone fails sooner than that; so the order
    is taken from the times that the ranks themselves wrote down.
    """
    if exitcode < 0:
        return RankFailure(rank, f"killed by {signal.Signals(-exitcode).name}", "")
    records = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.failure")}
    if not records:
        return RankFailure(rank, f"exited with status {exitcode}", "")
    first = min(records, key=lambda number: float(records[number]["at"]))
    return RankFailure(first, records[first]["summary"], records[first]["details"])


@contextmanager
def _threads(ranks: int) -> Iterator[None]:
    """Divide the cores among the ranks that are started meanwhile."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    cores = available_cores()
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torchrun's own log lines off the terminal: this process only waits, and the ranks speak for themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
