"""Ranks of the real DeepSpeed: train, save, and resume from a universal checkpoint. Run by its own environment.

``deepspeed_writer.py STAGE PRECISION FOLDER [UNIVERSAL]`` under torchrun, on two CPU ranks. It saves into FOLDER
after four updates, with what DeepSpeed holds then in ``held.pt``, and after six in ``end.pt``. With UNIVERSAL it loads
that instead of the first four updates. PRECISION may end in ``-one``, for one parameter group.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from foreign_checkpoints import STATES, Small, groups, tokens

os.environ["DS_ACCELERATOR"] = "cpu"


def held(engine: Any, stage: int) -> dict[str, Any]:
    """Return the fp32 masters and states by name, from DeepSpeed's memory. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {}
    names = {id(p): name for name, p in engine.module.named_parameters()}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p]):
                found[f"parameter/{name}"] = p.detach().clone()
        elif stage == 3:
            found[f"parameter/{name}"] = safe_get_full_fp32_param(p).clone()
            found |= {f"optimizer/{key}/{name}": safe_get_full_optimizer_state(p, key).clone() for key in STATES}
    optimizer = engine.optimizer
    if stage == 0:
        masters = [p for group in getattr(optimizer, "fp32_groups", ()) for p in group]
        trained = [p for group in groups(engine.module) for p in group["params"]]
        for p, master in zip(trained, masters or trained, strict=True):
            state = getattr(optimizer, "optimizer", optimizer).state[master]
            found[f"parameter/{names[id(p)]}"] = master.detach().clone()
            found |= {f"optimizer/{key}/{names[id(p)]}": state[key].clone() for key in STATES}
    # Its own functions fail where a parameter lies on one rank alone, so that the groups are gathered by hand.
    for number, flat in enumerate(optimizer.single_partition_of_fp32_groups if 0 < stage < 3 else ()):
        state = optimizer.optimizer.state[flat]
        for kind, value in {"parameter": flat.detach(), **{f"optimizer/{key}": state[key] for key in STATES}}.items():
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value.contiguous())
            whole, at = torch.cat(parts), 0
            for p in optimizer.round_robin_bit16_groups[number]:
                found[f"{kind}/{names[id(p)]}"] = whole[at : at + p.numel()].view(p.shape).clone()
                at += p.numel()
    scaler = optimizer.state_dict() if stage == 0 else vars(optimizer.loss_scaler)
    scale = {key: scaler.get(key, 0) for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")}
    return found | {"steps": engine.global_steps, "rates": engine.get_lr(), "scale": scale}


def main(stage: int, precision: str, folder: Path, universal: str | None) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    torch.manual_seed(5)
    precision, _, one_group = precision.partition("-")
    model = Small()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage} | ({"sub_group_size": 60} if stage == 3 else {}),
        "gradient_clipping": 0.0,  # it clips at 1 unless it is told otherwise
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        "checkpoint": {"load_universal": universal is not None},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        # Updates overflow until the scale fits; its CPU accelerator says that it has no fp16, but it computes in it.
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 3, "hysteresis": 2}
        kind = type(get_accelerator())
        kind.is_fp16_supported = lambda _: True
        kind.supported_dtypes = lambda _: [torch.float32, torch.bfloat16, torch.float16]
    made = groups(model)
    if one_group:
        config["zero_optimization"].pop("sub_group_size", None)
        made = [{"params": [p for group in made for p in group["params"]], "weight_decay": 0.1}]
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(made, lr=0.01), config=config)[0]

    def train(updates: range) -> None:
        for number in updates:
            engine.backward(engine(tokens(number)))
            engine.step()

    def write(name: str) -> None:
        found = held(engine, stage)
        if dist.get_rank() == 0:
            torch.save(found, folder / name)

    folder.mkdir(exist_ok=True)
    if universal is None:
        train(range(4))
        engine.save_checkpoint(str(folder), client_state={"best": 0.5})
    else:
        engine.load_checkpoint(universal)
    write("held.pt")
    train(range(4, 6))
    write("end.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
