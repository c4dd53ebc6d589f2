"""Reasons: what limits a plan, what would change it, and what helps where nothing fits."""

import re
from html.parser import HTMLParser

import pytest

from planning import GB, Plain, machine, memory, time
from zeromesh.plan.answer import PlanAnswer, answer, changed, largest_of, sentences
from zeromesh.plan.cost import CostSource
from zeromesh.plan.judge import judge
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Machine
from zeromesh.plan.page import page
from zeromesh.plan.search import search
from zeromesh.plan.space import PlanRequest


def told(source: CostSource, on: Machine, batch: int = 4) -> PlanAnswer:
    return answer(search(PlanRequest(source, on, batch, 2048), memory, time), memory, time)


def test_the_largest_sizes_are_those_worked_out_by_hand() -> None:
    # States of a block are 18 bytes times 10^8 elements, and it keeps 10^4 bytes of each of 2,048 tokens.
    request = PlanRequest(Plain(4), machine(1, 1, memory=20 * GB), 4, 2048)
    found = largest_of(request, ParallelLayout(), request.machine, memory)
    room = 20 * GB * 0.97
    states, kept = 18 * 1e8, 1e4 * 2048
    assert found.blocks == int(room / (states + kept))
    assert found.parameters == found.blocks * 1e8
    # Large numbers are found within a thirty-second part.
    assert found.micro_batch <= (room - 4 * states) / (4 * kept) <= found.micro_batch * 33 / 32 + 1


def test_memory_is_the_limit_where_more_of_it_saves_time() -> None:
    texts = " ".join(sentences(told(Plain(4), machine(1, 1, memory=6 * GB))))
    assert "optimizer on host" in texts
    assert "The limit is memory." in texts
    assert re.search(r"Twice the memory of devices would save \d+% of the time", texts)


def test_a_runner_up_wins_with_the_links_that_it_uses() -> None:
    texts = " ".join(sentences(told(Plain(4), machine(2, 1, between=1 * GB))))
    assert "Runner-up: " in texts
    assert re.search(r"It would win with links between nodes [\d.]+ times (faster|slower)|No link that is up to", texts)


def test_remedies_are_checked_and_the_cheapest_comes_first() -> None:
    found = told(Plain(4), machine(1, 1, memory=2 * GB, host=3 * GB))
    assert found.result.best is None
    assert found.lacks is not None
    efforts = [remedy.effort for remedy in found.remedies]
    assert len(efforts) >= 2
    assert efforts == sorted(efforts)
    # Masters and states of 4 x 10^8 elements take 4.8 GB, so twice the host's 3 GB are not enough beside gradients.
    text = next(remedy.text for remedy in found.remedies if remedy.kind == "host")
    assert text == "12.0 GB each are enough, 4 times as much"
    assert sentences(found)[0].startswith("Nothing fits: of ")


def test_a_machine_changes_in_one_thing() -> None:
    on = machine(2, 4)
    assert changed(on, "nodes", 2).devices == 16
    assert changed(on, "memory", 2).nodes[0][0].device.memory == 160 * GB
    assert changed(on, "between", 3).between.bandwidth == 150 * GB
    assert changed(on, "inside", 0.5).nodes[0][0].inside.bandwidth == 150 * GB


def test_a_layout_of_the_user_is_judged() -> None:
    request = PlanRequest(Plain(4), machine(1, 4, memory=6 * GB), 4, 2048)
    found = judge(request, ParallelLayout(4), memory, time)
    assert not found.fits
    # 18 bytes for 4 x 10^8 elements, and what a block keeps, beyond 97 % of 6 GB.
    assert found.over["device"] == pytest.approx(18 * 4e8 + 4 * 1e4 * 2048 - 0.97 * 6 * GB)
    assert found.sentences[0].startswith("It does not fit: it lacks 1.46 GB of the device's memory.")
    assert found.better


class Tags(HTMLParser):
    """All tags, and the open ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect", "line", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "line", "polygon"):
            return
        assert self.open.pop() == tag


@pytest.mark.parametrize("size", [80 * GB, 0.1 * GB])
def test_the_page_is_whole_and_loads_nothing(size: float) -> None:
    text = page(told(Plain(4), machine(1, 2, memory=size, host=size)))
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.links
    assert "script" not in tags.seen
    assert tags.seen.count("svg") == (3 if size > GB else 1)
    assert "nan" not in text.lower().replace("nano", "")
