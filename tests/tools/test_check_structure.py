"""The check of the package's structure on small trees: what runs another's code is refused."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_structure", ROOT / "tools" / "check_structure.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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


def problems_of(tool: ModuleType, root: Path, text: str, name: str = "some/file.py") -> list[str]:
    file = root / "zeromesh" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# why\n{text}\n")
    return [line for line in tool.check(root) if f"{name}:2" in line]


@pytest.mark.parametrize("text", REFUSED)
def test_what_unpickles_is_refused(tool: ModuleType, tmp_path: Path, text: str) -> None:
    (line,) = problems_of(tool, tmp_path, text)
    assert REFUSED[text] in line


@pytest.mark.parametrize(
    "text", ["torch.load(path, map_location='cpu', weights_only=True)", "json.loads(data)", "hvd.broadcast_object(x)"]
)
def test_what_unpickles_nothing_is_accepted(tool: ModuleType, tmp_path: Path, text: str) -> None:
    assert problems_of(tool, tmp_path, text) == []


def test_a_file_of_the_list_may_use_its_own_function_only(tool: ModuleType, tmp_path: Path) -> None:
    assert problems_of(tool, tmp_path, "pickle.loads(call)", "comm/rank.py") == []
    assert len(problems_of(tool, tmp_path, "dist.all_gather_object(out, mine)", "comm/rank.py")) == 1


@pytest.mark.parametrize(
    "text", ["found = 1", "for one in ():\n    pass", "def f(given): ...", "x = [own for own in ()]"]
)
def test_names_that_say_nothing_may_not_become_more(
    tool: ModuleType, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems_of(tool, tmp_path, text) == []
    monkeypatch.setattr(tool, "MOST_EMPTY_NAMES", 0)
    (line,) = problems_of(tool, tmp_path, text)
    assert "does not say what it holds" in line
