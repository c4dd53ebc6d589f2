"""The negotiation alone: when an operation starts, in which order, and with which errors."""

from typing import Any

from zeromesh.horovod.negotiation import Negotiator


def request(name: str, kind: str = "allreduce", number: int = 0, **fields: Any) -> dict[str, Any]:
    row = {"dtypes": ["float32"], "shapes": [[2]], "devices": ["cpu"], "op": 1, "root_rank": 0}
    return row | {
        "prescale_factor": 1.0, "postscale_factor": 1.0, "splits": None, "ranks": [], "problem": "", "removed": 0,
        "kind": kind, "name": name, "set": number,
    } | fields  # fmt: skip


def keys(decisions: list[Any]) -> list[tuple[list[int], str, bool]]:
    return [(ranks, decision["key"], bool(decision["error"])) for ranks, decision in decisions]


def test_an_operation_starts_with_its_last_request_in_the_order_of_completion() -> None:
    found = Negotiator(2)
    assert found.submit(0, request("a")) == []
    assert found.submit(0, request("b")) == []
    assert keys(found.submit(1, request("b"))) == [([0, 1], "0/allreduce.b", False)]
    assert keys(found.submit(1, request("a"))) == [([0, 1], "0/allreduce.a", False)]


def test_a_join_releases_what_others_wait_for() -> None:
    found = Negotiator(3)
    found.submit(0, request("a"))
    found.submit(1, request("a"))
    found.submit(0, request("b"))
    assert keys(found.submit(2, request("j", "join"))) == [([0, 1, 2], "0/allreduce.a", False)]
    assert found.submit(0, request("c")) == []  # rank 1 is still to come
    assert len(found.submit(1, request("b")) + found.submit(1, request("c"))) == 2
    found.submit(0, request("j", "join"))
    (ranks, last), *more = found.submit(1, request("j", "join"))
    assert (ranks, last["last"], more) == ([0, 1, 2], 1, [])
    assert found.submit(0, request("d")) == []  # all take part again


def test_a_rank_that_leaves_fails_what_needs_it_now_and_later() -> None:
    found = Negotiator(2)
    found.submit(0, request("a"))
    assert keys(found.leave(1)) == [([0], "0/allreduce.a", True)]
    assert keys(found.submit(0, request("b"))) == [([0], "0/allreduce.b", True)]
    assert found.present == [0]


def test_a_deadlock_needs_every_rank_to_wait_for_something_undecided() -> None:
    found = Negotiator(2)
    found.submit(0, request("a"))
    assert found.wait(0, "0/allreduce.a", 2.0) == []
    found.submit(1, request("a"))
    found.submit(1, request("b"))
    # Rank 0 no longer waits, since its operation has started.
    assert found.wait(1, "0/allreduce.b", 2.0) == []
    found.submit(0, request("c"))
    assert keys(found.wait(0, "0/allreduce.c", 2.0)) == [
        ([1], "0/allreduce.b", True),
        ([0], "0/allreduce.c", True),
    ]


def test_a_long_wait_is_a_warning_that_names_the_missing_ranks() -> None:
    said: list[str] = []
    found = Negotiator(3, said.append)
    found.submit(0, request("a"))
    found.wait(0, "0/allreduce.a", 59.0)
    assert said == []
    found.wait(0, "0/allreduce.a", 61.0)
    assert said == ["rank 0 has waited 61 s for allreduce.a, which ranks 1-2 did not call"]


def test_a_wait_beyond_the_limit_fails_the_operation_and_a_warning_comes_once() -> None:
    said: list[str] = []
    found = Negotiator(2, said.append, patience=5.0, limit=9.0)
    found.submit(0, request("a"))
    assert found.wait(0, "0/allreduce.a", 6.0) == found.wait(0, "0/allreduce.a", 8.0) == []
    assert len(said) == 1
    ((ranks, failed),) = found.wait(0, "0/allreduce.a", 9.5)
    assert ranks == [0]
    assert failed["error"] == (
        "allreduce.a: rank 0 has waited 10 s for allreduce.a, which rank 1 did not call; "
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is 9"
    )


def test_a_set_that_is_removed_fails_what_is_pending_in_it() -> None:
    found = Negotiator(2)
    for rank in range(2):
        found.submit(rank, request("s", "add_process_set", ranks=[1]))
    assert found.sets == {0: [0, 1], 1: [1]}
    found.submit(0, request("r", "remove_process_set", removed=1))
    assert keys(found.submit(1, request("r", "remove_process_set", removed=1))) == [
        ([0, 1], "0/remove_process_set.r", False)
    ]
    assert keys(found.submit(1, request("x", number=1))) == [([1], "1/allreduce.x", True)]
