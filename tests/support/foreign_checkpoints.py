"""Small checkpoints in the layouts of other libraries, written by plain torch from one model and its optimizer.

The layouts are those of DeepSpeed 0.19.8 and Megatron-Core 0.16, as files written by these libraries show them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

STATES = ("exp_avg", "exp_avg_sq")


class Small(nn.Module):
    """Model with a tied, a frozen and an odd parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.one = nn.Linear(7, 5)
        self.two = nn.Linear(5, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((7,), 1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens)) * self.scale.to(self.one.weight.dtype)
        logits = self.head(self.two(torch.tanh(self.one(x)))).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def trained_model(kind: type[nn.Module] = Small, single: bool = False) -> tuple[Any, torch.optim.AdamW]:
    """Return a model after three updates by AdamW, and its optimizer."""
    torch.manual_seed(5)
    model = kind()
    made = [{"params": list(model.parameters())}] if single else groups(model)
    optimizer = torch.optim.AdamW(made, lr=0.01)
    step(model, optimizer, 3)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, updates: int, first: int = 0) -> None:
    for number in range(first, first + updates):
        model(tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(number))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Values and states, by their names in our checkpoints."""
    found = {f"parameter/{name}": p.detach().clone() for name, p in model.named_parameters()}
    found |= {f"buffer/{name}": buffer.clone() for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        found |= {f"optimizer/{key}/{name}": optimizer.state[p][key].clone() for key in STATES if p in optimizer.state}
    return found


class LossScaler:
    """Stand-in for DeepSpeed's class of this name, so that files hold one that is not plain."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"

    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class fragment_address:
    """Stand-in for DeepSpeed's class of this name."""

    __module__ = "deepspeed.utils.tensor_fragment"

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


def write_zero(folder: Path, stage: int, ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write ``folder/global_step3`` as DeepSpeed's ZeRO stages do, and ``folder/latest``."""
    path = folder / "global_step3"
    path.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    names = {id(p): name for name, p in model.named_parameters()}
    frozen = OrderedDict((name, p.detach()) for name, p in model.named_parameters() if not p.requires_grad)
    shapes = [OrderedDict((names[id(p)], p.shape) for p in group["params"]) for group in optimizer.param_groups]
    module = OrderedDict((name, value.detach()) for name, value in model.state_dict().items())
    common = {
        "buffer_names": ["scale"], "optimizer": None, "param_shapes": shapes,
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": {"last_batch_iteration": 2}, "skipped_steps": 0, "global_steps": 3, "global_samples": 12,
        "dp_world_size": ranks, "ds_version": "0.19.8", "best": 0.5,
    }  # fmt: skip
    config = {"scheduler": {"type": "WarmupLR", "params": {}}}
    steps = next(iter(optimizer.state.values()))["step"]
    if stage == 0:
        more = {"module": module, "optimizer": optimizer.state_dict(), "param_shapes": None, "shared_params": None}
        torch.save({**common, **more, "ds_config": config}, path / "mp_rank_00_model_states.pt")
        return
    for rank in range(ranks):
        flats = [_flat(group["params"], optimizer, rank, ranks, stage) for group in optimizer.param_groups]
        own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        base = {
            "state": {
                number: {"step": steps, **{key: flat[key] for key in STATES}} for number, (flat, _) in enumerate(flats)
            },
            "param_groups": [{**group, "params": [number]} for number, group in enumerate(own)],
        }
        state: dict[str, Any] = {"zero_stage": stage, "loss_scaler": LossScaler(), "partition_count": ranks}
        if stage == 3:
            state |= {"optimizer_state_dict": base, "fp32_flat_groups": [flat["value"] for flat, _ in flats]}
            fragments = OrderedDict((name, _cut(value, rank, ranks)[0]) for name, value in frozen.items())
            held = {name: value if name == "scale" else value.new_empty(0) for name, value in module.items()}
            more = {"module": held, "frozen_param_shapes": {name: v.shape for name, v in frozen.items()}}
            _save({**common, **more, "frozen_param_fragments": fragments},
                  path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")  # fmt: skip
        else:
            # In a file the last range ends without its padding; the states keep it.
            state |= {
                "base_optimizer_state": base,
                "partition_count": [ranks] * len(flats),
                "single_partition_of_fp32_groups": [flat["value"][: flat["used"]] for flat, _ in flats],
                "param_slice_mappings": [
                    OrderedDict((names[key], fragment_address(*place)) for key, place in places.items())
                    for _, places in flats
                ],
            }
        prefix = "bf16_" if stage == 2 else ""
        saved = {"optimizer_state_dict": state, "ds_config": config, "ds_version": "0.19.8"}
        _save(saved, path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        _save({**common, "module": module}, path / "mp_rank_00_model_states.pt")


def _flat(parameters: list[Any], optimizer: Any, rank: int, ranks: int, stage: int) -> tuple[dict[str, Any], Any]:
    """Return a rank's range of a group's values and states; at stage 3 it is a range of each parameter, else of all."""
    values = {"value": [p.detach() for p in parameters]}
    values |= {key: [optimizer.state[p][key] for p in parameters] for key in STATES}
    if stage == 3:
        return {key: torch.cat([_cut(v, rank, ranks)[0] for v in vs]) for key, vs in values.items()}, {}
    found: dict[str, Any] = {}
    for key, tensors in values.items():
        found[key], found["used"] = _cut(torch.cat([v.flatten() for v in tensors]), rank, ranks)
    size, at, places = found["value"].numel(), 0, OrderedDict()
    for p in parameters:
        low, high = max(at, rank * size), min(at + p.numel(), (rank + 1) * size)
        if low < high:
            places[id(p)] = (high - low, low - rank * size)
        at += p.numel()
    return found, places


def _cut(value: torch.Tensor, rank: int, ranks: int) -> tuple[torch.Tensor, int]:
    """Return a rank's range of a flattened tensor, padded to the length of all, and its length without padding."""
    size = -(-value.numel() // ranks)
    part = value.flatten()[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_full((size - part.numel(),), float("nan"))]), part.numel()


def _save(value: Any, path: Path) -> None:
    # Pickle asks the modules that it names for the class.
    kinds = (LossScaler, fragment_address)
    packages = {name for kind in kinds for name in _packages(kind.__module__)}
    added = sorted(packages - sys.modules.keys())
    for name in added:
        sys.modules[name] = ModuleType(name)
    try:
        for kind in kinds:
            setattr(sys.modules[kind.__module__], kind.__name__, kind)
        torch.save(value, path)
    finally:
        for name in added:
            del sys.modules[name]


def _packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def write_universal(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a universal checkpoint: the files that ZeRO-2 of one rank would become."""
    write_zero(folder, 2, 1, model, optimizer)
    path = folder / "global_step3"
    next(path.glob("*optim_states.pt")).unlink()
    (folder / "latest").rename(folder / "latest_universal")
    for name, p in model.named_parameters():
        if p in optimizer.state:
            (path / "zero" / name).mkdir(parents=True)
            for key, value in {"fp32": p.detach(), **{key: optimizer.state[p][key] for key in STATES}}.items():
                torch.save({"param": value, "cat_dim": 0}, path / "zero" / name / f"{key}.pt")
            torch.save(torch.tensor(3.0), path / "zero" / name / "step.pt")
    own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    torch.save(
        {"param_groups": [{**group, "params": [number]} for number, group in enumerate(own)], "zero_stage": 2},
        path / "zero" / "optimizer_state.pt",
    )


def write_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, flatten: bool = False) -> None:
    """Write a distributed checkpoint with torch's own functions, as its tutorials do."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state, states = get_state_dict(model, optimizer, options=options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.last_epoch = 3
    held = {"model": state, "optim": states, "step": 3, "lr_scheduler": scheduler.state_dict()}
    dcp.save(held, checkpoint_id=folder, no_dist=True)


def write_lightning(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a .ckpt file as Lightning's Trainer does."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.save(
        {
            "epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {}},
            "state_dict": OrderedDict((f"net.{name}", value) for name, value in model.state_dict().items()),
            "callbacks": {}, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()],
        },
        path,
    )  # fmt: skip


def write_megatron(folder: Path, layers: torch.Tensor) -> None:
    """Write a checkpoint in the format torch_dist whose one weight holds all layers."""
    tensors = {
        "decoder.layers.mlp.weight": layers.bfloat16(),
        "optimizer.state.fp32_param.decoder.layers.mlp.weight": layers,
        "optimizer.state.exp_avg.decoder.layers.mlp.weight": layers + 1,
    }
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": []}
    torch.save({"iteration": 7, "optimizer": {"optimizer": {"param_groups": [group]}}}, folder / "common.pt")
