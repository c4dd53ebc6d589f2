"""Swap files: space that is reserved, files that processes leave, checksums and the speed of a disk."""

import contextlib
import errno
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromesh.shard.store import swap_file
from zeromesh.shard.store.file_blocks import measure_bandwidth
from zeromesh.shard.store.nvme import FileStore, checksum
from zeromesh.shard.store.swap_file import ALIGNMENT, SwapFile, sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVMe tier needs Linux")


def test_space_that_cannot_be_reserved_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SwapFile(tmp_path, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file.reserve(ALIGNMENT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * ALIGNMENT, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot be reserved .*ulimit -f") as caught:
            file.reserve(5 * ALIGNMENT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.errno == errno.EFBIG
    assert os.stat(file.path).st_size == file.nbytes == ALIGNMENT
    real = os.posix_fallocate

    def begin(descriptor: int, offset: int, nbytes: int) -> None:
        real(descriptor, offset, nbytes // 2)  # as kernels do, which then find no more
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", begin)
        with pytest.raises(OSError, match="needs 16,384 bytes more in .*, which cannot be reserved .No space left"):
            file.reserve(5 * ALIGNMENT)
    assert os.stat(file.path).st_size == file.nbytes == ALIGNMENT
    file.delete()
    assert not list(tmp_path.iterdir())


PROCESSES = """
import os, sys, time
from zeromesh.shard.store.nvme import FileStore, checksum
from zeromesh.shard.store.memory import Buffer

def say(*words):
    # A line at once, which no other process's cuts in two.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

# All from one that has imported torch, which takes seconds.
ends, pids = sys.argv[2:], {}
for rank, end in enumerate(ends):
    pid = os.fork()
    if pid == 0:
        break
    pids[pid] = rank
else:
    print(*pids, flush=True)
    while pids:
        pid, status = os.wait()
        say("ended", pids.pop(pid), os.waitstatus_to_exitcode(status))
    sys.exit()

store = FileStore(sys.argv[1], rank=rank, block_size=4096, queue_depth=2)
region = store.allocate(1 << 20)
store.reserve()
buffer = Buffer(1 << 20)
store.write(region, buffer).wait()
if end == "fork":
    if os.fork() == 0:
        sys.exit()
    os.wait()
    assert store.path.exists(), "it is the parent's"
if end == "raise":
    store.write(region, buffer)
    raise SystemExit(3)
if end == "work":
    real = os.pwritev
    def slow(*given):
        time.sleep(0.01)
        return real(*given)
    os.pwritev = slow
    say("ready")
    while True:
        store.write(region, buffer).wait()
"""


@pytest.mark.full
def test_only_killed_processes_leave_files_which_the_next_one_removes(tmp_path, caplog) -> None:
    ends = ["return", "raise", "fork", "work", "work", "work"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PROCESSES, str(tmp_path), *ends], stdout=subprocess.PIPE, text=True
    )
    pids = list(map(int, parent.stdout.readline().split()))
    try:
        lines = [parent.stdout.readline() for _ in ends]
        assert sorted(lines) == ["ended 0 0\n", "ended 1 3\n", "ended 2 0\n", *["ready\n"] * 3]
        os.kill(pids[3], signal.SIGINT)
        os.kill(pids[4], signal.SIGKILL)
        assert sorted(parent.stdout.readline() for _ in range(2)) == ["ended 3 -2\n", "ended 4 -9\n"]
        killed, living = (f"zeromesh-{swap_file.host_name()}-rank{rank}-pid{pids[rank]}-0.swap" for rank in (4, 5))
        assert {path.name for path in tmp_path.iterdir()} == {killed, living}
        other = tmp_path / "zeromesh.swap"
        other.touch()
        with caplog.at_level(logging.WARNING), FileStore(tmp_path) as store:
            assert {path.name for path in tmp_path.iterdir()} == {living, store.path.name, other.name}
        assert f"removed {tmp_path / killed} (1,048,576 bytes), left by a process that was killed" in caplog.text
    finally:
        for pid in pids[3:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.communicate()


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch) -> None:
    real, swept = os.open, list[Path]()

    def open_and_sweep(path: Any, flags: int, *rest: Any) -> int:
        descriptor = real(path, flags, *rest)
        if flags & os.O_CREAT and not swept:
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", real)
                swept.extend(sweep(tmp_path))
        return descriptor

    monkeypatch.setattr(os, "open", open_and_sweep)
    file = SwapFile(tmp_path, 0)
    assert len(swept) == 1
    assert [*tmp_path.iterdir()] == [file.path] != swept
    file.reserve(ALIGNMENT)
    file.check()
    file.delete()


def test_files_of_other_hosts_stay_where_locks_may_not_be_seen(tmp_path, monkeypatch, caplog) -> None:
    names = [f"zeromesh-{host}-rank0-pid1-0.swap" for host in (swap_file.host_name(), "another")]
    for name in names:
        (tmp_path / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "major", lambda device: 0)
        assert sweep(tmp_path) == [tmp_path / names[0]]
    assert f"{tmp_path / names[1]} (0 bytes) is another host's" in caplog.text
    monkeypatch.setattr(os, "major", lambda device: 8)
    assert sweep(tmp_path) == [tmp_path / names[1]]


def test_the_checksum_sees_order_and_signs() -> None:
    torch.manual_seed(0)
    values = torch.randn(1 << 14)

    def of(tensor: torch.Tensor) -> int:
        return checksum(tensor.contiguous().view(torch.uint8).numpy().data)

    blocks = values.view(4, -1)
    others = [-values, values.flip(0), blocks[[1, 0, 2, 3]], values.nextafter(torch.tensor(9.0)), values.roll(1)]
    two = values.clone()
    two[[5, 77]] *= -1
    assert len({of(values), *map(of, others), of(two)}) == 7
    assert of(values) == of(values.clone())


def test_bandwidth_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    found = measure_bandwidth(tmp_path, nbytes=3 * (1 << 20) + 5)
    assert found.read > 0 < found.write
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="are free"):
        measure_bandwidth(tmp_path, nbytes=1 << 60)
    assert not list(tmp_path.iterdir())
