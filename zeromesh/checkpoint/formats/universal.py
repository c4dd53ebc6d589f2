"""DeepSpeed's universal checkpoints: a folder for each parameter, with a file for its value and each of its states."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeromesh.base.files import inside
from zeromesh.checkpoint.formats.deepspeed import MODEL, add_frozen, by_rank, loss_scale, rank_range, read_model_states
from zeromesh.checkpoint.formats.form import Contents, StoredRange, group_options, plain_number, tensors, whole
from zeromesh.checkpoint.formats.pickles import read_tensors
from zeromesh.checkpoint.formats.torch_distributed import named_groups
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
    contents.loss_scale = loss_scale(state.get("loss_scaler"))
    groups = state.get("param_groups") or state["optimizer_state_dict"]["param_groups"]
    contents.groups = [group_options(group) for group in groups]
    owners = {number: place for place, group in enumerate(groups) for number in group["params"]}
    for number, shapes in enumerate(models[0]["param_shapes"]):
        for name, shape in shapes.items():
            contents.members[name] = owners.get(number, 0)
            place = inside(folder / ZERO, name, "a parameter")
            files = sorted(place.glob("*.pt"))
            if not any(file.stem == VALUE for file in files):
                raise ValueError(f"{place} has no {VALUE}.pt; copy the checkpoint again")
            for file in files:
                _add(contents, name, file, shape)
    add_frozen(contents, models)
    return contents


def _add(contents: Contents, name: str, path: Path, shape: torch.Size) -> None:
    content = read_tensors(path)
    value = content["param"] if isinstance(content, dict) else content
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


def write(contents: Contents, folder: Path, advance: Callable[[int], None], ranks: int = 0) -> Path:
    """Write a checkpoint in ``folder`` that DeepSpeed loads with ``load_universal``: at stage 3 on so many ``ranks``.

    Stages 1 and 2 need no number of ranks.
    """
    if not contents.groups:
        raise ValueError(
            f"{contents.source} has no states of an optimizer, without which DeepSpeed loads none; write hf"
        )
    final = folder / f"global_step{contents.progress.get('global_steps', 0)}"
    (final / ZERO).mkdir(parents=True, exist_ok=True)
    groups = [{**group, "params": [number]} for number, group in enumerate(named_groups(contents))]
    shapes: list[dict[str, torch.Size]] = [OrderedDict() for _ in groups]
    buffers: list[str] = []
    # torch.save takes all tensors of a file at once; mapped ones need no memory of the process.
    with TemporaryDirectory(dir=folder) as apart:
        module: dict[str, torch.Tensor] = OrderedDict()
        for kind, name, parts in tensors(contents):
            value = whole(parts)
            if kind == "optimizer":
                key, name = name.split("/", 1)
                _save(final, name, key, {"param": value, "cat_dim": 0})
            else:
                module[name] = _mapped(value.to(contents.dtypes.get(name, value.dtype)), Path(apart) / str(len(module)))
                buffers += [name] if kind == "buffer" else []
                if name in contents.members:
                    _save(final, name, VALUE, {"param": value.float(), "cat_dim": 0})
                    shapes[contents.members[name]][name] = value.shape
            advance(value.nbytes)
        for name, numbers in contents.numbers.items():
            for key, number in numbers.items():
                _save(final, name, key, torch.as_tensor(number, dtype=torch.float32))
        scale = contents.loss_scale
        optimizer_state: dict[str, Any] = {"param_groups": groups, **_VERSION, "dynamic_loss_scale": scale is not None}
        if scale is not None:
            optimizer_state["loss_scaler"] = _Scaler(scale, contents.progress.get("global_steps", 0))
        # At stage 3 the step of the first group is that of all parameters.
        step = torch.tensor(
            float(max((plain_number(n["step"]) for n in contents.numbers.values() if "step" in n), default=0))
        )
        states = {"state": {number: {"step": step} for number in range(len(groups))}, "param_groups": groups}
        optimizer_state |= {"overflow": False, "optimizer_state_dict": states}
        pickled = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
        with (final / ZERO / OPTIMIZER).open("xb") as file:
            torch.save(optimizer_state, file, pickle_module=pickled)
        frozen = OrderedDict((name, module[name]) for name in module if name not in {*contents.members, *buffers})
        module |= {name: module[owner] for name, owner in contents.tied.items() if owner in module} | contents.extra
        model_state: dict[str, Any] = {
            **{key: value for key, value in contents.client.items() if _is_plain(value)}, **_VERSION,
            "module": module, "buffer_names": buffers, "optimizer": None, "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()) or None,
            "frozen_param_fragments": frozen or None, "shared_params": contents.tied,
            "lr_scheduler": dict(contents.scheduler[0]) if contents.scheduler else None,
            "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": [], "dp_world_size": max(1, ranks),
            "mp_world_size": 1, "ds_config": {}, "universal_checkpoint_info": {},
            **{key: contents.progress.get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")},
        }  # fmt: skip
        torch.save(model_state, final / f"mp_rank_00_{MODEL}")
        # At stage 3 a rank has its own file: parameters are empty there, and frozen ones are ranges.
        model_state["module"] = {
            name: t.new_empty(0) if name in {*frozen, *contents.members, *contents.tied} else t
            for name, t in module.items()
        }
        for rank in range(ranks):
            model_state["frozen_param_fragments"] = {
                name: _fragment(t, rank, ranks) for name, t in frozen.items()
            } or None
            torch.save(model_state, final / f"zero_pp_rank_{rank}_mp_rank_00_{MODEL}")
    (folder / LATEST).write_text(final.name)
    return final


def _mapped(value: torch.Tensor, path: Path) -> torch.Tensor:
    """Return a tensor in a file of its own, in the place of one in memory."""
    if not value.numel():
        return value
    mapped = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype)
    return mapped.view(value.shape).copy_(value)


def _fragment(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    start, count, padded = rank_range(value.shape, rank, ranks)
    return nn.functional.pad(value.flatten()[start : start + count], (0, padded - count)).clone()


class _Scaler:
    """State of DeepSpeed's dynamic loss scale, which its files hold as an object."""

    def __init__(self, scale: dict[str, Any], steps: int) -> None:
        good = scale["good_steps"]
        steps = max(steps, good)
        self.cur_scale, self.cur_hysteresis, self.cur_iter = scale["scale"], scale["hysteresis"], steps
        self.last_overflow_iter, self.scale_window = steps - good - 1, scale.get("window", 1000)
        self.min_scale, self.delayed_shift = scale.get("minimum", 1), scale["hysteresis"]
        self.dynamic, self.scale_factor, self.dtype = True, 2.0, torch.float16
        self.consecutive_hysteresis, self.raise_error_at_min_scale = False, True


_Base: Any = pickle._Pickler  # the one in C writes no name that it cannot import


class _Pickler(_Base):  # type: ignore[misc]
    """Pickler that gives ``_Scaler`` the name of DeepSpeed's class, which need not be installed."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write the name of a class or a function."""
        if obj is not _Scaler:
            super().save_global(obj, name)
            return
        self.write(pickle.GLOBAL + b"deepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n")
        self.memoize(obj)


def _is_plain(value: Any) -> bool:
    try:
        pack(value, apart={})
    except (TypeError, RecursionError):
        return False
    return True


def _save(folder: Path, name: str, key: str, value: Any) -> None:
    path = inside(inside(folder / ZERO, name, "a parameter"), f"{key}.pt", "a state")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:  # no two tensors have one file
        torch.save(value, file)
