"""The NVMe tier: what is written comes back, or an error says why not; swap files never stay."""

import errno
import fcntl
import gc
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromesh.shard.store.file_blocks import stream
from zeromesh.shard.store.memory import Buffer, Buffers
from zeromesh.shard.store.nvme import FileStore, Region
from zeromesh.shard.store.swap_file import ALIGNMENT, aligned

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVMe tier needs Linux")

BLOCK = 16384
"""Bytes of a request here: small, so that there are many."""


def before_each(patch: pytest.MonkeyPatch, name: str, first: Callable[[], object]) -> None:
    """Call ``first`` ahead of every request of the disk."""
    real = getattr(os, name)
    patch.setattr(os, name, lambda *given: (first(), real(*given))[1])


def fail_at(patch: pytest.MonkeyPatch, code: int, text: str, where: Callable[[int], bool]) -> None:
    real = os.pwritev

    def write_or_fail(descriptor: int, memory: Any, offset: int) -> int:
        if where(offset):
            raise OSError(code, text)
        return real(descriptor, memory, offset)

    patch.setattr(os, "pwritev", write_or_fail)


def without_direct(patch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    patch.setattr(os, "open", refuse)


@pytest.fixture(params=["direct", "buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    if request.param == "buffered":
        without_direct(monkeypatch)
    with FileStore(tmp_path, block_size=BLOCK, queue_depth=4) as store:
        if request.param == "direct" and not store.direct:
            pytest.skip("the file system of the temporary folder has no direct I/O")
        yield store
    assert not list(tmp_path.glob("*.swap"))


def filled(value: int, nbytes: int) -> Buffer:
    buffer = Buffer(nbytes)
    buffer.memory.copy_(torch.arange(buffer.nbytes).mul_(value + 1).add_(value).remainder_(251))
    return buffer


def write(store: FileStore, region: Region, value: int, provisional: bool = False) -> None:
    store.write(region, filled(value, region.nbytes), provisional).wait()


def read(store: FileStore, region: Region) -> torch.Tensor:
    buffer = Buffer(region.nbytes)
    store.read(region, buffer).wait()
    return buffer.memory[: region.nbytes]


def holds(store: FileStore, region: Region, value: int) -> bool:
    return torch.equal(read(store, region), filled(value, region.nbytes).memory[: region.nbytes])


def allocate(store: FileStore, *sizes: int, spare: int = 0) -> list[Region]:
    regions = [store.allocate(size) for size in sizes]
    store.allocate_spare(sizes[0], spare)
    store.reserve()
    return regions


def test_regions_of_any_size_come_back_and_the_file_has_the_size_that_is_reported(store: FileStore) -> None:
    assert bool(fcntl.fcntl(store._file._descriptor, fcntl.F_GETFL) & os.O_DIRECT) == store.direct
    sizes = [1, ALIGNMENT, ALIGNMENT + 1, BLOCK, 3 * BLOCK - 1, 20 * BLOCK + 5]
    assert os.stat(store.path).st_size == store.nbytes == 0
    regions = allocate(store, *sizes)
    status = os.stat(store.path)
    assert status.st_size == store.nbytes == sum(map(aligned, sizes))
    assert status.st_blocks * 512 >= store.nbytes, "the space is taken, not only promised"
    for number, region in enumerate(regions):
        write(store, region, number)
    assert [holds(store, region, number) for number, region in enumerate(regions)] == [True] * len(sizes)
    later = allocate(store, 100)[0]
    write(store, later, 77)
    assert holds(store, later, 77)
    assert holds(store, regions[0], 0)
    assert os.stat(store.path).st_size == store.nbytes == sum(map(aligned, [*sizes, 100]))
    moved = store.traffic()
    assert (moved.bytes_written, moved.bytes_read) == (store.nbytes, store.nbytes + aligned(1))


def test_a_region_is_compared_with_a_buffer_without_reading(store: FileStore) -> None:
    (region,) = allocate(store, 3 * BLOCK + 5, spare=1)
    assert not store.holds(region, filled(1, region.nbytes)), "nothing was written yet"
    write(store, region, 1)
    read_so_far, other = store.traffic().bytes_read, filled(1, region.nbytes)
    assert store.holds(region, other)
    other.memory[2 * BLOCK + 7] ^= 1
    assert not store.holds(region, other)
    write(store, region, 2, provisional=True)
    assert store.holds(region, filled(1, region.nbytes))
    store.commit()
    assert store.holds(region, filled(2, region.nbytes))
    assert store.traffic().bytes_read == read_so_far


def test_a_relative_folder_stays_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore(".")
    monkeypatch.chdir("/")
    region = allocate(store, 10)[0]
    write(store, region, 1)
    assert holds(store, region, 1)
    assert [*tmp_path.iterdir()] == [store.path]
    store.close()
    assert not [*tmp_path.iterdir()]


def test_a_file_system_without_direct_io_is_said_once(tmp_path, monkeypatch, caplog) -> None:
    without_direct(monkeypatch)
    with FileStore(tmp_path) as store:
        region = allocate(store, 10)[0]
        write(store, region, 1)
        assert holds(store, region, 1)
    assert [record.message for record in caplog.records if "has no direct I/O" in record.message] == [
        f"the file system of {tmp_path} has no direct I/O: the NVMe tier works through the page cache, which is slower "
        "and takes host memory; a local disk with ext4 or XFS has it"
    ]


def test_several_requests_of_one_transfer_are_with_the_disk_at_once(store, monkeypatch) -> None:
    region = allocate(store, 8 * BLOCK)[0]
    meeting = threading.Barrier(4)
    for name in ("preadv", "pwritev"):  # goes on only if as many requests as the queue is deep are there
        before_each(monkeypatch, name, lambda: meeting.wait(60))
    write(store, region, 3)
    assert holds(store, region, 3)


def test_any_order_of_operations_reads_what_was_written_last(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    before_each(monkeypatch, "pwritev", lambda: time.sleep(draw.choice([0, 0.002])))  # so that many are under way
    regions = allocate(store, *[BLOCK * 2 + 100] * 4, spare=3)
    current, following = dict.fromkeys(regions, 0), dict[Region, int]()
    for region in regions:
        write(store, region, 0)
    buffers = [Buffer(regions[0].nbytes) for _ in range(3)]
    for step in range(1, 200):
        region, buffer = draw.choice(regions), draw.choice(buffers)
        match draw.choice(["read", "write", "write", "provisional", "provisional", "commit", "drop"]):
            case "read":
                store.read(region, buffer).wait()
                assert torch.equal(buffer.memory, filled(current[region], region.nbytes).memory)
            case "write" if region not in following:
                store.write(region, filled(step, region.nbytes))
                current[region] = step
            case "provisional" if region in following or len(following) < 3:
                store.write(region, filled(step, region.nbytes), provisional=True)
                following[region] = step
            case "commit":
                store.commit()
                current |= following
                following.clear()
            case "drop":
                store.drop()
                following.clear()
    assert all(holds(store, region, current[region]) for region in regions)
    assert store.nbytes == 7 * regions[0].padded


def test_a_buffer_that_is_written_is_not_read_into_before(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = allocate(store, BLOCK, BLOCK)
    write(store, second, 2)
    before_each(monkeypatch, "pwritev", lambda: time.sleep(0.05))
    buffer = filled(1, BLOCK)
    store.write(first, buffer)
    store.read(second, buffer).wait()
    assert torch.equal(buffer.memory, filled(2, BLOCK).memory)
    assert holds(store, first, 1)


def test_a_provisional_write_counts_from_commit_on(store: FileStore) -> None:
    first, second = allocate(store, 3 * BLOCK, 3 * BLOCK, spare=2)
    size = store.nbytes
    for region in (first, second):
        write(store, region, 1)
        write(store, region, 2, provisional=True)
        assert holds(store, region, 1)
    store.commit()
    assert holds(store, first, 2)
    assert holds(store, second, 2)
    for number in range(3, 6):  # the places go round
        write(store, first, number, provisional=True)
        write(store, second, number, provisional=True)
        store.drop()
        assert holds(store, first, number - 1)
        write(store, first, number, provisional=True)
        store.commit()
        assert holds(store, first, number)
        assert holds(store, second, 2)
    assert store.nbytes == size == os.stat(store.path).st_size


def test_misuse_by_a_caller_is_an_assertion(store: FileStore) -> None:
    region, other = allocate(store, BLOCK, BLOCK, spare=1)
    late = store.allocate(BLOCK)
    buffer = Buffer(BLOCK)
    with pytest.raises(AssertionError, match="never written"):
        store.read(region, buffer)
    with pytest.raises(AssertionError, match="not reserved"):
        store.write(late, buffer)
    with pytest.raises(AssertionError, match="a buffer of 4096 bytes for a region of 16384"):
        store.write(region, Buffer(1))
    write(store, region, 1, provisional=True)
    with pytest.raises(AssertionError, match="awaits commit or drop"):
        store.write(region, buffer)
    with pytest.raises(AssertionError, match="no spare place"):
        store.write(other, buffer, provisional=True)


def test_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    for wrong in ({"block_size": 5000}, {"block_size": 0}, {"queue_depth": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}; "):
            FileStore(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_buffers_are_aligned_and_stay_within_their_budget(store: FileStore) -> None:
    pool = Buffers([BLOCK, 3, BLOCK])
    assert pool.nbytes == 2 * BLOCK + ALIGNMENT
    small, large, larger = pool.take(3), pool.take(4097), pool.take(1)
    assert [buffer.nbytes for buffer in (small, large, larger)] == [ALIGNMENT, BLOCK, BLOCK]
    assert all(buffer.memory.data_ptr() % ALIGNMENT == 0 for buffer in (small, large, larger))
    assert pool.take(1) is None
    pool.give(small)
    assert pool.take(ALIGNMENT + 1) is None
    assert pool.take(1) is small
    numbers = large.tensor(10, torch.float32, offset=8)
    numbers.fill_(1.0)
    assert numbers.shape == (10,)
    assert numbers.data_ptr() == large.memory.data_ptr() + 8
    pool.give(large)
    with pytest.raises(AssertionError, match="came back twice"):
        pool.give(large)


def test_a_buffer_that_the_disk_uses_cannot_be_given_back(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    region, go = allocate(store, BLOCK)[0], threading.Event()
    before_each(monkeypatch, "pwritev", lambda: go.wait(60))
    pool = Buffers([BLOCK])
    buffer = pool.take(BLOCK)
    assert buffer is not None
    pending = store.write(region, buffer)
    assert not pending.done()
    with pytest.raises(AssertionError, match="while the disk uses it"):
        pool.give(buffer)
    go.set()
    pending.wait()
    pool.give(buffer)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_stream_changes_every_region_in_order(store: FileStore, count: int) -> None:
    sizes = [2 * BLOCK, 100, BLOCK, 5 * BLOCK, 7, 2 * BLOCK]
    regions = allocate(store, *sizes)
    for number, region in enumerate(regions):
        write(store, region, number)
    pool = Buffers([5 * BLOCK] * count)
    for round_ in range(3):
        for number, buffer in enumerate(stream(store, regions, pool)):
            expected = filled(number, sizes[number]).memory[: sizes[number]] + round_
            assert torch.equal(buffer.memory[: sizes[number]], expected)
            buffer.memory.add_(1)
    before = store.traffic().bytes_written
    for number, buffer in enumerate(stream(store, regions, pool, write=False)):
        expected = filled(number, sizes[number]).memory[: sizes[number]] + round_ + 1
        assert torch.equal(buffer.memory[: sizes[number]], expected)
        buffer.memory.zero_()
    assert store.traffic().bytes_written == before
    assert [pool.take(5 * BLOCK) is not None for _ in range(count + 1)] == [True] * count + [False]


def test_provisional_writes_of_a_stream_can_be_dropped(store: FileStore) -> None:
    regions = allocate(store, *[BLOCK] * 3, spare=3)
    for region in regions:
        write(store, region, 1)
    for expected, settle in ((1, store.drop), (2, store.commit)):
        for buffer in stream(store, regions, Buffers([BLOCK] * 2), provisional=True):
            buffer.memory.copy_(filled(2, BLOCK).memory)
        settle()
        assert all(holds(store, region, expected) for region in regions)


def test_a_stream_reads_ahead_and_writes_behind(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = allocate(store, *[BLOCK] * 5)
    for region in regions:
        write(store, region, 0)
    begun: list[tuple[str, int]] = []
    for name in ("read", "write"):
        real = getattr(store, name)

        def note(region: Region, *rest: Any, name: str = name, real: Callable[..., Any] = real) -> Any:
            begun.append((name, regions.index(region)))
            pending = real(region, *rest)
            pending.wait()
            return pending

        monkeypatch.setattr(store, name, note)
    for number, _ in enumerate(stream(store, regions, Buffers([BLOCK] * 3))):
        begun.append(("use", number))
    order = {event: place for place, event in enumerate(begun)}
    assert len(order) == len(begun) == 15
    for number in range(4):
        assert order["read", number + 1] < order["use", number], "the next is read while one is used"
        assert order["use", number] < order["write", number] < order["use", number + 1]


def test_a_stream_that_ends_early_or_fails_gives_all_buffers_back(store, monkeypatch) -> None:
    regions = allocate(store, *[2 * BLOCK] * 4)
    for region in regions:
        write(store, region, 1)
    pool = Buffers([2 * BLOCK] * 3)

    def all_there() -> bool:
        buffers = [pool.take(2 * BLOCK) for _ in range(3)]
        for buffer in buffers:
            if buffer is not None:
                pool.give(buffer)
        return None not in buffers

    for number, buffer in enumerate(stream(store, regions, pool)):
        buffer.memory.copy_(filled(2, 2 * BLOCK).memory)
        if number == 1:
            break
    gc.collect()
    assert all_there()
    assert [holds(store, region, value) for region, value in zip(regions, [2, 1, 1, 1], strict=True)] == [True] * 4
    fail_at(monkeypatch, errno.EIO, "Input/output error", lambda offset: offset >= 2 * BLOCK)
    with pytest.raises(OSError, match="writing .* failed"):
        for _ in stream(store, regions, pool):
            pass
    assert all_there()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder, kind, message in (
        (tmp_path / "missing", FileNotFoundError, "missing of the NVMe tier does not exist; mount the disk"),
        (file, NotADirectoryError, "is not a folder"),
        (Path("/proc"), OSError, "cannot make a swap file in /proc .*; name a folder that can be written to"),
    ):
        with pytest.raises(kind, match=message):
            FileStore(folder)
    assert [*tmp_path.iterdir()] == [file]


def test_a_full_disk_is_said_before_the_start(store: FileStore) -> None:
    kept = allocate(store, BLOCK)[0]
    write(store, kept, 5)
    store.allocate(1 << 60)
    with pytest.raises(
        OSError, match=r"needs 1,152,921,504,606,846,976 bytes more in .*, where [\d,]+ are free; make room"
    ) as caught:
        store.reserve()
    assert caught.value.errno == errno.ENOSPC
    assert os.stat(store.path).st_size == store.nbytes == BLOCK
    assert holds(store, kept, 5)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_short_transfers_are_continued(store: FileStore, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    region = allocate(store, 4 * BLOCK)[0]
    real, turn = getattr(os, name), [0]

    def short(descriptor: int, memory: list[memoryview], offset: int) -> int:
        turn[0] += 1
        whole = len(memory[0]) // ALIGNMENT // 2 * ALIGNMENT or ALIGNMENT
        done = int(real(descriptor, [memory[0][:whole]], offset))
        # Of what is not a whole block the rest could not be asked for: it is asked for again.
        return done - 1000 if turn[0] % 3 == 0 and done > ALIGNMENT else done

    monkeypatch.setattr(os, name, short)
    write(store, region, 4)
    assert holds(store, region, 4)
    assert turn[0] > 8


def test_a_file_that_is_cut_off_is_noticed(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    region = allocate(store, 4 * BLOCK)[0]
    write(store, region, 4)
    before_each(monkeypatch, "preadv", lambda: os.truncate(store.path, BLOCK))
    with pytest.raises(OSError, match=r"ended after 0: the file was cut off by somebody else"):
        read(store, region)
    for use in (lambda: read(store, region), lambda: write(store, region, 5)):
        with pytest.raises(OSError, match=r"changed by somebody else: it has 16,384 bytes and had 65,536"):
            use()


def test_a_file_that_somebody_writes_to_is_noticed(store: FileStore) -> None:
    first, second = allocate(store, 4 * BLOCK, 4 * BLOCK)
    write(store, first, 1)
    write(store, second, 2)
    with store.path.open("r+b") as file:
        file.seek(4 * BLOCK + 2 * BLOCK + 10)
        file.write(b"x")
    with pytest.raises(OSError, match=r"16,384 bytes at 98,304 of .* are not those that were written there"):
        read(store, second)
    assert holds(store, first, 1)
    write(store, second, 3)
    assert holds(store, second, 3)


def test_a_file_that_somebody_deletes_is_said_and_another_of_its_name_is_left(tmp_path, caplog) -> None:
    with FileStore(tmp_path) as store:
        region = allocate(store, BLOCK)[0]
        write(store, region, 1)
        store.path.unlink()
        assert holds(store, region, 1)
        assert holds(store, region, 1)
        store.path.write_text("another")
    assert store.path.read_text() == "another"
    assert sum("was deleted by another process" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("code", "text"), [(errno.EIO, "Input/output error"), (errno.ENOSPC, "No space left")])
def test_a_disk_that_fails_is_said_and_nothing_is_taken_for_written(store, monkeypatch, code, text) -> None:
    region = allocate(store, 4 * BLOCK, spare=1)[0]
    write(store, region, 1)
    with monkeypatch.context() as patch:
        fail_at(patch, code, text, lambda offset: offset % (4 * BLOCK) == BLOCK)
        pending = store.write(region, filled(2, region.nbytes), provisional=True)
        for _ in range(2):
            with pytest.raises(
                OSError, match=rf"writing 16,384 bytes at 81,920 of .* failed \({text}\); see "
            ) as caught:
                pending.wait()
            assert caught.value.errno == code
        with pytest.raises(OSError, match="writing"):
            store.commit()
        store.commit()
        assert holds(store, region, 1), "what failed was dropped"
        store.write(region, filled(2, region.nbytes))
        with pytest.raises(OSError, match="writing"):
            store.read(region, Buffer(region.nbytes))
        with pytest.raises(AssertionError, match="not to its end"):
            store.read(region, Buffer(region.nbytes))
    write(store, region, 3)
    assert holds(store, region, 3)


def test_a_slow_disk_is_said_while_one_waits(tmp_path, monkeypatch, caplog) -> None:
    with FileStore(tmp_path, patience=0.05) as store:
        region = allocate(store, BLOCK)[0]
        write(store, region, 1)
        before_each(monkeypatch, "pwritev", lambda: time.sleep(0.3))
        write(store, region, 2)
        assert store.traffic().write_seconds >= 0.3
    (message, *_) = [record.message for record in caplog.records if "is not done after" in record.message]
    assert re.fullmatch(
        rf"writing 16,384 bytes at 0 of {re.escape(str(store.path))} is not done after [\d.e-]+ s of waiting: 1 of 1 "
        r"requests are left; the disk has done [\d.e+-]+ MB/s so far",
        message,
    )


def test_closing_forgets_what_waits_and_deletes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, block_size=BLOCK, queue_depth=1)
    region = allocate(store, 4 * BLOCK)[0]
    under_way = threading.Event()
    before_each(monkeypatch, "pwritev", lambda: (under_way.set(), time.sleep(0.05)))
    pending = store.write(region, filled(1, region.nbytes))
    under_way.wait(60)
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="writing 65,536 bytes .* was not done: its store was closed before"):
        pending.wait()
    for use in (lambda: store.read(region, Buffer(region.nbytes)), store.reserve):
        with pytest.raises(RuntimeError, match="was closed, and its file is deleted; open another one"):
            use()


def test_a_store_that_is_forgotten_deletes_its_file_and_ends_its_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    store = FileStore(tmp_path)
    region = allocate(store, BLOCK)[0]
    pending = store.write(region, filled(1, BLOCK))
    assert threading.active_count() > before
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert threading.active_count() == before
    assert pending.done()


def test_seconds_are_those_in_which_a_request_was_with_the_disk(tmp_path, monkeypatch) -> None:
    with FileStore(tmp_path, block_size=BLOCK, queue_depth=2) as store:
        region = allocate(store, 4 * BLOCK)[0]
        write(store, region, 1)
        before = store.traffic()
        assert before.read_seconds == 0.0
        naps = iter([0.1, 0.15, 0.15, 0.1])  # two at a time: the third begins while the second goes on
        before_each(monkeypatch, "preadv", lambda: time.sleep(next(naps)))
        read(store, region)
        after = store.traffic()
        assert after.read_seconds >= 0.25
        assert after.write_seconds == before.write_seconds
        assert after.busy_seconds == pytest.approx(after.read_seconds + after.write_seconds)
        assert after.rate == pytest.approx(8 * BLOCK / after.busy_seconds)
