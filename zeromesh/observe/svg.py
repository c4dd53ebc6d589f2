"""Parts of HTML pages with pictures in SVG; a page loads nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 960
LEFT, RIGHT = 70, 150  # margins of a chart, for its axis and its legend
# Colours that differ in lightness, too, for readers who do not see all hues (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#f0e442", "#555555")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { max-width: 100%; height: auto; } text { font: 12px system-ui, sans-serif; fill: #222; }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return a page of HTML parts."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def svg(height: float, body: Iterable[str]) -> str:
    """Return a picture of ``WIDTH`` by ``height``."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">'
        + "".join(body)
        + "</svg>"
    )


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Return a line of text at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: float, y: float, wide: float, high: float, colour: str, title: str) -> str:
    """Return a filled rectangle, which says its title under the pointer."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.5, wide):.1f}" height="{high:.1f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def legend(names: Sequence[str], top: float, colours: Sequence[str] = COLOURS) -> list[str]:
    """Return the names of colours, one below the other at the right."""
    parts = []
    for place, name in enumerate(names):
        y, colour = top + 18 * place, colours[place % len(colours)]
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y:g}" width="12" height="12" fill="{colour}"/>')
        parts.append(label(WIDTH - RIGHT + 30, y + 11, name))
    return parts
