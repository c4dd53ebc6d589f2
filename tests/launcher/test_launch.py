"""``zeromesh.launch``: functions of modules are in test_environment.py; here are those of scripts and notebooks."""

import re
import signal
import sys
from pathlib import Path

import pytest

import zeromesh
from harness import run_command

SCRIPT = """
import os, signal, zeromesh

class Result:
    def __init__(self, value):
        self.value = value

def work(number, fail):
    if fail:
        raise KeyError(number)
    print("hello")
    return Result(number * int(os.environ["RANK"]))

def begin():
    before = signal.getsignal(signal.SIGINT)
    print([type(result) is Result and result.value for result in zeromesh.launch(work, 2, 21, False)])
    assert signal.getsignal(signal.SIGINT) is before
    try:
        zeromesh.launch(work, 2, 21, True)
    except RuntimeError as error:
        print(error.summary)

GUARD
    begin()
"""


def run_script(tmp_path: Path, guard: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("GUARD", guard))
    return run_command([sys.executable, script], timeout=180).stdout  # two launches, each of which imports torch thrice


def test_functions_of_the_script_run_and_return_by_rank(tmp_path: Path) -> None:
    lines = run_script(tmp_path, 'if __name__ == "__main__":').splitlines()
    assert sorted(lines[:2]) == ["[1] hello", "hello"]
    assert lines[2:] == ["[0, 21]", "KeyError: 21"]


@pytest.mark.full
def test_a_call_without_guard_is_explained(tmp_path: Path) -> None:
    output = run_script(tmp_path, "if True:")
    assert f"called while a rank imported {tmp_path / 'script.py'} to find the function" in output
    assert "only the first process is to do under: if __name__ == '__main__':" in output


NOTEBOOK = """
import io, sys, torch, zeromesh
import torch.distributed as dist

class Net(torch.nn.Linear):
    pass

# Enough for a parallel operation, after which a fork hangs in its first one with several threads.
torch.set_num_threads(2)
torch.randn(2_000_000).exp().sum()
lock = open("/dev/null")

def work(scale):
    environment = zeromesh.init_distributed()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert torch.randn(2_000_000).exp().sum() > 0 and not lock.closed
    print("of", environment.world_size)
    return scale(total.item()), Net(2, 2).weight.shape

def fails(scale):
    raise ValueError(scale(1))

print(zeromesh.launch(work, 2, lambda value: value * 5))
try:
    zeromesh.launch(fails, 2, lambda value: value * 5)
except RuntimeError as error:
    print(error.summary)
sys.stdout = io.StringIO()  # as a notebook's stream, which is not the process's
zeromesh.launch(work, 2, float)
shown, sys.stdout = sys.stdout.getvalue(), sys.__stdout__
print(sorted(shown.splitlines()))
zeromesh.initialize(model=Net(2, 2), config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
try:
    zeromesh.launch(work, 2, float)
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
print(zeromesh.launch(work, 2, float))
torch.cuda.is_initialized = lambda: True
try:
    zeromesh.launch(work, 2, float)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.full
def test_functions_of_a_notebook_are_forked_with_all_that_it_has() -> None:
    lines = run_command([sys.executable, "-c", NOTEBOOK], timeout=180).stdout.splitlines()
    assert sorted(lines[:2]) == ["[1] of 2", "of 2"], lines
    assert lines[2] == "[(10.0, torch.Size([2, 2])), (10.0, torch.Size([2, 2]))]"
    assert lines[3] == "ValueError: 5"
    assert lines[4] == "['[0] of 2', '[1] of 2']"
    refused = next(number for number, line in enumerate(lines) if line.startswith("this notebook has a process group"))
    assert sorted(lines[refused + 1 :][:2]) == ["[1] of 2", "of 2"], lines
    assert lines[refused + 3] == "[(2.0, torch.Size([2, 2])), (2.0, torch.Size([2, 2]))]"
    assert lines[refused + 4].startswith("this notebook has initialised CUDA")


def test_functions_that_cannot_be_sent_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.apps.launch.launch._is_interactive", lambda: False)  # workers of xdist are no scripts
    handlers = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="cannot be sent to the ranks .* at the top level"):
        zeromesh.launch(lambda: None, 2)
    with pytest.raises(ValueError, match="arguments that can be pickled"):
        zeromesh.launch(print, 2, sys.stdout)
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_one_rank_is_this_process() -> None:
    found: list[int] = []
    assert zeromesh.launch(found.append, 1, 5) == [None]
    assert found == [5]


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sys.exit(0)", "the function ended the process with status 0; let it return"),
        ("os._exit(0) if os.environ['RANK'] == '1' else None", "rank 1 failed first: the function ended .* status 0"),
        ("pass", "Can't get attribute 'work' .*\n.*not under if __name__"),
    ],
)
def test_errors_of_a_function_are_shown(body: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    top, indented = f"def work(): {body}\n", f"    def work(): {body}\n"
    guard = 'if __name__ == "__main__":\n'
    inside = "    zeromesh.launch(work, 2)\n"
    script.write_text("import os, sys, zeromesh\n" + (guard + indented if body == "pass" else top + guard) + inside)
    finished = run_command([sys.executable, script], timeout=180)
    assert re.search(text, finished.stdout), finished.stdout
