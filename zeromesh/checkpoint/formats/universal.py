"""DeepSpeed's universal checkpoints: a folder for each parameter, with a file for its value and each of its states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.formats.deepspeed import MODEL, add_frozen, by_rank, read_model_states
from zeromesh.checkpoint.formats.distributed import named_groups
from zeromesh.checkpoint.formats.form import Contents, StoredRange, group_options, tensors, whole
from zeromesh.checkpoint.formats.pickles import read_tensors
from zeromesh.checkpoint.packing import pack

_VERSION = {"ds_version": "0.19.8"}  # whose layout is written

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
    """Write a checkpoint in ``folder`` that DeepSpeed loads at stages 1 and 2 with ``load_universal``.

    Its file of model states holds the model in the dtype of its computation, which is in memory until it is written.
    """
    if not contents.groups:
        raise ValueError(
            f"{contents.source} has no states of an optimizer, without which DeepSpeed loads none; write hf"
        )
    final = folder / f"global_step{contents.progress.get('global_steps', 0)}"
    (final / ZERO).mkdir(parents=True, exist_ok=True)
    groups = [{**group, "params": [number]} for number, group in enumerate(named_groups(contents))]
    module: dict[str, torch.Tensor] = OrderedDict()
    shapes: list[dict[str, torch.Size]] = [OrderedDict() for _ in groups]
    buffers: list[str] = []
    for kind, name, parts in tensors(contents):
        value = whole(parts)
        if kind == "optimizer":
            key, name = name.split("/", 1)
            _save(final, name, key, {"param": value, "cat_dim": 0})
        else:
            module[name] = value.to(contents.dtypes.get(name, value.dtype))
            buffers += [name] if kind == "buffer" else []
            if name in contents.members:
                _save(final, name, VALUE, {"param": value.float(), "cat_dim": 0})
                shapes[contents.members[name]][name] = value.shape
        advance(value.nbytes)
    for name, numbers in contents.numbers.items():
        for key, number in numbers.items():
            _save(final, name, key, torch.as_tensor(number, dtype=torch.float32))
    torch.save({"param_groups": groups, **_VERSION}, final / ZERO / OPTIMIZER)
    frozen = OrderedDict((name, module[name]) for name in module if name not in {*contents.members, *buffers})
    module |= {name: module[own] for name, own in contents.tied.items() if own in module}
    held: dict[str, Any] = {
        **{key: value for key, value in contents.client.items() if _is_plain(value)}, **_VERSION,
        "module": module, "buffer_names": buffers, "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()) or None,
        "frozen_param_fragments": frozen or None, "shared_params": contents.tied,
        "lr_scheduler": dict(contents.scheduler[0]) if contents.scheduler else None,
        "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": [], "dp_world_size": 1,
        "mp_world_size": 1, "ds_config": {}, "universal_checkpoint_info": {},
        **{key: contents.progress.get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")},
    }  # fmt: skip
    torch.save(held, final / f"mp_rank_00_{MODEL}")
    (folder / LATEST).write_text(final.name)
    return final


def _is_plain(value: Any) -> bool:
    try:
        pack(value, apart={})
    except TypeError:
        return False
    return True


def _save(folder: Path, name: str, key: str, value: Any) -> None:
    path = folder / ZERO / name / f"{key}.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path)
