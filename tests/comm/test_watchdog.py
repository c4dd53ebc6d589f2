"""Ranks that wait for each other for ever are told so; ranks that are merely slow are left alone."""

import json
import os
import signal
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from harness import RankFailure, on_ranks, run_mpi_ranks, run_ranks, spawn_ranks
from run import sgd, start_engine, train_step
from zeromesh.comm import course, relay, signs, watchdog
from zeromesh.comm import mesh as mesh_module
from zeromesh.comm.collectives import Pending
from zeromesh.comm.mesh import Mesh


def make_engine(patience: float) -> zeromesh.Engine:
    watchdog.PATIENCE = patience
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    engine = start_engine(model, stage=3, optimizer=sgd(0.1))
    return engine


def one_rank_steps_while_the_other_runs_another_forward() -> None:
    engine = make_engine(patience=0.6)
    engine.backward(engine(torch.ones(2, 64)).sum())
    if engine.mesh.rank == 0:
        engine.step()
    engine(torch.ones(2, 64))


def one_rank_is_slow() -> float:
    engine = make_engine(patience=0.3)
    if engine.mesh.rank == 0:
        time.sleep(1.5)
    train_step(engine, engine(torch.ones(2, 64)).sum())
    watchdog.PATIENCE = 30.0
    return float(engine.get_global_grad_norm() or 0.0)


def one_rank_is_stopped(stopped: int) -> None:
    engine = make_engine(patience=0.6)
    if engine.mesh.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    train_step(engine, engine(torch.ones(2, 64)).sum())


def one_rank_calls_a_barrier() -> None:
    engine = make_engine(patience=0.3)
    if engine.mesh.rank == 1:
        dist.barrier()
    engine.backward(engine(torch.ones(2, 64)).sum())


class Store:
    """Store of one process, which counts its calls."""

    def __init__(self) -> None:
        self.words: dict[str, bytes] = {}
        self.calls = 0

    def get(self, key: str) -> bytes:
        self.calls += 1
        return self.words[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return [self.words[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return all(key in self.words for key in keys)

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self.words[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        self.words[key] = str(int(self.words.get(key, b"0")) + amount).encode()
        return int(self.words[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.calls += 1
        return self.words.setdefault(key, desired.encode())

    def clone(self) -> "Store":
        return self


PATIENCE = 3600.0
FAR = {"what": "something", "number": 1, "where": "far.py:1"}


class Place:
    """Ranks of one place, as processes of their own would have them: a board and a relay for each."""

    def __init__(self, store: Store, name: str, ranks: list[int], world: int) -> None:
        self.name, self.ranks, self.waits = name, ranks, dict[int, dict[str, Any]]()
        self.ended: list[str] = []
        with patch.object(signs, "PLACE", name):
            self.boards = {rank: signs.Board(store, rank) for rank in ranks}
        self.relays = {rank: relay.Relay(store, self.boards[rank], rank, world, PATIENCE) for rank in ranks}

    def tick(self, *ranks: int) -> None:
        """Let ranks give a sign, and pass them on."""
        with patch.object(signs, "PLACE", self.name), patch.object(relay, "PLACE", self.name):
            for rank in ranks:
                wait = self.waits.get(rank)
                self.boards[rank].give(self, {"long": wait is not None, "due": wait is not None, "wait": wait})
                self.relays[rank].tick(self.ended.append)


def test_only_one_rank_of_a_machine_calls_the_store_and_a_fixed_number_of_times() -> None:
    """Where each rank reads every other's sign, a tick of 1,024 ranks takes longer than the pause between two."""
    calls = dict[int, int]()
    for count in (2, 40):
        store = Store()
        places = [Place(store, f"node {number}", [4 * number + local for local in range(4)], 4 * count)
                  for number in range(count)]  # fmt: skip
        assert store.calls <= 3 * 4 * count
        for place in places:
            place.waits = {rank: FAR for rank in place.ranks}
            place.tick(*place.ranks)
        before = store.calls
        places[1].tick(*places[1].ranks)
        calls[count] = store.calls - before
        before = store.calls
        places[0].tick(*places[0].ranks)
        assert store.calls - before <= 10
        before = store.calls
        places[0].tick(1, 2, 3)
        assert store.calls == before, "a rank that does not write for its machine"
    assert calls[2] == calls[40] <= 6


def test_ranks_that_all_wait_end_the_run_and_are_named_together() -> None:
    store = Store()
    places = [Place(store, f"node {number}", [2 * number, 2 * number + 1], 6) for number in range(3)]
    for place in places:
        place.waits = {rank: FAR for rank in place.ranks}
    places[2].waits[5] = FAR | {"number": 2}
    for number in range(12):
        if number == 3:
            assert not places[0].ended
        for place in places:
            place.tick(*place.ranks)
    assert all("every rank has waited" in place.ended[0] for place in places)
    assert "  ranks 0-1 wait in their collective 1: something, at far.py:1\n" in places[0].ended[0]
    assert "  rank 5 waits in its collective 2: something, at far.py:1" in places[0].ended[0]


def test_a_rank_that_goes_on_ends_nothing() -> None:
    store = Store()
    place = Place(store, "node 0", [0, 1], 2)
    for number in range(40):
        place.waits = {0: FAR, 1: FAR | {"number": number // 3}}
        place.tick(0, 1)
    assert not place.ended


@pytest.mark.full
def test_a_busy_reader_ends_nothing_and_the_next_machine_reads_in_its_place() -> None:
    """Native code may keep Python from giving signs for an hour; a machine that does not answer is gone, though."""
    for answers in (True, False):
        store = Store()
        store.where = "127.0.0.1:1"
        places = [Place(store, f"node {number}", [number], 3) for number in range(3)]
        places[1].waits, places[2].waits = {1: FAR}, {2: FAR}
        for _ in range(2):
            for place in places:
                place.tick(*place.ranks)
        if not answers:
            places[0].relays[0]._echo = None
            line = json.loads(store.words["zeromesh/nodes/0"])
            store.set("zeromesh/nodes/0", json.dumps(line | {"echo": None}))
        for _ in range(relay.TICKS * (relay.SILENT + 4)):
            places[1].tick(1)
            places[2].tick(2)
        assert store.words["zeromesh/reader"].startswith(b"1:")
        assert bool(places[1].ended) != answers
    assert "rank 0 (process " in places[1].ended[0]
    assert "its machine is gone" in places[1].ended[0]
    assert "; rank 1 waits for something, at far.py:1" in places[1].ended[0]
    places[2].tick(2)
    assert places[2].ended[0] == places[1].ended[0]


def test_the_next_rank_of_a_machine_passes_signs_on_where_the_first_gives_none() -> None:
    store = Store()
    place = Place(store, "node 0", [0, 1, 2], 3)
    place.waits = {1: FAR, 2: FAR}
    place.tick(0, 1, 2)
    for _ in range(20 * relay.TICKS):
        place.tick(1, 2)
    line = json.loads(store.words["zeromesh/nodes/0"])
    assert line["beat"].startswith("1:")
    assert line["quiet"]["0"][1] == "alive"  # it is this process
    assert not place.ended


def test_a_machine_without_engines_is_not_missed() -> None:
    store = Store()
    places = [Place(store, f"node {number}", [number], 2) for number in range(2)]
    places[0].waits = {0: FAR}
    for _ in range(3):
        for place in places:
            place.tick(*place.ranks)
    places[1].relays[1].leave(places[1])
    for _ in range(2 * relay.TICKS * relay.SILENT):
        places[0].tick(0)
    assert not places[0].ended


def test_long_texts_of_any_alphabet_stay_in_the_record_of_their_rank() -> None:
    place = Place(Store(), "node 0", [0, 1], 2)
    text = "\N{CJK UNIFIED IDEOGRAPH-7A0B}" * signs.LONGEST
    place.waits = {0: {"what": text, "number": 1, "where": text}, 1: FAR}
    place.tick(1, 0)
    line = place.boards[0].line()
    assert line is not None
    assert line["waits"] == [(place.waits[0], [0]), (FAR, [1])]
    place.boards[1].tell_end(text)
    assert place.boards[0].ended == text[: len(place.boards[0].ended)] != ""


def test_a_wait_of_another_engine_ends_the_run_where_the_store_does_not_answer() -> None:
    """One engine's watchdog calls the store for all of the process; nobody else sees that it does not come back."""
    store, ended = Store(), list[str]()
    first, second = (watchdog.Watchdog(store, 0, 2, patience=PATIENCE) for _ in range(2))
    with patch.object(watchdog.Watchdog, "_end", lambda _, why: ended.append(why)):
        for _ in range(relay.TICKS * relay.SILENT + 1):
            first.judge()  # without a check in between, as it waits for the store
        assert not ended
        second._what, second._began, second._due = "all_gather", -2 * PATIENCE, -PATIENCE
        second.check()
        first.judge()
    assert "has not answered" in ended[0]


def test_a_device_that_does_not_get_on_is_a_wait() -> None:
    """nccl waits on the device, and the process goes on until it needs a value."""

    class Stream:
        through = False

        def record_event(self) -> "Stream":
            return self

        def query(self) -> bool:
            return self.through

    watched, stream = watchdog.Watchdog(Store(), 0, 2, patience=PATIENCE), Stream()
    with patch.object(torch.accelerator, "current_stream", lambda device: stream):
        for _ in range(3):
            watched.queued("all_gather", torch.device("cpu"))
            assert watched._wait() is None, "it gets more to do"
    wait = watched._wait()
    assert wait is not None
    assert (wait["what"], wait["number"]) == ("all_gather", 3)
    assert not watched._is_overdue(watched._since + PATIENCE / 2), "it may be computing what has been queued"
    assert watched._is_overdue(watched._since + PATIENCE)
    stream.through = True
    assert watched._wait() is None
    with patch.object(watchdog, "_own_wait", lambda frame: "barrier"), patch.object(watchdog, "_calls", lambda: 1):
        assert watched._wait()
        assert not watched._is_overdue(watched._since + PATIENCE), "nothing is known of the program's own"


def test_a_large_collective_is_given_the_time_of_a_slow_link() -> None:
    course.this_rank.reach(0)  # whatever other tests did in this process
    for nbytes, expected in ((int(3600 * watchdog.SLOWEST_LINK), False), (0, True)):
        watched = watchdog.Watchdog(store := Store(), 0, 1, PATIENCE)
        began = time.monotonic() - 1.5 * PATIENCE
        with patch.object(time, "monotonic", lambda began=began: began):
            watched.begin("a unit", nbytes)
        watched.check()
        (wait,) = signs.read_waits(store).values()
        assert (wait["what"], wait["number"], wait["doing"]) == ("a unit", 1, "update 1")
        assert signs.read_lines(store)[0]["due"] == expected
        watched.end()


@pytest.mark.parametrize(
    ("ranks", "how", "ends"), [((0, 1), "ended", True), ((0, 1), "lost", False), ((1, 2), "ended", False)]
)
def test_a_rank_that_waits_for_one_that_has_ended_ends(ranks: tuple[int, ...], how: str, ends: bool) -> None:
    """As over nccl, whose collectives do not fail then."""
    course.this_rank.reach(0)  # whatever other tests did in this process
    watched, other = watchdog.Watchdog(store := Store(), 1, 3, PATIENCE), signs.Board(store, 0)
    other.tell_over({"rank": 0, "updates": 4, "at": 0.0, "how": how, "said": ""})
    began = time.monotonic() - PATIENCE / 2
    with patch.object(time, "monotonic", lambda: began):
        watched.begin("all_gather over the axis data, tag 16 (parameters of unit 'a')", ranks=ranks)
    with patch.object(watched, "_end") as end:
        watched.check()
    watched.end()
    assert bool(end.call_args) == ends
    if ends:
        (said,) = end.call_args.args
        assert said.startswith("rank 0 ended after 4 updates; rank 1 waits in update 1 (parameters of unit 'a', at ")
        assert "Rank 1 has more batches, or goes on alone." in said


def test_the_end_of_a_fork_is_not_that_of_its_rank() -> None:
    rank, board = course.Course(), signs.Board(Store(), 0)
    with patch.object(course.atexit, "register"), patch.object(course.sys, "excepthook", None):
        rank.follow(board, lambda: None, 0)
    with patch.object(os, "getpid", lambda: 1):
        rank.leave()
    assert board.over() == []
    rank.leave()
    assert [record["rank"] for record in board.over()] == [0]


def test_ranks_in_different_collectives_end_and_say_which() -> None:
    outcomes = spawn_ranks(one_rank_steps_while_the_other_runs_another_forward, 2, timeout=30)
    said = "".join(outcome.output for outcome in outcomes)
    assert all(outcome.kind != "value" for outcome in outcomes)
    assert said.count("ranks wait for each other in different calls") == 1
    assert ", in update 1, in the step: exchange" in " ".join(said.split())
    assert "rank 1 waits" in said
    assert "exchange over the axis world" in said
    assert "parameters of unit" in said
    assert "test_watchdog.py" in said  # the stack shows the user's line
    assert "raise slots.parameter" in said


@pytest.mark.full
def test_a_stopped_rank_is_named_and_ends_the_run() -> None:
    other, _ = spawn_ranks(one_rank_is_stopped, 2, 1, timeout=10)
    assert other.kind == "died"
    assert "status 70" in other.text
    assert "rank 1 (process" in other.output
    assert "it is stopped, or gone; rank 0 waits for all_gather" in other.output
    assert "test_watchdog.py" in other.output  # the line of the program, and the stack


def test_a_store_that_does_not_answer_ends_the_run() -> None:
    """Else nobody would notice that the process that holds it, mostly rank 0, was stopped."""
    stopped, ended = threading.Event(), threading.Event()
    said: list[str] = []

    class Stopped(Store):
        def check(self, keys: list[str]) -> bool:
            stopped.wait(60)
            return False

    def end(why: str) -> None:
        said.append(why)
        ended.set()

    watched = watchdog.Watchdog(Stopped(), 0, 2, patience=0.03)
    with patch.object(watched, "_end", end):
        watched.begin("a unit")
        assert ended.wait(20)
        watched.end()
        stopped.set()
        time.sleep(0.1)
    assert "has not answered rank 0" in said[0]
    assert "rank 0 or the launcher of the first node, was stopped" in said[0]


def test_a_rank_whose_engine_is_gone_owes_no_sign() -> None:
    """It may prepare data for hours before it makes another engine, for which the others wait."""
    store = Store()
    watched = watchdog.Watchdog(store, 0, 2, patience=0.03)
    board, end = signs.Board.of(store, 0), time.monotonic() + 20
    assert board.process_of(0) == os.getpid()
    del watched
    while board.process_of(0) and time.monotonic() < end:
        time.sleep(0.01)
    assert board.process_of(0) is None


@pytest.mark.full
def test_a_rank_that_is_alone_in_a_barrier_of_its_own_ends_the_run() -> None:
    said = "".join(outcome.output for outcome in spawn_ranks(one_rank_calls_a_barrier, 2, timeout=30))
    assert "every rank has waited" in said
    assert "barrier of the program's own, at " in said
    assert "parameters of unit" in said


@pytest.mark.full
def test_the_watchdog_watches_over_mpi_too() -> None:
    with pytest.raises(RankFailure) as caught:
        run_mpi_ranks(one_rank_steps_while_the_other_runs_another_forward, 2, timeout=30)
    said = "".join(outcome.output for outcome in caught.value.outcomes)
    assert "every rank has waited" in said
    assert "rank 1 waits" in said
    assert "test_watchdog.py" in said


def test_a_slow_rank_is_waited_for() -> None:
    norms = run_ranks(one_rank_is_slow, 2)
    assert norms[0] == norms[1] > 0


@on_ranks(2)
def test_over_nccl_a_mesh_has_a_watchdog_too() -> None:
    with patch.object(mesh_module, "backend_for", lambda device, group=None: "nccl"):
        mesh = Mesh({"data": 2}, torch.device("cpu"))
        assert mesh._watchdog is not None
        assert mesh.waited is None, "its waits are the device's"
        with patch.object(watchdog.Watchdog, "queued") as queued:
            Pending("all_gather", watchdog=mesh._watchdog, device=mesh.device).wait()
    queued.assert_called_once_with("all_gather", mesh.device, ())
    assert mesh._watchdog.waited == 0.0
