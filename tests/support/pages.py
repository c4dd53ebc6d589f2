"""Fenced blocks of the documentation, as programs; without pytest, as a machine with a GPU may have none."""

import re
from dataclasses import dataclass

PART = re.compile(
    r"^<!-- not run: (?P<reason>.+?) -->\n\s*(?=```)"
    r"|^<!-- before:\n(?P<hidden>.*?)^-->"
    r"|^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUN = ("sh", "python")
"""Languages of the blocks that run."""


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    reason: str | None = None


def blocks_of(page: str) -> list[Block]:
    blocks: list[Block] = []
    reason = None
    hidden: list[re.Match[str]] = []

    def take_hidden(language: str) -> None:
        blocks.extend(Block(page.count("\n", 0, m.start("hidden")) + 1, language, m["hidden"]) for m in hidden)
        hidden.clear()

    for match in PART.finditer(page):
        if match["reason"]:
            reason = match["reason"]
            continue
        if match["hidden"] is not None:
            hidden.append(match)
            continue
        language = match["language"].strip()
        if language in RUN:
            take_hidden(language)
        line = page.count("\n", 0, match.start("text")) + 1
        blocks.append(Block(line, language, match["text"], reason))
        reason = None
    take_hidden("python")
    return blocks


def program(blocks: list[Block], language: str) -> str:
    """Return the blocks of one language as one text, on the lines that they have in the page."""
    lines: list[str] = []
    for block in blocks:
        if block.language == language and block.reason is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""
