"""The reference page and the JSON schema say what the settings do."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import pytest

from config_reference import main, pages, schema
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.config.settings import entries
from zeromesh.config.special_keys import GONE, RENAMED, UNREAD, sections_of

DOCS = Path(__file__).parents[2] / "docs"
CONFIGS = Path(__file__).parent / "configs"

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def published() -> Schema:
    loaded: Schema = json.loads((DOCS / "config.schema.json").read_text())
    return loaded


def options(part: Schema, whole: Schema) -> list[Schema]:
    if "$ref" in part:
        target: Schema = whole["$defs"][part["$ref"].rpartition("/")[2]]
        return [target]
    return [option for choice in part["anyOf"] for option in options(choice, whole)] if "anyOf" in part else [part]


def accepts(part: Schema, value: Any, whole: Schema) -> bool:
    return any(accepts_option(option, value, whole) for option in options(part, whole))


def accepts_option(option: Schema, value: Any, whole: Schema) -> bool:
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    if "const" in option or "enum" in option:
        return bool(value in option.get("enum", [option.get("const")]))
    kind = option.get("type")
    if kind is None:
        return True
    value = int(value) if kind == "integer" and isinstance(value, float) and value.is_integer() else value
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if kind == "array":
        return all(accepts(option["items"], item, whole) for item in value)
    if kind == "object" and "properties" in option:
        keys = option["properties"]
        known = set(value) <= set(keys) and set(option.get("required", ())) <= set(value)
        return known and all(accepts(keys[key], item, whole) for key, item in value.items())
    return bool(option.get("minimum", float("-inf")) <= value) if kind in ("integer", "number") else True


def test_the_published_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DOCS), "--check"]) == 0, capsys.readouterr().err


@pytest.mark.full
def test_the_check_finds_a_stale_page_shows_where_and_says_what_to_do(tmp_path, capsys) -> None:
    assert main([str(tmp_path), "--check"]) == 1
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    page = tmp_path / "configuration" / "general.md"
    page.write_text(page.read_text().replace("| `seed` |", "| `sed` |"))
    capsys.readouterr()
    assert main([str(tmp_path), "--check"]) == 1
    shown = capsys.readouterr().err
    assert "-| `sed` |" in shown
    assert "+| `seed` |" in shown
    assert "python tools/config_reference.py" in shown


def test_the_pages_have_a_line_for_every_key_with_its_meaning() -> None:
    page = "\n".join(pages().values())
    for path, entry in entries(TrainSettings).items():
        assert entry.meaning.endswith(".") or not sections_of(path).isdisjoint(UNREAD), f"{path} has no description"
        section, _, name = path.rpartition(".")
        heading = f"\n## `{section}`\n" if section else "\n## Top level\n"
        table = page.partition(heading)[2].partition("\n## ")[0]
        assert f"`{name}`" in table, path
        assert entry.meaning in table, path
    for name in (*RENAMED, *GONE):
        assert f"| `{name}` |" in page


def test_links_between_the_pages_lead_to_headings_and_older_links_to_the_overview() -> None:
    written = pages()
    anchors = {name: set(re.findall(r"^## `?(.+?)`?$", text, re.MULTILINE)) for name, text in written.items()}
    anchors = {
        name: {found.replace(".", "").replace(" ", "-").lower() for found in all_} for name, all_ in anchors.items()
    }
    for name, text in written.items():
        for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            assert target not in written or anchor in anchors[target], (name, path, anchor)
    overview = written["configuration.md"]
    for section in [path for path, entry in entries(TrainSettings).items() if entry.section]:
        assert f'<a id="{section.replace(".", "")}"></a>[`{section}`](configuration/' in overview
    assert max(text.count("\n") for text in written.values()) < 160


def test_the_pages_mark_where_keys_come_from() -> None:
    everything = "\n".join(pages().values())
    lines = {line.split("|")[1].strip(): line for line in everything.splitlines() if "|" in line}
    assert lines["`train_batch_size`"].endswith("| DeepSpeed |")
    assert lines["`units`"].endswith("| ZeroMesh |")
    section = everything.partition("## `zero_optimization`")[2].partition("\n## ")[0]
    idle, _, later = section.partition("*No effect*:")[2].partition("*Not supported yet*:")
    assert "\n- `reduce_bucket_size`, `use_multi_rank_bucket_allreduce`: gradients are reduced unit by unit." in idle
    assert "`zero_quantized_nontrainable_weights`: quantized frozen weights; only `false`." in later


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_the_schema_accepts_the_files_that_the_settings_accept(path: Path, published: Schema) -> None:
    document = json.loads(path.read_text())
    for section in GONE:
        document.pop(section, None)  # not for new files, though let through when switched off
    assert accepts(published, document, published)


@pytest.mark.parametrize(
    "document",
    [
        {"train_batch_siz": 8},
        {"train_batch_size": "8"},
        {"train_batch_size": 0},
        {"zero_optimization": {"stge": 1}},
        {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
        {"fp16": {"enabled": 1}},
        {"optimizer": {"params": {}}},
        {"communication_data_type": "fp17"},
    ],
)
def test_the_schema_refuses_what_the_settings_refuse(document: Schema, published: Schema) -> None:
    assert not accepts(published, document, published)


def test_the_schema_takes_auto_for_every_key(published: Schema) -> None:
    parts = [published, *published["$defs"].values()]
    for part in parts:
        for name, value in part["properties"].items():
            assert name == "$schema" or accepts(value, "auto", published), name


def test_the_schema_is_one_that_validators_take(published: Schema) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(published)
    validator = jsonschema.Draft202012Validator(published)
    assert validator.is_valid(json.loads((CONFIGS / "train.json").read_text()))
    assert not validator.is_valid({"zero_optimization": {"stage": 4}})


def test_the_schema_says_which_keys_have_no_effect() -> None:
    described = schema()["$defs"]["ZeroOptimization"]["properties"]["overlap_comm"]["description"]
    assert "No effect:" in described
