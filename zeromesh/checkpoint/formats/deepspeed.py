"""Checkpoints that DeepSpeed writes: flat groups of fp32 values, cut into one range per rank; at stage 0 none are.

Universal ones have a folder for each parameter, with a file for its value and each of its states.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeromesh.base.files import inside
from zeromesh.checkpoint.boxes import Box
from zeromesh.checkpoint.contents import plain_numbers
from zeromesh.checkpoint.formats.form import Contents, group_options, tensors, whole
from zeromesh.checkpoint.formats.lightning_checkpoints import IsTrained, add_numbered, shared_names
from zeromesh.checkpoint.formats.pickles import Inert, read_tensors
from zeromesh.checkpoint.formats.torch_distributed import named_groups
from zeromesh.checkpoint.packing import pack

MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"

_VERSION = {"ds_version": "0.19.8"}  # whose layout is written

ZERO, SHARED, VALUE, LATEST = "zero", "optimizer_state.pt", "fp32", "latest_universal"

_OTHER_AXES = re.compile(r"mp_rank_(?!00)\d+|^layer_|expp?_rank|_expert_")

# Keys of DeepSpeed's own in the file of model states; all others are the user's client state.
_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "universal_checkpoint_info", "num_experts", "autoep_layers", "checkpoint_parallel_dimensions",
})  # fmt: skip


def read(folder: Path, is_trained: IsTrained = bool) -> Contents:
    """Return the contents of a checkpoint of any stage."""
    if strange := next((path.name for path in sorted(folder.glob("*.pt")) if _OTHER_AXES.search(path.name)), None):
        raise ValueError(
            f"{folder} has {strange}, of tensor, pipeline or expert parallelism: run DeepSpeed's ds_to_universal.py on "
            "it first, and convert what that writes"
        )
    if not any(folder.glob(f"*{OPTIMIZER}")):
        return _read_stage_0(_by_rank(folder, MODEL)[0], is_trained)
    states = [read_tensors(path) for path in _by_rank(folder, OPTIMIZER)]
    optimizer = [state["optimizer_state_dict"] for state in states]
    stage = int(optimizer[0].get("zero_stage", 0))
    models = [read_tensors(path) for path in _by_rank(folder, MODEL)]
    _require_all(folder, optimizer, models)
    contents = Contents(f"a DeepSpeed ZeRO-{stage} checkpoint")
    _read_model_states(contents, models[0], states[0].get("ds_config", {}))
    contents.loss_scale = _loss_scale(optimizer[0].get("loss_scaler"))
    base = optimizer[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    contents.groups = [group_options(group) for group in base["param_groups"]]
    if stage == 3:
        _read_stage_3(contents, models, optimizer)
    else:
        if "param_slice_mappings" not in optimizer[0] and (
            states[0].get("ds_config", {}).get("zero_optimization", {}).get("round_robin_gradients")
        ):
            raise ValueError(
                f"{folder} was written with round_robin_gradients and has no param_slice_mappings, so that nothing "
                "says where parameters lie; load it with a DeepSpeed that writes them, save it again, and convert that"
            )
        _read_stage_1(contents, models[0], optimizer)
    _add_frozen(contents, models)
    return contents


def _by_rank(folder: Path, ending: str) -> list[Path]:
    """Return the files of all ranks in their order."""
    paths = list(folder.glob(f"*{ending}"))
    if not paths:
        raise ValueError(f"{folder} has no file that ends in {ending}; copy the checkpoint again")
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _require_all(folder: Path, optimizer: list[Any], models: list[Any]) -> None:
    counts = optimizer[0]["partition_count"]
    wanted = max(counts) if isinstance(counts, list) else counts
    if len(optimizer) != wanted:
        raise ValueError(f"{folder} has {OPTIMIZER} of {len(optimizer)} of {wanted} ranks; copy the others, too")
    states = [state.get("base_optimizer_state") or state["optimizer_state_dict"] for state in optimizer]
    steps = [float(state["state"][0]["step"]) for state in states if "step" in state["state"].get(0, ())]
    for what, numbers in (("updates", [model["global_steps"] for model in models]), ("steps of the optimizer", steps)):
        if len(set(numbers)) > 1:
            raise ValueError(
                f"{folder} mixes files of several checkpoints: the {what} by rank are {', '.join(map(str, numbers))}; "
                "copy all files of one of them"
            )


def _read_stage_0(path: Path, is_trained: IsTrained) -> Contents:
    """Return the contents of the file of stage 0, whose optimizer is torch's own or one around it for 16 bits."""
    model, contents = read_tensors(path), Contents("a DeepSpeed checkpoint without ZeRO")
    model["module"] = contents.take_extra(model["module"])
    optimizer = model["optimizer"]
    if optimizer is None or "fp32_groups_flat" in optimizer:
        raise ValueError(
            f"{path} has {'no states of an optimizer' if optimizer is None else 'fp32_groups_flat, without names'}, "
            f"and no file beside it ends in {OPTIMIZER}; copy those, or load it in DeepSpeed and save it with ZeRO"
        )
    module, buffers = model["module"], model.get("buffer_names") or ()
    contents.take(tied=shared_names(module), loss_scale=_loss_scale(optimizer))
    state = {name: value for name, value in module.items() if name not in {*buffers, *contents.tied}}
    masters = [value for group in optimizer.get("fp32_groups", ()) for value in group]
    values = add_numbered(contents, state, optimizer.get("optimizer_state_dict", optimizer), is_trained, masters)
    for name in contents.members:
        contents.add(f"parameter/{name}", values.get(name, state[name]))
    _read_model_states(contents, model, model.get("ds_config") or {})
    _add_frozen(contents, [model])
    return contents


def _read_model_states(contents: Contents, model: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Take what all kinds of DeepSpeed's checkpoints keep beside the tensors that are sharded."""
    module: Mapping[str, torch.Tensor] = contents.take_extra(model["module"])
    # Stage 0 writes neither; there they are known already.
    tied = {name: owner for name, owner in (model.get("shared_params") or contents.tied).items() if name != owner}
    shapes = [contents.members] if model["param_shapes"] is None else model["param_shapes"]
    buffers = set(model.get("buffer_names") or ())
    for name in sorted(buffers & module.keys()):
        contents.add(f"buffer/{name}", module[name])
    trained = {name for names in shapes for name in names}
    frozen = set(module) - trained - buffers - tied.keys()
    contents.take(
        tied=tied,
        frozen=frozen,
        dtypes={name: value.dtype for name, value in module.items() if name in trained | frozen},
        progress={key: int(model.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps")},
        client={key: value for key, value in model.items() if key not in _OWN},
    )
    if model.get("lr_scheduler"):
        contents.take(scheduler=(model["lr_scheduler"], (config.get("scheduler") or {}).get("type")))


def _loss_scale(scaler: Any) -> dict[str, Any] | None:
    """Return the state of a dynamic loss scale; None for any other."""
    fields = scaler.fields if isinstance(scaler, Inert) else scaler
    if not isinstance(fields, dict) or not (fields.get("dynamic") or fields.get("dynamic_loss_scale")):
        return None
    good = fields["cur_iter"] - fields["last_overflow_iter"] - 1
    state = {"scale": fields["cur_scale"], "hysteresis": fields.get("cur_hysteresis", 1), "good_steps": max(0, good)}
    return state | {"window": fields["scale_window"], "minimum": fields.get("min_scale", 1)}


def _read_stage_1(contents: Contents, model: Mapping[str, Any], optimizer: list[Any]) -> None:
    """Take the groups of stages 1 and 2, each one buffer of whole parameters that is cut without regard to them."""
    for number, shapes in enumerate(model["param_shapes"]):
        done: dict[str, int] = dict.fromkeys(shapes, 0)
        for rank, state in enumerate(optimizer):
            # A fragment lies at its start within the rank's range, and in the parameter behind the ranks before.
            for name, start, count in _fragments(optimizer, rank, number, shapes):
                values = {
                    "parameter": state["single_partition_of_fp32_groups"][number],
                    **state["base_optimizer_state"]["state"][number],
                }
                _add_range(contents, name, shapes[name], done[name], count, values, start)
                done[name] += count
        contents.members.update(dict.fromkeys(shapes, number))


def _fragments(
    optimizer: list[Any], rank: int, number: int, shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the start and the number of elements of each piece of a parameter in a rank's range."""
    if "param_slice_mappings" in optimizer[rank]:
        for name, address in optimizer[rank]["param_slice_mappings"][number].items():
            yield name, address.fields["start"], address.fields["numel"]
        return
    # Older versions leave it to the reader: parameters in their order, in ranges as long as that of the first rank,
    # which alone is never padded unless it holds all.
    size, at = optimizer[0]["single_partition_of_fp32_groups"][number].numel(), 0
    for name, shape in shapes.items():
        low, high = max(at, rank * size), min(at + prod(shape), (rank + 1) * size)
        if low < high:
            yield name, low - rank * size, high - low
        at += prod(shape)


def _read_stage_3(contents: Contents, models: list[Any], optimizer: list[Any]) -> None:
    """Take the groups of stage 3, in which each parameter is cut into equal ranges, the last one padded."""
    ranks = len(optimizer)
    owners = {
        sub: number
        for number, group in enumerate(optimizer[0]["optimizer_state_dict"]["param_groups"])
        for sub in group["params"]
    }
    for rank, state in enumerate(optimizer):
        for number, shapes in enumerate(models[0]["param_shapes"]):
            at = 0
            for name, shape in shapes.items():
                start, count, padded = _rank_range(shape, rank, ranks)
                values = {
                    "parameter": state["fp32_flat_groups"][number],
                    **state["optimizer_state_dict"]["state"][number],
                }
                _add_range(contents, name, shape, start, count, values, at)
                at += padded
                contents.members[name] = owners[number]


def _add_frozen(contents: Contents, models: list[Any]) -> None:
    """Take the parameters that are not trained: whole ones of stages 1 and 2, and ranges of all ranks of stage 3."""
    for name in sorted(contents.frozen):
        fragments = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        if models[0]["module"][name].numel() or fragments[0] is None:
            contents.add(f"parameter/{name}", models[0]["module"][name])
            continue
        shape = models[0]["frozen_param_shapes"][name]
        for rank, fragment in enumerate(fragments):
            start, count, _ = _rank_range(shape, rank, len(models))
            _add_range(contents, name, shape, start, count, {"parameter": fragment}, 0)


def _rank_range(shape: torch.Size, rank: int, ranks: int) -> tuple[int, int, int]:
    """Return the start and the number of a rank's elements of a parameter, and their number with padding."""
    size = prod(shape)
    padded = -(-size // ranks)
    start = min(rank * padded, size)
    return start, min(padded, size - start), padded


def _add_range(
    contents: Contents, name: str, shape: torch.Size, first: int, count: int, values: Mapping[str, Any], at: int
) -> None:
    """Add elements ``[first, first + count)`` of a parameter and its states, which lie at ``at`` in the values."""
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            contents.add_state(name, key, value)
        elif count:
            full = f"parameter/{name}" if key == "parameter" else f"optimizer/{key}/{name}"
            if value.numel() < at + count:
                raise ValueError(f"{full} ends behind its group's {value.numel()} elements; copy the checkpoint again")
            data = value.narrow(0, at, count)
            contents.parts.append(Box(full, tuple(shape), value.dtype, first, first + count, data.detach))


def read_universal(folder: Path) -> Contents:
    """Return the contents of a universal checkpoint."""
    models = [read_tensors(path) for path in _by_rank(folder, MODEL)]
    contents = Contents("a DeepSpeed universal checkpoint")
    _read_model_states(contents, models[0], {})
    path = folder / ZERO / SHARED
    state = read_tensors(path)
    contents.loss_scale = _loss_scale(state.get("loss_scaler"))
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
    _add_frozen(contents, models)
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
        contents.parts.append(Box(full, tuple(shape), value.dtype, 0, data.numel(), lambda: data))


def write(contents: Contents, folder: Path, advance: Callable[[int], None], ranks: int = 0) -> Path:
    """Write a universal checkpoint in ``folder``, which DeepSpeed loads with ``load_universal``.

    It loads at stage 3 on so many ``ranks``; stages 1 and 2 need no number of them.
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
            float(max((plain_numbers(n["step"]) for n in contents.numbers.values() if "step" in n), default=0))
        )
        states = {"state": {number: {"step": step} for number in range(len(groups))}, "param_groups": groups}
        optimizer_state |= {"overflow": False, "optimizer_state_dict": states}
        pickled = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
        with (final / ZERO / SHARED).open("xb") as file:
            torch.save(optimizer_state, file, pickle_module=pickled)
        frozen = OrderedDict((name, module[name]) for name in module if name not in {*contents.members, *buffers})
        module |= {name: module[owner] for name, owner in contents.tied.items() if owner in module} | contents.extra
        model_state: dict[str, Any] = {
            **{key: value for key, value in contents.client.items() if _is_plain(value)},
            **_VERSION,
            "module": module,
            "buffer_names": buffers,
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()) or None,
            "frozen_param_fragments": frozen or None,
            "shared_params": contents.tied,
            "lr_scheduler": dict(contents.scheduler[0]) if contents.scheduler else None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": [],
            "dp_world_size": max(1, ranks),
            "mp_world_size": 1,
            "ds_config": {},
            "universal_checkpoint_info": {},
            **{key: contents.progress.get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")},
        }
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
    start, count, padded = _rank_range(value.shape, rank, ranks)
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
