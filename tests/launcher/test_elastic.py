"""Runs that go on after a rank, or a node, is gone."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from harness import free_port, run_command, run_ranks
from test_train_cli import config, numbers
from zeromesh.apps.train.goodput import read_attempts
from zeromesh.base.loader import Loader, Sampler
from zeromesh.checkpoint.copies.memory_files import MEMORY
from zeromesh.comm.detect import may_restart
from zeromesh.config.batch_sizes import BatchSizes, solve_batch
from zeromesh.config.errors import ConfigError

TESTS = Path(__file__).parent
LAUNCH = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch"]


pytestmark = pytest.mark.usefixtures("secret")


def losses_of(folder: Path) -> list[list[float]]:
    return [json.loads(line) for line in (folder / "losses").read_text().splitlines()]


def run_script(*arguments: str) -> None:
    with patch.object(sys, "argv", ["elastic.py", *arguments]):
        runpy.run_path(str(TESTS / "elastic.py"))


def test_a_killed_rank_leads_to_the_same_run(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run_ranks(run_script, 2, str(whole), "9", "none")
    command = [*LAUNCH, "--nproc", "2", "--max-restarts", "2", TESTS / "elastic.py", killed, "9", "kill"]
    finished = run_command(command, timeout=120)
    assert finished.returncode == 0, finished.stdout
    assert (killed / "killed").exists()
    assert "rank 1 failed first: killed by SIGKILL" in finished.stdout
    assert "all ranks are started again (1 of 2)" in finished.stdout
    assert [step for step, _, _ in losses_of(whole)] == list(range(1, 10))
    # Step 5 was not saved, and is taken again.
    assert [step for step, _, _ in losses_of(killed)] in ([*range(1, 10)], [*range(1, 6), *range(5, 10)])
    assert all(line in losses_of(whole) for line in losses_of(killed))
    assert (killed / "final").read_text() == (whole / "final").read_text()


@pytest.mark.full
def test_ranks_that_are_killed_at_any_moment_lose_one_step_with_copies_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed, memory = tmp_path / "whole", tmp_path / "killed", tmp_path / "memory"
    for folder in (whole, killed, memory):
        folder.mkdir()
    monkeypatch.setenv(MEMORY, str(memory))
    run_ranks(run_script, 2, str(whole), "400", "none", "memory")
    command = [*LAUNCH, "--nproc", "2", "--max-restarts", "12", TESTS / "elastic.py", killed, "400", "12", "memory"]
    finished = run_command(command, timeout=400)
    assert finished.returncode == 0, finished.stdout
    assert 3 < len(list(killed.glob("killed-*"))) <= 12  # a fast machine is done before the last ones
    taken = [step for step, _, _ in losses_of(killed)]
    assert (taken[0], taken[-1]) == (1, 400)
    assert [(step, later) for step, later in pairwise(taken) if later not in (step, step + 1)] == []
    known = {step: loss for step, _, loss in losses_of(whole)}
    assert all(known[step] == loss for step, _, loss in losses_of(killed))
    assert (killed / "final").read_text() == (whole / "final").read_text()
    assert list(memory.iterdir()) == []
    assert not list((killed / "checkpoints").iterdir())


FAULTY_TRAIN = """
import os, pathlib, signal, sys
import zeromesh.apps.train.loop as loop
from zeromesh.apps.cli.main import main
mark = pathlib.Path(sys.argv.pop(1))
step = loop.Loop._step
def faulty(self, batches):
    if self.engine.global_steps == 4 and self.engine.mesh.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batches)
loop.Loop._step = faulty
main()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("checkpoint", "step"), [({"asynchronous": False}, 3), ({"asynchronous": True}, 3), ({"peer_copies": 1}, 4)]
)
def test_zeromesh_train_resumes_by_itself(
    checkpoint: dict[str, object], step: int, corpus: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAULTY_TRAIN)
    (tmp_path / "no-fault").touch()
    for name, mark in (("whole", "no-fault"), ("killed", "mark")):
        path = config(corpus, tmp_path / name, checkpoint=checkpoint)
        command = [*LAUNCH, "--nproc", "2", "--max-restarts", "1", script, tmp_path / mark, "train", path]
        finished = run_command(command, timeout=200)
        assert finished.returncode == 0, finished.stdout
    assert (tmp_path / "mark").exists()
    assert [attempt.step for attempt in read_attempts(tmp_path / "killed" / "run" / "time.jsonl")] == [0, step]
    assert numbers(tmp_path / "killed" / "run") == numbers(tmp_path / "whole" / "run")
    weights = [load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("whole", "killed")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 120
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.mark.full
def test_a_run_goes_on_when_a_node_leaves_and_when_one_joins(tmp_path: Path) -> None:
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    whole.mkdir()
    changed.mkdir()
    steps = 120
    finished = run_command([*LAUNCH, "--nproc", "2", TESTS / "elastic.py", whole, str(steps), "none"], timeout=120)
    assert finished.returncode == 0, finished.stdout
    master = f"127.0.0.1:{free_port()}"

    def node(rank: int) -> subprocess.Popen[str]:
        options = ["--nproc", "1", "--nnodes", "1:2", "--node-rank", str(rank), "--master", master]
        return subprocess.Popen(
            [*LAUNCH, *options, str(TESTS / "elastic.py"), str(changed), str(steps), "slow"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def world() -> int:
        return int(losses_of(changed)[-1][1]) if (changed / "losses").exists() else 0

    nodes = [node(0), node(1)]
    try:
        wait_for(lambda: world() == 2 and len(losses_of(changed)) >= 3, nodes[0])
        os.killpg(nodes[1].pid, signal.SIGKILL)
        wait_for(lambda: world() == 1, nodes[0])
        nodes.append(node(1))
        wait_for(lambda: world() == 2, nodes[0])
        outputs = [process.communicate(timeout=200)[0] for process in nodes]
    finally:
        for process in nodes:
            process.kill()
    assert (nodes[0].returncode, nodes[2].returncode) == (0, 0), outputs
    assert "the run goes on with 1 rank instead of 2" in outputs[0]
    assert (
        "gradient_accumulation_steps is 4 instead of 2: train_batch_size = 8 is kept on 1 data-parallel rank"
        in (outputs[0])
    )
    assert "the run goes on with 2 ranks instead of 1" in outputs[0]
    # A step whose checkpoint was not complete when a node left is taken again.
    latest = {step: loss for step, _, loss in losses_of(changed)}
    wanted = {step: loss for step, _, loss in losses_of(whole)}
    assert latest == pytest.approx(wanted, rel=1e-9)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("given", "ranks", "wanted"),
    [
        ((16, 2, 4), 2, BatchSizes(16, 2, 4)),
        ((16, 2, 4), 1, BatchSizes(16, 2, 8)),
        ((16, 2, 4), 4, BatchSizes(16, 2, 2)),
        ((16, 2, 4), 16, BatchSizes(16, 1, 1)),
        ((12, 4, 1), 2, BatchSizes(12, 3, 2)),
        ((12, 4, None), 3, BatchSizes(12, 4, 1)),
        ((12, None, 2), 3, BatchSizes(12, 2, 2)),
        ((None, 2, 4), 3, BatchSizes(24, 2, 4)),
    ],
)
def test_the_global_batch_is_kept_on_any_world(given, ranks, wanted) -> None:
    assert solve_batch(*given, ranks, elastic=True) == wanted
    assert wanted.train == wanted.micro * wanted.accumulation * ranks


def test_a_world_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="12 cannot be shared out evenly to 5 .* that work: 1, 2, 3, 4, 6, 12; or set"
    ):
        solve_batch(12, 2, 2, 5, elastic=True)
    with pytest.raises(ConfigError, match="train_batch_size = 16, but"):
        solve_batch(16, 2, 4, 1)


def samples_of_updates(ranks: int, updates: int) -> list[list[int]]:
    loaders = [Loader(range(23), Sampler(range(23), ranks, rank, 7, True, 6), 1, None, True) for rank in range(ranks)]
    streams = [[int(batch) for _ in range(4) for batch in loader] for loader in loaders]
    each = 6 // ranks
    return [sorted(n for stream in streams for n in stream[u * each : (u + 1) * each]) for u in range(updates)]


def test_an_update_takes_the_same_samples_on_any_world() -> None:
    wanted = samples_of_updates(1, 12)
    assert len(set(wanted[0])) == 6
    assert all(samples_of_updates(ranks, 12) == wanted for ranks in (2, 3, 6))


def save_then_load_with_another_batch(folder: str) -> str:
    from anywhere import CONFIG, make_engine

    config = {key: CONFIG[key] for key in CONFIG if key != "train_batch_size"}
    engine, _ = make_engine(config)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, _ = make_engine(config | {"gradient_accumulation_steps": 2})
    engine.load_checkpoint(folder)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"
    try:
        engine.load_checkpoint(folder)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["TORCHELASTIC_MAX_RESTARTS"]
        engine.destroy()
    return ""


def test_a_world_that_silently_changes_the_batch_is_refused_where_ranks_restart(tmp_path: Path) -> None:
    for text in run_ranks(save_then_load_with_another_batch, 2, str(tmp_path)):
        assert "trained with updates of 4 samples, and 2 ranks now take 8; set train_batch_size to 4" in text


def test_restarts_are_known_from_the_launcher() -> None:
    assert may_restart({"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert not may_restart({"TORCHELASTIC_MAX_RESTARTS": "0"})
    assert not may_restart({})
