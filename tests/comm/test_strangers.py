"""Processes that do not belong to a run: they run no code in it, forge no value, and do not mix with it."""

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import free_port, on_ranks, run_ranks
from malicious import Malicious
from zeromesh import Environment, init_distributed
from zeromesh.comm import messages, trust
from zeromesh.comm.environment import StartError
from zeromesh.comm.messages import gather_json, gather_texts
from zeromesh.comm.rendezvous import Meeting
from zeromesh.comm.trust import LASTING, SECRET, TOKEN, SealedStore, prove, require_private, run_token

LIMIT = timedelta(seconds=60)  # nobody waits for so long
SHORT = timedelta(seconds=3)


def member(rank: int, port: int, world_size: int = 2) -> Environment:
    return Environment(rank, rank, 0, world_size, world_size, "127.0.0.1", port, launcher="torchrun")


def start(environment: Environment, token: str, limit: timedelta = LIMIT) -> str:
    """Start a rank with a token; return "started", or the error that it gets."""
    os.environ[TOKEN] = token
    try:
        init_distributed("gloo", start_timeout=limit, environment=environment)
        return "started"
    except StartError as error:
        return str(error)


def leave() -> int:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return rank


def as_a_stranger(port: int, mark: str) -> None:
    """Join as rank 1 with torch alone, by the names that the package uses, and send an object that runs a command."""
    store: Any = dist.TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore("zeromesh/0/0", store)  # type: ignore[attr-defined]
    store.wait(["here/0"], LIMIT)
    for stage in ("here", "knows"):
        store.set(f"{stage}/1", store.get("here/0"))  # a greeting that it has overheard
        if store.add(f"{stage}/count", 1) == 2:
            store.set(f"{stage}/go", "")
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=SHORT / 3)
    dist.all_gather_object([None, None], Malicious(mark))


def victim_or_stranger(port: int, mark: str) -> str:
    if leave() == 0:
        return start(member(0, port), "a" * 64)
    try:
        as_a_stranger(port, mark)
    except (RuntimeError, MemoryError, ValueError):
        dist.distributed_c10d._world.group_count = 0  # torch counts a group that was not made, and names others by it
        return "refused"
    return "joined"


def test_a_stranger_who_joins_as_a_rank_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    said, stranger = run_ranks(victim_or_stranger, 2, free_port(), str(tmp_path / "mark"))
    assert "whose token it does not have" in said
    assert "rank 1 is process" in said
    assert stranger == "refused"
    assert not (tmp_path / "mark").exists()


def beside_forged_keys(port: int, keys: dict[str, bytes]) -> str:
    if leave() == 0:
        return start(member(0, port), "a" * 64)
    store: Any = dist.TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore("zeromesh/0/0", store)  # type: ignore[attr-defined]
    store.wait(["here/0"], LIMIT)
    for key, forged in keys.items():
        store.set(key, forged)
    with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, has gone
        store.wait(["never"], LIMIT)
    return ""


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"problem": b"\xff" * 80 + "ä".encode()}, "somebody who does not have the token"),
        ({"here/go": b""}, "though the store there says so: a stranger writes to it"),
        ({"here/1": b"\xff" * 200, "here/go": b""}, "none that can be read"),
        ({"here/1": b"0" * 64 + b'{"run": ["a"], "by": 1}', "here/go": b""}, "rank 1 is 1, of another run"),
    ],
)
def test_what_a_stranger_writes_into_the_meeting_is_told(keys: dict[str, bytes], match: str) -> None:
    assert match in run_ranks(beside_forged_keys, 2, free_port(), keys)[0]


def with_tokens(port: int, tokens: list[str], sizes: list[int]) -> str:
    rank = leave()
    return start(member(rank, port, sizes[rank]), tokens[rank], LIMIT if rank else SHORT)


@pytest.mark.parametrize(
    ("tokens", "sizes", "why"),
    [
        (["a" * 64, "b" * 64], [2, 2], "whose token"),
        pytest.param(["a" * 64] * 2, [2, 3], "a run of 2 ranks", marks=pytest.mark.full),
    ],
)
def test_two_runs_on_one_port_do_not_mix(tokens: list[str], sizes: list[int], why: str) -> None:
    first, second = run_ranks(with_tokens, 2, free_port(), tokens, sizes)
    assert "of 2 ranks, 1 did not come" in first  # another run leaves the place of the rank free
    assert "of another run" in second
    assert why in second
    assert "Set MASTER_PORT to a free port" in second


def twice_as_one_rank(port: int) -> str:
    rank = leave()
    if rank == 2:
        time.sleep(1)  # after the other one
    return start(member(min(rank, 1), port), "a" * 64)


def test_a_rank_that_comes_twice_is_refused_and_the_run_goes_on() -> None:
    first, second, third = run_ranks(twice_as_one_rank, 3, free_port())
    assert (first, second) == ("started", "started")
    assert "another process has come as rank 1" in third


def test_values_that_no_rank_has_stored_are_refused() -> None:
    raw = dist.HashStore()  # type: ignore[attr-defined]
    store, other = SealedStore(raw, b"key", "host:1"), SealedStore(raw, b"another key", "host:1")
    store.set("address", b"10.0.0.1")
    assert store.get("address") == b"10.0.0.1"
    assert b"10.0.0.1" not in raw.get("address")
    assert store.compare_set("address", b"10.0.0.1", b"10.0.0.2") == b"10.0.0.2"
    assert store.compare_set("address", b"10.0.0.1", b"10.0.0.3") == b"10.0.0.2"
    raw.set("elsewhere", raw.get("address"))
    raw.set("plain", "10.0.0.66")
    raw.set("empty", "")
    other.set("foreign", b"10.0.0.66")
    for key in ("elsewhere", "plain", "empty", "foreign"):
        with pytest.raises(StartError, match="no rank of this run has written .* at host:1"):
            store.get(key)
    through: Any = dist.PrefixStore("part", store)  # type: ignore[attr-defined]
    through.set("key", "value")  # from C++
    assert (through.get("key"), through.check(["key"]), through.clone().get("key")) == (b"value", True, b"value")


@on_ranks(2)
def test_a_connection_of_a_stranger_in_the_place_of_a_rank_is_told() -> None:
    key = b"of the run"
    for keys, refused in (([key, key], False), ([key, b"of a stranger"], True)):
        trust._stores[dist.group.WORLD] = SealedStore(dist.HashStore(), keys[dist.get_rank()], "host:1")  # type: ignore[attr-defined]
        if refused:
            with pytest.raises(StartError, match="what connected to this rank as rank . of group .* cannot prove"):
                prove(dist.group.WORLD)
        else:
            assert prove(dist.group.WORLD) is dist.group.WORLD


@on_ranks(2)
def test_lengths_that_no_text_has_are_refused() -> None:
    assert gather_json({"rank": dist.get_rank()}) == [{"rank": 0}, {"rank": 1}]
    for length in (-1, messages.LONGEST + 1):
        forged: Callable[[torch.Tensor], torch.Tensor] = lambda _, length=length: torch.tensor([[1], [length]])  # noqa: E731
        with pytest.raises(RuntimeError, match=f"rank 1 sends a text of {length} bytes"):
            gather_texts("x", forged)


def test_tokens_come_from_what_strangers_do_not_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (TOKEN, SECRET, LASTING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(trust.tempfile, "gettempdir", lambda: str(tmp_path))
    here, nodes = member(0, 1), Environment(0, 0, 0, 2, 1, "10.0.0.1", 1, launcher="torchrun")
    assert run_token(nodes) == b""
    key = run_token(here)
    assert (len(key), run_token(here)) == (32, key)
    (file,) = (tmp_path / f"zeromesh-{os.geteuid()}").iterdir()
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.parent.chmod(0o777)
    with pytest.raises(StartError, match=r"is not a folder of this user alone .*mode 777.* set ZEROMESH_SECRET"):
        run_token(here)
    monkeypatch.setenv(SECRET, "too short")
    with pytest.raises(ValueError, match="has 9 bytes, but must have at least 16"):
        run_token(nodes)
    monkeypatch.setenv(SECRET, "of all nodes of this test")
    assert run_token(nodes) == run_token(here) != key
    assert b"of all nodes" not in run_token(nodes)
    monkeypatch.setenv(TOKEN, "t" * 64)
    assert run_token(nodes) == b"t" * 64


def test_folders_that_others_may_replace_are_refused(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir(mode=0o700)
    link.symlink_to(mine)
    require_private(mine)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for path in (link, shared):
        with pytest.raises(ValueError, match="is not a folder of this user alone"):
            require_private(path)


def test_runs_are_told_apart_by_what_their_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for variables in ({}, {"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "mine"}, {"SLURM_JOB_ID": "7"}):
        with monkeypatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            launcher = "slurm" if "SLURM_JOB_ID" in variables else "torchrun"
            place = Environment(0, 0, 0, 2, 2, "127.0.0.1", 1, launcher=launcher)
            names.add(trust.run_name(place))
    assert len(names) == 4
    assert "a run of 2 ranks, job 7.0" in names
    assert Meeting(member(0, 1), "p", LIMIT)._run == "a run of 2 ranks"
