"""``make gpu``: its steps end in time, resume and fail one by one; the rehearsal runs all of them on the CPU."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zipfile import ZipFile

import pytest
import torch

import gpu
import gpu_experts
import gpu_masks
import gpu_page
import gpu_steps
import gpu_train
from gpu import DONE, FAILED, GRACE_SECONDS, LATE, LEFT_OUT, NO_ROOM, PAGE_SECONDS, STEPS, WRONG, Results, Run, Step
from harness import run_command
from zeromesh.parallel.context.pair_rules import RulePairs
from zeromesh.shard.store.link import CopyStreams

PROGRAM = """
import json, os, sys, time
from pathlib import Path
job = json.loads(sys.argv[1])
with open(job["options"]["log"], "a") as file:
    print(job["options"]["do"], job["share"], file=file)
found = {"status": "done", "here": job["options"]["do"]}
match job["options"]["do"]:
    case "crash":
        print("a crash")
        sys.exit(3)
    case "sleep":
        Path(job["out"]).write_text(json.dumps({"build": 1.5}))
        time.sleep(60)
    case "kill":
        os.kill(os.getpid(), 9)
    case "shrink" if job["share"] == 1.0:
        found = {"status": "out of memory", "message": "too large", "layers": 9}
Path(job["out"]).write_text(json.dumps(found))
"""
MINUTE = 1.0
SHORT = (GRACE_SECONDS + 1.0) / 60  # a second


@pytest.fixture
def steps(tmp_path: Path) -> list[Step]:
    """Return steps that end in every way."""
    names = {"crash": MINUTE, "sleep": SHORT, "kill": MINUTE, "shrink": MINUTE, "plain": MINUTE}
    return [Step(name, "train", minutes, {"do": name, "log": str(tmp_path / "log")}) for name, minutes in names.items()]


def call(steps: list[Step], results: Path, minutes: float = 60.0, again: bool = False) -> list[str]:
    """Run the steps as one call of the command does, and return the names of those that are left."""
    run = Run(steps, Results(results, again), False, minutes, None, {})
    run.program = [sys.executable, "-c", PROGRAM]
    return [step.name for step in run.all()]


def began(tmp_path: Path) -> list[str]:
    """Return what the steps' processes were told, in order."""
    return (tmp_path / "log").read_text().splitlines()


def test_each_step_ends_by_itself_and_a_repeated_call_goes_on(steps: list[Step], tmp_path: Path) -> None:
    results = tmp_path / "2026-01-02-gpu.jsonl"
    assert call(steps, results, 0.9) == ["crash", "kill", "shrink", "plain"], "they may take longer than there is time"
    assert began(tmp_path) == ["sleep 1.0"]
    assert call(steps, results) == []
    rows = Results(results).rows
    assert {name: row["status"] for name, row in rows.items()} == {
        "sleep": LATE, "crash": FAILED, "kill": NO_ROOM, "shrink": DONE, "plain": DONE,
    }  # fmt: skip
    assert rows["sleep"]["build"] == 1.5, "what it had found until then"
    assert (rows["crash"]["message"], rows["crash"]["log"]) == ("ended with status 3", "a crash")
    assert [one["status"] for one in rows["shrink"]["tries"]] == [NO_ROOM, DONE]
    shares = [f"kill {share}" for share in gpu.SMALLER]
    assert began(tmp_path)[1:] == ["crash 1.0", *shares, "shrink 1.0", "shrink 0.92", "plain 1.0"]

    text = (tmp_path / "2026-01-02-gpu.md").read_text()
    for line in ("| crash | failed: ended with status 3 |", "| plain | done |", "```text\na crash\n```"):
        assert line in text

    before = began(tmp_path)
    assert call(steps, results) == []
    assert began(tmp_path) == before, "what has a result is not run again"
    steps[-1] = replace(steps[-1], options={**steps[-1].options, "more": 1})
    assert call(steps, results) == []
    assert began(tmp_path) == [*before, "plain 1.0"], "unless its options are others"


def test_a_step_that_ends_the_whole_call_is_not_tried_for_ever(steps: list[Step], tmp_path: Path) -> None:
    path, step = tmp_path / "gpu.jsonl", steps[-1]
    results, job = Results(path), step.job(False)
    results.add({"step": step.name, "job": job, "started": 1.0})
    assert path.read_text().count("\n") == 1
    path.write_text(path.read_text() + '{"step": "plain", "st')  # a call that was killed as it wrote
    Results(path).add({"step": step.name, "job": job, "started": 2.0})
    assert call([step], path) == []
    row = Results(path).rows["plain"]
    assert (row["status"], row["message"]) == (
        FAILED,
        "the whole call ended 2 times while it ran; --again tries it once more",
    )
    assert not (tmp_path / "log").exists()
    assert call([step], path, again=True) == []
    assert Results(path).rows["plain"]["status"] == DONE
    assert call([step], path, again=True) == []
    assert began(tmp_path) == ["plain 1.0"]


def test_the_steps_of_one_gpu_take_at_most_90_minutes_in_calls_of_9() -> None:
    assert sum(step.minutes for step in STEPS if step.gpus <= 1) <= 90
    assert max(step.minutes for step in STEPS) + PAGE_SECONDS / 60 <= 9
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert {step.work for step in STEPS} == gpu_steps.WORK.keys() == gpu.SMALL.keys()


def row(name: str, flops: float, **more: Any) -> dict[str, Any]:
    """Return the result of a training step."""
    base = {"step": name, "status": DONE, "job": {"gpus": 1}, "flops": flops, "parameters": 8e9, "layers": 32}
    planned = {"device": 2**30, "host": 0, "seconds": 2.0}
    rest = {"tokens": 8192, "seconds_per_update": 2.5, "planned": planned, "device_peak": 2**31, "losses": [2.0, 1.0]}
    return {**base, **rest, "states": {"optimizer": {"host": 2**32}}, **more}


FINISHED: dict[str, Any] = {"status": DONE, "job": {"gpus": 1}}
MASKS = [
    {"mask": name, "pairs": pairs, "seconds": seconds, "whole": torch_seconds, "prepared": 5e-4,
     "differences": {"bfloat16": [difference, 0.1]}}
    for name, pairs, seconds, torch_seconds, difference in [
        ("causal", 0.5, 0.02, None, 1e-3), ("window", 0.06, 0.005, 0.04, 2e-3),
    ]
]  # fmt: skip
EXPERTS = [
    {"case": "on the device", "share": 0.1, "seconds": 0.2, "least": 0.1, "most": 0.3, "device_peak": 2**35},
    {"case": "at rest", "share": 1.0, "seconds": 0.9, "least": 0.8, "most": 1.0, "device_peak": None},
]


def test_the_page_compares_figures_with_aims_and_says_if_it_has_no_pictures(tmp_path: Path) -> None:
    speed, large = "8 K, 4 samples, all states on the host", "all on the device"
    rows = [
        row(speed, 399e12, note="With a note.", norm={"expected": 3.0, "engine": 3.0, "clip": 1.0}),
        row(large, 460e12, parameters=20.5e9), row("eager", 400e12),
        row("compiled blocks", 464e12, kernels={"triton_fused__scaled_mm": 0.002, "nvjet": 0.003}),
        {"step": "compiled blocks, float8", "status": LEFT_OUT, "message": "no | key", "job": {"gpus": 1}},
        {"step": "trace", "status": DONE, "job": {"gpus": 1}, "rows": {"device": TRACE}},
        row("saved tensors: auto, 28 GB", 384e12), {"step": "masks, one rank", "rows": MASKS, **FINISHED},
        {"step": "experts at rest", "rows": EXPERTS, "parameters": 2e9, "differences": {"at rest": 0.01}, **FINISHED},
    ]  # fmt: skip
    results = tmp_path / "2026-01-02-gpu.jsonl"
    results.write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "README.md").write_text("<!-- the newest page comes first -->\n")
    found, groups = Results(results).rows, [(step.name, step.group) for step in STEPS]
    with patch.object(gpu_page, "draw", side_effect=ImportError):
        text = gpu_page.write(results, found, groups).read_text()
    for line in (
        "no pictures: matplotlib is not installed",
        "| Llama 3 8B, states on the host, 8 K: TFLOP/s | 400 | 399 | **no** |",
        "| a model of 20 billion parameters or more: TFLOP/s | 450 | 460 | yes |",
        "| compiled blocks beside eager ones | 15.0% | 16.0% | yes |",
        "| float8 beside 16 bits, compiled | 28.0% | - | not measured |",
        "| compiled blocks, float8 | left out: no / key | - |",
        f"*{speed}*: With a note.",
        "| compiled blocks | 2 | 0 | 3 | 0 | 0 |",
        "| device | update_on_host blocks.0 | 0 | 0 |",
        "| 8,192 | 2.5 (2.00) | 3277 | 399 | - | 2.0 (1.0) | 4.0 (0.0) | 1.0000 |",
        "the engine's norm is 3, that of all gradients in float64 3; the limit is 1",
        "| device | 0.00014 | 60.7% | 8e-05 | 44% | cudaEventSynchronize |",
        "| moves and recomputation by plan, beside all kept | -5.0% | -4.0% | yes |",
        "| window | 0.12 | 5 | 0.25 | 40 | 0.5 | 2.0e-03 |",
        "| causal | 1.00 | 20 | 1.00 | - | 0.5 | 1.0e-03 |",
        "2 G parameters of experts in bf16, with AdamW; other experts in each step",
        "| 10% | 0.2, 0.1 to 0.3 (32.0) | - |",
        "| 100% | - | 0.9, 0.8 to 1 (-) |",
    ):
        assert line in text, line
    assert f"[{results.stem}.md]" in (tmp_path / "README.md").read_text()
    text = gpu_page.write(results, found, groups).read_text()
    for ending in (gpu_page.BARS, gpu_page.LANES):
        assert f"]({results.stem}{ending})" in text
        assert (tmp_path / f"{results.stem}{ending}").read_bytes().startswith(b"\x89PNG")


def event(name: str, cat: str, begin: float, length: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": length, "tid": thread}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    event("all", "user_annotation", 100, 140),
    event("the backward", "user_annotation", 100, 50),
    event("all", "gpu_user_annotation", 90, 5),
    event("cudaStreamSynchronize", "cuda_runtime", 90, 5),
    event("cudaMemcpyAsync", "cuda_runtime", 110, 1),
    event("cudaLaunchKernel", "cuda_runtime", 112, 1),
    event("cudaEventSynchronize", "cuda_runtime", 120, 1),
    event("cudaEventSynchronize", "cuda_runtime", 121, 1, thread=2),  # as of updates that begin early
    event("cudaDeviceSynchronize", "cuda_runtime", 150, 90),
    event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 120, 40),
    event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 120, 40),
    event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 200, 40),
    event("before", "kernel", 95, 4),
    event("one", "kernel", 110, 20),
    event("inside of it", "kernel", 112, 3),
    event("overlapping", "kernel", 125, 10),
    event("another", "kernel", 190, 15),
    event("zeromesh.update_on_host blocks.0", "user_annotation", 150, 35),
    event("one", "kernel", 222, 15),
]
TRACE = gpu_train.look(EVENTS, "cuda")


def test_a_trace_tells_what_blocks_and_what_runs_beside_what() -> None:
    found = TRACE
    assert found["seconds"] == pytest.approx(140e-6)
    assert found["idle"] == pytest.approx(1 - (25 + 15 + 15) / 140)
    assert found["blocking"] == ["cudaEventSynchronize"]
    assert (found["copied"], found["beside kernels"]) == (pytest.approx(80e-6), pytest.approx((15 + 5 + 15) / 80))
    assert found["kernels"]["one"] == pytest.approx(35e-6)
    assert found["host"] == [["update_on_host blocks.0", pytest.approx(50e-6), pytest.approx(35e-6)]]
    lane, width = found["lanes"]["copies to the host"], 140 / gpu_train.BINS
    assert sum(lane) * width == pytest.approx(40, abs=0.001 * gpu_train.BINS * width)
    assert lane[int(19 / width)] == 0.0
    assert lane[int(40 / width)] == 1.0


def test_a_slow_copy_leaves_nan_in_its_target_until_it_runs() -> None:
    source, target, seen = torch.arange(3.0), torch.zeros(3), []
    streams = object.__new__(gpu_steps.SlowStreams)
    with patch.object(torch.cuda, "_sleep", lambda cycles: seen.append(target.clone())):
        streams.copy(contextlib.nullcontext(), target, source)
    assert isinstance(streams, CopyStreams)
    assert torch.isnan(seen[0]).all()
    assert torch.equal(target, source)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), NO_ROOM),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), NO_ROOM),
        (RuntimeError("8 bytes of host memory could not be page-locked (CUDA error 2); set"), NO_ROOM),
        (OSError(12, "Cannot allocate memory"), NO_ROOM),
        (gpu_train.LeftOut("needs 2 GPUs"), LEFT_OUT),
        (ValueError("heads do not fit"), FAILED),
    ],
)
def test_a_step_without_room_is_told_from_one_that_failed(error: Exception, status: str) -> None:
    assert gpu_steps.outcome(error)["status"] == status


def planner(foresee: Callable[[int, float | None], dict[str, float]]) -> gpu_train.Planner:
    """Return a planner that foresees by a function."""
    found = object.__new__(gpu_train.Planner)
    found.foresee = lambda layers, ratio, timed=False: foresee(layers, ratio)  # type: ignore[method-assign]
    return found


def test_the_largest_model_and_the_ratio_follow_from_the_memory_of_small_ones() -> None:
    one = planner(lambda layers, ratio: {"device": 7 + 10 * layers, "host": 0})
    assert one.largest(None, {"device": 107, "host": 1}) == (10, None)
    assert one.largest(None, {"device": 106, "host": 1}) == (9, None)
    assert one.largest(None, {"device": 16, "host": 1}) == (0, None)
    # Of 16 per block the host takes a share: most fit where both are full, at 20 blocks and a ratio of 0.5.
    two = planner(
        lambda layers, ratio: {"device": 16 * layers * (1 - (ratio or 0)), "host": 16 * layers * (ratio or 0)}
    )
    assert two.largest([0.25, 0.5, 0.75], {"device": 160, "host": 160}) == (20, 0.5)
    # A ratio is rounded to whole units, so that the last blocks may not fit after all.
    three = planner(lambda layers, ratio: {"device": 10 * layers + (3 if layers > 6 else 0)})
    assert three.largest(None, {"device": 100}) == (9, None)


def test_a_model_is_left_out_with_the_memory_that_it_takes(tmp_path: Path) -> None:
    (step,) = [step for step in STEPS if step.name.startswith("8 K, 4 samples")]
    job = {**step.job(True), "share": 1.0, "folder": str(tmp_path), "device": "cpu"}
    options = {**job["options"], "room": {"host": 1e6}}
    with pytest.raises(
        gpu_train.LeftOut, match=r"^takes 1.67 MB \(host\), and this machine has room for 1.00 MB \(host\)$"
    ):
        gpu_train.choose(options, job)
    assert gpu_train.choose({**options, "room": {"host": 1.7e6}}, job)["layers"] == 2


def small(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options and job of a step's rehearsal."""
    (step,) = [step for step in STEPS if step.name == name]
    job = {**step.job(True), "share": 1.0, "folder": str(folder), "device": "cpu", "out": str(folder / "out.json")}
    return job["options"], job


@pytest.mark.parametrize("wrong", [False, True])
def test_each_mask_is_compared_with_torch(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, job = small("masks, one rank", tmp_path)
    group = SimpleNamespace(rank=0, size=1)
    monkeypatch.setattr(gpu_masks, "Mesh", lambda *_: SimpleNamespace(group=lambda axis: group))
    if wrong:  # pairs of the first rule only
        monkeypatch.setattr(gpu_masks, "RulePairs", lambda rules, *more: RulePairs(rules[:1], *more))
    found = gpu_masks.masks(options, job)
    pairs = [one["pairs"] for one in found["rows"]]
    assert pairs == pytest.approx([257 / 512, 0.0607, 0.0958, 0.5327, 0.75], abs=1e-3)
    for one in found["rows"]:
        bad = wrong and one["mask"] in ("window of 1/16", "documents")  # which have two
        assert bad == (one["differences"]["float32"][0] > 1e-5) == any(one["mask"] in text for text in found["wrong"])
        assert min(one["seconds"], one["whole"]) > 0


def test_experts_train_in_each_place_to_the_same_weights(tmp_path: Path) -> None:
    options, job = small("experts at rest", tmp_path)
    found = gpu_experts.experts(options, job)
    assert found["wrong"] == []
    assert found["differences"] == dict.fromkeys([*gpu_experts.CASES][1:], 0.0), "a CPU computes the same bits"
    assert [(one["case"], one["share"]) for one in found["rows"]] == [
        (case, share) for case in gpu_experts.CASES for share in (1.0, 0.25)
    ]
    with pytest.raises(gpu_train.LeftOut, match=r"^takes 221 kB \(host\), and this machine has room for 1.00 kB"):
        gpu_experts.experts({**options, "room": {"host": 1e3}}, job)


@pytest.mark.full
@pytest.mark.timeout(1200)  # some forty steps, each in processes of its own
def test_the_rehearsal_runs_every_step_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(gpu.ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--out", tmp_path]
    done = run_command([*command, "--date", "2026-01-02"], timeout=1200)
    assert done.returncode == 0, done.stdout
    rows = Results(tmp_path / "2026-01-02-gpu-rehearsal.jsonl").rows
    assert {name: one["status"] for name, one in rows.items()} == {step.name: DONE for step in STEPS}
    largest = [rows[step.name] for step in STEPS if step.group == "largest"]
    assert min(one["layers"] for one in largest) > 1
    for one in (one for one in rows.values() if "flops" in one):
        on_host = sum(tiers.get("host", 0) for tiers in one["states"].values())
        assert on_host == pytest.approx(one["planned"]["host"], rel=0.05, abs=1000), one["step"]
    text = (tmp_path / "2026-01-02-gpu-rehearsal.md").read_text()
    assert "A rehearsal on the CPU" in text
    assert "**no**" not in text.split("## Numerics")[1]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".md", ".png", ".png"]


def test_a_step_writes_its_status_beside_the_figures_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (step,) = [step for step in STEPS if step.name == "numerics, one rank, nccl"]
    job = {**step.job(True), "out": str(tmp_path / "out.json")}
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", json.dumps(job)])
    monkeypatch.setattr(os, "_exit", lambda status: None)

    def told(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        monkeypatch.setattr(gpu_steps, "launch", lambda *_: [work()])
        gpu_steps.main()
        found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return found

    def ends_early() -> dict[str, Any]:
        gpu_train.tell(job, {"build": 1.5})
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nand more")

    wrong = told(lambda: {"rows": [1], "wrong": ["stage 3 in bf16"]})
    assert (wrong["status"], wrong["message"], wrong["rows"]) == (WRONG, "checks fail: stage 3 in bf16", [1])
    assert told(lambda: {"wrong": []})["status"] == DONE
    assert told(ends_early) == {"build": 1.5, "status": NO_ROOM, "message": "CUDA out of memory. Tried"}


def test_a_missing_package_is_told_before_any_step_and_wheels_are_unpacked(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "torch-1-py3-none-any.whl", "w") as archive:
        archive.writestr("torch/__init__.py", "raise ImportError('this torch is from a wheel')")
    out = tmp_path / "out"
    done = run_command([sys.executable, gpu.__file__, "--rehearse", "--out", out, "--wheels", tmp_path])
    assert (done.returncode, "ImportError: this torch is from a wheel: the steps need it" in done.stdout) == (1, True)
    assert not list(out.iterdir())
