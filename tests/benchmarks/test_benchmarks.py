"""The benchmarks run, their variants learn the same, and what fails is said."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cases import CASES, batch_of, make_model
from harness import on_ranks, run_command, run_ranks
from page import case_table, differing, offload_table, ratios, spans_table, write
from ranks import RunFailed, run
from variants import VARIANTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = [
    name for name, variant in VARIANTS.items() if variant.family in ("torch", "ZeroMesh") and variant.backend is None
]


def losses(name: str, case_name: str, steps: int) -> list[float]:
    case = CASES[case_name]
    step, engine = VARIANTS[name].make(case, make_model(case), torch.device("cpu"))
    tokens = batch_of(case, VARIANTS[name].whole, dist.get_rank(), dist.get_world_size())
    found = torch.stack([step(tokens).detach() for _ in range(steps)])
    dist.all_reduce(found)
    if engine is not None:
        engine.destroy()
    return (found / dist.get_world_size()).tolist()


# A loss is eight times the largest logit. A logit has some 27 roundings on its way in bf16, which are of either sign
# and add up to five or six unit roundoffs of it: less than one of the loss.
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [pytest.param("tiny-fp32", 1e-5, marks=pytest.mark.full), ("tiny-clip", 1e-5), ("tiny-bf16", 2**-8)],
)
@on_ranks(2, timeout=120)
def test_all_variants_of_a_case_have_the_same_losses(case: str, tolerance: float) -> None:
    found = {name: losses(name, case, 6) for name in OURS}
    for name in OURS:
        assert found[name] == pytest.approx(found["DDP"], rel=tolerance), name
    assert found["DDP"][-1] < found["DDP"][0]


@pytest.mark.full
def test_clipping_is_seen_in_the_losses() -> None:
    clipped, free = (run_ranks(losses, 2, "DDP", case, 6)[0] for case in ("tiny-clip", "tiny-fp32"))
    assert clipped != pytest.approx(free, rel=1e-4), "else the test above would not see whether a variant clips"


@on_ranks(2)
def test_the_floor_does_not_learn() -> None:
    first, second = losses("floor", "tiny-fp32", 2)
    assert first == second


PROGRAMS = {
    "products of bf16 in fp32 are torch's, rounded once": """
import torch, products
from torch.nn import functional as F

def results(dtype):
    torch.manual_seed(0)
    given = [torch.randn(2, 5, 600), torch.randn(700, 600), torch.randn(2, 3, 40, 8)]
    x, weight, heads = (tensor.bfloat16().to(dtype).requires_grad_() for tensor in given)
    linear, attention = F.linear(x, weight), F.scaled_dot_product_attention(heads, heads * 2, heads + 1, is_causal=True)
    linear.backward(torch.ones_like(linear) / 4)
    attention.backward(torch.ones_like(attention))
    return [linear, attention, x.grad, weight.grad, heads.grad]

expected, usual = results(torch.float32), results(torch.bfloat16)
products.replace()
assert all(map(torch.equal, expected, results(torch.float32)))
found = results(torch.bfloat16)
# Roundings to bf16: of products; of probabilities, too, their products and the result; and of the gradients of three
# factors, of which each has the probabilities' or theirs, and that are summed in two steps. Both results have as many.
for wide, narrow, other, roundings in zip(expected, found, usual, (1, 3, 1, 1, 8), strict=True):
    assert narrow.dtype is torch.bfloat16
    limit = 2 * roundings * 2**-8 * float(wide.detach().abs().max())
    torch.testing.assert_close(narrow.float(), other.float(), rtol=0, atol=limit)
assert all(torch.equal(found[index], expected[index].bfloat16()) for index in (0, 3)), "rounded once"
a, b = torch.randn(30, 400).bfloat16(), torch.randn(400, 50).bfloat16()
into = a.new_empty(30, 50)
assert torch.mm(a, b, out=into) is into
assert torch.equal(into, a @ b), "also where the caller has memory for it"
assert torch.equal(into, (a.float() @ b.float()).bfloat16())
""",
    "blocks below the limit are not counted": """
import torch
from heap import Heap

torch.empty(100_000)
heap = Heap(65536)
before = heap.live()
small = [torch.empty(40_000, dtype=torch.uint8) for _ in range(50)]
after = heap.live()
large = torch.empty(1_000_000, dtype=torch.uint8)
assert abs(after - before) < 300_000, "of the 2,000,000 bytes in small blocks"
assert 1_000_000 <= heap.live() - after <= 1_020_000
""",
}


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="one asks glibc")
@pytest.mark.parametrize("name", PROGRAMS)
def test_tools_that_change_their_process_do_as_they_say(name: str) -> None:  # torch's kernels; the limit of malloc
    done = run_command([sys.executable, "-c", PROGRAMS[name]], cwd=BENCHMARKS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "limit", "message"),
    [
        ("echo one; exec sleep 60", 0.5, "rank 0 took too long\none"),
        ("if [ $RANK = 1 ]; then echo two; exit 3; fi; exec sleep 60", 60.0, "rank 1 ended with status 3\ntwo"),
    ],
)
def test_all_ranks_of_a_run_that_fails_are_ended(tmp_path: Path, script: str, limit: float, message: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/$RANK.pid"\n{script}\n')
    python.chmod(0o755)
    with pytest.raises(RunFailed, match=f"^{message}$"):
        run(python, 2, {}, {}, limit)
    for rank in (0, 1):
        file = tmp_path / f"{rank}.pid"
        if file.exists() and file.read_text():  # it may have been ended before it wrote it
            with pytest.raises(ProcessLookupError):
                os.kill(int(file.read_text()), 0)
    with pytest.raises(RunFailed, match="there is no .*/missing/bin/python"):
        run(tmp_path / "missing" / "bin" / "python", 2, {}, {}, 1.0)


FAKE = """
import torch

def init_distributed(verbose):
    assert torch.distributed.is_initialized()

def initialize(model, model_parameters, config):
    stage, sizes = config["zero_optimization"]["stage"], config["zero_optimization"]
    if stage == 2:
        raise RuntimeError("there is no stage 2 in this one")
    assert config["gradient_clipping"] == 0.0 and sizes["reduce_bucket_size"] == 4_000_000
    return Engine(torch.nn.parallel.DistributedDataParallel(model), config["optimizer"]["params"]), None, None, None

class Engine:
    def __init__(self, model, settings):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), **settings)

    def __call__(self, *inputs):
        return self.model(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("benchmark")
    home, out = folder / "fake", folder / "out"
    (home / "bin").mkdir(parents=True)
    out.mkdir()
    (home / "deepspeed.py").write_text(FAKE)
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{home}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (out / "README.md").write_text("# Pages\n\n<!-- the newest page comes first -->\n- [an older one](old.md)\n")
    names = ["floor", "ZeroMesh 3", "DeepSpeed 1", "DeepSpeed 2"]
    options = ["--cases", "tiny-fp32", "--rounds", "1", "--ranks", "2", "--limit", "100"]
    command = [sys.executable, BENCHMARKS / "bench.py", *options, "--out", out, "--deepspeed", home, "--variants"]
    return out, run_command([*command, *names], timeout=280).stdout


def result(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.full
def test_one_command_measures_everything(benchmark: tuple[Path, str]) -> None:
    out, printed = benchmark
    found = result(out)
    rows = found["cases"]["tiny-fp32"]["rows"]
    assert found["versions"]["torch"] == torch.__version__
    for name in ("floor", "ZeroMesh 3", "DeepSpeed 1"):
        (figures,) = rows[name]["rounds"]
        assert len(figures["times"]) == 2
        assert min(figures["times"]) > 0
        assert figures["cpu"] > 0
        assert figures["first"] > 0
        assert rows[name]["peak"] > 0
        assert f"round 1 of 1: {name}: " in printed
        assert figures["wire"] < 1000 if name == "floor" else figures["wire"] > 100_000
    assert rows["ZeroMesh 3"]["rounds"][0]["losses"] == pytest.approx(
        rows["DeepSpeed 1"]["rounds"][0]["losses"], rel=1e-5
    )
    assert rows["ZeroMesh 3"]["spans"]["inside"]["step"]["update"] > 0
    assert [name for name, row in rows.items() if row["spans"] is not None] == ["ZeroMesh 3"]
    assert "DeepSpeed 2 does not run: RuntimeError: there is no stage 2 in this one" in printed
    assert "there is no stage 2 in this one" in rows["DeepSpeed 2"]["error"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["ZeroMesh 3", "ZeroMesh tensor parallel", "ZeroMesh pipeline, 1f1b"])
def test_a_row_runs_on_ranks_of_mpiexec(name: str) -> None:
    job = {"variant": f"{name}, mpi", "case": "tiny-fp32", "watch": "time", "backend": "mpi", "steps": 2}
    figures = run(Path(sys.executable), 2, job, {}, 100)
    assert figures["losses"] == pytest.approx(run_ranks(losses, 2, name, "tiny-fp32", 3)[0], rel=1e-6)
    assert figures["wire"] is None  # what goes through memory is not counted
    with pytest.raises(RunFailed, match="KeyError: 'none such'"):
        run(Path(sys.executable), 2, {**job, "case": "none such"}, {}, 100)


@pytest.mark.full
def test_the_page_has_the_tables_and_the_picture_and_is_linked(benchmark: tuple[Path, str]) -> None:
    out, _ = benchmark
    (path,) = out.glob("*.json")
    text, case = path.with_suffix(".md").read_text(), result(out)["cases"]["tiny-fp32"]
    failed = "| DeepSpeed 2 | failed, see below |"
    for part in (case_table(case), ratios(result(out)), spans_table(case), f"]({path.stem}.png)", failed):
        assert part in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    links = [f"- [{path.stem}.md]({path.stem}.md): tiny-fp32; ", "- [an older one](old.md)"]
    lines = (out / "README.md").read_text().splitlines()[-2:]
    assert [line.startswith(link) for line, link in zip(lines, links, strict=True)] == [True, True]
    before = (out / "README.md").read_text()
    assert write(path) == path.with_suffix(".md")
    assert (out / "README.md").read_text() == before, "a page that is made again is not linked again"


@pytest.mark.parametrize(("last", "differs"), [(5.0, False), (5.001, False), (5.1, True), (float("nan"), True)])
def test_losses_that_differ_too_much_are_marked(last: float, differs: bool) -> None:
    def row(*losses: float) -> dict[str, Any]:
        figures = {"times": [1.0], "losses": list(losses), "wire": None, "cpu": 1.0, "first": 2.0}
        return {"rounds": [figures], "peak": None, "spans": None, "error": None}

    case = {"rows": {"DDP": row(6.0, 5.0), "ZeroMesh 1": row(6.0, last)}, "settings": {"tolerance": 1e-3}}
    assert differing(case, "ZeroMesh 1") is differs
    assert ("too much" in case_table(case)) is differs


def test_the_cost_of_the_host_is_compared_round_by_round() -> None:
    def row(*times: float, error: str | None = None) -> dict[str, Any]:
        return {"rounds": [{"times": [time]} for time in times], "error": error}

    rows = {
        "ZeroMesh 2": row(1.0, 2.0, 4.0), "ZeroMesh 2, host": row(1.1, 1.8, 6.0),
        "ZeroMesh 3, host": row(1.0, 1.0, 1.0), "DeepSpeed 2": row(error="no"),
        "DeepSpeed 2, CPU offload": row(1.0, 1.0, 1.0), "DDP": row(3.0, 3.0, 3.0),
    }  # fmt: skip
    (line,) = offload_table({"rows": rows}).splitlines()[2:]
    assert line == "| ZeroMesh 2, host | 1.100 (0.900 - 1.500) |", "those whose neighbour is there"
    assert offload_table({"rows": {"DDP": rows["DDP"]}}) == ""


def measure(script: str, folder: Path, *options: str, status: int | None = 0) -> tuple[dict[str, Any], str]:
    """Run a benchmark; its figures, and its page, which must be linked."""
    (folder / "README.md").write_text("# Pages\n\n<!-- the newest page comes first -->\n")
    done = run_command([sys.executable, BENCHMARKS / script, "--out", folder, *options], timeout=240)
    assert status is None or done.returncode == status, done.stdout
    pages = [page for page in folder.glob("*.md") if page.name != "README.md"]
    assert all(f"]({page.name})" in (folder / "README.md").read_text() for page in pages)
    return result(folder) | {"status": done.returncode}, pages[0].read_text() if pages else done.stdout


@pytest.mark.full
def test_the_checkpoint_benchmark_measures_saving_and_loading(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--rounds", "1", "--folder", tmp_path / "speed"]
    printed = run_command([sys.executable, BENCHMARKS / "checkpoint_speed.py", *options], timeout=240).stdout
    assert {"zeros:", "save:", "load:"} <= {line.split()[0] for line in printed.splitlines() if line}
    assert not (tmp_path / "speed").exists()
    printed = run_command([sys.executable, BENCHMARKS / "checkpoint_speed.py", *options, "--every", "3"]).stdout
    assert {"none:", "blocking:", "asynchronous:"} <= {line.split()[0] for line in printed.splitlines() if line}
    assert not (tmp_path / "speed").exists()


@pytest.mark.full
def test_collectives_of_gloo_mpi_and_memory_are_measured_side_by_side(tmp_path: Path) -> None:
    found, printed = measure("collectives.py", tmp_path, "--ranks", "2", "--rounds", "2", "--sizes", "4096")
    assert {(row["backend"], len(row["ms"])) for row in found["rows"]} == {("gloo", 20), ("mpi", 20), ("memory", 20)}
    assert all(min(row["ms"]) > 0 for row in found["rows"])
    for collective in ("all-gather", "all-to-all", "reduce-scatter", "all-reduce"):
        assert f"| {collective}, torch's call | " in printed


@pytest.mark.full
def test_the_memory_of_tensor_parallelism_falls_with_the_number_of_ranks(tmp_path: Path) -> None:
    options = ["--case", "communication-bf16", "--sizes", "1", "2", "--updates", "1"]
    found, _ = measure("tensor_memory.py", tmp_path, *options)
    for key in ("whole", "sequence"):
        one, two = found[key]["1"], found[key]["2"]
        for state in ("parameter", "gradient", "optimizer", "counted"):
            assert two[state] / one[state] == pytest.approx(1 / 2, rel=0.02), (key, state)
        for ranks in (one, two):  # measured: 1.6 % below on one rank, 0.4 % above on two
            assert ranks["heap"] == pytest.approx(ranks["counted"], rel=0.03), key
        assert one["optimizer"] == pytest.approx(12 * found["parameters"], rel=1e-3)


@pytest.mark.full
def test_stages_that_sleep_hold_what_the_table_says_and_have_a_page(tmp_path: Path) -> None:
    names = ["1f1b", "zb-h1", "zb-v", "search"]
    options = ["--ranks", "2", "--microbatches", "3", "--milliseconds", "1", "--rounds", "1", "--schedules", *names]
    found, text = measure("pipeline_bubble.py", tmp_path, *options, status=None)
    rows = found["rows"]
    assert [(row["name"], row["equal"]) for row in rows] == [(name, equal) for equal in (True, False) for name in names]
    for row in rows:
        assert row["held"] == row["held_by_table"], row["name"]
        assert row["seconds"] > 0 < row["predicted"]
    assert [row["held"] for row in rows[:3]] == [[2, 1], [2, 2], [4, 4]]
    assert [row["formula"] for row in rows[:3]] == pytest.approx([1 / 3, 1 / 9, 0.0])
    missed = any(row["missed"] for row in rows)  # so short sleeps are hardly longer than what is around them
    assert found["status"] == missed
    assert ("**All targets are met.**" in text) is not missed
    assert text.count("| unequal |") == text.count("| equal |") == len(names)
    (picture,) = tmp_path.glob("*.svg")
    assert f"]({picture.name})" in text
    assert picture.read_text().startswith("<svg")


@pytest.mark.full
def test_ways_to_a_disk_are_measured_and_have_a_page(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path), "--megabytes", "4", "--rounds", "1", "--depth", "2", "--blocks", "512"]
    found, _ = measure("nvme.py", tmp_path, *options, "--depths", "1", "2")
    names = [row["name"] for row in found["ways"]]
    assert names[:3] == ["dd, one process", "dd, 2 processes", "threads, direct"]
    assert names[-1] == "store"
    for row in found["ways"]:
        assert all(row[mode][0]["rate"] > 0 for mode in ("read", "write", "both")), row["name"]
    assert [(row["block"], row["depth"]) for row in found["sweep"]] == [(1 << 19, 1), (1 << 19, 2)]
    assert not list(tmp_path.glob("*.swap"))
