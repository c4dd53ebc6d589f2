"""The check of the package's structure on small trees: what runs another's code is refused."""

from pathlib import Path

import pytest

import check_structure as tool

ROOT = Path(__file__).resolve().parents[2]


REFUSED = {
    "dist.all_gather_object(out, mine)": "all_gather_object unpickles what another rank sends; use comm/messages.py",
    "torch.distributed.broadcast_object_list(box)": "broadcast_object_list unpickles",
    "from torch.distributed import gather_object as g": "gather_object unpickles",
    "send = dist.send_object_list": "send_object_list unpickles",
    "pickle.loads(data)": "loads may run code of whoever wrote its input",
    "from pickle import Unpickler": "Unpickler may run code",
    "torch.load(path)": "load may run code of whoever wrote its input; use JSON, or weights_only=True",
    "torch.load(path, weights_only=False)": "load may run code",
    "numpy.load(path, allow_pickle=True)": "allow_pickle may run code",
    "marshal.loads(data)": "loads may run code",
}


def problems_of(root: Path, text: str, name: str = "some/file.py") -> list[str]:
    file = root / "zeromesh" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# why\n{text}\n")
    return [line for line in tool.check(root) if f"{name}:2" in line]


@pytest.mark.parametrize("text", REFUSED)
def test_what_unpickles_is_refused(tmp_path: Path, text: str) -> None:
    (line,) = problems_of(tmp_path, text)
    assert REFUSED[text] in line


@pytest.mark.parametrize(
    "text", ["torch.load(path, map_location='cpu', weights_only=True)", "json.loads(data)", "hvd.broadcast_object(x)"]
)
def test_what_unpickles_nothing_is_accepted(tmp_path: Path, text: str) -> None:
    assert problems_of(tmp_path, text) == []


def test_a_file_of_the_list_may_use_its_own_function_only(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "pickle.loads(call)", "comm/rank.py") == []
    assert len(problems_of(tmp_path, "dist.all_gather_object(out, mine)", "comm/rank.py")) == 1


@pytest.mark.parametrize(
    "text", ["found = 1", "for one in ():\n    pass", "def f(given): ...", "x = [own for own in ()]"]
)
def test_names_that_say_nothing_may_not_become_more(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems_of(tmp_path, text) == []
    monkeypatch.setitem(tool.MOST, "names that do not say what they hold", 0)
    (line,) = problems_of(tmp_path, text)
    assert "does not say what it holds" in line


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("'set zero_optimization.stag to 2'", "zero_optimization.stag"),
        ("f'set offload_optimizer.devices to {cpu}'", "offload_optimizer.devices"),
        ("'run.output is a folder, and run.outputs is none'", "run.outputs"),
    ],
)
def test_a_key_that_a_text_names_must_exist(tmp_path: Path, text: str, key: str) -> None:
    (line,) = problems_of(tmp_path, f"print({text})")
    assert f"{key} is not a key of the configuration" in line


@pytest.mark.parametrize(
    "text",
    [
        "'set zero_optimization.stage to 2'",
        "'set offload_param.device, or optimizer.params.anything'",
        "'see data.json, model.layers.0 and checkpoint.save()'",
    ],
)
def test_keys_files_modules_and_calls_are_no_unknown_keys(tmp_path: Path, text: str) -> None:
    assert problems_of(tmp_path, f"print({text})") == []


def package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / "zeromesh" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def methods(first: int, last: int) -> str:
    return "".join(f"    def m{number}(self): ...\n" for number in range(first, last))


def test_methods_count_with_those_that_a_class_inherits(tmp_path: Path) -> None:
    files = {"base.py": f"class Base:\n{methods(0, 20)}", "heir.py": f"class Heir(Base):\n{methods(15, 26)}"}
    lines = tool.check(package(tmp_path, files))
    assert "heir.py:Heir: 26 methods of a class; at most 25" in lines
    assert not [line for line in lines if "base.py:Base" in line]


@pytest.mark.parametrize(("lines", "refused"), [(450, False), (451, True)])
def test_a_file_of_functions_has_450_lines_at_most(tmp_path: Path, lines: int, refused: bool) -> None:
    root = package(tmp_path, {"file.py": "def f(): ...\n" * lines})
    assert any("file.py" in line for line in tool.check(root)) == refused


@pytest.mark.parametrize(("lines", "refused"), [(700, False), (701, True)])
@pytest.mark.parametrize("text", ["class Only:\n{}", "TABLE = (\n{})\n"])
def test_a_file_of_one_class_or_one_table_has_700_lines_at_most(
    tmp_path: Path, text: str, lines: int, refused: bool
) -> None:
    body = "    1,\n" * (lines - text.count("\n"))
    root = package(tmp_path, {"file.py": text.format(body)})
    assert any("file.py" in line for line in tool.check(root)) == refused


def test_the_name_of_a_file_is_unique_in_the_package(tmp_path: Path) -> None:
    root = package(tmp_path, {"a/trace.py": "", "b/trace.py": "", "a/__init__.py": "", "b/__init__.py": ""})
    problems = tool.check(root)
    assert "a/trace.py, b/trace.py: one name" in problems
    assert not [line for line in problems if "__init__" in line]
