import sys

import pytest

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


@pytest.mark.full
def test_a_run_of_a_dense_model_loads_nothing_of_experts() -> None:
    code = (
        "import sys, torch, zeromesh; config = {'train_batch_size': 2, 'optimizer': {'type': 'SGD'}}; "
        "model = torch.nn.Linear(2, 2); engine, *_ = zeromesh.initialize(model=model, config=config); "
        "engine.backward(engine(torch.ones(2, 2)).sum()); engine.step(); print(*sys.modules)"
    )
    finished = run_command([sys.executable, "-c", code])
    assert finished.returncode == 0, finished.stdout
    assert "zeromesh.engine.engine" in finished.stdout
    assert "zeromesh.parallel.expert" not in finished.stdout
