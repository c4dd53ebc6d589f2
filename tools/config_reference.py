"""The reference pages and the JSON schema, written from the settings: ``python tools/config_reference.py``."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.words import show
from zeromesh.config.catalogue import Entry, Schema, children, section_of
from zeromesh.config.optimizer_names import EXACT_OPTIMIZERS
from zeromesh.config.section import DTYPE_NAMES
from zeromesh.config.settings import entries
from zeromesh.config.special_keys import EXACT, GONE, NOT_YET, OURS, RENAMED, UNREAD, UNSET, WITHOUT_EFFECT, sections_of

COMMAND = "python tools/config_reference.py"
TOP = "Batch sizes, clipping, seed, logging, and all sections by name."
DIFFERENCES_SHOWN = 20

PURPOSES = {
    "batch sizes, clipping, seed, logging": "top level",
    "the optimizer and the learning rate": "optimizer scheduler curriculum_learning",
    "the precision": "bf16 fp16 torch_autocast data_types float8 compile",
    "sharding and offload": "zero_optimization slots aio",
    "tensor, context, pipeline, expert parallelism, replicas": "mesh tensor_parallel context_parallel pipeline experts",
    "slow links between nodes": "communication",
    "recomputation": "activation_checkpointing",
    "large embedding tables": "embedding_tables",
    "metrics, traces, checks": "tensorboard wandb csv_monitor flops_profiler profile replica_check spikes debug",
    "checkpoints": "checkpoint",
    "`zeromesh train`": "model huggingface lora dpo data run",
}
"""Rows of the first table, a page each: a purpose, and the sections that serve it."""

FOLDER = "configuration"
NAMES = (
    *("general", "optimizer", "precision", "zero", "parallel", "communication", "recomputation", "tables"),
    *("monitoring", "checkpoints", "train"),
)
"""Names of these pages, in the order of ``PURPOSES``."""

REST, CONVERSION = "other", "conversion"
"""Pages of all other sections and names, and of files of DeepSpeed."""


def _place(section: str) -> tuple[str, str]:
    """Return the page of a section, and its anchor there; a forge's anchors have no dots."""
    first = section.partition(".")[0] or "top level"
    pages = (name for name, names in zip(NAMES, PURPOSES.values(), strict=True) if first in (names, *names.split()))
    return next(pages, REST), section.replace(".", "") or "top-level"


def _link(section: str, from_page: str = "") -> str:
    """Return a link to a section, from one of the pages or from the overview."""
    page, anchor = _place(section)
    path = "" if page == from_page else f"{page}.md" if from_page else f"{FOLDER}/{page}.md"
    name = f"`{section.rpartition('.')[2] if from_page else section}`" if section else "Top level"
    return f"[{name}]({path}#{anchor})"


def _purposes() -> str:
    rows = []
    for purpose, names in PURPOSES.items():
        links = [_link("")] if names == "top level" else [_link(name) for name in names.split()]
        rows.append(f"| {purpose} | {', '.join(links)} |")
    return "\n".join(["| to set | see |", "|---|---|", *rows])


INTRODUCTION = f"""# Configuration

<!-- Written by `{COMMAND}`; change the settings, not this page. -->

These pages list every key of a configuration. A configuration is a JSON or YAML file in DeepSpeed's format, or a
dict of the same form. An existing `ds_config.json` usually works unchanged; otherwise an error lists the keys that
do not.

```json
{{
  "train_batch_size": 32,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "bf16": {{"enabled": true}},
  "zero_optimization": {{"stage": 3}},
  "optimizer": {{"type": "AdamW", "params": {{"lr": 3e-4}}}}
}}
```

{_purposes()}

## Rules

- **Batch sizes**: `train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data-parallel
  ranks. You may leave out any size that follows from the others. If you set none, a micro-batch is one sample, and
  every micro-batch is an update.
- **Unknown keys** are errors, at any depth, with a suggestion. So are keys that occur twice.
- **`"{UNSET}"`** lets [the planner choose](choosing.md#choose-automatically) the mesh, the ZeRO stage, offload and the
  micro-batch. For all other keys it is the same as leaving the key out. The log has the values. Learning rates may not
  be `"{UNSET}"`. Neither may `enabled` of `fp16` and `bf16`, unless another precision is on.
- **Types** are not converted: `"32"` is not a number, and `1` is not `true`. Whole numbers may be written as `5e8`. A
  list of strings may be written as one string.
- **YAML**: a file whose name ends in `.yaml` or `.yml` has the same keys. It is read as YAML 1.2: `1e-5` is a
  number, only `true` and `false` are truth values (`yes`, `no`, `on` and `off` are strings), and `010` is a string.
  References (`*name`) and tags are refused.
- **Comments** are allowed (`//`, `#`, `/* */`, and keys named `comment`, `//` or `_comment...`), and so is a comma
  after the last entry.
- **Command line**: `--set zero_optimization.stage=3` changes one key. A value that is not JSON is a string.
- **Editors** complete and check files with [config.schema.json](config.schema.json), if the file begins with
  `"$schema": "path/to/config.schema.json"`.

In the tables, the column *from* says whether DeepSpeed has the key, or only ZeroMesh. Below a table, *no effect* lists
keys of DeepSpeed that are accepted and ignored, with the reason, and *not supported yet* lists keys that accept only
the value given.

A *dtype* is one of {", ".join(f'`"{name}"`' for name in DTYPE_NAMES)}.
"""


ADOPTED = """If a file of DeepSpeed does not load, `zeromesh config --fix old.json > new.json` writes one that loads and
means the same. It prints each change and the reason to standard error. A file that already loads stays as it is.
`zeromesh.deepspeed` makes the same changes when it reads a configuration, with a warning. In Python:

```python
from zeromesh.config.adopt import adopt, warn_of

document, changes = adopt({"seed": 1, "cuda_visible_devices": 0, "zero_optimization.stage": 2})
warn_of(changes)
assert document == {"seed": 1, "zero_optimization": {"stage": 2}}
```

- Unknown keys are removed, except inside `zero_optimization`, where DeepSpeed refuses them too.
- Keys with dots at the top level become paths. A value in the section itself takes precedence.
- 0, 1, `"true"` and `"false"` become true and false where a key is true or false.
- `offload_param` below stage 3 and `offload_optimizer` at stage 0 are removed.
- The keys of the following table are removed or replaced. Unless the row says otherwise, a run computes the same
  without them, or more exactly:

| key | becomes | reason |
|---|---|---|
"""


class _Untitled(GenerateJsonSchema):
    # Titles would only repeat the names.
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def pages() -> dict[str, str]:
    """Return the reference as pages of Markdown, by file."""
    known = entries(TrainSettings)
    sections = ["", *(path for path, entry in known.items() if entry.section)]
    titles = [f"Configuration: {purpose.replace('`', '')}" for purpose in PURPOSES]
    written = {f"{FOLDER}.md": f"{INTRODUCTION}\n{_all_sections(sections, known)}"}
    for name, title in [*zip(NAMES, titles, strict=True), (REST, "Configuration: other sections and names")]:
        tables = [_section(section, known) for section in sections if _place(section)[0] == name]
        tables += [_other_names(), _refused()] if name == REST else []
        written[f"{FOLDER}/{name}.md"] = "\n".join([_head(title), *tables])
    return written | {f"{FOLDER}/{CONVERSION}.md": f"{_head('Convert a file of DeepSpeed')}\n{_adopted()}"}


def _head(title: str) -> str:
    note = f"<!-- Written by `{COMMAND}`; change the settings, not this page. -->"
    below = f"Part of the [configuration](../{FOLDER}.md), which says how values are read.\n"
    return f"# {title}\n\n{note}\n\n{below}"


def _all_sections(sections: Iterable[str], known: dict[str, Entry]) -> str:
    """Return a table of all sections, with the anchors that older links have."""
    rows = [
        f'| <a id="{_place(section)[1]}"></a>{_link(section)} | {known[section].meaning if section else TOP} |'
        for section in sections
    ]
    more = [
        f"| [Other names]({FOLDER}/{REST}.md#other-names) | Older and shorter names of keys. |",
        f"| [Refused keys]({FOLDER}/{REST}.md#refused-keys) | Keys of DeepSpeed that are errors, with the remedy. |",
        f"| [Convert a file of DeepSpeed]({FOLDER}/{CONVERSION}.md) | What `zeromesh config --fix` changes. |",
    ]
    return "\n".join(["## All sections", "", "| section | what it sets |", "|---|---|", *rows, *more]) + "\n"


def schema() -> Schema:
    """Return the JSON schema of a configuration file."""
    whole = TrainSettings.model_json_schema(schema_generator=_Untitled)
    _describe(whole, whole["$defs"], "")
    for part in [whole, *whole["$defs"].values()]:
        del part["title"]
        _loosen(part)
    for old, new in RENAMED.items():
        section, _, name = new.rpartition(".")
        part = section_of(whole["properties"][section], whole["$defs"]) if section else whole
        assert part is not None, f"{section} has other names for its keys, but is not a section"
        properties = part["properties"]
        properties[old.rpartition(".")[2]] = {**properties[name], "deprecated": True, "description": f"Use {new}."}
    whole["properties"]["zero_optimization"]["anyOf"].append({"type": "boolean"})
    whole["properties"]["compile"]["anyOf"] += [{"type": "boolean"}, {"type": "null"}]
    whole["properties"]["$schema"] = {"type": "string"}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ZeroMesh configuration"}
    return {**head, **whole}


def _section(section: str, known: dict[str, Entry]) -> str:
    """Return the table of one section's keys."""
    prefix = f"{section}." if section else ""
    head = [f"## `{section}`" if section else "## Top level", ""]
    if section:
        note = _note(section)
        head += [text for text in (known[section].meaning, f"{_sentence(note)}." if note else "") if text] + [""]
    inside = [known[prefix + name] for name in children(known, section)]
    read = [entry for entry in inside if entry.path not in UNREAD or entry.section]
    if read:
        head += ["| key | meaning | value | default | from |", "|---|---|---|---|---|", *map(_line, read), ""]
    return "\n".join([*head, *_unread(entry.path for entry in inside if entry not in read)])


def _line(entry: Entry) -> str:
    name = entry.path.rpartition(".")[2]
    if entry.section:
        name, value, default = _link(entry.path, _place(entry.path.rpartition(".")[0])[0]), "an object", ""
    else:
        name, value = f"`{name}`", entry.rule
        default = "required" if entry.required else f"`{show(entry.default)}`"
    origin = "DeepSpeed" if sections_of(entry.path).isdisjoint(OURS) else "ZeroMesh"
    note = _sentence(_note(entry.path))
    meaning = f"{entry.meaning} {note}.".strip() if note else entry.meaning
    return f"| {' | '.join((name, meaning, _short(value), default, origin))} |"


def _short(rule: str) -> str:
    """Return a rule without bounds that nobody meets, and with one word for the names of dtypes."""
    for bound in (2**31 - 1, 2**40, 2**63 - 1):
        rule = rule.replace(f" and <= {bound}", "")
    return rule.replace("one of " + ", ".join(map(show, DTYPE_NAMES)), "a dtype")


def _unread(paths: Iterable[str]) -> list[str]:
    """Return lists of keys that are accepted and change nothing, those with one reason together."""
    reasons: dict[str, list[str]] = defaultdict(list)
    later = []
    for path in paths:
        name = f"`{path.rpartition('.')[2]}`"
        if path in NOT_YET:
            row = NOT_YET[path]
            later.append(f"- {name}: {row.what}; only {' or '.join(f'`{show(value)}`' for value in row.allowed)}.")
        else:
            reasons[WITHOUT_EFFECT[path]].append(name)
    found = ["*No effect*:", "", *(f"- {', '.join(names)}: {why}." for why, names in reasons.items()), ""]
    return (found if reasons else []) + (["*Not supported yet*:", "", *later, ""] if later else [])


def _note(path: str) -> str:
    notes = [f"*no effect*: {WITHOUT_EFFECT[path]}"] if path in WITHOUT_EFFECT else []
    if path in NOT_YET:
        row = NOT_YET[path]
        notes.append(
            f"*not supported yet*: {row.what}; only {' or '.join(f'`{show(value)}`' for value in row.allowed)}"
        )
    return "; ".join(notes)


def _sentence(note: str) -> str:
    return note.replace("*no effect*", "No effect").replace("*not supported yet*", "Not supported yet")


def _other_names() -> str:
    rows = "\n".join(f"| `{old}` | `{new}` |" for old, new in RENAMED.items())
    head = "## Other names\n\nOlder and shorter names of keys, which are read as the key beside them.\n"
    return f"{head}\n| name | key |\n|---|---|\n{rows}\n"


def _refused() -> str:
    rows = "\n".join(f"| `{path}` | {remedy} |" for path, remedy in GONE.items())
    head = (
        "## Refused keys\n\nThese keys of DeepSpeed, or of earlier versions, are errors unless they are switched off "
        "(false, or nothing enabled inside).\n"
    )
    return f"{head}\n| key | instead |\n|---|---|\n{rows}\n"


def _adopted() -> str:
    """Return what ``adopt`` leaves out or replaces, after its own description."""
    rows = [f"| `{path}` | removed | {why} |" for path, why in EXACT.items()]
    rows += [
        f'| `"optimizer": {{"type": "{name}"}}` | `"{row.name}"` | {row.why} |'
        for name, row in EXACT_OPTIMIZERS.items()
    ]
    return ADOPTED + "\n".join(rows) + "\n"


def _describe(part: Schema, definitions: dict[str, Schema], prefix: str) -> None:
    """Describe each key, with those that are not in the settings, and say which are special."""
    for name in children(entries(TrainSettings), prefix.removesuffix(".")):
        path, value = prefix + name, part["properties"].setdefault(name, {})
        note = _sentence(_note(path).replace("`", ""))
        value["description"] = " ".join([entries(TrainSettings)[path].meaning, f"{note}." if note else ""]).strip()
        inner = section_of(value, definitions)
        if inner is not None:
            _describe(inner, definitions, f"{path}.")


def _loosen(part: Schema) -> None:
    """Let "auto" stand for every key."""
    for name, value in part.get("properties", {}).items():
        kept = {key: value.pop(key) for key in ("description", "default") if key in value}
        # Defaults of whole sections only repeat those of their keys.
        if isinstance(kept.get("default"), dict):
            del kept["default"]
        options = value.get("anyOf", [value] if value else [])
        part["properties"][name] = {**kept, "anyOf": [*options, {"const": UNSET}]} if options else kept


def files() -> dict[str, str]:
    """Return the text of each file by its name."""
    return {
        **pages(),
        "config.schema.json": json.dumps(schema(), indent=1) + "\n",
    }


def _stale(folder: Path) -> Iterator[str]:
    """Yield the first differences between what should be in the folder and what is."""
    for name, text in files().items():
        path = folder / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        lines = list(difflib.unified_diff(old.splitlines(), text.splitlines(), str(path), "as it should be", "", "", 0))
        yield "\n".join(lines[:DIFFERENCES_SHOWN])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or check them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the configuration reference and its schema.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"), help="where they are (default: docs)")
    parser.add_argument("--check", action="store_true", help="only check that they are up to date")
    options = parser.parse_args(arguments)
    if not options.check:
        for name, text in files().items():
            (options.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (options.folder / name).write_text(text, encoding="utf-8")
        return 0
    stale = list(_stale(options.folder))
    if stale:
        print(*stale, f"The reference is stale; run {COMMAND} and commit what it writes.", sep="\n", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
