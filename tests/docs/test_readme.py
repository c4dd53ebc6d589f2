"""Runs the fenced blocks of the documentation.

Of one page, the ``sh`` blocks run in one shell and the ``python`` blocks after them in one process, in the order of the
page and in one empty folder beside the project's examples. ``<!-- not run: reason -->`` on the line before a block
leaves it out; a comment ``<!-- before:`` runs its lines unseen by the reader, in the language of the next block (Python
if there is none).
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness import FOLDERS, run_command
from pages import Block, blocks_of, program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = {"sh": ["bash", "-eu"], "python": [sys.executable]}
ALONE = pytest.param(PAGES[0], ("python",), id="README.md, without its commands")
RUN = [ALONE, *(pytest.param(p, tuple(COMMANDS), id=str(p.relative_to(ROOT)), marks=pytest.mark.full) for p in PAGES)]
"""Pages and languages, in this order; by default the README alone, whose commands other tests call in process."""
LANGUAGES = {"sh", "python", "json", "text", "mermaid"}


def run_page(page: Path, folder: Path, languages: Iterable[str] = COMMANDS) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    for language in languages:
        if text := program(blocks, language):
            file = folder / f"{page.stem}.{language}"
            file.write_text(text)
            variables = {
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *FOLDERS]),
            }
            finished = run_command([*COMMANDS[language], file], timeout=300, cwd=folder, **variables)
            assert finished.returncode == 0, f"the {language} blocks of {page}:\n{finished.stdout}"
            assert "samples at a time" not in finished.stdout, f"{page} feeds another batch than it configures"


@pytest.mark.parametrize(("page", "languages"), RUN)
def test_the_blocks_of_a_page_run(page: Path, languages: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run_page(page, tmp_path, languages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_its_language(page: Path) -> None:
    unknown = [block for block in blocks_of(page.read_text(encoding="utf-8")) if block.language not in LANGUAGES]
    assert not unknown, f"use one of {sorted(LANGUAGES)}"


SAMPLE = """
<!-- before:
x = 1
-->
Text.

```python
print(x + 1)
```

<!-- not run: a reason -->
```python
raise ValueError
```

```sh
echo good
```
"""


def test_blocks_are_found_with_their_lines_and_reasons() -> None:
    assert blocks_of(SAMPLE) == [
        Block(3, "python", "x = 1\n"),
        Block(8, "python", "print(x + 1)\n"),
        Block(13, "python", "raise ValueError\n", "a reason"),
        Block(17, "sh", "echo good\n"),
    ]


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ("print(x + 1)", "print(y)", r'page.python", line 8'),
        ("echo good", "no-such-command", "line 17: no-such-command"),
        ("<!-- not run: a reason -->", "", "ValueError"),
    ],
)
def test_a_block_that_fails_is_reported_with_its_line(tmp_path: Path, good: str, bad: str, error: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(SAMPLE)
    run_page(page, tmp_path)
    page.write_text(SAMPLE.replace(good, bad))
    with pytest.raises(AssertionError, match=error):
        run_page(page, tmp_path)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}, which is not there"
