"""The reference page and the JSON schema, written from the settings: ``python tools/config_reference.py``."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from zeromesh.config.catalogue import Entry, Schema, children, section_of
from zeromesh.config.errors import show
from zeromesh.config.names import EXACT_OPTIMIZERS
from zeromesh.config.settings import Settings, entries
from zeromesh.config.tables import EXACT, GONE, NOT_YET, OURS, RENAMED, UNREAD, UNSET, WITHOUT_EFFECT, sections_of

COMMAND = "python tools/config_reference.py"
DIFFERENCES_SHOWN = 20

INTRODUCTION = f"""# Configuration

<!-- Written by `{COMMAND}`; change the settings, not this page. -->

A configuration is a JSON file in DeepSpeed's format, or a dict of the same form. Files made for DeepSpeed work
unchanged, or are refused with the reason. [config.schema.json](config.schema.json) is its JSON schema: an editor
completes and checks a file that starts with `"$schema": "path/to/config.schema.json"`.

- Unknown keys, at any depth, and keys that stand twice are errors. Sections without effect may hold anything.
- Comments (`//`, `#`, `/* */`) and a comma after the last entry may stand in a file. Keys named `comment`, `//` or
  `_comment...` are comments, too.
- `"{UNSET}"` means: as if the key were not there. It may stand anywhere; `initialize` lists such keys in one line, with
  the values that they have then. Learning rates, and `enabled` of `fp16` and `bf16` where no other precision is on, are
  errors: a Trainer fills them in, and results depend on them.
- Nothing is converted: `"32"` is not a number, `1` is not `true`. Whole numbers may be written like `5e8`.
- A list of strings may be written as one string.
- On the command line, `--set zero_optimization.stage=3` changes one key. The value is JSON; what is not is a string.
- Sizes: `train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data-parallel ranks.
  Any of them that can be worked out may be left out. With none given, the micro-batch is one sample, without
  accumulation.

The last column says where a key comes from: *DeepSpeed*, or *ours*; and which keys are accepted but have
*no effect* here, or are *not yet* possible with other values than those named.
"""


ADOPTED = """## Files for DeepSpeed

`zeromesh config --fix old.json > new.json` writes a file for DeepSpeed as one that loads here and means the same. Each
change goes to standard error, with its reason; a file that loads already is written as it is. `zeromesh.deepspeed`
reads configurations in the same way, and warns of the changes. In Python:

```python
from zeromesh.config.adopt import adopt, warn_of

document, changes = adopt({"seed": 1, "cuda_visible_devices": 0, "zero_optimization.stage": 2})
warn_of(changes)
assert document == {"seed": 1, "zero_optimization": {"stage": 2}}
```

- Unknown keys are left out, except inside `zero_optimization`, where DeepSpeed refuses them, too.
- Keys of the top level that have dots are paths. A value in the section itself takes precedence.
- 0, 1, `"true"` and `"false"` are read where a key is true or false.
- `offload_param` below stage 3, and `offload_optimizer` at stage 0, are left out.
- These are left out or replaced. A run computes the same without them, or more exactly, unless the row says otherwise:

| key | becomes | why |
|---|---|---|
"""


class _Untitled(GenerateJsonSchema):
    # Titles would only repeat the names.
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def page() -> str:
    """Return the reference as Markdown."""
    known = entries()
    sections = ["", *(path for path, entry in known.items() if entry.section)]
    tables = [_section(section, known) for section in sections]
    parts = [INTRODUCTION, *tables, _other_names(), _refused(), _adopted()]
    return "\n".join(parts)


def schema() -> Schema:
    """Return the JSON schema of a configuration file."""
    whole = Settings.model_json_schema(schema_generator=_Untitled)
    _describe(whole, whole["$defs"], "")
    for part in [whole, *whole["$defs"].values()]:
        del part["title"]
        _loosen(part)
    for old, new in RENAMED.items():
        section, _, name = new.rpartition(".")
        part = section_of(whole["properties"][section], whole["$defs"]) if section else whole
        assert part is not None, f"{section} has other names for its keys, but is no section"
        properties = part["properties"]
        properties[old.rpartition(".")[2]] = {**properties[name], "deprecated": True, "description": f"Use {new}."}
    whole["properties"]["zero_optimization"]["anyOf"].append({"type": "boolean"})
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
    head += ["| key | value | default | meaning | |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_line(known[prefix + name]) for name in children(known, section)), ""])


def _line(entry: Entry) -> str:
    name = entry.path.rpartition(".")[2]
    if entry.section:
        # GitHub's anchor of a heading has no dots.
        name, value, default = f"[`{name}`](#{entry.path.replace('.', '')})", "an object", ""
    else:
        name, value = f"`{name}`", entry.rule
        default = "required" if entry.required else "" if entry.path in UNREAD else f"`{show(entry.default)}`"
    notes = ["DeepSpeed" if sections_of(entry.path).isdisjoint(OURS) else "ours", _note(entry.path)]
    cells = (name, value, default, entry.meaning, "; ".join(note for note in notes if note))
    return f"| {' | '.join(cells)} |"


def _note(path: str) -> str:
    notes = [f"*no effect*: {WITHOUT_EFFECT[path]}"] if path in WITHOUT_EFFECT else []
    if path in NOT_YET:
        row = NOT_YET[path]
        notes.append(f"*not yet*: {row.what}; only {' or '.join(f'`{show(value)}`' for value in row.allowed)}")
    return "; ".join(notes)


def _sentence(note: str) -> str:
    return note.replace("*no effect*", "No effect").replace("*not yet*", "Not yet")


def _other_names() -> str:
    rows = "\n".join(f"| `{old}` | `{new}` |" for old, new in RENAMED.items())
    head = "## Other names\n\nThese are read as the key beside them, of which they are older or shorter names.\n"
    return f"{head}\n| name | key |\n|---|---|\n{rows}\n"


def _refused() -> str:
    rows = "\n".join(f"| `{path}` | {remedy} |" for path, remedy in GONE.items())
    head = (
        "## Refused\n\nKeys and sections of DeepSpeed. They may stand in a file only if switched off: false, or "
        "nothing enabled inside.\n"
    )
    return f"{head}\n| key | instead |\n|---|---|\n{rows}\n"


def _adopted() -> str:
    """Return what ``adopt`` leaves out or replaces, after its own description."""
    rows = [f"| `{path}` | left out | {why} |" for path, why in EXACT.items()]
    rows += [
        f'| `"optimizer": {{"type": "{name}"}}` | `"{row.name}"` | {row.why} |'
        for name, row in EXACT_OPTIMIZERS.items()
    ]
    return ADOPTED + "\n".join(rows) + "\n"


def _describe(part: Schema, definitions: dict[str, Schema], prefix: str) -> None:
    """Describe each key, with those that are not in the settings, and say which are special."""
    for name in children(entries(), prefix.removesuffix(".")):
        path, value = prefix + name, part["properties"].setdefault(name, {})
        note = _sentence(_note(path).replace("`", ""))
        value["description"] = " ".join([entries()[path].meaning, f"{note}." if note else ""]).strip()
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
        "configuration.md": page(),
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
            (options.folder / name).write_text(text, encoding="utf-8")
        return 0
    stale = list(_stale(options.folder))
    if stale:
        print(*stale, f"The reference is stale; run {COMMAND} and commit what it writes.", sep="\n", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
