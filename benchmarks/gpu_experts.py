"""Step of ``gpu_steps.py`` on a mixture whose experts rest in host memory: its time over the share that is touched."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

import torch

import zeromesh
from experts_at_rest import Mixture, Sizes, batch
from gpu_train import Figures, LeftOut, Options, over, room, tell, told
from zeromesh.base.kernels.measure import synchronize
from zeromesh.base.machine import peak_bytes

HOST = {"device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "all on the device": {"zero_optimization": {"stage": 2}},
    "experts at rest": {"zero_optimization": {"stage": 2}, "experts": {"rest": "cpu"}},
    "ZeRO-3, all on the host": {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}},
}
BYTES = {"device": 18, "host": 18}  # at most, of a parameter, in the first case and in the last
# Of weights of the first layer, as the norm of the difference from those on the device over that of what was trained:
# gradients in bf16 are sums in another order, and AdamW's first steps are as long for a small gradient as for a large
# one. What is never updated differs by 1.
TOLERANCE = 0.2
MISSED = 2  # times over, each expert is touched before the steps that count: it has to miss as many steps as it will


def experts(options: Options, job: Options) -> Figures:
    """Train a mixture in bf16 with its experts in each place, on the same batches.

    Options are the ``sizes`` of the mixture, the ``shares`` of its experts that steps touch, and ``steps`` that count.
    """
    device, sizes = torch.device(job["device"]), Sizes(**options["sizes"])
    parameters = sizes.states // 12
    planned, most = {tier: float(size * parameters) for tier, size in BYTES.items()}, room(options, job)
    if tiers := over(planned, most):
        raise LeftOut(f"takes {told(planned, tiers)}, and this machine has room for {told(most, tiers)}")
    rows: list[Figures] = []
    weights: dict[str, torch.Tensor] = {}
    for case, sections in CASES.items():
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": optimizer, **sections}
        torch.manual_seed(0)
        with zeromesh.zero.Init():
            model = Mixture(sizes)
        engine, *_ = zeromesh.initialize(model=model, config=config)
        if not weights:
            weights["before"] = weights_of(engine)
        number = 0
        for share in options["shares"]:
            seconds = []
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for _ in range(round(MISSED / share) + options["steps"]):
                hidden, index = (x.to(device) for x in batch(sizes, number, share))
                synchronize(device)
                start = time.perf_counter()
                engine.backward(engine(hidden.bfloat16(), index))
                engine.step()
                synchronize(device)
                seconds.append(time.perf_counter() - start)
                number += 1
            counted = sorted(seconds[-options["steps"] :])
            rows.append({
                "case": case, "share": share, "seconds": median(counted), "least": counted[0], "most": counted[-1],
                "device_peak": peak_bytes(device) if device.type == "cuda" else None,
            })  # fmt: skip
            tell(job, {"rows": rows, "parameters": parameters})
        weights[case] = weights_of(engine)
        engine.destroy()
        del engine, model
        gc.collect()  # modules and hooks refer to each other, and would keep its memory for a while
    start, expected, *others = weights.values()
    moved = float((expected - start).norm())
    differences = dict(zip([*CASES][1:], (float((x - expected).norm()) / moved for x in others), strict=True))
    wrong = [
        f"{case}: weights differ by {difference:.2g} of what was trained, at most {TOLERANCE:g}"
        for case, difference in differences.items()
        if not difference <= TOLERANCE
    ]
    return {"rows": rows, "parameters": parameters, "differences": differences, "wrong": wrong}


def weights_of(engine: Any) -> torch.Tensor:
    """Return weights of all experts of the first layer as the forward has them, in bf16, on the host."""
    parameter = engine.module.blocks[0].experts.down_proj
    with zeromesh.zero.GatheredParameters([parameter]):
        return parameter.detach().bfloat16().float().cpu()
