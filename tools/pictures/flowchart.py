"""Draw the part of Mermaid's flowcharts that the documentation uses: boxes, arrows, groups, from top to bottom."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise

from pictures.canvas import WIDTH, Canvas, wrapped

GAP, LEFT = 18, 8


def _parse(text: str) -> list[tuple[str, dict[str, str], list[tuple[str, str, bool]]]]:
    """Return each group's title, its labels by node, and its arrows with whether they are dashed."""
    groups: list[tuple[str, dict[str, str], list[tuple[str, str, bool]]]] = [("", {}, [])]
    inside = False
    for line in map(str.strip, text.splitlines()):
        if head := re.match(r"subgraph \w+ \[(.+)\]", line):
            groups.append((head[1], {}, []))
            inside = True
        elif line == "end":
            inside = False
        elif inside or len(groups) == 1:  # arrows between groups are their order
            _, labels, arrows = groups[-1]
            labels |= dict(re.findall(r'(\w+)\["(.+?)"\]', line))
            names = re.findall(r'(\w+)(?:\[".+?"\])?(?: (-->|-\.->) |$)', line)
            for (name, kind), (following, _) in pairwise(names):
                arrows.append((name, following, kind == "-.->"))
    return [group for group in groups if group[1]]


def _rows(labels: dict[str, str], arrows: list[tuple[str, str, bool]]) -> list[list[str]]:
    """Return the nodes by the longest way that leads to them."""
    depth: dict[str, int] = dict.fromkeys(labels, 0)
    for _ in labels:
        for start, end, _dashed in arrows:
            depth[end] = max(depth[end], depth[start] + 1)
    rows = defaultdict(list)
    for name in labels:
        rows[depth[name]].append(name)
    return [rows[number] for number in sorted(rows)]


def figure(text: str) -> str:
    """Return a flowchart as HTML whose lines have the colour of the page's text."""
    canvas = Canvas(0, paper=False)
    y = 4.0
    for title, labels, arrows in _parse(text):
        if title:
            y += 12
            canvas.text(LEFT, y, title, 12)
            y += 8
        places: dict[str, tuple[float, float, float]] = {}
        for row in _rows(labels, arrows):
            width = (WIDTH - LEFT * (len(row) + 1)) / len(row)
            height = max(12 + 13 * len(wrapped(labels[name], width)) for name in row)
            for number, name in enumerate(row):
                x = LEFT + number * (width + LEFT)
                canvas.box(x, y, width, height, "none", labels[name])
                places[name] = (x + width / 2, y, y + height)
            y += height + GAP
        for start, end, dashed in arrows:
            (x1, _, bottom), (x2, top, _) = places[start], places[end]
            canvas.arrow(x1, bottom, x2, top, dashed)
    canvas.height = y
    return f"<div>{canvas.svg('flowchart')}</div>"
