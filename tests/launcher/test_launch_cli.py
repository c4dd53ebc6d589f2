"""``zeromesh launch``. Most scripts here do not import torch, so that they start at once."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness import free_port, run_command
from zeromesh.apps.cli.main import app
from zeromesh.comm import rank
from zeromesh.comm.failure import first_failure

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch"]


pytestmark = pytest.mark.usefixtures("secret")


SCRIPT = """
import os, signal, sys, time
rank, mode = int(os.environ["RANK"]), sys.argv[1]
print("rank", rank, "of", os.environ["WORLD_SIZE"], __name__, sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"])
sys.stdout.flush()
if mode == "raise":
    if rank == 1:
        raise LookupError("the key is not there")
    time.sleep(1)
    raise ConnectionError("lost rank 1")
if mode == "signal":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
if mode == "exit" and rank == 1:
    sys.exit(3)
if mode == "lines":
    for number in range(100):
        for part in (f"r{rank}", f"n{number}", "." * 50):
            sys.stdout.write(part)
            time.sleep(0.001)  # in which others write
        print()
if mode == "ignore":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if mode == "tidy":
    def tidy(number, frame):
        open(sys.argv[2] + f"/tidied{rank}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, tidy)
if mode in ("ignore", "tidy", "wait"):
    with open(sys.argv[2] + f"/{rank}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[2] + f"/{rank}.part", sys.argv[2] + f"/{rank}.pid")
    time.sleep(1000)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_ranks_get_their_arguments_and_write_whole_lines(script: Path) -> None:
    command = [*LAUNCH, "--nproc", "2", script, "lines", "--nproc"]
    finished = run_command(command, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    assert finished.returncode == 0, finished.stdout
    lines = sorted(finished.stdout.splitlines())
    first = [f"rank {rank} of 2 __main__ ['lines', '--nproc'] threads 1" for rank in (0, 1)]
    body = [[f"r{rank}n{number}{'.' * 50}" for number in range(100)] for rank in (0, 1)]
    of_one = [f"[1] {line}" for line in (first[1], *body[1])]
    assert lines == sorted([first[0], *body[0], *of_one, "zeromesh launch: 2 ranks"])


def test_the_first_failure_is_shown_and_nothing_else(script: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    finished = subprocess.run(
        [*LAUNCH, "--nproc", "2", str(script), "raise"], capture_output=True, text=True, timeout=180, env=variables
    )
    assert finished.returncode == 1
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    told, error, *trace = finished.stderr.splitlines()
    assert told == f"zeromesh launch: 2 ranks, OMP_NUM_THREADS={threads} for each; set it to change that"
    assert error == "error: rank 1 failed first: LookupError: the key is not there"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1] == f'  File "{script}", line 8, in <module>'
    assert trace[-1] == "LookupError: the key is not there"
    assert "rank.py" not in finished.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        ("signal", 137, "rank 1 failed first: killed by SIGKILL; .*memory ran out"),
        pytest.param("exit", 3, "rank 1 .* status 3$", marks=pytest.mark.full),
    ],
)
def test_ranks_that_die_are_named(script: Path, mode: str, code: int, text: str) -> None:
    finished = run_command([*LAUNCH, "--nproc", "2", script, mode])
    assert finished.returncode == code, finished.stdout
    assert re.search(text, finished.stdout.splitlines()[-1]), finished.stdout


def test_a_signal_without_a_name_is_told(tmp_path: Path) -> None:
    failure = first_failure(tmp_path, {1: -40})
    assert (failure.summary, failure.exitcode) == ("killed by signal 40", 168)


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("error = KeyError('x')\nerror.add_note('a hint')\nraise error", "KeyError: 'x'"),
        ("compile('1 +', 'file', 'exec')", "SyntaxError: invalid syntax"),
    ],
)
def test_the_summary_of_a_failure_is_its_exception(text, summary, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(rank.FAILURES, str(tmp_path))
    with pytest.raises((KeyError, SyntaxError)) as caught:
        exec(text)
    rank.record(caught.type, caught.value, None)
    assert first_failure(tmp_path, {0: 1}).summary == summary


@pytest.mark.full
def test_variables_that_are_wrong_are_told_where_they_matter(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1234")
    finished = run_command([*LAUNCH, "--nproc", "1", script, "none"])
    assert finished.returncode == 0, finished.stdout
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--folder", str(tmp_path)]).stdout)
    assert "MASTER_PORT=1234" in report["problems"][0]["problem"]


@pytest.mark.full
def test_processes_that_a_rank_left_running_end_with_a_failure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)\nraise ValueError\n"
    )
    finished = run_command([*LAUNCH, "--nproc", "1", tmp_path / "script.py"])
    assert finished.returncode == 1
    assert are_gone([int(line) for line in finished.stdout.splitlines() if line.isdecimal()])


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "text", "status", "lines"),
    [
        (2, "import sys\nsys.exit('the data is missing')", 1, None),
        (1, "import os\nos.chdir('/')\nprint(__file__)", 0, {"FILE"}),
        (2, "import sys\nprint(repr(sys.stdin.read()))", 0, {"'a'", "[1] ''"}),
        # Whole lines come through the pipe that rank 0 writes to, which itself would write lines in parts.
        (2, "for number in range(20_000):\n    print('x' * 80)", 0, {"x" * 80, "[1] " + "x" * 80}),
    ],
)
def test_ranks_read_and_write_as_under_python(ranks, text, status, lines, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    finished = subprocess.run(
        [*LAUNCH, "--nproc", str(ranks), script.name], capture_output=True, text=True, timeout=180, input="a",
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert finished.returncode == status, finished.stderr
    if lines is None:
        assert (finished.stdout + finished.stderr).count("the data is missing") == 1
    else:
        assert set(finished.stdout.splitlines()) == {str(script) if line == "FILE" else line for line in lines}


@contextmanager
def running(
    script: Path, mode: str, folder: Path, *options: str, ranks: int = 2
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = subprocess.Popen(
        [*LAUNCH, "--nproc", "2", *options, str(script), mode, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 60
        while len(files := list(folder.glob("*.pid"))) < ranks:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.05)
        yield process, [int(file.read_text()) for file in files]
    finally:
        process.kill()
        process.wait()


def are_gone(pids: list[int]) -> bool:
    limit = time.monotonic() + 20
    while any(
        Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text() for pid in pids
    ):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def test_ctrl_c_ends_ranks_that_ignore_it(script: Path, tmp_path: Path) -> None:
    with running(script, "ignore", tmp_path) as (process, pids):
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 130
        assert output.splitlines()[-1] == "stopped"
        assert "Traceback" not in output
        assert are_gone(pids)


@pytest.mark.full
def test_sigterm_is_passed_on(script: Path, tmp_path: Path) -> None:
    with running(script, "tidy", tmp_path) as (process, pids):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 143
        assert are_gone(pids)
    assert sorted(file.name for file in tmp_path.glob("tidied*")) == ["tidied0", "tidied1"]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked to do it")
@pytest.mark.parametrize("program", [(), ("--no-python", sys.executable)])
def test_ranks_do_not_outlive_a_launcher_that_is_killed(program: tuple[str, ...], script: Path, tmp_path: Path) -> None:
    with running(script, "wait", tmp_path, *program) as (process, pids):
        process.kill()
        process.wait()
        assert are_gone(pids)


@pytest.mark.full
def test_modules_and_programs(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "tool.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    finished = run_command([*LAUNCH, "-m", "mine.tool", "-m", "x"], cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert finished.stdout.splitlines()[-1] == "__main__ mine ['-m', 'x']", finished.stdout
    finished = run_command([*LAUNCH, "--nproc", "1", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE"])
    assert finished.stdout.splitlines()[-1] == "0 of 1", finished.stdout


def test_two_nodes_meet_at_the_master(script: Path) -> None:
    master = f"127.0.0.1:{free_port()}"
    commands = [
        [*LAUNCH, "--nproc", "1", "--nnodes", "2", "--node-rank", str(node), "--master", master, str(script), "none"]
        for node in (0, 1)
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    ranks = re.findall(r"rank (\d) of 2", "".join(outputs))
    assert sorted(ranks) == ["0", "1"], outputs


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["launch", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_port_in_use_is_refused(script: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        code, text = call("--nproc", 1, "--nnodes", 2, "--node-rank", 0, "--master", master, script, "none")
    assert code == 2
    assert f"of --master {master} cannot be used" in text
    assert "choose another port" in text


def test_a_master_that_is_not_there_is_an_error_in_bounded_time(script: Path) -> None:
    master = f"127.0.0.1:{free_port()}"
    options = ["--nproc", 1, "--nnodes", 2, "--node-rank", 1, "--master", master, "--timeout", 2]
    code, text = call(*options, script, "none")
    assert code == 2
    assert f"could not reach the master {master} in 2 s; start zeromesh launch" in text


@pytest.mark.full
@pytest.mark.parametrize("node", [[], ["--node-rank", "1"]])
def test_a_master_that_is_another_program_is_an_error_in_bounded_time(node: list[str], script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--nproc", "1", "--nnodes", "2", *node, "--master", master, "--timeout", "1"]
        finished = run_command([*LAUNCH, *options, script, "none"])
    assert finished.returncode == 2, finished.stdout
    assert f"could not reach the master {master} in 1 s" in finished.stdout
    assert finished.stdout.strip().endswith("no zeromesh launch")


@pytest.mark.full
def test_nodes_say_when_the_master_has_gone(script: Path, tmp_path: Path) -> None:
    options = ["--nproc", "1", "--nnodes", "2", "--master", f"127.0.0.1:{free_port()}", "--node-rank"]
    with (
        running(script, "wait", tmp_path, *options, "0", ranks=0) as (master, _),
        running(script, "wait", tmp_path, *options, "1") as (other, _),
    ):
        master.kill()
        output = other.communicate(timeout=120)[0]
    assert other.returncode == 2, output
    assert f"the master {options[5]} has gone" in output.splitlines()[-1]


@pytest.mark.full
def test_a_node_that_waits_for_others_ends_on_a_signal_and_leaves_nothing(script: Path, tmp_path: Path) -> None:
    places = tmp_path / "temporary"
    places.mkdir()
    options = ["--nproc", "1", "--nnodes", "2", "--node-rank", "0", "--master", f"127.0.0.1:{free_port()}"]
    process = subprocess.Popen([*LAUNCH, *options, str(script), "none"], env=os.environ | {"TMPDIR": str(places)})
    try:
        limit = time.monotonic() + 60
        while not is_listening(int(options[-1].split(":")[1])):
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.wait()
    assert not list(places.glob("zeromesh-*"))


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.py"], "'missing.py' is no file; name a Python script"),
        (["-m", "--no-python", "x"], "exclude each other"),
        (["--no-python", "no-such-program"], "'no-such-program' is no program that can be run"),
        (["--nnodes", "2:1", "SCRIPT"], "--nnodes is '2:1', but must be"),
        (["--nnodes", "two", "SCRIPT"], "--nnodes is 'two', but must be"),
        (["--nnodes", "2", "SCRIPT"], "--nnodes 2 needs --master HOST:PORT"),
        (["--nnodes", "2", "--master", "host", "SCRIPT"], "--master is 'host', but must be HOST:PORT"),
        (["--nnodes", "2", "--master", "host:70000", "SCRIPT"], "--master is 'host:70000'"),
        (["--nnodes", "2", "--master", "no-such-host.invalid:1", "SCRIPT"], "cannot be found from"),
        (
            ["--nnodes", "2", "--master", "h:1", "--node-rank", "2", "SCRIPT"],
            "--node-rank is 2, but must be from 0 to 1",
        ),
        (["--node-rank", "1", "SCRIPT"], "--node-rank 1 needs --nnodes and --master"),
        (["--nnodes", "1:2", "--master", "h:1", "--max-restarts", "0", "SCRIPT"], "each costs a restart"),
        (["--nproc", "0", "SCRIPT"], "--nproc is 0, but must be at least 1"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(arguments: list[str], text: str, script: Path) -> None:
    code, output = call(*[script if argument == "SCRIPT" else argument for argument in arguments])
    assert code == 2, output
    assert text in output
