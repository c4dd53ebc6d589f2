"""Which resource bounds a run: the arithmetic, and what runs that wait for one of them say."""

import time
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from test_tiers import start, update
from zeromesh.engine.observe.breakdown import Breakdown
from zeromesh.engine.observe.resource_bounds import (
    ADVICE,
    COMPUTE,
    DISK,
    HOST,
    INPUT,
    LINK,
    NETWORK,
    PROGRAM,
    Amount,
    bounds,
)
from zeromesh.shard.store import swap_file

BREAKDOWN = Breakdown(
    updates=4,
    total=2.0,
    phases={"data": 0.1, "forward": 0.5, "backward": 0.8, "step": 0.55, "other": 0.05},
    inside={
        "forward": {"wait_fetch": 0.1, "fetch": 0.05},
        "backward": {"wait_reduce": 0.2, "offload": 0.1, "accumulate": 0.1},
        "step": {"update_on_host": 0.4, "wait_disk": 0.1, "norm": 0.02},
    },
)


def test_every_second_goes_to_one_resource() -> None:
    found = bounds(BREAKDOWN, {})
    seconds = {resource: use["seconds"] for resource, use in found["uses"].items()}
    expected = {COMPUTE: 0.95, HOST: 0.4, NETWORK: 0.3, INPUT: 0.1, LINK: 0.1, DISK: 0.1, PROGRAM: 0.05}
    assert seconds == pytest.approx(expected)
    assert sum(use["share"] for use in found["uses"].values()) == pytest.approx(1.0)
    assert [*seconds.values()] == sorted(seconds.values(), reverse=True)
    assert found["bound"] == COMPUTE
    assert set(ADVICE) == set(expected)


def test_rates_are_of_the_time_at_work_and_compared_with_the_limit() -> None:
    found = bounds(
        BREAKDOWN, {HOST: Amount(8e9, limit=25e9), DISK: Amount(1e9, limit=2e9, busy=1.0), COMPUTE: Amount(5e12)}
    )
    uses = found["uses"]
    assert (uses[HOST]["rate"], uses[HOST]["of_limit"]) == pytest.approx((20e9, 0.8))
    assert (uses[DISK]["rate"], uses[DISK]["of_limit"]) == pytest.approx((1e9, 0.5))
    assert uses[COMPUTE]["rate"] == pytest.approx(5e12 / 0.95)
    assert uses[COMPUTE]["of_limit"] is None
    assert uses[NETWORK]["amount"] is None


def test_transfers_that_took_no_time_are_reported() -> None:
    alone = Breakdown(1, 1.0, {"forward": 1.0}, {})
    assert [*bounds(alone, {DISK: Amount(5.0, 10.0, 2.0), LINK: Amount(0.0)})["uses"]] == [COMPUTE, DISK]


def test_breakdowns_are_put_together_by_their_updates() -> None:
    other = Breakdown(12, 1.0, {"forward": 0.4, "checkpoint": 0.6}, {"forward": {"wait_disk": 0.4}})
    found = BREAKDOWN + other
    assert found.updates == 16
    assert found.total == pytest.approx(1.25)
    assert found.phases["forward"] == pytest.approx((0.5 * 4 + 0.4 * 12) / 16)
    assert found.phases["checkpoint"] == pytest.approx(0.45)
    assert found.inside["forward"] == pytest.approx({"wait_fetch": 0.025, "fetch": 0.0125, "wait_disk": 0.3})


def reported(zero: dict[str, Any], slow: float = 0.0, every: bool = True) -> Any:
    read = swap_file.SwapFile.read

    def slowly(self: Any, *args: Any) -> None:
        time.sleep(slow)
        read(self, *args)

    swap_file.SwapFile.read = slowly  # type: ignore[method-assign, assignment]
    try:
        engine = start(zero, wall_clock_breakdown=every, steps_per_print=4 if every else None)
        before = engine.bound_report()
        for number in range(6):
            update(engine, number)
        sent = engine.traffic_report()
        found = engine.bound_report(operations=1e9)
        assert engine.traffic_report() == sent  # what was measured does not count
        engine.destroy()
    finally:
        swap_file.SwapFile.read = read  # type: ignore[method-assign]
    return before, found


@pytest.mark.full
def test_a_disk_that_is_slow_bounds_the_run(tmp_path: Path) -> None:
    nvme = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 1}}
    before, found = reported(nvme, slow=0.2)
    assert before is None
    assert found["bound"] == DISK
    assert found["updates"] == 6
    use = found["uses"][DISK]
    states = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert states == 0  # they went with the engine
    assert use["of_limit"] == pytest.approx(use["rate"] / use["limit"])


def test_transfers_are_those_of_the_formulas() -> None:
    for _, found in run_ranks(reported, 2, {"stage": 3, "offload_optimizer": {"device": "cpu"}}):
        uses = found["uses"]
        elements = sum(p.numel() for p in start({"stage": 0}).module.parameters()) / 2
        assert uses[HOST]["amount"] == pytest.approx((4 + 24 + 2) * elements, rel=0.01)  # the sum is in fp32
        assert uses[LINK]["amount"] == pytest.approx(4 * elements, rel=0.01)
        assert uses[NETWORK]["amount"] > 0
        assert uses[NETWORK]["limit"] > 0
        assert all(use["seconds"] >= 0 for use in uses.values())


def test_bounds_are_measured_only_on_request() -> None:
    assert reported({"stage": 1}, every=False)[1] is None
