import sys

from harness import run_command

HEAVY = [
    "matplotlib",
    "pydantic",
    "rich",
    "sympy",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "transformers",
    "typer",
]


def test_import_loads_nothing_heavy_that_torch_has_not_loaded() -> None:
    code = "import sys, torch; before = set(sys.modules); import zeromesh; print(*sorted(set(sys.modules) - before))"
    finished = run_command([sys.executable, "-W", "error", "-c", code])
    assert finished.returncode == 0, finished.stdout
    loaded = set(finished.stdout.split())
    assert "zeromesh" in loaded
    assert not loaded & set(HEAVY)
