"""Hooks of the manual (mkdocs.yml): pages from outside docs/, the API reference, lists of pages, and drawings.

The Markdown in docs/ is written for a reader on a forge. What a site needs beside it is made here while it is built.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from pictures import flowchart  # noqa: E402

log = logging.getLogger("mkdocs.hooks.manual")

PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root, and their names in the site."""

API = {
    "zeromesh": ("the package's functions, and what they return", ""),
    "zeromesh.engine.engine": ("the engine that `initialize` returns", ""),
    "zeromesh.engine.saving": ("checkpoints and state dicts: methods of `engine.saves`, and of the engine", ""),
    "zeromesh.engine.engine_reports": ("reports on a run: methods of `engine.reports`, and of the engine", ""),
    "zeromesh.zero": (
        "names of `deepspeed.zero`",
        "Init GatheredParameters safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state"
        " safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_update_full_grad_vectorized"
        " clip_grad_norm_ TiledLinear tile_linears join_tiles estimate_zero2_model_states_mem_needs"
        " estimate_zero3_model_states_mem_needs",
    ),
    "zeromesh.pipe": ("names of `deepspeed.pipe`", "LayerSpec TiedLayerSpec PipelineModule"),
    "zeromesh.checkpointing": ("names of `deepspeed.checkpointing`", ""),
    "zeromesh.engine.batches": ("batches that compute their own loss", "WithLoss"),
    "zeromesh.hf": ("Trainer, its mixin, and the plugin for Accelerate", ""),
    "zeromesh.hf.lightning": ("the strategy for Lightning", "Strategy"),
}
"""Module -> text and, where users need only some, members. Modules are read and never imported."""

FENCE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
IMAGE = re.compile(r'<img src="(?P<path>[^"]+)" alt="(?P<alt>[^"]*)"[^>]*>')
MERMAID = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LOADED = re.compile(r'<(?:script|img|iframe|link rel="(?:stylesheet|preload|preconnect)")[^>]*(?:src|href)="https?://')


def _title(path: Path) -> str:
    return next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))[2:]


def _generated() -> dict[str, str]:
    """Return the pages that exist in the site alone, by name."""
    made = {name: (ROOT / source).read_text(encoding="utf-8") for source, name in PAGES.items()}
    rows = [f"| [`{module}`]({module}.md) | {text} |" for module, (text, _) in API.items()]
    head = "# API reference\n\nThese pages are made from the docstrings.\n\n| module | content |\n|---|---|\n"
    end = "\n`zeromesh.deepspeed` has the names of DeepSpeed; see [DeepSpeed scripts](../deepspeed.md).\n"
    made["api/index.md"] = head + "\n".join(rows) + "\n" + end
    for module, (_, members) in API.items():
        chosen = [f"members: {members.split()}"] if members else []
        chosen += ['filters: ["!^_", "!^Engine$"]'] if module == "zeromesh" else []  # the engine has a page
        options = f"    options: {{{', '.join(chosen)}}}\n" if chosen else ""
        made[f"api/{module}.md"] = f"# {module}\n\n::: {module}\n{options}"
    decisions = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    made["adr/index.md"] = "# Decisions\n\n" + "".join(f"- [{_title(file)}]({file.name})\n" for file in decisions)
    return made


def on_config(config: Any) -> Any:
    """Replace each pattern of the navigation by the pages that match it, the index first."""
    names = [*_generated(), *(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))]
    names += [str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("README.md")]

    def expand(entry: Any) -> Any:
        if isinstance(entry, list):
            expanded = [(one, expand(one)) for one in entry]
            return [
                item for one, made in expanded for item in (made if isinstance(one, str) and "*" in one else [made])
            ]
        if isinstance(entry, dict):
            return {title: expand(value) for title, value in entry.items()}
        if "*" not in entry:
            return entry
        found = [name for name in names if fnmatchcase(name, entry) and name.count("/") == entry.count("/")]
        return sorted(found, key=lambda name: (not name.endswith(("index.md", "README.md")), name.removesuffix(".md")))

    config.nav = expand(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is outside docs/: pages, examples, and the pages that are generated."""
    for name, text in _generated().items():
        files.append(File.generated(config, name, content=text))
    for file in sorted((ROOT / "examples").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            files.append(File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file)))
    files.append(File.generated(config, "LICENSE.txt", abs_src_path=str(ROOT / "LICENSE")))
    return files


def _source(path: str, page: str) -> str:
    """Return where in the repository a link of a page leads."""
    inside = page if page.startswith("examples/") else f"docs/{page}"
    source = next((source for source, name in PAGES.items() if name == page), inside)
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _target(found: str, page: str) -> str:
    """Return a link of a page as the site has it, from the place in the repository."""
    inside = PAGES.get(found) or {"LICENSE": "LICENSE.txt"}.get(found) or found.removeprefix("docs/")
    if (ROOT / found).is_dir():
        inside += "/README.md" if (ROOT / found / "README.md").exists() else "/index.md"
    return posixpath.relpath(inside, posixpath.dirname(page) or ".")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links lead to pages of the site, and draw the flowcharts, which a forge draws by itself."""
    name = page.file.src_uri
    if name.startswith("api/") or name == "adr/index.md":
        return markdown

    def link(match: re.Match[str]) -> str:
        found, text = _source(match["path"], name), match["text"]
        if text == match["path"] and text.endswith(".md") and (ROOT / found).exists():
            text = _title(ROOT / found).partition(":")[0]  # a forge shows files, a site shows titles
        return f"[{text}]({_target(found, name)}{match['anchor'] or ''})"

    markdown = IMAGE.sub(lambda match: f"![{match['alt']}]({match['path']})", markdown)
    markdown = MERMAID.sub(lambda match: flowchart.figure(match["text"]), markdown)
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, markdown[end:])])


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn, which ends a strict build, if a page loads anything from the network."""
    for found in LOADED.findall(output):
        log.warning("%s loads from the network: %s", page.file.src_uri, found)
    return output
