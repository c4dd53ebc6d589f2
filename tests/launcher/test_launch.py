"""``zeromesh.launch``: functions of modules are in test_environment.py; here are those of scripts and notebooks."""

from __future__ import annotations

import re
import signal
import subprocess
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
    return run_command([sys.executable, script]).stdout


def test_functions_of_the_script_run_and_return_by_rank(tmp_path: Path) -> None:
    lines = run_script(tmp_path, 'if __name__ == "__main__":').splitlines()
    assert sorted(lines[:2]) == ["[1] hello", "hello"]
    assert lines[2:] == ["[0, 21]", "KeyError: 21"]


@pytest.mark.full
def test_a_call_without_guard_is_explained(tmp_path: Path) -> None:
    output = run_script(tmp_path, "if True:")
    assert f"called while a rank imported {tmp_path / 'script.py'} to find the function" in output
    assert "if __name__ == '__main__':" in output.splitlines()[-1]


NOTEBOOK = """
import linecache, sys, types

main = types.ModuleType("__main__")
sys.modules["__main__"] = main
cells = []

def run(text):
    "What IPython does with a cell."
    name = f"<ipython-input-{len(cells)}-abc>"
    cells.append(text)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), main.__dict__)

run('''
import os
from dataclasses import dataclass
from functools import wraps
from math import sqrt
import torch
import torch.distributed as dist
import zeromesh
from torch import nn
''')
run('''
RATE = 2.0

@dataclass
class Settings:
    rate: float = RATE

class Net(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.settings = settings
''')
run('''
def twice(function):
    @wraps(function)
    def both(*arguments):
        return function(*arguments) * 2
    return both

settings = {"all": [Settings(3.0)]}
@twice
def rate_of(number): return sqrt(settings["all"][0].rate * number)
square = lambda value: value * value
Other = Settings
''')
run('''
# Enough for a parallel operation, after which a forked process would hang in the next one.
torch.set_num_threads(2)
torch.randn(2_000_000).exp().sum()

def work(number):
    torch.set_num_threads(2)
    zeromesh.init_distributed()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert torch.randn(2_000_000).exp().sum() > 0
    net = Net(Other())
    return Settings(square(rate_of(number)) + net.settings.rate), total
''')
run('''
results = zeromesh.launch(work, 2, 12)
print([(value, total.item()) for value, total in results])
try:
    zeromesh.launch(work, 2, -1)
except RuntimeError as error:
    print(error)
''')
run('''
class Holder:
    def __init__(self, value):
        self.value = value
    def show(self):
        return self.value
def call(what):
    return what()
print(zeromesh.launch(call, 2, Holder(5).show), zeromesh.launch(Holder(6).show, 2))
lock = open("/dev/null")
def needs_lock():
    return lock
try:
    zeromesh.launch(needs_lock, 2)
except ValueError as error:
    print(error)
exec("def unknown(): pass")
try:
    zeromesh.launch(unknown, 2)
except ValueError as error:
    print(error)
''')
"""


@pytest.mark.full
def test_functions_of_a_notebook_run_with_what_they_use() -> None:
    lines = run_command([sys.executable, "-c", NOTEBOOK]).stdout.splitlines()
    assert lines[0] == "[(Settings(rate=146.0), 2.0), (Settings(rate=146.0), 2.0)]", lines
    assert "failed first: ValueError: math domain error" in lines[1]
    assert any(line.endswith("line 10, in rate_of") for line in lines), lines
    assert lines[-3] == "[5, 5] [6, 6]"
    assert lines[-2].startswith("lock, which needs_lock uses, cannot be sent to the ranks")
    assert lines[-2].endswith("make it inside the function")
    assert lines[-1].startswith("the source of unknown is not known")


def test_what_cannot_be_sent_is_refused_at_once() -> None:
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


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sys.exit(0)", "the function ended the process with status 0; let it return"),
        ("pass", "Can't get attribute 'work' .*\n.*not under if __name__"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(body: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    top, indented = f"def work(): {body}\n", f"    def work(): {body}\n"
    guard = 'if __name__ == "__main__":\n'
    inside = "    zeromesh.launch(work, 2)\n"
    script.write_text("import sys, zeromesh\n" + (guard + indented if body == "pass" else top + guard) + inside)
    finished = run_command([sys.executable, script])
    assert re.search(text, finished.stdout), finished.stdout


FUNCTION = """
import zeromesh
def work(): pass
if __name__ == "__main__":
    zeromesh.launch(work, 2)
"""


@pytest.mark.full
def test_a_main_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(FUNCTION)
    finished = run_command([sys.executable, tmp_path])
    assert "ValueError: the ranks cannot import __main__ without running it; move the function" in finished.stdout
    finished = subprocess.run(
        [sys.executable], input=FUNCTION, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    assert "ValueError: the source of work is not known" in finished.stdout
