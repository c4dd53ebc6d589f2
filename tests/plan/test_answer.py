"""Reasons: what limits a plan, what would change it, and what helps where nothing fits."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from planning import GB, Plain, machine, memory, time
from zeromesh.apps.plan.choose import plan_picture
from zeromesh.apps.plan.choose.answer import (
    DeeperModel,
    PlanAnswer,
    answer,
    changed,
    largest_of,
    rounding_factor,
    sentences,
)
from zeromesh.apps.plan.choose.fit import MEMORY_MARGIN, lacking
from zeromesh.apps.plan.choose.judge import judge
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.search import search
from zeromesh.apps.plan.choose.space import PlanRequest
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.models import shape_named
from zeromesh.apps.plan.cost.shape import TransformerCost
from zeromesh.apps.plan.machine.calibration import reserved_margin
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.base.drawing import draw_chart


def told(source: CostSource, on: Machine, batch: int = 4) -> PlanAnswer:
    return answer(search(PlanRequest(source, on, batch, 2048, memory=memory, time=time)))


def test_the_largest_sizes_are_those_worked_out_by_hand() -> None:
    # States of a block are 18 bytes times 10^8 elements, and it keeps 10^4 bytes of each of 2,048 tokens.
    request = PlanRequest(Plain(4), machine(1, 1, memory=20 * GB), 4, 2048, memory=memory)
    found = largest_of(request, ParallelLayout(), request.machine)
    room = 20 * GB * 0.97
    states, kept = 18 * 1e8, 1e4 * 2048
    assert found.blocks == int(room / (states + kept))
    assert found.parameters == found.blocks * 1e8
    # Large numbers are found within a thirty-second part.
    assert found.micro_batch <= (room - 4 * states) / (4 * kept) <= found.micro_batch * 33 / 32 + 1


def test_the_largest_model_and_batch_leave_room_for_activations() -> None:
    shape = shape_named("gpt2")
    assert shape is not None
    on, layout = cluster("l4", 1), ParallelLayout(micro_batch=4)
    request = PlanRequest(TransformerCost(shape), on, 4, 1024)
    found = largest_of(request, layout, on)

    def lacks(blocks: int, micro_batch: int = 4) -> float:
        one = replace(layout, micro_batch=micro_batch)
        return max(lacking(memory_of(DeeperModel(request.source, blocks), 1024, one, on), one, on).values())

    # Found within a thirty-second part.
    assert lacks(found.blocks) <= 0 < lacks(found.blocks * 33 // 32 + 1)
    assert lacks(shape.layers, found.micro_batch) <= 0 < lacks(shape.layers, found.micro_batch * 33 // 32 + 1)
    # An eighth of the tokens leaves room for more blocks.
    assert largest_of(replace(request, sequence=128), layout, on).blocks > 1.5 * found.blocks


@pytest.mark.parametrize(("between", "factor"), [(1 * GB, 2 / (260 / 256 + 64 * 0.8 / 3000)), (100 * GB, 1.0)])
def test_eight_bits_pay_on_slow_links_alone(between: float, factor: float) -> None:
    # A block of 256 elements has four more bytes for its scale. Rounding moves 64 bytes at 3,000 GB/s, while a link of
    # 1 GB/s sends 0.8.
    on = machine(2, 1, between=between)
    assert rounding_factor(ParallelLayout(2), on) == pytest.approx(factor, rel=1e-4)  # but for a kernel's launch
    assert rounding_factor(ParallelLayout(pipeline=2), on) == 1
    assert rounding_factor(ParallelLayout(2), machine(1, 2, between=between)) == 1


def test_the_answer_says_what_eight_bits_save() -> None:
    on = machine(2, 1, between=1 * GB)
    request = PlanRequest(Plain(4), on, 4, 2048, accepts=lambda one: one.data == 2, memory=memory, time=time)
    result = search(request)
    texts = " ".join(sentences(answer(result)))
    assert result.best is not None
    saved = result.best.time.waits["data links"] * (1 - 1 / rounding_factor(result.best.layout, on))
    said = re.search(r"8 bits between nodes \(communication.across_nodes_.*?would save (\d+)% of the time", texts)
    assert said is not None
    # The latency of a message is not divided.
    assert int(said[1]) == round(100 * saved / result.best.time.seconds)


def test_margins_are_those_of_the_report_card() -> None:
    card = (Path(__file__).parents[2] / "docs" / "plan-report-card.md").read_text()
    peaks = re.findall(r"\| memory_gib \| \d+ \| 0 \| \d+ \| ([\d.]+)% \| [\d.]+% \| \d", card)
    # To the nearest whole percent, of the source that is foreseen worst, of those that print all of a layout: which
    # have an aim.
    assert round(max(map(float, peaks))) / 100 == MEMORY_MARGIN
    assert f"has room for {reserved_margin():.0%} more than is predicted" in card


def test_memory_is_the_limit_where_more_of_it_saves_time() -> None:
    texts = " ".join(sentences(told(Plain(4), machine(1, 1, memory=6 * GB))))
    assert "optimizer on host" in texts
    assert "The limit is memory." in texts
    assert "Runner-up: " in texts
    assert re.search(r"Twice the memory of devices would save \d+% of the time", texts)


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
    request = PlanRequest(Plain(4), machine(1, 4, memory=6 * GB), 4, 2048, memory=memory, time=time)
    found = judge(request, ParallelLayout(4))
    assert not found.fits
    # 18 bytes for 4 x 10^8 elements, and what a block keeps, beyond 97 % of 6 GB.
    assert found.over["device"] == pytest.approx(18 * 4e8 + 4 * 1e4 * 2048 - 0.97 * 6 * GB)
    assert found.sentences[0].startswith("It does not fit: it lacks 1.46 GB of the device's memory.")
    assert found.better


@pytest.mark.parametrize("size", [80 * GB, 0.1 * GB])
def test_the_page_and_the_picture_have_memory_the_step_and_the_layouts_or_why_none_fits(
    size: float, tmp_path: Path
) -> None:
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    plan = told(Plain(4), machine(1, 2, memory=size, host=size))
    charts = [*plan_picture.charts(plan.result)]
    assert [chart.title.split()[0] for chart in charts] == (["memory", "a", "time"] if size > GB else ["time"])
    for chart in charts:
        axes = figure_of().subplots()
        draw_chart(chart, axes)
        assert axes.collections or axes.texts
    plan_picture.write_picture(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<figure") == len(charts)
    assert "://" not in page
    assert sentences(plan)[0].split(";")[0] in unescape(page)
