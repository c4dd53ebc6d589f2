"""DeepSpeed's universal checkpoints: a folder for each parameter, with a file for its value and each of its states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.formats.deepspeed import MODEL, add_frozen, by_rank, read_model_states
from zeromesh.checkpoint.formats.distributed import named_groups
from zeromesh.checkpoint.formats.form import Contents, StoredRange, group_options, tensors, whole
from zeromesh.checkpoint.formats.pickles import read_tensors

ZERO, OPTIMIZER, VALUE, LATEST = "zero", "optimizer_state.pt", "fp32", "latest_universal"


def read(folder: Path) -> Contents:
    """Return the contents of a universal checkpoint."""
    models = [read_tensors(path) for path in by_rank(folder, MODEL)]
    contents = Contents("a DeepSpeed universal checkpoint")
    read_model_states(contents, models[0], {})
    path = folder / ZERO / OPTIMIZER
    state = read_tensors(path)
    groups = state.get("param_groups") or state["optimizer_state_dict"]["param_groups"]
    contents.groups = [group_options(group) for group in groups]
    owners = {number: place for place, group in enumerate(groups) for number in group["params"]}
    for number, shapes in enumerate(models[0]["param_shapes"]):
        for name, shape in shapes.items():
            contents.members[name] = owners.get(number, 0)
            found = sorted((folder / ZERO / name).glob("*.pt"))
            if not any(file.stem == VALUE for file in found):
                raise ValueError(f"{folder / ZERO / name} has no {VALUE}.pt; copy the checkpoint again")
            for file in found:
                _add(contents, name, file, shape)
    add_frozen(contents, models)
    return contents


def _add(contents: Contents, name: str, path: Path, shape: torch.Size) -> None:
    held = read_tensors(path)
    value = held["param"] if isinstance(held, dict) else held
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        contents.add_state(name, path.stem, value)
        return
    # A vocabulary that was padded for tensor parallelism has more rows than the parameter.
    if value.numel() < prod(shape):
        raise ValueError(f"{path} has {value.numel()} elements of {prod(shape)}; copy the checkpoint again")
    full = f"parameter/{name}" if path.stem == VALUE else f"optimizer/{path.stem}/{name}"
    data = value.reshape(-1)[: prod(shape)]
    if data.numel():
        contents.parts.append(StoredRange(full, tuple(shape), value.dtype, 0, data.numel(), lambda: data))


def write(contents: Contents, folder: Path, advance: Callable[[int], None]) -> Path:
    """Write a checkpoint in ``folder`` that DeepSpeed loads from there with ``load_universal``."""
    final = folder / f"global_step{contents.progress.get('global_steps', 0)}"
    (final / ZERO).mkdir(parents=True, exist_ok=True)
    module: dict[str, torch.Tensor] = OrderedDict()
    shapes: list[dict[str, torch.Size]] = [OrderedDict() for _ in contents.groups] or [OrderedDict()]
    buffers: list[str] = []
    for kind, name, parts in tensors(contents):
        read = partial(whole, parts)
        if kind == "optimizer":
            key, name = name.split("/", 1)
            _save(final, name, key, {"param": read(), "cat_dim": 0})
        elif kind == "parameter" and name not in contents.frozen:
            value = read()
            _save(final, name, VALUE, {"param": value.float(), "cat_dim": 0})
            shapes[contents.members.get(name, 0)][name] = value.shape
            module[name] = value.to(contents.dtypes.get(name, value.dtype))
        else:
            module[name] = read().to(contents.dtypes.get(name, parts[0].dtype))
            buffers += [name] if kind == "buffer" else []
        advance(sum(part.stop - part.start for part in parts) * parts[0].dtype.itemsize)
    for name, numbers in contents.numbers.items():
        for key, value in numbers.items():
            _save(final, name, key, torch.as_tensor(value, dtype=torch.float32))
    module |= {name: module[own] for name, own in contents.tied.items() if own in module}
    groups = [{**group, "params": [number]} for number, group in enumerate(named_groups(contents))]
    state = {"param_groups": groups, "ds_version": "0.16.0", "zero_stage": 1}  # fmt: skip
    torch.save(state, final / ZERO / OPTIMIZER)
    frozen = OrderedDict((name, module[name]) for name in module if name in contents.frozen)
    scheduler = dict(contents.scheduler[0]) if contents.scheduler else None
    progress = {key: contents.progress.get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")}
    torch.save(
        {
            "module": module, "buffer_names": buffers, "optimizer": None, "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()) or None,
            "frozen_param_fragments": frozen or None, "shared_params": contents.tied, "lr_scheduler": scheduler,
            "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": [], "dp_world_size": 1,
            "mp_world_size": 1, "ds_config": {}, "ds_version": "0.16.0", "universal_checkpoint_info": {}, **progress,
            **contents.client,
        },
        final / f"mp_rank_00_{MODEL}",
    )  # fmt: skip
    (folder / LATEST).write_text(final.name)
    return final


def _save(folder: Path, name: str, key: str, value: Any) -> None:
    path = folder / ZERO / name / f"{key}.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path)
