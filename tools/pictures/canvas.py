"""A sheet of boxes, arrows and text that becomes an SVG, narrow enough for a phone."""

from __future__ import annotations

import textwrap
from xml.sax.saxutils import escape

WIDTH = 380
"""Units across. A phone shows the sheet at about this many pixels, so text of 11 units stays readable."""

BLUE, ORANGE, GREEN, VIOLET, GREY = "#7fb2e5", "#f2a65a", "#8fc98b", "#c9b6e4", "#ececec"


class Canvas:
    """Shapes on a white sheet of ``WIDTH`` units; y grows downwards."""

    def __init__(self, height: float, paper: bool = True) -> None:
        self.height = height
        self._paper = paper
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", size: int = 11) -> None:
        """Draw a box with centred text, on as many lines as its width asks for."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" stroke="{self.ink}"'
            ' stroke-width="0.6"/>'
        )
        lines = wrapped(text, width, size)
        top = y + height / 2 - (len(lines) - 1) * (size + 2) / 2 + size * 0.36
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + number * (size + 2), line, size, "middle")

    def text(self, x: float, y: float, text: str, size: int = 11, anchor: str = "start") -> None:
        """Write one line whose base is at y."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{self.ink}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """Draw a line with a head at its end."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{self.ink}"{dash} marker-end="url(#head)"/>'
        )

    @property
    def ink(self) -> str:
        """Colour of lines and text: that of the page around, if there is no paper."""
        return "#222" if self._paper else "currentColor"

    def svg(self, title: str) -> str:
        """Return the sheet, wider than its units so that a desktop shows larger text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" width="{1.4 * WIDTH:g}"'
            ' font-family="system-ui, sans-serif" role="img" style="max-width:100%;height:auto">'
        )
        paper = [f'<rect width="{WIDTH}" height="{self.height:g}" fill="#fff"/>'] if self._paper else []
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{self.ink}"/></marker></defs>'
        )
        return "\n".join([head, f"<title>{escape(title)}</title>", marker, *paper, *self._parts, "</svg>"]) + "\n"


def wrapped(text: str, width: float, size: int = 11) -> list[str]:
    """Return the lines of a text that fit a width, from the mean width of a letter."""
    return textwrap.wrap(text, max(4, int(width / (0.55 * size)) - 1)) or [""]
