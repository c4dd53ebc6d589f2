"""Charts of experts on the page of a run."""

from __future__ import annotations

from typing import Any

from zeromesh.apps.train.metrics import form_of
from zeromesh.apps.train.run_picture import expert_charts
from zeromesh.base.chart_page import charts_html
from zeromesh.base.drawing import Grid


def record(step: int, loads: dict[str, list[int]], dropped: float = 0.0) -> dict[str, Any]:
    each = dict.fromkeys(loads, dropped)
    return {"kind": "experts", "step": step, "load": loads, "entropy": dict.fromkeys(loads, 1.0), "dropped": each}


def test_charts_show_load_by_layer_and_expert_over_time() -> None:
    names = [f"model.layers.{number}.mlp.experts" for number in (1, 2, 10)]
    loads = [[100, 100], [0, 200], [50, 150]]
    records = [record(step, dict(zip(names, loads, strict=True))) for step in (1, 5, 9)]
    for each in records:
        form_of(each).validate_python(each, strict=True)
    fullest, last, *uneven = expert_charts(records)
    assert isinstance(fullest, Grid)
    assert isinstance(last, Grid)
    assert list(fullest.rows) == ["layer 1", "layer 2", "layer 10"]
    assert fullest.columns == ["step 1", "step 5", "step 9"]
    assert [last.cells[1, expert].tone for expert in range(2)] == [0.0, 1.0]
    assert [chart.title.split(",")[0] for chart in uneven] == [
        "load of each expert of layer 2",
        "load of each expert of layer 10",
    ]
    assert "layer 2, expert 1: 2.00 times the mean" in charts_html([last])


def test_charts_show_drops_and_leave_out_other_models() -> None:
    old, new = record(1, {"a.experts": [100, 100]}), record(2, {"b.experts": [100, 300, 0]}, dropped=0.25)
    *grids, drops = expert_charts([old, new])
    assert all(getattr(grid, "columns", [])[0] in ("step 2", "expert 0") for grid in grids)
    assert drops.curves[""] == [(2, 25.0)]
    assert list(expert_charts([])) == []
