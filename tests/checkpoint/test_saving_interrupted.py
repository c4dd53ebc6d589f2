"""Ctrl-C while a save is waited for, and disks that take no note of a failure: what is saved stays what it was."""

import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from traceback import walk_stack
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeromesh
from compare import assert_same
from harness import on_ranks, run_ranks
from runs import config, seed_everything, start, train
from zeromesh.base.worker import Worker
from zeromesh.checkpoint import boxes, shard_writer
from zeromesh.checkpoint import checkpoint_folder as folders
from zeromesh.checkpoint.copies import background
from zeromesh.checkpoint.copies.memory_files import Exchange, Kept


def when_main_waits(act: Callable[[], object]) -> threading.Thread:
    """Call ``act``, in a thread, once the main one waits in a ``join`` or ``finish``."""

    def look() -> None:
        names: list[str] = []
        while not names or names[0] not in ("wait", "_wait_for_tstate_lock") or not {"join", "finish"} & {*names}:
            time.sleep(0.001)
            gc.disable()  # Python 3.11 may stop for good where garbage is collected inside of that call
            names = [frame.f_code.co_name for frame, _ in walk_stack(sys._current_frames()[main])]
            gc.enable()
        act()

    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(target=look)
    thread.start()
    return thread


def interrupted(wait: Callable[[], object]) -> None:
    """Call what waits in a thread, and send it Ctrl-C meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    try:
        presses = when_main_waits(lambda: signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            wait()
        presses.join()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def held_in_the_middle() -> Iterator[Event]:
    """Let saves wait, when they have written a box, for an event, which is set in the end."""
    gate, write = Event(), shard_writer.ShardWriter.write

    def write_and_wait(writer: shard_writer.ShardWriter, box: boxes.Box) -> None:
        write(writer, box)
        gate.wait()

    with patch.object(shard_writer.ShardWriter, "write", write_and_wait):
        try:
            yield gate
        finally:
            gate.set()


@on_ranks(1)
def test_a_save_that_was_waited_for_until_ctrl_c_still_holds_its_own_step(tmp_path: Path) -> None:
    folder = str(tmp_path)
    root = Path(folder)
    engine, again = (
        start(1, {**config(0, mesh="1"), "checkpoint": {"asynchronous": True}}),
        start(2, config(0, mesh="1")),
    )
    seed_everything(0)
    train(engine, 1)
    expected = engine.gathered_state_dict()
    with held_in_the_middle() as gate:
        engine.save_checkpoint(root / "first")
        interrupted(engine.wait_for_checkpoint)
        interrupted(engine._state.background.close)
        train(engine, 1)
        opens = when_main_waits(gate.set)
        engine.save_checkpoint(root / "second")  # waits for the first again
        gate.set()
        opens.join()
    engine.wait_for_checkpoint()
    for name, state in (("first", expected), ("second", engine.gathered_state_dict())):
        assert again.load_checkpoint(root / name)[0] is not None
        assert_same(again.gathered_state_dict(), state)


def test_a_worker_is_over_when_its_work_is_whoever_was_interrupted_meanwhile() -> None:
    gate = Event()
    worker = Worker(gate.wait)
    worker.start()
    interrupted(worker.join)
    worker.join(0.01)
    assert not worker.over
    gate.set()
    worker.join()
    assert worker.over
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        never = Worker(gate.wait)
        with pytest.raises(RuntimeError, match="new thread"):
            never.start()
    never.join()


def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent() -> None:
    gate = Event()
    worker = Worker(gate.wait)
    worker.start()
    child = os.fork()
    if child == 0:  # it has a copy of the event, which nobody sets
        signal.alarm(30)
        worker.join()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not worker.over
    gate.set()
    worker.join()


def test_copies_that_are_being_sent_are_waited_for_after_ctrl_c(tmp_path: Path) -> None:
    gate, sent = Event(), []
    kept = Kept(tmp_path, "copies", 0, [0])
    kept.begin(Exchange(lambda: (gate.wait(), sent.append(True))))
    interrupted(kept.settle)
    when_main_waits(gate.set)
    kept.settle()
    assert sent == [True]


# Disks that fail.


FINISH = shard_writer.ShardWriter.finish


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def break_the_disk(engine: zeromesh.Engine, root: Path, number: int) -> None:
    """Save; on the last rank, no file can be written or flushed any more when its part is complete."""
    last = engine.mesh.rank == engine.mesh.world_size - 1
    with ExitStack() as broken:

        def fail_from_here(writer: shard_writer.ShardWriter) -> Any:
            for place, name in ((os, "fsync"), (Path, "write_text"), (Path, "open"), (Path, "unlink")):
                broken.enter_context(patch.object(place, name, failing(number)))
            return FINISH(writer)

        if last:
            broken.enter_context(patch.object(shard_writer.ShardWriter, "finish", fail_from_here))
        engine.save_checkpoint(root)
        if last:
            engine._state.background._thread.join()


def fail_without_a_note(folder: str, ranks: int) -> list[str]:
    messages = []
    for number in (errno.EIO, errno.ENOSPC):
        root = Path(folder) / str(number)
        engine = start(1, {**config(0, mesh="1" if ranks == 1 else "2"), "checkpoint": {"asynchronous": True}})
        world = engine.mesh.group("world")
        seed_everything(engine.mesh.rank)
        train(engine, 1)
        with patch.object(background, "QUIET", 1e9):
            break_the_disk(engine, root, number)
            world.exchange(torch.zeros(1))
            train(engine, 1)
            engine._state.background._thread.join()
        assert not engine._state.background.failed(), "all ranks heard of it in the step"
        with pytest.raises((OSError, RuntimeError)) as caught:
            engine.wait_for_checkpoint()
        messages.append(str(caught.value))
        world.exchange(torch.zeros(1))
        assert folders.latest(root) is None
        engine.save_checkpoint(root)  # another try
        assert engine.wait_for_checkpoint() == root / "global_step2"
        engine.destroy()
    return messages


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_takes_no_note_of_a_failure_holds_nobody_up(ranks: int, tmp_path: Path) -> None:
    first = run_ranks(fail_without_a_note, ranks, str(tmp_path), ranks)[0]
    begins = "" if ranks == 1 else "[Errno 5] rank 1 could not save the checkpoint: "
    for text, reason in zip(first, ("Input/output error", "No space left on device"), strict=True):
        assert text.startswith(begins)
        assert f"({reason})" in text


def fail_and_leave(folder: str) -> str:
    engine = start(1, {**config(0, mesh="2"), "checkpoint": {"asynchronous": True}})
    train(engine, 1)
    with patch.object(background, "QUIET", 1e9):
        break_the_disk(engine, Path(folder), errno.EIO)
        with pytest.raises(OSError, match="Input/output error") as caught:
            engine.destroy()
    return str(caught.value)


def test_destroy_after_the_failure_of_another_rank_raises_it_at_once(tmp_path: Path) -> None:
    first, second = run_ranks(fail_and_leave, 2, str(tmp_path))
    assert "rank 1 could not save the checkpoint" in first
    assert "was not written (Input/output error)" in second
