"""A device with a fifth of the memory that a model's states take: with states off it, the model trains there."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import FOLDERS, run_command
from test_tiers import Net

DEPTH = 36
TIMES = 5
STATES = 16
"""Bytes per parameter, of bf16 with Adam: parameter, gradient, master, two moments."""

SCRIPT = '''
import json, mmap, resource, sys
sys.path[:0] = {tests!r}
import torch
from zeromesh.base.placement import Tier
from zeromesh.shard.store import memory

torch.set_num_threads(1)
budget, zero = int(sys.argv[1]), json.loads(sys.argv[2])
on_device = memory.empty_on
mapped = []

def empty_on(tier, elements, dtype, device, pin=True):
    """What rests on the host lies in memory that Linux does not count as the process's data."""
    if tier is Tier.DEVICE or device.type != "cpu" or not elements:
        return on_device(tier, elements, dtype, device, pin)
    mapped.append(mmap.mmap(-1, elements * dtype.itemsize))
    return torch.frombuffer(mapped[-1], dtype=dtype)

memory.empty_on = empty_on  # before anybody else knows it
import zeromesh
from test_tiers import Net, start, update

update(start({{"stage": 3}}, depth=1))  # what libraries take once
if torch.cuda.is_available():
    free = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + budget) / free)
else:
    used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + budget, used + budget))
with zeromesh.zero.Init():
    model = Net({depth})
config = {{
    "train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": True}}, "units": ["Block"], "zero_optimization": zero,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
    "aio": {{"queue_depth": 1}},  # each thread's stack counts
}}
engine = zeromesh.initialize(model=model, config=config)[0]
losses = [update(engine, number) for number in range(3)]
print(json.dumps({{"losses": losses, "report": {{k: v for k, v in engine.memory_report().items() if k != "total"}}}}))
'''

HOST: dict[str, Any] = {"device": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"offload_optimizer": HOST, "offload_param": HOST},
    "host, early": {"offload_optimizer": {**HOST, "update_during_backward": 1.0}, "offload_param": HOST},
    "files": {"offload_optimizer": {"device": "nvme", "buffer_count": 2}, "offload_param": {"device": "nvme"}},
}


def train(folder: Path, budget: int, place: dict[str, Any]) -> Any:
    import json

    script = folder / "script.py"
    script.write_text(SCRIPT.format(tests=FOLDERS, depth=DEPTH))
    zero = {"stage": 3, **{key: {**section, "nvme_path": str(folder)} for key, section in place.items()}}
    # Else the C library keeps what was freed.
    return run_command(
        [sys.executable, script, str(budget), json.dumps(zero)], timeout=120, MALLOC_MMAP_THRESHOLD_="262144"
    )


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux" and not torch.cuda.is_available(), reason="the limit is Linux's, or CUDA's")
@pytest.mark.parametrize("place", ["host", *(pytest.param(p, marks=pytest.mark.full) for p in list(PLACES)[1:])])
def test_a_model_of_five_times_the_memory_of_the_device_trains(place: str, tmp_path: Path) -> None:
    budget = STATES * sum(parameter.numel() for parameter in Net(DEPTH).parameters()) // TIMES
    trained = train(tmp_path, budget, PLACES[place])
    assert trained.returncode == 0, trained.stdout
    assert "losses" in trained.stdout


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux" and not torch.cuda.is_available(), reason="the limit is Linux's, or CUDA's")
@pytest.mark.parametrize(
    "place", [{}, pytest.param({"offload_optimizer": HOST}, marks=pytest.mark.full)], ids=["device", "optimizer alone"]
)
def test_with_states_on_the_device_it_does_not(place: dict[str, Any], tmp_path: Path) -> None:
    """With the optimizer's alone on the host a fifth is needed for the parameters, and more."""
    budget = STATES * sum(parameter.numel() for parameter in Net(DEPTH).parameters()) // (TIMES + 4 * bool(place))
    failed = train(tmp_path, budget, place)
    assert failed.returncode != 0
    assert "memory" in failed.stdout
