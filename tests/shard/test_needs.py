"""What rests off the device is known to the byte before the start, and is refused where there is no room for it."""

import re
from typing import Any

import pytest
import torch

from harness import run_ranks
from test_tiers import HOST, start, update
from zeromesh.base.placement import Tier
from zeromesh.shard.store.budget import require_host_memory

PLACES: dict[str, dict[str, Any]] = {
    "row 1": {"stage": 1, "offload_optimizer": HOST},
    "row 3": {"stage": 3, "offload_optimizer": HOST},
    "half": {"stage": 3, "offload_optimizer": {**HOST, "ratio": 0.5}},
    "all": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    "early": {"stage": 3, "offload_optimizer": {**HOST, "update_during_backward": 0.5}, "offload_param": HOST},
    "split": {"stage": 3, "offload_optimizer": {**HOST, "split_master": True, "ratio": 0.5}, "offload_param": HOST},
    "early, files": {"stage": 2, "offload_optimizer": {"device": "nvme", "update_during_backward": 1.0}},
    "files": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "buffer_count": 2, "update_during_backward": 0.0},
        "offload_param": HOST,
    },
    "parameters in files": {"stage": 3, "offload_optimizer": HOST, "offload_param": {"device": "nvme"}},
    "all in files": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "buffer_count": 3},
        "offload_param": {"device": "nvme", "buffer_count": 2},
    },
}


def limits(name: str, folder: str, precision: dict[str, Any]) -> list[str]:
    places = PLACES[name].items()
    zero = {key: {**value, "nvme_path": folder} if isinstance(value, dict) else value for key, value in places}
    engine = start(zero, **precision)
    update(engine)
    report = engine.memory_report()
    on_host = [report[state].get("host", 0) for state in ("parameter", "gradient", "optimizer", "slot")]
    steps = sum(
        engine.optimizer.state[piece.parameter]["step"].nbytes
        for flat in engine.sharded.flats
        for _, _, piece in flat.pieces
        if flat.optimizer_tier is not Tier.DEVICE
    )
    both = int(
        engine.mesh.group("world").exchange(torch.tensor([float(sum(on_host) - steps)], dtype=torch.float64)).sum()
    )
    engine.destroy()
    said = []
    for less in (1, 0):
        try:
            start(zero, host_memory_limit=both - less, **precision).destroy()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"bf16": {"enabled": False}},
    "states in bf16": {"optimizer_state_dtype": {"exp_avg": "bf16"}},
}


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, precision) for name in PLACES for precision in PRECISIONS if name != "split" or precision != "fp32"],
)
def test_the_need_is_what_the_report_says_to_the_byte(name: str, precision: str, tmp_path: Any) -> None:
    for refused, taken in run_ranks(limits, 2, name, str(tmp_path), PRECISIONS[precision]):
        assert taken == ""
        assert "what is to rest in the host memory of this node takes" in refused
        assert "host_memory_limit is" in refused
    assert not list(tmp_path.iterdir())


GB = 10**9


@pytest.mark.parametrize(
    ("parts", "available", "limit", "text"),
    [
        (
            {"parameters": 14 * GB, "gradients": 14 * GB, "optimizer states": 84 * GB}, 96 * GB, None,
            r"takes 112 GB \(parameters 14.0 GB, gradients 14.0 GB, optimizer states 84.0 GB\), but 96.0 GB are "
            "available; "
            "offload_optimizer.ratio = 0.83 fits, .*; or offload_optimizer.device = nvme takes 28.0 GB .*; or spread",
        ),
        (
            {"optimizer states": 9 * GB, "next copies of optimizer states": 9 * GB}, 12 * GB, None,
            "but 12.0 GB are available; offload_optimizer.update_during_backward = 0 takes 9.00 GB; or ",
        ),
        ({"optimizer states": 9 * GB}, 96 * GB, 3 * GB, "but host_memory_limit is 3.00 GB; .*ratio = 0.33 fits"),
        (
            {"parameters": 9 * GB}, 3 * GB, 5 * GB,
            "but 3.00 GB are available; offload_param.device = nvme takes some buffers; or spread",
        ),
        (
            {"parameters": 9 * GB, "optimizer states": GB}, 3 * GB, None,
            "available; offload_param.device = nvme takes 1.00 GB and some buffers; or spread",
        ),
        (
            {"parameters": 14 * GB, "gradients": 2 * GB, "optimizer states": 84 * GB}, 10 * GB, None,
            "; offload_optimizer.device and offload_param.device = nvme take 2.00 GB and some buffers; or spread",
        ),
        ({"gradients": 9 * GB}, 3 * GB, None, "available; offload_optimizer.ratio = 0.33 fits, .*; or spread"),
        ({"buffers": 9 * GB}, 3 * GB, 5 * GB, "but 3.00 GB are available; take a machine with more memory"),
    ],
)  # fmt: skip
def test_the_error_says_what_would_fit(parts: dict[str, int], available: int, limit: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        require_host_memory(parts, available, limit)
    assert not re.search(r"ratio = (0;|1 |-)", str(error.value))
    require_host_memory(parts, sum(parts.values()), None)
    require_host_memory(parts, sum(parts.values()), sum(parts.values()))
