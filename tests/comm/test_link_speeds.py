"""Latency and bandwidth of a link by the times of its messages, and why they are unknown."""

from collections.abc import Callable
from itertools import count

import pytest

from zeromesh.comm.link_speeds import PAIR_SIZES, Timing, fit_link, time_sizes

Run = Callable[[int, int], list[float]]


def link(latency: float, bandwidth: float, disturbed: Callable[[int], float] = lambda number: 1.0) -> Run:
    """Return a link whose messages take what the formula says, times a factor by their number."""
    numbers = count()
    return lambda size, repeats: [(latency + size / bandwidth) * disturbed(next(numbers)) for _ in range(repeats)]


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(10e-3, 12.5e6), (1e-3, 125e6), (50e-6, 1e9), (5e-6, 25e9), (100e-3, 1.25e6)]
)
def test_latency_and_bandwidth_are_those_of_the_link(latency: float, bandwidth: float) -> None:
    timings = time_sizes(PAIR_SIZES, link(latency, bandwidth), 10.0)
    fit = fit_link(timings)
    assert (fit.latency, fit.bandwidth) == (pytest.approx(latency, rel=0.02), pytest.approx(bandwidth, rel=0.02))
    assert fit.unknown == ""
    assert timings[-1].nbytes >= 100 * timings[0].nbytes


def test_disturbed_messages_are_repeated_and_do_not_change_the_fit() -> None:
    # Nine of ten messages take far longer, and the first of each size as well.
    timings = time_sizes(
        PAIR_SIZES, link(1e-3, 125e6, lambda number: 1.0 if number % 10 == 7 else 4 + number % 10), 60.0
    )
    fit = fit_link(timings)
    assert (fit.latency, fit.bandwidth) == (pytest.approx(1e-3, rel=0.05), pytest.approx(125e6, rel=0.05))


@pytest.mark.parametrize(
    ("run", "seconds", "words"),
    [
        (link(10e-3, 12.5e6), 0.0, "before its turn"),
        (link(10e-3, 12.5e6), 0.1, "the time was up after messages of 1.02 kB, which show the latency alone"),
        (link(10e-3, 1e12), 10.0, "messages of 8.39 MB take hardly longer than those of 1.02 kB"),
    ],
)
def test_what_the_times_do_not_show_is_unknown(run: Run, seconds: float, words: str) -> None:
    fit = fit_link(time_sizes(PAIR_SIZES, run, seconds))
    assert fit.bandwidth is None
    assert words in fit.unknown
    assert (fit.latency is None) == (seconds == 0)


def test_times_that_are_no_line_are_unknown() -> None:
    # As of a machine whose cores are busy: from some size on, a message waits for its turn.
    timings = [Timing(1 << 10, 2e-4, 0.0), Timing(1 << 14, 2.2e-4, 0.0), Timing(1 << 17, 42e-3, 0.0)]
    assert "more than 2 times longer or shorter" in fit_link(timings).unknown
    assert "differ by 80%" in fit_link([timings[0], Timing(1 << 20, 4e-3, 0.8)]).unknown


def test_no_time_is_spent_on_messages_that_would_take_too_long() -> None:
    sizes: list[int] = []
    slow = link(10e-3, 1e5)

    def run(size: int, repeats: int) -> list[float]:
        sizes.extend([size] * repeats)
        return slow(size, repeats)

    time_sizes(PAIR_SIZES, run, 5.0)
    assert sum(10e-3 + size / 1e5 for size in sizes) < 5.0
